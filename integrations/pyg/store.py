"""CompressedFeatureStore: a PyG feature store that holds compressed tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch_geometric.data import FeatureStore, TensorAttr

from bitslab import CompressedFeature, RowCodec, hotness
from bitslab.devices import checked_device
from bitslab.dtypes import flat_bytes
from bitslab.errors import ArgumentError, ArgumentTypeError, BitslabError, IndexRangeError
from bitslab.tables import Layout, RowsFuture, row_ids
from bitslab.tensors import FeatureTensor

#: Scores for the rows of every tensor, scores by group, or a function of a TensorAttr.
Scores: TypeAlias = "torch.Tensor | Mapping[Any, torch.Tensor] | Callable[[Any], torch.Tensor]"


class UnknownTensorError(ArgumentError, KeyError):
    """The store has no tensor of this group and name."""

    __str__ = Exception.__str__  # a KeyError shows its message quoted


class _Entry:
    """A tensor of the store.

    Parameters
    ----------
    feature : CompressedFeature
        Its rows.
    ids : torch.Tensor, optional
        int64 ``[N]``, the id of each row; 0 to N - 1 when left out.
    """

    def __init__(self, feature: CompressedFeature, ids: torch.Tensor | None) -> None:
        self.feature = feature
        self.ids = ids
        self.ordered = None if ids is None else torch.sort(ids)

    def numbers(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of the feature, by number, that belong to ids."""
        if self.ordered is None:
            return ids
        here = ids.cpu()
        if not len(self.ordered.values):
            found = torch.zeros(0, dtype=torch.bool)
        else:
            positions = torch.searchsorted(self.ordered.values, here)
            positions.clamp_(max=len(self.ordered.values) - 1)
            found = self.ordered.values[positions] == here
        if len(here) and not (len(found) and bool(found.all())):
            missing = here[~found] if len(found) else here
            raise IndexRangeError(f"index: no row was put for id {int(missing[0])}")
        return self.ordered.indices[positions].to(ids.device) if len(here) else ids


class CompressedFeatureStore(FeatureStore):  # type: ignore[misc]
    """A feature store of PyG that keeps its tensors compressed.

    Use it like any `torch_geometric.data.FeatureStore`, as in
    ``NodeLoader((feature_store, graph_store), sampler, ...)``, homogeneous (``group_name=None``) or
    heterogeneous, with worker processes, which share its memory, or without. All tensors of a batch
    are requested together, then awaited.

    **Edge features** have an edge type as their group; in a homogeneous graph ``(None, None)``,
    as in `torch_geometric.distributed`. PyG's loaders fetch only node features from a feature
    store (they request the rows of the batch's nodes of every tensor that `get_all_tensor_attrs`
    lists, so edge features are not in this list): `FetchFeatures(store)`, as the loader's
    ``transform`` or after it, adds those of the batch's edges, ``batch.e_id``.

    **Index.** ``put_tensor(t, group, name, index=None)`` gives a row for each node. With an index
    (ids ``[n]``, a bool mask or a slice) it replaces those rows of an existing tensor; for a new
    one it gives the ids of the rows. ``get_tensor`` takes None or ``slice(None)`` (all rows: a
    `FeatureTensor`, which decodes rows when they are read), a slice, a tensor or array of ids, a
    bool mask, or an int, which gives one row without the first dimension. ``update_tensor``
    replaces all rows (None) or those of the index. Features never change in place: to replace rows
    the tensor is repacked, so that batches in flight keep the old values.

    Parameters
    ----------
    codec, layout, cache_bytes, cache_ratio, cache_codec, group
        For every tensor that is put; as in `compress_features`.
    device : torch.device or str, optional
        Where rows go, whichever device the ids are on; in a worker process always to the CPU. When
        left out, rows go to the device of the ids, and a cache is on the current GPU, or the CPU
        where there is none.
    hotness : torch.Tensor, mapping or function, optional
        Scores of the rows for the cache: a tensor ``[N]`` for all, a mapping from groups to
        tensors, or a function of a TensorAttr. The order of the rows when left out.
    tensor_attr_cls : type, optional
        A TensorAttr of your own, as in PyG's `FeatureStore`.

    Examples
    --------
    >>> import torch
    >>> from bitslab.integrations.pyg import CompressedFeatureStore
    >>> x = torch.randn(100, 16).round()
    >>> store = CompressedFeatureStore()
    >>> store["paper", "x", None] = x
    >>> torch.equal(store["paper", "x", torch.tensor([4, 2])], x[[4, 2]])
    True
    """

    def __init__(
        self,
        *,
        codec: str | RowCodec = "auto",
        layout: Layout = "compact",
        device: torch.device | str | None = None,
        cache_bytes: int = 0,
        cache_ratio: float = 0.0,
        cache_codec: str | RowCodec | None = None,
        hotness: Scores | None = None,
        group: Any = None,
        tensor_attr_cls: Any = None,
    ) -> None:
        super().__init__(tensor_attr_cls)
        self._device = None if device is None else checked_device(device)
        self._hotness = hotness
        self._options = {
            "codec": codec,
            "layout": layout,
            "device": device,
            "cache_bytes": cache_bytes,
            "cache_ratio": cache_ratio,
            "cache_codec": cache_codec,
            "group": group,
        }
        self._entries: dict[tuple[Any, Any], _Entry] = {}

    # PyG's interface

    def _put_tensor(self, tensor: Any, attr: Any) -> bool:
        key = (attr.group_name, attr.attr_name)
        if isinstance(tensor, np.ndarray):
            tensor = torch.from_numpy(tensor)
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(
                f"tensor: a {type(tensor).__name__}, expected a torch.Tensor or numpy.ndarray"
            )
        if _is_all(attr.index):
            self._entries[key] = _Entry(self._packed(tensor, attr), None)
        elif key in self._entries:
            self._entries[key] = self._with_rows(self._entries[key], tensor, attr)
        else:
            ids = _ids(attr.index, None)
            n_different = len(set(ids.tolist()))
            if len(ids) != len(tensor) or n_different != len(ids):
                raise ArgumentError(
                    f"index: {len(ids)} ids, {n_different} different ones, for {len(tensor)} "
                    "rows; expected one for each"
                )
            self._entries[key] = _Entry(self._packed(tensor, attr), ids)
        return True

    def _get_tensor(self, attr: Any) -> torch.Tensor:
        entry = self._entry(attr)
        if _is_all(attr.index):
            return FeatureTensor(entry.feature)
        rows = self._fetch(entry, attr.index).wait()
        return rows[0] if _is_number(attr.index) else rows

    def _multi_get_tensor(self, attrs: list[Any]) -> list[torch.Tensor]:
        entries = [self._entry(attr) for attr in attrs]
        futures = [
            None if _is_all(attr.index) else self._fetch(entry, attr.index)
            for entry, attr in zip(entries, attrs, strict=True)
        ]
        got: list[torch.Tensor] = []
        for entry, attr, future in zip(entries, attrs, futures, strict=True):
            rows = FeatureTensor(entry.feature) if future is None else future.wait()
            got.append(rows[0] if _is_number(attr.index) else rows)
        return got

    def _remove_tensor(self, attr: Any) -> bool:
        return self._entries.pop((attr.group_name, attr.attr_name), None) is not None

    def update_tensor(self, tensor: Any, *args: Any, **kwargs: Any) -> bool:
        """Replace an existing tensor, or the rows of an index.

        Parameters
        ----------
        tensor : torch.Tensor or numpy.ndarray
            The new rows.
        *args, **kwargs
            As for a TensorAttr: group, name, index.

        Raises
        ------
        UnknownTensorError
            When there is no such tensor; it is a KeyError.
        ArgumentError, ArgumentTypeError, IndexRangeError
            When the rows or the index do not fit; the store is unchanged then.
        """
        attr = self._tensor_attr_cls.cast(*args, **kwargs)
        self._entry(attr)
        return bool(self.put_tensor(tensor, attr))

    def _get_tensor_size(self, attr: Any) -> tuple[int, ...] | None:
        entry = self._entries.get((attr.group_name, attr.attr_name))
        if entry is None:
            return None
        shape = tuple(entry.feature.shape)
        if _is_all(attr.index):
            return shape
        if _is_number(attr.index):
            return shape[1:]
        return (len(_ids(attr.index, shape[0])), *shape[1:])

    def get_all_tensor_attrs(self) -> list[Any]:
        """Return group and name of every node tensor; loaders cannot use those of edges."""
        return [self._attr(*key) for key in self._entries if not _is_edge_group(key[0])]

    # Additions to PyG's interface

    def edge_tensor_attrs(self) -> list[Any]:
        """Return group and name of every edge tensor."""
        return [self._attr(*key) for key in self._entries if _is_edge_group(key[0])]

    def feature(self, group_name: Any, attr_name: str) -> CompressedFeature:
        """Return the feature of a tensor.

        Raises
        ------
        UnknownTensorError
            When there is no such tensor; it is a KeyError.
        """
        return self._entry(TensorAttr(group_name, attr_name)).feature

    def fetch(
        self,
        group_name: Any,
        attr_name: str,
        ids: torch.Tensor,
        device: torch.device | str | None = None,
    ) -> RowsFuture:
        """Start to gather rows; see `bitslab.CompressedFeature.fetch`."""
        entry = self._entry(TensorAttr(group_name, attr_name))
        return entry.feature.fetch(entry.numbers(ids), device)

    def stats(self) -> dict[tuple[Any, Any], dict[str, Any]]:
        """Return `bitslab.CompressedFeature.stats` of every tensor, by group and name."""
        return {key: entry.feature.stats() for key, entry in self._entries.items()}

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._entries)

    def __bool__(self) -> bool:
        """Return True, also for an empty store, as other feature stores do."""
        return True

    def __repr__(self) -> str:
        """Return names and ratios of the tensors as text."""
        held = ", ".join(f"{key}: {e.feature.ratio:.2f}x" for key, e in self._entries.items())
        return f"{type(self).__name__}({held})"

    # Internals

    def _attr(self, group_name: Any, attr_name: Any) -> Any:
        attr = self._tensor_attr_cls()
        attr.group_name, attr.attr_name = group_name, attr_name
        return attr

    def _entry(self, attr: Any) -> _Entry:
        key = (attr.group_name, attr.attr_name)
        if key not in self._entries:
            raise UnknownTensorError(
                f"no tensor {key[1]!r} of group {key[0]!r}; there are {list(self._entries)}"
            )
        return self._entries[key]

    def _fetch(self, entry: _Entry, index: Any) -> RowsFuture:
        ids = entry.numbers(_ids(index, len(entry.feature) if entry.ids is None else None))
        in_worker = torch.utils.data.get_worker_info() is not None
        return entry.feature.fetch(ids, None if in_worker else self._device)

    def _packed(self, tensor: torch.Tensor, attr: Any) -> CompressedFeature:
        if isinstance(tensor, FeatureTensor):
            return tensor.feature

        def order() -> torch.Tensor:
            scores: Any = self._hotness
            if isinstance(scores, Mapping):
                scores = scores.get(attr.group_name)
            elif callable(scores) and not isinstance(scores, torch.Tensor):
                scores = scores(attr)
            if scores is None:
                return torch.arange(len(tensor))
            ids = hotness.by_scores(scores)
            if len(ids) != len(tensor):
                raise ArgumentError(
                    f"hotness: {len(ids)} scores for {len(tensor)} rows of {attr.attr_name!r} of "
                    f"group {attr.group_name!r}"
                )
            return ids

        return CompressedFeature.from_tensor(tensor, hot_ids=order, **self._options)

    def _with_rows(self, entry: _Entry, tensor: torch.Tensor, attr: Any) -> _Entry:
        """Return the entry with other values in some rows."""
        feature = entry.feature
        ids = _ids(attr.index, len(feature) if entry.ids is None else None)
        numbers = entry.numbers(ids).cpu()
        feature.table.check_ids(numbers)
        if tensor.shape != (len(ids), *feature.shape[1:]) or tensor.dtype != feature.dtype:
            raise ArgumentError(
                f"tensor: {tensor.dtype} {list(tensor.shape)}, expected {feature.dtype} "
                f"{[len(ids), *feature.shape[1:]]} for these rows"
            )
        rows = feature.table.decoded(0, len(feature))
        if tensor.requires_grad:
            raise ArgumentError("tensor: requires a gradient, which packed rows cannot take")
        # As bytes: copying numbers may lose the payload of a NaN.
        width = feature.table.row_bytes
        if width and len(ids):
            target = rows.view(len(rows), -1).view(torch.uint8)
            source = flat_bytes(tensor.cpu()).view(len(ids), -1)
            target[numbers] = source
        return _Entry(self._packed(rows, attr), entry.ids)


def _is_all(index: Any) -> bool:
    return index is None or (isinstance(index, slice) and index == slice(None))


def _is_number(index: Any) -> bool:
    if isinstance(index, (torch.Tensor, np.ndarray)):
        return index.ndim == 0 and index.dtype not in (torch.bool, np.bool_)
    return isinstance(index, (int, np.integer))


def _is_edge_group(group_name: Any) -> bool:
    return isinstance(group_name, (tuple, list))


def _ids(index: Any, n_rows: int | None) -> torch.Tensor:
    """Return ids ``[n]`` for an index; `n_rows` bounds slices and masks.

    For None a slice needs a stop, and a mask may have any length.
    """
    if isinstance(index, np.ndarray):
        index = torch.from_numpy(index)
    if _is_number(index):
        return torch.as_tensor(index).reshape(1)
    if n_rows is None:
        if isinstance(index, slice):
            stop = index.stop
            if stop is None or stop < 0 or (index.start or 0) < 0:
                raise ArgumentError(f"index: {index}, expected one with a start and stop from 0")
            n_rows = stop
        elif isinstance(index, torch.Tensor) and index.dtype == torch.bool:
            n_rows = index.numel()
        else:
            n_rows = 0
    try:
        return row_ids(index, n_rows).reshape(-1)
    except (BitslabError, RuntimeError, TypeError) as error:
        if isinstance(error, IndexError):
            raise
        raise ArgumentTypeError(
            f"index: {index!r:.60}, accepted are None, ids, a bool mask, a slice or an int: {error}"
        ) from error
