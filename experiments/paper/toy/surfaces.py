"""The functions that are minimised: Booth's and Himmelblau's."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Surface(NamedTuple):
    """A function to minimise, its minima, the part to draw, and the steps that the paper's caption gives."""

    loss: Callable[[dict[str, Tensor], Any], Tensor]
    minima: list[tuple[float, float]]
    view: tuple[float, float, float, float]  # left, right, bottom, top
    paper: dict[str, int]  # by name in the figure


def booth(params: dict[str, Tensor], batch: Any) -> Tensor:
    x, y = params["x"][0], params["x"][1]
    return (x + 2 * y - 7) ** 2 + (2 * x + y - 5) ** 2


def himmelblau(params: dict[str, Tensor], batch: Any) -> Tensor:
    x, y = params["x"][0], params["x"][1]
    return (x**2 + y - 11) ** 2 + (x + y**2 - 7) ** 2


VALLEYS = [(3.0, 2.0), (-2.805118, 3.131312), (-3.779310, -3.283186), (3.584428, -1.848127)]
SURFACES = {  # by name in Config
    "booth": Surface(booth, [(1.0, 3.0)], (-1, 9, -1, 5.5), {"gd": 832, "fop": 543, "adam": 6221}),
    "himmelblau": Surface(himmelblau, VALLEYS, (-0.5, 4.5, -3, 3.5), {"gd": 386, "fop": 289, "adam": 5398}),
}
