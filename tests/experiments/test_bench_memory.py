"""The memory that the benchmarks report is what was held."""

import pytest
import torch

from experiments.measuring.memory import WINDOW, peak_of_tensors, peak_resident


def test_the_peak_of_tensors_is_the_most_that_was_held_at_once():
    def held(count):
        kept = []
        for _ in count:
            kept.append(torch.empty(1000, dtype=torch.uint8))
            torch.empty(300, dtype=torch.uint8)
        kept = kept[:10]
        return torch.empty(5000, dtype=torch.uint8)

    steps = 2 * WINDOW + 1  # so that the record is added up twice before the end
    assert peak_of_tensors(held, range(steps)) == 1000 * steps + 300
    assert peak_of_tensors(held, range(3)) == 3 * 1000 + 5000


def test_the_peak_of_a_process_counts_what_was_freed_again():
    found = peak_resident(lambda: torch.ones(2**23).sum())
    assert found is None or found / 2**20 == pytest.approx(64, abs=4)  # None where the system does not tell
