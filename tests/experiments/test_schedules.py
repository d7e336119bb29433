"""`schedules` runs from its command, and the learned start is that of the network itself."""

import torch
from commands import smoke
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.studies.schedules import network, one_cycle
from experiments.studies.schedules.network import Network
from metafop import Momentum, Scheduled, Training, functional, tree
from metafop.hypergradients import adjoint

SMALL = Network(widths=(784, 6, 10), steps=4, batch=8, images=20)


def test_schedules_compares_what_is_learned_with_the_best_of_random_ones(tmp_path):
    summary, text = smoke("schedules", tmp_path)
    assert summary["schedule_numbers"] == 2 * 4 * 5 + 4
    assert {"schedule_learned_loss", "schedule_best_of_12_loss"} <= summary.keys()
    assert summary["gradients_learned"] == 4 * 3 * 2 * 5
    assert summary["gradients_random"] == 12 * 2 * 5
    assert "| best of the random one-cycle schedules | " in text
    assert (tmp_path / "schedules.png").stat().st_size > 10_000
    assert EventAccumulator(str(tmp_path)).Reload().Scalars("value")[-1].step == 3


def test_a_displacement_trains_as_the_parameters_do_and_gives_the_derivative_in_their_scale(generator):
    digits, _ = network.digits("generated-digits", None, SMALL.images, 1)
    draws, training = SMALL.draw(1, generator), SMALL.training()
    meta, batches = SMALL.init_meta(training, lr=0.1, momentum=0.5), network.batches(digits, draws)
    noise, batches = tree.map(lambda x: x[0], draws.noise), tree.map(lambda x: x[0], batches)
    scales = meta.loss

    def start(scales):
        return {k: scales[k] * x for k, x in noise.items()}

    def plain_loss(params, batch):
        return network.loss(params, {k: torch.zeros_like(x) for k, x in noise.items()}, batch, scales)[0]

    plain = Training(functional.plain(plain_loss), Scheduled(Momentum(), SMALL.steps, network.SCHEDULED))
    ordinary = adjoint(
        plain,
        lambda carry: plain_loss(carry.params, digits),
        meta._replace(loss=()),
        plain.init(start(scales)),
        batches,
    )
    displaced = adjoint(
        training,
        lambda carry, meta: network.loss(carry.params, carry.buffers, digits, meta.loss)[0],
        meta,
        training.init(draws.at_rest, noise),
        batches,
    )
    torch.testing.assert_close(displaced.value, ordinary.value)
    for field in network.SCHEDULED:  # not weight decay, which would draw to the start
        found, expected = (getattr(x.grads.hyper, field) for x in (displaced, ordinary))
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(displaced.grads.loss, tree.pull(start, scales, ordinary.start.params))


def test_a_one_cycle_schedule_rises_to_its_peak_and_falls_to_its_last_rate():
    schedule = one_cycle.OneCycles(*(torch.tensor([x]) for x in (0.5, 0.25, 100.0, 0.9)))
    [lrs] = schedule.lrs(1000)
    torch.testing.assert_close(lrs[0].item(), 0.5 / one_cycle.BEGIN, rtol=0.01, atol=0)
    torch.testing.assert_close(lrs.max().item(), 0.5, rtol=1e-4, atol=0)
    assert abs(int(lrs.argmax()) - 250) <= 1
    torch.testing.assert_close(lrs[-1].item(), 0.005, rtol=0.01, atol=0)


def test_random_schedules_that_are_trained_together_train_as_if_alone(generator):
    digits, _ = network.digits("generated-digits", None, SMALL.images, 1)
    draws, training = SMALL.draw(2, generator), SMALL.training()
    meta, schedules = SMALL.init_meta(training, lr=0.1, momentum=0.5), one_cycle.random(3, generator)
    every = one_cycle.metas(meta, schedules)
    together = network.losses(every, network.trained(training, every, draws, digits), digits)
    last = tree.map(lambda x: x[2], every)
    carry = training.init(draws.at_rest, tree.map(lambda x: x[1], draws.noise))
    for batch in network.batches(digits, draws):
        carry, _ = training.step(last, carry, tree.map(lambda x: x[1], batch))
    alone = network.loss(carry.params, carry.buffers, digits, last.loss)[0]
    torch.testing.assert_close(together[1, 2], alone)
