"""One step of training with each optimizer: its time, apart from forward and backward, and its memory.

A step's time is the median over periods of the mean over each, all optimizers taking turns. The period
of an optimizer is ten steps if it does some of its work at every tenth only: FOP with low rank, SOAP, and
Shampoo where it is asked to. That of all others is one. What it takes more than SGD is the difference from
SGD's over the same period. The first steps of a longer turn, when caches hold another's work, do not count.
"""

import copy
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from pytorch_optimizer import SOAP, Shampoo
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from experiments.measuring.memory import peak_of_tensors
from metafop import LowRank, tree
from metafop.optim import FOP

Batch = tuple[Tensor, Tensor]
LR, MOMENTUM, CLASSES = 1e-3, 0.9, 10
OURS: dict[str, dict[str, Any]] = {
    "fop": {},
    "rank4": {"preconditioner": {"*weight": LowRank(4)}},
    "rank64": {"preconditioner": {"*weight": LowRank(64)}},
    "rank4_every_step": {"preconditioner": {"*weight": LowRank(4)}, "interval": 1},
    "rank64_every_step": {"preconditioner": {"*weight": LowRank(64)}, "interval": 1},
    "paper": {"preset": "paper"},
}
SECOND_ORDER = ("soap", "shampoo_every_10th", "shampoo")
PEERS = ("sgd_fused", "adam", "muon", *SECOND_ORDER)
PERIOD = 10
WARMUP = 2  # rounds, in which states are made
LEAD = 3  # steps at the beginning of a longer turn: SGD's first takes half as long again as its fourth
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
MEMORY_STEPS = PERIOD + 2
RESAMPLES = 2000


class Net(NamedTuple):
    """A network, the optimizers it can be trained with, and for how long these are measured on it."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    methods: tuple[str, ...]
    periodic: tuple[str, ...]  # those with a period of ten steps
    turn: int  # steps that count, of those that an optimizer takes before it is another's turn
    rounds: int  # in each, every optimizer has a turn
    few: int  # rounds of the second-order methods, which may take seconds a step

    def period(self, method: str) -> int:
        return PERIOD if method in self.periodic else 1


class Times(NamedTuple):
    """Seconds of each step, in order: forward and backward, then the optimizer."""

    passes: list[float]
    steps: list[float]


class Memory(NamedTuple):
    """Bytes of the parameters, and of what there is besides because of training."""

    params: int
    state: int  # of the optimizer
    held: int  # all that is left when gradients are dropped: the state, and what is kept outside of it
    peak: int  # all at once, gradients included


def optimizers(method: str, model: nn.Module) -> Sequence[Optimizer]:
    """Return what is stepped together: one optimizer, but Muon takes matrices only, and SGD the rest."""
    if method in OURS:
        return [FOP(model, torch.optim.SGD, lr=LR, momentum=MOMENTUM, **OURS[method])]
    params = list(model.parameters())
    if method in ("sgd", "sgd_fused"):
        return [torch.optim.SGD(params, lr=LR, momentum=MOMENTUM, fused=method == "sgd_fused" or None)]
    if method == "adam":
        return [torch.optim.Adam(params, lr=LR)]
    if method == "muon":
        matrices, rest = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
        return [torch.optim.Muon(matrices, lr=LR), torch.optim.SGD(rest, lr=LR, momentum=MOMENTUM)]
    if method == "soap":
        return [SOAP(params, lr=LR)]
    if method == "shampoo":
        return [Shampoo(params, lr=LR)]
    # With old roots it can diverge at the lr of the others, on few examples; its time is the same at any.
    return [Shampoo(params, lr=1e-6, preconditioning_compute_steps=PERIOD)]


def draw_batch(net: Net, size: int, generator: Generator) -> Batch:
    inputs = torch.randn(size, *net.shape, generator=generator)
    return inputs, torch.randint(CLASSES, (size,), generator=generator)


def take(
    model: nn.Module,
    stepped: Sequence[Optimizer],
    batch: Batch,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Take one step; return the seconds of forward and backward, and those of the optimizer."""
    begin = clock()
    model.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    middle = clock()
    for optimizer in stepped:
        optimizer.step()
    return middle - begin, clock() - middle


def measure(
    net: Net, size: int, clock: Callable[[], float], generator: Generator, tick: Callable[[], None]
) -> dict[str, Times]:
    """Train a copy of the net with each optimizer, all taking turns, on a new batch in each round."""
    model = net.model()
    copies = {method: copy.deepcopy(model) for method in net.methods}
    stepped = {method: optimizers(method, copied) for method, copied in copies.items()}
    times = {method: Times([], []) for method in net.methods}
    gc.freeze()  # what has been imported is not garbage, and takes long to search
    for i in range(WARMUP + net.rounds):
        batch = draw_batch(net, size, generator)
        for method in net.methods:
            if method in SECOND_ORDER and i >= WARMUP + net.few:
                continue
            gc.collect()  # so that the garbage of one does not cost the next
            lead = LEAD if net.turn > 1 else 0
            for j in range(lead + net.turn):
                passes, step = take(copies[method], stepped[method], batch, clock)
                if i >= WARMUP and j >= lead:
                    times[method].passes.append(passes)
                    times[method].steps.append(step)
        tick()
    gc.unfreeze()
    return times


def typical(steps: Tensor, period: int) -> Tensor:
    """Return the median over periods of the mean over each; leading dimensions are a stack."""
    return steps.unflatten(-1, (-1, period)).mean(-1).quantile(0.5, dim=-1)


class Overhead(NamedTuple):
    """Seconds of the optimizer's step, and what it takes more than SGD's, in percent of a step with SGD."""

    seconds: float
    percent: float
    low: float  # the 95 % interval of the percentage
    high: float


def overheads(net: Net, times: dict[str, Times], generator: Generator) -> dict[str, Overhead]:
    """Return 100 (step - SGD's step) / (forward and backward + SGD's step), and its bootstrap over rounds.

    Forward and backward are the same work for all: their median is that over all optimizers.
    """
    passes = torch.tensor([t for by in times.values() for t in by.passes], dtype=torch.float64).quantile(0.5)

    def percent(of: Tensor, base: Tensor) -> Tensor:
        return 100 * (of - base) / (passes + base)

    def resampled(steps: Tensor) -> Tensor:
        rounds = steps.unflatten(0, (-1, net.turn))
        drawn = torch.randint(len(rounds), (RESAMPLES, len(rounds)), generator=generator)
        return rounds[drawn].flatten(1)

    result = {}
    base = torch.tensor(times["sgd"].steps, dtype=torch.float64)
    for method, (_, taken) in times.items():
        steps, period = torch.tensor(taken, dtype=torch.float64), net.period(method)
        found = typical(steps, period)
        spread = percent(typical(resampled(steps), period), typical(resampled(base), period))
        low, high = spread.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        result[method] = Overhead(found.item(), percent(found, typical(base, period)).item(), low, high)
    return result


def memory_of(net: Net, method: str) -> Memory:
    """Train for a period with batches of two, so that activations do not hide what the optimizer takes."""
    torch.set_num_threads(1)
    model, generator = net.model(), Generator().manual_seed(0)
    batches = [draw_batch(net, 2, generator) for _ in range(MEMORY_STEPS)]
    before = alive()
    stepped = optimizers(method, model)

    def train(batches: Any) -> None:
        for batch in batches:
            take(model, stepped, batch)

    peak = peak_of_tensors(train, batches)
    model.zero_grad()
    state = bytes_of([list(optimizer.state.values()) for optimizer in stepped])
    return Memory(bytes_of(list(model.parameters())), state, alive() - before, peak)


def alive() -> int:
    """Return the bytes of all tensors that Python holds; those of torch.func's transforms hold others."""
    gc.collect()
    held = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    return bytes_of([x for x in held if not tree.is_wrapped(x)])


def bytes_of(values: Any) -> int:
    """Return the bytes of all tensors in a tree; what several of them share counts once."""
    storages = [leaf.untyped_storage() for leaf in tree.leaves(values) if isinstance(leaf, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
