"""A causal transformer: learned positions, norms before each part, and a head of its own."""

from torch import Tensor, arange, nn
from torch.nn.functional import scaled_dot_product_attention


class Transformer(nn.Module):
    """Predicts the token after each of a sequence; `width` is a multiple of `heads`."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of every next token, one row for each: (batch · length, vocabulary)."""
        x = self.tokens(tokens) + self.positions(arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)


class Block(nn.Module):
    """x' = x + attention(norm(x)),    x'' = x' + mlp(norm(x'))"""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    """Causal self-attention in several heads.

    Its inner layer has no bias. That of the keys would change nothing: its gradient is rounding alone, and
    Adam would divide that by its own size.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inner = nn.Linear(width, 3 * width, bias=False)
        self.outer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(x).unflatten(-1, (3, self.heads, -1))  # (batch, length, 3, heads, width / heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # (batch, heads, length, width / heads) each
        y = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.outer(y.transpose(1, 2).flatten(-2))
