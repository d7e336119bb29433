"""A function in two parts, traced as one graph and cut in two: what the second needs of the first is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

aten: Any = torch.ops.aten


class Cut(NamedTuple):
    """The graphs of both parts.

    The first returns its results, then what is kept besides. `needed` are the places of what the second is
    given, in a list of all that there is by then: what the first was given, its results, what is kept, and
    what the second is given only then.
    """

    first: GraphModule
    second: GraphModule
    needed: list[int]


def traced(function: Callable[..., list[Tensor]], examples: Sequence[Tensor]) -> GraphModule:
    """Return the graph of a function in which nothing is written in place."""
    graph = _traced(function, examples)
    if any(_writes(node) for node in graph.graph.nodes):
        graph = _traced(functionalize(graph), examples)
    for node in graph.graph.nodes:
        if node.target is aten.detach.default:  # the derivatives are taken: it says nothing any more
            node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def cut(graph: GraphModule, examples: Sequence[Tensor], given: int, results: int) -> Cut:
    """Cut a graph in two: the first part has so many inputs, and as many of all results.

    torch chooses what is kept: as few bytes as can be, if no product of matrices and no convolution is to be
    computed twice.
    """
    for i, node in enumerate(_inputs(graph.graph)):
        node.target = f"{'primals' if i < given else 'tangents'}_{i}"  # by which torch tells the parts apart
        node.name = node.target
    graph.recompile()
    first, second = min_cut_rematerialization_partition(graph, examples, num_fwd_outputs=results)
    returned = _output(first.graph).args[0]
    places = {node.name: i for i, node in enumerate(_inputs(graph.graph)[:given])}
    kept: list[Node] = []
    for node in returned[results:]:
        if node.name not in places and node not in returned[:results]:
            kept.append(node)
    places |= {node.name: given + i for i, node in reversed([*enumerate([*returned[:results], *kept])])}
    later = _inputs(graph.graph)[given:]
    places |= {node.name: given + results + len(kept) + i for i, node in enumerate(later)}
    _output(first.graph).args = ((*returned[:results], *kept),)
    for node in _inputs(second.graph):
        if not node.users:
            second.graph.erase_node(node)
    needed = [places[node.name] for node in _inputs(second.graph)]
    first.recompile()
    second.recompile()
    return Cut(first, second, needed)


def _traced(function: Callable[..., Any], examples: Sequence[Tensor]) -> GraphModule:
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _inputs(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _output(graph: Graph) -> Any:
    return next(node for node in reversed(graph.nodes) if node.op == "output")
