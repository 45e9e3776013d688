"""The pytest plug-in that compiles DGL's layers of typed edges."""

from __future__ import annotations

import os

import dgl.nn
from dgl.nn import pytorch

from bitslab.integrations.dgl import relational, testing
from tests.forked import run_forked

PLUGIN = ["-p", testing.__name__, "-p", "no:cacheprovider", "-q"]
NAMES = ("RelGraphConv", "HGTConv", "TypedLinear")

SUITE = """
import copy, io
import dgl, pytest, torch
from dgl.nn import HGTConv, RelGraphConv
from dgl.nn.pytorch import TypedLinear
from dgl.nn.pytorch.conv import RelGraphConv as Same

def test_compiled():
    assert Same is RelGraphConv
    for layer in (HGTConv, RelGraphConv, TypedLinear):
        assert layer.__module__ == "bitslab.integrations.dgl.relational"

def test_layers_inside_layers_are_saved_and_run():
    graph, types = dgl.rand_graph(9, 30), torch.arange(30) % 4
    layer, x = RelGraphConv(8, 6, 4), torch.randn(9, 8)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again(graph, x, types), layer(graph, x, types))
"""

# Two runs in one process: the second would fail if the first left anything behind.
RUNS = """
import pytest
from dgl.nn import pytorch
args = {plugin!r}
plain = pytorch.RelGraphConv
assert pytest.main([*args, {option!r}]) == 0
assert pytorch.RelGraphConv is plain
assert pytest.main([*args, "--deselect=test_suite.py::test_compiled"]) == 0
"""


def test_runs_with_and_without_the_option(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    plugin = [*PLUGIN[:-1], "-p", "bitslab.integrations.pyg.testing"]  # it has the same option
    runs = RUNS.format(plugin=plugin, option=testing.RELATIONAL)
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run_forked(["-c", runs], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DGL's layers of typed edges are compiled" in done.stdout
    assert "DGL's layers of typed edges are as they are" in done.stdout


def test_dgls_classes_are_where_they_were():
    for name in NAMES:
        found = {getattr(module, name) for module in (dgl.nn, pytorch)}
        assert len(found) == 1 and not issubclass(found.pop(), getattr(relational, name))
