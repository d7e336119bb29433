"""What was learned, in numbers: spectra of P, the angle by which it turns the gradient, norms, whitening.

For looking at, never for computing with. Scalars are named by quantity, then parameter, as in
"eigenvalue_max/conv1.weight". A parameter for which nothing is learned has no P here; nor has an `Online`,
which learns the matrices of the training below: pass that one and its meta to see them. Spectra and matrices
are those of families that are `Inspectable`; every family of the library is.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from metafop import tree
from metafop.preconditioners import Bounded, Normalized, Rescaled, Spatial
from metafop.protocols import Inspectable, Preconditioner, Trains
from metafop.training import Training
from metafop.types import Meta, Params, Tree


def summary(training: Trains, meta: Meta, grads: Params) -> dict[str, Tensor]:
    """Return every scalar of this file.

    training: that whose preconditioners are looked at.
    meta: what was learned.
    grads: the gradient of each parameter, by name, such as `training.evaluate` finds.

    >>> loss = metafop.functional.plain(lambda params, batch: params["w"].square().sum())
    >>> training = Training(loss, SGD(), {"w": Diagonal()})
    >>> meta = Meta(SGD().hyper(lr=0.5), {"w": torch.tensor([1.0, 3.0])})
    >>> scalars = metafop.diagnostics.summary(training, meta, {"w": torch.tensor([3.0, 0.0])})
    >>> scalars["condition/w"], scalars["gradient_norm/w"], scalars["angle/w"]
    (tensor(3.), tensor(3.), tensor(0.))
    """
    return (
        hyper(meta)
        | leaves(meta)
        | {"gradient_norm": tree.norm(tree.map(wide, grads))}
        | norms("gradient_norm", grads)
        | norms("direction_norm", directions(training, meta, grads))
        | angles(training, meta, grads)
        | spectra(training, meta)
        | whitening(training, meta, grads)
    )


def hyper(meta: Meta) -> dict[str, Tensor]:
    """Return the hyperparameters of `meta`, as in "hyper/lr", "hyper/betas/0" and, for a pattern,
    "hyper/lr/encoder.*"; schedules are left out.
    """
    named = tree.named(meta.hyper).items()
    return {f"hyper/{name.replace('.', '/', 1)}": value for name, value in named if value.dim() == 0}


def leaves(meta: Meta) -> dict[str, Tensor]:
    """Return the leaves of the loss in `meta`: a number as in "loss/l2", of more numbers the mean, the least
    and the largest, as in "loss/weights/mean".
    """
    found = {}
    for name, leaf in tree.named(meta.loss, "loss").items():
        key = name.replace(".", "/", 1)
        some = {"mean": leaf.mean(), "min": leaf.amin(), "max": leaf.amax()} if leaf.numel() else {}
        found |= {key: leaf} if leaf.dim() == 0 else {f"{key}/{k}": x for k, x in some.items()}
    return found


def norms(name: str, values: Params) -> dict[str, Tensor]:
    """Return the Euclidean norm of each tensor in `values`, as in "`name`/conv1.weight"."""
    return {f"{name}/{k}": torch.linalg.vector_norm(wide(x)) for k, x in values.items()}


def directions(training: Trains, meta: Meta, grads: Params) -> Params:
    """Return P g for each parameter that has a P in `training`, with m from `meta` and g from `grads`."""
    return {k: family.apply(m, grads[k]) for k, (family, m) in _learned(training, meta).items()}


def angles(training: Trains, meta: Meta, grads: Params) -> dict[str, Tensor]:
    """Return the angle in degrees between ∇J and P ∇J of each parameter (the paper, figure of angles).

    The P are those of `training` at `meta`, ∇J is in `grads`.
    """
    preconditioned = directions(training, meta, grads)
    return {f"angle/{k}": angle(grads[k], direction) for k, direction in preconditioned.items()}


def angle(x: Tensor, y: Tensor) -> Tensor:
    """Return the angle between `x` and `y` in degrees, exact for tiny ones too (Kahan).

    angle = 2 atan2(‖u - v‖, ‖u + v‖),    u = x/‖x‖,    v = y/‖y‖

    Zero is at 0° to zero, and at 90° to anything else: a step of zero does not descend.
    """
    u, v = unit(x), unit(y)
    apart, together = torch.linalg.vector_norm(u - v), torch.linalg.vector_norm(u + v)
    return torch.rad2deg(2 * torch.atan2(apart, together))


def eigenvalues(training: Trains, meta: Meta) -> dict[str, Tensor]:
    """Return the eigenvalues of each P of `training` at `meta`, by parameter, ascending.

    They are all NaN if a number in m is not finite.
    """
    return {
        k: _eigenvalues(family, m)
        for k, (family, m) in _learned(training, meta).items()
        if isinstance(family, Inspectable)
    }


def spectra(training: Trains, meta: Meta) -> dict[str, Tensor]:
    """Return, for each P of `training` at `meta`, with eigenvalues λ,

    eigenvalue_max, eigenvalue_min, eigenvalue_mean = trace P / n,
    norm = ‖P‖_F = √Σλ²,    norm_spectral = ‖P‖₂ = max |λ|,    condition = max |λ| / min |λ|.

    P is the n-by-n matrix of its family: 1 by 1 for `Scalar`. A singular P has an infinite condition number.
    """
    scalars = {}
    for k, values in eigenvalues(training, meta).items():
        sizes = values.abs()
        scalars[f"eigenvalue_max/{k}"] = values.amax()
        scalars[f"eigenvalue_min/{k}"] = values.amin()
        scalars[f"eigenvalue_mean/{k}"] = values.mean()
        scalars[f"norm/{k}"] = torch.linalg.vector_norm(values)
        scalars[f"norm_spectral/{k}"] = sizes.amax()
        scalars[f"condition/{k}"] = sizes.amax() / sizes.amin()
    return scalars


def whitening(training: Trains, meta: Meta, grads: Params) -> dict[str, Tensor]:
    """Return, for each `Spatial` P of `training` at `meta`, how a kernel's positions weigh on each other:

    whitening_self          on itself,
    whitening_neighbours    on those one step away along an axis, without wrapping: in a plane 4, or fewer,
    whitening_distant       on all others,
    whitening_index         -neighbours / self.

    The index is 0 for multiples of the identity and positive where P decorrelates as the paper describes:
    strong positive weights on itself, negative ones on neighbours (section 5). Where distant weights are as
    negative as those, P only removes the mean over the kernel. Weights are means over pairs, and 0 for none.
    Of `grads` only the shapes count, which are those of the kernels.
    """
    spatial = [k for k, (family, _) in _learned(training, meta).items() if _is_spatial(family)]
    scalars = {}
    for k, p in matrices(training, meta, spatial).items():
        own, near, far = weights(p, grads[k].shape[2:])
        scalars[f"whitening_self/{k}"] = own
        scalars[f"whitening_neighbours/{k}"] = near
        scalars[f"whitening_distant/{k}"] = far
        scalars[f"whitening_index/{k}"] = torch.where(near == 0, 0.0, -near / own)
    return scalars


def weights(p: Tensor, kernel: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return how the positions of a kernel weigh on themselves, on neighbours and on others, on average.

    p: P, n by n.
    kernel: the sizes of the kernel, whose product is n.

    >>> own, neighbours, distant = metafop.diagnostics.weights(torch.eye(9), (3, 3))
    >>> own, neighbours, distant
    (tensor(1.), tensor(0.), tensor(0.))
    """
    steps = _steps(kernel, p.device)
    return _mean(p, steps == 0), _mean(p, steps == 1), _mean(p, steps > 1)


def matrices(training: Trains, meta: Meta, names: Iterable[str]) -> dict[str, Tensor]:
    """Return P itself, of `training` at `meta`, for the parameters in `names`.

    It has n by n numbers, too many for `Kronecker` on a wide layer.
    """
    learned = ((k, *_learned(training, meta)[k]) for k in names)
    return {k: family.matrix(m) for k, family, m in learned if isinstance(family, Inspectable)}


def _learned(training: Trains, meta: Meta) -> dict[str, tuple[Preconditioner, Tree]]:
    """Return the family and the tensors of each parameter for which there are any."""
    if not isinstance(training, Training):
        return {}
    return {k: (training.preconditioners[k], m) for k, m in meta.precond.items() if tree.leaves(m)}


def _is_spatial(family: Preconditioner) -> bool:
    while isinstance(family, Normalized | Bounded | Rescaled):
        family = family.family
    return isinstance(family, Spatial)


def _eigenvalues(family: Inspectable, m: Tree) -> Tensor:
    finite = tree.all_finite(m)
    usable = tree.map(lambda x: torch.where(finite, x, 0.0), m)  # LAPACK raises on NaN
    return torch.where(finite, family.eigenvalues(usable).sort().values, torch.nan)


def _steps(kernel: Sequence[int], device: torch.device) -> Tensor:
    """Return how many steps along the axes lie between each two positions of the kernel, row by row."""
    along = [torch.arange(size, device=device) for size in kernel]
    positions = torch.stack(torch.meshgrid(*along, indexing="ij"), -1).flatten(0, -2)  # (n, axes)
    return (positions[:, None] - positions).abs().sum(-1)


def _mean(p: Tensor, pairs: Tensor) -> Tensor:
    return torch.where(pairs, p, 0.0).sum() / pairs.sum().clamp(min=1)


def unit(x: Tensor) -> Tensor:
    """Return x/‖x‖, or zero for zero. The largest number is divided out first: squares underflow."""
    x = wide(x)
    largest = x.abs().amax()
    x = x / torch.where(largest == 0, 1.0, largest)
    return x / torch.linalg.vector_norm(x).clamp(min=1)  # at least 1 by now, unless zero


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
