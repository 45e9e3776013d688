"""What ``graph.ndata["feat"]`` returns: metadata without decoding, single rows, all values once."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import dgl
import dgl.function as fn
import dgl.nn.pytorch as nn
import pytest
import torch

from bitslab import CompressedFeature, DecodedCopyWarning
from bitslab.integrations.dgl import compress_features, feature_stats
from bitslab.integrations.dgl.column_tensor import ColumnTensor, column_tensor
from bitslab.tables import feature as feature_module
from tests.helpers import same_bits
from tests.integrations.dgl.graphs import assert_same, features, homogeneous, packed_graph

IDS = torch.tensor([3, 0, 19, 3])
DLPACK: Any = torch.utils.dlpack


def decoded(graph, name="feat"):
    """Return the rows that were gathered of a column, and the bytes of its decoded copy."""
    stats = feature_stats(graph)["_N"][name]
    return stats["gathered_rows"], stats["materialised_bytes"]


METADATA = {
    "shape": lambda g: g.ndata["feat"].shape[1],
    "size": lambda g: (g.ndata["feat"].size(), g.ndata["feat"].size(-1)),
    "dtype": lambda g: g.ndata["feat"].dtype,
    "device": lambda g: g.ndata["feat"].device,
    "len": lambda g: len(g.ndata["feat"]),
    "dim": lambda g: (g.ndata["feat"].dim(), g.ndata["feat"].numel(), g.ndata["feat"].nbytes),
    "strides": lambda g: (g.ndata["feat"].stride(), g.ndata["feat"].is_contiguous()),
    "gradient": lambda g: (g.ndata["feat"].requires_grad, g.ndata["feat"].grad),
    "is a tensor": lambda g: torch.is_tensor(g.ndata["feat"]),
    "repr": lambda g: repr(g.ndata["feat"]),
    "str": lambda g: f"{g.ndata['feat']}",
    "repr of a frame": lambda g: (repr(g.ndata), repr(g.nodes["_N"].data), repr(g)),
    "schemes": lambda g: g.node_attr_schemes(),
    "another name": lambda g: g.ndata.update({"h": g.ndata["feat"]}) or g.ndata["h"].shape,
    "on the CPU": lambda g: g.to("cpu").ndata["feat"].to("cpu").shape,
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_is_read_without_decoding(name):
    graph = packed_graph(homogeneous())
    assert METADATA[name](graph) == METADATA[name](homogeneous())
    assert decoded(graph) == (0, 0)
    assert feature_stats(graph)["_N"]["feat"]["notes"] == []


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: x[IDS],
        lambda x: torch.index_select(x, 0, IDS),
        lambda x: torch.nn.functional.embedding(IDS, x),
        lambda x: x[[3, 0, 19, 3]],
    ],
    ids=["index", "index_select", "embedding", "list"],
)
def test_rows_that_are_chosen_are_decoded_alone(choose):
    graph = packed_graph(homogeneous())
    assert same_bits(choose(graph.ndata["feat"]), homogeneous().ndata["feat"][IDS])
    assert decoded(graph) == (4, 0)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((400, 9), torch.float32),
        ((3000,), torch.float64),
        ((100, 40, 5), torch.bfloat16),
        ((6, 400), torch.float16),
        ((7, 400), torch.int64),
        ((0, 4), torch.float32),
        ((1500, 1), torch.complex64),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [{}, {"edgeitems": 1}, {"threshold": 10}, {"threshold": 10**6}, {"edgeitems": 0}],
    ids=str,
)
def test_prints_what_torch_prints(shape, dtype, options):
    x = features(*shape).to(dtype) if shape[0] else torch.zeros(shape)
    t = column_tensor(CompressedFeature.from_tensor(x))
    torch.set_printoptions(**options)
    try:
        assert repr(t) == str(t) == repr(x)
    finally:
        torch.set_printoptions(profile="default")
    assert t.feature.kept_whole is None


def test_printing_decodes_the_rows_that_are_shown(monkeypatch):
    t = column_tensor(CompressedFeature.from_tensor(features(1000, 9)))
    plain, ranges = t.feature.table.decoded, []

    def seen(start, stop):
        ranges.append((start, stop))
        return plain(start, stop)

    monkeypatch.setattr(t.feature.table, "decoded", seen)
    repr(t)
    assert ranges == [(0, 3), (997, 1000)]


# A decoded copy


def test_a_copy_is_reported_once_with_its_bytes():
    graph = packed_graph(homogeneous())
    for _ in range(2):
        graph.ndata["feat"].sum()
    assert decoded(graph) == (0, 30 * 9 * 4)
    (note,) = feature_stats(graph)["_N"]["feat"]["notes"]
    assert note.startswith("materialised") and note.endswith("1,080 bytes")


def test_a_large_copy_is_warned_of_once_where_it_was_read(monkeypatch):
    monkeypatch.setattr(feature_module, "WARN_BYTES", 30 * 9 * 4)
    graph = packed_graph(homogeneous())
    with pytest.warns(DecodedCopyWarning, match=r"30 rows was read .* takes 1,080 bytes") as caught:
        graph.ndata["feat"].sum()
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph.ndata["feat"].sum()
        graph.ndata["half"].sum()  # a smaller copy raises no warning


# Gradients


def convolved(graph, x):
    torch.manual_seed(0)
    nn.SAGEConv(9, 4, "mean")(graph, x).square().sum().backward()
    return x.grad


def messages(graph, x):
    graph.update_all(fn.u_mul_e("feat", "one", "m"), fn.sum("m", "out"))
    graph.ndata["out"].sum().backward()
    return x.grad


def stored_again(graph, x):
    graph.ndata["h"] = x
    graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))
    graph.ndata["out"].sum().backward()
    return x.grad


def some_rows(graph, x):
    (x[IDS] * 2 + x[3:7].sum()).sum().backward()
    return x.grad


def subgraphs(graph, x):
    (graph.subgraph([4, 2]).ndata["feat"] * 3).sum().backward()
    (dgl.to_double(graph).ndata["feat"] * 2).sum().backward()
    return x.grad


def asked_for(graph, x):
    return torch.autograd.grad((x.nan_to_num(0.0, 0.0, 0.0) * 3).sum(), x)


def hooked(graph, x):
    seen = []
    x.register_hook(lambda gradient: seen.append(gradient.clone()))
    (x.view(-1) * 2).sum().backward()
    return [*seen, x.grad]


@pytest.mark.parametrize(
    "way", [convolved, messages, stored_again, some_rows, subgraphs, asked_for, hooked]
)
def test_gradients_reach_it(way):
    results = []
    for make in (homogeneous, lambda: packed_graph(homogeneous())):
        graph = make()
        graph.edata["one"] = graph.edata["one"].float().view(-1, 1)
        x = graph.ndata["feat"]
        x.requires_grad_()
        results.append(way(graph, x))
        assert x.is_leaf and x.requires_grad and graph.ndata["feat"] is x
    assert_same(*results)


def test_a_gradient_is_kept_without_a_reference_to_the_tensor():
    graph = packed_graph(homogeneous())
    graph.ndata["feat"].requires_grad_()
    (graph.ndata["feat"] * 2).sum().backward()
    gc.collect()
    assert torch.equal(graph.local_var().ndata["feat"].grad, torch.full((30, 9), 2.0))
    graph.ndata["feat"].grad = None
    graph.ndata["feat"].requires_grad = False
    assert not graph.ndata["feat"].requires_grad and graph.ndata["feat"].grad is None


def test_it_is_one_tensor_and_goes_with_its_graph():
    graph = packed_graph(homogeneous())
    x = graph.ndata["feat"]
    assert x is graph.ndata["feat"] and type(x) is ColumnTensor
    assert type(x.detach()) is ColumnTensor and x.detach() is not x
    gone = weakref.ref(graph.get_node_storage("feat").storage)
    gc.disable()
    try:
        del graph, x
        assert gone() is None  # no cycle keeps the packed rows
    finally:
        gc.enable()


# Copies and memory


@pytest.mark.parametrize("gradient", [False, True], ids=["plain", "gradient"])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"]
)
def test_copies_are_plain_tensors(copied, gradient):
    x = packed_graph(homogeneous()).ndata["feat"].requires_grad_(gradient)
    made = copied(x)
    assert type(made) is torch.Tensor and made.requires_grad == gradient
    assert same_bits(made.detach(), homogeneous().ndata["feat"])
    assert x.feature.kept_whole is None


def test_its_address_is_that_of_the_decoded_rows_or_none():
    x = packed_graph(homogeneous()).ndata["feat"]
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        DLPACK.to_dlpack(x)  # which cannot be intercepted
    rows = DLPACK.to_dlpack(x.contiguous())
    for each in (
        DLPACK.from_dlpack(rows),
        DLPACK.from_dlpack(x),
        torch.from_numpy(x.numpy().copy()),
    ):
        assert same_bits(each, homogeneous().ndata["feat"])
    assert x.data_ptr() == x.untyped_storage().data_ptr() == x.contiguous().data_ptr()


def test_a_column_made_of_it_can_be_compressed():
    graph = packed_graph(homogeneous())
    graph.ndata["h"] = graph.ndata["feat"]
    compress_features(graph, codec="raw")
    assert same_bits(graph.ndata["h"].clone(), homogeneous().ndata["feat"])
    assert feature_stats(graph)["_N"]["h"]["codec"] == "raw"
    assert decoded(graph) == (0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "moved",
    [
        lambda x: x.to("cuda"),
        lambda x: x.cuda(),
        lambda x: x[torch.arange(30, device="cuda")],
    ],
    ids=["to", "cuda", "ids"],
)
def test_a_gpu_decodes_what_goes_there(moved):
    graph = packed_graph(homogeneous(), device="cuda")
    rows = moved(graph.ndata["feat"])
    assert rows.is_cuda and same_bits(rows.cpu(), homogeneous().ndata["feat"])
    assert decoded(graph)[1] == 0
