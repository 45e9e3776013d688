"""Orders of node and edge rows by how often a loader reads them, for caches of features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch_geometric.data import Data
from torch_geometric.utils import to_edge_index

from bitslab import hotness as orders
from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.integrations.pyg.columns import Column, GraphType, store_of, type_of

#: "degree", scores, scores by type, or a function of a graph and a type that returns scores.
Hotness: TypeAlias = (
    "str | torch.Tensor | Mapping[Any, torch.Tensor] | Callable[[Any, GraphType], torch.Tensor]"
)


def check_hotness(hotness: Any, columns: list[Column]) -> None:
    """Refuse a `hotness` that does not fit these columns."""
    if isinstance(hotness, str) and hotness != "degree":
        raise ArgumentError(f"hotness: {hotness!r}, accepted are 'degree', scores, or a function")
    if not (isinstance(hotness, (str, torch.Tensor, Mapping)) or callable(hotness)):
        raise ArgumentTypeError(
            f"hotness: a {type(hotness).__name__}, expected 'degree', a tensor of scores, a "
            "mapping from types to such tensors, or a function"
        )
    types = list(dict.fromkeys(column.type for column in columns))
    if isinstance(hotness, torch.Tensor) and len(types) > 1:
        raise ArgumentError(
            f"hotness: one tensor for rows of {types}; give a mapping from these to tensors"
        )


def hot_ids(data: Any, column: Column, hotness: Any) -> torch.Tensor:
    """Order the rows of a column, the hottest first.

    Parameters
    ----------
    data : Data or HeteroData
        The graph.
    column : Column
        A column of nodes or edges.
    hotness : str, torch.Tensor, mapping or function
        As in `compress_features`.

    Returns
    -------
    torch.Tensor
        int64 ``[N]`` on the CPU.

    Raises
    ------
    ArgumentError
        When there is not one score for each row, or the graph has no edges to count.
    """
    if isinstance(hotness, Mapping):
        hotness = hotness.get(column.type, "degree")
    if isinstance(hotness, str):
        scores = _degrees(data, column)
    elif isinstance(hotness, torch.Tensor):
        scores = hotness
    else:
        scores = hotness(data, column.type)
    order = orders.by_scores(scores)
    if len(order) != len(column.value):
        raise ArgumentError(
            f"hotness: {len(order)} scores for {len(column.value)} rows of {column}"
        )
    return order


def _degrees(data: Any, column: Column) -> torch.Tensor:
    """Return scores of how often a neighbour sampler reads each row.

    A sampler walks from a node to the sources of its incoming edges. So a node is sampled as often
    as it is a source: its score is its out-degree. An edge can be sampled when its target is, as a
    source or as a seed, and a fixed number of the target's incoming edges is drawn: its score is
    (1 + out-degree) / in-degree of the target, the in-degree over edges of this type.
    """
    if not column.of_edges:
        return _out_degrees(data, column.type, len(column.value))
    _, targets = _edges(column.store)
    type_ = "nodes" if isinstance(data, Data) else column.type[-1]
    n_targets = data.num_nodes if isinstance(data, Data) else data[type_].num_nodes
    sampled = 1 + _out_degrees(data, type_, n_targets)
    return (sampled / torch.bincount(targets, minlength=n_targets).clamp(min=1))[targets]


def _out_degrees(data: Any, type_: GraphType, n_nodes: int) -> torch.Tensor:
    stores = [store_of(data)] if isinstance(data, Data) else data.edge_stores
    counts = torch.zeros(n_nodes, dtype=torch.int64)
    for store in stores:
        if type_of(store) is None or type_of(store)[0] == type_:
            sources, _ = _edges(store)
            counts += torch.bincount(sources, minlength=n_nodes)
    return counts


def _edges(store: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sources and targets of the edges, int64 ``[E]`` each, on the CPU."""
    if "edge_index" in store:
        sources, targets = store["edge_index"]
    elif "adj_t" in store:
        (targets, sources), _ = to_edge_index(store["adj_t"])
    else:
        raise ArgumentError("hotness: 'degree' needs edges, in edge_index or adj_t")
    return sources.cpu(), targets.cpu()
