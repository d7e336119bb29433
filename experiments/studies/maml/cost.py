"""Every way against higher: the same numbers, and what a meta step takes in time and memory."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from experiments.measuring.isolation import isolated
from experiments.measuring.memory import peak_of_tensors, peak_resident
from experiments.measuring.timing import take_turns
from experiments.studies.maml.config import Config
from experiments.studies.maml.sinusoids import Episode, draw_episode, make_problem
from experiments.studies.maml.ways import ways
from metafop import tree

WARMUP = 3  # meta steps, after which everything is compiled


class Memory(NamedTuple):
    """Bytes at the peak, above those before: of tensors, and of the whole process where that can be known."""

    tensors: int
    resident: int | None


class Cost(NamedTuple):
    """By way: the loss of each meta step, seconds, memory, and the error of the meta-gradient in float64."""

    losses: dict[str, Tensor]
    seconds: dict[str, list[float]]
    memory: dict[str, Memory]
    errors: dict[str, float]


def measure(config: Config, steps: int, tick: Callable[[str], None]) -> Cost:
    """Take the same meta steps in every way, then time one of each in turns."""
    errors = gradient_errors(config, steps)
    tick("meta-gradients")
    problem, losses, runs = make_problem(config.width, config.tasks, config.seed), {}, {}
    *first, last = episodes(config, config.compared + 1)
    for name, make in ways(config.compiled).items():
        way = make(problem, steps)
        losses[name] = torch.stack([way.step(episode) for episode in first])
        runs[name] = lambda way=way: way.step(last)
        tick(f"{name}, {config.compared} meta steps")
    seconds = take_turns(runs, config.rounds, lambda: tick("time"))
    memory = {}
    for name in runs:
        memory[name] = alone(config, steps, name)
        tick("memory")
    return Cost(losses, seconds, memory, errors)


def episodes(config: Config, count: int) -> list[Episode]:
    generator = Generator().manual_seed(config.seed)
    return [draw_episode(config.tasks, config.shots, generator) for _ in range(count)]


def gradient_errors(config: Config, steps: int) -> dict[str, float]:
    """Return the relative error ‖g - g of higher‖ / ‖g of higher‖ of each way, all of it in float64."""
    problem = make_problem(config.width, config.tasks, config.seed, torch.float64)
    episode = tree.map(Tensor.double, episodes(config, 1)[0])
    grads = {name: make(problem, steps).grads(episode)[1] for name, make in ways(config.compiled).items()}
    wanted = grads.pop("higher")
    return {
        name: (tree.norm(tree.map(torch.sub, found, wanted)) / tree.norm(wanted)).item()
        for name, found in grads.items()
    }


def alone(config: Config, steps: int, name: str) -> Memory:
    """Measure memory, if wanted in a process of its own in which nothing has been allocated before."""
    if not config.isolated:
        return memory_of(config, steps, name)
    preload = [__name__, "higher", "torch._dynamo", "torch._inductor"]
    return isolated(preload, memory_of, config, steps, name)


def memory_of(config: Config, steps: int, name: str) -> Memory:
    torch.set_num_threads(config.threads)
    problem, (episode,) = make_problem(config.width, config.tasks, config.seed), episodes(config, 1)
    way = ways(config.compiled)[name](problem, steps)
    for _ in range(WARMUP):
        way.step(episode)
    # In this order, because the profiler takes memory itself.
    resident = peak_resident(lambda: way.step(episode)) if config.isolated else None
    return Memory(peak_of_tensors(lambda _: way.step(episode), []), resident)
