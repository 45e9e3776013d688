"""CompressedColumn against dgl.frame.Column: reading, copies, conversions, writing, pickles."""

from __future__ import annotations

import copy
import pickle

import dgl
import pytest
import torch
from dgl.frame import Column, Frame
from hypothesis import given, settings
from hypothesis import strategies as st

from bitslab import ArgumentError, ArgumentTypeError, BitslabError, CompressedFeature
from bitslab.integrations.dgl import (
    CompressedColumn,
    attach,
    decompress_features,
    detach,
    feature_stats,
)
from tests.helpers import dtype_id, packable, same_bits, take
from tests.integrations.dgl.graphs import assert_same_graph, features, homogeneous, packed_graph

X = features(20, 6)
IDS = torch.tensor([3, 0, 19, 3])


def packed(x: torch.Tensor = X) -> CompressedColumn:
    return CompressedColumn(CompressedFeature.from_tensor(x))


# What it is


@pytest.mark.drawn(20)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.int64,
        torch.uint8,
        torch.bool,
    ],
    ids=dtype_id,
)
@pytest.mark.parametrize("shape", [(20,), (20, 3), (20, 2, 5), (0, 4), (20, 0)], ids=str)
def test_rows_of_every_dtype_and_shape(dtype, shape):
    x = packable(dtype, shape)
    plain, column = Column(x), Column(x).compress()
    assert (len(column), column.shape, column.dtype) == (len(plain), plain.shape, plain.dtype)
    assert column.scheme == plain.scheme
    ids = IDS if shape[0] else IDS[:0]
    assert same_bits(column.data, x)
    assert same_bits(column[ids], take(x, ids))
    assert same_bits(column.subcolumn(ids).data, take(x, ids))
    assert same_bits(column.fetch(ids.int(), "cpu").wait(), take(x, ids))


def test_rows_of_a_view():
    x = torch.randn(9, 40, 2).round()[:, ::2].transpose(0, 1)
    assert not x.is_contiguous()
    graph = dgl.graph(([0], [1]), num_nodes=20)
    graph.ndata["x"] = x
    graph.get_node_storage("x").compress()
    assert same_bits(graph.ndata["x"], x)
    assert same_bits(graph.nodes[IDS].data["x"], take(x, IDS))


def test_what_it_says():
    column = packed()
    assert repr(column).startswith("CompressedColumn(CompressedFeature(")
    assert "2 rows of" in repr(column.subcolumn(IDS[:2]))
    assert column.storage.stats()["gathered_rows"] == 0
    frame = Frame({"x": column})
    assert repr(frame) == repr(Frame({"x": X}))


# Copies, subcolumns and conversions, against DGL's own column

STEPS = st.lists(
    st.one_of(
        st.lists(st.integers(0, 3), min_size=4, max_size=8),
        st.sampled_from(["clone", "copy", "half", "double", "float", "to", "read", "pickle"]),
    ),
    max_size=5,
)


def after(column, steps):
    dtypes = {"half": torch.float16, "double": torch.float64, "float": torch.float32}
    for step in steps:
        if isinstance(step, list):
            column = column.subcolumn(torch.tensor(step))
        elif step in dtypes:
            column = column.astype(dtypes[step])
        elif step == "clone":
            column = column.clone()
        elif step == "copy":
            column = copy.copy(column)
        elif step == "to":
            column = column.to("cpu")
        elif step == "pickle":
            column = pickle.loads(pickle.dumps(column))
        else:
            _ = column.data
    return column


@settings(max_examples=40)
@given(STEPS)
def test_what_comes_of_it_is_what_comes_of_a_plain_column(steps):
    column, plain = after(packed(), steps), after(Column(X), steps)
    assert len(column) == len(plain)
    assert column.dtype == plain.dtype
    assert column.scheme == plain.scheme
    ids = torch.tensor([2, 0, 2])
    rows = column.fetch(ids, "cpu")
    rows = rows.wait() if hasattr(rows, "wait") else rows
    assert same_bits(rows, plain.fetch(ids, "cpu"))
    assert same_bits(column.data, plain.data)
    assert same_bits(column.data, plain.data)


def test_subcolumns_share_the_feature_until_they_are_read():
    column = packed()
    part = column.subcolumn(IDS)
    assert part.storage is column.storage  # DGL compares them when a worker sends a subgraph
    assert type(part) is CompressedColumn
    _ = part.data
    assert type(part) is Column
    assert column.storage.stats()["gathered_rows"] == len(IDS)


def test_a_deep_clone_has_its_own_rows():
    column = packed()
    deep = column.deepclone()
    assert deep.storage is not column.storage
    assert same_bits(deep.data, X)
    assert same_bits(column.subcolumn(IDS).deepclone().data, X[IDS])


def test_a_move_to_the_cpu_decodes_nothing():
    # What scripts do without a GPU: graph = graph.to(device).
    graph = packed_graph(homogeneous()).to("cpu")
    for part in (graph, graph.subgraph(torch.arange(20)), graph.int().to("cpu")):
        column = part.to(torch.device("cpu")).get_node_storage("feat")
        assert same_bits(column.fetch(IDS, "cpu").wait(), homogeneous().ndata["feat"][IDS])
        pickle.dumps(part if part is graph else column.clone())
    stats = feature_stats(graph)["_N"]["feat"]
    assert stats["materialised_bytes"] == 0
    decompress_features(graph)
    assert feature_stats(graph) == {}
    graph.ndata["feat"].add_(1)  # it is the graph's own


def test_a_column_that_waits_for_a_conversion_is_pickled_packed():
    column = packed().astype(torch.float16)
    copied = pickle.loads(pickle.dumps(column))
    assert type(column) is type(copied) is CompressedColumn
    assert column.storage.stats()["gathered_rows"] == 0
    assert copied.dtype == torch.float16
    assert same_bits(copied.data, X.half())


def test_page_locking_and_streams_are_left_to_the_table():
    column = packed()
    column.pin_memory_()
    column.unpin_memory_()
    part = column.subcolumn(IDS)
    part.record_stream(None)  # nothing of it is on a GPU
    for each in (column, part):
        assert type(each) is CompressedColumn
    assert column.storage.stats()["gathered_rows"] == 0


def test_a_move_to_a_gpu_that_is_not_there():
    moved = packed().to("cuda:99")
    assert type(moved) is CompressedColumn  # nothing is moved before it is read
    for read in (lambda: moved.data, lambda: moved.fetch(IDS, "cuda:99")):
        with pytest.raises(ArgumentError, match=r"cuda:99.* torch sees (no|\d+) CUDA GPU"):
            read()


# Between processes, DGL takes the storage of subcolumns away and gives it back


@pytest.mark.parametrize("convert", [False, True])
def test_without_its_storage_it_travels_and_gets_it_back(convert):
    column = packed().astype(torch.float16) if convert else packed()
    part = column.subcolumn(IDS)
    part.storage = None
    arrived = pickle.loads(pickle.dumps(part))
    assert arrived.storage is None
    arrived.storage = column.storage
    assert same_bits(arrived.data, X[IDS].half() if convert else X[IDS])


def test_a_tensor_as_storage_makes_it_plain():
    column = packed()
    column.storage = X
    assert type(column) is Column
    assert column.data is X
    with pytest.raises(ArgumentTypeError, match="storage: expected a CompressedFeature, got list"):
        packed().storage = [1]


# Writing


def test_writes_in_place_raise():
    graph = homogeneous()
    graph.get_node_storage("feat").compress()
    writes = [
        lambda: graph.ndata["feat"].add_(1),
        lambda: graph.ndata["feat"].__setitem__(0, 1.0),
        lambda: torch.add(graph.ndata["feat"], 1, out=graph.ndata["feat"]),
        lambda: graph.ndata["feat"][3:].zero_(),
        # DGL's own transform writes to the feature that it is given.
        lambda: dgl.RowFeatNormalizer(node_feat_names=["feat"])(graph),
    ]
    for write in writes:
        with pytest.raises(BitslabError, match="read-only"):
            write()
    graph.nodes[[0]].data["feat"].add_(1)  # rows that were gathered are the caller's
    assert_same_graph(graph, homogeneous())


TRANSFORMS = {
    "mask": dgl.FeatMask(1.0, node_feat_names=["feat"]),
    "normalizer": dgl.RowFeatNormalizer(node_feat_names=["feat"]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    "make_plain",
    [
        lambda graph: decompress_features(graph, "feat"),
        lambda graph: graph.ndata.update({"feat": graph.ndata["feat"].clone()}),
    ],
    ids=["decompressed", "clone"],
)
def test_transforms_that_write_in_place_work_on_a_column_that_was_made_plain(transform, make_plain):
    def prepared():
        graph = homogeneous()
        graph.ndata["feat"] = graph.ndata["feat"].nan_to_num(0.0, 1.0, 1.0)
        return graph

    graph = packed_graph(prepared())
    with pytest.raises(BitslabError, match=r"read-only.* write to a clone\(\)"):
        TRANSFORMS[transform](graph)
    make_plain(graph)
    assert_same_graph(
        packed_graph(TRANSFORMS[transform](graph), "feat"), TRANSFORMS[transform](prepared())
    )


def test_a_new_value_replaces_it():
    graph = homogeneous()
    kept = graph.get_node_storage("feat").compress()
    local = graph.local_var()
    graph.ndata["feat"] = torch.ones(30, 2)
    assert torch.equal(graph.ndata["feat"], torch.ones(30, 2))
    assert feature_stats(graph) == {}
    assert same_bits(local.ndata["feat"], homogeneous().ndata["feat"])
    assert type(kept) is CompressedColumn
    kept.data = X
    assert type(kept) is Column


def test_updates_of_rows_leave_other_columns_unchanged():
    column, plain = packed(), Column(X.clone())
    other = column.clone()
    for each in (column, plain):
        each.update(IDS[:3], torch.ones(3, 6))
        each.extend(torch.zeros(2, 6))
    assert same_bits(column.data, plain.data)
    assert same_bits(other.data, X)
    for change in (other.update, lambda ids, rows: other.extend(rows)):
        with pytest.raises(dgl.DGLError, match="scheme"):
            change(IDS[:1], torch.ones(1, 5))
    assert type(other) is CompressedColumn


# The line of the published artifact


def test_one_line_compresses_a_column():
    graph = homogeneous()
    column = graph.get_node_storage("feat")
    assert column.compress() is column is graph.get_node_storage("feat")
    graph.get_edge_storage("w").compress(layout="inplace", codec="ibp")
    assert set(feature_stats(graph)) == {"_N", ("_N", "_E", "_N")}
    assert feature_stats(graph)[("_N", "_E", "_N")]["w"]["layout"] == "inplace"
    assert_same_graph(graph, homogeneous())


def test_the_line_again_changes_nothing():
    graph = packed_graph(homogeneous())
    column = graph.get_node_storage("feat")
    feature = column.storage
    assert column.compress() is column and column.storage is feature
    assert column.subcolumn(IDS).compress().storage is feature
    for options in (
        {"codec": "raw"},
        {"layout": "inplace"},
        {"cache_bytes": 500},
        {"hotness": torch.arange(30)},
        {"device": "cpu"},
    ):
        with pytest.raises(ArgumentError, match=f"compressed already.*other {next(iter(options))}"):
            column.compress(**options)
    assert column.storage is feature


def test_a_cache_needs_scores():
    column = Column(X)
    with pytest.raises(ArgumentError, match=r"hotness: a cache needs scores"):
        column.compress(cache_ratio=0.5)
    with pytest.raises(ArgumentError, match=r"hotness: \[3\], expected .* \[20\]"):
        column.compress(cache_ratio=0.5, hotness=torch.ones(3))
    with pytest.raises(ArgumentTypeError, match="hotness: expected a tensor, got str"):
        column.compress(cache_ratio=0.5, hotness="degree")
    assert type(column) is Column
    column.compress(cache_bytes=6 * 4 * 2, hotness=torch.arange(20), codec="raw", device="cpu")
    assert same_bits(column.fetch(torch.tensor([19, 18, 0]), "cpu").wait(), X[[19, 18, 0]])
    assert column.storage.stats()["hit_rate"] == 2 / 3


def test_columns_that_cannot_be_compressed():
    with pytest.raises(ArgumentError, match="is compressed already; decompress_features"):
        packed().compress(layout="inplace")
    with pytest.raises(ArgumentError, match="requires a gradient"):
        Column(X.clone().requires_grad_()).compress()
    with pytest.raises(ArgumentError, match="is on cuda:0; compress it before it is moved"):
        Column(X).to("cuda:0").compress()
    with pytest.raises(ArgumentError, match="is sparse"):
        Column(X.to_sparse()).compress()
    lost = Column(X).subcolumn(IDS)
    lost.storage = None
    with pytest.raises(ArgumentError, match="holds a NoneType, not a tensor"):
        lost.compress()


def test_the_method_comes_and_goes():
    before = dict(vars(Column))
    try:
        attach()  # once more: the import did it already
        assert dict(vars(Column)) == before
        detach()
        without = dict(vars(Column))
        assert before.keys() - without.keys() == {"compress"}
        assert all(without[name] is before[name] for name in without)
        detach()
        assert dict(vars(Column)) == without
        # A DGL that has a method of that name, as the artifact's fork, gets it back.
        Column.compress = own = lambda self: "own"
        attach()
        assert Column.compress is before["compress"]
        detach()
        assert Column.compress is own
        del Column.compress
    finally:
        attach()
    assert dict(vars(Column)) == before
