"""The scripts that train, as they find their neighbours; a citation graph in Planetoid's files."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.quick_measuring import measure_quickly

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
# Before DGL is first imported: without it, it writes a file to the home folder.
os.environ.setdefault("DGLBACKEND", "pytorch")

N_NODES, N_WORDS, N_CLASSES = 60, 40, 3
#: The nodes from this one on are to be tested; one of them stands in no file.
TESTED_FROM, ISOLATED = 40, 50
IGNORED = [
    # torch, when a loader forks a worker while threads are running.
    "ignore:.*multi-threaded, use of fork:DeprecationWarning",
    "ignore:unclosed file.*proc/self/status:ResourceWarning",  # DGL 1.1.3
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for text in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(text))


@pytest.fixture(params=["dgl", "pyg"])
def script(request: pytest.FixtureRequest) -> Any:
    """Import one of the scripts."""
    return importlib.import_module(f"train_graphsage_{request.param}")


@pytest.fixture
def quick_measuring(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Measure small tensors for policy auto, few of them, and write to no cache of the machine."""
    measure_quickly(monkeypatch, tmp_path_factory.getbasetemp() / "activations-cache")


@pytest.fixture
def train(tmp_path: Path) -> Any:
    """Run a script; give its exit status and what it wrote as JSON."""

    def train(script: Any, *arguments: str) -> tuple[int, Any]:
        json_file = tmp_path / "report.json"
        status = script.main([*arguments, "--json", str(json_file), "--device", "cpu"])
        return status, json.loads(json_file.read_text())

    return train


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a script with options that it does not take; check its status and its message."""

    def refused(main: Any, options: Sequence[str], message: str) -> None:
        with pytest.raises(SystemExit) as stopped:
            main(options)
        assert stopped.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split())

    return refused


def made() -> dict[str, Any]:
    """Make what the files hold: words and labels of the nodes, and their neighbours."""
    rng = np.random.default_rng(0)
    words = rng.random((N_NODES, N_WORDS)) < 0.2
    labels = np.arange(N_NODES) % N_CLASSES
    graph: dict[int, list[int]] = defaultdict(list)
    for node in range(N_NODES):
        # Some neighbours are named twice, and node 0 is its own.
        for other in {0, int(rng.integers(N_NODES)), int(rng.integers(N_NODES))} - {ISOLATED}:
            if node != ISOLATED:
                graph[node].append(other)
                graph[other].append(node)
    return {"words": words, "labels": labels, "graph": graph}


@pytest.fixture(scope="session")
def planetoid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write that graph as Planetoid's files have it: test nodes shuffled, one in none."""
    import scipy.sparse

    folder = tmp_path_factory.mktemp("planetoid")
    data = made()
    numbers = np.delete(np.arange(TESTED_FROM, N_NODES), ISOLATED - TESTED_FROM)
    tested = np.random.default_rng(1).permutation(numbers)
    one_hot = np.eye(N_CLASSES, dtype=np.int32)[data["labels"]]

    def write(part: str, value: Any) -> None:
        pickled = pickle.dumps(value, protocol=3)
        # The files are from before NumPy 2, which names the module otherwise.
        pickled = pickled.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        (folder / f"ind.citeseer.{part}").write_bytes(pickled)

    for part, rows in (("allx", data["words"][:TESTED_FROM]), ("tx", data["words"][tested])):
        write(part, scipy.sparse.csr_matrix(rows.astype(np.float64)))
    write("ally", one_hot[:TESTED_FROM])
    write("ty", one_hot[tested])
    write("graph", data["graph"])
    (folder / "ind.citeseer.test.index").write_text("".join(f"{node}\n" for node in tested))
    return folder
