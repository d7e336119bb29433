"""The paper's results on ImageNet: ResNet-18 on images in folders, read by several processes."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from experiments import data
from experiments.data import image_folder
from experiments.reporting.summary import write_summary
from experiments.runner import experiment, study
from experiments.runner.presets import Preset
from experiments.runner.settings import FromZero
from experiments.vision import imagenet_task, result_tables
from experiments.vision.imagenet_task import ImageNetTask, ImageSet
from experiments.vision.methods import Method
from experiments.vision.step_timing import Timing
from experiments.vision.training_curves import draw_training

Compared = Literal["momentum", "s-hd", "pp-hd", "fop-norm", "fop-paper", "fop"]
DROPS = (25, 50)  # sixtieths of all epochs, after which the learning rate is divided by ten
# Accuracy, additional parameters and additional time in percent, as printed.
PAPER = {
    "momentum": ("69.7 ± 0.2", "0", "0.0"),
    "s-hd": ("69.7 ± 0.3", "22", "0.3"),
    "pp-hd": ("69.8 ± 0.2", "≈ 275M", "7.1"),
    "fop-norm": ("69.9 ± 0.3", "197", "2.1"),
    "fop-paper": ("70.1 ± 0.2", "197", "1.7"),
}
# Images that are written where no folder is named, and how many of them to train on and to validate on.
WRITTEN: dict[Preset, tuple[data.Name, int, int]] = {
    "smoke": ("generated", 256, 64),
    "small": ("cifar10", 4000, 1000),
}


@dataclass(frozen=True)
class Config:
    """The paper's table and curves on ImageNet: ResNet-18, momentum, and FOP around it.

    The images are in `data`, as train/<class>/*.JPEG and val/<class>/*.JPEG. As in the paper, the accuracy
    reported is that on the validation images in the end: nothing is chosen by it. Within a seed all methods
    have the same first weights, batches and crops. Runs are kept in `out`: an interrupted study
    resumes, and finished runs are not repeated. The learning rate is divided by ten after 25 and 50 of 60
    parts.

    smoke: seconds, on generated images. small: 4000 images of CIFAR-10 to train on and 1000 to validate on,
    enlarged to 64 pixels, a quarter of the channels, 12 epochs, about 8 minutes on two cores. paper:
    ImageNet at 224 pixels, 60 epochs, for an accelerator. What the paper leaves open (it names images of 299
    pixels, and no crop) is chosen as is usual: momentum 0.9, weight decay 1e-4; random crops of 8 to 100 % of
    the area, mirrored half of the time, to train on; the middle, 7/8 of the shorter side, to validate on.
    """

    preset: Preset = "small"
    data: Path | None = None  # folder that holds train/ and val/; if None, smoke and small write images
    methods: tuple[Compared, ...] = ("momentum", "fop-norm", "fop-paper", "fop")  # momentum must be there
    epochs: int = 12
    seeds: int = 3
    lr: float = 0.1
    weight_decay: FromZero[float] = 1e-4
    size: int = 64  # pixels, of a side
    width: int = 16  # channels of the first layer: 64 in ResNet-18
    batch: int = 128
    rounds: int = 6  # of ten steps of each method, to measure their time
    half: bool = True  # mixed precision: bfloat16, or float16 on an accelerator without it
    loaders: FromZero[int] = 1  # processes that read images, for each run
    workers: int = study.WORKERS  # runs side by side
    seed: FromZero[int] = 0  # the first
    threads: int = 1  # of each run
    out: Path = Path("runs/imagenet")

    def __post_init__(self) -> None:
        if "momentum" not in self.methods:
            raise ValueError(
                f"methods={self.methods} lacks momentum, with which the others are compared. Name it too."
            )
        # With few channels, channels last, oneDNN's 1×1 kernels of stride 2 write past their memory; its 3×3
        # ones on a single pixel leave a part of the gradient unwritten in bfloat16.
        if self.width < 8 or self.size <= 16:
            raise ValueError(
                f"On a CPU torch convolves wrongly at a width of {self.width} and a size of {self.size}. "
                "Pass a width of at least 8 and a size above 16."
            )


PRESETS: dict[Preset, Config] = {
    "smoke": Config(
        preset="smoke",
        out=Path("runs/imagenet-smoke"),
        methods=("momentum", "fop"),
        epochs=2,
        seeds=2,
        size=24,
        width=8,
        batch=32,
        rounds=2,
        loaders=2,
        workers=1,
    ),
    "small": Config(),
    "paper": Config(
        preset="paper",
        out=Path("runs/imagenet-paper"),
        methods=get_args(Compared),
        epochs=60,
        size=224,
        width=64,
        batch=256,
        rounds=12,
        loaders=8,
    ),
}


def main(config: Config) -> None:
    found = imagenet_task.prepare(config.data or written(config), config.loaders)
    if found.images < config.batch:
        raise SystemExit(
            f"There are {found.images} images to train on, fewer than a batch of {config.batch}. Pass a "
            "smaller --batch."
        )
    experiment.begin(config)
    tasks = plan(config, found)
    done = study.carry_out(tasks, config.out, config.workers, config.threads)
    results = {name: [r for r in done if r.task.method.name == name] for name in config.methods}
    methods = tuple(
        Method(name, config.lr) for name in sorted(config.methods, key=lambda name: name != "momentum")
    )
    timing = Timing(tasks[0], methods, config.rounds)
    [times] = study.carry_out([timing], config.out, workers=1, threads=config.threads)
    whose = "" if config.data else f" ({WRITTEN[config.preset][0]}'s, enlarged)"
    ours = f"{found.images:,} images{whose} of {found.classes:,} classes and {config.size} pixels, "
    ours += f"{config.width} channels at first, {config.epochs} epochs"
    epoch = found.images // config.batch
    figures = result_tables.paper_table(config.out, results, times.result, PAPER, "validation", ours)
    figures |= result_tables.pairs_table(config.out, results, "validation", epoch, decays(config)[0])
    picture, what = config.out / "imagenet.png", f"ResNet-18, {ours}"
    draw_training(picture, results, epoch, config.epochs, decays(config), what)
    write_summary(config.out, figures)


def written(config: Config) -> Path:
    """Return the folder with the images of a preset that needs no ImageNet; they are written once."""
    if config.preset not in WRITTEN:
        raise SystemExit(
            f"The preset {config.preset} needs ImageNet. "
            f"Name by --data a folder that holds {image_folder.LAYOUT}."
        )
    name, training, validation = WRITTEN[config.preset]
    root = config.out / "images" / f"{name}-{config.size}"
    part = root.with_suffix(".part")
    if not root.exists():
        try:
            shutil.rmtree(part, ignore_errors=True)
            image_folder.write(part, data.load(name), config.size, training, validation)
            part.replace(root)  # at once: no folder is half written
        except OSError as error:
            raise SystemExit(
                f"Cannot write images to {root} ({error.strerror}). Pass an --out that can be written."
            ) from None
    return root


def plan(config: Config, found: ImageSet) -> list[ImageNetTask]:
    """Return the runs, seed by seed: what an interrupted study leaves is whole pairs."""
    return [
        ImageNetTask(
            method=Method(name, config.lr),
            seed=seed,
            found=found,
            epochs=config.epochs,
            decays=decays(config),
            size=config.size,
            width=config.width,
            batch=config.batch,
            weight_decay=config.weight_decay,
            half=config.half,
        )
        for seed in range(config.seed, config.seed + config.seeds)
        for name in config.methods
    ]


def decays(config: Config) -> tuple[float, ...]:
    return tuple(config.epochs * drop / 60 for drop in DROPS)
