"""`python -m experiments NAME --help`: the settings of an experiment are its flags."""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, Union, get_args

from experiments.presets import Preset

# Each is a file with a `Config` and a `main(config)`.
EXPERIMENTS = (
    "compare",
    "fetch",
    "cifar10",
    "mnist-rank",
    "robustness",
    "structure",
    "theory",
    "imagenet",
    "bipedal",
    "toy",
    "defaults",
    "bench-online",
    "bench-unroll",
    "bench-overhead",
    "page",
)
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

# Threads that wait by spinning fight each other for few cores; torch reads this when it is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the experiments that reproduce and extend the FOP paper (Moskovitz et al., 2020)."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"The experiments need {', '.join(missing)}, not installed here. "
            'Run: pip install "metafop[experiments]"'
        )
    import tyro

    experiments = {name: import_module(f"experiments.{name.replace('-', '_')}") for name in EXPERIMENTS}
    preset = asked(argv)
    kinds = [
        Annotated[
            experiment.Config,
            # The defaults that are shown, and overruled, are those of the preset asked for.
            tyro.conf.subcommand(name, default=experiment.PRESETS[preset])
            if hasattr(experiment, "PRESETS")
            else tyro.conf.subcommand(name),
        ]
        for name, experiment in experiments.items()
    ]
    one_of: Any = Union[tuple(kinds)]  # noqa: UP007
    config = tyro.cli(
        one_of,
        prog="python -m experiments",
        description=main.__doc__,
        args=argv,
    )
    sys.modules[type(config).__module__].main(config)


def asked(argv: Sequence[str] | None) -> str:
    """Return the preset that is asked for; one that does not exist is refused later, like any other flag."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", nargs="?")
    preset = parser.parse_known_args(argv)[0].preset
    return preset if preset in get_args(Preset) else "small"


if __name__ == "__main__":
    main()
