"""compress_features: replaces tensors in `Data` and `HeteroData` by compressed features."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from bitslab import CompressedFeature, RowCodec
from bitslab.errors import ArgumentError
from bitslab.integrations.pyg.columns import (
    Column,
    Names,
    check_data,
    chosen_columns,
    columns_of,
    is_compressed,
    other_columns,
    type_of,
)
from bitslab.integrations.pyg.hotness import Hotness, check_hotness, hot_ids
from bitslab.tables import FeaturesReport, Layout
from bitslab.tensors import FeatureTensor

Graph = TypeVar("Graph")


def compress_features(
    data: Any,
    names: Names = None,
    *,
    device: torch.device | str | None = None,
    layout: Layout = "compact",
    cache_bytes: int = 0,
    cache_ratio: float = 0.0,
    hotness: Hotness = "degree",
    codec: str | RowCodec = "auto",
    cache_codec: str | RowCodec | None = None,
    group: Any = None,
) -> FeaturesReport:
    """Replace the node and edge tensors of a graph by compressed features.

    Loaders, transforms and models need no change: a batch gets plain tensors with the same bits.
    ``copy.copy(data)`` shares the compressed features, ``copy.deepcopy(data)`` copies them in
    compressed form; ``data.clone()``, ``data.to(device)`` on a GPU, and files hold plain tensors.

    Parameters
    ----------
    data : torch_geometric.data.Data or HeteroData
        The graph, which is changed.
    names : str, list of str, or dict, optional
        What to compress, such as ``"x"`` or ``["x", "edge_attr"]``; in a HeteroData in every type
        that has it, or ``{"paper": "x", ("a", "to", "b"): ["edge_attr"]}``. When left out: every
        floating-point or complex tensor with one row for each node or edge that is not compressed
        yet and requires no gradient. Integers, such as labels, and masks must be named. Arrays of
        NumPy are left alone; `torch.from_numpy` makes tensors of them, memory-mapped ones too.
    device : torch.device or str, optional
        Device of the cache, and where rows mostly go. The current GPU, or the CPU where there is
        none, when left out.
    layout : {"compact", "inplace"}
        How rows are stored in host memory; see `bitslab.CompressedTable`.
    cache_bytes, cache_ratio
        Size of a cache of hot rows in the memory of `device`, for each tensor: in bytes, or as a
        share of the tensor's bytes (IBP, section 5). None by default.
    hotness : "degree", torch.Tensor, mapping or function
        Order of the rows for the cache. ``"degree"``: nodes that are a source of many edges, and
        edges that point to such nodes where these have a low in-degree. A tensor: a score for each
        row, of one type. A mapping: tensors by node type and edge type, of a Data by "nodes" and
        "edges"; other types are ordered by degree. A function: takes the graph and the type, and
        returns a tensor.
    codec, cache_codec : str or RowCodec
        As in `bitslab.CompressedFeature.from_tensor`. ``codec="raw", cache_codec="auto"`` packs the
        rows in the cache alone.
    group : torch.distributed.ProcessGroup, optional
        Ranks that all make this call; those on one machine share one copy in host memory.

    Returns
    -------
    FeaturesReport
        What was compressed, and what was left alone and why, by name, in a HeteroData by type and
        name, such as ``"paper.x"`` and ``"author:writes:paper.weight"``; ``print`` shows a table.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When an argument is not accepted, a name is unknown, or what it names is compressed already,
        requires a gradient, or has no rows of nodes or edges. The graph is unchanged then.

    See Also
    --------
    bitslab.tensors.feature_tensor.FeatureTensor : Replaces the tensors.
    decompress_features : The reverse.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> from bitslab.integrations.pyg import compress_features
    >>> x = torch.randn(100, 16).round()
    >>> data = Data(x=x, edge_index=torch.randint(100, (2, 500)))
    >>> report = compress_features(data)
    >>> list(report.compressed), report.left
    (['x'], {})
    >>> torch.equal(data.x[[7, 3]], x[[7, 3]])
    True
    """
    check_data(data)
    columns = []
    for column, named in chosen_columns(data, names):
        reason = why_raw(column, any_dtype=named)
        if not reason:
            columns.append(column)
        elif named:
            raise ArgumentError(f"names: {column} {reason}")
    check_hotness(hotness, columns)
    made: list[tuple[Column, FeatureTensor]] = []
    try:
        for column in columns:

            def order(column: Column = column) -> torch.Tensor:
                return hot_ids(data, column, hotness)

            feature = CompressedFeature.from_tensor(
                column.value,
                codec=codec,
                layout=layout,
                device=device,
                cache_bytes=cache_bytes,
                cache_ratio=cache_ratio,
                cache_codec=cache_codec,
                hot_ids=order,
                group=group,
            )
            made.append((column, FeatureTensor(feature)))
    except BaseException:
        for _, t in made:
            t.feature.table.close()
        raise
    report = FeaturesReport(left=_left_alone(data, columns))
    for column, t in made:
        column.store[column.name] = t
        report.compressed[column.full_name] = t.feature.stats()
    return report


def _left_alone(data: Any, chosen: list[Column]) -> dict[str, str]:
    """Return why the other columns are left alone, by name."""
    left = {c.full_name: why_raw(c) or "was not named" for c in columns_of(data) if c not in chosen}
    return left | {column.full_name: reason for column, reason in other_columns(data)}


def why_raw(column: Column, any_dtype: bool = False) -> str:
    """Return why a column is not compressed; "" when it can be."""
    value = column.value
    if is_compressed(column):
        return "is compressed already"
    if value.requires_grad:
        return "requires a gradient, which packed rows cannot take; detach it first"
    if not (any_dtype or value.is_floating_point() or value.is_complex()):
        return f"holds {value.dtype}, which is compressed only when it is named"
    return ""


def decompress_features(data: Graph, names: Names = None) -> Graph:
    """Replace compressed features by plain tensors.

    Parameters
    ----------
    data : torch_geometric.data.Data or HeteroData
        The graph, which is changed.
    names : str, list of str, or dict, optional
        As in `compress_features`; all compressed features when left out.

    Returns
    -------
    Data or HeteroData
        The same object. Copies of it that share its features keep theirs.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When a name is unknown or names a tensor that is not compressed; the graph is unchanged
        then.
    """
    check_data(data)
    columns = compressed_columns(data, names)
    plain = [(column, column.value.clone()) for column in columns]
    for column, tensor in plain:
        column.store[column.name] = tensor
    return data


def compressed_columns(data: Any, names: Names = None) -> list[Column]:
    """Return the columns that are compressed: all, or the named ones."""
    columns = []
    for column, named in chosen_columns(data, names):
        if is_compressed(column):
            columns.append(column)
        elif named:
            raise ArgumentError(f"names: {column} is not compressed")
    return columns


def feature_stats(data: Any) -> dict[Any, Any]:
    """Return sizes and traffic of the compressed features of a graph, in this process.

    Parameters
    ----------
    data : torch_geometric.data.Data or HeteroData
        The graph.

    Returns
    -------
    dict
        The dicts of `bitslab.CompressedFeature.stats`: for a Data by name, for a HeteroData by type
        and then by name.
    """
    check_data(data)
    return _by_type((c, c.value.feature.stats()) for c in columns_of(data) if is_compressed(c))


def raw_columns(data: Any) -> dict[Any, Any]:
    """Return the tensors and arrays of nodes or edges that are not compressed, and why not.

    Parameters
    ----------
    data : torch_geometric.data.Data or HeteroData
        The graph.

    Returns
    -------
    dict
        Why `compress_features` without names leaves them alone, "" if it does not: for a Data by
        name, for a HeteroData by type and then by name.
    """
    check_data(data)
    raw = [(column, why_raw(column)) for column in columns_of(data) if not is_compressed(column)]
    return _by_type([*raw, *other_columns(data)])


def _by_type(values: Iterable[tuple[Column, Any]]) -> dict[Any, Any]:
    """Return values by name or, where there are types, by type and name."""
    found: dict[Any, Any] = {}
    for column, value in values:
        flat = type_of(column.store) is None
        (found if flat else found.setdefault(column.type, {}))[column.name] = value
    return found
