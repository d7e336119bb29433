"""The words of the library as types: what a step sees, what it hands on, and who takes part in it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

Tree = Any  # a tensor, or dicts, tuples and NamedTuples of trees
Params = dict[str, Tensor]
Buffers = dict[str, Tensor]
Batch = Any
Loss = Callable[
    ..., tuple[Tensor, Buffers]
]  # of params, buffers, batch and, if it takes them, leaves of meta
Info = dict[str, Tensor]
OuterLoss = Callable[..., Tensor]  # of a carry and, if it takes it, of meta
Progress = Callable[[str, int, int], None]  # told what is being done, how many steps of it, of how many


class Meta(NamedTuple):
    """What training depends on and may be learned.

    hyper: the optimizer's hyperparameters, a NamedTuple.
    precond: the tensors of each preconditioner, by parameter name.
    loss: the leaves that the loss is given: any tree of tensors, `()` where there are none.
    """

    hyper: Any
    precond: dict[str, Tree]
    loss: Tree = ()


class Seen(NamedTuple):
    """What one evaluation saw.

    value: that of the loss.
    grads: its gradient, by parameter name.
    buffers: those after it.
    cotangent: the gradient of the validation loss of an `Online` that has one; `()` where it has none.
    batch: that of the loss, where an `Online` learns a leaf of it; `()` where none does.
    """

    value: Tensor
    grads: Params
    buffers: Buffers
    cotangent: Params | tuple[()] = ()
    batch: Batch = ()


class Carry(NamedTuple):
    """What a step hands on to the next: `params` by name, the optimizer's state `opt`, `buffers` by name."""

    params: Params
    opt: Tree
    buffers: Buffers


class Last(NamedTuple):
    """A step that was taken.

    carry: what it started from.
    seen: what it saw there.
    credit: the gradients that its movement is made of; `()` where its own takes all the credit for it.
    given: what its loss was given, where a leaf of that is learned; `()` where none is.
    """

    carry: Any
    seen: Seen
    credit: Params | tuple[()]
    given: "Given | tuple[()]" = ()


class Given(NamedTuple):
    """What a loss was given besides parameters and buffers: the `leaves` of meta, and the `batch`."""

    leaves: Tree
    batch: Batch


class Estimate(NamedTuple):
    """A hypergradient over many steps: ∂value/∂meta, where value = outer_loss(carry after all steps).

    value: the outer loss.
    grads: its derivative in meta, a tree like it.
    start: its derivative in the carry that the first step started from, a tree like that, with zeros for what
        is not differentiated: buffers and integers; `()` from an estimator that does not find it.
    carry: that after all steps, which starts the next window.
    info: what a person looks at: tensors, and "notes", a tuple of sentences that is empty where there is
        nothing to say.
    """

    value: Tensor
    grads: Meta
    start: Any
    carry: Any
    info: dict[str, Any]
