"""Which rows of nodes and edges a loader asks for most, for caches of their features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch_geometric.data import Data
from torch_geometric.utils import to_edge_index

from bitslab import hotness as orders
from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.integrations.pyg.columns import Column, Place

#: "degree", scores, scores by place, or what returns scores for a graph and a place.
Hotness: TypeAlias = (
    "str | torch.Tensor | Mapping[Any, torch.Tensor] | Callable[[Any, Place], torch.Tensor]"
)


def check_hotness(hotness: Any, columns: list[Column]) -> None:
    """Refuse what says nothing about the hotness of these columns' rows."""
    if isinstance(hotness, str) and hotness != "degree":
        raise ArgumentError(f"hotness: {hotness!r}, accepted are 'degree', scores, or a function")
    if not (isinstance(hotness, (str, torch.Tensor, Mapping)) or callable(hotness)):
        raise ArgumentTypeError(
            f"hotness: a {type(hotness).__name__}, expected 'degree', a tensor of scores, a "
            "mapping from types to such tensors, or a function"
        )
    places = list(dict.fromkeys(column.place for column in columns))
    if isinstance(hotness, torch.Tensor) and len(places) > 1:
        raise ArgumentError(
            f"hotness: one tensor for rows of {places}; give a mapping from these to tensors"
        )


def hot_ids(data: Any, column: Column, hotness: Any) -> torch.Tensor:
    """Order the rows of a column, the hottest first.

    Parameters
    ----------
    data : Data or HeteroData
        The graph.
    column : Column
        Of nodes or edges.
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
        hotness = hotness.get(column.place, "degree")
    if isinstance(hotness, str):
        scores = _degrees(data, column)
    elif isinstance(hotness, torch.Tensor):
        scores = hotness
    else:
        scores = hotness(data, column.place)
    order = orders.by_scores(scores)
    if len(order) != len(column.value):
        raise ArgumentError(
            f"hotness: {len(order)} scores for {len(column.value)} rows of {column}"
        )
    return order


def _degrees(data: Any, column: Column) -> torch.Tensor:
    """Score the rows by how often a sampler meets them that draws neighbours.

    It walks from a node to the sources of the edges that lead to it. So a node is met as often as
    it is a source. An edge can be drawn when its target is met, as a source or as a seed, and is
    one of those that lead there, of which a fixed number is drawn: (1 + times the target is a
    source) / edges of this type that lead to the target.
    """
    if not column.of_edges:
        return _times_source(data, column.place, len(column.value))
    _, targets = _edges(column.store)
    place = "nodes" if isinstance(data, Data) else column.place[-1]
    n_targets = data.num_nodes if isinstance(data, Data) else data[place].num_nodes
    met = 1 + _times_source(data, place, n_targets)
    return (met / torch.bincount(targets, minlength=n_targets).clamp(min=1))[targets]


def _times_source(data: Any, place: Place, n_nodes: int) -> torch.Tensor:
    stores = [data._store] if isinstance(data, Data) else data.edge_stores
    counts = torch.zeros(n_nodes, dtype=torch.int64)
    for store in stores:
        if store._key is None or store._key[0] == place:
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
