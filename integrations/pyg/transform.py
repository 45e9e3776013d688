"""FetchFeatures: adds features to a batch, on the training device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import BaseTransform

from bitslab.devices import checked_device
from bitslab.errors import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.integrations.pyg.columns import GraphType, Names, check_data, store_of
from bitslab.integrations.pyg.compress import compressed_columns
from bitslab.integrations.pyg.store import CompressedFeatureStore
from bitslab.tables import RowsFuture
from bitslab.tensors import FeatureTensor

FeatureSource: TypeAlias = "Data | HeteroData | CompressedFeatureStore"


@dataclass(frozen=True)
class _Wanted:
    """A tensor to fetch; `type` is "nodes" or "edges" for a graph without types."""

    type: GraphType
    name: str
    of_edges: bool
    source: Any  # a CompressedFeatureStore and the group in it, or a CompressedFeature
    group: Any = None

    def fetch(self, ids: torch.Tensor, device: torch.device | None) -> RowsFuture:
        if isinstance(self.source, CompressedFeatureStore):
            return self.source.fetch(self.group, self.name, ids, device)
        future: RowsFuture = self.source.fetch(ids, device)
        return future


class FetchFeatures(BaseTransform):  # type: ignore[misc]
    """A transform that adds the features of a batch's nodes and edges, decoded on their device.

    The loader only samples; then the rows of ``batch.n_id``, and of ``batch.e_id`` for edge
    features, are fetched to the device of the training. For a GPU they cross the link packed and
    are decoded there, or come from the cache. All tensors are requested first, then awaited::

        compress_features(data, cache_ratio=0.01)
        fetch = FetchFeatures.detach(data, device="cuda")  # data.x is removed
        for batch in NeighborLoader(data, ...):
            batch = fetch(batch.to("cuda"))  # adds batch.x

    On the CPU, and where the loader has no workers or ``filter_per_worker=False``, it can be the
    loader's ``transform`` too. In worker processes, which must not use a GPU, it fetches to the CPU
    when `device` is left out, and raises an error when `device` is a GPU.

    Parameters
    ----------
    source : Data, HeteroData or CompressedFeatureStore
        Compressed features. Those of a Data or HeteroData are taken at construction: later changes
        of the graph have no effect.
    names : str, list of str, or dict, optional
        What to fetch; as in `compress_features`. When left out: all compressed features, except
        those that a batch has already.
    device : torch.device or str, optional
        Where the rows go; the device of the batch's ids when left out.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When an argument is not accepted, a name is unknown, or nothing is compressed.
    """

    def __init__(
        self,
        source: FeatureSource,
        names: Names = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._device = None if device is None else checked_device(device)
        self._always = names is not None
        if isinstance(source, CompressedFeatureStore):
            self._store: CompressedFeatureStore | None = source
            self._names = names
            self._wanted = self._of_store() if names is not None else []
            return
        check_data(source)
        self._store = None
        columns = compressed_columns(source, names)
        if not columns:
            raise ArgumentError("source: holds no compressed feature; call compress_features first")
        self._wanted = [
            _Wanted(column.type, column.name, column.of_edges, column.value.feature)
            for column in columns
        ]

    @classmethod
    def detach(
        cls,
        data: Data | HeteroData,
        names: Names = None,
        device: torch.device | str | None = None,
    ) -> FetchFeatures:
        """Take compressed features out of a graph, so that a loader does not fetch them.

        Parameters
        ----------
        data : Data or HeteroData
            The graph, which is changed: it loses the features and keeps its number of nodes.
        names, device
            As in `FetchFeatures`.

        Returns
        -------
        FetchFeatures
            The transform that adds them to batches.
        """
        fetch = cls(data, names, device)
        for column in compressed_columns(data, names):
            if not column.of_edges:
                column.store.num_nodes = column.store.num_nodes
            del column.store[column.name]
        return fetch

    def attach(self, data: Data | HeteroData) -> Data | HeteroData:
        """Put features that `detach` took out into a graph again; return the same graph."""
        check_data(data)
        for wanted in self._wanted:
            if isinstance(wanted.source, CompressedFeatureStore):
                raise ArgumentTypeError("attach: these features belong to a feature store")
            store = store_of(data) if isinstance(data, Data) else data[wanted.type]
            store[wanted.name] = FeatureTensor(wanted.source)
        return data

    def forward(self, data: Any) -> Any:
        """Add the features to a batch.

        Parameters
        ----------
        data : Data or HeteroData
            A batch with ``n_id``, and ``e_id`` for edge features, as from PyG's loaders.

        Returns
        -------
        Data or HeteroData
            A shallow copy with the features. Types that the batch does not have are skipped.

        Raises
        ------
        ArgumentError
            When the batch lacks the ids.
        IndexRangeError
            When an id is out of range.
        BitslabError
            When rows go to a GPU in a worker process.
        """
        check_data(data)
        device = self._device
        if device is not None and device.type == "cuda":
            if torch.utils.data.get_worker_info() is not None:
                raise BitslabError(
                    f"FetchFeatures: cannot fetch to {device} in a worker process of a loader; "
                    "call it on the batches that the loader gives, or make the loader with "
                    "filter_per_worker=False, whose transform runs in the training process"
                )
        futures: list[tuple[Any, str, RowsFuture]] = []
        for wanted in self._wanted if self._store is None or self._always else self._of_store():
            store = self._store_in(data, wanted)
            if store is None or (wanted.name in store and not self._always):
                continue
            key = "e_id" if wanted.of_edges else "n_id"
            ids = store.get(key)
            if ids is None:
                raise ArgumentError(
                    f"batch: has no {key} for {wanted.name!r} of {wanted.type!r}, which says "
                    "whose features these are; loaders that sample give it"
                )
            futures.append((store, wanted.name, wanted.fetch(ids, device)))
        for store, name, future in futures:
            store[name] = future.wait()
        return data

    def stats(self) -> dict[Any, dict[str, Any]]:
        """Return `bitslab.CompressedFeature.stats` of each feature, by type and name."""
        if self._store is not None:
            return self._store.stats()
        return {(w.type, w.name): w.source.stats() for w in self._wanted}

    def __repr__(self) -> str:
        """Return the fetched features and their device as text."""
        names = [f"{w.name} of {w.type}" for w in self._wanted] or ["all of the store"]
        where = "where the ids are" if self._device is None else str(self._device)
        return f"FetchFeatures({', '.join(names)}; {where})"

    @staticmethod
    def _store_in(data: Any, wanted: _Wanted) -> Any:
        """Return the store of a batch that the features belong to; None where it has none."""
        if isinstance(data, Data):
            return store_of(data) if wanted.type in ("nodes", "edges") else None
        types = data.edge_types if wanted.of_edges else data.node_types
        return data[wanted.type] if wanted.type in types else None

    def _of_store(self) -> list[_Wanted]:
        """Return the current tensors of the feature store, or the named ones."""
        store = self._store
        assert store is not None
        all_of_it = []
        for attr in [*store.get_all_tensor_attrs(), *store.edge_tensor_attrs()]:
            group, of_edges = attr.group_name, isinstance(attr.group_name, tuple)
            type_ = group
            if group is None or group == (None, None):
                type_ = "edges" if of_edges else "nodes"
            all_of_it.append(_Wanted(type_, attr.attr_name, of_edges, store, group))
        if not self._always:
            return all_of_it
        return _named(all_of_it, self._names)


def _named(there: list[_Wanted], names: Any) -> list[_Wanted]:
    pairs: list[tuple[Any, str]] = []
    groups = names.items() if hasattr(names, "items") else [(None, names)]
    for group, some in groups:
        pairs += [(group, name) for name in ([some] if isinstance(some, str) else some)]
    chosen = []
    for group, name in pairs:
        found = [w for w in there if w.name == name and (group is None or w.type == group)]
        if not found:
            known = [(w.type, w.name) for w in there]
            raise ArgumentError(f"names: {name!r} is not in the store; there are {known}")
        chosen += found
    return chosen
