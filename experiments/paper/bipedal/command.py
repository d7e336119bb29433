"""The paper's reinforcement learning: a biped that learns to walk by PPO, with FOP and without."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from experiments.paper.bipedal.ppo import Settings
from experiments.paper.bipedal.settings import RATES, Name, Terrain, Through
from experiments.paper.bipedal.task import BipedalTask
from experiments.reporting.summary import write_summary
from experiments.runner import experiment, study
from experiments.runner.extras import require
from experiments.runner.presets import Preset
from experiments.runner.settings import FromZero


@dataclass(frozen=True)
class Config:
    """The paper's figure of a biped that learns to walk by PPO: the best score so far, on two terrains.

    PPO-Clip, with 40 hidden units in each of two layers that policy and value share; momentum, Adam, and FOP
    around momentum, at full rank on every layer, with the paper's learning rates. The landscape stays the
    same; start and push are drawn anew for every episode, of at most 2000 steps. Runs are kept in `out`: an
    interrupted study resumes, and finished runs are not repeated.

    smoke: half a minute. small: a million steps on the standard terrain, half a million on the rough one,
    three seeds, about 90 minutes on two cores. paper: ten runs on one terrain and five on the other, as in
    the paper, which does not print their length: here it is ten million steps.
    """

    preset: Preset = "small"
    methods: tuple[Name, ...] = ("momentum", "adam", "fop-paper", "fop")  # adam-sb3 needs the extra `peers`
    steps: int = 1_000_000  # on the standard terrain, of all environments together
    rough_steps: int = 500_000
    seeds: int = 3
    rough_seeds: FromZero[int] = 3  # 0 leaves that terrain out
    environments: int = 8  # side by side in each run
    landscape: FromZero[int] = 0  # seed of the terrains
    ppo: Settings = field(default_factory=Settings)
    scored: int = 20  # the last episodes, whose mean return is a score
    through: Through = "optim"  # how the policy is improved; "functional" gives the same numbers
    workers: int = study.WORKERS  # runs side by side
    seed: FromZero[int] = 0  # the first
    threads: int = 1  # of each run
    out: Path = Path("runs/bipedal")

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.rough_seeds < 0:
            raise ValueError(
                "A study has one seed or more on the standard terrain, and none or more on the rough one, "
                f"got seeds={self.seeds} and rough_seeds={self.rough_seeds}. Pass such numbers."
            )
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ValueError(
                f"Each method is named once, got methods={self.methods}. Pass one or more, once."
            )
        plan(self)  # invalid settings of a run are refused here


def plan(config: Config) -> list[BipedalTask]:
    """Return the runs, seed by seed: what an interrupted study leaves is whole pairs."""
    length: dict[Terrain, tuple[int, int]] = {
        "standard": (config.seeds, config.steps),
        "rough": (config.rough_seeds, config.rough_steps),
    }
    return [
        BipedalTask(
            method=name,
            lr=RATES[name],
            seed=config.seed + i,
            terrain=terrain,
            landscape=config.landscape,
            steps=steps,
            environments=config.environments,
            ppo=config.ppo,
            through=config.through,
            scored=config.scored,
        )
        for terrain, (seeds, steps) in length.items()
        for i in range(seeds)
        for name in config.methods
    ]


PRESETS: dict[Preset, Config] = {
    "smoke": Config(
        preset="smoke",
        out=Path("runs/bipedal-smoke"),
        steps=4096,
        rough_steps=4096,
        seeds=2,
        rough_seeds=1,
        scored=3,
        ppo=Settings(horizon=128, epochs=1),
        workers=1,
    ),
    "small": Config(),
    "paper": Config(
        preset="paper",
        out=Path("runs/bipedal-paper"),
        steps=10_000_000,
        rough_steps=10_000_000,
        seeds=10,
        rough_seeds=5,
    ),
}


def main(config: Config) -> None:
    needed = {"gymnasium": "rl", "Box2D": "rl"}
    needed |= {"stable_baselines3": "peers"} if "adam-sb3" in config.methods else {}
    require("bipedal", needed)
    from experiments.paper.bipedal import report  # needs the extra `rl`

    experiment.begin(config)
    tasks = plan(config)
    done = study.carry_out(tasks, config.out, config.workers, config.threads)
    results: report.Results = {
        terrain: {
            name: [one for one in done if (one.task.terrain, one.task.method) == (terrain, name)]
            for name in config.methods
        }
        for terrain in get_args(Terrain)
        if any(one.task.terrain == terrain for one in done)
    }
    write_summary(config.out, report.write_report(config.out, results))
