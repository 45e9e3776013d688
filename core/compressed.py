"""CompressedTensor, `compress`, and files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, SupportsIndex, TypeAlias, overload

import numpy as np
import torch

from .compressed_base import Compressed
from .compressed_blob import CompressedBlob
from .container import read_tensors, write_tensors
from .container_parts import PartCheck
from .engine.codecs import BlobCodec, InvariantCodec, PackedRows, RawCodec, RowCodec
from .engine.codecs.base import (
    check_indices_argument,
    check_out_argument,
    elements,
    index_tensor,
    raise_bad_index,
)
from .engine.codecs.registry import fit_codec, get_codec
from .engine.files.new_file import PathLike, replacing
from .engine.kernels.format import MAX_ROW_BYTES
from .engine.row_map import MIN_ROW_BYTES, as_rows, natural_row_elements, row_map
from .errors import ArgumentError, ArgumentTypeError
from .options import check_path

Index = SupportsIndex | slice | torch.Tensor | Sequence[Any] | np.ndarray[Any, Any]


class CompressedTensor(Compressed):
    """A tensor in packed rows, of which any can be decoded alone.

    Made by `compress` and `load`. Rows are those of the codec; items, which `ct[i]` returns, are
    those of the first dimension.

    Parameters
    ----------
    codec : RowCodec
        What packed the rows.
    packed : PackedRows
        The packed rows.
    shape : sequence of int
        Shape of the tensor.

    Attributes
    ----------
    codec, packed
        The arguments.
    shape : torch.Size
        Shape of the tensor.

    Raises
    ------
    ArgumentError
        When `shape` does not fit the codec's rows or their number.

    Notes
    -----
    Immutable; threads may share it.

    Examples
    --------
    >>> import torch, bitslab
    >>> weight = torch.randn(256, 512).bfloat16()
    >>> ct = bitslab.compress(weight)
    >>> ct.nbytes < ct.raw_nbytes
    True
    >>> torch.equal(ct[10:20], weight[10:20])
    True
    >>> torch.equal(ct.decompress(), weight)
    True
    """

    def __init__(self, codec: RowCodec, packed: PackedRows, shape: Sequence[int]) -> None:
        self.codec: RowCodec = codec
        self.packed = packed
        self._shape = torch.Size(shape)
        self._rows = row_map(self.shape, elements(codec.row_shape))
        if packed.n_rows != self._rows.n_rows:
            raise ArgumentError(
                f"shape: {list(shape)} makes {self._rows.n_rows} rows of {list(codec.row_shape)}, "
                f"there are {packed.n_rows}"
            )

    # What it is

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self.codec.dtype

    @property
    def device(self) -> torch.device:
        """Device of the packed rows, and of what is decoded from them."""
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """Bytes of everything: packed rows, their offsets and lengths, and the profile."""
        return self.packed.nbytes + self.codec.profile_bytes

    # Decoding

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Decode items of the first dimension, and only the rows that hold them.

        Parameters
        ----------
        index : int, slice, torch.Tensor, numpy.ndarray or sequence of int
            An item, a range with any step, integers of any shape (int64, int32, int16, int8 or
            uint8; uint8 are numbers, not a mask), or a bool mask ``[len(self)]``. Negative ones
            count from the end.

        Returns
        -------
        torch.Tensor
            What the tensor itself would return, on `device`.

        Raises
        ------
        IndexRangeError
            When an item does not exist. With indices on a GPU the error comes later, because
            decoding never waits for the GPU (see `InvariantCodec.decode`).
        ArgumentTypeError
            For several indices, ``...``, ``None``, and other dtypes.

        Notes
        -----
        A mask on a GPU waits for the GPU once, to count its items.
        """
        if not self.shape:
            raise ArgumentTypeError("index: a 0-d tensor has no items; use decompress()")
        if isinstance(index, slice):
            picked = range(*index.indices(len(self)))
            rows = self._rows
            if picked.step == 1 and rows.items_per_row == 1:
                begin, end = (n * rows.rows_per_item for n in (picked.start, picked.stop))
                part = self.codec.decode(self.packed, start=begin, stop=max(begin, end))
                return part.view(len(picked), *self.shape[1:])
            ids = torch.arange(len(picked), device=self.device) * picked.step + picked.start
            return self._items(ids)
        if isinstance(index, (tuple, type(None), type(...), bool, str)):
            raise ArgumentTypeError(
                f"index: {index!r} is not accepted, only the first dimension can be indexed, "
                "by an int, a slice, integers or a mask; index the result for the others"
            )
        if not isinstance(index, torch.Tensor):
            index = index_tensor(index, len(self))
        if index.dtype == torch.bool:
            if index.shape != self.shape[:1]:
                raise ArgumentError(
                    f"index: mask of shape {list(index.shape)}, expected {[len(self)]}"
                )
            index = index.nonzero()[:, 0]
        ids = check_indices_argument(index.reshape(-1))
        if self.device.type == "cpu":
            ids = ids.cpu()
        if ids.device.type == "cpu" and ids.numel():
            low, high = (int(x) for x in ids.aminmax())
            if low < -len(self) or high >= len(self):
                position = int(((ids < -len(self)) | (ids >= len(self))).nonzero()[0])
                raise_bad_index(int(ids[position]), position, len(self))
        return self._items(ids.to(self.device)).view((*index.shape, *self.shape[1:]))

    def _items(self, ids: torch.Tensor) -> torch.Tensor:
        """Decode items by int64 ``[n]`` numbers, which may be negative; on the GPU, unchecked."""
        rows, shape = self._rows, (ids.shape[0], *self.shape[1:])
        if rows.items_per_row == 1:
            if rows.rows_per_item > 1:  # holds for negative numbers too
                steps = torch.arange(rows.rows_per_item, device=ids.device)
                ids = (ids[:, None] * rows.rows_per_item + steps).view(-1)
            return self.codec.decode(self.packed, ids).view(shape)
        bad = (ids < -rows.n_items) | (ids >= rows.n_items)
        ids = torch.where(ids < 0, ids + rows.n_items, ids)
        # An item that lies in the filler does not exist: its row must not exist either.
        row_ids = torch.where(bad, rows.n_rows, ids // rows.items_per_row)
        if ids.shape[0] < rows.n_rows:
            items = self.codec.decode(self.packed, row_ids)
            first = torch.arange(ids.shape[0], device=ids.device) * rows.items_per_row
            ids = first + ids % rows.items_per_row
        else:
            if ids.is_cuda:  # reports a bad number, which the clamp below hides
                self.codec.decode(self.packed, row_ids.amax().view(1))
            items = self.decompress()
            ids = ids.clamp(0, rows.n_items - 1)
        # As bytes, because not every dtype can be indexed.
        item_bytes = elements(self.shape[1:]) * self.dtype.itemsize
        picked = items.view(-1).view(torch.uint8).view(-1, item_bytes)[ids]
        return picked.view(-1).view(self.dtype).view(shape)

    def decompress(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Decode the whole tensor.

        Parameters
        ----------
        out : torch.Tensor, optional
            Tensor of the same shape and dtype to write to, on `device`, or on a GPU when the
            packed rows are in host memory: then they cross the link packed.

        Returns
        -------
        torch.Tensor
            `out`, or a new tensor on `device`; equal to what was compressed, bit for bit.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            When `out` has another shape, dtype or device, or shares memory with the packed rows
            or with itself.
        CorruptedDataError
            When packed rows are damaged; `out` is untouched on the CPU.
        """
        rows = self._rows
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        else:
            sources = list(self.packed.parts.values())
            across = isinstance(out, torch.Tensor) and out.is_cuda and self.device.type == "cpu"
            target = out.device if across else self.device
            check_out_argument(out, self.shape, self.dtype, target, sources)
        if not out.is_contiguous():
            return out.copy_(self.decompress(torch.empty_like(out, memory_format=_CONTIGUOUS)))
        flat = out.detach().view(-1)
        if not rows.filler_items:
            self.codec.decode(self.packed, out=flat.view(rows.n_rows, *self.codec.row_shape))
            return out
        # The last row does not fit. It comes first, so that nothing is written if it is damaged.
        whole = rows.n_rows - 1
        end = whole * elements(self.codec.row_shape)
        last = torch.empty((1, *self.codec.row_shape), dtype=self.dtype, device=out.device)
        self.codec.decode(self.packed, out=last, start=whole)
        head = flat[:end].view(whole, *self.codec.row_shape)
        self.codec.decode(self.packed, out=head, stop=whole)
        flat[end:] = last.view(-1)[: flat.shape[0] - end]
        return out

    # Moving and keeping

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> CompressedTensor:
        """Return the tensor with its packed rows on `device`; no copy when they are there already.

        Parameters
        ----------
        device : torch.device or str
            CPU or CUDA device.
        non_blocking : bool
            Do not wait for a copy from page-locked memory.
        """
        packed = self.packed.to(device, non_blocking=non_blocking)
        return CompressedTensor(self.codec, packed, self.shape)

    def _pinned(self) -> CompressedTensor:
        return CompressedTensor(self.codec, self.packed.pin_memory(), self.shape)


_CONTIGUOUS = torch.contiguous_format

AnyCompressed: TypeAlias = CompressedTensor | CompressedBlob


@overload
def compress(
    tensor: torch.Tensor,
    codec: RowCodec | Literal["auto", "ibp", "raw", "tiles"] = ...,
    *,
    seed: int = ...,
    **options: Any,
) -> CompressedTensor: ...


@overload
def compress(
    tensor: torch.Tensor,
    codec: BlobCodec | Literal["csr", "ibp-blob", "lz4", "rle", "zfp", "zvc", "zvc+ibp"],
    *,
    seed: int = ...,
    **options: Any,
) -> CompressedBlob: ...


@overload
def compress(
    tensor: torch.Tensor, codec: str, *, seed: int = ..., **options: Any
) -> AnyCompressed: ...


def compress(
    tensor: torch.Tensor,
    codec: str | RowCodec | BlobCodec = "auto",
    *,
    seed: int = 0,
    **options: Any,
) -> AnyCompressed:
    """Compress a tensor of any shape and dtype; without loss, unless a lossy codec is named.

    Parameters
    ----------
    tensor : torch.Tensor
        Any dense tensor on a CPU or GPU; where it is not contiguous, a copy is packed. Weights
        ``[out, in]``, embeddings ``[N, D]`` and K/V ``[B, H, T, D]`` go as they are, in rows of
        their last dimension (see `natural_row_elements`).
    codec : str, RowCodec or BlobCodec
        ``"auto"``: invariant bit packing with a plan for this tensor, or raw where that is not
        smaller, so never larger than the tensor. A name (see `codec_names`): that codec, fitted
        to this tensor. A codec: that one, as it is; it must fit the tensor's dtype and rows.
        A codec of rows keeps an empty tensor raw.
    seed : int
        Seed of the sample that a codec is fitted on.
    **options
        Options of the codec's `fit`; with ``"auto"``, those of `InvariantCodec.fit`. For many
        tensors that are alike, ``plans=PlanCache()`` (`bitslab.engine.codecs`) spares most of the
        planning.

    Returns
    -------
    CompressedTensor or CompressedBlob
        On the tensor's device; a `CompressedBlob` by a codec of whole tensors, such as ``"zvc"``,
        whose `encode` is waited for to learn the size.

    Raises
    ------
    ArgumentTypeError
        When `tensor` is no tensor, is sparse, quantised or on the meta device, or `codec` is of
        another dtype.
    ArgumentError
        When no codec has the name, `codec` does not fit the rows, or an option is out of range.

    Examples
    --------
    >>> import torch, bitslab
    >>> kv = torch.randn(2, 8, 100, 64).bfloat16()
    >>> ct = bitslab.compress(kv)
    >>> torch.equal(bitslab.decompress(ct), kv)
    True
    """
    _check_tensor(tensor)
    if isinstance(codec, RowCodec):
        return _with_codec(tensor, codec, options)
    if isinstance(codec, BlobCodec):
        _check_no_options(options)
        return CompressedBlob(codec, codec.encode(tensor).trimmed())
    if not isinstance(codec, str):
        raise ArgumentTypeError(f"codec: expected a name or a codec, got {type(codec).__name__}")
    cls = InvariantCodec if codec == "auto" else get_codec(codec)
    if issubclass(cls, BlobCodec):
        whole = fit_codec(cls, tensor, options, seed=seed)
        return CompressedBlob(whole, whole.encode(tensor).trimmed())
    raw = _raw_codec(tensor)
    if cls is RawCodec:
        return _encode(tensor, RawCodec.fit(_items_of(tensor), **options))
    row_elements = natural_row_elements(tensor.shape, tensor.dtype.itemsize)
    too_long = codec == "auto" and row_elements * tensor.dtype.itemsize > MAX_ROW_BYTES
    if tensor.numel() == 0 or too_long:
        return _encode(tensor, raw)
    rows = row_map(tensor.shape, row_elements)
    sample = as_rows(tensor, rows, (row_elements,))
    fitted = fit_codec(cls, sample, options, seed=seed, n_rows=rows.n_rows)
    ct = CompressedTensor(fitted, fitted.encode(sample), tensor.shape)
    if codec == "auto" and ct.nbytes >= ct.raw_nbytes:
        return _encode(tensor, raw)
    return ct


def decompress(ct: AnyCompressed, out: torch.Tensor | None = None) -> torch.Tensor:
    """Decode a compressed tensor; see `CompressedTensor.decompress`."""
    if not isinstance(ct, AnyCompressed):
        raise ArgumentTypeError(f"ct: expected a CompressedTensor, got {type(ct).__name__}")
    return ct.decompress(out)


def _check_tensor(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"tensor: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ArgumentTypeError(f"tensor: layout {tensor.layout}; only dense tensors are accepted")
    if tensor.is_quantized:
        raise ArgumentTypeError(f"tensor: quantised {tensor.dtype}; pass tensor.int_repr()")
    if tensor.is_meta:
        raise ArgumentTypeError("tensor: on the meta device, it has no data")


def _items_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() else tensor.reshape(1)


def _raw_codec(tensor: torch.Tensor) -> RawCodec:
    return RawCodec(tuple(tensor.shape[1:]), tensor.dtype)


def _encode(tensor: torch.Tensor, codec: RowCodec) -> CompressedTensor:
    rows = row_map(tensor.shape, elements(codec.row_shape))
    packed = codec.encode(as_rows(tensor, rows, codec.row_shape))
    return CompressedTensor(codec, packed, tensor.shape)


def _check_no_options(options: Mapping[str, Any]) -> None:
    if options:
        raise ArgumentTypeError(f"options: {sorted(options)} are for fitting, this codec is fitted")


def _with_codec(tensor: torch.Tensor, codec: RowCodec, options: dict[str, Any]) -> CompressedTensor:
    """Compress with a codec that is fitted already."""
    _check_no_options(options)
    if tensor.dtype != codec.dtype:
        raise ArgumentTypeError(
            f"tensor: dtype {tensor.dtype}, the codec was fitted for {codec.dtype}"
        )
    item = elements(tensor.shape[1:])
    natural = natural_row_elements(tensor.shape, tensor.dtype.itemsize)
    fitted = elements(codec.row_shape)
    # Where items share a row, how many do is free.
    shared = item * tensor.dtype.itemsize < MIN_ROW_BYTES and item and fitted % item == 0
    if fitted not in (natural, item) and not shared:
        raise ArgumentError(
            f"tensor: shape {list(tensor.shape)} makes rows of {natural} elements, or {item} for "
            f"whole items; the codec was fitted for {list(codec.row_shape)}, {fitted} elements"
        )
    return _encode(tensor, codec if tensor.numel() else _raw_codec(tensor))


# Files


def save_file(
    tensors: Mapping[str, AnyCompressed],
    path: PathLike,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write compressed tensors to a file.

    Parameters
    ----------
    tensors : mapping of str to CompressedTensor or CompressedBlob
        On any device.
    path : str or os.PathLike
        Written under another name in the same folder and then renamed, so that it is the whole
        file or, after an error, what it was before.
    metadata : mapping of str to str, optional
        Kept in the file's metadata, where any reader of safetensors finds it.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When a name or metadata key cannot be stored, or an argument is of another type.
    OSError
        When the file cannot be written.

    Notes
    -----
    The same tensors and metadata give the same bytes, in every process. A process that is killed
    leaves a file ``.*.bitslab-tmp`` behind, which the next save into that folder removes.

    Examples
    --------
    >>> import bitslab, torch
    >>> cts = {"a": bitslab.compress(torch.zeros(100, 64)), "b": bitslab.compress(torch.ones(3))}
    >>> bitslab.save_file(cts, "both.safetensors", {"model": "example"})  # doctest: +SKIP
    """
    check_path(path)
    with replacing(path) as temporary:
        write_file(tensors, temporary, metadata)


def write_file(
    tensors: Mapping[str, AnyCompressed],
    path: PathLike,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write compressed tensors straight to `path`; the part of `save_file` that is not atomic."""
    if not isinstance(tensors, Mapping):
        raise ArgumentTypeError(
            f"tensors: expected compressed tensors by name, got {type(tensors).__name__}"
        )
    for name, ct in tensors.items():
        if not isinstance(ct, AnyCompressed):
            raise ArgumentTypeError(
                f"tensors: {name!r} is a {type(ct).__name__}, expected a CompressedTensor"
            )
    write_tensors(path, tensors, metadata)


@dataclass(frozen=True)
class CompressedFile:
    """What a file holds.

    Parameters
    ----------
    tensors : dict of str to CompressedTensor or CompressedBlob
        By name, in the order in which they were saved.
    metadata : dict of str to str
        The caller's metadata.
    """

    tensors: dict[str, AnyCompressed]
    metadata: dict[str, str] = field(default_factory=dict)


def load(path: PathLike) -> AnyCompressed:
    """Read the one compressed tensor of a file.

    Parameters
    ----------
    path : str or os.PathLike
        As `CompressedTensor.save` wrote it.

    Returns
    -------
    CompressedTensor or CompressedBlob
        On the CPU, its packed rows, or its buffer, memory-mapped from the file.

    Raises
    ------
    CorruptedDataError
        When the file is truncated, altered, written by a newer version, or not by bitslab.
    ArgumentError
        When the file holds several tensors, or none.
    OSError
        When the file cannot be read.
    MissingExtraError
        When safetensors is not installed.
    """
    tensors = load_file(path)
    if len(tensors) != 1:
        raise ArgumentError(
            f"{os.fspath(path)}: holds {len(tensors)} tensors; load_file returns all by name"
        )
    return next(iter(tensors.values()))


def load_file(path: PathLike) -> dict[str, AnyCompressed]:
    """Read all compressed tensors of a file.

    Parameters
    ----------
    path : str or os.PathLike
        As `save_file` wrote it.

    Returns
    -------
    dict of str to CompressedTensor or CompressedBlob
        On the CPU, their packed rows memory-mapped from the file. Every byte is read once, to
        compare the checksums.

    Raises
    ------
    CorruptedDataError
        When the file is truncated, altered, written by a newer version, or not by bitslab.
    OSError
        When the file cannot be read.
    MissingExtraError
        When safetensors is not installed.
    """
    return read_file(path).tensors


def read_file(
    path: PathLike,
    each: Callable[[Callable[[str], AnyCompressed], Iterable[str]], Iterable[AnyCompressed]] = map,
    later: dict[str, list[PartCheck]] | None = None,
) -> CompressedFile:
    """Read all compressed tensors of a file and the caller's metadata; see `load_file`.

    `each` calls a function with each name, as `map`, maybe in several threads. `later` gets for
    each tensor the comparisons of checksums that take long, for the caller to make, who also
    decodes all rows: damaged ones are found then.
    """
    check_path(path)
    return CompressedFile(*read_tensors(path, CompressedTensor, each, CompressedBlob, later))
