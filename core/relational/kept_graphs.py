"""The graphs of plain tensors, found again by later calls."""

from __future__ import annotations

import torch

from .graph import RelationalGraph
from .kept_by_tensors import KeptByTensors
from .node_types import NodeTypes

_graphs = KeptByTensors()


def graph_of(
    edge_index: torch.Tensor,
    edge_type: torch.Tensor,
    num_nodes: tuple[int, int],
    num_relations: int,
    node_types: NodeTypes | None = None,
) -> RelationalGraph:
    """Return the graph of plain tensors: that of an earlier call, if they did not change since."""
    return _graphs.find(
        (edge_index, edge_type),
        (num_nodes, num_relations, node_types),
        lambda: RelationalGraph(edge_index, edge_type, num_nodes, num_relations, node_types),
    )


def forget_graph(graph: RelationalGraph) -> None:
    """Keep a graph of `graph_of` no longer."""
    _graphs.forget(graph)
