"""The settings of cleaning."""

from dataclasses import dataclass
from pathlib import Path

from experiments import data
from experiments.runner.presets import Preset
from experiments.runner.settings import FromZero, MayBeEmpty


@dataclass(frozen=True)
class MetaRates:
    """Learning rates of Adam, which moves the logits of the weights, one for each method."""

    online: float = 0.1
    truncated: float = 0.3
    unrolled: float = 1.0
    implicit: float = 0.3


@dataclass(frozen=True)
class Net:
    """A network, and how it is trained."""

    hidden: MayBeEmpty[tuple[int, ...]] = ()  # units of its hidden layers
    lr: float = 0.5  # of the runs in which weights are learned; they start at a half
    unrolled_lr: float = 0.5  # of those of "unrolled", through which derivatives must not explode
    gradients: int = 1500  # that a method may spend; one is that of all training digits
    steps: int = 300  # of a network that is trained anew
    meta_rates: MetaRates = MetaRates()


@dataclass(frozen=True)
class Config:
    """MNIST with half the labels wrong: a weight for each training digit, learned from clean digits.

    smoke: seconds, on generated images. small: three seeds, a linear classifier and an MLP.
    """

    preset: Preset = "small"
    source: data.Name = "mnist"
    data: Path | None = None  # folder that holds mnist/; if None, METAFOP_DATA, else fetched
    examples: int = 5000  # digits to train on, and as many clean ones to validate by
    linear: Net = Net()
    mlp: Net = Net(
        hidden=(300,),
        lr=1.2,
        unrolled_lr=0.6,
        gradients=650,
        steps=150,
        meta_rates=MetaRates(implicit=0.2),
    )
    window: int = 5  # steps between two of the weights, for "truncated" and "implicit"
    horizon: int = 50  # steps from the start, for "unrolled"
    damping: float = 0.03  # of the Hessian, for "implicit"
    agreed: int = 500  # steps of the linear classifier, for which "implicit" is compared with the adjoint
    agreed_lr: float = 1.0  # of these, so that they end at a minimum
    seeds: int = 3  # digits, wrong labels and networks
    seed: FromZero[int] = 0  # the first
    threads: int = 2  # that torch may use
    out: Path = Path("runs/cleaning")


PRESETS: dict[Preset, Config] = {
    "smoke": Config(
        preset="smoke",
        source="generated-digits",
        examples=100,
        linear=Net(gradients=60, steps=10),
        mlp=Net(hidden=(8,), gradients=60, steps=10),
        horizon=5,
        agreed=20,
        seeds=2,
        threads=1,
        out=Path("runs/cleaning-smoke"),
    ),
    "small": Config(),
}
