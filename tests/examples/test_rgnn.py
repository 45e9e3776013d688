"""examples/train_rgnn.py: equal loss curves in every way, and what it refuses."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

SMALL = ["--nodes", "60", "--edges", "200", "--relations", "3", "--epochs", "3", "--device", "cpu"]


@pytest.fixture(scope="module")
def script() -> Any:
    return importlib.import_module("train_rgnn")


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("model", "framework"), [("rgcn", "pyg"), ("rgat", "pyg"), ("hgt", "pyg"), ("rgcn", "dgl"),
                             ("hgt", "dgl")],
)  # fmt: skip
def test_loss_curves_are_equal(script, model, framework, tmp_path, capsys):
    importlib.import_module("torch_geometric" if framework == "pyg" else "dgl")
    file = tmp_path / "found.json"
    options = ["--model", model, "--framework", framework, "--json", str(file)]
    if (model, framework) == ("hgt", "pyg"):
        options += ["--explain", "--plot", str(tmp_path / "losses.svg")]
    assert script.main([*SMALL, *options]) == 0
    found = json.loads(file.read_text())
    assert found["equal"] and [r["layers"] for r in found["results"]] == [*script.LAYERS]
    plain, _, packed = found["results"]
    assert len(plain["losses"]) == 3 and plain["losses"][-1] < plain["losses"][0]
    assert packed["feature_ratio"] > 1.5
    said = capsys.readouterr().out
    assert "loss curves are equal" in said
    assert ("traversal" in said) == ("--explain" in options)
    assert (tmp_path / "losses.svg").exists() == ("--plot" in options)


def test_losses_that_differ_are_named(script, capsys, monkeypatch):
    plain = script.train

    def train(way, *args):
        result = plain(way, *args)
        if way == "compiled":
            result.losses[1] *= 1.01
        return result

    monkeypatch.setattr(script, "train", train)
    assert script.main([*SMALL, "--layers", "plain", "compiled"]) == 1
    assert "epoch 1: plain has a loss of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "rgat", "--framework", "dgl"], "DGL has no RGAT"),
        (["--graph", "kinships"], "argument --graph: kinships needs"),
        (["--graph", "../kinships"], "accepted are drawn, and kinships, umls and nations"),
        (["--nodes", "0"], "accepted are numbers from 1 on"),
    ],
)
def test_options_that_are_refused(script, options, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("BITSLAB_DATA", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # pykeen is not installed
    with pytest.raises(SystemExit) as raised:
        script.main(options)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


TRIPLES = "ann\tknows\tcem\nann\tknows\tbob\nbob\tis\tcem\ncem\tsees\tann\n"


def written(folder: Path, text: str, encoding: str = "utf-8") -> None:
    file = folder / "kinships" / "train.txt"
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding=encoding)


@pytest.mark.parametrize("installed", [False, True], ids=["a folder", "an installed package"])
def test_data_sets_of_pykeen_are_read_without_importing_it(
    script, installed, tmp_path, monkeypatch
):
    package = tmp_path / "pykeen"
    written(package / "datasets", TRIPLES)
    (package / "__init__.py").write_text("raise ImportError('what pykeen imports is missing')")
    if installed:
        monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("BITSLAB_DATA", str(tmp_path / "none" if installed else tmp_path))
    labels, triples = script.pykeen_edges("kinships", 2)
    assert "pykeen" not in sys.modules
    # Names have their places in alphabetical order.
    assert triples.tolist() == [[0, 1, 2], [0, 1, 1], [1, 0, 2], [2, 2, 0]]
    assert labels.tolist() == [1, 0, 0]
    index, kinds = script.with_inverse(triples)
    assert index.tolist() == [[0, 0, 1, 2, 2, 1, 2, 0], [2, 1, 2, 0, 0, 0, 1, 2]]
    assert kinds.tolist() == [1, 1, 0, 2, 4, 4, 3, 5]


def test_names_of_triples_are_any_text(script, tmp_path, monkeypatch):
    """A byte-order mark is none of a name, and U+0085 ends no line."""
    text = "a\u0085n\tknows\tcem\n\ncem\tknows\ta\u0085n\n"
    written(tmp_path / "pykeen" / "datasets", text, "utf-8-sig")
    monkeypatch.setenv("BITSLAB_DATA", str(tmp_path))
    assert script.pykeen_edges("kinships", 2)[1].tolist() == [[0, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("text", "encoding", "message"),
    [("ann\tknows\tcem\n\nann knows bob\n", "utf-8", "line 3: 1 fields; accepted are three"),
     ("\n", "utf-8", "is empty; accepted are triples"),
     ("ann\tknows\tJos\u00e9\n", "latin-1", r"train\.txt: .*; accepted is text in UTF-8")],
    ids=["fields", "empty", "latin-1"],
)  # fmt: skip
def test_triples_that_cannot_be_read(script, text, encoding, message, tmp_path, monkeypatch):
    written(tmp_path / "pykeen" / "datasets", text, encoding)
    monkeypatch.setenv("BITSLAB_DATA", str(tmp_path))
    with pytest.raises(script.RefusedError, match=message):
        script.pykeen_edges("kinships", 2)
