"""Learning how to train while training: after each step, how should the last one have been taken?"""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from metafop import tree, validation
from metafop.hypergradients import closed_form
from metafop.hypergradients.checks.leaves import look_at_leaves
from metafop.learned import Learned
from metafop.log import logger
from metafop.online_carry import OnlineCarry, moving, nothing_seen, staying, zero_gradient_unless
from metafop.optimizers import completed
from metafop.protocols import CompleteOptimizer, Domain, Domains, Optimizer, Trains
from metafop.safeguards import Bound, Guard, scale_free
from metafop.training import Training
from metafop.twice_differentiable import TwiceDifferentiable
from metafop.types import Batch, Given, Info, Last, Loss, Meta, Params, Seen, Tree
from metafop.validation_loss import ValidationLoss, split

Order = Literal["exact", "paper"]
Credit = Literal["velocity", "gradient"]
Hypergradient = Callable[[Trains, Meta, Last, Params], Meta]


@dataclass(frozen=True)
class Online:
    """Learns the parts of `meta` that `learn` names, by hypergradient, one step at a time.

    H = ∂⟨∇J(θ), advance(meta, last)⟩ / ∂meta,    meta' = meta_optimizer(meta, H),    θ' = advance(meta', θ)

    Learning rates move as log lr, momentum as its logit, matrices as they are, a leaf of the loss in the
    coordinate of its domain. For such a leaf, `pullback` takes the one second derivative that it needs; for
    all else it takes none. J is the loss of training, or another (`validation`): what a loss is given is
    learned by another loss than itself, such as that of clean data. A step that leads to numbers
    that are not finite is not taken, nor is anything learned from it: info says so ("finite"). It is itself a
    training, whose meta is Meta(hyper of the meta-optimizer, {}): it can be learned by another.
    (docs/math.md, 9 to 11; why the defaults are what they are: docs/concepts.md)

    training: what is learned, a `Training` or an `Online`.
    meta_optimizer: moves meta; any optimizer of the library, or one of your own.
    learn: names of leaves of meta, or the starts of some: "lr", "precond", "precond.conv1.weight",
        "loss.weights" (("precond",), as for `optim.FOP`).
    order: "exact" advances with meta', of which H is then the derivative at the next step; "paper", Algorithm
        1 of the paper, with meta, so that H is taken at another meta than the one that made θ ("exact").
    credit: what P is credited with: "velocity", all that the optimizer's movement is made of; or "gradient",
        the last gradient alone, as in the paper ("velocity").
    hypergradient: `closed_form` or `by_autograd`, of `metafop.hypergradients`; the latter with "gradient"
        credit (`closed_form`).
    guards: what is done to H before it is used, from `metafop.safeguards` ((`scale_free`,)).
    bounds: what is done to meta' after, likewise (none).
    null_step: takes the last step again, with what was learned from it, whenever the loss rose, and with half
        the gradient if the loss is not even finite (False). It means something only if every batch is the
        same, and needs a guard: what a rejected step teaches without one grows with how far it went.
    skip: checks to leave out: ("carry",) looks no more whether a step led to finite numbers (none).
    validation: J, a loss of its own: `loss(params, buffers, batch) -> (value, buffers)`, as `functional`
        makes one. Each batch is then a pair, (batch, batch of this loss) (None, the loss of training).

    >>> loss = metafop.functional.plain(lambda params, batch: (params["w"] * batch).square().sum())
    >>> training, params = Training(loss, SGD(), {"w": Dense()}), {"w": torch.ones(2)}
    >>> meta, carry = training.init_meta(params, lr=0.01), training.init(params)
    >>> online = Online(training, Adam())
    >>> outer_meta, state = online.init_meta(meta, lr=0.1), online.init(meta, carry)
    >>> for _ in range(10):
    ...     state, info = online.step(outer_meta, state, torch.tensor([1.0, 3.0]))
    >>> bool(state.meta.precond["w"].trace() > 2)
    True
    """

    training: Trains
    meta_optimizer: Optimizer
    learn: tuple[str, ...] = ("precond",)
    order: Order = "exact"
    credit: Credit = "velocity"
    hypergradient: Hypergradient = closed_form
    guards: tuple[Guard, ...] = (scale_free,)
    bounds: tuple[Bound, ...] = ()
    null_step: bool = False
    skip: tuple[Literal["carry"], ...] = ()
    validation: Loss | None = None
    _rule: CompleteOptimizer = field(init=False, repr=False, compare=False)  # the meta-optimizer, completed

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rule", completed("Online", self.meta_optimizer))
        if not isinstance(self.skip, tuple) or not set(self.skip) <= {"carry"}:
            raise ValueError(
                f'Online can skip the check "carry", got skip={self.skip!r}. Pass ("carry",) or ().'
            )
        for name, value, options in (
            ("order", self.order, get_args(Order)),
            ("credit", self.credit, get_args(Credit)),
        ):
            if value not in options:
                raise ValueError(f"Online takes {name} as one of {options}, got {value!r}. Pass one of them.")
        if not isinstance(self.guards, tuple):
            raise TypeError(f"Online takes a tuple of guards, got {self.guards!r}. Pass guards=(...,).")
        self.learned.check()
        if self._validation and isinstance(self.training, Online):
            raise ValueError(
                "Online got a validation loss above another Online, whose levels all learn by the same one. "
                "Give it to the lowest Online."
            )
        if isinstance(self.training, Online) and self.training.order == "paper":
            raise ValueError(
                'Online cannot learn an Online of order="paper", whose step does not depend on its own meta '
                'until the next. Use order="exact" below.'
            )

    @property
    def domains(self) -> Domains:
        return self._rule.domains

    @property
    def loss_domains(self) -> dict[str, Domain]:
        """Those of the outer meta, which has no leaves of a loss: none."""
        return {}

    def init_meta(self, meta: Meta, **hyper: Any) -> Meta:
        """Return the outer meta: the meta-optimizer's hyperparameters.

        meta: what is learned; hyperparameters take its precision.
        hyper: lr and the like, by name, as lr=0.1: numbers, or dicts of these by pattern of the names of what
            is learned, such as `lr={"precond.*": 1e-3, "hyper.lr": 1e-2}`. What is left out has the
            meta-optimizer's default.
        """
        return self.learned.outer_meta(meta, hyper)

    def init(self, meta: Meta, carry: Any, batch: Batch = None) -> OnlineCarry:
        """Return the state that learning starts from.

        meta: that of the training below, from its `init_meta`.
        carry: that of the training below, from its `init`.
        batch: one such as every step is given, of tensors; for a validation loss a pair (None; needed where a
            leaf of the loss is learned: the state keeps the batch of the last step).
        """
        self.training.check(meta, carry)
        meta_opt = self.learned.init(meta)
        given = self._given(meta, carry, batch)
        # Copies, because later nothing in them will be one: torch.compile would compile twice.
        last, nothing = tree.copy(carry), nothing_seen(tree.copy(carry), self.validation is not None)
        memory = self.training.init_memory(carry) if self.credit == "velocity" else ()
        taken = torch.zeros_like(nothing.value)
        return OnlineCarry(carry, meta, meta_opt, last, nothing, memory, taken, given)

    def _given(self, meta: Meta, carry: Any, batch: Batch) -> Given | tuple[()]:
        """Return what the loss is given, if a leaf of it is learned."""
        if not any(name.partition(".")[0] == "loss" for name in self.learned.of(meta)):
            return ()
        if batch is None:
            raise ValueError(
                f"Online learns {self.learn} and keeps the batch of the last step, of which init must know "
                "the form. Pass one: online.init(meta, carry, batch)."
            )
        own, _ = split(self._validation, batch)
        validation.batch("Online", own)
        with TwiceDifferentiable():
            notes = look_at_leaves(self.training, "reverse", (), None, meta, carry, [own])
        for note in notes:
            logger.warning(note)
        return Given(meta.loss, own)

    def evaluate(self, meta: Meta, state: OnlineCarry, batch: Batch) -> Seen:
        """Return the loss of a `batch` at the parameters of `state`, its gradients, the buffers after it.

        Of the outer `meta` it reads nothing: the loss is given the leaves in `state.meta`.
        """
        own, held_out = split(self._validation, batch)
        seen = self.training.evaluate(state.meta, state.carry, own)
        if self._validation is not None:
            seen = seen._replace(cotangent=self._validation.gradient(state, held_out))
        return seen._replace(batch=own) if state.given else seen

    def advance(self, meta: Meta, state: OnlineCarry, seen: Seen) -> tuple[OnlineCarry, Info]:
        """Return the state after learning from the last step and taking the next one, and info.

        meta: the outer meta, from `init_meta`.
        state: that before the step.
        seen: what `evaluate` returned for it.

        In info are "value", the loss that was seen; "finite", whether all that the step saw and led to is;
        "moved", whether what is learned has changed; with `null_step` "rose", whether the loss did; and what
        an `Online` below tells, as "below.moved".
        """
        self.learned.check_outer_meta(meta)
        value, finite, given = seen.value, tree.all_finite(seen._replace(batch=())), ()
        seen = zero_gradient_unless(finite, seen, state.buffers)
        if state.given:
            given, seen = Given(state.meta.loss, seen.batch), seen._replace(batch=())

        # Learn: how should the last step have been taken?
        last, remembered = self._last(state)
        grads = self._hypergradient(state, last, seen)
        moves = finite & tree.all_finite(grads) & (state.taken > 0)
        new_meta, meta_opt, moves = self.learned.moved(meta, state.meta, state.meta_opt, grads, moves)

        # Then take the next one; or, if the loss rose, the last one again.
        carry, taken, memory = state.carry, finite, remembered
        info = {"value": value, "finite": finite, "moved": moves}
        if self.null_step:
            before = state.last_seen
            rose = (state.taken > 0) & before.value.isfinite() & ~(seen.value <= before.value)
            # Nothing is learned from a loss that is not finite: the step is shortened instead.
            shorter = {k: torch.where(finite, g, 0.5 * g) for k, g in before.grads.items()}
            again = (state.last_carry, before._replace(grads=shorter), state.memory, state.given)
            carry, seen, memory, given = tree.where(rose, again, (carry, seen, memory, given))
            taken, info["rose"] = finite | rose, rose
        used = new_meta if self.order == "exact" else state.meta
        new_carry, below = self.training.advance(used, carry, seen)
        new_state = OnlineCarry(
            new_carry, new_meta, meta_opt, carry, seen, memory, taken.to(state.taken.dtype), given
        )
        if "carry" not in self.skip and not isinstance(new_carry, OnlineCarry):  # looked at below
            led = tree.all_finite(moving(new_carry))
            if not tree.is_surely(led):  # all that is left out then is work
                new_state = tree.where(led, new_state, staying(state, new_state, remembered))
            info |= {"finite": finite & led, "moved": moves & led}
        return new_state, info | {f"below.{k}": v for k, v in below.items() if k != "value"}

    def step(self, meta: Meta, state: OnlineCarry, batch: Batch) -> tuple[OnlineCarry, Info]:
        """Return `advance(meta, state, evaluate(meta, state, batch))`: one step of training and learning."""
        return self.advance(meta, state, self.evaluate(meta, state, batch))

    def pullback(self, meta: Meta, last: Last, cotangent: Params) -> Meta:
        """Return the derivative of ⟨`cotangent`, params after the `last` step⟩ in `meta`, the outer one.

        The VJP of `advance`, through the meta-optimizer's step and the one after it (docs/math.md, 11).
        """

        def params(meta: Meta) -> Params:
            state, _ = self.advance(meta, last.carry, last.seen)
            return state.params

        return tree.pull(params, meta, cotangent)

    def init_memory(self, state: OnlineCarry) -> tuple[()]:
        """Return `()`, whatever the `state`: there is no credit to remember."""
        return ()

    def credited(self, meta: Meta, memory: tuple[()], grads: Params) -> tuple[tuple[()], tuple[()]]:
        """Return `()` twice: its own `grads` take all the credit, whatever `meta` and `memory` are.

        The pullback above is the derivative of the whole step.
        """
        return (), ()

    def check(self, meta: Meta, state: OnlineCarry) -> None:
        """Refuse an outer `meta` for other things than are learned in `state`, or on another device."""
        self.learned.check_outer_meta(meta)
        validation.same_device(meta, state.params)
        self.init_meta(state.meta, **meta.hyper._asdict())

    @property
    def _validation(self) -> ValidationLoss | None:
        return ValidationLoss(self.validation) if self.validation else None

    @property
    def learned(self) -> Learned:
        """The leaves that move, and how."""
        return Learned("Online", self.training, self._rule, self.learn, self.bounds)

    def _last(self, state: OnlineCarry) -> tuple[Last, Tree]:
        """Return the last step with its credit, and the memory after it."""
        if self.credit == "gradient":
            return Last(state.last_carry, state.last_seen, (), state.given), ()
        credit, memory = self.training.credited(state.meta, state.memory, state.last_seen.grads)
        memory = tree.where(state.taken >= 0, memory, state.memory)
        return Last(state.last_carry, state.last_seen, credit, state.given), memory

    def _hypergradient(self, state: OnlineCarry, last: Last, seen: Seen) -> dict[str, Tensor]:
        """Return the guarded derivative in the coordinate of each learned leaf."""
        cotangent = seen.cotangent or seen.grads
        pulled = self._pullback_of_learned(state.meta, last, cotangent)
        grads = self.learned.chained(state.meta, pulled)
        for guard in self.guards:
            grads = guard(grads, state.params, last, seen._replace(grads=cotangent))
        return self.learned.of(grads)

    def _pullback_of_learned(self, meta: Meta, last: Last, cotangent: Params) -> Meta:
        """Return the derivative of the last step in meta, right in what is learned."""
        in_precond = all(name.partition(".")[0] == "precond" for name in self.learn)
        if in_precond and self.hypergradient is closed_form and type(self.training) is Training:
            return self.training.pullback_to_precond(meta, last, cotangent)
        return self.hypergradient(self.training, meta, last, cotangent)
