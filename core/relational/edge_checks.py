"""What is accepted of the edges of a graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ArgumentError, ArgumentTypeError, IndexRangeError


def check_edges(
    edge_index: torch.Tensor, edge_type: torch.Tensor, sizes: tuple[int, ...], num_relations: int
) -> None:
    """Raise an error unless tensors are those of edges, and sizes those of a graph.

    Of the edges' values nothing is read: see `check_ranges`.
    """
    for name, t in (("edge_index", edge_index), ("edge_type", edge_type)):
        if not isinstance(t, torch.Tensor) or t.is_floating_point() or t.dtype is torch.bool:
            kind = t.dtype if isinstance(t, torch.Tensor) else type(t).__name__
            raise ArgumentTypeError(f"{name} is {kind}; accepted are tensors of integers")
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise ArgumentError(f"edge_index has shape {list(edge_index.shape)}; accepted is [2, E]")
    if edge_type.shape != edge_index.shape[1:]:
        raise ArgumentError(
            f"edge_type has shape {list(edge_type.shape)}; accepted is [{edge_index.shape[1]}], "
            "a type for each edge"
        )
    if edge_type.device != edge_index.device:
        raise ArgumentTypeError(
            f"edge_type is on {edge_type.device}, edge_index on {edge_index.device}; accepted is "
            "one device for both"
        )
    if len(sizes) != 2 or any(not isinstance(n, int) or n < 0 for n in sizes):
        raise ArgumentError(f"num_nodes is {sizes}; accepted are an integer >= 0, or two of them")
    if not isinstance(num_relations, int) or num_relations < 0:
        raise ArgumentError(f"num_relations is {num_relations}; accepted is an integer >= 0")


def check_ranges(ends: Sequence[int], sizes: tuple[int, int, int]) -> None:
    """Raise an error unless all edges are in range.

    Parameters
    ----------
    ends : sequence of int
        Lowest and highest of sources, destinations and relations.
    sizes : tuple of int
        Sources, destinations and relations of the graph.
    """
    what = ("edge_index[0]", "edge_index[1]", "edge_type")
    for name, count, low, high in zip(what, sizes, ends[::2], ends[1::2], strict=True):
        if low < 0 or high >= count:
            wrong = low if low < 0 else high
            raise IndexRangeError(f"{name} has {wrong}; accepted are 0 to {count - 1}")
