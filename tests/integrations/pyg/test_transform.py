"""FetchFeatures: features of a batch, on the training device."""

from __future__ import annotations

import copy
import traceback

import pytest
import torch

pytest.importorskip("torch_geometric", reason="torch-geometric is not installed")

from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.transforms import Compose, ToUndirected

from bitslab import ArgumentError, ArgumentTypeError, BitslabError, IndexRangeError
from bitslab.integrations.pyg import CompressedFeatureStore, FetchFeatures
from bitslab.integrations.pyg import transform as module
from tests.integrations.pyg.graphs import (
    WRITES,
    N,
    Neighbours,
    assert_same_graphs,
    heterogeneous,
    homogeneous,
    packed_graph,
    same,
)


def load(data, **options):
    seeds = ("paper", None) if hasattr(data, "node_types") else None
    return NodeLoader(data, Neighbours(data), seeds, batch_size=24, **options)


def sorted_keys(data):
    """Sort the stores' attributes, since a fetched feature comes last."""
    data = copy.copy(data)
    for store in data.stores:
        store._mapping = dict(sorted(store._mapping.items()))
    return data


@pytest.mark.parametrize("make", [homogeneous, heterogeneous], ids=["data", "hetero"])
@pytest.mark.parametrize("how", ["after", "transform", "worker"])
def test_batches_are_those_of_a_loader_that_fetches(make, how):
    data = packed_graph(make(), device="cpu", cache_ratio=0.2)
    n = data.num_nodes
    fetch = FetchFeatures.detach(data)
    assert data.num_nodes == n and not any(
        name in store for store in data.stores for name in ("x", "edge_attr")
    )
    options = {} if how == "after" else {"transform": fetch, "num_workers": int(how == "worker")}
    for batch, expected in zip(load(data, **options), load(make()), strict=True):
        if how == "after":
            lean, batch = batch, fetch(batch)
            assert "x" not in lean.stores[0]  # the batch given is not changed
        for store in batch.stores:
            if "num_nodes" in store:
                del store["num_nodes"]  # the only source of it without features
        assert_same_graphs(sorted_keys(batch), sorted_keys(expected))
    assert sum(s["gathered_rows"] for s in fetch.stats().values()) > 0 or how == "worker"
    assert_same_graphs(without_number(fetch.attach(data)), sorted_keys(make()))


def without_number(data):
    data = sorted_keys(data)
    for store in data.stores:
        store._mapping.pop("num_nodes", None)
    return data


def test_names_choose_what_is_fetched():
    data = packed_graph(heterogeneous(), device="cpu")
    (batch, *_) = load(heterogeneous())
    for store in batch.stores:
        for name in ("x", "edge_attr"):
            if name in store:
                del store[name]
    got = FetchFeatures(data, {"author": "x", WRITES: "edge_attr"})(batch)
    assert same(got["author"].x, heterogeneous()["author"].x[batch["author"].n_id])
    assert "x" not in got["paper"] and "edge_attr" in got[WRITES]
    store = CompressedFeatureStore()
    store["author", "x", None] = data["author"].x
    store["paper", "x", None] = data["paper"].x
    got = FetchFeatures(store, {"paper": ["x"]})(batch)
    assert "x" in got["paper"] and "x" not in got["author"]
    assert "x" in FetchFeatures(store, "x")(batch)["author"]
    with pytest.raises(ArgumentError, match="'z' is not in the store; there are"):
        FetchFeatures(store, "z")


def test_what_a_batch_has_is_fetched_only_by_name():
    data = packed_graph(homogeneous(), device="cpu")
    batch = Data(x=torch.zeros(2, 6), n_id=torch.tensor([5, 3]), edge_index=torch.zeros(2, 0))
    batch.e_id = torch.zeros(0, dtype=torch.int64)
    assert torch.equal(FetchFeatures(data)(batch).x, torch.zeros(2, 6))
    assert same(FetchFeatures(data, "x")(batch).x, homogeneous().x[[5, 3]])
    chain = Compose([FetchFeatures(data, "x", device="cpu"), ToUndirected()])
    assert same(chain(batch).x, homogeneous().x[[5, 3]])


def test_types_that_a_batch_lacks_are_left_out():
    fetch = FetchFeatures(packed_graph(heterogeneous(), device="cpu"), "x")
    batch = heterogeneous().node_type_subgraph(["paper"])
    batch["paper"].n_id = torch.arange(N)
    assert fetch(batch).node_types == ["paper"]


def test_everything_is_asked_for_first(monkeypatch):
    events = []
    plain_fetch = module._Wanted.fetch

    class Watched:
        def __init__(self, future):
            self.future = future

        def wait(self):
            events.append("wait")
            return self.future.wait()

    def fetch(self, ids, device):
        events.append("fetch")
        return Watched(plain_fetch(self, ids, device))

    data = packed_graph(homogeneous(), device="cpu")
    transform = FetchFeatures.detach(data)
    monkeypatch.setattr(module._Wanted, "fetch", fetch)
    transform(next(iter(load(data))))
    assert events == ["fetch", "fetch", "wait", "wait"]


def test_refusals():
    data = packed_graph(homogeneous(), device="cpu")
    with pytest.raises(ArgumentError, match="holds no compressed feature"):
        FetchFeatures(homogeneous())
    with pytest.raises(ArgumentError, match="'y' is not compressed"):
        FetchFeatures(data, "y")
    with pytest.raises(ArgumentTypeError, match="data: expected"):
        FetchFeatures({"x": data.x})
    with pytest.raises(ArgumentError, match="device"):
        FetchFeatures(data, device="moon")
    fetch = FetchFeatures(data)
    with pytest.raises(ArgumentError, match="has no n_id for 'x' of 'nodes'"):
        fetch(Data(edge_index=torch.zeros(2, 0), num_nodes=3))
    with pytest.raises(IndexRangeError):
        fetch(Data(n_id=torch.tensor([N])))
    with pytest.raises(ArgumentTypeError, match="data: expected"):
        fetch([1])
    assert repr(fetch) == "FetchFeatures(x of nodes, edge_attr of edges; where the ids are)"


def test_a_worker_says_that_it_cannot_use_a_gpu(monkeypatch):
    fetch = FetchFeatures.detach(data := packed_graph(homogeneous(), device="cpu"))
    fetch._device = torch.device("cuda", 0)  # as on a machine that has one
    with pytest.raises(BitslabError, match="worker process of a loader; call it on the") as raised:
        list(load(data, transform=fetch, num_workers=1))
    # The error that torch raises again is in a cycle with the loader's iterator, and one that the
    # collector finds waits five seconds for its worker.
    traceback.clear_frames(raised.tb)


@pytest.mark.gpu
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("options", [{}, {"codec": "raw", "cache_codec": "auto"}], ids=str)
@pytest.mark.parametrize("make", [homogeneous, heterogeneous], ids=["data", "hetero"])
def test_rows_are_decoded_on_the_gpu(make, options):
    data = packed_graph(make(), device="cuda", cache_ratio=0.3, **options)
    fetch = FetchFeatures.detach(data, device="cuda")
    loader = load(data, num_workers=1)
    for batch, expected in zip(loader, load(make()), strict=True):
        got = fetch(batch.to("cuda"))
        assert all(v.is_cuda for s in got.stores for v in s.values() if hasattr(v, "is_cuda"))
        assert_same_graphs(without_number(got), sorted_keys(expected))
        assert_same_graphs(without_number(fetch(batch)), sorted_keys(expected))  # ids on the CPU
