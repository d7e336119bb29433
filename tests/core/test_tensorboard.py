"""What the logger writes, read back from its files by TensorBoard's own reader."""

import importlib
import io
import math
import sys
from typing import Any

import pytest
import torch
from events import read, scalar
from PIL import Image
from tensorboard.plugins.hparams import metadata

from metafop import (
    SGD,
    Adam,
    Dense,
    Diagonal,
    Kronecker,
    Meta,
    Online,
    Spatial,
    Training,
    diagnostics,
    functional,
)
from metafop.optim import FOP
from metafop.preconditioners import KroneckerFactors
from metafop.tensorboard import Logger, picture

loss = functional.plain(lambda params, batch: params["w"].square().sum())


def pixels(events, name):
    """Return the last image of this name, (height, width, 3)."""
    image = Image.open(io.BytesIO(events.Images(name)[-1].encoded_image_string))
    return torch.tensor(list(image.tobytes())).view(image.height, image.width, 3)


def one(family, m):
    return Training(loss, SGD(), {"w": family}), Meta(SGD().hyper(lr=0.1), {"w": m})


def test_info_writes_every_scalar(tmp_path):
    with Logger(tmp_path) as logger:
        for step, value in enumerate((0.5, math.nan, math.inf)):
            info = {"value": torch.tensor(value), "moved": torch.tensor(step > 0), "many": torch.ones(3)}
            logger.info(step, info)
    events = read(tmp_path)
    assert events.Tags()["scalars"] == ["value", "moved"]
    assert scalar(events, "moved") == [(0, 0.0), (1, 1.0), (2, 1.0)]
    (_, first), (_, second), (_, third) = scalar(events, "value")
    assert (first, third) == (0.5, math.inf)
    assert math.isnan(second)


def test_diagnostics_writes_the_summary(tmp_path):
    training, meta = one(Dense(), torch.diag(torch.tensor([1.0, 2.0, 3.0])))
    grads = {"w": torch.ones(2, 3)}
    with Logger(tmp_path) as logger:
        logger.diagnostics(7, training, meta, grads)
    events, summary = read(tmp_path), diagnostics.summary(training, meta, grads)
    assert set(events.Tags()["scalars"]) == summary.keys()
    for name, value in summary.items():
        assert scalar(events, name) == [(7, pytest.approx(value.item(), rel=1e-6))]


def test_diagnostics_writes_histograms_of_the_eigenvalues_and_values_of_p(tmp_path):
    with Logger(tmp_path) as logger:
        logger.diagnostics(3, *one(Dense(), torch.diag(torch.tensor([1.0, 2.0]))), {"w": torch.ones(2)})
    events = read(tmp_path)
    assert set(events.Tags()["histograms"]) == {"eigenvalues/w", "P_values/w"}
    (event,) = events.Histograms("P_values/w")
    found = event.histogram_value
    assert (event.step, found.num, found.min, found.max, found.sum) == (3, 4.0, 0.0, 4.0, 5.0)
    counts = {round(edge): int(n) for edge, n in zip(found.bucket_limit, found.bucket, strict=True) if n}
    assert counts == {0: 2, 1: 1, 4: 1}


def test_no_name_stands_for_two_kinds_of_things(tmp_path):
    with Logger(tmp_path) as logger:
        logger.diagnostics(0, *one(Spatial(), torch.eye(9)), {"w": torch.ones(2, 1, 3, 3)})
    tags = read(tmp_path).Tags()
    names = [name for kind in ("scalars", "histograms", "images") for name in tags[kind]]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("value", [0.0, 1.0, 1.0 + 1e-15, -1e30])
def test_histograms_of_equal_numbers_have_bins_of_some_width(value, tmp_path):
    m = torch.tensor([value, value * (1 + 1e-15)], dtype=torch.float64)
    with Logger(tmp_path) as logger:
        logger.diagnostics(0, *one(Diagonal(), m), {"w": torch.ones(2)})
    found = read(tmp_path).Histograms("eigenvalues/w")[0].histogram_value
    assert sum(found.bucket) == 2
    assert found.bucket_limit == sorted(set(found.bucket_limit))


def test_diagnostics_count_what_is_not_finite(tmp_path):
    m = torch.eye(3)
    m[0, 1] = math.nan  # P = M Mᵀ is then NaN in its first row and column
    with Logger(tmp_path) as logger:
        logger.diagnostics(0, *one(Dense(), m), {"w": torch.ones(3)})
    events = read(tmp_path)
    assert events.Tags()["histograms"] == []
    assert scalar(events, "nonfinite/P_values/w") == [(0, 5.0)]
    assert scalar(events, "nonfinite/eigenvalues/w") == [(0, 3.0)]
    assert math.isnan(scalar(events, "eigenvalue_max/w")[0][1])
    image = pixels(events, "P/w")
    assert image[0, 0].tolist() == [0, 0, 0]
    assert image[-1, -1].tolist() != [0, 0, 0]


def test_images_show_sign_by_colour_and_size_by_depth(tmp_path):
    m = torch.linalg.cholesky(torch.tensor([[1.0, -0.25, 0.0], [-0.25, 1.0, 0.01], [0.0, 0.01, 1.0]]))
    with Logger(tmp_path) as logger:
        logger.diagnostics(0, *one(Dense(), m), {"w": torch.ones(3)})
    image = pixels(read(tmp_path), "P/w")
    assert image.shape == (288, 288, 3)
    cells = image.view(3, 96, 3, 96, 3)
    assert (cells == cells[:, :1, :, :1]).all()
    cells = cells[:, 0, :, 0]  # (row, column, colour)
    red, blue, white, pale = cells[0, 0], cells[0, 1], cells[0, 2], cells[1, 2]
    assert red[0] > red[2]
    assert blue[2] > blue[0]
    assert white.tolist() == [255, 255, 255]
    assert 255 - pale[1] == pytest.approx((255 - int(red[1])) * 0.1, abs=1)  # √(0.01 / 1)


def test_picture_of_zero_is_white():
    assert (picture(torch.zeros(9, 9)) == 1).all()


def test_large_matrices_have_no_image_and_larger_ones_no_histogram_of_p(tmp_path):
    training = Training(loss, SGD(), {"small": Diagonal(), "wide": Diagonal(), "huge": Kronecker()})
    precond = {
        "small": torch.ones(64),
        "wide": torch.ones(65),
        "huge": KroneckerFactors(torch.eye(300), torch.eye(400)),
    }
    grads = {"small": torch.ones(64), "wide": torch.ones(65), "huge": torch.ones(400, 300)}
    with Logger(tmp_path) as logger:
        logger.diagnostics(0, training, Meta(SGD().hyper(lr=0.1), precond), grads)
    tags = read(tmp_path).Tags()
    assert tags["images"] == ["P/small"]
    values = {name for name in tags["histograms"] if name.startswith("P_values/")}
    assert values == {"P_values/small", "P_values/wide"}
    assert "eigenvalues/huge" in tags["histograms"]


def test_diagnostics_of_an_online_learner_are_scalars(tmp_path):
    training, params = Training(loss, SGD(), {"w": Dense()}), {"w": torch.ones(2)}
    meta = training.init_meta(params, lr=0.1)
    online: Any = Online(training, Adam())
    with Logger(tmp_path) as logger:
        logger.diagnostics(0, online, online.init_meta(meta, lr=0.01), params)
    tags = read(tmp_path).Tags()
    assert "hyper/lr" in tags["scalars"]
    assert tags["images"] == tags["histograms"] == []


def test_hyperparameters_are_a_row_of_the_hparams_tab(tmp_path):
    settings = {"lr": 0.1, "rank": 4, "nesterov": True, "family": Spatial(), "limit": math.inf, "none": None}
    with Logger(tmp_path) as logger:
        logger.info(0, {"value": torch.tensor(1.0)})
        logger.hyperparameters(settings, {"accuracy": torch.tensor(0.75, requires_grad=True), "loss": 0.5})
    events = read(tmp_path)
    content = events.PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG]).hparams
    numbers = {name: value.number_value for name, value in start.items() if value.HasField("number_value")}
    words = {name: value.string_value for name, value in start.items() if value.HasField("string_value")}
    assert numbers == {"lr": 0.1, "rank": 4.0}
    assert words == {"nesterov": "True", "family": "Spatial()", "limit": "inf", "none": "None"}
    experiment = metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG])
    assert [info.name.tag for info in experiment.metric_infos] == ["hparam/accuracy", "hparam/loss"]
    assert scalar(events, "hparam/accuracy") == [(0, 0.75)]
    assert len(list(tmp_path.iterdir())) == 1


def test_without_tensorboard_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.delitem(sys.modules, "metafop.tensorboard")
    with pytest.raises(ImportError, match=r'not installed: pip install "metafop\[tensorboard\]"'):
        importlib.import_module("metafop.tensorboard")


def test_an_optimizer_is_watched_until_the_handle_is_removed(tmp_path, generator):
    weight = torch.nn.Parameter(torch.randn(3, 4, generator=generator))
    optimizer = FOP([("w", weight)], lr=0.1, preconditioner=Dense(), interval=1)
    with Logger(tmp_path) as logger:
        handle = logger.watch(optimizer, every=2)
        for step in range(7):
            weight.grad = torch.randn(3, 4, generator=generator)
            optimizer.step()
            if step == 4:
                handle.remove()
    events = read(tmp_path)
    written = scalar(events, "eigenvalue_max/w")
    assert [step for step, _ in written] == [0, 2, 4]
    assert written[0][1] == 1
    assert written[-1][1] != 1
    assert events.Tags()["images"] == ["P/w"]
    with Logger(tmp_path / "other") as logger, pytest.raises(ValueError, match=r"every=0\. Pass 1 or more"):
        logger.watch(optimizer, every=0)
