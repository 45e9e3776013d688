"""examples/train_rgnn.py: equal loss curves in every way, and what it refuses."""

from __future__ import annotations

import importlib
import json
import sys
import types
from typing import Any

import pytest
import torch

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
        (["--graph", "kinships"], "--graph kinships needs pykeen"),
        (["--nodes", "0"], "accepted are numbers from 1 on"),
    ],
)
def test_options_that_are_refused(script, options, message, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pykeen.datasets", None)
    with pytest.raises(SystemExit) as raised:
        script.main(options)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_entities_of_a_data_set_of_pykeen(script, monkeypatch):
    triples = torch.tensor([[0, 1, 2], [0, 1, 1], [1, 0, 2], [2, 2, 0]])
    training = types.SimpleNamespace(mapped_triples=triples)
    found = types.SimpleNamespace(training=training)
    fake = types.SimpleNamespace(get_dataset=lambda dataset: found)
    monkeypatch.setitem(sys.modules, "pykeen.datasets", fake)
    labels, read = script.pykeen_edges("kinships", 2)
    assert labels.tolist() == [1, 0, 0] and torch.equal(read, triples)
