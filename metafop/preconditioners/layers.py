"""Which family for which parameter."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from metafop import patterns
from metafop.preconditioners.dense import Spatial, inputs
from metafop.preconditioners.elementwise import Identity
from metafop.preconditioners.low_rank import LowRank
from metafop.protocols import Preconditioner
from metafop.types import Params


def by_shape(param: Tensor, rank: int = 4) -> Preconditioner:
    """Return the family that suits a `param` of its shape in an ordinary network.

    Kernels get `Spatial`, which for a 1×1 kernel is one learned rate for the layer; matrices get `LowRank`;
    biases and the scales of norms get `Identity`. The evidence: docs/concepts.md.

    rank: that of `LowRank`, or the number of inputs where that is less (4).
    """
    if param.dim() >= 3 and param.numel():
        return Spatial()
    if param.dim() == 2 and param.numel():
        return LowRank(min(rank, inputs(param)))
    return Identity()


def by_layer(module: nn.Module) -> dict[Tensor, Preconditioner]:
    """Return the family that suits each parameter of a `module`, given the layers that use it.

    Only the weights of convolutions are kernels; one that several layers share is, if all of them convolve.
    Any other tensor of three or more dimensions, such as an embedding of positions, gets `Identity`.
    """
    owners: dict[Tensor, list[nn.Module]] = {}
    for layer in module.modules():
        for param in layer.parameters(recurse=False):
            owners.setdefault(param, []).append(layer)
    return {
        param: by_shape(param) if param.dim() < 3 or all(map(_convolves, layers)) else Identity()
        for param, layers in owners.items()
    }


def _convolves(layer: nn.Module) -> bool:
    transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
    return isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d | transposed)


def assign(
    params: Params, rules: Mapping[str, Preconditioner] | None = None, rank: int = 4
) -> dict[str, Preconditioner]:
    """Return a family for each parameter: the first rule whose pattern fits its name, else `by_shape`.

    params: what is trained, by name.
    rules: families by pattern of names, as in the shell: `*` stands for any characters (none).
    rank: that of `LowRank` for matrices that no rule fits, 1 or more (4).

    >>> params = {"conv.weight": torch.zeros(8, 3, 3, 3), "head.weight": torch.zeros(10, 8)}
    >>> assign(params, {"head.*": Scalar()})
    {'conv.weight': Spatial(), 'head.weight': Scalar()}
    """
    rules = rules or {}
    check_rules(rules, params)
    return {name: by_rule(rules, name, by_shape(param, rank)) for name, param in params.items()}


def by_rule(rules: Mapping[str, Preconditioner], name: str, default: Preconditioner) -> Preconditioner:
    """Return the family of the first of the `rules` whose pattern fits the `name`, or the `default`."""
    pattern = patterns.first(tuple(rules), name)
    return default if pattern is None else rules[pattern]


def check_rules(rules: Mapping[str, Preconditioner], names: Iterable[str]) -> None:
    """Refuse `rules` with a pattern that fits none of the `names`: a slip, most likely."""
    names = sorted(names)
    for pattern in rules:
        if all(patterns.first((pattern,), name) is None for name in names):
            raise ValueError(
                f"The rule {pattern!r} fits none of the parameters {names}. Correct the pattern or drop it."
            )
