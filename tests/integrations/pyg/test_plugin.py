"""The pytest option that compresses every float tensor of every graph, and errors at import."""

from __future__ import annotations

import importlib
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("torch_geometric", reason="torch-geometric is not installed")

import torch_geometric.nn as gnn
from torch_geometric.data import Data, HeteroData

import bitslab.integrations.pyg
from bitslab import MissingExtraError
from bitslab.integrations.pyg import relational, testing
from bitslab.integrations.pyg.testing import wrapped
from bitslab.tensors.feature_tensor import FeatureTensor
from tests.forked import run_forked
from tests.integrations.pyg.graphs import features, same

OPTION = "--bitslab-compress-features"
OTHER = f"""
def pytest_addoption(parser):
    parser.getgroup("bitslab").addoption("{OPTION}", action="store_true")
"""
LAYERS = "--bitslab-compile-relational"
SUITE = """
import resource
import torch
from torch_geometric.data import Data
from torch_geometric.nn import HGTConv, RGCNConv
from torch_geometric.nn.conv import RGATConv

def test_layers_of_typed_edges_are_compiled():
    for layer in (HGTConv, RGCNConv, RGATConv):
        assert layer.__module__ == "bitslab.integrations.pyg.relational"

def test_features_are_compressed():
    data = Data(x=torch.zeros(5, 3))
    assert type(data.x).__name__ == "FeatureTensor"

def test_hundreds_of_graphs_fit_in_the_limit_of_open_files():
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert limit == highest != 200
    graphs = [Data(x=torch.ones(5, 3)) for _ in range(300)]
    assert all(type(graph.x).__name__ == "FeatureTensor" for graph in graphs)

def test_no_warning_of_decoded_copies():
    assert Data(x=torch.ones(1 << 12, 1 << 7)).x.sum() == 1 << 19
"""

RUN = """
import resource, sys
import pytest
_, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, highest))
sys.exit(pytest.main(sys.argv[1:]))
"""


def configured(asked: bool) -> Any:
    """Return a pytest config with the attributes that the plug-in uses."""
    return SimpleNamespace(
        getoption={OPTION: asked, LAYERS: asked}.get, addinivalue_line=lambda *line: None
    )


def test_the_option_compresses_the_features_of_a_suite(tmp_path):
    # Another plug-in has added the option already.
    (tmp_path / "other.py").write_text(OTHER)
    (tmp_path / "test_suite.py").write_text(SUITE)
    warned = "[pytest]\nfilterwarnings = error::bitslab.DecodedCopyWarning\n"
    (tmp_path / "pytest.ini").write_text(warned)
    plugins = ["-p", "other", "-p", testing.__name__, "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run_forked(["-c", RUN, *plugins, OPTION, LAYERS], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "float features of PyG graphs are compressed" in done.stdout
    assert "PyG's layers of typed edges are compiled" in done.stdout


@pytest.mark.parametrize("asked", [True, False])
def test_every_float_tensor_is_compressed_while_the_run_lasts(asked):
    config = configured(asked)
    x = torch.randn(5, 3)
    testing.pytest_configure(config)
    try:
        data = Data(x=x, edge_index=torch.zeros(2, 4, dtype=torch.int64), y=torch.arange(5))
        data.edge_attr, data["z"] = torch.zeros(4), torch.zeros(0, 3)
        typed = HeteroData(paper={"x": x})
        layer = gnn.RGCNConv
    finally:
        testing.pytest_unconfigure()
    assert (layer is relational.RGCNConv) == asked
    assert gnn.RGCNConv is gnn.conv.RGCNConv and not issubclass(gnn.RGCNConv, relational.RGCNConv)
    for t in (data.x, data.edge_attr, data.z, typed["paper"].x):
        assert isinstance(t, FeatureTensor) == asked
    assert type(data.y) is torch.Tensor and same(data.x, x)
    data.x = x
    assert data.x is x


def test_features_that_are_to_take_gradients_are_plain_tensors():
    config = configured(True)
    x = features(5, 3)
    testing.pytest_configure(config)
    try:
        for data in (Data(x=x, pos=x), HeteroData(paper={"x": x, "pos": x})):
            store = data.node_stores[0]
            assert data.requires_grad_("x", requires_grad=False) is data
            assert isinstance(store.x, FeatureTensor)
            assert data.requires_grad_("x") is data
            assert type(store.x) is torch.Tensor and store.x.requires_grad and same(store.x, x)
            assert isinstance(store.pos, FeatureTensor)
            store.requires_grad_("pos")
            assert type(store.pos) is torch.Tensor and store.pos.requires_grad
            store.x.sum().backward()
            assert same(store.x.grad, torch.ones(5, 3)) and not x.requires_grad
    finally:
        testing.pytest_unconfigure()
    data = Data(x=x.clone()).requires_grad_("x")
    assert data.x.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tiny_tensors_keep_every_bit(dtype):
    for n, width in ((5, 3), (40, 1), (5000, 9)):
        x = features(n, width, dtype)
        t = wrapped(x)
        assert isinstance(t, FeatureTensor) and same(t[torch.arange(n)], x)
        assert same(wrapped(x[:, 0])[[1, 2, 3]], x[[1, 2, 3], 0])


def test_what_is_left_raw():
    t = wrapped(torch.zeros(3, 2))
    for value in (
        t,
        torch.tensor(1.0),
        torch.arange(3),
        torch.eye(3).to_sparse(),
        torch.zeros(3, requires_grad=True),
        torch.nn.Parameter(torch.zeros(3), requires_grad=False),
        torch.zeros(3, device="meta"),
        [1.0],
        None,
    ):
        assert wrapped(value) is value


def test_the_import_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    with pytest.raises(MissingExtraError, match=r'pip install "bitslab\[pyg\]"'):
        importlib.reload(bitslab.integrations.pyg)
