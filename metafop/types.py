"""The words of the library as types: what a step sees, what it hands on, and who takes part in it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Generator, Tensor

Tree = Any  # a tensor, or dicts, tuples and NamedTuples of trees
Params = dict[str, Tensor]
Buffers = dict[str, Tensor]
Batch = Any
Loss = Callable[[Params, Buffers, Batch], tuple[Tensor, Buffers]]
Info = dict[str, Tensor]
OuterLoss = Callable[[Any], Tensor]  # of a carry
Progress = Callable[[str, int, int], None]  # told what is being done, how many steps of it, of how many


class Meta(NamedTuple):
    """What training depends on and may be learned: the optimizer's `hyper`, each preconditioner's tensors."""

    hyper: Any
    precond: dict[str, Tree]


class Seen(NamedTuple):
    """What one evaluation of the loss saw."""

    value: Tensor
    grads: Params
    buffers: Buffers


class Carry(NamedTuple):
    """What a step hands on to the next."""

    params: Params
    opt: Tree
    buffers: Buffers


class Last(NamedTuple):
    """A step that was taken: from which carry, on what it saw, and which gradients its movement is made of.

    `credit` is `()` where the step's own gradient takes all the credit for it.
    """

    carry: Any
    seen: Seen
    credit: Params | tuple[()]


class Domain(Protocol):
    """The values that a hyperparameter may take, and the coordinate in which it is learned."""

    @property
    def says(self) -> str: ...

    def holds(self, value: float) -> bool: ...

    def inside(self, value: float) -> bool: ...

    def coordinate(self, value: Tensor) -> Tensor:
        """Return z(x)."""
        ...

    def chain(self, value: Tensor, derivative: Tensor) -> Tensor:
        """Return the derivative in z, given that in x."""
        ...

    def moved(self, value: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Return x after its coordinate went from `old` to `new`."""
        ...


Domains = Mapping[
    str, Domain | tuple[Domain, ...]
]  # of each field of hyper; of a tuple such as betas, a tuple


@runtime_checkable
class Optimizer(Protocol):
    """A pure update rule: all that one of your own needs to be. The rest, `CompleteOptimizer`, has defaults.

    `hyper` is a NamedTuple whose fields are tensors, tuples of these, or dicts of them by pattern of names.
    """

    @property
    def domains(self) -> Domains:
        """The domain of each field of `hyper`: `Positive()`, `Unit()`, `Free()`; for a tuple, one of each."""
        ...

    def init(self, params: Params) -> Tree:
        """Return the state before the first step."""
        ...

    def update(self, hyper: Any, params: Params, opt: Tree, direction: Params) -> tuple[Params, Tree]:
        """Return the new parameters and the new state."""
        ...


@runtime_checkable
class CompleteOptimizer(Optimizer, Protocol):
    """An optimizer with all that learning asks of it: hyperparameters, closed-form derivatives, credit."""

    @property
    def hyper(self) -> Callable[..., Any]:
        """Return hyperparameters, given by name as numbers, tensors, or dicts of these by pattern."""
        ...

    def pullback(
        self, hyper: Any, params: Params, opt: Tree, direction: Params, cotangent: Params
    ) -> tuple[Any, Params]:
        """Return the derivatives of ⟨cotangent, new params⟩ in `hyper` and in `direction`."""
        ...

    def init_memory(self, params: Params) -> Tree:
        """Return the memory that `credit` starts from."""
        ...

    def credit(self, hyper: Any, memory: Tree, grads: Params) -> tuple[Params | tuple[()], Tree]:
        """Return the gradients that this step's movement is made of, and the memory of them.

        `()` says that it is made of the step's own gradient alone.
        """
        ...

    def toward(self, hyper: Any, params: Params, opt: Tree, direction: Params, cotangent: Params) -> Params:
        """Return the cotangent of the movement that `credit` accounts for."""
        ...


@runtime_checkable
class Reversible(CompleteOptimizer, Protocol):
    """An optimizer whose step can be undone, every bit of it, given the direction that it took.

    In two parts, for that direction comes from the gradient at the parameters before the step: `before` finds
    these, then `undo` the rest.
    """

    def before(self, hyper: Any, params: Params, opt: Tree) -> tuple[Params, Tree]:
        """Return the parameters before the step that led here, and the state for `undo`."""
        ...

    def undo(self, hyper: Any, params: Params, opt: Tree, direction: Params, emptied: Params) -> Tree:
        """Return the state before the step, given what `before` returned and what `emptied` did then."""
        ...

    def emptied(self, hyper: Any, opt: Tree) -> Params:
        """Return the stores that the next update will empty, by name: to `undo` it, they must be known."""
        ...


@runtime_checkable
class Preconditioner(Protocol):
    """A family of symmetric matrices P(m) that act on the gradient of one parameter."""

    def init(self, param: Tensor, generator: Generator | None) -> Tree:
        """Return the tensors m to start from; `()` where nothing is learned."""
        ...

    def apply(self, m: Tree, grad: Tensor) -> Tensor:
        """Return P(m) g, in the shape of `grad`."""
        ...

    def pullback(self, m: Tree, grad: Tensor, cotangent: Tensor) -> Tree:
        """Return the derivative of ⟨cotangent, P(m) grad⟩ in m."""
        ...


@runtime_checkable
class Inspectable(Preconditioner, Protocol):
    """A family whose P can be looked at: what diagnostics show, and what `Normalized` and its kin rescale."""

    def dimension(self, m: Tree) -> int:
        """Return n, the number of rows of P(m)."""
        ...

    def norm(self, m: Tree) -> Tensor:
        """Return ‖P(m)‖_F, smooth in m and without forming P where that is large."""
        ...

    def eigenvalues(self, m: Tree) -> Tensor:
        """Return the eigenvalues of P(m), in no particular order."""
        ...

    def matrix(self, m: Tree) -> Tensor:
        """Return P(m), n by n: `grad`, cut into rows of n, becomes rows @ P."""
        ...


class Trains(Protocol):
    """What can be trained as meta says: `Training`, and `Online`, which learns the meta of another."""

    @property
    def domains(self) -> Domains: ...

    def evaluate(self, carry: Any, batch: Batch, /) -> Seen: ...

    def advance(self, meta: Meta, carry: Any, seen: Seen, /) -> tuple[Any, Info]: ...

    def pullback(self, meta: Meta, last: Last, cotangent: Params) -> Meta: ...

    def step(self, meta: Meta, carry: Any, batch: Batch, /) -> tuple[Any, Info]: ...

    def check(self, meta: Meta, carry: Any, /) -> None: ...

    def init_memory(self, carry: Any, /) -> Tree: ...

    def credited(self, meta: Meta, memory: Tree, grads: Params) -> tuple[Params | tuple[()], Tree]: ...


class Estimate(NamedTuple):
    """A hypergradient over many steps: ∂value/∂meta, where value = outer_loss(carry after all steps).

    `carry` starts the next window. `info` holds what a person looks at: tensors, and "notes", a tuple of
    sentences that is empty where there is nothing to say.
    """

    value: Tensor
    grads: Meta
    carry: Any
    info: dict[str, Any]


class Batches(Protocol):
    """One batch for each step; a step gives the same whenever it is asked: backward passes ask again."""

    def __len__(self) -> int: ...

    def __getitem__(self, t: int, /) -> Batch: ...


class Estimator(Protocol):
    """A way to differentiate `outer_loss` of the carry after `len(batches)` steps in `meta`."""

    def __call__(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches
    ) -> Estimate: ...
