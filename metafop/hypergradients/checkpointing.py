"""Which carries to keep, so that a backward pass fits into a budget and few steps are repeated."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate


@dataclass(frozen=True)
class Checkpointing:
    """Binomial checkpoints (Griewank & Walther, 2000) in bytes: `carry` for one that is kept to start from
    again, `whole` for one that is kept with all that its step back needs.

    reach(b, 1) = (b + carry) / whole,    reach(b, p) = reach(b, p - 1) + reach(b - carry, p)

    is how many steps a backward pass can cover from a carry in hand, if b bytes may be held besides and no
    step is taken more than p times: one carry is kept further on, the pass goes back to it with what is left
    of the budget, then from there with all of it. (docs/math.md, 20)
    """

    carry: int
    whole: int

    def reach(self, budget: int, passes: int) -> int:
        return _reaches(self.carry, self.whole, budget, passes)[-1]

    def passes(self, steps: int, budget: int) -> int:
        """Return how often some step is taken, at the least."""
        passes = 1
        while self.reach(budget, passes) < steps:
            passes += 1
        return passes

    def budget(self, steps: int, passes: int) -> int:
        """Return the least budget with which no step is taken more often."""
        low, high = 0, self.whole * steps
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.reach(middle, passes) >= steps else (middle + 1, high)
        return low

    def distance(self, steps: int, budget: int) -> int:
        """Return how many steps further the next carry is to be kept, or 0 if all can be kept whole."""
        passes = self.passes(steps, budget)
        if passes == 1:
            return 0
        # So far that the rest is reached in a pass less, if this side then is, too.
        rest = self.reach(budget - self.carry, passes - 1)
        return max(min(self.reach(budget, passes - 1), steps - rest), 1)


@lru_cache(maxsize=4096)
def _reaches(carry: int, whole: int, budget: int, passes: int) -> tuple[int, ...]:
    """Return reach(b, passes) for b = budget and what is left of it after each carry, from the smallest."""
    if passes == 1:
        return tuple(max((b + carry) // whole, 1) for b in range(budget % carry, budget + 1, carry))
    smallest, *others = _reaches(carry, whole, budget, passes - 1)
    return tuple(accumulate(others, initial=smallest))
