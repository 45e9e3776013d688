"""Rows of the spaces that values stand on, and sparse matrices between two of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..engine.kernels.cpu import segment_sums
from ..engine.kernels.cpu.typed_products import BLOCK_ROWS
from ..engine.kernels.edge_survey import EdgeSurvey
from ..engine.kernels.uploads import Uploads
from .plan_memory import planning

#: What stands for the node of a row that belongs to no pair.
NO_NODE = -1
#: From so many relations on, products of few rows are one batch of padded products, if padding at
#: most doubles the rows: calls cost more than products then. On a GPU it is one kernel.
BATCH_RELATIONS = 8


def length_of_batch(counts: Sequence[int]) -> int | None:
    """Return the rows that each relation is padded to for a batch, None where it is not worth it.

    Parameters
    ----------
    counts : sequence of int
        Rows of each relation.
    """
    n, length = sum(counts), max(counts, default=0)
    few = len(counts) < BATCH_RELATIONS or not 0 < n <= BLOCK_ROWS
    return None if few or len(counts) * length > 2 * n else length


#: Three arrays of the entries of a sparse matrix.
Entries = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Rows:
    """The rows of a space.

    Attributes
    ----------
    n : int
        How many.
    of_edge : torch.Tensor
        int64 ``[E]``: the row of each edge, edges in the order of their destinations.
    node : torch.Tensor or None
        int64 ``[n]``: the node of each row of pairs, or NO_NODE; the edge of each typed edge.
    relation : torch.Tensor or None
        int64 ``[n]``: the relation of each row, where rows are sorted by relation.
    bounds : list of int or None
        The first row of each relation, and n, on the host.
    ordered : tuple of torch.Tensor, optional
        `in_order`, where it is known.
    """

    n: int
    of_edge: torch.Tensor
    node: torch.Tensor | None = None
    relation: torch.Tensor | None = None
    bounds: list[int] | None = None
    ordered: tuple[torch.Tensor, torch.Tensor] | None = None

    @functools.cached_property
    def in_order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The edges row by row, int64 ``[E]``, and where each row begins, int64 ``[n + 1]``."""
        return sort(self.of_edge, self.n) if self.ordered is None else self.ordered


def rows_of_survey(found: EdgeSurvey, n_src: int) -> dict[str, Rows]:
    """Return the rows of the spaces that a survey has found, of nodes without types.

    Parameters
    ----------
    found : EdgeSurvey
        The survey.
    n_src : int
        Source nodes.
    """
    n = len(found.numbers)
    rows = {
        "src": Rows(n_src, found.src),
        "dst": Rows(len(found.starts) - 1, found.dst, ordered=(found.numbers, found.starts)),
        "edge": Rows(n, found.numbers),
        "relation": Rows(len(found.bounds) - 1, found.kind),
        "typed_edge": Rows(n, found.place, found.by_kind, found.kind_of, found.bounds),
    }
    for name, pairs in zip(("pair_src", "pair_dst"), found.pairs, strict=True):
        of_pairs = (pairs.of_edge, pairs.node, pairs.kind, pairs.bounds)
        rows[name] = Rows(len(pairs.node), *of_pairs, ordered=(pairs.order, pairs.starts))
    return rows


def tiles_of_survey(found: EdgeSurvey, space: str) -> torch.Tensor | None:
    """Return tiles over the rows of a space, and more behind them; None where there are none."""
    spaces = ("typed_edge", "pair_src", "pair_dst")
    return found.tiles[spaces.index(space)] if found.tiles is not None and space in spaces else None


class HostTables:
    """Tables of a graph of the CPU on a device: each is uploaded when it is asked for first.

    Parameters
    ----------
    uploads : Uploads
        Of the device.
    """

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        #: By number of the object: a table of the CPU, and the one on the device.
        self._there: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        #: What most tables are parts of, and its address.
        self._block, self._block_at = torch.empty(0, dtype=torch.int64, device="cpu"), 0
        self._block_there: torch.Tensor | None = None

    def share(self, block: torch.Tensor, there: torch.Tensor | None = None) -> None:
        """Upload tables that are part of a block of int64 with all of it, unless it is there."""
        self._block, self._block_at, self._block_there = block, block.data_ptr(), there

    def on_device(self, table: torch.Tensor) -> torch.Tensor:
        """Return a table of the CPU on the device."""
        with self._uploads:  # another thread's may not be copied yet
            found = self._there.get(id(table))
            if found is None:
                with planning():
                    found = self._there[id(table)] = table, self._made(table)
            return found[1]

    def _made(self, table: torch.Tensor) -> torch.Tensor:
        offset = table.data_ptr() - self._block_at
        inside = 0 <= offset < self._block.nbytes and table.ndim == 1 and len(table)
        if not inside or table.dtype is not torch.int64:
            return self._uploads.of([table])[0]
        if self._block_there is None:
            (self._block_there,) = self._uploads.of([self._block])
        return self._block_there.narrow(0, offset // 8, len(table))

    def clear(self) -> None:
        """Upload again what is asked for from now on."""
        self._there.clear()
        self._block_there = None


class UploadedRows:
    """Rows of the CPU on a device: what is asked for is uploaded.

    Parameters
    ----------
    rows : Rows
        The rows.
    tables : HostTables
        Of the device where they are wanted.

    Attributes
    ----------
    n, bounds
        As those of `Rows`.
    """

    def __init__(self, rows: Rows, tables: HostTables) -> None:
        self.n, self.bounds = rows.n, rows.bounds
        self._rows, self._tables = rows, tables

    @property
    def of_edge(self) -> torch.Tensor:
        """int64 ``[E]``: the row of each edge, edges in the order of their destinations."""
        return self._tables.on_device(self._rows.of_edge)

    @property
    def node(self) -> torch.Tensor | None:
        """`Rows.node`, on the device."""
        node = self._rows.node
        return None if node is None else self._tables.on_device(node)

    @property
    def relation(self) -> torch.Tensor | None:
        """`Rows.relation`, on the device."""
        relation = self._rows.relation
        return None if relation is None else self._tables.on_device(relation)


class Hop:
    """A sparse matrix between two spaces; some of its entries carry the weight of an edge.

    Parameters
    ----------
    to, source : torch.Tensor
        int64 ``[entries]``: row and column of each entry.
    edge : torch.Tensor
        int64 ``[entries]``: the edge whose weight the entry has; -1: it weighs 1.
    to_rows, source_rows, n_edges : int
        Rows of both spaces, and edges of the graph.
    has_all_edges : bool
        Whether each edge is an entry.
    """

    def __init__(
        self,
        to: torch.Tensor,
        source: torch.Tensor,
        edge: torch.Tensor,
        to_rows: int,
        source_rows: int,
        n_edges: int,
        has_all_edges: bool = False,
    ) -> None:
        self._entries = (to, source, edge)
        self.to_rows, self.source_rows, self.n_edges = to_rows, source_rows, n_edges
        self._by_row: dict[bool, Entries] = {}
        self.has_all_edges = has_all_edges

    def entries(self) -> Entries:
        """Return row, column and edge of each entry, three times int64 ``[entries]``."""
        return self._entries

    def by_row(self, transposed: bool) -> Entries:
        """Return starts, columns and edges of the entries row by row, of the transposed or not."""
        found = self._by_row.get(transposed)
        if found is None:
            with planning():
                found = self._by_row[transposed] = self._sorted(transposed)
        return found

    def _sorted(self, transposed: bool) -> Entries:
        to, source, edge = self._entries
        rows, columns = (source, to) if transposed else (to, source)
        order, starts = sort(rows, self.source_rows if transposed else self.to_rows)
        return starts, columns[order], edge[order]


class EdgeHop(Hop):
    """A matrix whose entries are the edges, each with its own weight.

    Parameters
    ----------
    to, source : Rows
        Of both spaces.
    edges : torch.Tensor
        int64 ``[E]``: the numbers of the edges.
    """

    def __init__(self, to: Rows, source: Rows, edges: torch.Tensor) -> None:
        super().__init__(to.of_edge, source.of_edge, edges, to.n, source.n, len(edges), True)
        self._to, self._source, self._edges = to, source, edges

    def _sorted(self, transposed: bool) -> Entries:
        rows, columns = (self._source, self._to) if transposed else (self._to, self._source)
        order, starts = rows.in_order
        if order is self._edges:
            return starts, columns.of_edge, order
        own = columns.of_edge is self._edges
        return starts, order if own else columns.of_edge[order], order


class GatherHop(Hop):
    """A matrix with an entry of weight 1 for each row, in order: what it takes its value from.

    Parameters
    ----------
    index : torch.Tensor
        int64 ``[n]``: the column of each row, or NO_NODE.
    source_rows, n_edges : int
        As of `Hop`.
    """

    def __init__(self, index: torch.Tensor, source_rows: int, n_edges: int) -> None:
        n = len(index)
        self._starts = torch.arange(n + 1, device=index.device)
        ones = torch.full_like(index, -1)
        super().__init__(self._starts[:n], index, ones, n, source_rows, n_edges)

    def _sorted(self, transposed: bool) -> Entries:
        _, index, ones = self._entries
        if not transposed:
            return self._starts, index, ones
        order, starts = sort(index, self.source_rows)
        return starts, order, ones


class UploadedHop(Hop):
    """A matrix of the CPU on a device: what is asked for is uploaded.

    Parameters
    ----------
    hop : Hop
        The matrix.
    tables : HostTables
        Of the device where its entries are wanted.
    """

    def __init__(self, hop: Hop, tables: HostTables) -> None:
        sizes = (hop.to_rows, hop.source_rows, hop.n_edges)
        super().__init__(*hop.entries(), *sizes, has_all_edges=hop.has_all_edges)
        self._hop, self._tables = hop, tables

    def entries(self) -> Entries:
        """Return row, column and edge of each entry, on the device."""
        return self._on_device(self._hop.entries())

    def by_row(self, transposed: bool) -> Entries:
        """Return starts, columns and edges of the entries row by row, on the device."""
        return self._on_device(self._hop.by_row(transposed))

    def _on_device(self, entries: Entries) -> Entries:
        first, second, third = map(self._tables.on_device, entries)
        return first, second, third


def sort(
    keys: torch.Tensor, n_keys: int, before: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stable order of int64 keys and the start of each, on their device.

    With an order `before`, equal keys are left in that order.
    """
    if keys.device.type == "cpu":
        return segment_sums.order_by_key(keys, n_keys, before)
    found, order = torch.sort(keys if before is None else keys[before], stable=True)
    starts = torch.searchsorted(found, torch.arange(n_keys + 1, device=keys.device))
    return order if before is None else before[order], starts


def number_pairs(
    kinds: torch.Tensor, nodes: torch.Tensor, order: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give numbers to the distinct pairs of edges that `order` sorts by kind, then node.

    Returns
    -------
    of_edge, node, kind, bounds : torch.Tensor
        int64: the pair of each edge; node and kind of each pair, undefined behind the last one; the
        first pair of each kind, and the end. Nothing waits for the device.
    """
    by_kind, ends = kinds[order], nodes[order]
    first = torch.ones_like(by_kind)
    first[1:] = (by_kind[1:] != by_kind[:-1]) | (ends[1:] != ends[:-1])
    up_to = first.cumsum(0)
    of_edge, node, kind = (torch.empty_like(order) for _ in range(3))
    of_edge[order] = up_to - 1
    # Edges of a pair write the same.
    node.scatter_(0, up_to - 1, ends)
    kind.scatter_(0, up_to - 1, by_kind)
    return of_edge, node, kind, torch.nn.functional.pad(up_to, (1, 0))[starts]
