"""Which preconditioner each parameter gets."""

import pytest
import torch
from problems import batch_loss, convnet
from torch import nn

from metafop import Identity, LowRank, Spatial
from metafop.optim import FOP
from metafop.preconditioners import by_layer


def test_a_module_tells_its_kernels_from_other_tensors():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(2, 4, 3)
            self.up = nn.ConvTranspose1d(2, 4, 3)
            self.head = nn.Linear(4, 3)
            self.tied = nn.Embedding(3, 4)
            self.tied.weight = self.head.weight
            self.positions = nn.Parameter(torch.zeros(1, 5, 4))

    model = Model()
    families = {name: by_layer(model)[p] for name, p in model.named_parameters()}
    expected = {
        "positions": Identity(),
        "first.weight": Spatial(),
        "first.bias": Identity(),
        "up.weight": Spatial(),
        "up.bias": Identity(),
        "head.weight": LowRank(4),
        "head.bias": Identity(),
    }
    assert families == expected


@pytest.mark.parametrize(
    ("preconditioner", "family"), [("s-hd", "Scalar"), ("pp-hd", "Diagonal"), ("fop-norm", "Normalized")]
)
def test_each_row_of_the_papers_table_has_a_name(preconditioner, family, generator):
    problem = convnet(generator)
    optimizer = FOP(problem.model, lr=0.1, preconditioner=preconditioner)
    batch_loss(problem.model, problem.batches[0]).backward()
    optimizer.step()
    training, _, _ = optimizer.inspect()
    assert {type(f).__name__ for f in training.preconditioners.values()} == {family}
