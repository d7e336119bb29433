"""The examples of docs/examples train, with the libraries that they are for, where these are installed."""

import importlib.util
from pathlib import Path

import pytest
import torch

from metafop.optim import FOP

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

# What these libraries warn of is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def single_precision():
    """Examples run as a user runs them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_default_dtype(before)


def test_lightning_trains_with_fop_and_resumes_it_from_its_checkpoint(tmp_path):
    pytest.importorskip("lightning")
    example = load("with_lightning")
    trainer = example.main(str(tmp_path), epochs=8)
    metrics = trainer.callback_metrics
    assert metrics["loss"] < 2.3
    assert metrics["fop/eigenvalue_max/0.weight"] != 1
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["optimizer_states"][0]
    optimizer = FOP(example.Digits().net, torch.optim.SGD, lr=0.05, momentum=0.9)
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state_dict()["state"][0]["fop_m0"], saved["state"][0]["fop_m0"])


def test_accelerate_trains_with_fop_accumulating_and_clipping():
    pytest.importorskip("accelerate")
    losses = load("with_accelerate").main(epochs=6)
    assert losses[-1] < losses[0]
