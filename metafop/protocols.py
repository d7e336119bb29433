"""Who takes part in training and in differentiating it, as protocols."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Generator, Tensor

from metafop.types import Batch, Estimate, Info, Last, Meta, OuterLoss, Params, Seen, Tree


class Domain(Protocol):
    """The values that a hyperparameter x may take, and the coordinate z(x) in which it is learned."""

    @property
    def says(self) -> str:
        """The range in words, such as "above zero"."""
        ...

    def holds(self, value: float) -> bool:
        """Return whether x may have the `value`."""
        ...

    def inside(self, value: float) -> bool:
        """Return whether x can be learned from the `value`: not from the boundary of its range."""
        ...

    def coordinate(self, value: Tensor) -> Tensor:
        """Return z of the `value`."""
        ...

    def chain(self, value: Tensor, derivative: Tensor) -> Tensor:
        """Return the derivative in z at the `value`, given the `derivative` in x."""
        ...

    def moved(self, value: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Return the `value` after its coordinate went from `old` to `new`."""
        ...


Domains = Mapping[
    str, Domain | tuple[Domain, ...]
]  # of each field of hyper; of a tuple such as betas, a tuple


@runtime_checkable
class Optimizer(Protocol):
    """A pure update rule: all that one of your own needs. The rest, `CompleteOptimizer`, has defaults."""

    @property
    def domains(self) -> Domains:
        """The domain of each field of `hyper`: `Positive()`, `Unit()`, `Free()`, or a tuple of these."""
        ...

    def init(self, params: Params) -> Tree:
        """Return the state before the first step of these `params`."""
        ...

    def update(self, hyper: Any, params: Params, opt: Tree, direction: Params) -> tuple[Params, Tree]:
        """Return the new parameters and the new state.

        hyper: a NamedTuple of tensors, of tuples of these, or of dicts of them by pattern of parameter names.
        params: the parameters before the step, by name.
        opt: the state before it.
        direction: what the parameters have for gradients, by name: P g where there is a preconditioner.
        """
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
        """Return the derivatives of ⟨c, new params⟩, c the `cotangent`, in `hyper` and in `direction`.

        The step is that of `update` from `params` and `opt`, which are held.
        """
        ...

    def init_memory(self, params: Params) -> Tree:
        """Return the memory that `credit` starts from, for these `params`."""
        ...

    def credit(self, hyper: Any, memory: Tree, grads: Params) -> tuple[Params | tuple[()], Tree]:
        """Return the gradients that a step's movement with `hyper` is made of, and the memory of them.

        memory: that before the step.
        grads: the step's own gradients. If it is made of these alone, `()` is returned for them.
        """
        ...

    def toward(self, hyper: Any, params: Params, opt: Tree, direction: Params, cotangent: Params) -> Params:
        """Return the cotangent of the movement that `credit` accounts for.

        It is given what `pullback` is: `hyper`, `params`, `opt`, `direction` and `cotangent`.
        """
        ...


@runtime_checkable
class Reversible(CompleteOptimizer, Protocol):
    """An optimizer whose step can be undone, every bit of it, given the direction that it took.

    In two parts, for that direction comes from the gradient at the parameters before the step: `before` finds
    these, then `undo` the rest.
    """

    def before(self, hyper: Any, params: Params, opt: Tree) -> tuple[Params, Tree]:
        """Return the parameters before the step with `hyper` to `params`, `opt`, and the state for `undo`."""
        ...

    def undo(self, hyper: Any, params: Params, opt: Tree, direction: Params, emptied: Params) -> Tree:
        """Return the state before the step with `hyper` along `direction`.

        params, opt: what `before` returned.
        emptied: what `self.emptied` returned before the step was taken.
        """
        ...

    def emptied(self, hyper: Any, opt: Tree) -> Params:
        """Return the stores that an update with `hyper` from `opt` will empty, by name: `undo` needs them."""
        ...


@runtime_checkable
class Preconditioner(Protocol):
    """A family of symmetric matrices P(m) that act on the gradient of one parameter."""

    def init(self, param: Tensor, generator: Generator | None) -> Tree:
        """Return the tensors m to start from for a `param`; `()` where nothing is learned.

        generator: where a family that starts at random draws from; others take None.
        """
        ...

    def apply(self, m: Tree, grad: Tensor) -> Tensor:
        """Return `P(m) grad`, in the shape of `grad`."""
        ...

    def pullback(self, m: Tree, grad: Tensor, cotangent: Tensor) -> Tree:
        """Return the derivative of `⟨cotangent, P(m) grad⟩` in `m`."""
        ...


@runtime_checkable
class Inspectable(Preconditioner, Protocol):
    """A family whose P can be looked at: what diagnostics show, and what `Normalized` and its kin rescale."""

    def dimension(self, m: Tree) -> int:
        """Return n, the number of rows of `P(m)`."""
        ...

    def norm(self, m: Tree) -> Tensor:
        """Return `‖P(m)‖_F`, smooth in m and without forming P where that is large."""
        ...

    def eigenvalues(self, m: Tree) -> Tensor:
        """Return the eigenvalues of `P(m)`, in no particular order."""
        ...

    def matrix(self, m: Tree) -> Tensor:
        """Return `P(m)`, n by n: a gradient, cut into rows of n, becomes rows @ P."""
        ...


class Trains(Protocol):
    """What can be trained as meta says: `Training`, and `Online`, which learns the meta of another."""

    @property
    def domains(self) -> Domains:
        """The domain of each field of meta's hyper."""
        ...

    @property
    def loss_domains(self) -> Mapping[str, Domain]:
        """The domain of each leaf of meta's loss, by pattern of names; of any other, `Free()`."""
        ...

    def evaluate(self, meta: Meta, carry: Any, batch: Batch, /) -> Seen:
        """Return what the loss of a `batch` is at the parameters of a `carry`, given the leaves of `meta`."""
        ...

    def advance(self, meta: Meta, carry: Any, seen: Seen, /) -> tuple[Any, Info]:
        """Return the carry after a step from `carry`, on what was `seen` there, as `meta` says; and info."""
        ...

    def pullback(self, meta: Meta, last: Last, cotangent: Params) -> Meta:
        """Return the derivative of ⟨`cotangent`, params after the `last` step⟩ in `meta`."""
        ...

    def step(self, meta: Meta, carry: Any, batch: Batch, /) -> tuple[Any, Info]:
        """Return `advance(meta, carry, evaluate(meta, carry, batch))`."""
        ...

    def check(self, meta: Meta, carry: Any, /) -> None:
        """Refuse a `meta` that was not made for such a `carry`."""
        ...

    def init_memory(self, carry: Any, /) -> Tree:
        """Return the memory that `credited` starts from, for the parameters of a `carry`."""
        ...

    def credited(self, meta: Meta, memory: Tree, grads: Params) -> tuple[Params | tuple[()], Tree]:
        """Return the credit of a step with `meta` and these `grads`, after `memory`, and the memory after."""
        ...


class Batches(Protocol):
    """One batch for each step; a step gives the same whenever it is asked: backward passes ask again."""

    def __len__(self) -> int: ...

    def __getitem__(self, t: int, /) -> Batch: ...


class Estimator(Protocol):
    """A way to differentiate an outer loss of the carry after many steps in meta."""

    def __call__(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches
    ) -> Estimate:
        """Return the outer loss after `len(batches)` steps, and its derivative in `meta`.

        training: what takes the steps, a `Training` or an `Online`.
        outer_loss: `outer_loss(carry)`, or `outer_loss(carry, meta)`, is a scalar, of the carry after the
            last step.
        meta: where the derivative is taken, such as `training.init_meta` returns.
        carry: where the first step starts: from `training.init`, the estimator's `init`, or the last window.
        batches: a sequence with one for each step, the same whenever it is asked.
        """
        ...
