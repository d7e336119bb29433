"""Learning over horizons in a narrow valley, for tests of the loop and of its folder."""

from dataclasses import dataclass, field

import torch

from metafop import Adam, Dense, Momentum, Training, functional
from metafop.hypergradients import adjoint
from metafop.hypergradients.evolution import Evolution
from metafop.hypergradients.forward import Forward
from metafop.meta_training import Trained, meta_train
from metafop.unrolled import Unrolled

ESTIMATORS = {
    "adjoint": adjoint,
    "forward": Forward(learn=("lr",)),
    "evolution": Evolution(learn=("lr",), pairs=2),
}


class Interrupted(Exception):
    pass


@dataclass(frozen=True)
class Valley:
    """Three batches a window of a narrow valley; each episode has its start, each window its floor."""

    training: Training
    estimator: object = adjoint
    scale: float = 1.0
    fails: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    raises: type[BaseException] = field(default=Interrupted, repr=False)

    def start(self, episode):
        rng = torch.Generator().manual_seed(episode)
        carry = self.training.init({"w": self.scale * torch.randn(2, 3, generator=rng)})
        if isinstance(self.estimator, Forward):
            return self.estimator.init(carry)
        return self.estimator.init(carry, rng) if isinstance(self.estimator, Evolution) else carry

    def batches(self, episode, window):
        if (episode, window) in self.fails:
            raise self.raises
        return list(torch.randn(3, 3, generator=torch.Generator().manual_seed(100 * episode + window)))

    def outer_loss(self, episode, window):
        return lambda carry: valley(carry.params, torch.full((3,), 0.1 * window))


def valley(params, batch):
    return (params["w"] - 0.1 * batch).square() @ torch.tensor([0.1, 1.0, 3.0]) @ torch.tensor([1.0, 0.5])


def made(estimator=adjoint, optimizer=None, hyper=None, learn=("lr",), fails=(), **settings):
    """Return all that `meta_train` takes first, made anew: no two calls share an object."""
    optimizer = optimizer or Momentum()
    training = Training(functional.plain(valley), optimizer, {"w": Dense()})
    meta = training.init_meta(
        {"w": torch.zeros(2, 3)}, **(hyper or Momentum().hyper(lr=0.01, momentum=0.5))._asdict()
    )
    learner = Unrolled(training, Adam(), learn, estimator)
    return (
        learner,
        learner.init_meta(meta, lr=0.1),
        meta,
        Valley(training, estimator, fails=fails, **settings),
    )


def run(folder=None, steps=8, windows=1, save_every=2, **settings) -> Trained:
    return meta_train(*made(**settings), steps, windows=windows, folder=folder, save_every=save_every)


def kept(folder):
    """Return what the checkpoint holds, read as by anyone."""
    return torch.load(folder / "checkpoint.pt")
