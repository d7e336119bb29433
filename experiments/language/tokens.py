"""Batches of tokens in which there is something to learn."""

import torch
from torch import Generator, Tensor

FOLLOWING = 0.8  # of all tokens follow from the one before


def draw_tokens(
    count: int, size: int, generator: Generator, length: int, vocabulary: int
) -> list[tuple[Tensor, Tensor]]:
    """Return batches of tokens (size, length), each with the tokens after them, flat.

    Most follow from the one before, by a permutation of the vocabulary, the same in all batches. The others
    are drawn anew: so each token is as frequent as any other.
    """
    follows = torch.randperm(vocabulary, generator=generator)
    drawn = torch.randint(vocabulary, (length + 1, count, size), generator=generator)
    anew = torch.rand(length + 1, count, size, generator=generator) > FOLLOWING
    tokens = [drawn[0]]
    for t in range(1, length + 1):
        tokens.append(torch.where(anew[t], drawn[t], follows[tokens[-1]]))
    return [(batch[:, :-1], batch[:, 1:].flatten()) for batch in torch.stack(tokens, dim=-1)]
