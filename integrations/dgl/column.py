"""CompressedColumn: replaces a feature column in a frame of DGL."""

from __future__ import annotations

import copy
from typing import Any

import torch
from dgl.frame import Column, LazyFeature, _LazyIndex

from bitslab import ArgumentError, ArgumentTypeError, CompressedFeature, hotness
from bitslab.devices import checked_device
from bitslab.integrations.dgl.column_tensor import ColumnTensor, column_tensor
from bitslab.tables import check_not_from_end

_MISSING = object()


class CompressedColumn(Column):  # type: ignore[misc]
    """A column of a frame of DGL whose rows are packed in a `bitslab.CompressedFeature`.

    A column of DGL is a storage, with an optional index, device and dtype that are applied when
    its data are first read. Here the storage is the feature: the rows of a subgraph are gathered
    from the packed table when they are read, to the device of the column, and no others are
    decoded. From then on the column holds a tensor of its own and is a plain `dgl.frame.Column`,
    as is one that is written to.

    Parameters
    ----------
    storage : CompressedFeature
        The rows, ``[N, *row_shape]``.
    scheme, index, device, deferred_dtype
        As in `dgl.frame.Column`.

    Notes
    -----
    Clones and subcolumns share the feature. ``graph.ndata["feat"]`` returns all rows of a full
    column as a `ColumnTensor`, which is read-only: its shape, dtype and length come without
    decoding, ``graph.ndata["feat"][ids]`` decodes those rows alone. Reading all values decodes
    them once and keeps them with the feature; `feature_stats` gives the bytes of that copy, and a
    DecodedCopyWarning does where they are 1 MiB or more.
    """

    # Attributes of DGL's columns in addition to the storage.
    scheme: Any
    index: Any
    device: Any
    deferred_dtype: torch.dtype | None

    # Invariant: the storage is a CompressedFeature, or None while DGL moves a subcolumn between
    # processes without it. Setting a tensor, as DGL's own code does, makes the column a plain one.
    @property
    def storage(self) -> Any:
        """The CompressedFeature that holds the rows; None while pickled for another process."""
        return self.__dict__["storage"]

    @storage.setter
    def storage(self, value: Any) -> None:
        if not isinstance(value, (CompressedFeature, torch.Tensor, type(None))):
            raise ArgumentTypeError(
                f"storage: expected a CompressedFeature, got {type(value).__name__}"
            )
        self.__dict__["storage"] = value
        if isinstance(value, torch.Tensor):
            self.__class__ = Column

    # Reading

    @Column.data.getter  # type: ignore[untyped-decorator]
    def data(self) -> Any:
        """Return the rows ``[n, *row_shape]``; reading them makes this a plain column.

        All rows of the feature are returned as a `ColumnTensor` instead, which decodes the rows
        that are read, and the column remains compressed.
        """
        target = None if self.device is None else torch.device(self.device[0])
        on_host = target is None or target.type == "cpu"
        if self.index is None and on_host and self.deferred_dtype is None:
            self.device = None
            return column_tensor(self.storage)
        dtype = self.dtype
        ids = self._ids()
        rows = self._rows_with_gradient(ids, target)
        if rows is None:
            rows = self.storage.gather(ids, device=target)
        rows = rows.to(dtype)
        self.data = rows
        return rows

    def __getitem__(self, rowids: torch.Tensor) -> torch.Tensor:
        """Return rows by id; no others are decoded."""
        rows: torch.Tensor = self.subcolumn(rowids).data
        return rows

    def fetch(
        self,
        indices: torch.Tensor,
        device: torch.device | str,
        pin_memory: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Start to gather rows for DGL's loaders, and return at once.

        Parameters
        ----------
        indices : torch.Tensor
            Integers ``[n]``, on a CPU or GPU.
        device : torch.device or str
            Where the rows go. Packed rows cross the link and are decoded there.
        pin_memory : bool
            Rows on the CPU: put them into page-locked memory.
        **kwargs
            Accepted as by DGL's storages; copies are asynchronous anyway.

        Returns
        -------
        RowsFuture
            ``wait()`` returns rows ``[n, *row_shape]``. DGL requests all columns of a batch before
            it waits for the first, so they load together. A column that `to` moved elsewhere
            returns a tensor, as DGL does, and so does one whose rows, as ``graph.ndata["feat"]``
            returns them, require a gradient.

        Raises
        ------
        IndexRangeError
            When an id on the CPU is out of range.

        Notes
        -----
        The option ``gpu_cache`` of DGL's loader waits for nothing, so it cannot be used for this
        column; `compress_features` has caches of its own, of packed rows.
        """
        if self.device is not None:
            # Moved by `to`: decoded there once, as DGL moves a whole column once.
            _ = self.data
            return self.fetch(indices, device, pin_memory=pin_memory, **kwargs)
        # Rows of a subgraph: only the requested ones are decoded.
        index = None if self.index is None else self._ids()
        ids = indices if index is None else indices.to(index.device)
        # Tables count negative ids from the end; DGL refuses them.
        check_not_from_end(ids, len(self), "indices")
        if index is not None:
            ids = index[ids.long()]
        target = checked_device(device)
        tensor = self._rows_with_gradient(ids, target)
        if tensor is not None:
            return tensor.to(self.dtype)
        rows = self.storage.fetch(ids, target, pin_memory=pin_memory)
        return rows if self.deferred_dtype is None else _Converted(rows, self.deferred_dtype)

    def _rows_with_gradient(
        self, ids: torch.Tensor, device: torch.device | None
    ) -> torch.Tensor | None:
        """Return rows whose gradients reach the tensor that `data` returned, if that takes them.

        Otherwise None: rows from the packed table have no gradient.
        """
        leaf = self.storage.leaf
        if leaf is None:
            return None
        rows: torch.Tensor = leaf[ids.to("cpu").long()]
        return rows.to(ids.device if device is None else device)

    def _ids(self) -> torch.Tensor:
        """Return the ids of the feature's rows that this column has."""
        if self.index is None:
            return torch.arange(len(self.storage))
        if isinstance(self.index, _LazyIndex):
            self.index = self.index.flatten()
        ids: torch.Tensor = self.index
        check_not_from_end(ids, len(self.storage), "rowids")
        return ids

    # Columns made of this one. DGL makes plain columns around any storage.

    def clone(self) -> Any:
        """Return a column of the same feature."""
        return self._compressed(super().clone())

    def subcolumn(self, rowids: torch.Tensor) -> Any:
        """Return a column of some rows ``[n]`` of this one; nothing is decoded yet."""
        if self.index is not None:
            check_not_from_end(rowids, len(self), "rowids")  # DGL looks them up at once
        return self._compressed(super().subcolumn(rowids))

    def deepclone(self) -> Any:
        """Return a column with a copy of the feature, or of the rows of a subcolumn."""
        if self._is_full():
            return CompressedColumn(copy.deepcopy(self.storage), self.scheme)
        return Column(self.data.clone(), self.scheme)

    def to(self, device: torch.device | str, **kwargs: Any) -> Any:
        """Return a column whose rows go to a device when they are read; nothing is decoded yet."""
        column = super().to(device, **kwargs)
        if torch.device(device).type == "cpu" and not _on_gpu(self.index):
            # Packed rows are decoded to the CPU anyway. With a device set DGL would copy the whole
            # column, and scripts call `graph.to(device)` without a GPU too.
            column.device = None
        return column

    def astype(self, new_dtype: torch.dtype) -> Any:
        """Return a column whose rows are converted when they are read."""
        column = self.clone()
        if column.deferred_dtype is not None and column.dtype != new_dtype:
            _ = column.data  # one conversion after the other
            return column.astype(new_dtype)
        if column.dtype != new_dtype:
            column.deferred_dtype = new_dtype
        return column

    @staticmethod
    def _compressed(column: Any) -> Any:
        column.__class__ = CompressedColumn
        return column

    # Memory

    def pin_memory_(self) -> None:
        """Do nothing: tables page-lock their rows where there is a GPU."""

    def record_stream(self, stream: Any) -> None:
        """Record that a stream uses the index; packed rows are not in GPU memory."""
        if _on_gpu(self.index):
            self.index.record_stream(stream)

    # Pickling

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a full column by its feature, which worker processes share; read any other."""
        if self.storage is not None and not (self.index is None and self.device is None):
            _ = self.data  # makes this a plain column
        return object.__reduce_ex__(self, protocol)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # DGL refuses a column without storage that has a deferred dtype; this one may have one.
        deferred_dtype = state["deferred_dtype"]
        super().__setstate__({**state, "deferred_dtype": None})
        self.deferred_dtype = deferred_dtype

    def __repr__(self) -> str:
        """Return the feature's repr; nothing is decoded."""
        rows = "" if self.index is None else f"{len(self)} rows of "
        return f"CompressedColumn({rows}{self.storage!r})"

    def _is_full(self) -> bool:
        return self.index is None and self.device is None and self.deferred_dtype is None


def _on_gpu(index: Any) -> bool:
    """Return whether any tensor of a column's index is on a GPU."""
    indices = index._indices if isinstance(index, _LazyIndex) else [index]
    return any(t is not None and t.device.type != "cpu" for t in indices)


class _Converted:
    """Requested rows, converted once they are gathered."""

    def __init__(self, rows: Any, dtype: torch.dtype) -> None:
        self._rows = rows
        self._dtype = dtype

    def wait(self) -> torch.Tensor:
        """Return the rows."""
        return self._rows.wait().to(self._dtype)  # type: ignore[no-any-return]


def why_raw(column: Any, *, any_dtype: bool = False) -> str:
    """Return why a column is not compressed without being named; "" when it can be.

    Parameters
    ----------
    column : dgl.frame.Column or dgl.frame.LazyFeature
        An entry of a frame.
    any_dtype : bool
        Whether columns of other dtypes than floating-point and complex ones are accepted.
    """
    if isinstance(column, LazyFeature):
        return "is a placeholder that a loader fills"
    if isinstance(column, CompressedColumn):
        return "is compressed already"
    if not isinstance(column.storage, torch.Tensor):
        return f"holds a {type(column.storage).__name__}, not a tensor"
    if column.storage.requires_grad:
        return "requires a gradient, which packed rows cannot take; detach() it first"
    where = column.storage.device if column.device is None else torch.device(column.device[0])
    if where.type != "cpu":
        return f"is on {where}; compress it before it is moved there"
    if column.storage.layout is not torch.strided:
        return f"is sparse ({column.storage.layout})"
    if not any_dtype and not (column.dtype.is_floating_point or column.dtype.is_complex):
        return f"is {column.dtype}: only floating-point columns are compressed without being named"
    return ""


def compress_column(
    column: Any,
    *,
    device: torch.device | str | None = None,
    layout: str = "compact",
    cache_bytes: int = 0,
    cache_ratio: float = 0.0,
    hotness: torch.Tensor | None = None,
    codec: Any = "auto",
    cache_codec: Any = None,
    group: Any = None,
) -> Any:
    """Compress a column where it is: ``graph.get_node_storage("feat").compress()``.

    This is `dgl.frame.Column.compress` once ``bitslab.integrations.dgl`` is imported, the line of
    the published artifact of IBP. `compress_features` does the same for many columns, and finds
    the hot rows by itself.

    Parameters
    ----------
    device, layout, cache_bytes, cache_ratio, codec, cache_codec, group
        As in `bitslab.CompressedFeature.from_tensor`.
    hotness : torch.Tensor, optional
        Real numbers ``[N]``: how often each row is requested. A cache needs them, because a column
        does not know its graph.

    Returns
    -------
    CompressedColumn
        The same object. A compressed column is returned unchanged.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When the column is not on the CPU or requires a gradient, when an argument is not accepted,
        or when one is given for a column that is compressed already. The column is unchanged then.
    """
    if isinstance(column, CompressedColumn):
        other = {"device": device is not None, "layout": layout != "compact"}
        other |= {"cache_bytes": bool(cache_bytes), "cache_ratio": bool(cache_ratio)}
        other |= {"hotness": hotness is not None, "codec": codec != "auto"}
        other |= {"cache_codec": cache_codec is not None, "group": group is not None}
        given = ", ".join(name for name, is_given in other.items() if is_given)
        if given:
            raise ArgumentError(
                "compress: this column is compressed already; decompress_features(graph) makes it "
                f"plain, to compress it with other {given}"
            )
        return column
    reason = why_raw(column, any_dtype=True)
    if reason:
        raise ArgumentError(f"compress: this column {reason}")
    if hotness is None and (cache_bytes or cache_ratio):
        raise ArgumentError(
            "hotness: a cache needs scores [N], because a column does not know its graph; "
            "bitslab.integrations.dgl.compress_features knows the degrees"
        )
    tensor = plain_rows(column)
    feature = CompressedFeature.from_tensor(
        tensor,
        device=device,
        layout=layout,  # type: ignore[arg-type]
        cache_bytes=cache_bytes,
        cache_ratio=cache_ratio,
        hot_ids=None if hotness is None else hot_ids(hotness, tensor.shape[0], "hotness"),
        codec=codec,
        cache_codec=cache_codec,
        group=group,
    )
    return put_feature(column, feature)


def plain_rows(column: Any) -> torch.Tensor:
    """Return the rows of a plain column to pack; those of a ColumnTensor are decoded, not kept."""
    rows: torch.Tensor = column.data
    return rows.clone() if isinstance(rows, ColumnTensor) else rows


def hot_ids(scores: Any, n_rows: int, name: str) -> torch.Tensor:
    """Return ids by scores ``[n_rows]``, the highest first; refuse other shapes."""
    if not isinstance(scores, torch.Tensor):
        raise ArgumentTypeError(f"{name}: expected a tensor, got {type(scores).__name__}")
    if tuple(scores.shape) != (n_rows,):
        raise ArgumentError(
            f"{name}: {list(scores.shape)}, expected one score for each row, {[n_rows]}"
        )
    return hotness.by_scores(scores)


def put_feature(column: Any, feature: CompressedFeature) -> Any:
    """Turn a plain column, whose data were read, into one of a feature with the same rows."""
    column.unpin_memory_()
    column.__class__ = CompressedColumn
    column.__dict__["storage"] = feature
    return column


# The only change to DGL.

_before: Any = _MISSING


def attach() -> None:
    """Add the method `compress` to `dgl.frame.Column`; doing so again changes nothing."""
    global _before
    if Column.__dict__.get("compress") is not compress_column:
        _before = Column.__dict__.get("compress", _MISSING)
        Column.compress = compress_column


def detach() -> None:
    """Remove the method and restore what was there before; columns remain compressed."""
    global _before
    if Column.__dict__.get("compress") is not compress_column:
        return
    if _before is _MISSING:
        del Column.compress
    else:
        Column.compress = _before
    _before = _MISSING
