"""The output folder of an experiment: what is removed at the start, and what is refused at the end."""

import math

import pytest

from experiments.paper.toy.command import Config
from experiments.reporting.summary import write_summary
from experiments.runner import experiment


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_is_not_finite_is_refused(value, tmp_path):
    with pytest.raises(ValueError, match=r"'loss' is .* Pass None"):
        write_summary(tmp_path, {"loss": value})
    assert not (tmp_path / "summary.json").exists()


def test_a_second_run_removes_what_would_pass_for_its_own_and_nothing_else(tmp_path):
    events = "events.out.tfevents.1"
    removed = ["summary.json", "tables.md", events, f"events/{events}", f"events/booth/{events}"]
    kept = ["notes.txt", "events/notes.txt", f"other/{events}"]
    for name in removed + kept:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    experiment.begin(Config(out=tmp_path))
    assert [name for name in removed + kept if (tmp_path / name).exists()] == kept
