"""What every test starts from: float64, one thread, and a generator of its own."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def float64():
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture(params=[torch.float64, torch.float32], ids=["double", "single"])
def precision(request, float64):
    """Ask for it where single precision is computed in ways of its own, as by FOP."""
    torch.set_default_dtype(request.param)


@pytest.fixture
def single_precision(float64):
    """Ask for it where runs are carried out: their own processes compute in it."""
    torch.set_default_dtype(torch.float32)
