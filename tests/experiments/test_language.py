"""The small language model sees no later token, and its tokens have something to learn in them."""

import torch

from experiments.language.tokens import FOLLOWING, draw_tokens
from experiments.language.transformer import Transformer


def test_no_token_sees_a_later_one():
    model = Transformer(layers=2, width=8, heads=2, length=6, vocabulary=5)
    tokens = torch.tensor([[0, 1, 2, 3, 4, 0]])
    changed = torch.tensor([[0, 1, 2, 3, 1, 0]])
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:4], after[:4], rtol=0, atol=0)
    assert (before[4:] != after[4:]).all()


def test_most_tokens_follow_from_the_one_before_and_all_are_as_frequent(generator):
    batches = draw_tokens(20, 50, generator, length=30, vocabulary=7)
    before = torch.cat([tokens.flatten() for tokens, _ in batches])
    after = torch.cat([following for _, following in batches])
    pairs = torch.zeros(7, 7).index_put((before, after), torch.tensor(1.0), accumulate=True) / len(before)
    expected = FOLLOWING + (1 - FOLLOWING) / 7
    torch.testing.assert_close(7 * pairs.amax(0), torch.full((7,), expected), atol=0.02, rtol=0)
    torch.testing.assert_close(7 * pairs.amax(1), torch.full((7,), expected), atol=0.02, rtol=0)
    torch.testing.assert_close(pairs.sum(0), torch.full((7,), 1 / 7), atol=0.01, rtol=0)
