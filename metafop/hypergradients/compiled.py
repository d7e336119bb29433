"""Functions compiled once for each form of their arguments: traced by make_fx, built by TorchInductor.

torch.compile asks all its guards at each call, which for a small net takes a tenth of a step. Most of what
they would find out is known here: what a compiled function returns has the same form each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from metafop import stopped_gradients
from metafop.hypergradients.checks.compiled import check_agreement
from metafop.log import logger
from metafop.stopped_gradients import Record
from metafop.twice_differentiable import TwiceDifferentiable

Leaves = list[Any]  # tensors, and None where a batch has none


@dataclass(frozen=True, eq=False)  # one object for each form, so that two are compared at once
class Form:
    """What is compiled in of some leaves: the shape, strides, type and device of each."""

    described: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device] | None, ...]

    def examples(self) -> Leaves:
        """Return other leaves of this form: no two of them one tensor, as two arguments may be."""
        return [
            each and torch.empty_strided(each[0], each[1], dtype=each[2], device=each[3])
            for each in self.described
        ]


class Formed(list):
    """Leaves whose form is known."""

    def __init__(self, leaves: Iterable[Any], form: Form | None = None) -> None:
        super().__init__(leaves if form else map(_resolved, leaves))
        self.form = form or _form(tuple(map(_described, self)))


class Compiled:
    """A pure function from lists of leaves to lists of leaves, compiled once for each form of these.

    All else that it sees, a training or a number, is compiled in and must stay what it is. What is built is
    compared once with the function itself, if it is to be `checked`.
    """

    def __init__(self, function: Callable[..., tuple[Leaves, ...]], checked: bool = True) -> None:
        self.function, self.checked = function, checked
        self.built: dict[tuple, _Built] = {}

    @torch.no_grad()  # what the function closes over may require a gradient, and would leave a graph
    def __call__(self, *groups: Leaves) -> tuple[Formed, ...]:
        formed = [group if isinstance(group, Formed) else Formed(group) for group in groups]
        key = (*(group.form for group in formed), *_surroundings())
        if key not in self.built:
            if len(self.built) == _LIMIT:
                raise RuntimeError(
                    f"A step was compiled for {_LIMIT} forms of batches, and there comes another. "
                    "Bring batches to a few shapes, or pass compile=False."
                )
            begin = time.perf_counter()
            logger.info("compiling a step %s, once for each shape of batches", self.function.__name__)
            with TwiceDifferentiable(), stopped_gradients.recording() as record:
                built = _build(self.function, formed, record)
                if self.checked:
                    check_agreement(built(formed), self.function, formed)
            self.built[key] = built
            logger.info("compiled it in %.1f s", time.perf_counter() - begin)
        return self.built[key](formed)


class _Built(NamedTuple):
    """A compiled function of tensors, the forms of the lists into which its result is cut, and what was
    recorded of its derivatives while it was traced.
    """

    run: Callable[..., list[Tensor]]
    forms: tuple[Form, ...]
    record: Record

    def __call__(self, groups: list[Formed]) -> tuple[Formed, ...]:
        stopped_gradients.add(self.record)
        lists = _cut(self.run(*_tensors(groups)), [len(form.described) for form in self.forms])
        return tuple(map(Formed, lists, self.forms))


def _build(function: Callable[..., tuple[Leaves, ...]], groups: list[Formed], record: Record) -> _Built:
    import torch._inductor  # takes a second: for those who compile

    sizes: list[int] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        found = iter(tensors)
        returned = function(*([each and next(found) for each in group.form.described] for group in groups))
        sizes[:] = map(len, returned)
        return [x for group in returned for x in group]

    examples: list[Any] = _tensors([group.form.examples() for group in groups])
    try:
        graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
    except RuntimeError as error:
        if "data-dependent" not in str(error):
            raise
        raise RuntimeError(
            "A step whose Python reads the values of tensors cannot be compiled. "
            "Use torch.where in the loss, or compile=False."
        ) from error
    _refuse_random(graph)
    run: Any = torch._inductor.compile(graph, examples, _OPTIONS)
    del examples  # as large as all that a step takes
    forms = tuple(Formed(leaves).form for leaves in _cut(run(*_tensors(groups)), sizes))
    return _Built(run, forms, record)


def _refuse_random(graph: GraphModule) -> None:
    """Refuse random numbers: what is compiled would draw others at each call."""
    drawn = (node.target for node in graph.graph.nodes if node.op == "call_function")
    for operation in drawn:
        if torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ()):
            raise ValueError(
                f"The loss draws random numbers ({operation}), and a compiled step would draw others "
                "whenever it is taken again. Pass seeded=True to functional.from_module or functional.plain, "
                "or pass the numbers with the batch."
            )


# Kernels are called from C++. Data keep their layout: torch's compiler would turn those of each convolution
# by themselves, and copy them for each that reads them.
_OPTIONS: dict[str, Any] = {"cpp_wrapper": True, "layout_optimization": False}
_LIMIT = 64


def _surroundings() -> tuple:
    """Return what is compiled in besides: how types are chosen, and the threads that kernels are cut for."""
    casts = ((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))
    return torch.get_default_dtype(), torch.get_num_threads(), *casts


def _tensors(groups: Iterable[Leaves]) -> list[Tensor]:
    return [x for group in groups for x in group if x is not None]


def _cut(tensors: Iterable[Tensor], sizes: Iterable[int]) -> list[list[Tensor]]:
    rest = iter(tensors)
    return [list(islice(rest, size)) for size in sizes]


def _resolved(x: Tensor | None) -> Tensor | None:
    """Return the tensor as it is in memory: one that is negated or conjugated only by a mark is made so.

    The stride of a dimension with one entry says nothing, and vmap leaves any there: it is made the usual.
    """
    if x is None:
        return None
    x = x.resolve_conj().resolve_neg()
    return x.view(-1).view(x.shape) if 1 in x.shape and x.is_contiguous() else x


def _described(x: Tensor | None) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device] | None:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


@cache
def _form(described: tuple) -> Form:
    return Form(described)
