"""`python -m experiments NAME --help`: the settings of an experiment are its flags.

Only the module of the command that is asked for is imported. The list of commands needs none of them.
"""

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple, get_args

from experiments.runner import interruption
from experiments.runner.extras import require
from experiments.runner.interruption import Kept
from experiments.runner.presets import Preset


class Command(NamedTuple):
    """Where a command is, what it does, and what it goes on from if it was interrupted."""

    module: str  # with a `Config` and a `main(config)`, and for some `PRESETS`
    summary: str  # the first line of the docstring of its `Config`
    kept: Kept = Kept()


RUNS = Kept(
    "Finished runs and checkpoints are in {out}: the same command goes on from there.",
    ("runs/*/result.json", "runs/*/checkpoint.pt"),
)
COMMANDS = {
    "compare": Command(
        "experiments.studies.compare.command",
        "Online against unrolled: when does the derivative of one step suffice to learn how to train?",
        Kept(
            "What was learned by unrolling is kept in {out}: the same command starts the rest again.",
            ("unrolled/checkpoint.pt",),
        ),
    ),
    "fetch": Command(
        "experiments.data.fetch",
        "Download MNIST and CIFAR-10, and check them by their md5; an altered file is replaced.",
        Kept("Files that are complete stay: the same command fetches the others."),
    ),
    "cifar10": Command(
        "experiments.paper.cifar10",
        "The paper's table and curves on CIFAR-10: a 9-layer conv net, momentum, and FOP around it.",
        RUNS,
    ),
    "mnist-rank": Command(
        "experiments.paper.mnist_rank",
        "The appendix's figures of ranks and of angles: a 4-layer net of 100 units on MNIST, P = I + M Mᵀ.",
        RUNS,
    ),
    "robustness": Command(
        "experiments.paper.robustness",
        "Figure 3 of the paper: test accuracy by lr and momentum, and by Adam's lr, with FOP and without.",
        RUNS,
    ),
    "structure": Command(
        "experiments.paper.structure",
        "The paper's figure of what is learned: every P of the 9-layer net on CIFAR-10, over training.",
        RUNS,
    ),
    "theory": Command(
        "experiments.paper.theory.command",
        "Theorems 1 and 2 checked on random problems and on counter-examples, as printed and corrected.",
    ),
    "imagenet": Command(
        "experiments.paper.imagenet",
        "The paper's table and curves on ImageNet: ResNet-18, momentum, and FOP around it.",
        RUNS,
    ),
    "bipedal": Command(
        "experiments.paper.bipedal.command",
        "The paper's figure of a biped that learns to walk by PPO: the best score so far, on two terrains.",
        RUNS,
    ),
    "toy": Command(
        "experiments.paper.toy.command",
        "Figure 1: FOP on the Booth and Himmelblau functions, and how often it fails from random starts.",
    ),
    "defaults": Command(
        "experiments.studies.defaults",
        "How FOP over momentum does on real handwritten digits, by order, credit, guard and family.",
    ),
    "cleaning": Command(
        "experiments.studies.cleaning.command",
        "MNIST with half the labels wrong: a weight for each training digit, learned from clean digits.",
    ),
    "attribution": Command(
        "experiments.studies.attribution.command",
        "What each training digit did to the loss of unseen ones: by derivatives, and by training again.",
    ),
    "distillation": Command(
        "experiments.studies.distillation.command",
        "Ten images, learned through 30 steps of training on them, that teach a network MNIST.",
    ),
    "maml": Command(
        "experiments.studies.maml.command",
        "MAML on sinusoids: a start that adapts in a few steps, and the same loop by higher.",
    ),
    "penalties": Command(
        "experiments.studies.penalties.command",
        "An L2 penalty for each weight of a logistic regression on MNIST, against the best single penalty.",
    ),
    "schedules": Command(
        "experiments.studies.schedules.command",
        "Learning rates for each step, layer and kind on MNIST, learned, against random one-cycle schedules.",
    ),
    "bench-online": Command(
        "experiments.benchmarks.online.command",
        "Times one online step over one plain step, on an MLP, a 9-layer conv net and a small transformer.",
    ),
    "bench-unroll": Command(
        "experiments.benchmarks.unroll.command",
        "Differentiates through T steps in every tensor's learning rate: time, peak memory, and agreement.",
    ),
    "bench-overhead": Command(
        "experiments.benchmarks.overhead.command",
        "Times the step of FOP, of the SGD around which it is, and of other optimizers, all in one process.",
    ),
    "page": Command(
        "experiments.reporting.page",
        "Write a page of docs/results again, from its template and the folder of an experiment.",
    ),
}
NEEDED = (
    "PIL",
    "filelock",
    "matplotlib",
    "numpy",
    "pooch",
    "pytorch_optimizer",
    "rich",
    "scipy",
    "sklearn",
    "tensorboard",
    "tqdm",
    "tyro",
)

# Threads that wait by spinning slow each other down on few cores; torch reads this when it is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the experiments that reproduce and extend the FOP paper (Moskovitz et al., 2020)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = named(arguments)
    require(name, dict.fromkeys(NEEDED, "experiments"))
    experiment = import_module(COMMANDS[name].module)
    config = configured(name, experiment, arguments[1:])
    try:
        experiment.main(config)
    except BaseException as error:
        if not interruption.is_behind(error):
            raise
        raise KeyboardInterrupt(COMMANDS[name].kept.said(config)) from None


def named(arguments: Sequence[str]) -> str:
    """Return the first argument, the name of a command; exits if it is none."""
    parser = commands()
    name = parser.parse_known_args(arguments[:1])[0].name
    if name is None:
        parser.error(f"NAME is missing: {parser.prog} --help lists the commands.")
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        meant = f" Did you mean {near[0]}?" if near else ""
        parser.error(f"NAME is {name!r}, no command: {parser.prog} --help lists them.{meant}")
    return name


def commands() -> ArgumentParser:
    """Return the parser of the first argument, which lists the commands in its help."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    parser = ArgumentParser(
        prog="python -m experiments",
        usage="%(prog)s [-h] NAME ...",
        description=f"{main.__doc__}\n\n{listed}\n\nThe settings of each: python -m experiments NAME --help",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="a command of the list above")
    return parser


def configured(name: str, experiment: Any, flags: Sequence[str]) -> Any:
    """Return the `Config` that the flags ask for; exits if a setting is not what it may be."""
    import tyro

    from experiments.runner.settings import refusals

    prog = f"python -m experiments {name}"
    # The defaults that are shown, and overruled, are those of the preset asked for.
    preset = (
        {"default": experiment.PRESETS.get(asked(flags), experiment.PRESETS["small"])}
        if hasattr(experiment, "PRESETS")
        else {}
    )
    config = tyro.cli(experiment.Config, prog=prog, args=flags, **preset)
    if refused := list(refusals(config)):
        print("\n".join(f"{prog}: error: {why}" for why in refused), file=sys.stderr)
        sys.exit(2)
    return config


def asked(flags: Sequence[str]) -> str:
    """Return the preset that is asked for; one that does not exist is refused later, like any other flag."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", nargs="?")
    preset = parser.parse_known_args(flags)[0].preset
    return preset if preset in get_args(Preset) else "small"


if __name__ == "__main__":
    interruption.run(main)
