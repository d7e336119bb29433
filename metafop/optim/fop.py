"""FOP: a `torch.optim.Optimizer` that learns, while it trains, how another one should be steered."""

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from metafop import diagnostics
from metafop.optim import choices, plans, steering
from metafop.optim.learner import Learner
from metafop.optim.moves import Steered
from metafop.optim.work import Item, Work
from metafop.optimizers import SGD, Adam
from metafop.preconditioners import by_layer, check_rules
from metafop.training import Training
from metafop.types import Meta, Params, Preconditioner


class FOP(Optimizer):
    """Learns a preconditioner for each layer while another optimizer trains it (Moskovitz et al., 2020).

    M' = meta_optimizer(M, ∂⟨∇J(θ), θ⟩/∂M),    θ' = optimizer(θ, P(M') ∇J(θ))

    `params` are parameters, with or without names, groups of them, or an `nn.Module`, whose layers then tell
    which weights are kernels. The base is an `optimizer_class` of torch's form, and takes all `settings` that
    are not named here: lr, momentum and so on. Around SGD, with or without momentum, Adam and AdamW the
    derivative is that of the step that they take; around any other, and with dampening or amsgrad, it is the
    paper's rule: that of gradient descent with the base's lr.

    `preconditioner` is "fop" (kernels `Spatial`, matrices `LowRank(4)`, vectors none), "fop-norm", "s-hd" (a
    rate for each tensor), "pp-hd" (one for each number), a family for all parameters, or a dict of families
    by pattern of names. `preset="paper"` is Algorithm 1 to the letter, with Adam for M. `meta_lr`, `order`,
    `credit` and `scale_free` overrule the preset, and mean what they mean to `Online`. `interval` is how many
    steps are taken for each learned from. `learn` may also name "lr" and "momentum"; what is learned is on
    top of what a scheduler sets (log lr, logit momentum). What starts at random starts from `seed`. All but
    `preset`, `meta_optimizer` and `seed` can be set for each group. (docs/math.md, 26)

    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = metafop.optim.FOP(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(2, 3)).square().mean().backward()
    ...     optimizer.step()
    >>> sorted(optimizer.diagnostics())[:2]
    ['angle/0', 'condition/0']
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer] = torch.optim.SGD,
        *,
        preconditioner: str | Preconditioner | Mapping[str, Preconditioner] = "fop",
        preset: str = "default",
        meta_lr: float | None = None,
        meta_optimizer: Steered | None = None,
        order: str | None = None,
        credit: str | None = None,
        scale_free: bool | None = None,
        interval: int | None = None,
        learn: tuple[str, ...] = ("precond",),
        seed: int = 0,
        **settings: Any,
    ) -> None:
        choices.check_class(optimizer_class)
        asked = {"meta_lr": meta_lr, "order": order, "credit": credit, "scale_free": scale_free}
        asked = {k: v for k, v in (asked | {"interval": interval}).items() if v is not None}
        asked = choices.preset(preset)._asdict() | asked | {"preconditioner": preconditioner, "learn": learn}
        self._layers: dict[Tensor, Preconditioner] = {}
        if isinstance(params, nn.Module):
            self._layers, params = by_layer(params), params.named_parameters()
        choices.check_meta_optimizer(meta_optimizer)
        self._learner = Learner(Adam() if meta_optimizer is None else meta_optimizer)
        self._plans: dict[Tensor, plans.Plan] = {}
        self._seed = seed
        self._base = optimizer_class(params, **settings)
        super().__init__(self._base.param_groups, self._base.defaults | asked)
        if isinstance(preconditioner, Mapping):
            check_rules(preconditioner, [plan.name for plan in self._plans.values()])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own; where they have none, those given at first hold."""
        super().add_param_group(dict(param_group))
        group = self.param_groups[-1]
        try:
            choices.check_group(type(self._base), group)
            new = self._planned(group)
        except Exception:
            self.param_groups.pop()
            raise
        self._plans.update(new)
        self._forget()
        group["preconditioner"] = choices.text(group["preconditioner"])
        group.setdefault("fop_steps", 0)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Learn from the last step, and take the next one; return what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling():
            _uncompiled(self)  # pyright: ignore
        else:
            self._step()
        return loss

    def diagnostics(self) -> dict[str, Tensor]:
        """Return scalars to log: spectra of every P, and where there are gradients their norms and angles.

        >>> weight = torch.nn.Parameter(torch.ones(2, 3))
        >>> optimizer = metafop.optim.FOP([("w", weight)], lr=0.1, preconditioner=Dense())
        >>> weight.grad = torch.ones(2, 3)
        >>> optimizer.step()
        >>> optimizer.diagnostics()["eigenvalue_max/w"]
        tensor(1.)
        """
        training, meta, grads = self.inspect()
        if not grads:
            return diagnostics.hyper(meta) | diagnostics.spectra(training, meta)
        return diagnostics.summary(training, meta, grads)

    def inspect(self) -> tuple[Training, Meta, Params]:
        """Return the families, their tensors and the gradients as the functional core has them, by name.

        They are those of parameters that have taken a step; gradients only if all of these have one.
        """
        taken = {
            self._plans[p].name: (p, self._plans[p])
            for group in self.param_groups
            for p in group["params"]
            if f"{plans.PREFIX}taken" in self.state.get(p, {})
        }
        precond = {name: plans.m_of(plan, self.state[p]) for name, (p, plan) in taken.items()}
        steers = {name: self._used(name) for name in ("lr", "momentum") if name in self.defaults}
        training = Training(_no_loss, SGD(), {name: plan.family for name, (_, plan) in taken.items()})
        grads = {name: p.grad.detach() for name, (p, _) in taken.items() if p.grad is not None}
        return training, Meta(steers, precond), grads if len(grads) == len(taken) else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, of this optimizer or of its base alone; refuse another model's."""
        own: dict[Tensor, dict[str, Any]] = {}

        def part(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            """Check all before anything changes, and take FOP's entries out: torch would round them."""
            plans.check_groups(loaded["param_groups"], self.param_groups, self._base.defaults)
            loaded, mine = plans.parted(loaded, self.param_groups, self._plans, self._learner.mover.init)
            own.update(mine)
            return loaded

        handle = self.register_load_state_dict_pre_hook(part)
        self._loading, before = own, (self.state, self.param_groups)
        try:
            super().load_state_dict(state_dict)
        except Exception:
            self.state, self.param_groups = before
            self._forget()
            raise
        finally:
            del self._loading
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        names = ("_base", "_layers", "_plans", "_seed")
        own = {"_meta_optimizer": self._learner.mover.optimizer}
        return super().__getstate__() | {name: self.__dict__[name] for name in names} | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_meta_optimizer" in state:
            self._learner = Learner(state["_meta_optimizer"])
        super().__setstate__({name: value for name, value in state.items() if name != "_meta_optimizer"})
        for p, entries in self.__dict__.get("_loading", {}).items():
            self.state[p].update(entries)
        self._forget()
        # The base fills in settings that an older state does not have.
        self._base.__setstate__({"state": self.state, "param_groups": self.param_groups})

    def _step(self) -> None:
        # A closure, or the user, may have left autocast on: it would round the products with P.
        device = self.param_groups[0]["params"][0].device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self._step()
        grad_mode = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            self._learn_and_step()
        finally:
            torch.set_grad_enabled(grad_mode)

    def _learn_and_step(self) -> None:
        if not self._is_as_it_was():
            self._forget()
        works: list[Work] = []
        done = False
        try:
            works += [work for work in self._works if work.take()]
            if all(work.is_sure for work in works):
                for work in works:
                    work.undo = None  # there is nothing to copy for
            for work in works:
                if work.learned:
                    steering.steer(self._learner.mover, work)
                self._learner.turn(work)
                if work.learned:
                    steering.hold(work)
            self._step_base(works)
            done = True
        finally:
            for work in works:
                if done:
                    self._learner.remember(work)
                else:
                    self._learner.undo(work)
            for work in self._works:
                work.clear()

    def _step_base(self, works: list[Work]) -> None:
        """Let the base step along the preconditioned gradients, or take its step for it."""
        lending = [work for work in works if not work.descends]
        if lending or not works:  # some of SGD's alone: it does nothing for groups without gradients
            some = [work.group for work in lending]
            self._lend(lending, some if len(lending) < len(works) else self.param_groups)
        for work in works:
            if work.descends:
                work.descend()

    def _lend(self, works: list[Work], groups: list[dict[str, Any]]) -> None:
        """Let the base step along the preconditioned gradients: lent to it, for `p.grad` is the user's."""
        base = self._base
        base.param_groups, base.state = groups, self.state
        lent = [item for work in works for item in work.turning]
        settings = [(work.group, {name: work.group[name] for name in work.steered}) for work in works]
        try:
            for item in lent:
                item.param.grad = item.turned
            for work in works:
                work.group.update(work.steered)
            # What its class defines, without the hooks that torch puts around it: they run for FOP.
            type(base).step.__wrapped__(base)  # pyright: ignore
        finally:
            base.param_groups = self.param_groups
            for item in lent:
                item.param.grad = item.grad
            for group, old in settings:
                group.update(old)

    def _is_as_it_was(self) -> bool:
        """Return whether state and groups are those that the works were made of: users edit them by hand."""
        return (
            self.state is self._states
            and len(self.param_groups) == len(self._works)
            and all(map(Work.is_for, self._works, self.param_groups))
        )

    def _forget(self) -> None:
        """Forget what was made of the plans and the state: either may have changed."""
        for i, group in enumerate(self.param_groups):
            if any(p not in self._plans for p in group["params"]):
                raise RuntimeError(
                    f"Group {i} holds a parameter that FOP was not given, and has no preconditioner for. "
                    "Add parameters by add_param_group."
                )
        keys, self._states = map(str, count()), self.state
        self._works = [
            Work(
                type(self._base),
                group,
                [Item(next(keys), p, self._plans[p], self.state) for p in group["params"]],
                self.state,
            )
            for group in self.param_groups
        ]

    def _planned(self, group: dict[str, Any]) -> dict[Tensor, plans.Plan]:
        params, names = group["params"], group.get("param_names")
        chosen = choices.families(group["preconditioner"], params, names, self._layers)
        first, taken = len(self._plans), {plan.name for plan in self._plans.values()}
        new = {}
        for i, (p, family) in enumerate(zip(params, chosen, strict=True), start=first):
            name = names[i - first] if names else str(i)
            new[p] = plans.plan(p, family, f"{name}.{i}" if name in taken else name, self._seed + i)
        return new

    def _used(self, name: str) -> dict[str, Tensor]:
        """Return a setting of each group, as learned, by the group's number."""
        groups = enumerate(self.param_groups)
        used = {str(i): group.get(f"{plans.PREFIX}{name}_used", group[name]) for i, group in groups}
        return {i: torch.as_tensor(value).reshape(()) for i, value in used.items()}


# Its state is numbers and tensors that change with each step: torch.compile would compile each anew.
_uncompiled = torch.compiler.disable(FOP._step)


def _no_loss(params: Params, buffers: Params, batch: Any) -> Any:
    raise NotImplementedError
