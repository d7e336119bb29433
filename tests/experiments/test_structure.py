"""`structure` runs from its command."""

import pytest
from commands import smoke


def test_structure_shows_what_each_position_of_a_kernel_weighs(tmp_path):
    summary, text = smoke("structure", tmp_path)
    for layer in range(1, 8):
        assert summary[f"fop_layer{layer}_self"] == pytest.approx(1, abs=0.2)
        assert summary[f"fop-paper_layer{layer}_eigenvalue_min"] > 0
    assert "| FOP | 7 | " in text
    pictures = ("matrices", "histograms", "eigenvalues", "weights")
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in pictures)
