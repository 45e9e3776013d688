"""The graphs of `relational.py`: mag-0.1, and those of pykeen's package with inverse relations."""

from __future__ import annotations

import gzip
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec_ratio import find
from timing import say

# Files of pykeen's package are read as the example does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from common.triples import COMMANDS, find_triples, read_triples, with_inverse

#: Each relation of mag-0.1, and the node types that it leads from and to.
RELATIONS = {
    "cited": "pp",
    "citing": "pp",
    "has": "fp",
    "is-about": "pf",
    "writing": "ap",
    "written-by": "pa",
}
PYKEEN = ("kinships", "umls", "nations")


class Graph:
    """Edges with types, and nodes with types that stand one after the other."""

    def __init__(self, edges: torch.Tensor, types: torch.Tensor, sizes: dict[str, int]) -> None:
        self.edges, self.types, self.sizes = edges, types, sizes
        self.nodes = sum(sizes.values())
        self.relations = int(types.max()) + 1
        numbers = torch.tensor(list(sizes.values()), dtype=torch.int64)
        self.node_types = torch.arange(len(sizes)).repeat_interleave(numbers)


def mag() -> tuple[Graph, dict[Any, torch.Tensor]]:
    """Return mag-0.1 as one graph, and its edges by type."""
    found, most = {}, dict.fromkeys("paf", 0)
    for name, ends in RELATIONS.items():
        index = torch.from_numpy(np.load(find("graphs", f"mag01_{name}.npy"))).long()
        found[(ends[0], name, ends[1])] = index
        for kind, row in zip(ends, index, strict=True):
            most[kind] = max(most[kind], int(row.max()) + 1)
    first = {"p": 0, "a": most["p"], "f": most["p"] + most["a"]}
    shifted = [
        index + torch.tensor([[first[source]], [first[to]]])
        for (source, _, to), index in found.items()
    ]
    counts = torch.tensor([index.shape[1] for index in shifted])
    types = torch.arange(len(shifted)).repeat_interleave(counts)
    return Graph(torch.cat(shifted, 1), types, most), found


def of_pykeen(name: str) -> Graph | None:
    """Return a data set's training edges with inverse relations, None where it is not found."""
    path = find_triples(name)
    if path is None:
        return None
    edges, types = with_inverse(read_triples(path))
    return Graph(edges, types, {"entity": int(edges.max()) + 1})


def drawn_kinships() -> Graph:
    """Return a graph of the sizes of kinships with inverse relations."""
    draw = torch.Generator().manual_seed(0)
    half = torch.randint(104, (2, 8544), generator=draw)
    kinds = torch.randint(25, (8544,), generator=draw)
    edges = torch.cat([half, half.flip(0)], 1)
    return Graph(edges, torch.cat([kinds, kinds + 25]), {"person": 104})


def cpu_graphs(
    names: Sequence[str] | None,
) -> Iterator[tuple[str, Graph, dict[Any, torch.Tensor] | None]]:
    """Yield name, graph and, of node types, edges by type; say what is left out or drawn."""
    names = names or ("mag-0.1", *PYKEEN)
    if "mag-0.1" in names:
        try:
            yield "mag-0.1", *mag()
        except FileNotFoundError as error:
            say(f"left out: mag-0.1, {error}")
    for name in [name for name in PYKEEN if name in names]:
        graph = of_pykeen(name)
        if graph is not None:
            yield name, graph, None
        elif name != "kinships":
            say(f"left out: {name}; for it: {COMMANDS}")
        else:
            say(f"kinships is drawn; for the data set itself: {COMMANDS}")
            yield "drawn kinships", drawn_kinships(), None


def whole(name: str) -> Graph | None:
    """Return all triples of a data set of pykeen with inverse relations, of all three parts."""
    path = find_triples(name)
    if path is None:
        return None
    parts = [(path.parent / f"{part}.txt").read_text() for part in ("train", "valid", "test")]
    with tempfile.TemporaryDirectory() as folder:
        together = Path(folder) / "all.txt"
        together.write_text("\n".join(parts))
        edges, types = with_inverse(read_triples(together))
    return Graph(edges, types, {"entity": int(edges.max()) + 1})


def mutag() -> Graph | None:
    """Return MUTAG with inverse relations, of the statements that R-GCN's authors left in it."""
    try:
        text = gzip.decompress(Path(find("rdf", "mutag_stripped.nt.gz")).read_bytes()).decode()
    except FileNotFoundError:
        return None
    found = re.findall(r"^(\S+) (\S+) (.+) \.$", text, re.MULTILINE)
    nodes = {n: i for i, n in enumerate(sorted({x for s, _, o in found for x in (s, o)}))}
    kinds = {r: i for i, r in enumerate(sorted({r for _, r, _ in found}))}
    triples = torch.tensor([(nodes[s], kinds[r], nodes[o]) for s, r, o in found])
    edges, types = with_inverse(triples)
    return Graph(edges, types, {"entity": len(nodes)})


def sampled(seeds: int, fanout: int, seed: int = 0) -> tuple[Graph, tuple[int, int]]:
    """Return a block of mag-0.1: up to `fanout` edges of each relation into papers that are drawn.

    Its nodes are numbered anew, sources and destinations each, of which the counts are returned.
    """
    graph, _ = mag()
    draw = torch.Generator().manual_seed(seed)
    papers = torch.randperm(graph.sizes["p"], generator=draw)[:seeds]
    chosen = torch.isin(graph.edges[1], papers).nonzero().flatten()
    chosen = chosen[torch.randperm(len(chosen), generator=draw)]
    key = graph.edges[1, chosen] * graph.relations + graph.types[chosen]
    order = key.argsort(stable=True)
    first = torch.searchsorted(key[order], key[order])
    chosen = chosen[order][torch.arange(len(order)) - first < fanout]
    src, ends = graph.edges[:, chosen].unbind()
    sources, of_src = torch.unique(src, return_inverse=True)
    lookup = torch.full((graph.nodes,), -1).index_copy_(0, papers, torch.arange(seeds))
    block = Graph(torch.stack([of_src, lookup[ends]]), graph.types[chosen], {})
    block.relations = graph.relations
    return block, (len(sources), seeds)


def real(name: str) -> Graph | None:
    """Return mag-0.1 or a data set of pykeen, None where its files are not found."""
    if name != "mag-0.1":
        return of_pykeen(name) if name in PYKEEN else None
    try:
        return mag()[0]
    except FileNotFoundError:
        return None
