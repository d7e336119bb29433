"""PPO-Clip: its parts against other people's; a policy improved in torch's form and by the pure core."""

import math
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from problems import assert_near, assert_same_bits
from stable_baselines3.common.buffers import RolloutBuffer
from torch.distributions import Normal

from experiments.paper.bipedal import ppo
from experiments.paper.bipedal.learners import torch_learner
from experiments.paper.bipedal.ppo import Batch, PolicyOutput, Rollout, Settings
from experiments.paper.bipedal.sb3_training import NAMES, SB3TrainingRun
from experiments.paper.bipedal.settings import RATES
from experiments.paper.bipedal.task import BipedalTask
from experiments.paper.bipedal.training import TrainingRun
from metafop import tree
from metafop.tensorboard import Logger

SETTINGS = Settings(horizon=32, epochs=2)
TASK = BipedalTask("fop", 3e-4, 0, "standard", 0, steps=1024, environments=4, ppo=SETTINGS, through="optim")
METHODS = [name for name in RATES if name != "adam-sb3"]


@pytest.fixture
def rollout(generator):
    """Forty steps of three environments, of which some end; a third of these are out of time."""

    def drawn(*shape):
        return torch.randn(40, 3, *shape, generator=generator)

    ended = torch.rand(40, 3, generator=generator) < 0.2
    terminated = ended & (torch.rand(40, 3, generator=generator) < 0.67)
    return Rollout(drawn(24), drawn(4), drawn(), drawn(24), terminated, ended)


def test_advantages_are_those_of_stable_baselines(rollout, generator):
    before, after = torch.randn(2, 40, 3, generator=generator)
    settings = Settings(discount=0.9, trace=0.8)
    box = gymnasium.spaces.Box(-1, 1, (24,)), gymnasium.spaces.Box(-1, 1, (4,))
    theirs = RolloutBuffer(40, *box, "cpu", gae_lambda=0.8, gamma=0.9, n_envs=3)
    # They have one value a state, add what is still to come where time is out to the reward, and call a
    # state the first of an episode where we call the one before it the last.
    out_of_time = rollout.ended & ~rollout.terminated
    following = torch.cat([before[1:], after[-1:]])
    ours = torch.where(rollout.ended, after, following)
    theirs.rewards = (rollout.rewards + 0.9 * after * out_of_time).numpy()
    theirs.values, theirs.episode_starts[1:] = before.numpy(), rollout.ended[:-1].numpy()
    theirs.compute_returns_and_advantage(after[-1], rollout.ended[-1].numpy())
    found = ppo.advantages(rollout, before, ours, settings)
    assert_near(found, torch.as_tensor(theirs.advantages, dtype=found.dtype), 1e-6)


def test_an_advantage_is_the_discounted_sum_of_surprises(rollout):
    """Written out for one step, to the end of its episode."""
    before, after = rollout.observations[..., 0], rollout.after[..., 0]
    found = ppo.advantages(rollout, before, after, SETTINGS)
    for column in range(3):
        last = int(rollout.ended[:, column].nonzero()[0])
        td_errors = [
            rollout.rewards[t, column]
            + 0.99 * after[t, column] * (not rollout.terminated[t, column])
            - before[t, column]
            for t in range(last + 1)
        ]
        expected = sum((0.99 * 0.95) ** t * td_error for t, td_error in enumerate(td_errors))
        assert_near(found[0, column], expected, 1e-12)


def test_the_probability_of_actions_is_that_of_a_normal_distribution(generator):
    mean, actions = torch.randn(2, 5, 4, generator=generator)
    log_std = torch.randn(4, generator=generator)
    expected = Normal(mean, log_std.exp()).log_prob(actions).sum(-1)
    assert_near(PolicyOutput(mean, log_std, mean[:, 0]).log_prob(actions), expected, 1e-12)


def test_the_loss_is_flat_where_a_ratio_is_clipped(generator):
    """A step that was good and is already taken more often than 1 + ε teaches the policy nothing more."""
    policy = TASK.policy()
    observations, actions = (torch.randn(2, n, generator=generator) for n in (24, 4))
    output = policy(observations)
    log_probs = output.log_prob(actions).detach() - torch.tensor([math.log(1.3), math.log(0.7)])
    batch = Batch(observations, actions, log_probs, torch.tensor([1.0, -1.0]), output.value.detach())
    ppo.loss(policy, batch, SETTINGS).backward()
    assert not any(p.grad.any() for p in policy.parameters() if p.grad is not None)
    pulled = batch._replace(advantages=-batch.advantages)
    ppo.loss(policy, pulled, SETTINGS).backward()
    assert any(p.grad.any() for p in policy.parameters() if p.grad is not None)


def test_an_epoch_has_every_step_once(generator):
    count = torch.arange(96.0)
    parts = list(ppo.minibatches(Batch(*[count] * 5), replace(SETTINGS, epochs=1), generator))
    assert [len(part.returns) for part in parts] == [32] * 3
    assert torch.equal(torch.cat([part.returns for part in parts]).sort().values, count)
    assert all(torch.equal(part.returns, part.actions) for part in parts)


@pytest.mark.parametrize("method", METHODS)
def test_a_policy_improves_alike_through_torch_and_through_the_pure_core(method, tmp_path):
    logger = Logger(tmp_path)
    task = replace(TASK, method=method, lr=0.01)
    one, other = TrainingRun(task), TrainingRun(replace(task, through="functional"))
    for _ in range(3):
        [ours], [theirs] = one.advance(logger), other.advance(logger)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-10)
    same = assert_near if method == "adam" else assert_same_bits
    tolerance = (1e-9,) if method == "adam" else ()
    same(one.learner.params, other.learner.params, *tolerance)
    learned, also = one.learner.inspect(), other.learner.inspect()
    assert (learned is None) == (also is None) == (method in ("adam", "momentum"))
    if learned is not None and also is not None:
        assert_same_bits(tree.named(learned[1].precond), tree.named(also[1].precond))
        assert_same_bits(learned[2], {name: also[2][name] for name in learned[2]})
    started = task.policy().state_dict()
    assert not torch.equal(one.learner.params["mean.weight"], started["mean.weight"])


@pytest.mark.parametrize("lr", [3e-4, 0.01])
def test_an_improvement_is_that_of_stable_baselines(lr, generator, single_precision):
    """The same steps, taken together: gradients, their clipping, and Adam, in their single precision."""
    settings = Settings(horizon=32, epochs=3, minibatch=128)
    task = replace(TASK, method="adam", lr=lr, ppo=settings)
    theirs, ours = SB3TrainingRun(replace(task, method="adam-sb3")).ppo, torch_learner(task)
    rows = Batch(*(torch.randn(128, *shape, generator=generator) for shape in [(24,), (4,), (), (), ()]))
    rows = rows._replace(log_probs=ours.act(rows.observations).log_prob(rows.actions).detach())
    for name, values in rows._asdict().items():
        setattr(theirs.rollout_buffer, name, values.view(32, 4, *values.shape[1:]).numpy())
    theirs.rollout_buffer.values, theirs.rollout_buffer.full = np.zeros((32, 4), np.float32), True
    theirs.train()
    for _ in range(settings.epochs):
        ours.learn(rows)
    found = theirs.policy.state_dict()
    assert_near(ours.params, {name: found[other] for name, other in NAMES.items()}, 1e-4)


def test_fop_has_full_rank_on_every_layer():
    learner = torch_learner(TASK)
    rows = ppo.Batch(*[torch.zeros(32, n).squeeze(-1) for n in (24, 4, 1, 1, 1)])
    learner.learn(rows._replace(advantages=torch.arange(32.0)))
    found = learner.inspect()
    assert found is not None
    _, meta, _ = found
    assert {name: m.shape for name, m in meta.precond.items() if isinstance(m, torch.Tensor)} == {
        "hidden.0.weight": (24, 24),
        "hidden.2.weight": (40, 40),
        "mean.weight": (40, 40),
        "value.weight": (40, 40),
    }


def test_the_first_weights_are_orthogonal_and_the_first_actions_small():
    policy = TASK.policy().double()
    weight = policy.get_parameter("hidden.2.weight").detach()
    assert_near(weight @ weight.T, 2 * torch.eye(40), 1e-5)
    observations = torch.as_tensor(np.random.default_rng(0).normal(size=(9, 24)))
    assert policy(observations).mean.abs().max() < 0.1
