"""One step of meta-learning by every way: ours, higher's loop, and a loop of torch.func by hand."""

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import functional_call, grad, grad_and_value, vmap

from experiments.studies.maml.sinusoids import Episode, Problem, squared_error
from metafop import Adam, Carry
from metafop.hypergradients import Adjoint, adjoint, autograd
from metafop.protocols import Estimator
from metafop.types import Params
from metafop.unrolled import Unrolled, UnrolledState

META_LR, INNER_LR = 1e-3, 0.01  # those of Finn et al.


class Way(Protocol):
    """A loop that learns the start: all tasks take `steps` from it, and meet their query points."""

    def grads(self, episode: Episode) -> tuple[Tensor, Params]:
        """Return the loss of an episode after the steps, and its derivative in the start."""
        ...

    def step(self, episode: Episode) -> Tensor:
        """Take a step of Adam on the start, and return the loss before it."""
        ...


class Ours:
    """`Unrolled`, over the steps of all tasks at once."""

    def __init__(
        self,
        problem: Problem,
        steps: int,
        estimator: Estimator,
        learn: tuple[str, ...] = ("start",),
        lr: Any = INNER_LR,
        meta_lr: Any = META_LR,
    ) -> None:
        self.problem, self.steps = problem, steps
        meta = problem.tasks.training.init_meta(problem.start, lr=lr)
        self.learner = Unrolled(problem.tasks, Adam(), learn, estimator)
        self.outer_meta = self.learner.init_meta(meta, problem.start, lr=meta_lr)
        self.state: UnrolledState = self.learner.init(meta, problem.start)
        self.carry = problem.tasks.init(problem.start)  # its parameters give way to `state.start`

    @property
    def start(self) -> Params:
        return dict(self.state.start)

    def step(self, episode: Episode) -> Tensor:
        batches = self.steps * [episode.support]
        outer_loss = _outer_loss(self.problem, episode)
        self.state, info = self.learner.step(self.outer_meta, self.state, outer_loss, self.carry, batches)
        return info["value"]

    def grads(self, episode: Episode) -> tuple[Tensor, Params]:
        tasks, learner = self.problem.tasks, self.learner
        batches, outer_loss = self.steps * [episode.support], _outer_loss(self.problem, episode)
        carry = tasks.init(self.start)
        estimate = learner.estimator(tasks, outer_loss, self.state.meta, carry, batches)
        return estimate.value, {name: g.sum(0) for name, g in estimate.start.params.items()}


class ByHigher:
    """The loop of higher's example of MAML: a graph for each task, one after the other."""

    def __init__(self, problem: Problem, steps: int) -> None:
        self.network, self.steps = copy.deepcopy(problem.network), steps
        self.inner = torch.optim.SGD(self.network.parameters(), lr=INNER_LR)
        self.outer = torch.optim.Adam(self.network.parameters(), lr=META_LR)

    def step(self, episode: Episode) -> Tensor:
        value = self._backward(episode)
        self.outer.step()
        return value

    def grads(self, episode: Episode) -> tuple[Tensor, Params]:
        value = self._backward(episode)
        return value, {
            name: p.grad.clone() for name, p in self.network.named_parameters() if p.grad is not None
        }

    def _backward(self, episode: Episode) -> Tensor:
        import higher  # not installed with the other extras

        self.outer.zero_grad()
        values = []
        for x_seen, y_seen, x, y in zip(*episode.support, *episode.query, strict=True):
            with higher.innerloop_ctx(self.network, self.inner, copy_initial_weights=False) as (network, opt):
                for _ in range(self.steps):
                    opt.step(squared_error(network, (x_seen, y_seen)))
                value = squared_error(network, (x, y))
                (value / len(episode.query[0])).backward()
                values.append(value.detach())
        return torch.stack(values).mean()


class ByHand:
    """All tasks at once by vmap of grad, as in torch's own example of MAML: what needs no library."""

    def __init__(self, problem: Problem, steps: int) -> None:
        self.network, self.steps = copy.deepcopy(problem.network), steps
        self.outer = torch.optim.Adam(self.network.parameters(), lr=META_LR)

    def step(self, episode: Episode) -> Tensor:
        value, grads = self.grads(episode)
        for name, p in self.network.named_parameters():
            p.grad = grads[name]
        self.outer.step()
        return value

    def grads(self, episode: Episode) -> tuple[Tensor, Params]:
        start = {name: p.detach() for name, p in self.network.named_parameters()}

        def loss(params: Params, examples: Any) -> Tensor:
            return squared_error(lambda x: functional_call(self.network, params, (x,)), examples)

        def after(start: Params, support: Any, query: Any) -> Tensor:
            params = start
            for _ in range(self.steps):
                moves = grad(loss)(params, support)
                params = {name: p - INNER_LR * moves[name] for name, p in params.items()}
            return loss(params, query)

        def mean(start: Params) -> Tensor:
            return vmap(after, in_dims=(None, 0, 0))(start, episode.support, episode.query).mean()

        grads, value = grad_and_value(mean)(start)
        return value, grads


def ways(compiled: bool) -> dict[str, Callable[[Problem, int], Way]]:
    """Return every way to make a loop, by name: of a problem and a number of steps."""
    built = Adjoint(compile=compiled)
    return {
        "metafop, compiled": lambda problem, steps: Ours(problem, steps, built),
        "metafop, adjoint": lambda problem, steps: Ours(problem, steps, adjoint),
        "metafop, autograd": lambda problem, steps: Ours(problem, steps, autograd),
        "torch.func by hand": ByHand,
        "higher": ByHigher,
    }


def _outer_loss(problem: Problem, episode: Episode) -> Callable[[Carry], Tensor]:
    """Return the mean loss of all tasks on their query points, of the carry after the steps."""

    def of_one(params: Params, query: Any) -> Tensor:
        return problem.loss(params, {}, query)[0]

    return lambda carry: vmap(of_one)(carry.params, episode.query).mean()
