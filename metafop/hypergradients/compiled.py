"""A function in two parts, compiled once for each form of its arguments, by TorchInductor.

torch.compile asks all its guards at each call, which for a small net takes a tenth of a step. Most of what
they would find out is known here: what a compiled function returns has the same form each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from metafop import stopped_gradients
from metafop.hypergradients.checks.compiled import check_agreement
from metafop.log import logger
from metafop.stopped_gradients import Record
from metafop.twice_differentiable import TwiceDifferentiable

Leaves = list[Any]  # tensors, and None where there is none
Groups = tuple[Leaves, ...]
Parts = Callable[[Groups, Groups], tuple[Groups, Groups]]


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
    """A pure function in two parts, compiled once for each form of what the first is given.

    first, second = function(given, later)        all of them lists of leaves; the first reads `given` alone

    All else that it sees, a training or a number, is compiled in and must stay what it is. What is built is
    compared once with the function itself, if it is to be `checked`. `later` says what the second part will
    be given, by examples.
    """

    def __init__(
        self,
        function: Parts,
        later: Callable[[Groups], Groups],
        checked: bool = True,
    ) -> None:
        self.function, self.later, self.checked = function, later, checked
        self.built: dict[tuple, Built] = {}

    def __call__(self, *groups: Leaves) -> tuple[tuple[Formed, ...], Second]:
        """Return what the first part returns, and the second part, to be called once."""
        formed = [*map(_known, groups)]
        return self.build(*formed).first(formed)

    @torch.no_grad()  # what the function closes over may require a gradient, and would leave a graph
    def build(self, *groups: Formed) -> Built:
        key = (*(group.form for group in groups), *_surroundings())
        if key not in self.built:
            if len(self.built) == _LIMIT:
                raise RuntimeError(
                    f"A step was compiled for {_LIMIT} forms of batches, and there comes another. "
                    "Bring batches to a few shapes, or pass compile=False."
                )
            begin = time.perf_counter()
            logger.info("compiling a step, once for each shape of batches")
            later = tuple(Formed(group) for group in self.later(groups))
            with stopped_gradients.recording() as record:
                built = _build(self.function, groups, later, record)
                if self.checked:
                    with TwiceDifferentiable(fused=True):
                        self._check(built, groups, later)
            self.built[key] = built
            logger.info("compiled it in %.1f s", time.perf_counter() - begin)
        return self.built[key]

    def _check(self, built: Built, groups: Sequence[Formed], later: tuple[Formed, ...]) -> None:
        first, second = built.first(groups)
        count = len(groups)

        def both(*groups: Leaves) -> Groups:
            first, second = self.function(groups[:count], groups[count:])
            return (*first, *second)

        check_agreement([*first, *second(*later)], both, [*groups, *later])


class Built(NamedTuple):
    """Both parts, compiled; the forms of what they take and return; and what was recorded of derivatives."""

    run_first: Callable[..., list[Tensor]]
    run_second: Callable[..., list[Tensor]]
    needed: list[int]  # by the second part, as places in all that there is when it is called
    first_forms: tuple[Form, ...]
    later_forms: tuple[Form, ...]
    second_forms: tuple[Form, ...]
    record: Record
    bytes_kept: int

    def first(self, groups: Sequence[Formed]) -> tuple[tuple[Formed, ...], Second]:
        stopped_gradients.add(self.record)
        given = _tensors(groups)
        returned = self.run_first(*given)
        there = [*given, *returned]
        kept = [there[place] if place < len(there) else None for place in self.needed]
        return _formed(returned, self.first_forms), Second(self, kept, len(there))


class Second(NamedTuple):
    """The second part of a call, with what it needs of the first: None stands for what it is given."""

    built: Built
    kept: list[Tensor | None]
    earlier: int  # tensors there before those that it is given

    def __call__(self, *later: Leaves) -> tuple[Formed, ...]:
        formed = [
            group if group.form is form else Formed(x.contiguous() for x in group)
            for group, form in zip(map(_known, later), self.built.later_forms, strict=True)
        ]
        given = _tensors(formed)
        needed = [
            given[place - self.earlier] if x is None else x
            for place, x in zip(self.built.needed, self.kept, strict=True)
        ]
        return _formed(self.built.run_second(*needed), self.built.second_forms)


def _build(function: Parts, groups: Sequence[Formed], later: Sequence[Formed], record: Record) -> Built:
    import torch._inductor  # takes a second: for those who compile

    from metafop.hypergradients.joint_graph import cut
    from metafop.hypergradients.matrix_products import by_onednn

    given, then = (_tensors([group.form.examples() for group in part]) for part in (groups, later))
    graph, sizes = _traced(function, groups, later, [*given, *then])
    _refuse_random(graph)
    first, second, needed = cut(graph, [*given, *then], len(given), sum(sizes[0]))
    with by_onednn() as options:
        run_first: Any = torch._inductor.compile(first, [*given], _OPTIONS | options)
        del given, then  # as large as all that a step takes
        given = _tensors(groups)
        returned = run_first(*given)
        there = [*given, *returned, *_tensors(later)]
        examples: list[Any] = [there[place] for place in needed]
        run_second: Any = torch._inductor.compile(second, examples, _OPTIONS | options)
    made = run_second(*examples)
    return Built(
        run_first,
        run_second,
        needed,
        _forms(returned, sizes[0]),
        tuple(group.form for group in later),
        _forms(made, sizes[1]),
        record,
        bytes_kept=sum(x.nbytes for x in returned[sum(sizes[0]) :]),
    )


def _traced(
    function: Parts, groups: Sequence[Formed], later: Sequence[Formed], examples: list[Tensor]
) -> tuple[GraphModule, tuple[list[int], list[int]]]:
    """Return the graph of both parts, and the lengths of the lists that each returns."""
    from metafop.hypergradients.joint_graph import traced

    sizes: list[list[int]] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        found = iter(tensors)
        given, then = (
            tuple([each and next(found) for each in group.form.described] for group in part)
            for part in (groups, later)
        )
        parts = function(given, then)
        sizes[:] = [list(map(len, part)) for part in parts]
        return [x for part in parts for group in part for x in group]

    try:
        with torch.enable_grad(), TwiceDifferentiable(fused=True):
            graph = traced(flat, examples)
    except RuntimeError as error:
        if "data-dependent" not in str(error):
            raise
        raise RuntimeError(
            "A step whose Python reads the values of tensors cannot be compiled. "
            "Use torch.where in the loss, or compile=False."
        ) from error
    return graph, (sizes[0], sizes[1])


def _forms(tensors: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Form, ...]:
    return tuple(Formed(leaves).form for leaves in _cut(tensors, sizes))


def _known(group: Leaves) -> Formed:
    return group if isinstance(group, Formed) else Formed(group)


def _formed(tensors: list[Tensor], forms: tuple[Form, ...]) -> tuple[Formed, ...]:
    return tuple(map(Formed, _cut(tensors, [len(form.described) for form in forms]), forms))


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
# by themselves, and copy them for each that reads them. The instructions that the processor names are used
# without a test program for each, and torch's headers are not compiled apart for the two functions that are
# built: both together take half of the time of a build.
_OPTIONS: dict[str, Any] = {
    "cpp_wrapper": True,
    "layout_optimization": False,
    "cpp.vec_isa_ok": True,
    "cpp_cache_precompile_headers": False,
}
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
