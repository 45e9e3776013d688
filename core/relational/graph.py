"""A graph whose edges have types, and what is found out about it once: the plan.

Edges are kept in the order of their destinations (``order``), in which all edgewise values stand
while a program runs. A *space* is a set of rows that values can stand on:

| space | rows |
|---|---|
| `src`, `dst` | the source nodes, the destination nodes |
| `edge` | the edges |
| `relation` | the relations |
| `src_type`, `dst_type` | the types of sources, of destinations, of a graph with node types |
| `pair_src`, `pair_dst` | the distinct (source, relation) or (destination, relation) pairs |
| `typed_edge` | the edges by relation |
| `mixed:0110` | by relation: pairs of destinations where the digit is 1, else pairs of sources |
| `padded:0110` | the same, with rows in one number for each relation where that makes a batch |

Pairs and typed edges are sorted by relation, so that a relation's rows are a slice.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..engine.kernels.cpu import segment_sums
from ..engine.kernels.edge_survey import EdgeSurvey
from ..engine.kernels.uploads import Uploads
from ..errors import ArgumentError, ArgumentTypeError, ModifiedInPlaceError
from .edge_checks import check_edges, check_ranges
from .gpu_kernels import gpu_kernels
from .kept_by_tensors import versions_of
from .node_types import TYPE_SPACES, NodeTypes
from .plan_memory import planning
from .rows import (
    NO_NODE,
    EdgeHop,
    GatherHop,
    Hop,
    HostTables,
    Rows,
    UploadedHop,
    UploadedRows,
    length_of_batch,
    number_pairs,
    rows_of_survey,
    sort,
)
from .stream_order import StreamOrder

T = TypeVar("T")


#: Up to so many edges and nodes together the plan of a GPU's graph is not made by torch's operators
#: there: a plan of an H200 took 6 to 10 ms of the host's with 2,776 edges, one of the host 150 to
#: 180 ns for each edge of mag-0.1. A kernel surveys the edges where they are; what it does not find
#: is made on the host, and uploaded.
HOST_ROWS = 1 << 15


def planned_on_host(device: torch.device, n_edges: int, n_nodes: int) -> bool:
    """Return whether the host makes what of a GPU's graph no kernel finds."""
    return device.type != "cpu" and n_edges > 0 and n_edges + n_nodes <= HOST_ROWS


def read_at_once(device: torch.device) -> bool:
    """Return whether a graph finds all sizes of its plan when it is made, with one host read."""
    return device.type != "cpu"


class RelationalGraph:
    """The edges of a graph with their types, and the plan that programs use.

    Parameters
    ----------
    edge_index : torch.Tensor
        Integer ``[2, E]``: source and destination of each edge.
    edge_type : torch.Tensor
        Integer ``[E]``, on the same device: the relation of each edge.
    num_nodes : int or tuple of int
        Nodes, or source nodes and destination nodes of a bipartite graph.
    num_relations : int
        Relations; those without edges count.
    node_types : NodeTypes, optional
        Types of nodes, which programs may read by `src_type` and `dst_type`.

    Raises
    ------
    ArgumentTypeError
        For a tensor that is not an integer one, or on another device.
    ArgumentError
        For a wrong shape or length, and for an edge whose nodes have other types than its relation.
    IndexRangeError
        For a node or a relation out of range. On a GPU this is read with the sizes of the plan,
        when the graph is made. The host waits for the GPU then; for a small graph once more, where
        a program takes one side of edges for some relations and the other for others.
    PlanMemoryError
        When memory runs out, here or by a program that needs more of the plan.
    ModifiedInPlaceError
        By a program that runs after one of the tensors was changed in place.

    Notes
    -----
    The tensors are held, not copied. Several threads may use a graph at once.
    """

    def __init__(
        self,
        edge_index: torch.Tensor,
        edge_type: torch.Tensor,
        num_nodes: int | tuple[int, int],
        num_relations: int,
        node_types: NodeTypes | None = None,
    ) -> None:
        sizes = (num_nodes, num_nodes) if isinstance(num_nodes, int) else tuple(num_nodes)
        check_edges(edge_index, edge_type, sizes, num_relations)
        if node_types is not None:
            if not isinstance(node_types, NodeTypes):
                raise ArgumentTypeError(
                    f"node_types: expected NodeTypes or None, got {type(node_types).__name__}"
                )
            node_types.check(sizes, num_relations)
        self.node_types = node_types
        self.edge_index, self.edge_type = edge_index, edge_type
        self.num_src, self.num_dst = sizes
        self.num_relations = num_relations
        self._sizes = (self.num_src, self.num_dst, num_relations)
        self._versions = versions_of(edge_index, edge_type)
        self._lock, self.streams = threading.RLock(), StreamOrder(edge_type.device)
        self._made: dict[Any, Any] = {}
        #: Of a small graph most tables, on its device; the rest is made on the host for a GPU.
        self.survey: EdgeSurvey | None = None
        self._surveyed: dict[str, Rows] = {}
        self._by_host = planned_on_host(edge_type.device, len(edge_type), sum(sizes))
        self._host: RelationalGraph | None = None
        #: Copies what is made on the host to the device of the graph.
        self.uploads = Uploads(edge_type.device)
        self._tables = HostTables(self.uploads)
        with planning(), self.streams:
            if not self._by_host:
                self._plan([edge_index[0], edge_index[1], edge_type])
            elif not self._plan_by_kernel():
                self._plan_on_host()
        # What plans hold: with plans of its own it would be a cycle, whose memory waits for the
        # garbage collector.
        self._without_plans = copy.copy(self)
        self._plans: dict[Any, Any] = {}

    def _plan_by_kernel(self) -> bool:
        """Survey the edges where they are, where a kernel does that; the host reads sizes alone."""
        kernels = gpu_kernels(self.device)
        if kernels is None or self.node_types is not None:  # types of nodes are of the host
            return False
        found = kernels.survey_edges(*self._contiguous(), self._sizes)
        if found is not None:
            check_ranges(found.limits, self._sizes)
            self._take(found)
        return found is not None

    def _plan_on_host(self) -> None:
        """Take order and rows from a graph of the CPU: what they are made of is read once."""
        joined = torch.cat([self.edge_index.flatten(), self.edge_type]).long().cpu()
        n = len(self.edge_type)
        sizes = (self.num_src, self.num_dst)
        self._host = host = RelationalGraph(
            joined[: 2 * n].view(2, n), joined[2 * n :], sizes, self.num_relations, self.node_types
        )
        if host.survey is not None:
            self._tables.share(host.survey.block)
        # Of a plan that block, 136 bytes for each edge and 8 for each destination, and some more.
        self.uploads.chunk_bytes = 176 * n + 16 * sum(sizes)

    def _on_host(self) -> RelationalGraph:
        """Return this graph on the CPU: what it made, or what is made of the survey by now."""
        return self._host or self.once("on host", self._copied)

    def _copied(self) -> RelationalGraph:
        survey = self.survey
        assert survey is not None
        host = _OfSurvey(survey.cpu(), (self.num_src, self.num_dst), self.num_relations)
        assert host.survey is not None
        self._tables.share(host.survey.block, survey.block)
        self.uploads.chunk_bytes = 40 * self.num_edges + 16 * (self.num_src + self.num_dst)
        return host

    def _made_on_host(self, *spaces: str) -> bool:
        """Return whether the host makes tables of these spaces, which are uploaded."""
        return self._by_host and not self._surveyed.keys() >= {*spaces}

    @property
    def order(self) -> torch.Tensor:
        """The edges in the order of their destinations, int64 ``[E]``."""
        return self._in_order("_order")

    @property
    def starts(self) -> torch.Tensor:
        """The first edge of each destination, in that order, and the end, int64 ``[N_dst + 1]``."""
        return self._in_order("_starts")

    def _in_order(self, name: str) -> torch.Tensor:
        if self._host is None:
            found: torch.Tensor = getattr(self, name)
            return found
        return self._tables.on_device(getattr(self._host, name))

    def _plan(self, columns: list[torch.Tensor]) -> None:
        """Check ranges and put the edges in order."""
        edge_type = columns[2]
        small = 0 < len(edge_type) and len(edge_type) + self.num_src + self.num_dst <= HOST_ROWS
        if small and not read_at_once(edge_type.device):
            self._survey_on_cpu()
            return
        if len(edge_type) and not read_at_once(edge_type.device):
            ends = torch.stack([e for c in columns for e in torch.aminmax(c)]).tolist()
            check_ranges(ends, self._sizes)
        self._place(*(c.long() for c in columns))
        if len(edge_type) and read_at_once(edge_type.device):
            self._survey(columns)
        else:
            self._check_types()

    def _place(self, src: torch.Tensor, dst: torch.Tensor, kinds: torch.Tensor) -> None:
        """Put the edges in the order of their destinations."""
        if read_at_once(dst.device):  # `_survey` reports what is out of range
            src, dst, kinds = (
                t.clamp(0, max(n - 1, 0))
                for t, n in zip((src, dst, kinds), self._sizes, strict=True)
            )
        self._order, self._starts = sort(dst, self.num_dst)
        self._src, self._dst, self._type = (t[self._order] for t in (src, dst, kinds))

    def _survey(self, columns: Sequence[torch.Tensor]) -> None:
        """Check ranges and find all pairs, on the device; the host reads once."""
        ends = torch.stack([e.long() for c in columns for e in torch.aminmax(c)])
        order, starts = self._by_relation(None)  # of destinations too: these are in order
        by_src, _ = self._by_relation(sort(self._src, self.num_src)[0])
        found = [
            number_pairs(self._type, nodes, by, starts)
            for nodes, by in ((self._src, by_src), (self._dst, order))
        ]
        wrong = order[:0]
        if self.node_types is not None:
            wrong = self.node_types.misplaced(self._src, self._dst, self._type)
        read = torch.cat([ends, starts, *(of_type for *_, of_type in found), wrong]).tolist()
        check_ranges(read[:6], self._sizes)
        if self.node_types is not None:
            self.node_types.check_placed(read[-2:])
        size = self.num_relations + 1
        bounds = [read[6 + i * size : 6 + (i + 1) * size] for i in range(3)]
        self._made["rows typed_edge"] = self._typed_edges(order, bounds[0])
        for name, (of_edge, node, kinds, _), at in zip(
            ("src", "dst"), found, bounds[1:], strict=True
        ):
            n = at[-1]
            self._made[f"rows pair_{name}"] = Rows(n, of_edge, node[:n], kinds[:n], at)

    def _survey_on_cpu(self) -> None:
        """Check ranges, put the edges in order and find all pairs, of a small graph of the CPU."""
        found = segment_sums.survey_edges(*self._contiguous(), self._sizes)
        check_ranges(found.limits, self._sizes)
        self._take(found)
        self._check_types()

    def _contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ends and relations of the edges as loops and kernels read them."""
        return self.edge_index.long().contiguous(), self.edge_type.long().contiguous()

    def _take(self, found: EdgeSurvey) -> None:
        """Take the order of the edges, and rows, from a survey."""
        self.survey = found
        self._order, self._starts = found.order, found.starts
        self._src, self._dst, self._type = found.src, found.dst, found.kind
        self._surveyed = rows_of_survey(found, self.num_src)
        if self.node_types is not None:
            del self._surveyed["src"], self._surveyed["dst"]

    def _check_types(self) -> None:
        """Raise an error for an edge whose nodes have other types than its relation."""
        if self.node_types is not None:
            ends = (self._src, self._dst, self._type)
            self.node_types.check_placed(self.node_types.misplaced(*ends).tolist())

    def _typed_edges(self, order: torch.Tensor, bounds: list[int]) -> Rows:
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device=self.device)
        return Rows(self.num_edges, position, order, self._type[order], bounds)

    @property
    def num_edges(self) -> int:
        """The number of edges."""
        return len(self.edge_type)

    @property
    def device(self) -> torch.device:
        """Where the graph is, and where its programs run."""
        return self.edge_type.device

    def check_unchanged(self) -> None:
        """Raise an error if a tensor of the graph was changed in place since the plan was made."""
        if self._versions != versions_of(self.edge_index, self.edge_type):
            raise ModifiedInPlaceError(
                "edge_index or edge_type was changed in place after RelationalGraph was made of "
                "it; make another one"
            )

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Return what `make` returned for this key when it was asked for first.

        It must not hold the graph.
        """
        known: T | None = self._made.get(key)
        if known is not None and (not self._by_host or not self.uploads.in_block):
            return known
        return self._kept(self._made, key, make)

    def plan(self, key: Any, make: Callable[[RelationalGraph], T]) -> T:
        """Return what `make` returned for this key when it was asked for first.

        It may hold the graph that `make` is given: one with the same rows, and without plans. So
        the memory of all goes when the last user of the graph, or of a plan, is gone.
        """
        known: T | None = self._plans.get(key)
        if known is not None and (not self._by_host or not self.uploads.in_block):
            return known
        return self._kept(self._plans, key, lambda: make(self._without_plans))

    def _kept(self, kept: dict[Any, Any], key: Any, make: Callable[[], T]) -> T:
        with self._lock:
            if key not in kept:
                self._check_not_captured()
                # What a plan of the device uploads is there at once: products may be measured.
                at_end = self.uploads if self._by_host else contextlib.nullcontext()
                try:
                    with planning(), self.streams, at_end:
                        made = make()
                except BaseException:
                    if self._by_host and not self.uploads.in_block:
                        self._made.clear()  # what was made for it may not have been copied
                        self._tables.clear()
                    raise
                kept[key] = made
            found: T = kept[key]
            return found

    def row_count(self, space: str) -> int:
        """Return how many rows a space has; nothing is uploaded for it."""
        return self._counted(space).n

    def bounds(self, space: str) -> list[int] | None:
        """Return `Rows.bounds` of a space; nothing is uploaded for it."""
        return self._counted(space).bounds

    def _counted(self, space: str) -> Rows | UploadedRows:
        return (self._on_host() if self._made_on_host(space) else self).rows(space)

    def _check_not_captured(self) -> None:
        """Raise an error while a CUDA graph is captured: a plan would have no values before it."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                "a plan of a graph is made inside the capture of a CUDA graph; accepted are calls "
                "that have run once before it"
            )

    def rows(self, space: str) -> Rows | UploadedRows:
        """Return the rows of a space."""
        found = self._surveyed.get(space)
        return found or self.once(f"rows {space}", lambda: self._make_rows(space))

    def _make_rows(self, space: str) -> Rows | UploadedRows:
        if self._made_on_host(space):
            rows = self._on_host().rows(space)
            assert isinstance(rows, Rows)
            return UploadedRows(rows, self._tables)
        if space in ("src", "dst"):
            ordered = None
            if space == "dst":
                ordered = self.rows("edge").of_edge, self._starts
            of_edge, n = (self._src, self.num_src) if space == "src" else (self._dst, self.num_dst)
            if self.node_types is None:
                return Rows(n, of_edge, ordered=ordered)
            kinds = self.node_types.of_nodes(self.device)
            return Rows(n, of_edge, None, kinds, list(self.node_types.bounds), ordered)
        if space in TYPE_SPACES:
            assert self.node_types is not None
            of_edge = self.node_types.of_relations(space, self.device)[self._type]
            return Rows(self.node_types.count, of_edge)
        if space == "relation":
            return Rows(self.num_relations, self._type)
        if space == "edge":
            return Rows(self.num_edges, torch.arange(self.num_edges, device=self.device))
        if space == "typed_edge":
            order, starts = self._by_relation(None)
            return self._typed_edges(order, starts.tolist())
        if space in ("pair_src", "pair_dst"):
            return self._pairs(
                *((self._src, self.num_src) if space == "pair_src" else (self._dst, self.num_dst))
            )
        return self._mixed(_sides(space), space.startswith("padded:"))

    def _by_relation(self, before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return sort(self._type, self.num_relations, before)

    def _pairs(self, nodes: torch.Tensor, n_nodes: int) -> Rows:
        """Return the distinct pairs of a node and a relation, sorted by relation, then node."""
        by_node = None if nodes is self._dst else sort(nodes, n_nodes)[0]
        order, _ = self._by_relation(by_node)
        if self.device.type == "cpu":
            found = segment_sums.number_pairs(self._type, nodes, order, self.num_relations)
            of_edge, node, bounds = found
            counts = torch.tensor(bounds, device=self.device).diff()
            relations = torch.arange(self.num_relations, device=self.device)
            relation = relations.repeat_interleave(counts)
            return Rows(len(node), of_edge, node, relation, bounds)
        none = order.new_empty(0)  # a graph on a GPU without edges: others have been surveyed
        return Rows(0, none, none, none, [0] * (self.num_relations + 1))

    def _mixed(self, by_dst: Sequence[bool], padded: bool) -> Rows:
        """Return pairs of sources and destinations: by relation, one or the other.

        The last rows of padded relations may be of no pair. Sums there are 0.
        """
        both = self.rows("pair_src"), self.rows("pair_dst")
        node, relation, bounds, shifts = [], [], [0], []
        counts = [
            rows.bounds[r + 1] - rows.bounds[r]
            for r, rows in enumerate(both[side] for side in by_dst)
            if rows.bounds is not None
        ]
        length = length_of_batch(counts) if padded else None
        for r, side in enumerate(by_dst):
            rows = both[side]
            assert rows.bounds is not None and rows.node is not None and rows.relation is not None
            low, high = rows.bounds[r], rows.bounds[r + 1]
            node.append(rows.node[low:high])
            relation.append(rows.relation[low:high])
            shifts.append(bounds[-1] - low)
            more = 0 if length is None else length - counts[r]
            node.append(rows.node.new_full((more,), NO_NODE))
            relation.append(rows.relation.new_full((more,), r))
            bounds.append(bounds[-1] + counts[r] + more)
        shift = torch.tensor(shifts, device=self.device)[self._type]
        chosen = self._edges_of(by_dst)
        of_edge = torch.where(chosen, both[1].of_edge, both[0].of_edge) + shift
        return Rows(bounds[-1], of_edge, torch.cat(node), torch.cat(relation), bounds)

    def _edges_of(self, relations: Sequence[bool]) -> torch.Tensor:
        return torch.tensor(relations, dtype=torch.bool, device=self.device)[self._type]

    def gather_index(self, source: str, to: str) -> torch.Tensor:
        """Return the row of `source` that each row of `to` takes its value from: int64 ``[n]``."""
        if to == "edge":
            return self.rows(source).of_edge
        if source in TYPE_SPACES or (self._by_host and to == "typed_edge"):
            return self.once(f"{source} of {to}", lambda: self._index_of(source, to))
        return self._plain_index_of(source, to)

    def _plain_index_of(self, source: str, to: str) -> torch.Tensor:
        rows = self.rows(to)
        if source == "edge" or to == "typed_edge":
            assert to == "typed_edge" and rows.node is not None
            return self.rows(source).of_edge[rows.node]
        found = rows.relation if source == "relation" else rows.node
        assert found is not None
        return found

    def _index_of(self, source: str, to: str) -> torch.Tensor:
        """Return the type, at one end of edges, of each row of a space, or what the host makes."""
        if self._made_on_host(source, to):
            return self.uploads.of([self._on_host().gather_index(source, to)])[0]
        if source not in TYPE_SPACES:
            return self._plain_index_of(source, to)
        assert self.node_types is not None
        kinds = self.rows(to).relation
        if to == TYPE_SPACES[source]:
            assert kinds is not None
            return kinds
        by_relation = self.node_types.of_relations(source, self.device)
        if to == "relation":
            return by_relation
        assert kinds is not None
        return by_relation[kinds]

    def rows_of_edges(self, space: str) -> torch.Tensor | None:
        """Return the row of a space of each edge, None for the edges themselves."""
        return None if space == "edge" else self.rows(space).of_edge

    def hop(self, name: str) -> Hop:
        """Return a matrix by name: ``to<source``, of entries that are edges, or rows of a gather.

        ``in:SPACE`` and ``out:SPACE`` lead from source nodes to a mixed space and from there to
        destination nodes. ``gather:to<source`` has an entry of weight 1 for each row of `to`.
        """
        return self.once(f"hop {name}", lambda: self._make_hop(name))

    def entry_count(self, name: str) -> int:
        """Return how many entries a matrix has; nothing is made for it."""
        if name.startswith("gather:"):
            return self.row_count(name.removeprefix("gather:").partition("<")[0])
        if "<" in name:
            return self.num_edges
        way, _, space = name.partition(":")
        edges = self.bounds("typed_edge")
        pairs = self.bounds("pair_src"), self.bounds("pair_dst")
        count = 0
        for r, side in enumerate(_sides(space)):
            bounds = edges if side == (way == "in") else pairs[side]
            assert bounds is not None
            count += bounds[r + 1] - bounds[r]
        return count

    def _make_hop(self, name: str) -> Hop:
        if self._made_on_host(*_spaces_of(name)):
            return UploadedHop(self._on_host().hop(name), self._tables)
        edges = self.rows("edge").of_edge
        if name.startswith("gather:"):
            to, source = name.removeprefix("gather:").split("<")
            return GatherHop(self.gather_index(source, to), self.row_count(source), self.num_edges)
        if "<" in name:
            left, right = (self.rows(space) for space in name.split("<"))
            assert isinstance(left, Rows) and isinstance(right, Rows)
            return EdgeHop(left, right, edges)
        way, _, space = name.partition(":")
        by_dst, mixed = _sides(space), self.rows(space)
        assert mixed.node is not None and mixed.relation is not None
        # Of relations on this side each edge is an entry, of the others each row.
        summed = by_dst if way == "in" else [not side for side in by_dst]
        typed = self.rows("typed_edge")
        assert typed.node is not None and typed.bounds is not None and mixed.bounds is not None
        edge_of = [typed.node[:0]]
        row_of = [torch.arange(0, device=self.device)]
        for r, side in enumerate(summed):
            if side:
                edge_of.append(typed.node[typed.bounds[r] : typed.bounds[r + 1]])
            else:
                row_of.append(
                    torch.arange(mixed.bounds[r], mixed.bounds[r + 1], device=self.device)
                )
        chosen, row = torch.cat(edge_of), torch.cat(row_of)
        if space.startswith("padded:"):
            row = row[mixed.node[row] != NO_NODE]
        node, ones = mixed.node[row], torch.full_like(row, -1)
        ends = self._src if way == "in" else self._dst
        of_node = torch.cat([ends[chosen], node])
        of_row = torch.cat([mixed.of_edge[chosen], row])
        edge = torch.cat([edges[chosen], ones])
        if way == "in":
            return Hop(of_row, of_node, edge, mixed.n, self.num_src, self.num_edges)
        return Hop(of_node, of_row, edge, self.num_dst, mixed.n, self.num_edges)

    def inverse_counts(self, dtype: torch.dtype, space: str = "pair_dst") -> torch.Tensor:
        """Return 1 / (edges of the pair of destination and relation) ``[n]`` of rows of a space."""

        def make() -> torch.Tensor:
            if self._made_on_host(space):
                return self.uploads.of([self._on_host().inverse_counts(dtype, space)])[0]
            if space != "pair_dst":
                of_pairs = self.inverse_counts(dtype)
                return of_pairs.index_select(0, self.gather_index("pair_dst", space))
            rows = self.rows("pair_dst")
            if isinstance(rows, Rows) and rows.ordered is not None:
                return rows.ordered[1].diff().to(dtype).reciprocal()
            ones = torch.ones_like(rows.of_edge)
            return ones.new_zeros(rows.n).scatter_add_(0, rows.of_edge, ones).to(dtype).reciprocal()

        return self.once(f"inverse counts {dtype} {space}", make)

    def __repr__(self) -> str:
        return (
            f"RelationalGraph({self.num_src} -> {self.num_dst} nodes, {self.num_edges} edges, "
            f"{self.num_relations} relations, {self.device})"
        )


class _OfSurvey(RelationalGraph):
    """A graph of the CPU, whose edges were surveyed elsewhere."""

    def __init__(self, found: EdgeSurvey, sizes: tuple[int, int], num_relations: int) -> None:
        self._found = found
        super().__init__(torch.stack([found.src, found.dst]), found.kind, sizes, num_relations)

    def _plan(self, columns: list[torch.Tensor]) -> None:
        self._take(self._found)


def _spaces_of(name: str) -> list[str]:
    """Return the spaces that a matrix is made of."""
    if "<" in name:
        return name.removeprefix("gather:").split("<")
    return [name.partition(":")[2]]


def _sides(space: str) -> list[bool]:
    """Return for each relation of a mixed space whether it has pairs of destinations."""
    return [digit == "1" for digit in space.rpartition(":")[2]]
