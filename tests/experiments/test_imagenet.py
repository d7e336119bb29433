"""The study on ImageNet: its settings, its command, and runs that are killed while other processes read."""

import json
import multiprocessing
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.data import generated, image_folder
from experiments.paper import imagenet
from experiments.runner import runs
from experiments.vision import imagenet_task
from experiments.vision.imagenet_task import ImageNetTask, ImageSet
from experiments.vision.methods import Method
from metafop import tree
from metafop.optim import FOP
from metafop.preconditioners import Spatial
from metafop.tensorboard import Logger

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def as_in_a_run(monkeypatch):
    """Single precision, and an environment that is put back."""
    torch.set_default_dtype(torch.float32)
    for name in (imagenet_task.ROOT, imagenet_task.LOADERS):
        monkeypatch.setenv(name, "")


@pytest.fixture
def images(tmp_path):
    """A folder with 96 images to train on and 32 to validate on, of three classes."""
    root = tmp_path / "images"
    image_folder.write(
        root, generated.generated(classes=3, training=96, test=32), size=20, training=96, test=32
    )
    return root


def a_run(found, **changes):
    """Two epochs of six steps."""
    task = ImageNetTask(
        method=Method("fop", lr=0.05),
        seed=0,
        found=found,
        epochs=2,
        decays=(0.8,),
        size=20,
        width=8,
        batch=16,
        weight_decay=1e-4,
        half=False,
    )
    return replace(task, **changes)


def refusal(config):
    with pytest.raises(SystemExit) as exit:
        imagenet.main(config)
    assert isinstance(exit.value.code, str)
    assert "\n" not in exit.value.code
    return exit.value.code


def test_smoke_writes_what_it_says_and_is_not_run_twice(tmp_path):
    config = replace(imagenet.PRESETS["smoke"], out=tmp_path)
    imagenet.main(config)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["momentum_additional_parameters"] == 0
    last = 4 * 8 * 8  # four columns of the inputs of the last layer
    assert summary["fop_additional_parameters"] == 3700 + last
    assert 0 < summary["fop_accuracy"] < 100
    ends = [summary[f"fop_accuracy_difference{end}"] for end in ("_low", "", "_high")]
    assert ends == sorted(ends)
    assert "| momentum | 0.1 | 2 |" in (tmp_path / "tables.md").read_text()
    assert (tmp_path / "imagenet.png").stat().st_size > 10_000
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/result.json")}
    assert len(written) == 2 * 2 + 1
    metrics = runs.Finished(None, next(tmp_path.glob("runs/fop-seed1-*")), {}).metrics()
    assert metrics["epoch"][-1] == 2 - 1 / 8
    assert metrics["validation_accuracy"].isfinite().nonzero().flatten().tolist() == [7, 15]

    imagenet.main(config)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/result.json")} == written
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert multiprocessing.active_children() == []


def test_the_paper_preset_is_the_papers():
    config = imagenet.PRESETS["paper"]
    assert config.methods == ("momentum", "s-hd", "pp-hd", "fop-norm", "fop-paper", "fop")
    tasks = imagenet.plan(config, ImageSet(1_281_167, 50_000, 1000, ""))
    assert [task.seed for task in tasks] == [0] * 6 + [1] * 6 + [2] * 6
    for task in tasks:
        assert (task.epochs, task.batch, task.decays) == (60, 256, (25, 50))
        assert (task.method.lr, task.method.momentum) == (0.1, 0.9)
        assert (task.size, task.width, task.half) == (224, 64, True)


def test_the_schedule_of_small_drops_at_the_same_parts():
    config = imagenet.PRESETS["small"]
    assert imagenet.decays(config) == (5, 10)
    assert config.epochs == 12


def test_resnet18_and_its_preconditioners_are_as_large_as_docs_errata_says():
    task = a_run(ImageSet(1_281_167, 50_000, 1000, ""), width=64)
    model = task.network()
    assert sum(p.numel() for p in model.parameters()) == 11_689_512
    assert task.network()[:4](torch.zeros(1, 3, 224, 224)).shape == (1, 64, 56, 56)
    optimizer = task.method.optimizer(model, seed=0)
    assert isinstance(optimizer, FOP)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    training, meta, _ = optimizer.inspect()
    kernels = [name for name, family in training.preconditioners.items() if isinstance(family, Spatial)]
    assert len(kernels) == 20
    assert sum(leaf.numel() for name in kernels for leaf in tree.leaves(meta.precond[name])) == 3700


KILLED = """
import os, pickle, signal, sys
from pathlib import Path
import torch
from experiments.vision import loop
from experiments.runner import runs

torch.set_num_threads(1)
runs.CHECKPOINT_SECONDS, loop.STEPS_AT_ONCE = 0.0, 2
learn = loop.Loop.learn

def killed(self, *batch):
    if round(self.epochs * self.feed.steps) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return learn(self, *batch)

loop.Loop.learn = killed
runs.carry_out(pickle.loads(bytes.fromhex(sys.argv[1])), Path(sys.argv[3]), lambda epochs: None)
"""


def test_a_run_that_is_killed_and_goes_on_ends_with_the_same_bits(images, tmp_path):
    found = imagenet_task.prepare(images, loaders=2)
    task = a_run(found)
    for step in (3, 6, 9):  # between two checkpoints; after the first epoch; between two again
        arguments = [pickle.dumps(task).hex(), str(step), str(tmp_path / "killed")]
        command = [sys.executable, "-c", KILLED, *arguments]
        # It returns when no process is left that could write: those that read images have ended too.
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120)
        assert ended.returncode == -9, ended.stderr.decode()
        checkpoint = torch.load(runs.folder_of(task, tmp_path / "killed") / "checkpoint.pt")
        assert checkpoint["process"]["step"] == step // 2 * 2
    runs.carry_out(task, tmp_path / "killed", lambda epochs: None)

    imagenet_task.prepare(images, loaders=0)
    runs.carry_out(task, tmp_path / "whole", lambda epochs: None)
    killed, whole = (runs.folder_of(task, tmp_path / name) for name in ("killed", "whole"))
    assert (killed / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    models = [torch.load(path / "model.pt") for path in (killed, whole)]
    torch.testing.assert_close(*models, rtol=0, atol=0)
    results = [json.loads((path / "result.json").read_text()) for path in (killed, whole)]
    assert results[0]["validation_loss"] == results[1]["validation_loss"]


def test_in_half_precision_it_learns(images, tmp_path):
    task = a_run(imagenet_task.prepare(images, loaders=0), epochs=10, decays=())
    losses = {}
    for half in (True, False):
        process = replace(task, half=half).start()
        with Logger(tmp_path) as logger:
            rows = [row for _ in range(3) for row in process.advance(logger)]
        losses[half] = torch.tensor([row["loss"] for row in rows])
    assert losses[True].isfinite().all()
    assert losses[True][-12:].mean() < losses[True][:12].mean() - 0.1
    assert losses[True][0] != losses[False][0]
    assert losses[True][0].item() == pytest.approx(losses[False][0].item(), rel=0.02)


def test_weight_decay_is_that_of_the_settings(images):
    found = imagenet_task.prepare(images, loaders=0)
    for name in ("momentum", "fop", "s-hd"):
        optimizer = a_run(found, method=Method(name, lr=0.05), weight_decay=0.5).start().optimizer
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0.5}


def test_the_place_of_the_images_is_not_part_of_a_run_but_what_they_are_is(images, tmp_path):
    found = imagenet_task.prepare(images, loaders=0)
    moved = images.rename(tmp_path / "elsewhere")
    assert imagenet_task.prepare(moved, loaders=2) == found
    first = next(moved.glob("val/*/*.png"))
    first.rename(first.with_name("another.png"))
    assert imagenet_task.prepare(moved, loaders=0) != found
    with pytest.raises(RuntimeError, match=r"elsewhere are not those of this run, .*images=96.* start the"):
        a_run(found).start()


def test_runs_that_all_diverge_are_reported(images, tmp_path):
    smoke = replace(imagenet.PRESETS["smoke"], methods=("momentum",), seeds=1, loaders=0)
    imagenet.main(replace(smoke, data=images, lr=1e30, out=tmp_path / "out"))
    assert (tmp_path / "out" / "imagenet.png").stat().st_size > 10_000
    [result] = (tmp_path / "out").glob("runs/momentum-*/result.json")
    assert json.loads(result.read_text())["diverged"] is True


def test_what_cannot_be_trained_on_is_refused_in_a_sentence(images, tmp_path):
    out = tmp_path / "out"
    paper = replace(imagenet.PRESETS["paper"], out=out)
    assert f"Name by --data a folder that holds {image_folder.LAYOUT}" in refusal(paper)
    missing = replace(paper, data=tmp_path / "nowhere")
    assert refusal(missing).startswith(str(tmp_path / "nowhere" / "train"))
    assert "96 images to train on, fewer than a batch of 256" in refusal(replace(missing, data=images))
    (images / "val" / "0002").rename(images / "val" / "cat")
    assert "must have the same classes" in refusal(replace(missing, data=images))
    out.write_text("")
    assert "Pass an --out that can be written" in refusal(replace(imagenet.PRESETS["smoke"], out=out))
    with pytest.raises(ValueError, match=r"lacks momentum, .* Name it too"):
        imagenet.Config(methods=("fop",))
    for width, size in ((4, 64), (16, 16)):
        with pytest.raises(ValueError, match="Pass a width of at least 8 and a size above 16"):
            imagenet.Config(width=width, size=size)
