"""`mnist-rank` runs from its command, with the ranks of the paper."""

from commands import smoke

from experiments.paper import mnist_rank


def test_mnist_rank_compares_every_rank_with_momentum_and_shows_angles(tmp_path):
    summary, text = smoke("mnist-rank", tmp_path)
    assert {"lr0.01_fop_rank2_p", "lr0.01_fop-paper_rank784_gain_low"} <= summary.keys()
    assert 0 < summary["lr0.01_fop_layer1_last_angle"] < 45
    assert "| FOP | full | " in text
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("ranks.png", "angles.png"))


def test_the_ranks_of_the_paper_are_those_of_small():
    assert mnist_rank.PRESETS["small"].ranks == (0, 1, 2, 4, 16, 64, 784)
