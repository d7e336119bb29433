"""Which leaves of meta a name stands for, and in which coordinate each of them is learned."""

from torch import Tensor

from metafop import tree
from metafop.optimizers import Free
from metafop.preconditioners import clocks
from metafop.types import Domain, Meta, Trains

Leaves = dict[str, Tensor]  # of meta, by name


def check(owner: str, learn: tuple[str, ...]) -> None:
    """Refuse what is no tuple of names."""
    if not isinstance(learn, tuple) or not learn:
        raise ValueError(
            f'{owner} learns a tuple of names, got learn={learn!r}. Pass for example ("precond", "lr").'
        )


def named(owner: str, learn: tuple[str, ...], meta: Meta) -> Leaves:
    """Return the leaves that `learn` names, each of its names a leaf or the start of some.

    "lr" stands for "hyper.lr": that of a hyperparameter needs no more.
    """
    names = tree.named(meta)
    for part in learn:
        if not any(_stands_for(part, name) for name in names):
            raise ValueError(
                f"{owner} is to learn {part!r}, but meta holds only {[_short(name) for name in names]}. "
                "Name one of these or the start of one, or give the training a preconditioner to learn."
            )
    return {name: leaf for name, leaf in names.items() if any(_stands_for(part, name) for part in learn)}


def times(meta: Meta) -> set[str]:
    """Return the names of the times of `Rescaled` families: they pass, and are not learned."""
    return {name for k, m in meta.precond.items() for name in clocks(m, f"precond.{k}")}


def domain(training: Trains, name: str) -> Domain:
    """Return the range of a leaf, with its coordinate: matrices are learned as they are."""
    part, _, rest = name.partition(".")
    if part != "hyper":
        return Free()
    field, _, rest = rest.partition(".")
    found = training.domains[field]
    return found[int(rest.partition(".")[0])] if isinstance(found, tuple) else found


def _stands_for(part: str, name: str) -> bool:
    return any(each == part or each.startswith(f"{part}.") for each in (name, _short(name)))


def _short(name: str) -> str:
    return name.removeprefix("hyper.")
