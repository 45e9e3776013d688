"""compress_features: the feature columns of a graph of DGL, compressed, in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import dgl
import torch

from bitslab import ArgumentError, ArgumentTypeError, CompressedFeature
from bitslab.integrations.dgl.column import (
    CompressedColumn,
    hot_ids,
    plain_rows,
    put_feature,
    why_raw,
)
from bitslab.tables import FeaturesReport, feature_name

#: A node type, or an edge type as DGL spells it out: (source type, name, destination type).
GraphType = str | tuple[str, str, str]
Names = str | Iterable[str] | Mapping[Any, str | Iterable[str] | None] | None
Scores = torch.Tensor | Callable[[Any, GraphType], torch.Tensor]
Hotness = str | Scores | Mapping[Any, torch.Tensor]


@dataclass(frozen=True, eq=False)
class _ColumnRef:
    """A column of a graph: its frame, and its name in the frame."""

    type: GraphType
    frame: Any
    name: str

    @property
    def column(self) -> Any:
        return self.frame._columns[self.name]

    def __str__(self) -> str:
        kind = "node" if isinstance(self.type, str) else "edge"
        return f"column {self.name!r} of {kind} type {self.type!r}"


def compress_features(
    graph: Any,
    names: Names = None,
    *,
    device: torch.device | str | None = None,
    layout: str = "compact",
    cache_bytes: int = 0,
    cache_ratio: float = 0.0,
    hotness: Hotness = "degree",
    codec: Any = "auto",
    cache_codec: Any = None,
    group: Any = None,
) -> FeaturesReport:
    """Pack feature columns of a graph in host memory; training reads the same bits.

    Parameters
    ----------
    graph : dgl.DGLGraph
        On the CPU; homogeneous or heterogeneous.
    names : str, iterable of str, or mapping, optional
        Which columns. None: all floating-point and complex ones of all node and edge types that are
        not compressed yet and require no gradient; the report lists the columns left alone, and
        why. Names: of any dtype, of every type that has one. A mapping gives the names, or None,
        for a node type, an edge type's name or its triple; a name of a node type and an edge type
        means the node type.
    device : torch.device or str, optional
        Device of the caches, and where rows mostly go. When left out: the current GPU, or the CPU
        where there is none.
    layout : {"compact", "inplace"}
        As in `bitslab.CompressedTable`.
    cache_bytes, cache_ratio : int, float
        A cache of hot rows on `device` for each column: bytes, or a share of the column's bytes.
    hotness : "degree", torch.Tensor, mapping or callable
        How often each row is requested, real numbers ``[N]``; only used for a cache.
        ``"degree"``: see Notes. A tensor: for columns of a single type. A mapping: from types, as
        in `names`, to tensors; other types are ordered by degree. A callable takes the graph
        and a type (a node type's name, or an edge type's triple) and returns a tensor.
    codec, cache_codec, group
        As in `bitslab.CompressedFeature.from_tensor`. ``codec="raw", cache_codec="auto"`` packs the
        rows in the cache only, which is IBP(C) of IBP, section 6.2.

    Returns
    -------
    FeaturesReport
        What was compressed, and what was left alone and why, by type and name, such as
        ``"_N.feat"`` and ``"user:likes:item.weight"``; ``print`` shows a table. When anything fails
        the graph is unchanged.

    Raises
    ------
    ArgumentError
        When the graph is on a GPU or is a block, there is no such column, or a column that is named
        is compressed already or requires a gradient.
    ArgumentTypeError
        When an argument is of another kind.

    Notes
    -----
    Samplers walk against the edges, from seeds to the nodes that point at them. So a node is
    sampled about as often as edges leave it: its score is its out-degree, over all edge types. An
    edge can be sampled when its destination is, in proportion to that node's out-degree, plus one
    for the times when it is a seed. Samplers then draw a fixed number of the node's in-degree edges
    of that type: the score of an edge is (1 + out-degree) / in-degree of its destination.

    ``graph.ndata["feat"]`` returns a tensor whose shape, dtype and length come without decoding, as
    in ``graph.ndata["feat"].shape[1]``; indexed rows are decoded alone. Reading all values, as a
    layer over the full graph, `dgl.save_graphs` and `dgl.batch` do, decodes them once, and the
    feature keeps them; `feature_stats` gives the bytes of that copy, and so does
    a DecodedCopyWarning, once, where they are 1 MiB or more.

    Compressed columns are read-only. Writing to one raises, as DGL's transforms that work in place
    do, `dgl.FeatMask` and `dgl.RowFeatNormalizer`. Writes that torch does not see are not stopped:
    a write of another library through DLPack, as to ``torch.from_dlpack(graph.ndata["feat"])``,
    changes the decoded copy and not the packed rows, so that later reads differ. Instead, transform
    the graph before it is compressed; or make the column plain by ``decompress_features(graph,
    "feat")``, transform it and compress it again. For DLPack, ``graph.ndata["feat"].clone()`` is
    the caller's own.

    Compress before loaders are made: persistent worker processes keep the graph they
    started with.

    Examples
    --------
    >>> import dgl, torch
    >>> from bitslab.integrations.dgl import compress_features
    >>> graph = dgl.rand_graph(100, 500)
    >>> graph.ndata["feat"] = torch.randn(100, 64).round()
    >>> report = compress_features(graph)
    >>> list(report.compressed), report.left
    (['_N.feat'], {})
    >>> sampler = dgl.dataloading.NeighborSampler([5, 5], prefetch_node_feats=["feat"])
    >>> loader = dgl.dataloading.DataLoader(graph, torch.arange(100), sampler, batch_size=50)
    """
    _check_graph(graph)
    if graph.device.type != "cpu":
        raise ArgumentError(
            f"graph: on {graph.device}, accepted is a graph on the CPU; compress its features "
            "before it is moved: their rows are decoded on the GPU as they are needed"
        )
    if isinstance(hotness, str) and hotness != "degree":
        raise ArgumentError(f"hotness: {hotness!r}, the only name accepted is 'degree'")
    chosen = _chosen(graph, names)
    order = _Order(graph, hotness, {ref.type for ref in chosen})
    tensors = {ref: plain_rows(ref.column) for ref in chosen}
    features = {
        ref: CompressedFeature.from_tensor(
            tensor,
            device=device,
            layout=layout,  # type: ignore[arg-type]
            cache_bytes=cache_bytes,
            cache_ratio=cache_ratio,
            hot_ids=lambda ref=ref: order.of(ref.type),  # type: ignore[misc]
            codec=codec,
            cache_codec=cache_codec,
            group=group,
        )
        for ref, tensor in tensors.items()
    }
    report = FeaturesReport()
    taken = {(ref.type, ref.name) for ref in chosen}
    for ref in _column_refs(graph):
        if (ref.type, ref.name) not in taken:
            reason = why_raw(ref.column) or "was not named"
            report.left[feature_name(ref.type, ref.name)] = reason
    for ref, feature in features.items():
        put_feature(ref.column, feature)
        report.compressed[feature_name(ref.type, ref.name)] = feature.stats()
    return report


def decompress_features(graph: Any, names: Names = None) -> Any:
    """Replace compressed columns by plain tensors.

    Parameters
    ----------
    graph : dgl.DGLGraph
        The graph.
    names : str, iterable of str, or mapping, optional
        Which columns, as in `compress_features`; all compressed ones when left out.

    Returns
    -------
    dgl.DGLGraph
        The same graph.

    Raises
    ------
    ArgumentError
        When there is no such column, or one that is named is not compressed.
    """
    _check_graph(graph)
    chosen = [ref for ref, _ in _named(graph, names, _is_compressed)]
    for ref in chosen:
        if not _is_compressed(ref.column):
            raise ArgumentError(f"names: {ref} is not compressed")
    for ref in chosen:
        column = ref.column
        if column._is_full():
            # `data` would return a read-only tensor that belongs to the feature.
            column.data = column.storage.gather(torch.arange(len(column)))
        else:
            _ = column.data
    return graph


def feature_stats(graph: Any) -> dict[GraphType, dict[str, dict[str, Any]]]:
    """Return sizes and traffic of the compressed columns.

    Parameters
    ----------
    graph : dgl.DGLGraph
        The graph.

    Returns
    -------
    dict
        For each node type, and each triple of an edge type, that has compressed columns: from their
        names to `bitslab.CompressedFeature.stats`, such as
        ``feature_stats(graph)["_N"]["feat"]["moved_bytes"]``. Counts are of this process.
    """
    _check_graph(graph)
    stats: dict[GraphType, dict[str, dict[str, Any]]] = {}
    for ref in _column_refs(graph):
        if _is_compressed(ref.column) and ref.column.storage is not None:
            stats.setdefault(ref.type, {})[ref.name] = ref.column.storage.stats()
    return stats


def raw_columns(graph: Any) -> dict[GraphType, dict[str, str]]:
    """Return the columns that are not compressed, and why `compress_features` leaves them alone.

    Parameters
    ----------
    graph : dgl.DGLGraph
        The graph.

    Returns
    -------
    dict
        For each node type, and each triple of an edge type, that has such columns: from their names
        to the reason, which is "" for one that could be compressed.
    """
    _check_graph(graph)
    raw: dict[GraphType, dict[str, str]] = {}
    for ref in _column_refs(graph):
        if not _is_compressed(ref.column):
            raw.setdefault(ref.type, {})[ref.name] = why_raw(ref.column)
    return raw


# Which columns


def _check_graph(graph: Any) -> None:
    if not isinstance(graph, dgl.DGLGraph):
        raise ArgumentTypeError(f"graph: expected a dgl.DGLGraph, got {type(graph).__name__}")
    if graph.is_block:
        raise ArgumentError(
            "graph: is a block, which is one batch of a larger graph; compress the features of the "
            "graph that it was sampled from"
        )


def _is_compressed(column: Any) -> bool:
    return isinstance(column, CompressedColumn)


def _column_refs(graph: Any) -> Iterator[_ColumnRef]:
    types = [*graph.ntypes, *graph.canonical_etypes]
    for type_, frame in zip(types, [*graph._node_frames, *graph._edge_frames], strict=True):
        for name in frame:
            yield _ColumnRef(type_, frame, name)


def _chosen(graph: Any, names: Names) -> list[_ColumnRef]:
    """Return the columns to compress, or refuse a named one that cannot be."""
    chosen = []
    for ref, named in _named(graph, names, lambda column: not why_raw(column)):
        reason = why_raw(ref.column, any_dtype=named)
        if reason:
            raise ArgumentError(f"names: {ref} {reason}")
        chosen.append(ref)
    return chosen


def _named(
    graph: Any, names: Names, unless_named: Callable[[Any], bool]
) -> list[tuple[_ColumnRef, bool]]:
    """Return the columns that `names` selects, and whether each is named."""
    refs = list(_column_refs(graph))
    if isinstance(names, Mapping):
        asked: list[tuple[GraphType | None, Any]] = [
            (_type_of(graph, key, "names"), value) for key, value in names.items()
        ]
    else:
        asked = [(None, names)]
    found: dict[_ColumnRef, bool] = {}
    for type_, wanted in asked:
        here = [ref for ref in refs if type_ in (None, ref.type)]
        if wanted is None:
            for ref in here:
                if unless_named(ref.column):
                    found.setdefault(ref, False)
            continue
        for name in _listed(wanted):
            matching = [ref for ref in here if ref.name == name]
            if not matching:
                there = ", ".join(f"{ref.name!r} of {ref.type!r}" for ref in here) or "none"
                raise ArgumentError(f"names: there is no column {name!r}; there are: {there}")
            found.update(dict.fromkeys(matching, True))
    return list(found.items())


def _listed(names: Any) -> list[str]:
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, Iterable):
        raise ArgumentTypeError(f"names: expected names of columns, got {type(names).__name__}")
    listed = list(listed)
    for name in listed:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"names: expected names of columns, got {name!r:.60}")
    return listed


def _type_of(graph: Any, key: Any, argument: str) -> GraphType:
    """Return the node type or triple that a key names."""
    if key in graph.ntypes:
        return str(key)
    triples: list[GraphType] = [
        triple for triple in graph.canonical_etypes if key in (triple, triple[1])
    ]
    if len(triples) != 1:
        there = [*graph.ntypes, *graph.canonical_etypes]
        what = "stands for several edge types" if triples else "is no node or edge type"
        raise ArgumentError(f"{argument}: {key!r} {what}; there are {there}")
    return triples[0]


# Which rows are hot


class _Order:
    """Ids of each type's rows, the hottest first, computed at the first use."""

    def __init__(self, graph: Any, hotness: Hotness, types: set[GraphType]) -> None:
        if isinstance(hotness, torch.Tensor) and len(types) > 1:
            raise ArgumentError(
                f"hotness: one tensor for columns of {len(types)} types; give a mapping of types "
                f"to tensors: {sorted(map(str, types))}"
            )
        if isinstance(hotness, Mapping):
            hotness = {_type_of(graph, key, "hotness"): value for key, value in hotness.items()}
        elif not isinstance(hotness, (str, torch.Tensor)) and not callable(hotness):
            raise ArgumentTypeError(
                "hotness: expected 'degree', a tensor, a mapping or a callable, got "
                f"{type(hotness).__name__}"
            )
        self._graph = graph
        self._hotness = hotness
        self._found: dict[GraphType, torch.Tensor] = {}

    def of(self, type_: GraphType) -> torch.Tensor:
        if type_ not in self._found:
            graph = self._graph
            is_node = isinstance(type_, str)
            n_rows = graph.num_nodes(type_) if is_node else graph.num_edges(type_)
            self._found[type_] = hot_ids(self._scores(type_), n_rows, f"hotness of {type_!r}")
        return self._found[type_]

    def _scores(self, type_: GraphType) -> Any:
        given = self._hotness
        if isinstance(given, Mapping):
            given = given.get(type_, "degree")
        if isinstance(given, str):
            return degree_scores(self._graph, type_)
        if isinstance(given, torch.Tensor):
            return given
        return given(self._graph, type_)


def degree_scores(graph: Any, type_: GraphType) -> torch.Tensor:
    """Return scores of how often a neighbour sampler reads rows; see `compress_features`, Notes.

    Parameters
    ----------
    graph : dgl.DGLGraph
        The graph.
    type_ : str or tuple of str
        A node type's name, or an edge type's triple.

    Returns
    -------
    torch.Tensor
        Real numbers ``[N]`` for nodes, ``[E]`` for edges.
    """
    if isinstance(type_, str):
        scores = torch.zeros(graph.num_nodes(type_), dtype=torch.int64)
        for triple in graph.canonical_etypes:
            if triple[0] == type_:
                scores += graph.out_degrees(etype=triple)
        return scores
    sampled = 1 + degree_scores(graph, type_[2])
    _, destinations = graph.edges(etype=type_)
    per_node: torch.Tensor = sampled / graph.in_degrees(etype=type_).clamp(min=1)
    return per_node[destinations.long()]


__all__ = [
    "GraphType",
    "compress_features",
    "decompress_features",
    "degree_scores",
    "feature_stats",
    "raw_columns",
]
