"""Products of matrices in compiled steps, by oneDNN: on processors of AMD it takes half the time of MKL.

TorchInductor calls MKL for them, and oneDNN only where a matrix is constant. XLA calls oneDNN, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import lowering, mkldnn_ir
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes import mkldnn_fusion
from torch._inductor.ir import TensorBox
from torch.fx import Graph, Node

aten: Any = torch.ops.aten
LEAST = 2**20  # multiplications below which a call of oneDNN is not worth it


class ByOneDNN(CustomGraphPass):
    """Puts oneDNN's (x, w) ↦ x wᵀ, of A and Bᵀ, in place of A B in a graph that Inductor has prepared."""

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            if node.target in (aten.mm.default, aten.addmm.default) and _is_worth_it(node):
                _replace(graph, node)

    def uuid(self) -> str:
        """Return what tells this pass from others in the compiler's cache on disk."""
        return "metafop: products of matrices by oneDNN, 1"


@contextmanager
def by_onednn() -> Iterator[dict[str, Any]]:
    """A context that yields the options of Inductor with which products are taken by oneDNN."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        yield {}
        return
    mkldnn_fusion._mkldnn_fusion_init()  # else it would come later, and undo this
    with patch.dict(lowering.lowerings, {torch.ops.mkldnn._linear_pointwise.default: _lowered}):
        yield {"post_grad_custom_post_pass": ByOneDNN()}


def _lowered(x: Any, weight: Any, bias: Any, attr: str, scalars: list[Any], algorithm: str) -> Any:
    """Return the call in Inductor's form: its own takes constant weights only."""
    return TensorBox.create(mkldnn_ir.LinearUnary.create(x, weight, bias, attr, scalars, algorithm))


def _is_worth_it(node: Node) -> bool:
    *_, a, b = (each.meta["val"] for each in node.args if isinstance(each, Node))
    on_cpu = a.dtype == torch.float32 and a.device.type == "cpu"
    return on_cpu and not node.kwargs and a.shape[0] * a.shape[1] * b.shape[1] >= LEAST


def _replace(graph: Graph, node: Node) -> None:
    *added, a, b = node.args
    with graph.inserting_before(node):

        def call(operation: Any, *args: Any) -> Node:
            made = graph.call_function(operation, args)
            made.meta["val"] = operation(*(x.meta["val"] if isinstance(x, Node) else x for x in args))
            return made

        product = call(
            torch.ops.mkldnn._linear_pointwise.default,
            a,
            call(aten.permute.default, b, [1, 0]),
            None,
            "none",
            [],
            "",
        )
        if added:
            product = call(aten.add.Tensor, added[0], product)
    node.replace_all_uses_with(product)
    graph.erase_node(node)
