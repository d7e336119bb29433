"""The pages of docs/results say what the files of the runs say."""

import json
import re

import pytest

from experiments.reporting import page

WRITTEN = sorted(path.stem for path in page.TEMPLATES.glob("*.md"))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_page_is_its_template_filled_with_what_was_measured(name):
    assert (page.RESULTS / f"{name}.md").read_text() == page.rendered(name)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_page_has_its_command_its_making_its_tables_and_its_pictures(name):
    template = (page.TEMPLATES / f"{name}.md").read_text()
    assert f"python -m experiments {name}" in template
    assert template.count("{tables}") == template.count("{made}") == 1
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", template)
    assert pictures
    assert [picture for picture in pictures if not (page.RESULTS / picture).exists()] == []


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(page, "TEMPLATES", tmp_path / "results" / "templates")
    page.TEMPLATES.mkdir(parents=True)
    (page.TEMPLATES / "cifar10.md").write_text("# A page\n\n{fop_accuracy:.1f} %, {made}\n\n{tables}\n")
    return page.RESULTS


@pytest.fixture
def out(tmp_path):
    part = {
        "versions": {"torch": "2", "python": "3"},
        "commit": f"{'a' * 40}-dirty",
        "machine": {"processor": "P", "cores": 2},
    }
    for i in range(2):
        folder = tmp_path / "out" / "runs" / f"fop-{i}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"parts": [part]}))
        (folder / "result.json").write_text(json.dumps({"seconds": 60.0 * (i + 1)}))
    (tmp_path / "out" / "studied.txt").write_text("fop-0\nfop-1\nfop-1\n")
    (tmp_path / "out" / "runs" / "of-another-study").mkdir()
    (tmp_path / "out" / "summary.json").write_text(json.dumps({"fop_accuracy": 66.25, "fop-norm_lr": 0.1}))
    (tmp_path / "out" / "tables.md").write_text("Accuracy\n\n| method |\n| --- |\n| FOP |\n\n")
    (tmp_path / "out" / "cifar10.png").write_bytes(b"")
    return tmp_path / "out"


def test_a_page_is_written_from_the_folder_of_an_experiment(results, out):
    page.main(page.Config("cifar10", out))
    assert (results / "cifar10.md").read_text() == (
        "# A page\n\n66.2 %, 2 runs, 3 minutes in all if one after the other; P, 2 cores; torch 2, Python 3; "
        "commit aaaaaaaaaa-dirty\n\nAccuracy\n\n| method |\n| --- |\n| FOP |\n"
    )
    assert json.loads((results / "cifar10.json").read_text())["summary"]["fop_norm_lr"] == 0.1
    assert (results / "cifar10.png").exists()


def test_a_figure_that_was_not_measured_is_refused(results, out):
    (page.TEMPLATES / "cifar10.md").write_text("{muon_accuracy}")
    with pytest.raises(SystemExit, match=r"The template of cifar10 asks for .*'muon_accuracy'"):
        page.main(page.Config("cifar10", out))


def test_a_page_without_a_template_is_refused(results):
    with pytest.raises(SystemExit, match=r"no template of a page 'cifar'\. Name one of cifar10\."):
        page.main(page.Config("cifar"))


def test_a_study_without_its_end_is_refused(results, tmp_path):
    with pytest.raises(SystemExit, match=r"no summary\.json\. Run: python -m experiments cifar10 --out"):
        page.main(page.Config("cifar10", tmp_path))
