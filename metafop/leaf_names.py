"""Which leaves of meta a name stands for, and in which coordinate each of them is learned."""

from typing import Any, NamedTuple

from torch import Tensor

from metafop import loss_leaves, tree
from metafop.optimizers import Free
from metafop.preconditioners import clocks
from metafop.protocols import Domain, Trains
from metafop.types import Meta, Params, Tree

Leaves = dict[str, Tensor]  # of meta, and of the start if that is learned, by name


class MetaAndStart(NamedTuple):
    """All that a run depends on: meta, and the parameters that it starts from.

    hyper, precond, loss: those of `Meta`.
    start: the parameters, by name; `()` where they are not learned.
    """

    hyper: Any
    precond: dict[str, Tree]
    loss: Tree
    start: Params | tuple[()]

    @property
    def meta(self) -> Meta:
        return Meta(self.hyper, self.precond, self.loss)


def check(owner: str, learn: tuple[str, ...]) -> None:
    """Refuse what is no tuple of names."""
    if not isinstance(learn, tuple) or not learn:
        raise ValueError(
            f'{owner} learns a tuple of names, got learn={learn!r}. Pass for example ("precond", "lr").'
        )


def names_start(learn: tuple[str, ...]) -> bool:
    """Return whether `learn` names the parameters that a run starts from, or some: "start", "start.conv1"."""
    return any(part == "start" or part.startswith("start.") for part in learn)


def named(owner: str, learn: tuple[str, ...], meta: Meta | MetaAndStart) -> Leaves:
    """Return the leaves that `learn` names, each of its names a leaf or the start of some.

    "lr" stands for "hyper.lr": that of a hyperparameter needs no more.
    """
    names = tree.named(meta)
    for part in learn:
        starts = _starts((part,))
        if not any(f"{name}.".startswith(starts) for name in names):
            if names_start((part,)) and not isinstance(meta, MetaAndStart):
                raise ValueError(
                    f"{owner} cannot learn {part!r}, where a run starts, from within. Learn it with "
                    "Unrolled, or take it from estimate.start."
                )
            raise ValueError(
                f"{owner} is to learn {part!r}, but meta holds only {[_short(name) for name in names]}. "
                "Name one of these, or what several start with, or give the training what is missing: a "
                "preconditioner, or leaves of its loss by init_meta(loss=...)."
            )
    starts = _starts(learn)
    return {name: leaf for name, leaf in names.items() if f"{name}.".startswith(starts)}


def check_learnable(owner: str, learn: tuple[str, ...] | None, names: tuple[str, ...]) -> None:
    """Refuse to learn leaves that an estimator's own `learn` leaves out: zeros would stand for them."""
    for name in names:
        learned = not names_start((name,)) if learn is None else f"{name}.".startswith(_starts(learn))
        if not learned:
            raise ValueError(
                f"Unrolled learns {_short(name)!r}, and {owner} with learn={learn!r} gives no derivative in "
                "it. Name it there too, or use adjoint."
            )


def times(meta: Meta | MetaAndStart) -> set[str]:
    """Return the names of the times of `Rescaled` families: they pass, and are not learned."""
    return {name for k, m in meta.precond.items() for name in clocks(m, f"precond.{k}")}


def domain(training: Trains, name: str) -> Domain:
    """Return the range of a leaf, with its coordinate: matrices and parameters are learned as they are."""
    part, _, rest = name.partition(".")
    if part == "loss":
        return loss_leaves.domain(training.loss_domains, rest)
    if part != "hyper":
        return Free()
    field, _, rest = rest.partition(".")
    found = training.domains[field]
    return found[int(rest.partition(".")[0])] if isinstance(found, tuple) else found


def _starts(learn: tuple[str, ...]) -> tuple[str, ...]:
    """Return what the names that `learn` stands for start with, a dot put at the end of each."""
    return tuple(f"{prefix}{part}." for part in learn for prefix in ("", "hyper."))


def _short(name: str) -> str:
    return name.removeprefix("hyper.")
