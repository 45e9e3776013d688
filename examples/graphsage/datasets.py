"""Graphs to train on: digits by default, Planetoid files, the framework's datasets, scaled up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from common.report import Report

from .planetoid import NAMES as PLANETOID
from .planetoid import PlanetoidError, read_planetoid

DIGITS = "digits"
NORMAL = "normal"
NEIGHBOURS = 10
#: Every third of the labelled nodes is kept back for validation.
VALIDATED = 3
#: Columns of the edge features, which are drawn.
EDGE_COLUMNS = 8
#: Edges drawn at once for a scaled-up graph.
DRAWN = 1 << 22


class DatasetError(Exception):
    """The dataset cannot be had; the message says why and what to do."""


@dataclass
class Graph:
    """A graph with features; all tensors are on the CPU.

    `indptr`, int64 ``[N + 1]``, and `indices`, int64 ``[E]``, hold for each node the nodes that
    have an edge to it: edge e goes from ``indices[e]`` to the node whose segment of `indptr` has e.
    `x` is float ``[N, F]``, `e` float ``[E, D]`` or None, `y` int64 ``[N]`` with -1 for no label,
    `train` and `validated` are int64 ids.
    """

    name: str
    indptr: torch.Tensor
    indices: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor
    train: torch.Tensor
    validated: torch.Tensor
    e: torch.Tensor | None = None

    @property
    def n_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def n_edges(self) -> int:
        return len(self.indices)

    @property
    def n_classes(self) -> int:
        return int(self.y.max()) + 1

    @property
    def targets(self) -> torch.Tensor:
        """The node that each edge goes to, int64 ``[E]``."""
        return torch.repeat_interleave(torch.arange(self.n_nodes), self.indptr.diff())


def from_edges(
    name: str,
    source: torch.Tensor,
    target: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    train: torch.Tensor | None = None,
    validated: torch.Tensor | None = None,
) -> Graph:
    """Order edges by the node they go to; without masks, split the labelled nodes by number.

    Parameters
    ----------
    name : str
        For messages and tables.
    source, target : torch.Tensor
        int64 ``[E]``.
    x, y : torch.Tensor
        ``[N, F]`` and int64 ``[N]``.
    train, validated : torch.Tensor, optional
        Ids of nodes.
    """
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise DatasetError(
            f"{name}: features {list(x.shape)} and labels {list(y.shape)}; accepted are one row of "
            "features and one label for each node"
        )
    order = torch.argsort(target, stable=True)
    indptr = torch.zeros(len(x) + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(target, minlength=len(x)), 0, out=indptr[1:])
    if train is None or validated is None:
        labelled = (y >= 0).nonzero().flatten()
        kept_back = torch.arange(len(labelled)) % VALIDATED == VALIDATED - 1
        train, validated = labelled[~kept_back], labelled[kept_back]
    return Graph(name, indptr, source[order].contiguous(), x, y, train, validated)


def load(name: str, root: Path | None, own_loader: Callable[[str, Path | None], Graph]) -> Graph:
    """Load a dataset by name.

    Parameters
    ----------
    name : str
        ``digits``; ``normal``; ``citeseer``, ``cora``, ``pubmed``; or what `own_loader` knows.
    root : Path, optional
        Folder of Planetoid files; for other datasets, where the framework keeps its downloads.
    own_loader : callable
        Takes name and root; the framework's own loader.

    Raises
    ------
    DatasetError
        When the name is not known, or files are missing or damaged.
    """
    if name == DIGITS:
        return digits()
    if name == NORMAL:
        return normal()
    if name.lower() in PLANETOID and root is not None:
        try:
            read = read_planetoid(root, name.lower())
        except PlanetoidError as error:
            raise DatasetError(str(error)) from error
        parts = (read.source, read.target, read.x, read.y)
        return from_edges(name.lower(), *map(torch.from_numpy, parts))
    return own_loader(name, root)


def digits() -> Graph:
    """Link each of scikit-learn's 1,797 handwritten digits to the NEIGHBOURS most like it."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.neighbors import kneighbors_graph
    except ImportError as error:
        raise DatasetError(
            f"--dataset {DIGITS}: scikit-learn is not installed ({error}); pip install "
            "scikit-learn, or give --dataset citeseer --root FOLDER"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    links = kneighbors_graph(pixels, NEIGHBOURS).tocoo()
    # Both directions, and no edge twice.
    n = len(pixels)
    source, target = (torch.from_numpy(part.astype("int64")) for part in (links.row, links.col))
    both = torch.unique(torch.cat([source * n + target, target * n + source]))
    x = torch.from_numpy(pixels).float() / 16
    return from_edges(DIGITS, both // n, both % n, x, torch.from_numpy(labels.astype("int64")))


def normal() -> Graph:
    """Draw dense features, the least compressible ones: normal, as wide as those of Reddit, 602."""
    generator = torch.Generator().manual_seed(0)
    n, n_classes = 4096, 8
    y = torch.randint(n_classes, (n,), generator=generator)
    centres = torch.randn(n_classes, 602, generator=generator) / 4
    x = centres[y] + torch.randn(n, 602, generator=generator)
    source = torch.randint(n, (n * NEIGHBOURS,), generator=generator)
    return from_edges(NORMAL, source, torch.arange(n).repeat(NEIGHBOURS), x, y)


def scaled_up(
    graph: Graph, n_nodes: int, degree: float, seed: int, report: Report | None = None
) -> Graph:
    """Give `n_nodes` nodes the links of a large graph, and features drawn from the real ones.

    As the SU datasets of IBP, section 6.2, whose links are those of ogbn-products; here they are
    drawn with the same average degree and a power law (Chung and Lu): a node's degree is in
    proportion to ``(10 + rank) ** -0.5``, which for the 2.4 million nodes of ogbn-products gives a
    largest degree of about 12,500 (there: 17,481). Features and labels are drawn together.

    Parameters
    ----------
    graph : Graph
        Where features and labels come from.
    n_nodes : int
        Nodes of the result.
    degree : float
        Edges to a node, on average, before those that were drawn twice are dropped.
    seed : int
        Of all that is drawn.
    report : callable, optional
        Called with how many edges are drawn, and of how many.
    """
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randperm(n_nodes, generator=generator)
    cumulative = (10.0 + ranks.double()).rsqrt().cumsum(0)
    pairs = math.ceil(n_nodes * degree / 2)
    keys = []
    for begin in range(0, pairs, DRAWN):
        drawn = torch.rand(2, min(DRAWN, pairs - begin), dtype=torch.float64, generator=generator)
        ends = torch.searchsorted(cumulative, drawn * cumulative[-1], right=True)
        a, b = ends.clamp_(max=n_nodes - 1)
        keys.append((a * n_nodes + b)[a != b])
        keys.append((b * n_nodes + a)[a != b])
        if report:
            report(min(begin + DRAWN, pairs), pairs)
    both = torch.unique(torch.cat(keys))
    labelled = (graph.y >= 0).nonzero().flatten()
    drawn_from = labelled[torch.randint(len(labelled), (n_nodes,), generator=generator)]
    return from_edges(
        f"{graph.name} SU",
        both % n_nodes,
        both // n_nodes,
        graph.x[drawn_from],
        graph.y[drawn_from],
    )


def with_edge_features(graph: Graph, seed: int) -> Graph:
    """Draw EDGE_COLUMNS numbers for each edge, of 16 values each, as rounded weights have."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(16, (graph.n_edges, EDGE_COLUMNS), generator=generator)
    return replace(graph, e=drawn.float() / 16)


def in_dtype(graph: Graph, dtype: torch.dtype) -> Graph:
    """Store the features in another dtype."""
    return replace(graph, x=graph.x.to(dtype), e=None if graph.e is None else graph.e.to(dtype))
