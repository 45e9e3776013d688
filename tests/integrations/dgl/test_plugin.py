"""The pytest plug-in: a run of tests that do not import bitslab, with compressed columns."""

from __future__ import annotations

import os

import torch
from dgl.frame import Column

from bitslab.integrations.dgl import CompressedColumn
from bitslab.integrations.dgl.testing import OPTION, CompressEveryColumn
from tests.forked import run_forked
from tests.helpers import same_bits
from tests.integrations.dgl.graphs import features, homogeneous

SUITE = """
import dgl, torch
MADE_ON_IMPORT = dgl.graph(([0, 1], [1, 2]))
MADE_ON_IMPORT.ndata["x"] = torch.arange(6.0).view(3, 2)

def test_compressed():
    graph = dgl.rand_graph(5, 9)
    graph.edata["w"] = torch.ones(9, 3)
    graph.ndata["n"] = torch.arange(5)
    columns = [MADE_ON_IMPORT.get_node_storage("x"), graph.get_edge_storage("w")]
    columns.append(graph.get_node_storage("n"))
    assert [type(column).__name__ for column in columns] == {expected}
    assert MADE_ON_IMPORT.ndata["x"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert graph.subgraph([0, 1]).edata["w"].shape[1] == 3

def test_no_warning_of_decoded_copies():
    graph = dgl.rand_graph(1 << 12, 9)
    graph.ndata["x"] = torch.ones(1 << 12, 1 << 7)
    assert graph.ndata["x"].sum() == 1 << 19
"""

# Two runs in a process of their own, because loading torch and DGL takes seconds. The second one
# would fail if the first left anything behind.
RUNS = """
import resource
import pytest
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, most), most))
args = ["-p", "bitslab.integrations.dgl.testing", "-p", "no:cacheprovider", "-q"]
codes = [pytest.main([*args, {option!r}, "test_with.py"]), pytest.main([*args, "test_without.py"])]
assert codes == [0, 0]
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
"""


def test_runs_with_and_without_the_option(tmp_path):
    names = {"test_with": ["CompressedColumn", "CompressedColumn", "Column"]}
    names["test_without"] = ["Column"] * 3
    for name in names:
        (tmp_path / f"{name}.py").write_text(SUITE.replace("{expected}", repr(names[name])))
    warned = "[pytest]\nfilterwarnings = error::bitslab.DecodedCopyWarning\n"
    (tmp_path / "pytest.ini").write_text(warned)
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = run_forked(["-c", RUNS.format(option=OPTION)], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    report = [line for line in done.stdout.splitlines() if line.startswith("bitslab: ")]
    assert len(report) == 1 and report[0].startswith("bitslab: 3 columns were compressed, ")


def test_every_column_is_compressed_however_it_is_made():
    every, before = CompressEveryColumn(), dict(vars(Column))
    every.start()
    try:
        x = features(5, 3)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            for rows in (x, x[:, :1], x[:0], x[:, :0], x[:, 0]):
                column = Column(rows.to(dtype))
                assert type(column) is CompressedColumn
                assert same_bits(column.data, rows.to(dtype))
                # Packed, however small, where there is anything to pack.
                codec = "ibp" if rows.numel() else "raw"
                assert column.storage.stats()["codec"].startswith(codec)
        compressed = every.compressed
        assert compressed == 20
        graph = homogeneous()
        graph.nodes[[0]].data["feat"] = torch.ones(1, 9)
        assert type(graph.local_var().get_node_storage("feat")) is CompressedColumn
        assert every.compressed > compressed
        assert type(graph.get_node_storage("feat").astype(torch.float64).data) is torch.Tensor
        for raw in (torch.arange(3), x.clone().requires_grad_()):
            assert type(Column(raw)) is Column
        assert every.raw >= 2
    finally:
        every.stop()
    assert dict(vars(Column)) == before
    assert type(Column(features(5, 3))) is Column
