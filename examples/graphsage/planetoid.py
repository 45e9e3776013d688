"""Reads the files of Planetoid (ind.citeseer.allx and the like) and runs no code from them."""

from __future__ import annotations

import pickle
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("citeseer", "cora", "pubmed")
#: The first nodes, the nodes to be tested, their numbers, and the adjacency lists.
PARTS = ("allx", "ally", "tx", "ty", "test.index", "graph")


class PlanetoidError(Exception):
    """A file is missing or damaged; the message names it and says what to do."""


@dataclass
class Planetoid:
    """A citation graph; nodes that no file lists have neither features nor a label.

    `x` is float32 ``[N, F]``, each row divided by its sum; `y` int64 ``[N]``, -1 where there is no
    label; `source` and `target` are int64 ``[E]``, every edge once in each direction.
    """

    x: np.ndarray
    y: np.ndarray
    source: np.ndarray
    target: np.ndarray


class SparseMatrix:
    """Takes the place of scipy's class, so that scipy is not needed."""

    data: Any
    indices: Any
    indptr: Any
    _shape: tuple[int, int]


class SparseUnpickler(pickle.Unpickler):
    """Reads arrays and sparse matrices, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("scipy.sparse") and name == "csr_matrix":
            return SparseMatrix
        if module in ("numpy.core.multiarray", "numpy") and name in (
            "_reconstruct",
            "ndarray",
            "dtype",
        ):
            return np.empty(0).__reduce__()[0] if name == "_reconstruct" else getattr(np, name)
        if (module, name) == ("copy_reg", "_reconstructor") or module == "copyreg":
            return super().find_class("copyreg", "_reconstructor")
        if name == "object" and module in ("__builtin__", "builtins"):
            return object
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a sparse matrix")


class GraphUnpickler(pickle.Unpickler):
    """Reads a dict of lists, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "defaultdict"):
            return defaultdict
        if name == "list" and module in ("__builtin__", "builtins"):
            return list
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a graph")


def read_sparse(path: Path) -> np.ndarray:
    """Read a pickled sparse matrix as float32 ``[rows, columns]``."""
    with path.open("rb") as file:
        matrix = SparseUnpickler(file, encoding="latin1").load()
    dense = np.zeros(matrix._shape, np.float32)
    rows = np.repeat(np.arange(matrix._shape[0]), np.diff(matrix.indptr))
    dense[rows, matrix.indices] = matrix.data
    return dense


def normalised(rows: np.ndarray) -> np.ndarray:
    """Divide each row by its sum, in place; rows of zeros are unchanged."""
    sums = rows.sum(axis=1, keepdims=True)
    rows /= np.where(sums == 0, 1, sums)
    return rows


def read_planetoid(folder: Path, name: str) -> Planetoid:
    """Read one of NAMES from a folder of its six files.

    Raises
    ------
    PlanetoidError
        When a file is missing or damaged.
    """
    paths = {part: folder / f"ind.{name}.{part}" for part in PARTS}
    if not folder.is_dir():
        raise PlanetoidError(f"{folder} is no folder; give the one that has ind.{name}.allx")
    missing = [path.name for path in paths.values() if not path.is_file()]
    if missing:
        raise PlanetoidError(
            f"{folder} has no {', '.join(missing)}; copy the files ind.{name}.* of Planetoid there "
            "(github.com/kimiyoung/planetoid, data/), or leave --root out for the framework's own "
            "download"
        )
    first_x, other_x = (_read(paths[part], read_sparse) for part in ("allx", "tx"))
    first_y, other_y = (_read(paths[part], _read_labels) for part in ("ally", "ty"))
    tested = _read(paths["test.index"], lambda path: np.loadtxt(path, np.int64, ndmin=1))
    source, target = _read(paths["graph"], _read_graph)
    for part, rows in (("ally", first_y), ("tx", other_x), ("ty", other_y)):
        wanted = len(first_x) if part == "ally" else len(tested)
        if len(rows) != wanted:
            raise _damaged(paths[part], f"{len(rows)} rows where {wanted} belong")
    if other_x.shape[1] != first_x.shape[1]:
        raise _damaged(paths["tx"], f"{other_x.shape[1]} features, not {first_x.shape[1]}")
    if tested.min(initial=0) < 0 or len(np.unique(tested)) != len(tested):
        raise _damaged(paths["test.index"], "a node is negative or named twice")
    # Gaps between them are few: Citeseer has 15 among 1,000. A number far off would take memory.
    known = len(first_x) + 2 * len(tested)
    if len(tested) and not len(first_x) <= tested.min() <= tested.max() < known:
        raise _damaged(
            paths["test.index"],
            f"nodes {tested.min()} to {tested.max()}, where {len(first_x)} to {known - 1} belong",
        )

    # Citeseer's test nodes have gaps: nodes without edges that no file lists.
    n_nodes = max(len(first_x), int(tested.max(initial=-1)) + 1)
    x = np.zeros((n_nodes, first_x.shape[1]), np.float32)
    y = np.full(n_nodes, -1, np.int64)
    x[: len(first_x)], y[: len(first_y)] = first_x, first_y
    x[tested], y[tested] = other_x, other_y

    ends = np.concatenate([source, target])
    if ends.min(initial=0) < 0 or ends.max(initial=-1) >= n_nodes:
        raise _damaged(paths["graph"], f"nodes beyond the {n_nodes} that have features")
    keep = source != target
    source, target = source[keep], target[keep]
    # Each edge once in each direction: the file repeats some.
    both = np.unique(np.concatenate([source * n_nodes + target, target * n_nodes + source]))
    return Planetoid(normalised(x), y, both // n_nodes, both % n_nodes)


def _read_labels(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        one_hot = SparseUnpickler(file, encoding="latin1").load()
    if not isinstance(one_hot, np.ndarray) or one_hot.ndim != 2:
        raise ValueError("no table of labels")
    return np.where(one_hot.any(axis=1), one_hot.argmax(axis=1), -1)


def _read_graph(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the edges, int64 ``[E]`` each: the listed neighbours, and their nodes."""
    with path.open("rb") as file:
        neighbours = GraphUnpickler(file, encoding="latin1").load()
    if not isinstance(neighbours, dict):
        raise ValueError("no dict of neighbours")
    lengths = [len(others) for others in neighbours.values()]
    target = np.repeat(np.fromiter(neighbours.keys(), np.int64, len(neighbours)), lengths)
    source = np.fromiter((o for others in neighbours.values() for o in others), np.int64)
    return source, target


def _read(path: Path, read: Any) -> Any:
    # What a pickle that was cut or changed raises depends on where that happened.
    try:
        return read(path)
    except Exception as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _damaged(path: Path, what: str) -> PlanetoidError:
    return PlanetoidError(
        f"{path} cannot be read ({path.stat().st_size:,} bytes; {what}); it is damaged or "
        "something else: copy it anew"
    )
