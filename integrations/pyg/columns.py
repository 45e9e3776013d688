"""The node and edge tensors of `Data` and `HeteroData`, and their selection by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData

from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.tables import feature_name
from bitslab.tensors import FeatureTensor

#: A node type or an edge type of a HeteroData; for a Data, "nodes" or "edges".
GraphType: TypeAlias = "str | tuple[str, str, str]"
#: Names of columns, as arguments.
Names: TypeAlias = "str | Iterable[str] | Mapping[Any, Any] | None"


@dataclass(frozen=True, eq=False)
class Column:
    """A tensor with one row for each node or edge.

    Parameters
    ----------
    store : torch_geometric.data.storage.BaseStorage
        The store that holds it.
    type : str or tuple of str
        A node type, an edge type, or for a Data "nodes" or "edges".
    name : str
        Its name in the store, such as "x".
    """

    store: Any
    type: GraphType
    name: str

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Column):
            return NotImplemented
        return self.store is other.store and self.name == other.name

    def __hash__(self) -> int:
        return hash((id(self.store), self.name))

    @property
    def value(self) -> Any:
        """The current value in the store."""
        return self.store[self.name]

    @property
    def full_name(self) -> str:
        """Name in reports."""
        return feature_name(None if type_of(self.store) is None else self.type, self.name)

    @property
    def of_edges(self) -> bool:
        """Whether there is a row for each edge."""
        return not isinstance(self.type, str) or (
            self.type == "edges" and type_of(self.store) is None
        )

    def __str__(self) -> str:
        """Return the name for error messages."""
        return repr(self.name) if type_of(self.store) is None else f"{self.name!r} of {self.type!r}"


def check_data(data: Any) -> None:
    """Refuse what is neither Data nor HeteroData."""
    if not isinstance(data, (Data, HeteroData)):
        raise ArgumentTypeError(
            "data: expected a torch_geometric.data.Data or HeteroData, got "
            f"{type(data).__module__}.{type(data).__name__}"
        )


def type_of(store: Any) -> Any:
    """Return the node or edge type of a store of `HeteroData`; None for the store of `Data`."""
    return store._key


def store_of(data: Data) -> Any:
    """Return the one store of `Data`."""
    return data._store


def stores_of(data: Any) -> list[Any]:
    """Return the stores that can hold node or edge tensors."""
    return [store_of(data)] if isinstance(data, Data) else [*data.node_stores, *data.edge_stores]


def columns_of(data: Any) -> Iterator[Column]:
    """Yield every tensor of a graph that has one row for each node or edge."""
    for store in stores_of(data):
        yield from _columns_in(data, store)


def _columns_in(data: Any, store: Any) -> Iterator[Column]:
    for name in list(store.keys()):
        if not obstacle(data, store, name):
            yield _column(store, name)


def other_columns(data: Any) -> Iterator[tuple[Column, str]]:
    """Yield attributes with a row for each node or edge that are no dense tensor, and why.

    Such as NumPy arrays, memory-mapped ones too, and sparse tensors, but not the edges
    themselves.
    """
    for store in stores_of(data):
        for name in list(store.keys()):
            reason = obstacle(data, store, name)
            if not reason or isinstance(store[name], (list, tuple)):
                continue
            if isinstance(store[name], torch.Tensor) and store[name].layout is torch.strided:
                continue
            # For sparse adjacencies it is a pair.
            if not isinstance(data.__cat_dim__(name, store[name], store), int):
                continue
            if store.is_node_attr(name) or store.is_edge_attr(name):
                yield _column(store, name), reason


def _column(store: Any, name: str) -> Column:
    if type_of(store) is not None:
        return Column(store, type_of(store), name)
    return Column(store, "nodes" if store.is_node_attr(name) else "edges", name)


def obstacle(data: Any, store: Any, name: str) -> str:
    """Return why an attribute is not a column of rows, or "" for a column."""
    value = store[name]
    if isinstance(value, np.ndarray):
        return (
            f"is a NumPy {type(value).__name__}, expected a torch.Tensor; torch.from_numpy makes "
            "one of it without a copy"
        )
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}, expected a torch.Tensor"
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        return "is no dense tensor"
    if value.dim() == 0 or data.__cat_dim__(name, value, store) != 0:
        return "does not have its nodes or edges in the first dimension"
    if not (store.is_node_attr(name) or store.is_edge_attr(name)):
        return f"has shape {list(value.shape)}, which is not one row for each node or edge"
    return ""


def chosen_columns(data: Any, names: Names) -> list[tuple[Column, bool]]:
    """Return columns, each once, and whether it was named.

    Parameters
    ----------
    data : Data or HeteroData
        The graph.
    names : str, iterable of str, mapping or None
        Names; in a HeteroData they select from every node and edge type that has them. A mapping
        gives names for some of the types: ``{"paper": "x", ("a", "to", "b"): ["edge_attr"]}``.
        None, here or for a type: all of them.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When a name or type is unknown, or names anything but rows of nodes or edges.
    """
    found: dict[Column, bool] = {}
    if isinstance(names, Mapping):
        for key, some in names.items():
            found |= _named(data, [_store_of_type(data, key)], some)
    else:
        found = _named(data, stores_of(data), names)
    return list(found.items())


def _store_of_type(data: Any, key: Any) -> Any:
    types = [] if isinstance(data, Data) else [*data.node_types, *data.edge_types]
    if key in types:
        return data[key]
    if not types:
        raise ArgumentError(
            f"names: a mapping with {key!r:.60}, but a Data has no types; give names alone"
        )
    raise ArgumentError(f"names: no type {key!r}, there are {types}")


def _named(data: Any, stores: list[Any], names: Any) -> dict[Column, bool]:
    if names is None:
        return {c: False for store in stores for c in _columns_in(data, store)}
    wanted = [names] if isinstance(names, str) else names
    wanted = list(wanted) if isinstance(wanted, Iterable) else [wanted]
    if not all(isinstance(name, str) for name in wanted):
        raise ArgumentTypeError(f"names: {names!r:.100}, expected names of tensors")
    found = {}
    for name in wanted:
        having = [store for store in stores if name in store]
        if not having:
            there = sorted({key for store in stores for key in store.keys()})
            raise ArgumentError(f"names: {name!r} is not there; there are {there}")
        for store in having:
            reason = obstacle(data, store, name)
            if reason:
                raise ArgumentError(f"names: {name!r} {reason}")
            found[_column(store, name)] = True
    return found


def is_compressed(column: Column) -> bool:
    """Return whether a column is a `FeatureTensor`."""
    return isinstance(column.value, FeatureTensor)
