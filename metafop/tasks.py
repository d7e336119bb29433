"""Many tasks with one meta: their trainings go side by side, as one."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.func import vmap

from metafop import tree, validation
from metafop.norms import NormsWrittenOut
from metafop.protocols import Domain, Domains
from metafop.training import Training
from metafop.types import Batch, Buffers, Carry, Given, Info, Last, Meta, Params, Seen, Tree


@dataclass(frozen=True)
class Tasks:
    """A training of `count` tasks at once, by vmap, with one meta.

    Each task has parameters and batches of its own: every leaf of a carry and of a batch has the tasks for
    its first dimension. A step's loss is their mean, and each task takes the step of its own gradient. The
    outer loss is of all of them, such as the mean of their losses on other examples:
    `vmap(loss_of_one)(carry.params, examples).mean()`.

    Any estimator differentiates it, and `Unrolled` learns meta from it, and with "start" in `learn` the
    parameters from which every task starts (MAML, Finn et al., 2017). Batch, layer and instance norm are
    written out, for torch's derivative of their gradient through vmap is wrong.

    training: that of one task.
    count: how many tasks there are, 1 or more.

    >>> loss = metafop.functional.plain(lambda params, batch: (params["w"] - batch).square().sum())
    >>> training, params = Training(loss, SGD()), {"w": torch.zeros(1)}
    >>> tasks, meta = metafop.Tasks(training, count=3), training.init_meta(params, lr=0.25)
    >>> carry, info = tasks.step(meta, tasks.init(params), torch.tensor([[1.0], [2.0], [4.0]]))
    >>> carry.params["w"].flatten(), info["value"]
    (tensor([0.5000, 1.0000, 2.0000]), tensor(7.))
    """

    training: Training
    count: int

    def __post_init__(self) -> None:
        validation.instance("Tasks", "a Training", self.training)
        if not isinstance(self.training, Training) or type(self.training).advance is not Training.advance:
            raise TypeError(
                f"Tasks takes a Training, whose advance does not read the loss of a task, got a "
                f"{type(self.training).__name__}. Pass Training(loss, optimizer)."
            )
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(
                f"Tasks takes a count of one or more, got {self.count!r}. Pass the number of tasks."
            )

    @property
    def domains(self) -> Domains:
        return self.training.domains

    @property
    def loss_domains(self) -> Mapping[str, Domain]:
        return self.training.loss_domains

    def init(self, params: Params, buffers: Buffers | None = None) -> Carry:
        """Return the carry of tasks that all start from the same parameters and buffers.

        params: what is trained, by name, of one task.
        buffers: what else the loss reads and changes, of one task (none).
        """
        return tree.stack(self.count * [self.training.init(params, buffers)])

    def evaluate(self, meta: Meta, carry: Carry, batch: Batch) -> Seen:
        """Return the mean loss of a `batch` at the parameters of `carry`, and each task's gradients."""
        validation.evaluated(meta, carry)
        self._check_first_dimension(carry, batch)
        with NormsWrittenOut():
            seen = vmap(self.training.evaluate, in_dims=(None, 0, 0))(meta, carry, batch)
        return seen._replace(value=seen.value.mean())

    def advance(self, meta: Meta, carry: Carry, seen: Seen) -> tuple[Carry, Info]:
        """Return the carry after a step of every task from `carry`, on what was `seen` there; and info."""
        validation.same_tree(meta, carry)
        each = seen._replace(value=seen.value.expand(self.count))
        carry, _ = vmap(self.training.advance, in_dims=(None, 0, 0))(meta, carry, each)
        return carry, {"value": seen.value}

    def step(self, meta: Meta, carry: Carry, batch: Batch) -> tuple[Carry, Info]:
        """Return `advance(meta, carry, evaluate(meta, carry, batch))`: one step of every task."""
        return self.advance(meta, carry, self.evaluate(meta, carry, batch))

    def pullback(self, meta: Meta, last: Last, cotangent: Params) -> Meta:
        """Return the derivative of ⟨`cotangent`, params after the `last` step⟩ in `meta`, over all tasks."""
        given, seen = last.given, last.seen._replace(value=last.seen.value.expand(self.count))

        def of_one(last: Last, batch: Batch, cotangent: Params) -> Meta:
            own = Given(given.leaves, batch) if given else ()  # the same leaves for all tasks
            return self.training.pullback(meta, last._replace(given=own), cotangent)

        each = vmap(of_one)(last._replace(seen=seen, given=()), given.batch if given else (), cotangent)
        return tree.map(lambda x: x.sum(0), each)

    def init_memory(self, carry: Carry) -> Tree:
        """Return the memory that `credited` starts from, for the parameters of a `carry`."""
        return vmap(self.training.init_memory)(carry)

    def credited(self, meta: Meta, memory: Tree, grads: Params) -> tuple[Params | tuple[()], Tree]:
        """Return the gradients that each task's step with `meta` is made of, after `memory`, and the memory.

        grads: the step's own gradients.
        """
        return vmap(self.training.credited, in_dims=(None, 0, 0))(meta, memory, grads)

    def check(self, meta: Meta, carry: Carry) -> None:
        """Refuse a `meta` that was made for other parameters than those of each task in `carry`."""
        self._check_first_dimension(carry, ())
        self.training.check(meta, tree.map(lambda x: x[0], carry))

    def _check_first_dimension(self, carry: Carry, batch: Batch) -> None:
        for what, given in (("carry", carry), ("batch", batch)):
            for leaf in tree.leaves(given):
                shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else None
                if shape is None or shape[:1] != (self.count,):
                    found = f"{leaf!r}" if shape is None else f"a tensor of shape {shape}"
                    raise ValueError(
                        f"Tasks(count={self.count}) takes a {what} whose leaves have {self.count} tasks for "
                        f"first dimension, got {found}. Make a carry with tasks.init(params), a batch with "
                        "torch.stack."
                    )
