"""Between two updates of M, the steps of the fast path are those of the plain one."""

from typing import Any

import pytest
import torch
from optim_problems import MOMENTUM, MOMENTUMS, assert_same, take, weights
from problems import every

from metafop.optim import FOP, fop
from metafop.optim.between_updates import BetweenUpdates


@pytest.mark.parametrize("preconditioner", ["fop", "pp-hd", "fop-norm"])
@every("settings", {k: v for k, v in MOMENTUMS.items() if "nesterov" not in k})
def test_steps_between_updates_have_the_bits_of_the_plain_path(settings, preconditioner, monkeypatch):
    ends, calls, whole = [], [], BetweenUpdates.step
    monkeypatch.setattr(BetweenUpdates, "step", lambda *args: (calls.append(1), whole(*args)))
    for is_plain in (False, True):
        generator = torch.Generator().manual_seed(0)
        params = weights(generator, (6, 5), (4, 2, 3, 3), (3,))
        optimizer = FOP(params, torch.optim.SGD, interval=4, preconditioner=preconditioner, **settings)
        if is_plain:
            monkeypatch.setattr(fop, "between_updates", lambda *_: None)
        for step in range(30):
            optimizer.param_groups[0]["lr"] = 0.05 * 0.9**step
            take(optimizer, params, generator)
            if step == 13:
                params[0].grad = None
                optimizer.step()
        ends.append(([p.detach() for p in params], [optimizer.state[p] for p in params]))
    assert len(calls) > 15
    assert_same(*ends)


CHANGES: dict[str, Any] = {
    "a setting": lambda optimizer, p: optimizer.param_groups[0].update(scale_free=False),
    "lr to zero": lambda optimizer, p: optimizer.param_groups[0].update(lr=0.0),
    "no momentum": lambda optimizer, p: optimizer.param_groups[0].update(momentum=0.0),
    "implementation": lambda optimizer, p: optimizer.param_groups[0].update(foreach=True),
    "m": lambda optimizer, p: optimizer.state[p].update(fop_m0=2 * optimizer.state[p]["fop_m0"]),
    "velocity": lambda optimizer, p: optimizer.state[p].update(momentum_buffer=torch.zeros_like(p)),
    "memory": lambda optimizer, p: optimizer.state[p].update(fop_memory=torch.zeros_like(p)),
    "state": lambda optimizer, p: optimizer.state.clear(),
    "group": lambda optimizer, p: optimizer.param_groups[0].update(params=[p]),
}


@every("change", CHANGES)
def test_a_change_between_updates_has_the_effect_that_it_has_on_the_plain_path(change, monkeypatch):
    ends = []
    for is_plain in (False, True):
        generator = torch.Generator().manual_seed(0)
        params = weights(generator, (6, 5), (4, 4))
        optimizer = FOP(params, torch.optim.SGD, interval=10, **MOMENTUM)
        if is_plain:
            monkeypatch.setattr(fop, "between_updates", lambda *_: None)
        take(optimizer, params, generator, steps=5)
        change(optimizer, params[0])
        take(optimizer, params, generator, steps=12)
        ends.append(([p.detach() for p in params], [optimizer.state[p] for p in params]))
    assert_same(*ends)
