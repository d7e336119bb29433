"""Training as a pure function: evaluate the loss, then advance the parameters."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor

from metafop import loss_leaves, torch_errors, tree, validation
from metafop.functional import with_leaves
from metafop.loss_gradient import loss_gradient
from metafop.norms import NormsWrittenOut
from metafop.optimizers import SGD, Adam, Momentum, Scheduled, completed, fitted
from metafop.preconditioners import Identity, batched
from metafop.protocols import CompleteOptimizer, Domain, Domains, Optimizer, Preconditioner
from metafop.twice_differentiable import TwiceDifferentiable
from metafop.types import Batch, Buffers, Carry, Info, Last, Loss, Meta, Params, Seen, Tree


@dataclass(frozen=True)
class Training:
    """A loss, an optimizer, and a preconditioner for each parameter (those not named get `Identity`).

    seen = evaluate(meta, carry, batch)     value, gradients, buffers: expensive, sees meta.loss alone
    carry = advance(meta, carry, seen)      θ' = update(hyper, θ, P(m) ∇J): cheap, sees hyper and precond

    loss: `loss(params, buffers, batch) -> (value, buffers)`, pure; `metafop.functional` makes one. With a
        fourth argument it is given the leaves of meta.loss.
    optimizer: one of the library, or any object with domains, init and update.
    preconditioners: families by parameter name (none), such as `assign(params)` makes.
    loss_domains: the ranges of leaves of meta.loss, by pattern of their names, such as `{"l2": Positive()}`:
        that of any other is `Free()` (none).

    >>> loss = metafop.functional.plain(lambda params, batch: (params["w"] - batch).square().sum())
    >>> training = Training(loss, SGD())
    >>> params = {"w": torch.zeros(2)}
    >>> meta, carry = training.init_meta(params, lr=0.25), training.init(params)
    >>> carry, info = training.step(meta, carry, torch.ones(2))
    >>> carry.params["w"], info["value"]
    (tensor([0.5000, 0.5000]), tensor(2.))
    """

    loss: Loss
    optimizer: Optimizer
    preconditioners: Mapping[str, Preconditioner] = field(default_factory=dict)
    loss_domains: Mapping[str, Domain] = field(default_factory=dict)
    _loss: Loss = field(init=False, repr=False, compare=False)  # the loss, which takes leaves
    _rule: CompleteOptimizer = field(init=False, repr=False, compare=False)  # the optimizer, completed

    def __post_init__(self) -> None:
        validation.loss("Training", self.loss)
        object.__setattr__(self, "_loss", with_leaves(self.loss))
        object.__setattr__(self, "_rule", completed("Training", self.optimizer))
        validation.preconditioners(self.preconditioners)
        validation.loss_domains(self.loss_domains)

    @property
    def domains(self) -> Domains:
        return self._rule.domains

    def init_meta(
        self, params: Params, generator: Generator | None = None, *, loss: Tree = None, **hyper: Any
    ) -> Meta:
        """Return where learning starts: the optimizer's hyperparameters, each family's tensors, leaves.

        params: what is trained, by name; what is learned takes its precision.
        generator: where families that start at random (`LowRank`) draw from.
        loss: the leaves that the loss is given as its fourth argument: a tree of tensors and numbers, such as
            `{"l2": 1e-4, "weights": torch.ones(5000)}` (None, for a loss that takes none).
        hyper: lr and the like, by name: numbers, or dicts of these by pattern of parameter names, such as
            `lr={"encoder.*": 1e-3, "*": 1e-2}`; each pattern is one learned number. What is left out has the
            optimizer's default.
        """
        validation.params(params)
        validation.start(self.preconditioners, params, generator)
        precond = {k: self._family(k).init(p, generator) for k, p in params.items()}
        leaves = loss_leaves.made(self.loss, self.optimizer, self.loss_domains, loss, params)
        meta = Meta(fitted(self._rule, hyper, params), precond, leaves)
        validation.distinct(meta)
        return meta

    def init(self, params: Params, buffers: Buffers | None = None) -> Carry:
        """Return the carry that training starts from.

        params: what is trained, by name.
        buffers: what else the loss reads and changes, by name: statistics of batch norm, the seed (none).
        """
        validation.params(params)
        validation.buffers(buffers or {})
        return Carry(params, self._rule.init(params), buffers or {})

    def evaluate(self, meta: Meta, carry: Carry, batch: Batch) -> Seen:
        """Return the loss of a `batch` at the parameters of `carry`, its gradients, the buffers after it.

        The loss is given the leaves `meta.loss`; of what is scheduled, the entry of the step.
        """
        validation.evaluated(meta, carry)
        leaves = self._rule.leaves(meta.loss, carry.opt) if isinstance(self._rule, Scheduled) else meta.loss
        recorded = _is_recorded((carry.params, leaves, batch))
        own = tree.map(lambda leaf: leaf, leaves)  # a loss may take a dict apart

        def objective(params: Params) -> tuple[Tensor, Buffers]:
            result = self._loss(params, carry.buffers, batch, own)
            validation.returned(result, carry.buffers)
            validation.depends(result[0])
            return result

        versions = validation.versions(carry.params, leaves)
        try:
            grads, value, buffers = loss_gradient(objective, carry.params, recorded)
        except (RuntimeError, IndexError) as error:
            given = {"batch": batch, "carry": carry.buffers, "meta": leaves}
            torch_errors.explain_devices(error, carry.params, given)
            torch_errors.explain(error)
            raise
        validation.unwritten(carry.params, leaves, versions)
        validation.dense(grads)
        seen = Seen(value, grads, {k: buffers[k].detach() for k in carry.buffers})
        return seen if recorded else _unrecorded(seen)

    def advance(self, meta: Meta, carry: Carry, seen: Seen) -> tuple[Carry, Info]:
        """Return the carry after a step from `carry`, on what was `seen` there, as `meta` says; and info.

        In info is "value", the loss that was seen.
        """
        validation.same_tree(meta, carry)
        direction = self.precondition(meta.precond, seen.grads)
        params, opt = self._rule.update(meta.hyper, carry.params, carry.opt, direction)
        return Carry(params, opt, seen.buffers), {"value": seen.value}

    def step(self, meta: Meta, carry: Carry, batch: Batch) -> tuple[Carry, Info]:
        """Return `advance(meta, carry, evaluate(meta, carry, batch))`: one step of training."""
        return self.advance(meta, carry, self.evaluate(meta, carry, batch))

    def pullback(self, meta: Meta, last: Last, cotangent: Params) -> Meta:
        """Return the derivative of ⟨`cotangent`, params after the `last` step⟩ in `meta`.

        What led to that step is held: this is the truncation that makes the online estimate cheap, and biased
        (docs/math.md, 1). Without credit it is the VJP of `advance`; with credit, P(m) stands before all the
        gradients that moved θ. If `last` has what its loss was given, the derivative in its leaves is one
        more pullback, of the gradient; otherwise it is left out, as zeros.
        """
        direction = self.precondition(meta.precond, last.seen.grads)
        step = (meta.hyper, last.carry.params, last.carry.opt, direction, cotangent)
        d_hyper, d_direction = self._rule.pullback(*step)
        toward = self._rule.toward(*step) if last.credit else d_direction
        families = {k: self._family(k) for k in meta.precond}
        d_precond = batched.pullbacks(families, meta.precond, last.credit or last.seen.grads, toward)
        return Meta(d_hyper, d_precond, self._loss_pullback(meta, last, d_direction))

    def pullback_to_precond(self, meta: Meta, last: Last, cotangent: Params) -> Meta:
        """Return `pullback` with zeros for all of `meta` but the preconditioners: it takes far less time.

        It is the derivative of ⟨`cotangent`, params after the `last` step⟩, too.
        """
        families = {k: self._family(k) for k in meta.precond if type(self._family(k)) is not Identity}
        if type(self._rule) in _SEPARATE:
            cotangent = {k: cotangent[k] for k in families}
        direction = self.precondition(meta.precond, last.seen.grads)
        step = (meta.hyper, last.carry.params, last.carry.opt, direction, cotangent)
        toward = self._rule.toward(*step) if last.credit else self._rule.pullback(*step)[1]
        precond = {k: meta.precond[k] for k in families}
        d_precond = batched.pullbacks(families, precond, last.credit or last.seen.grads, toward)
        return Meta(tree.zeros_like(meta.hyper), meta.precond | d_precond, tree.zeros_like(meta.loss))

    def _loss_pullback(self, meta: Meta, last: Last, d_direction: Params) -> Tree:
        """Return ∂⟨P c, ∇J(θ)⟩ in the leaves of the loss, c being `d_direction`: P is symmetric."""
        given = last.given
        if not given:
            return tree.zeros_like(meta.loss)
        d_grads = self.precondition(meta.precond, d_direction)

        def grads(leaves: Tree) -> Params:
            return self.evaluate(meta._replace(loss=leaves), last.carry, given.batch).grads

        with TwiceDifferentiable(), NormsWrittenOut():  # for those who differentiate what is learned by this
            return tree.pull(grads, given.leaves, d_grads)

    def precondition(self, precond: dict[str, Tree], grads: Params) -> Params:
        """Return P(m) g for each parameter, its m from `precond` and its g from `grads`."""
        families = {k: self._family(k) for k in grads}
        functions = batched.preconditioner_functions(families, precond, grads)
        return {k: functions[k](g) for k, g in grads.items()}

    def init_memory(self, carry: Carry) -> Tree:
        """Return the memory that `credited` starts from, for the parameters of a `carry`."""
        return self._rule.init_memory(carry.params)

    def credited(self, meta: Meta, memory: Tree, grads: Params) -> tuple[Params | tuple[()], Tree]:
        """Return the gradients that a step's movement is made of, and the memory of them.

        meta: that of the step.
        memory: that before it.
        grads: its own gradients; where it is made of these alone, `()` is returned for them.
        """
        return self._rule.credit(meta.hyper, memory, grads)

    def check(self, meta: Meta, carry: Carry) -> None:
        """Refuse a `meta` that was made for other parameters than those of `carry`, or on another device."""
        validation.same_tree(meta, carry)
        validation.same_device(meta, carry.params)
        if tree.is_transforming():  # where vmap forbids the random numbers that a family may start from
            return
        for name, param in carry.params.items():
            family = self._family(name)
            # On the CPU, where every generator draws: only shapes are compared.
            there = param if param.is_cpu else torch.zeros_like(param, device="cpu")
            expected = tree.map(lambda x: x.shape, family.init(there, Generator()))
            found = tree.map(lambda x: x.shape, meta.precond[name])
            if expected != found:
                raise ValueError(
                    f"{family} of {name!r}, {tuple(param.shape)}, has tensors of shape {found}, "
                    f"but needs {expected}. Make meta with training.init_meta(params, ...)."
                )

    def _family(self, name: str) -> Preconditioner:
        return self.preconditioners.get(name, _IDENTITY)


_IDENTITY = Identity()
_SEPARATE = (SGD, Momentum, Adam)  # no parameter's step depends on another's gradient


def _is_recorded(given: Tree) -> bool:
    """Return whether torch.autograd records what comes of the tensors that a loss is given."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return any(isinstance(x, Tensor) and tree.is_recorded(x) for x in tree.leaves(given))


def _unrecorded(seen: Seen) -> Seen:
    """Return what was seen without what torch.autograd recorded.

    A tensor that a loss closes over and that requires a gradient would otherwise keep the graph of each step.
    """
    if torch.compiler.is_compiling() or not tree.is_recorded(seen.value) or tree.is_differentiating():
        return seen
    return tree.map(torch.detach, seen)
