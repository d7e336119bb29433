"""The loop of learning over horizons: by hand, interrupted and gone on with, and what it writes."""

import math
import sys

import pytest
import torch
from events import points, read, scalar
from problems import assert_same_bits, every
from valley import ESTIMATORS, Interrupted, kept, made, run

from metafop import Momentum, tree
from metafop.hypergradients.forward import Forward
from metafop.meta_training import meta_train
from metafop.optimizers.scheduled import Scheduled


def test_the_loop_is_a_step_for_each_window_and_a_start_for_each_episode():
    learner, outer_meta, meta, task = made()
    state, carry, values, rates = learner.init(meta), None, [], []
    for episode in range(3):
        carry = task.start(episode)
        for window in range(2):
            rates.append(state.meta.hyper.lr.item())
            outer, batches = task.outer_loss(episode, window), task.batches(episode, window)
            state, info = learner.step(outer_meta, state, outer, carry, batches)
            carry = state.carry
            values.append(info["value"].item())
    trained = run(steps=6, windows=2)
    assert_same_bits(trained.state, state)
    assert [row["value"] for row in trained.history] == values
    assert [row["hyper.lr"] for row in trained.history] == rates
    assert [row["moved"] for row in trained.history] == 6 * [1.0]


def test_what_is_learned_lowers_the_outer_loss():
    history = run(steps=40).history
    assert sum(row["value"] for row in history[-5:]) < 0.5 * sum(row["value"] for row in history[:5])


STOPS = {
    "once": [(1, 2)],
    "at a start": [(2, 0)],
    "before any checkpoint": [(0, 1)],
    "thrice": [(0, 2), (1, 1), (2, 1)],
}


@every("stops", STOPS)
@every("estimator", ESTIMATORS)
def test_an_interrupted_run_ends_as_one_that_was_not_bit_for_bit(estimator, stops, tmp_path):
    whole = run(tmp_path / "whole", windows=3, estimator=estimator)
    for stop in stops:
        with pytest.raises(Interrupted):
            run(tmp_path / "parts", windows=3, estimator=estimator, fails=(stop,))
    parts = run(tmp_path / "parts", windows=3, estimator=estimator)
    assert_same_bits(parts.state, whole.state)
    assert (parts.history, parts.notes) == (whole.history, whole.notes)
    ends = [torch.load(tmp_path / k / "checkpoint.pt") for k in ("whole", "parts")]
    assert_same_bits(tree.leaves(ends[1]["state"]), tree.leaves(ends[0]["state"]))
    for name in whole.history[0]:  # no step is missing, and none comes twice
        assert points(tmp_path / "parts", name) == points(tmp_path / "whole", name)
        assert [step for step, _ in points(tmp_path / "parts", name)] == list(range(8))


def test_a_run_goes_on_when_asked_for_more_steps_and_is_done_when_asked_again(tmp_path):
    run(tmp_path, steps=5)
    longer = run(tmp_path, steps=8)
    files = sorted(tmp_path.iterdir())
    again = run(tmp_path, steps=8, fails=tuple((episode, 0) for episode in range(1, 8)))
    assert_same_bits((longer.state, again.state), 2 * (run(steps=8).state,))
    assert again.history == longer.history
    assert sorted(tmp_path.iterdir()) == files


def test_events_are_the_history_and_what_is_learned_is_in_it(tmp_path):
    optimizer = Scheduled(Momentum(), 3, ("lr", "momentum"))
    hyper = optimizer.hyper(lr=[0.01, 0.02, 0.03], momentum=0.5)
    learn = ("lr", "momentum", "precond")
    history = run(tmp_path, steps=3, optimizer=optimizer, hyper=hyper, learn=learn).history
    assert history[0]["hyper.lr.mean"] == pytest.approx(0.02)
    assert history[0]["precond.w.norm"] == pytest.approx(math.sqrt(3))
    events = read(tmp_path)
    assert set(events.Tags()["scalars"]) == history[0].keys()
    assert history[0].keys() >= {"value", "norm", "moved", "overflow", "hyper.momentum.mean"}
    for name in history[0]:
        assert scalar(events, name) == [(i, pytest.approx(row[name])) for i, row in enumerate(history)]


def test_notes_are_kept_with_the_step_that_said_them_first():
    trained = run(steps=3, hyper=Momentum().hyper(lr=1e200, momentum=0.5))
    assert list(trained.notes.values()) == [0]
    assert "overflowed" in next(iter(trained.notes))
    assert [row["moved"] for row in trained.history] == [0.0, 0.0, 0.0]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(steps=2)
    assert list(tmp_path.iterdir()) == []


def test_progress_is_told_each_step_and_changes_nothing():
    said = []
    shown = meta_train(*made(), 3, progress=lambda *said_now: said.append(said_now))
    assert said == [(f"outer loss {row['value']:.4g}", i + 1, 3) for i, row in enumerate(shown.history)]
    assert_same_bits(shown.state, run(steps=3).state)


def test_ctrl_c_saves_what_is_done_says_so_and_the_same_call_goes_on(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        run(tmp_path, steps=8, fails=((5, 0),), raises=KeyboardInterrupt)
    assert left.value.code == 130
    assert capsys.readouterr().err.strip() == (
        f"Interrupted after 5 of 8 steps. They are saved in {tmp_path}: the same call goes on from there."
    )
    assert len(kept(tmp_path)["history"]) == 5
    assert_same_bits(run(tmp_path, steps=8).state, run(steps=8).state)


def test_ctrl_c_without_a_folder_says_that_nothing_is_saved(capsys):
    with pytest.raises(SystemExit):
        run(steps=8, fails=((5, 0),), raises=KeyboardInterrupt)
    assert "Interrupted after 5 of 8 steps. Nothing is saved" in capsys.readouterr().err


def test_schedules_are_drawn_and_rates_by_pattern_have_names(tmp_path):
    optimizer = Scheduled(Momentum(), 3)
    run(tmp_path, steps=2, optimizer=optimizer, hyper=optimizer.hyper(lr={"w": [0.01, 0.02, 0.03]}))
    (path,) = tmp_path.glob("events*")
    assert read(path).Tags()["images"] == ["curve/hyper.lr.w"]
    assert scalar(read(path), "hyper.lr.w.mean")[0] == (0, pytest.approx(0.02))


def test_without_tensorboard_a_run_is_kept_and_says_that_it_writes_no_events(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.delitem(sys.modules, "metafop.tensorboard")
    with caplog.at_level("INFO", logger="metafop"):
        run(tmp_path, steps=2)
    assert_same_bits(run(tmp_path, steps=4).state, run(steps=4).state)
    assert list(tmp_path.glob("events*")) == []
    (said,) = caplog.messages
    assert "no events are written" in said
    assert 'pip install "metafop[tensorboard]"' in said


OTHERS = {
    "learner": ({"learn": ("lr", "precond")}, ["differs in learner."]),
    "estimator": ({"estimator": Forward()}, ["differs in learner and task."]),
    "task": ({"scale": 2.0}, ["differs in task."]),
    "windows": ({"windows": 3}, ["differs in windows."]),
    "meta": ({"hyper": Momentum().hyper(lr=0.02, momentum=0.5)}, ["differs in meta."]),
    "fewer steps": ({"steps": 3}, ["4 steps", "steps=3", "as many"]),
}


@every("changed, words", OTHERS)
def test_a_folder_of_another_run_is_refused(changed, words, tmp_path):
    run(tmp_path, steps=4)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"Pass another folder") as caught:
        run(tmp_path, **({"steps": 4} | changed))
    assert [word for word in [str(tmp_path), *words] if word not in str(caught.value)] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_another_meta_learning_rate_is_refused(tmp_path):
    run(tmp_path, steps=2)
    learner, _, meta, task = made()
    outer_meta = learner.init_meta(meta, lr=0.2)
    with pytest.raises(ValueError, match="differs in outer_meta"):
        meta_train(learner, outer_meta, meta, task, 4, folder=tmp_path)


@pytest.mark.parametrize("name", ["steps", "windows", "save_every"])
def test_numbers_below_one_are_refused(name):
    with pytest.raises(ValueError, match=rf"meta_train takes {name} of one or more, got 0. Pass"):
        run(**{name: 0})
