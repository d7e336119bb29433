"""The tasks: sinusoids, of which a network sees ten points and is asked for others (Finn et al., 2017)."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import mse_loss

from experiments.vision import models
from metafop import SGD, Tasks, Training, functional
from metafop.types import Loss, Params

REACH = 5.0  # x is uniform in [-REACH, REACH]
LOWEST, HIGHEST = 0.1, 5.0  # amplitudes
Examples = tuple[Tensor, Tensor]  # x and y: (tasks, points, 1) each


class Episode(NamedTuple):
    """Points of each task to adapt to, and others of it to be asked for."""

    support: Examples
    query: Examples


class Sinusoids(NamedTuple):
    """y = amplitude sin(x - phase), one for each task: (tasks, 1, 1)."""

    amplitude: Tensor
    phase: Tensor

    def at(self, x: Tensor) -> Examples:
        return x, self.amplitude * torch.sin(x - self.phase)

    def drawn(self, points: int, generator: Generator) -> Examples:
        """Return so many points of each task, at random."""
        uniform = torch.rand(len(self.phase), points, 1, generator=generator)
        return self.at(REACH * (2 * uniform - 1))


class Problem(NamedTuple):
    """A network, its first weights and its loss; and the training of `count` tasks at once."""

    network: nn.Sequential
    start: Params
    loss: Loss
    tasks: Tasks


def draw_sinusoids(count: int, generator: Generator) -> Sinusoids:
    amplitude, phase = torch.rand(2, count, 1, 1, generator=generator)
    return Sinusoids(LOWEST + (HIGHEST - LOWEST) * amplitude, math.pi * phase)


def draw_episode(count: int, shots: int, generator: Generator) -> Episode:
    """Return new tasks, with as many points to adapt to as to be asked for."""
    sinusoids = draw_sinusoids(count, generator)
    return Episode(sinusoids.drawn(shots, generator), sinusoids.drawn(shots, generator))


def squared_error(network: Callable[[Tensor], Tensor], examples: Examples) -> Tensor:
    return mse_loss(network(examples[0]), examples[1])


def make_problem(width: int, count: int, seed: int, dtype: torch.dtype | None = None) -> Problem:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # nn.Module draws its first weights from the global generator
        network = models.mlp(1, width, width, 1).to(dtype)
    loss, start, _ = functional.from_module(network, squared_error)
    return Problem(network, start, loss, Tasks(Training(loss, SGD()), count))
