"""What a survey of a small graph's edges finds, and where it stands in one block of memory.

A loop of the CPU writes it, and a kernel of a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..on_host import on_host

#: Columns of a survey: of the edges in order, sources, destinations, kinds, numbers, places by kind
#: and the kind there; of pairs that of each edge, nodes, kinds, edges pair by pair, and starts.
EDGE_COLUMNS, PAIR_COLUMNS = 7, 5


def column_length(n_edges: int) -> int:
    """Return the words of a column; each begins at 16 bytes, as kernels may read them."""
    return n_edges + 2 + n_edges % 2


def block_length(n_edges: int, n_dst: int) -> int:
    """Return the words of a block: the columns of edges, those of both pairs, and the starts."""
    return (EDGE_COLUMNS + 2 * PAIR_COLUMNS) * column_length(n_edges) + n_dst + 2


class Pairs(NamedTuple):
    """The distinct pairs of a node and a kind among edges, by kind, then node; all int64.

    Attributes
    ----------
    of_edge : torch.Tensor
        ``[E]``: the pair of each edge.
    node, kind : torch.Tensor
        ``[pairs]``.
    order, starts : torch.Tensor
        ``[E]`` and ``[pairs + 1]``: the edges pair by pair, and where each begins.
    bounds : list of int
        ``[kinds + 1]``: the first pair of each kind.
    """

    of_edge: torch.Tensor
    node: torch.Tensor
    kind: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor
    bounds: list[int]


class EdgeSurvey(NamedTuple):
    """The edges of a graph in the order of their destinations; all int64.

    Attributes
    ----------
    limits : list of int
        Lowest and highest of sources, destinations and kinds; all else is undefined where these are
        out of range.
    block : torch.Tensor
        Has all that follows.
    order, starts : torch.Tensor
        ``[E]`` and ``[destinations + 1]``: the order, and where each destination begins.
    src, dst, kind : torch.Tensor
        ``[E]``.
    numbers : torch.Tensor
        ``[E]``: 0, 1, ...
    place, by_kind, kind_of : torch.Tensor
        ``[E]``: where each edge stands by kind, the edge at each place, and its kind.
    bounds : list of int
        ``[kinds + 1]``: the first edge of each kind.
    pairs : tuple of Pairs
        Those of sources, and of destinations.
    tiles : torch.Tensor or None
        ``[3, most, 3]``, of a GPU alone: tiles of typed products over edges by kind, over pairs of
        sources, and over those of destinations; see `cuda.typed_gemm.TypedTiles`.
    """

    limits: list[int]
    block: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor
    src: torch.Tensor
    dst: torch.Tensor
    kind: torch.Tensor
    numbers: torch.Tensor
    place: torch.Tensor
    by_kind: torch.Tensor
    kind_of: torch.Tensor
    bounds: list[int]
    pairs: tuple[Pairs, Pairs]
    tiles: torch.Tensor | None

    @classmethod
    def of_block(
        cls,
        block: torch.Tensor,
        n_edges: int,
        limits: list[int],
        bounds: Sequence[list[int]],
        tiles: torch.Tensor | None = None,
    ) -> EdgeSurvey:
        """Return what stands in a block.

        Parameters
        ----------
        block : torch.Tensor
            int64, `block_length` words.
        n_edges : int
            How many edges there are; one or more.
        limits : list of int
            As here.
        bounds : sequence of list of int
            Those of the edges, of pairs of sources, and of pairs of destinations.
        tiles : torch.Tensor, optional
            As here.
        """
        of_edges, *of_sides = bounds
        width = column_length(n_edges)
        n_columns = EDGE_COLUMNS + 2 * PAIR_COLUMNS
        # As few operators as can be: a survey of a sampled block takes not much longer than these.
        table = block.narrow(0, 0, n_columns * width).view(n_columns, width)
        columns = table.narrow(1, 0, n_edges).unbind()
        order, src, dst, kind, numbers, place, kind_of = columns[:EDGE_COLUMNS]
        pairs = []
        for first, at in zip((EDGE_COLUMNS, EDGE_COLUMNS + PAIR_COLUMNS), of_sides, strict=True):
            of_edge, node, of_kind, by_pair = columns[first : first + PAIR_COLUMNS - 1]
            begins = block.narrow(0, (first + PAIR_COLUMNS - 1) * width, at[-1] + 1)
            node, of_kind = node.narrow(0, 0, at[-1]), of_kind.narrow(0, 0, at[-1])
            pairs.append(Pairs(of_edge, node, of_kind, by_pair, begins, at))
        starts = block.narrow(0, n_columns * width, len(block) - n_columns * width - 1)
        return cls(
            limits, block, order, starts, src, dst, kind, numbers, place, pairs[1].order, kind_of,
            of_edges, (pairs[0], pairs[1]), tiles,
        )  # fmt: skip

    def cpu(self) -> EdgeSurvey:
        """Return it with a copy of the block on the CPU."""
        bounds = (self.bounds, *(pairs.bounds for pairs in self.pairs))
        return self.of_block(on_host(self.block), len(self.order), self.limits, bounds)
