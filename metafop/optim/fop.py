"""FOP: a `torch.optim.Optimizer` that learns a preconditioner for another optimizer while that one trains."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from metafop import diagnostics
from metafop.optim import base_optimizers, config, group_step, state
from metafop.optim.between_updates import BetweenUpdates, between_updates
from metafop.optim.meta_update import MetaOptimizer
from metafop.optim.step import begin
from metafop.optimizers import SGD, Adam
from metafop.preconditioners import by_layer, check_rules
from metafop.protocols import Optimizer as PureOptimizer
from metafop.protocols import Preconditioner
from metafop.training import Training
from metafop.types import Meta, Params


class FOP(Optimizer):
    """Learns a preconditioner for each layer while another optimizer trains it (Moskovitz et al., 2020).

    M' = meta_optimizer(M, ∂⟨∇J(θ), θ⟩/∂M),    θ' = optimizer(θ, P(M') ∇J(θ))

    Around SGD, with or without momentum, Adam and AdamW the derivative is that of the step that they take;
    around any other, and with dampening or amsgrad, it is the paper's rule: that of gradient descent with the
    base's lr. (docs/math.md, 26)

    params: parameters, with or without names, groups of them, or an `nn.Module`, whose layers then tell which
        weights are kernels.
    optimizer_class: the base, a class of torch's form (`torch.optim.SGD`).
    preconditioner: "fop" (kernels `Spatial`, matrices `LowRank(4)`, vectors none), "fop-norm" (the same,
        normalized), "s-hd" (a rate for each tensor), "pp-hd" (one for each number), a family for all
        parameters, or a dict of families by pattern of names ("fop").
    preset: "default", or "paper", which is Algorithm 1 to the letter, with Adam for M; it sets the defaults
        of five arguments below ("default").
    meta_lr: the meta-optimizer's learning rate, zero or more (5e-3; with "paper" 1e-4).
    meta_optimizer: what moves M, a pure optimizer of metafop's that needs no setting but an lr (`Adam()`).
    order: "exact" steps with the M just learned, "paper" with the one before ("exact"; with "paper" "paper").
    credit: what P is credited with: "velocity", all gradients that the base's step is made of, or "gradient",
        the last one ("velocity"; with "paper" "gradient").
    scale_free: whether hypergradients are divided by ‖∇J‖ ‖Δθ‖, so that they have no units (True; with
        "paper" False).
    interval: how many steps are taken for each that P is learned from, one or more (10; with "paper" 1).
    learn: which of "precond", "lr" and "momentum"; the last two are learned from every step, as log lr and
        logit momentum, on top of what a scheduler sets (("precond",)).
    seed: an int, from which starts what starts at random (0).
    settings: all others are the base's: lr, momentum and so on.

    All but `optimizer_class`, `preset`, `meta_optimizer` and `seed` can be set for each group.

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
        meta_optimizer: PureOptimizer | None = None,
        order: str | None = None,
        credit: str | None = None,
        scale_free: bool | None = None,
        interval: int | None = None,
        learn: tuple[str, ...] = ("precond",),
        seed: int = 0,
        **settings: Any,
    ) -> None:
        config.check_class(optimizer_class)
        config.check_meta_optimizer(meta_optimizer)
        asked = {"meta_lr": meta_lr, "order": order, "credit": credit, "scale_free": scale_free}
        asked = {k: v for k, v in (asked | {"interval": interval}).items() if v is not None}
        asked = config.preset(preset)._asdict() | asked | {"preconditioner": preconditioner, "learn": learn}
        self._layers: dict[Tensor, Preconditioner] = {}
        if isinstance(params, nn.Module):
            self._layers, params = by_layer(params), params.named_parameters()
        self._meta_optimizer = MetaOptimizer(Adam() if meta_optimizer is None else meta_optimizer)
        self._specs: dict[Tensor, state.ParamSpec] = {}
        self._between: dict[int, BetweenUpdates] = {}  # groups that step quickly, until M is updated
        self._seed = seed
        self._base = config.base(optimizer_class, params, settings)
        super().__init__(self._base.param_groups, self._base.defaults | asked)
        self.state.update(self._base.state)  # what the base has made already
        if isinstance(preconditioner, Mapping):
            check_rules(preconditioner, [spec.name for spec in self._specs.values()])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the parameters of a `param_group`; settings that it does not have are those given at first."""
        is_later = all(group is not param_group for group in self._base.param_groups)
        super().add_param_group(dict(param_group))
        group = self.param_groups[-1]
        try:
            config.check_keys(group, self._base.defaults)
            config.check_group(type(self._base), group)
            new = self._new_specs(group)
            if is_later:  # those of the constructor the base has had, and made state for what needs some
                base = self._synchronized()
                base.param_groups = self.param_groups[:-1]
                base.add_param_group(group)
        except Exception:
            self.param_groups.pop()
            raise
        self._specs.update(new)
        group["preconditioner"] = config.description(group["preconditioner"])
        group.setdefault(state.STEPS, 0)

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
        """Return scalars to log: lr, momentum, spectra of every P, norms of gradients, angles in degrees.

        "hyper/lr/0" is the lr of group 0; a learned one as learned, with which the group took its last step.
        `param_groups[0]["lr"]` is what a user or scheduler has set. The same holds for "hyper/momentum/0".

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
        stepped = {
            self._specs[p].name: (p, self._specs[p])
            for group in self.param_groups
            for p in group["params"]
            if state.USABLE in self.state.get(p, {})
        }
        precond = {name: spec.m(self.state[p]) for name, (p, spec) in stepped.items()}
        hyper = {name: self._used(name) for name in ("lr", "momentum") if name in self.defaults}
        training = Training(_no_loss, SGD(), {name: spec.family for name, (_, spec) in stepped.items()})
        grads = {name: p.grad.detach() for name, (p, _) in stepped.items() if p.grad is not None}
        return training, Meta(hyper, precond), grads if len(grads) == len(stepped) else {}

    @property
    def train(self) -> Callable[..., Any]:
        """The base's `train`, as that of schedule-free optimizers; absent where the base has none."""
        return self._synchronized().train  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def eval(self) -> Callable[..., Any]:
        """The base's `eval`; absent where the base has none."""
        return self._synchronized().eval  # pyright: ignore[reportAttributeAccessIssue]

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's form, with whatever else the base's own `state_dict` returns."""
        return self._synchronized().state_dict() | super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, of this optimizer or of its base alone.

        Raises ValueError for the state of another model or optimizer, and then nothing has changed.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        base = self._synchronized()
        state.check_groups(state_dict["param_groups"], self.param_groups, base.defaults)
        like_param = base_optimizers.LIKE_PARAM.get(type(base), ())
        rest, own = state.split(
            state_dict, self.param_groups, self._specs, like_param, self._meta_optimizer.init
        )
        base.load_state_dict(rest)  # as its class does it; FOP's entries would be rounded
        self.state, self.param_groups, self._between = base.state, base.param_groups, {}
        for p, entries in own.items():
            self.state[p].update(entries)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        names = ("_base", "_layers", "_specs", "_seed", "_meta_optimizer")
        return super().__getstate__() | {name: self.__dict__[name] for name in names}

    def __setstate__(self, given: dict[str, Any]) -> None:
        super().__setstate__(given)
        self._between = {}
        # The base fills in settings that an older state does not have.
        self._base.__setstate__({"state": self.state, "param_groups": self.param_groups})

    def _step(self) -> None:
        # A closure, or the user, may have left autocast on: it would round the products with P.
        first = next(iter(self._specs), None)
        device = "cpu" if first is None else first.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self._step()
        grad_mode = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            self._learn_and_step()
        finally:
            torch.set_grad_enabled(grad_mode)

    def _learn_and_step(self) -> None:
        """Learn from the last step, precondition the gradients, step the base, record the step."""
        base, between, steps = self._synchronized(), {}, {}
        for i, group in enumerate(self.param_groups):
            directions = self._between[i].directions(group, self.state) if i in self._between else None
            if directions is not None:
                between[i] = directions
            elif (step := begin(type(base), i, group, self._specs, self.state)) is not None:
                steps[i] = step
        for step in steps.values():
            group_step.learn_and_precondition(step, self._meta_optimizer)
        group_step.step_base(base, list(steps.values()), is_part=bool(between))
        for i, directions in between.items():
            self._between[i].step(directions)
        for i, step in steps.items():
            group_step.record(step, self.state)
            self._between.pop(i, None)
            if (found := between_updates(step, self.state)) is not None:
                self._between[i] = found

    def _synchronized(self) -> Optimizer:
        """Return the base, with the state and groups that are here: users replace them."""
        self._base.state, self._base.param_groups = self.state, self.param_groups
        return self._base

    def _new_specs(self, group: dict[str, Any]) -> dict[Tensor, state.ParamSpec]:
        params, names = group["params"], group.get("param_names")
        chosen = config.families(group["preconditioner"], params, names, self._layers)
        first, taken = len(self._specs), {spec.name for spec in self._specs.values()}
        new = {}
        for i, (p, family) in enumerate(zip(params, chosen, strict=True), start=first):
            name = names[i - first] if names else str(i)
            name = f"{name}.{i}" if name in taken else name
            new[p] = state.spec(p, family, name, number=i, seed=self._seed + i)
        return new

    def _used(self, name: str) -> dict[str, Tensor]:
        """Return a setting of each group by the group's number; where it is learned, as in the last step."""
        key, used = state.setting_keys(name).used, {}
        for i, group in enumerate(self.param_groups):
            value = group.get(key, group[name]) if name in group["learn"] else group[name]
            used[str(i)] = torch.as_tensor(value).reshape(())
        return used


# Numbers in its state change with each step: torch.compile would compile each step anew.
_uncompiled = torch.compiler.disable(FOP._step)


def _no_loss(params: Params, buffers: Params, batch: Any) -> Any:
    raise NotImplementedError
