"""`drop-in` runs from its command, repeats nothing that is done, and reads CIFAR-10 as it is published."""

import json
import math
import os
import tarfile
from pathlib import Path
from shutil import copytree

import pytest
import torch
from scipy import stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments import cifar, drop_in
from experiments.__main__ import main

NAMES = [*cifar.TRAINING, cifar.TEST]
FEW = {"interval": 1, "epochs": 2, "images": 64, "batch": 16, "narrow": 2, "wide": 2, "seeds": 2, "seed": 7}
SMALL = [f"--{flag}={value}" for flag, value in FEW.items()]
REAL = Path(os.environ.get(cifar.FOLDER) or Path(__file__).parents[2] / "shared" / "data")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder in the published form, with few images: 20 in each training batch."""
    folder, generator = tmp_path_factory.mktemp("data"), torch.Generator().manual_seed(0)
    (folder / "cifar10" / "cifar-10-batches-bin").mkdir(parents=True)
    for name in NAMES:
        count = drop_in.TEST_IMAGES if name == cifar.TEST else 20
        records = torch.randint(256, (count, cifar.RECORD), generator=generator, dtype=torch.uint8)
        records[:, 0] %= 10
        (folder / "cifar10" / "cifar-10-batches-bin" / name).write_bytes(records.numpy().tobytes())
    return folder


@pytest.fixture(scope="module")
def out(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drop-in")
    main(["drop-in", "--data", str(data), "--out", str(folder), *SMALL])
    return folder


def losses(out, name):
    return json.loads((out / "runs" / f"{name}.json").read_text())["losses"]


def test_drop_in_writes_what_it_says(out):
    summary = json.loads((out / "summary.json").read_text())
    assert summary["momentum_final_loss"] == pytest.approx(2.3, abs=0.5)
    for name in ("fop", "paper", "paper_5e-4"):
        for view in ("steps_ratio", "mean_loss_difference", "final_loss_difference", "accuracy_difference"):
            assert {f"{name}_{view}{end}" for end in ("", "_low", "_high", "_ahead")} <= summary.keys()
    for view in ("mean_loss_difference", "final_loss_difference"):
        low, mean, high = (summary[f"fop_{view}{end}"] for end in ("_low", "", "_high"))
        assert low < mean < high
    assert (out / "drop_in.png").stat().st_size > 10_000
    assert EventAccumulator(str(out)).Reload().Scalars("loss/fop")[-1].step == 7
    assert "| FOP, paper at 5e-4 | final loss difference |" in (out / "tables.md").read_text()
    assert len(losses(out, "fop-7")) == 8


def test_within_a_seed_every_method_starts_from_the_same_network_and_batch(out):
    firsts = {seed: {losses(out, f"{name}-{seed}")[0] for name in drop_in.METHODS} for seed in (7, 8)}
    assert [len(values) for values in firsts.values()] == [1, 1]
    assert firsts[7] != firsts[8]


def test_fop_that_hardly_learns_is_momentum(data, tmp_path):
    flags = ["--methods", "momentum", "fop", "--meta-lr", "1e-12"]
    main(["drop-in", "--data", str(data), "--out", str(tmp_path), *SMALL, *flags])
    assert losses(tmp_path, "fop-8") == pytest.approx(losses(tmp_path, "momentum-8"), rel=1e-4)


def test_a_finished_run_is_not_repeated_unless_a_setting_is_another(out, data, tmp_path, monkeypatch):
    copytree(out, tmp_path, dirs_exist_ok=True)
    trained = []

    def instead(config, model, optimizer, seed, data, tick):
        trained.append((type(optimizer).__name__, seed))
        return [2.3] * 8

    monkeypatch.setattr(drop_in, "trained", instead)
    before = (out / "summary.json").read_text()
    same = ["drop-in", "--data", str(data), "--out", str(tmp_path), *SMALL]
    main(same)
    assert trained == []
    assert (tmp_path / "summary.json").read_text() == before
    main([*same, "--meta-lr", "0.5"])  # only the default preset's
    assert trained == [("FOP", 7), ("FOP", 8)]


def test_steps_are_counted_to_the_first_epoch_at_the_target():
    config = drop_in.Config(images=256, batch=128, epochs=2, seeds=3)
    runs = [{"losses": row, "accuracy": 0.5} for row in ([4, 2, 0, 0], [4, 4, 2, 2], [4, 4, 4, 4])]
    result = drop_in.gathered(config, runs)
    found = drop_in.steps_to(result, torch.tensor([1.0, 2.0, 3.0]), config.epoch)
    assert found[:2].tolist() == [3, 4]
    assert found[2].isnan()


def test_the_interval_is_students(generator):
    values = torch.randn(5, generator=generator)
    mean, low, high = drop_in.interval(values)
    assert mean == pytest.approx(values.mean().item())
    expected = stats.t.interval(0.95, 4, loc=values.mean().item(), scale=stats.sem(values.numpy()))
    assert (low, high) == pytest.approx(expected)
    assert drop_in.interval(values[:1])[1:] == (None, None)
    assert drop_in.interval(torch.tensor([1.0, math.nan])) == (None, None, None)


@pytest.mark.parametrize("mode", ["w:xz", "w:gz"])
def test_a_tar_is_read_as_its_files_are(data, mode, tmp_path):
    (tmp_path / "cifar10").mkdir()
    with tarfile.open(tmp_path / "cifar10" / f"cifar-10-batches-bin.tar.{mode[2:]}", mode) as archive:
        archive.add(data / "cifar10" / "cifar-10-batches-bin", "cifar-10-batches-bin")
    for ours, theirs in zip(cifar.load(data, 30, 5), cifar.load(tmp_path, 30, 5), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_data_that_is_not_there_is_said_in_a_sentence(data, tmp_path, monkeypatch):
    monkeypatch.delenv(cifar.FOLDER, raising=False)
    with pytest.raises(SystemExit, match=r"CIFAR-10 is needed: .* by --data or .* METAFOP_DATA"):
        main(["drop-in", "--out", str(tmp_path)])
    monkeypatch.setenv(cifar.FOLDER, str(tmp_path / "nowhere"))
    with pytest.raises(
        SystemExit, match=r"is not in .*nowhere/cifar10: looked for data_batch_1\.bin, .* --data"
    ):
        main(["drop-in", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"has 100 training images here, and 101 were asked for"):
        cifar.load(data, 101, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [["--methods", "fop"], ["--images", "100"], ["--seeds", "0"]], ids=str)
def test_settings_that_cannot_be_are_refused(flags, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["drop-in", *flags])
    assert exit.value.code == 2
    assert "must" in capsys.readouterr().err


@pytest.mark.skipif(not (REAL / "cifar10").is_dir(), reason="no CIFAR-10: set METAFOP_DATA")
def test_the_real_data_is_what_it_is_known_to_be():
    data = cifar.load(REAL, 10_000, 2000)
    assert data.labels[:5].tolist() == [6, 9, 9, 4, 1]
    assert data.test_labels[:5].tolist() == [3, 8, 8, 0, 6]
    assert data.labels.bincount().tolist() == [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981]
    assert data.images.shape == (10_000, 3, 32, 32)
    assert data.images.dtype == torch.float32
    torch.testing.assert_close(data.images.double().mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(data.images.double().std((0, 2, 3)), torch.ones(3), rtol=0, atol=1e-5)
