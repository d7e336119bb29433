"""`python -m experiments NAME --help`: the settings of an experiment are its flags."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

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
    "toy",
    "defaults",
    "bench-online",
    "bench-unroll",
    "bench-overhead",
    "page",
)
NEEDED = (
    "PIL",
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
    config = tyro.extras.subcommand_cli_from_dict(
        {name: experiment.Config for name, experiment in experiments.items()},
        prog="python -m experiments",
        description=main.__doc__,
        args=argv,
    )
    sys.modules[type(config).__module__].main(config)


if __name__ == "__main__":
    main()
