"""CompressedFeatureStore: the contract of PyG's feature stores, and its loaders over one."""

from __future__ import annotations

import multiprocessing.reduction
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torch_geometric", reason="torch-geometric is not installed")

from torch_geometric.data import EdgeAttr, GraphStore, TensorAttr
from torch_geometric.data.feature_store import AttrView
from torch_geometric.data.remote_backend_utils import num_nodes, size
from torch_geometric.loader import NeighborLoader, NodeLoader

from bitslab import ArgumentError, ArgumentTypeError, CompressedFeature, IndexRangeError
from bitslab.integrations.pyg import CompressedFeatureStore, FetchFeatures
from bitslab.tensors.feature_tensor import FeatureTensor
from tests.integrations.pyg.graphs import (
    CITES,
    WRITES,
    N,
    Neighbours,
    features,
    heterogeneous,
    homogeneous,
    same,
)

X = features(N, 6)
UNSET = TensorAttr().attr_name
IDS = torch.tensor([7, 2, 2, 0])


@pytest.fixture
def store():
    made = CompressedFeatureStore()
    made.put_tensor(X, group_name="paper", attr_name="x", index=None)
    return made


class Edges(GraphStore):  # type: ignore[misc]
    """A minimal graph store, which keeps edges in a dict."""

    def __init__(self, data: Any):
        super().__init__()
        self.kept: dict[Any, Any] = {}
        for kind in getattr(data, "edge_types", [None]):
            part = data if kind is None else data[kind]
            n = (data.num_nodes,) * 2 if kind is None else part.size()
            self.put_edge_index(
                tuple(part.edge_index), edge_type=kind, layout="coo", is_sorted=False, size=n
            )

    def _put_edge_index(self, edge_index, edge_attr):
        self.kept[edge_attr.edge_type] = (edge_attr, edge_index)
        return True

    def _get_edge_index(self, edge_attr):
        return self.kept.get(edge_attr.edge_type, (None, None))[1]

    def _remove_edge_index(self, edge_attr):
        return self.kept.pop(edge_attr.edge_type, None) is not None

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        return [attr for attr, _ in self.kept.values()]


# Put, get, remove, size, update


def test_a_tensor_is_put_got_and_removed(store):
    whole = store.get_tensor("paper", "x", None)
    assert isinstance(whole, FeatureTensor) and same(whole, X)
    assert isinstance(store["paper", "x", slice(None)], FeatureTensor)
    assert store.get_tensor_size("paper", "x") == (N, 6)
    assert store.get_all_tensor_attrs() == [TensorAttr("paper", "x")]
    assert not store.get_all_tensor_attrs()[0].is_set("index")
    assert store.remove_tensor("paper", "x", None) is True
    assert store.remove_tensor("paper", "x", None) is False
    assert store.get_tensor_size("paper", "x") is None
    with pytest.raises(KeyError, match="no tensor 'x' of group 'paper'; there are"):
        store.get_tensor("paper", "x", None)
    assert len(store) == 0 and bool(store)


@pytest.mark.parametrize(
    "index",
    [
        IDS,
        IDS.int(),
        np.array([2]),
        [3, 1],
        torch.tensor([-1]),
        torch.zeros(0, dtype=torch.int64),
        torch.arange(N) % 5 == 0,
        slice(3, 20, 2),
        slice(None, 4),
        slice(5, 5),
        4,
        -1,
        np.int64(3),
        torch.tensor(3),
    ],
    ids=str,
)
def test_every_form_of_index(store, index):
    attr = TensorAttr("paper", "x", index)
    assert same(store.get_tensor(attr), X[index])
    assert same(store.multi_get_tensor([attr, attr])[1], X[index])
    assert store.get_tensor_size(attr) == tuple(X[index].shape)
    as_asked = store.get_tensor(attr, convert_type=True)
    assert isinstance(as_asked, np.ndarray) == isinstance(index, np.ndarray)


@pytest.mark.parametrize("index", [IDS.numpy(), np.arange(N) % 7 == 0])
def test_long_arrays_that_pyg_takes_no_further(store, index):
    # PyG 2.8 fails for an index that is an array of several elements.
    attr = TensorAttr("paper", "x", index)
    assert same(store._get_tensor(attr), X[index])
    assert store._get_tensor_size(attr) == tuple(X[index].shape)


def test_views_and_items(store):
    view = store["paper"]
    assert isinstance(view, AttrView) and same(view.x[IDS], X[IDS])
    assert same(store.view(group_name="paper")["x"][IDS], X[IDS])
    assert same(store["paper", "x"](), X)
    store["paper", "z", None] = X.numpy().copy()
    assert same(store["paper", "z", IDS], X[IDS])
    del store["paper", "z"]
    assert store == store and len(store.get_all_tensor_attrs()) == 1
    assert "('paper', 'x'): " in repr(store)
    for incomplete in (TensorAttr("paper"), TensorAttr(attr_name="x")):
        with pytest.raises(ValueError, match="not fully"):
            store.get_tensor(incomplete)
        with pytest.raises(ValueError, match="not fully"):
            store.put_tensor(X, incomplete)


@dataclass
class Ungrouped(TensorAttr):  # type: ignore[misc]
    """Needs no group, and takes the name first."""

    def __init__(self, attr_name=UNSET, index=UNSET):
        super().__init__(None, attr_name, index)


def test_attributes_of_ones_own():
    store = CompressedFeatureStore(tensor_attr_cls=Ungrouped)
    store["x", None] = X
    assert isinstance(store["x"], AttrView) and same(store["x"][IDS], X[IDS])
    assert same(store["x", IDS], X[IDS]) and same(store["x", :], X)
    assert store.get_all_tensor_attrs() == [Ungrouped("x")]


def test_rows_of_some_ids_alone(store):
    ids = torch.tensor([30, 5, 11])
    assert store.put_tensor(X[:3], "author", "x", ids)
    assert same(store["author", "x", torch.tensor([11, 30, 11])], X[[2, 0, 2]])
    assert same(store["author", "x", 5], X[1]) and same(store["author", "x", None], X[:3])
    with pytest.raises(IndexRangeError, match="no row was put for id 4"):
        store["author", "x", torch.tensor([5, 4])]
    store["author", "z", torch.tensor([False, True, True])] = X[:2]
    assert same(store["author", "z", torch.tensor([2])], X[1:2])
    store["author", "s", slice(4, 6)] = X[:2]
    assert same(store["author", "s", torch.tensor([5, 4])], X[[1, 0]])
    for bad in (torch.tensor([1, 1]), torch.tensor([1]), slice(1, None)):
        with pytest.raises(ArgumentError, match="index: "):
            store.put_tensor(X[:2], "author", "y", bad)


def test_updates_replace_all_or_some_rows(store):
    before = store["paper", "x", None]
    expected = X.clone()
    new = features(3, 6, seed=9)
    for index in (torch.tensor([4, 0, 39]), slice(1, 4), torch.arange(N) < 3):
        expected.view(torch.int32)[index] = new.view(torch.int32)
        assert store.update_tensor(new, "paper", "x", index)
        assert same(store["paper", "x", None], expected)
    store.put_tensor(X[:1], "paper", "x", torch.tensor([20]))
    expected.view(torch.int32)[20] = X.view(torch.int32)[0]
    assert same(store["paper", "x", None], expected)
    assert same(before, X)  # rows got before are unchanged
    store.update_tensor(X[:5, :2], "paper", "x", None)
    assert same(store["paper", "x", None], X[:5, :2])
    with pytest.raises(KeyError):
        store.update_tensor(X, "venue", "x", None)
    for bad, error in (
        ((X[:2, :2], torch.tensor([7, 1])), IndexRangeError),
        ((X[:2], torch.tensor([0, 1])), ArgumentError),
        ((X[:1, :2].double(), torch.tensor([0])), ArgumentError),
    ):
        with pytest.raises(error):
            store.update_tensor(bad[0], "paper", "x", bad[1])
    assert same(store["paper", "x", None], X[:5, :2])


@pytest.mark.parametrize("index", [torch.tensor([N]), N, torch.tensor([0, -N - 1])], ids=str)
def test_ids_beyond_the_table(store, index):
    with pytest.raises(IndexRangeError, match=rf"\(accepted are -{N} to {N - 1}\)$"):
        store["paper", "x", index]


def test_what_cannot_be_put(store):
    with pytest.raises(ArgumentTypeError, match="tensor: a list"):
        store["paper", "z", None] = [1.0]
    with pytest.raises(ArgumentError, match="gradient"):
        store["paper", "z", None] = torch.zeros(3, requires_grad=True)
    with pytest.raises(ArgumentTypeError, match="index: 'all'"):
        store["paper", "x", "all"]
    with pytest.raises(ArgumentError, match="device"):
        CompressedFeatureStore(device="moon")


def test_compressed_tensors_are_taken_as_they_are(store):
    t = FeatureTensor(CompressedFeature.from_tensor(X, device="cpu"))
    store["paper", "z", None] = t
    assert store.feature("paper", "z") is t.feature


@pytest.mark.parametrize(
    "hotness",
    [torch.arange(N), {"paper": torch.arange(N)}, lambda attr: torch.arange(N)],
    ids=["tensor", "mapping", "function"],
)
def test_a_cache_of_the_hot_rows(hotness):
    store = CompressedFeatureStore(codec="raw", device="cpu", cache_ratio=0.25, hotness=hotness)
    store["paper", "x", None] = X
    assert same(store["paper", "x", torch.arange(30, N)], X[30:])
    assert store.stats()["paper", "x"]["hit_rate"] == 1.0
    with pytest.raises(ArgumentError, match="40 scores for 7 rows of 'x' of group 'paper'"):
        store["paper", "x", None] = X[:7]


def test_all_tensors_of_a_batch_are_asked_for_before_any_is_awaited(store, monkeypatch):
    events = []
    plain_fetch = CompressedFeature.fetch

    class Watched:
        def __init__(self, future):
            self.future = future

        def wait(self):
            events.append("wait")
            return self.future.wait()

    def fetch(self, *args, **kwargs):
        events.append("fetch")
        return Watched(plain_fetch(self, *args, **kwargs))

    monkeypatch.setattr(CompressedFeature, "fetch", fetch)
    store["paper", "z", None] = X[:, :2]
    got = store.multi_get_tensor([TensorAttr("paper", "x", IDS), TensorAttr("paper", "z", IDS)])
    assert same(got[0], X[IDS]) and same(got[1], X[IDS, :2])
    assert events == ["fetch", "fetch", "wait", "wait"]


# In loaders


def homogeneous_stores(**options):
    data = homogeneous()
    store = CompressedFeatureStore(**options)
    store.put_tensor(data.x, group_name=None, attr_name="x", index=None)
    store.put_tensor(data.y, group_name=None, attr_name="y", index=None)
    store.put_tensor(data.edge_attr, group_name=(None, None), attr_name="edge_attr", index=None)
    return data, store


def typed_stores(**options):
    data = heterogeneous()
    store = CompressedFeatureStore(**options)
    for kind in data.node_types:
        store[kind, "x", None] = data[kind].x
    store[WRITES, "edge_attr", None] = data[WRITES].edge_attr
    return data, store


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("per_worker", [True, False])
def test_a_loader_over_the_store(workers, per_worker):
    data, store = homogeneous_stores(cache_ratio=0.2, device="cpu")
    loader = NodeLoader(
        (store, Edges(data)),
        Neighbours(data),
        torch.arange(N),
        batch_size=16,
        num_workers=workers,
        filter_per_worker=per_worker,
        transform=FetchFeatures(store),
    )
    batches = list(loader)
    assert len(batches) == 3
    for batch in batches:
        assert same(batch.x, data.x[batch.n_id]) and same(batch.y, data.y[batch.n_id])
        assert same(batch.edge_attr, data.edge_attr[batch.e_id])
        ends = data.edge_index[:, batch.e_id]
        assert torch.equal(batch.n_id[batch.edge_index], ends)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_over_a_store_of_many_types(workers):
    data, store = typed_stores()
    graph = Edges(data)
    loader = NeighborLoader(
        (store, graph),
        num_neighbors=[3, 3],
        neighbor_sampler=Neighbours(data),
        input_nodes="paper",
        batch_size=24,
        num_workers=workers,
    )
    fetch = FetchFeatures(store)
    for batch in loader:
        assert "edge_attr" not in batch[WRITES]
        batch = fetch(batch)
        for kind in ("paper", "author"):
            assert same(batch[kind].x, data[kind].x[batch[kind].n_id])
        assert same(batch[WRITES].edge_attr, data[WRITES].edge_attr[batch[WRITES].e_id])
    assert num_nodes(store, graph, "author") == 10 and size(store, graph, CITES) == (N, N)
    assert [attr.group_name for attr in store.edge_tensor_attrs()] == [WRITES]
    assert num_nodes(store, GraphStoreWithout(), "paper") == N


class GraphStoreWithout(Edges):
    def __init__(self):
        GraphStore.__init__(self)
        self.kept = {}


def test_it_goes_to_other_processes_and_files(store):
    store["author", "x", torch.tensor([9, 4])] = X[:2]
    shared = pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(store))
    copied = pickle.loads(pickle.dumps(store))
    for other in (shared, copied):
        assert same(other["paper", "x", IDS], X[IDS])
        assert same(other["author", "x", torch.tensor([4])], X[1:2])


@pytest.mark.gpu
@pytest.mark.usefixtures("forks")
def test_rows_come_to_the_gpu():
    data, store = homogeneous_stores(device="cuda", cache_ratio=0.5)
    sampler = Neighbours(data)
    for batch in NodeLoader((store, Edges(data)), sampler, torch.arange(N), batch_size=16):
        assert batch.x.is_cuda and same(batch.x.cpu(), data.x[batch.n_id])
    loader = NodeLoader((store, Edges(data)), sampler, torch.arange(9), num_workers=1)
    for batch in loader:
        assert not batch.x.is_cuda and same(batch.x, data.x[batch.n_id])
    ids = IDS.cuda()
    follows = homogeneous_stores()[1]
    assert follows[None, "x", ids].is_cuda and not follows[None, "x", IDS].is_cuda
