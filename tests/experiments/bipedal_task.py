"""A short run of the biped."""

from experiments.paper.bipedal.ppo import Settings
from experiments.paper.bipedal.task import BipedalTask

TASK = BipedalTask(
    method="fop",
    lr=1e-3,
    seed=1,
    terrain="rough",
    landscape=0,
    steps=24 * 64,
    environments=2,
    ppo=Settings(horizon=32, epochs=1),
    through="optim",
)
