"""Packed rows that are closed or changed around a forward pass and its backward pass."""

from __future__ import annotations

import gc
import re
import threading
from typing import Any

import pytest
import torch

import bitslab
from bitslab.errors import BitslabError, ModifiedInPlaceError
from bitslab.relational import TYPED_SUM
from tests.relational.oracle import random_graph
from tests.relational.programs import inputs_of, rgcn

KINDS = ["table", "feature", "cache"]


class Layer:
    """A program on a packed input, and what the packed input is made of."""

    def __init__(self, kind, graded=("weight",)):
        self.graph = random_graph(0, 12, 12, 60, 4)
        self.inputs = inputs_of("rgcn", self.graph, torch.float32)
        self.table = bitslab.CompressedTable.from_tensor(self.inputs["x"], progress=False)
        self.cache = bitslab.SlabCache(self.table, 1 << 12, devices=["cpu"])
        self.cache.fill(torch.arange(12))
        feature = bitslab.CompressedFeature(self.table, self.cache)
        self.x: Any = {"table": self.table, "feature": feature, "cache": self.cache}[kind]
        for name in graded:
            self.inputs[name].requires_grad_()

    def run(self) -> Any:
        return rgcn.compile()(self.graph, *(self.inputs | {"x": self.x}).values())

    def gradient(self, out):
        return torch.autograd.grad(out.square().sum(), self.inputs["weight"], retain_graph=True)[0]


def closed(layer, kind, part):
    """Close the table or the cache; return what an error says."""
    (layer.table if part == "table" else layer.cache).close()
    names = {"table": "CompressedTable", "feature": "CompressedFeature", "cache": "SlabCache"}
    return re.escape(f"input 'x' is a {names[kind]} that is closed ({part}: is closed)")


#: What is given, and what of it is closed.
PARTS = [
    ("table", "table"),
    ("feature", "table"),
    ("feature", "cache"),
    ("cache", "table"),
    ("cache", "cache"),
]


@pytest.mark.parametrize("graded", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize(("kind", "part"), PARTS)
def test_a_closed_input_is_named_by_the_forward_pass(kind, part, graded):
    layer = Layer(kind, ["weight"] if graded else [])
    message = closed(layer, kind, part)
    with pytest.raises(BitslabError, match=message):
        layer.run()


@pytest.mark.parametrize(("kind", "part"), PARTS)
def test_an_input_closed_before_the_backward_pass_is_named(kind, part):
    layer = Layer(kind)
    out = layer.run()
    message = closed(layer, kind, part)
    with pytest.raises(BitslabError, match=message):
        layer.gradient(out)
    assert layer.inputs["weight"].grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_rows_changed_before_the_backward_pass_give_no_gradient(kind):
    layer = Layer(kind)
    out = layer.run()
    layer.gradient(out)  # nothing has changed
    layer.table.update(torch.tensor([3]), torch.ones(1, 4))
    with pytest.raises(ModifiedInPlaceError, match="input 'x': rows .* changed after the forward"):
        layer.gradient(out)
    expected = rgcn.compile()(
        layer.graph, *(layer.inputs | {"x": layer.table.gather(torch.arange(12))}).values()
    )
    torch.testing.assert_close(layer.gradient(layer.run()), layer.gradient(expected))


def test_a_change_while_the_forward_pass_runs_is_noticed(monkeypatch):
    layer, plain = Layer("table"), bitslab.CompressedTable.gather

    def changed(table, *args, **kwargs):
        rows = plain(table, *args, **kwargs)
        table.update(torch.tensor([3]), torch.ones(1, 4))
        return rows

    with monkeypatch.context() as patched:
        patched.setattr(bitslab.CompressedTable, "gather", changed)
        out = layer.run()
    with pytest.raises(ModifiedInPlaceError):
        layer.gradient(out)


@pytest.mark.parametrize("closes", [False, True])
def test_a_change_while_the_backward_pass_runs_is_noticed(closes, monkeypatch):
    layer, plain = Layer("table"), bitslab.CompressedTable.gather
    out = layer.run()

    def changed(table, *args, **kwargs):
        if closes:
            table.close()
        rows = plain(table, *args, **kwargs)
        table.update(torch.tensor([3]), torch.ones(1, 4))
        return rows

    monkeypatch.setattr(bitslab.CompressedTable, "gather", changed)
    error, what = (BitslabError, "that is closed") if closes else (ModifiedInPlaceError, "changed")
    with pytest.raises(error, match=f"input 'x'.*{what}"):
        layer.gradient(out)


def test_rows_that_no_gradient_reads_may_change():
    layer = Layer("table", ["norm", "root"])
    bias = layer.inputs["norm"]
    out = TYPED_SUM(layer.graph, layer.x, layer.inputs["weight"]) * bias.sum()
    layer.table.update(torch.tensor([3]), torch.ones(1, 4))
    assert torch.autograd.grad(out.sum(), bias)[0].isfinite().all()


def test_packing_again_changes_no_row():
    layer = Layer("table")
    layer.table.update(torch.tensor([3]), torch.ones(1, 4))
    out = layer.run()
    expected = layer.gradient(out)
    layer.table.compact()
    assert torch.equal(layer.gradient(out), expected)


def test_the_table_forgets_passes_that_are_over():
    layer = Layer("table")
    watched = layer.table._caches._caches
    before = len(watched)
    out = layer.run()
    assert len(watched) == before + 1
    del out
    gc.collect()
    assert len(watched) == before


def test_updates_beside_passes_of_other_threads():
    """Each pass gives a gradient of rows as they were, or the error."""
    layer, found, stop = Layer("table"), [], threading.Event()

    def update():
        while not stop.is_set():
            layer.table.update(torch.tensor([3]), layer.inputs["x"][3:4])

    thread = threading.Thread(target=update)
    expected = layer.gradient(layer.run())
    thread.start()
    try:
        for _ in range(100):
            try:
                found.append(layer.gradient(layer.run()))
            except ModifiedInPlaceError as error:
                assert "input 'x'" in str(error)
    finally:
        stop.set()
        thread.join()
    assert all(torch.equal(each, expected) for each in found)
