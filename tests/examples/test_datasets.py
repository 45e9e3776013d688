"""Graphs that the scripts train on: what is read, drawn and refused."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from graphsage import datasets, planetoid
from graphsage.datasets import DatasetError, Graph

import bitslab

from .conftest import ISOLATED, N_NODES, made

PARTS = planetoid.PARTS


def no_loader(name: str, root: Path | None) -> Graph:
    raise DatasetError(f"asked for {name}")


def edges(graph: Graph) -> set[tuple[int, int]]:
    return set(zip(graph.indices.tolist(), graph.targets.tolist(), strict=True))


def test_planetoid_files_are_read_in_the_order_of_the_nodes(planetoid: Path) -> None:
    graph = datasets.load("citeseer", planetoid, no_loader)
    data = made()
    assert graph.x.shape == data["words"].shape
    assert graph.x.dtype == torch.float32
    words, labels = data["words"].copy(), data["labels"].copy()
    words[ISOLATED], labels[ISOLATED] = False, -1
    assert torch.equal(graph.x > 0, torch.from_numpy(words))
    sums = graph.x.sum(1)
    assert (((sums - 1).abs() < 1e-5) | (sums == 0)).all()
    assert graph.y.tolist() == labels.tolist()
    wanted = {
        pair for a, others in data["graph"].items() for b in others for pair in ((a, b), (b, a))
    }
    assert edges(graph) == {(a, b) for a, b in wanted if a != b}
    assert graph.n_edges == len(edges(graph))
    used = torch.cat([graph.train, graph.validated])
    assert sorted(used.tolist()) == [node for node in range(N_NODES) if node != ISOLATED]


@pytest.mark.parametrize("part", PARTS)
def test_missing_file_is_named(planetoid: Path, tmp_path: Path, part: str) -> None:
    for path in planetoid.iterdir():
        if not path.name.endswith(f".{part}"):
            shutil.copy(path, tmp_path)
    with pytest.raises(DatasetError, match=rf"has no ind\.citeseer\.{part}; copy the files"):
        datasets.load("citeseer", tmp_path, no_loader)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("damage", ["cut", "empty", "text"])
@pytest.mark.filterwarnings("ignore:loadtxt. input contained no data")
def test_damaged_file_is_named(planetoid: Path, tmp_path: Path, part: str, damage: str) -> None:
    for path in planetoid.iterdir():
        whole = path.read_bytes()
        if path.name.endswith(f".{part}"):
            whole = {"cut": whole[: len(whole) // 2], "empty": b"", "text": b"<html>"}[damage]
        (tmp_path / path.name).write_bytes(whole)
    # Without numbers, the rows that belong to them are too many.
    named = "tx" if part == "test.index" and damage != "text" else part
    with pytest.raises(DatasetError, match=rf"ind\.citeseer\.{named} cannot be read .* it anew"):
        datasets.load("citeseer", tmp_path, no_loader)


@pytest.mark.parametrize("part", ["ally", "tx", "ty", "test.index"])
def test_files_that_do_not_fit_each_other(planetoid: Path, tmp_path: Path, part: str) -> None:
    shutil.copytree(planetoid, tmp_path, dirs_exist_ok=True)
    path = tmp_path / f"ind.citeseer.{part}"
    if part == "test.index":
        lines = path.read_text().split()
        path.write_text("\n".join([*lines[1:], lines[1]]))
        report = "named twice"
    else:
        other = {"ally": "ty", "tx": "allx", "ty": "ally"}[part]
        shutil.copy(tmp_path / f"ind.citeseer.{other}", path)
        report = "rows where"
    with pytest.raises(DatasetError, match=rf"{part} cannot be read .*{report}"):
        datasets.load("citeseer", tmp_path, no_loader)


@pytest.mark.parametrize("node", [0, 10**15])
def test_node_to_test_that_cannot_be_one(planetoid: Path, tmp_path: Path, node: int) -> None:
    shutil.copytree(planetoid, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "ind.citeseer.test.index"
    path.write_text("\n".join([str(node), *path.read_text().split()[1:]]))
    with pytest.raises(DatasetError, match=r"test\.index cannot be read .* 40 to 77 belong"):
        datasets.load("citeseer", tmp_path, no_loader)


@pytest.mark.parametrize(
    "graph", [{"a": [1]}, {0: 1}, {0: [60]}, {-1: [0]}], ids=["text", "number", "beyond", "below"]
)
def test_neighbours_that_are_none(planetoid: Path, tmp_path: Path, graph: Any) -> None:
    shutil.copytree(planetoid, tmp_path, dirs_exist_ok=True)
    (tmp_path / "ind.citeseer.graph").write_bytes(pickle.dumps(graph))
    with pytest.raises(DatasetError, match=r"citeseer\.graph cannot be read .* it anew"):
        datasets.load("citeseer", tmp_path, no_loader)


@pytest.mark.parametrize("part", ["graph", "allx", "ally"])
def test_file_that_would_run_code_is_refused(planetoid: Path, tmp_path: Path, part: str) -> None:
    shutil.copytree(planetoid, tmp_path, dirs_exist_ok=True)

    class Bad:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    (tmp_path / f"ind.citeseer.{part}").write_bytes(pickle.dumps(Bad()))
    with pytest.raises(DatasetError, match=rf"{part} cannot be read .*\.system is not part of"):
        datasets.load("citeseer", tmp_path, no_loader)
    assert not (tmp_path / "ran").exists()


def test_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="nowhere is no folder; give the one that has"):
        datasets.load("cora", tmp_path / "nowhere", no_loader)


@pytest.mark.parametrize(("name", "root"), [("Reddit", None), ("Reddit", "x"), ("cora", None)])
def test_other_names_go_to_the_framework(name: str, root: str | None) -> None:
    with pytest.raises(DatasetError, match=f"asked for {name}"):
        datasets.load(name, Path(root) if root else None, no_loader)


def test_normal_features_hardly_compress() -> None:
    graph = datasets.load("normal", None, no_loader)
    assert (graph.n_nodes, graph.x.shape[1], graph.n_classes) == (4096, 602, 8)
    assert 1.05 < bitslab.CompressedFeature.from_tensor(graph.x).ratio < 1.3


def test_digits_are_linked_both_ways() -> None:
    graph = datasets.digits()
    assert graph.x.shape == (1797, 64)
    assert float(graph.x.max()) == 1
    assert graph.n_classes == 10
    assert int(graph.indptr.diff().min()) >= datasets.NEIGHBOURS
    assert edges(graph) == {(b, a) for a, b in edges(graph)}
    same = graph.y[graph.indices] == graph.y[graph.targets]
    assert same.float().mean() > 0.9
    assert not set(graph.train.tolist()) & set(graph.validated.tolist())


def test_scaled_up_graph_has_hubs_and_real_rows(planetoid: Path) -> None:
    graph = datasets.load("citeseer", planetoid, no_loader)
    calls = []
    big = datasets.scaled_up(graph, 5000, 20, 7, lambda done, total: calls.append((done, total)))
    assert big.n_nodes == len(big.x) == len(big.y) == 5000
    assert calls[-1] == (50_000, 50_000)
    degrees = big.indptr.diff()
    # Some edges are drawn twice.
    assert 17 < big.n_edges / 5000 < 20
    assert degrees.max() > 12 * degrees.median()
    # Nodes of high degree are spread over all ids.
    assert degrees[:2500].sum() == pytest.approx(big.n_edges / 2, rel=0.2)
    pairs = big.indices * 5000 + big.targets
    assert len(pairs.unique()) == big.n_edges
    assert not (big.indices == big.targets).any()
    rows = {tuple(row): int(label) for row, label in zip(graph.x.tolist(), graph.y, strict=True)}
    assert all(
        rows[tuple(row)] == label
        for row, label in zip(big.x[:200].tolist(), big.y[:200].tolist(), strict=True)
    )
    assert int(big.y.min()) >= 0
    again = datasets.scaled_up(graph, 5000, 20, 7)
    assert torch.equal(again.indices, big.indices)
    assert torch.equal(again.x, big.x)
    assert not torch.equal(datasets.scaled_up(graph, 5000, 20, 8).x, big.x)


def test_graph_whose_labels_do_not_fit() -> None:
    none = torch.empty(0, dtype=torch.int64)
    with pytest.raises(DatasetError, match=r"features \[3, 2\] and labels \[2\]; accepted"):
        datasets.from_edges("made", none, none, torch.zeros(3, 2), torch.zeros(2))


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--dataset", "Nonsense"],
            "--dataset Nonsense: not digits, normal, citeseer, cora or pubmed, and",
        ),
        (["--dataset", "cora", "--root", "/nowhere"], "/nowhere is no folder"),
        (["--dataset", "TUDataset"], "--dataset TUDataset: .*give --"),
    ],
)
def test_refused_with_exit_status_2(
    script: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert script.main([*arguments, "--device", "cpu"]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert re.search(message, " ".join(printed.err.split()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fanouts", "0"], "--fanouts: 0, accepted are numbers from 1 on, and -1"),
        (["--cache-ratio", "2"], "--cache-ratio: 2, accepted are numbers above 0 and up to 1"),
        (["--features", "zipped"], "--features: invalid choice"),
        (["--lr", "0"], "--lr: 0, accepted are numbers above 0"),
        (["--device", "abacus"], "--device: abacus, accepted are cpu and cuda"),
        (["--device", "cuda:99"], "--device: cuda:99, but torch sees"),
        (["--json", "/nowhere/report.json"], "--json: /nowhere/report.json: /nowhere is no folder"),
        (["--plot", "/"], "--plot: / is a folder"),
        (["--plot", "ways.txt"], "--plot: ways.txt: accepted are names in .avif"),
        (["--plot", "ways"], "--plot: ways: accepted are names in .avif"),
        (["--workers", "-1"], "--workers: -1, accepted are numbers from 0 on"),
    ],
)
def test_refused_options(script: Any, refused: Any, arguments: list[str], message: str) -> None:
    refused(script.main, arguments, message)


def test_one_gpu_for_several_ranks_is_refused(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        script.main(["--device", "cuda:0"])
    assert "--device: cuda:0 for each of 2 processes; accepted is cuda" in " ".join(
        capsys.readouterr().err.split()
    )


def test_datasets_of_the_frameworks(tmp_path: Path) -> None:
    import train_graphsage_dgl
    import train_graphsage_pyg

    karate = train_graphsage_pyg.own_loader("KarateClub", tmp_path)
    assert karate.x.shape == (34, 34)
    assert karate.n_edges == 156
    assert train_graphsage_pyg.own_loader("karateclub", tmp_path).n_edges == 156
    with pytest.raises(DatasetError, match="WebKB has several graphs; give --dataset WebKB:NAME"):
        train_graphsage_pyg.own_loader("WebKB", tmp_path)
    # The name arrives: PyG refuses it before it downloads anything.
    with pytest.raises(DatasetError, match="WebKB:nonsense: it did not load .AssertionError"):
        train_graphsage_pyg.own_loader("WebKB:nonsense", tmp_path)
    shapes = train_graphsage_dgl.own_loader("BAShape", tmp_path)
    assert (shapes.n_nodes, shapes.n_classes) == (700, 4)
    with pytest.raises(DatasetError, match="KarateClubDataset is no graph with one kind of nodes"):
        train_graphsage_dgl.own_loader("KarateClub", tmp_path)
