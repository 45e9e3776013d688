"""The contract of a row codec, and what its `encode` returns.

Compatibility law: bytes that a codec wrote can be read under its name for ever. A change of them
gets a new codec name or a new format version, never a silent change.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from ...devices import checked_device
from ...dtypes import flat_bytes
from ...errors import ArgumentError, ArgumentTypeError, IndexRangeError
from ..kernels.row_kernels import RowKernels

_INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows packed by a codec: plain tensors that only the codec can read.

    Parameters
    ----------
    n_rows : int
        Number of rows.
    parts : mapping of str to torch.Tensor
        The packed data and its per-row metadata, all on one device.
    facts : mapping of str to int
        Sizes that the codec knows without looking at `parts` again.
    """

    n_rows: int
    parts: Mapping[str, torch.Tensor]
    facts: Mapping[str, int] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Device of all parts."""
        return next(iter(self.parts.values())).device

    @property
    def nbytes(self) -> int:
        """Bytes of all parts: packed rows, offsets, lengths and cluster ids."""
        return sum(t.nbytes for t in self.parts.values())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedRows:
        """Return the packed rows on `device`; no copy when they are there already."""
        device = checked_device(device)
        parts = {k: t.to(device, non_blocking=non_blocking) for k, t in self.parts.items()}
        return PackedRows(self.n_rows, parts, self.facts)

    def pin_memory(self) -> PackedRows:
        """Return a copy in page-locked host memory, from where a GPU reads at the link's rate."""
        parts = {k: t.pin_memory() for k, t in self.parts.items()}
        return PackedRows(self.n_rows, parts, self.facts)


class RowCodec(ABC):
    """Packs rows of one shape and dtype; any row can be decoded alone.

    `fit` and the abstract methods are enough for `bitslab.compress` and files. What tables,
    caches, histories of K and V and streams of weights need of a codec they ask of `kernels`, whose
    rows are words; `WordRowCodec` makes these methods of its kernels.

    A codec is immutable: fitting makes a new one. It has no global state, so threads may share it.

    The law of a lossless codec: ``decode(encode(rows))`` equals `rows` bit for bit, NaN payloads,
    signed zeros and subnormals included, for every input of the right shape and dtype, whether or
    not the sample that the codec was fitted on resembles it.

    The law of a lossy codec, for as many inputs: every finite element comes back as a finite one of
    the same dtype that is no further from it than `bounds` says; a zero may lose its sign. NaN and
    infinities come back bit for bit. What was decoded once need not be a fixed point: packing it
    again may add as much. Only a lossy codec has an `error_bound`. Systems that promise every bit
    refuse it.

    Neither makes a row longer than its raw bytes, padded to whole words.
    """

    name: ClassVar[str]
    #: Types of the devices that `kernels` takes.
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)
    #: Whether rows are kept as they are: systems then store plain rows and copy them.
    keeps_raw: ClassVar[bool] = False
    #: Whether several narrow items of a table may share a row, of which `kernels` gathers one.
    shares_rows: ClassVar[bool] = False
    #: How far a decoded element is from the given one at most, as a formula; None: not at all.
    error_bound: ClassVar[str | None] = None

    #: Shape of a row, everything after the first dimension.
    row_shape: tuple[int, ...]
    #: Dtype of a row's elements.
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a row before packing."""
        return elements(self.row_shape) * self.dtype.itemsize

    @property
    @abstractmethod
    def profile_bytes(self) -> int:
        """Bytes of what the codec learnt, which must be kept along with the packed rows."""

    #: Class method ``fit(sample, **options)``: learn from ``[N, ...]`` sample rows, on any device.
    #: Every codec has options of its own, so that their types are known to type checkers.
    fit: ClassVar[Callable[..., RowCodec]]

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> PackedRows:
        """Pack ``[N, *row_shape]`` rows on their own device."""

    @abstractmethod
    def decode(
        self,
        packed: PackedRows,
        indices: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
    ) -> torch.Tensor:
        """Unpack the rows of `indices` ``[n]``, or rows `start` to `stop`, all when left out."""

    @abstractmethod
    def packed_bytes(self, rows: torch.Tensor) -> torch.Tensor:
        """Return int64 ``[N]``: bytes that each row would take, without per-row metadata."""

    def bounds(self, rows: torch.Tensor) -> torch.Tensor:
        """Return how far each element may be from its decoded one; see `error_bound`.

        Parameters
        ----------
        rows : torch.Tensor
            ``[N, *row_shape]``, as for `encode`.

        Returns
        -------
        torch.Tensor
            float64 ``[N, *row_shape]`` on their device; 0 for elements that come back bit for bit
            whatever their row, as all do of a lossless codec.
        """
        check_rows_argument(self, rows)
        return torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)

    @abstractmethod
    def adopt(self, n_rows: int, parts: Mapping[str, torch.Tensor]) -> PackedRows:
        """Check `parts` that came from outside (a file, a wire) and return them as packed rows.

        Raises
        ------
        CorruptedDataError
            When a part is missing, has another dtype or shape, or a row in it is damaged.
        """

    def adopt_unread(self, n_rows: int, parts: Mapping[str, torch.Tensor]) -> PackedRows:
        """Check `parts` as `adopt` does, where `decode` checks the rows that it reads.

        For those who decode all rows next: what `adopt` reads of them is not read twice.
        """
        return self.adopt(n_rows, parts)

    @abstractmethod
    def to_config(self) -> dict[str, Any]:
        """Return everything needed to build the codec again, as JSON-able values."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> RowCodec:
        """Build the codec that `to_config` described."""

    def kernels(self, device: torch.device) -> RowKernels:
        """Return what tables, caches, histories and streams of weights ask for; see `WordRowCodec`.

        Raises
        ------
        ArgumentTypeError
            When the codec has none, or none for this device.
        """
        raise ArgumentTypeError(f"codec {self.name!r}: {_full_name(type(self))} has no kernels()")

    def row_metadata_bytes(self, n_rows: int) -> int:
        """Return the bytes that find `n_rows` rows among packed ones; 0 where none are needed."""
        return 0

    def refitted(self, sample: torch.Tensor) -> RowCodec:
        """Return a codec for other rows of the same kind, in less time than `fit` where it can."""
        return type(self).fit(sample)

    def describe(self) -> str:
        """Return the codec and its plan in a few words, for tables."""
        return self.name

    def __eq__(self, other: object) -> bool:
        """Codecs are equal when they are of one class and have one configuration."""
        return type(self) is type(other) and self.to_config() == other.to_config()

    def __hash__(self) -> int:
        """Hash by what is cheap and stable."""
        return hash((self.name, self.row_shape, self.dtype))

    def __repr__(self) -> str:
        """Name the codec, its plan and its rows."""
        rows = f"rows {list(self.row_shape)} {self.dtype}"
        return f"<{type(self).__name__} {self.describe()}, {rows}>"


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def gathered_by_kernels(cls: type[RowCodec]) -> bool:
    """Return whether `kernels` of a codec's class read what its `encode` writes.

    A class that has a name of its own, or overrides how rows are packed, needs its own: those that
    it inherits would ignore what it changes.
    """
    packing = {"name", "kernels", "encode", "decode"}
    owner = next(c for c in cls.__mro__ if packing & vars(c).keys())
    if owner is RowCodec or "kernels" not in vars(owner):
        return False
    # Of a class that keeps rows plain systems store plain rows: one below it may pack them.
    return not cls.keeps_raw or "keeps_raw" in vars(owner)


def on_codec_device(codec: RowCodec, rows: torch.Tensor) -> torch.Tensor:
    """Return rows where the codec packs them: on the CPU if it has no kernels for their device."""
    return rows if rows.device.type in codec.device_types else rows.cpu()


def elements(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape."""
    return math.prod(shape)


def rows_as_bytes(t: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """View ``[N, ...]`` as uint8 ``[N, row_bytes]``; a copy where its bits do not lie in order."""
    if t.dim() == 2 and bits_in_order(t) and t.stride() == (t.shape[1], 1):
        return t.detach().view(torch.uint8)
    return flat_bytes(t).view(t.shape[0], row_bytes)


def bits_in_order(t: torch.Tensor) -> bool:
    """Return whether `rows_as_bytes` is a view of `t`, so that writing to it writes to `t`."""
    return t.is_contiguous() and not t.is_conj() and not t.is_neg()


def check_tensor_argument(name: str, t: torch.Tensor) -> None:
    """Refuse what is no ordinary tensor on a CPU or GPU."""
    if not isinstance(t, torch.Tensor):
        raise ArgumentTypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
    if t.layout != torch.strided or t.is_quantized:
        raise ArgumentTypeError(f"{name}: expected a dense tensor, got layout {t.layout}")
    if not (t.is_cuda or t.is_cpu):  # quicker than to ask for the device's name
        raise ArgumentTypeError(f"{name}: on {t.device}, accepted are cpu and cuda")


def check_integer(name: str, value: Any, accepted: range) -> None:
    """Refuse what is no int, or none of those accepted."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name}: expected an int, got {value!r:.60}")
    if value not in accepted:
        raise ArgumentError(f"{name}: {value}, accepted are {accepted[0]} to {accepted[-1]}")


def check_rows_argument(codec: RowCodec, rows: torch.Tensor) -> None:
    """Refuse rows of another dtype or shape than the codec was fitted for."""
    check_tensor_argument("rows", rows)
    if rows.dtype != codec.dtype:
        raise ArgumentTypeError(f"rows: dtype {rows.dtype}, the codec was fitted for {codec.dtype}")
    if rows.dim() < 1 or tuple(rows.shape[1:]) != codec.row_shape:
        expected = ["N", *codec.row_shape]
        raise ArgumentError(f"rows: shape {list(rows.shape)}, the codec was fitted for {expected}")


def check_packed_argument(
    packed: PackedRows, expected: Mapping[str, tuple[torch.dtype, tuple[int | None, ...]]]
) -> None:
    """Refuse packed rows whose parts are not tensors of these dtypes and shapes on one device.

    A size of None stands for any.
    """
    if not isinstance(packed, PackedRows):
        raise ArgumentTypeError(f"packed: expected PackedRows, got {type(packed).__name__}")
    if set(packed.parts) != set(expected):
        raise ArgumentError(
            f"packed: has parts {sorted(packed.parts)}, this codec's are {sorted(expected)}"
        )
    for name, (dtype, shape) in expected.items():
        part = packed.parts[name]
        check_tensor_argument(f"packed: {name}", part)
        fits = len(shape) == part.dim() and all(
            want in (None, have) for want, have in zip(shape, part.shape, strict=True)
        )
        if part.dtype != dtype or not fits or not part.is_contiguous():
            raise ArgumentError(
                f"packed: {name} is {list(part.shape)} {part.dtype}, "
                f"expected {['any' if n is None else n for n in shape]} {dtype} for its rows"
            )
        if part.device != packed.device:
            raise ArgumentTypeError(f"packed: {name} on {part.device}, others on {packed.device}")


def check_indices_argument(indices: torch.Tensor, name: str = "indices") -> torch.Tensor:
    """Return `indices` as contiguous int64 ``[n]``, or refuse them."""
    check_tensor_argument(name, indices)
    if indices.dtype not in _INDEX_DTYPES:
        raise ArgumentTypeError(
            f"{name}: dtype {indices.dtype}, accepted are int64, int32, int16, int8 and uint8"
        )
    if indices.dim() != 1:
        raise ArgumentError(f"{name}: shape {list(indices.shape)}, expected one dimension")
    return indices.to(torch.int64).contiguous()


def check_ids_argument(ids: torch.Tensor) -> torch.Tensor:
    """Return `ids` as contiguous int32 or int64 ``[n]``, or refuse them."""
    check_tensor_argument("ids", ids)
    if ids.dtype in (torch.int64, torch.int32) and ids.dim() == 1:
        return ids.contiguous()
    return check_indices_argument(ids, "ids")


def check_in_range(
    ids: torch.Tensor, n_rows: int, name: str = "ids", *, from_end: bool = True
) -> None:
    """Raise IndexRangeError when one of the ids ``[n]`` on the CPU is out of range.

    Parameters
    ----------
    ids : torch.Tensor
        int32 or int64, contiguous.
    n_rows : int
        Number of rows.
    name : str
        Name of the argument, for the message.
    from_end : bool
        Whether negative ids count from the end.
    """
    position = first_bad_id(ids, n_rows)
    if position < 0 and not from_end:
        position = first_bad_id(ids, n_rows, 0)
    if position >= 0:
        raise_bad_index(int(ids[position]), position, n_rows, name, from_end=from_end)


def first_bad_id(ids: torch.Tensor, n_rows: int, lowest: int | None = None) -> int:
    """Return the first position of an id outside `lowest`, or -n_rows, to n_rows - 1, or -1."""
    # By numpy: torch's threads, which its large operations start, hang in a forked child.
    numbers = ids.numpy()
    low = -n_rows if lowest is None else lowest
    if not len(numbers):
        return -1
    if int(np.minimum.reduce(numbers)) >= low and int(np.maximum.reduce(numbers)) < n_rows:
        return -1
    return int(((numbers < low) | (numbers >= n_rows)).argmax())


def check_range_argument(start: int, stop: int | None, n_rows: int) -> int:
    """Refuse a range that does not lie in ``range(n_rows)``; return its end."""
    end = n_rows if stop is None else stop
    for name, bound in (("start", start), ("stop", end)):
        if not isinstance(bound, int) or isinstance(bound, bool):
            raise ArgumentTypeError(f"{name}: expected an int, got {bound!r:.60}")
    if not 0 <= start <= end <= n_rows:
        raise ArgumentError(f"start, stop: {start}, {end}; expected 0 <= start <= stop <= {n_rows}")
    return end


def raise_bad_index(
    value: int, position: int, n_rows: int, name: str = "indices", *, from_end: bool = True
) -> None:
    """Raise the error of an index outside the table; `from_end`: negative ones are accepted too."""
    lowest = -n_rows if from_end else 0
    accepted = f"accepted are {lowest} to {n_rows - 1}" if n_rows else "none is accepted"
    raise IndexRangeError(
        f"{name}: index {value} at position {position} is out of range for {n_rows} rows "
        f"({accepted})"
    )


def _memory_range(t: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last byte that the elements of `t` can touch."""
    if t.numel() == 0:
        return 0, 0
    if t.is_contiguous():
        return t.data_ptr(), t.data_ptr() + t.nbytes
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the memory from first to last element of two tensors overlaps."""
    begin, end = _memory_range(a)
    other_begin, other_end = _memory_range(b)
    return a.device == b.device and begin < other_end and other_begin < end


def _overlaps_itself(t: torch.Tensor) -> bool:
    reach = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach = stride * (size - 1) + reach
    return False


def check_out_argument(
    out: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    sources: Sequence[torch.Tensor],
) -> None:
    """Refuse an `out` of another shape, dtype or device, or one that overlaps a source."""
    check_tensor_argument("out", out)
    if out.dtype != dtype:
        raise ArgumentTypeError(f"out: dtype {out.dtype}, expected {dtype}")
    if out.device != device:
        raise ArgumentTypeError(f"out: on {out.device}, expected {device}")
    if tuple(out.shape) != tuple(shape):
        raise ArgumentError(f"out: shape {list(out.shape)}, expected {list(shape)}")
    if out.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("out: requires grad; decoding is not differentiable, use no_grad")
    if not out.is_contiguous() and _overlaps_itself(out):
        raise ArgumentError("out: several of its elements share memory; pass out.contiguous()")
    if any(share_memory(out, source) for source in sources):
        raise ArgumentError("out: shares memory with the packed rows or the indices")


def index_tensor(index: Any, n_items: int) -> torch.Tensor:
    """Make a tensor of a number or a sequence of numbers, or refuse it."""
    try:
        number = operator.index(index)
    except TypeError:
        pass
    else:
        if not -n_items <= number < n_items:  # before it is a tensor, where it might not fit
            raise_bad_index(number, 0, n_items)
        return torch.tensor(number)
    try:
        made = torch.as_tensor(index)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentTypeError(
            f"index: expected an int, a slice, integers or a mask, got {type(index).__name__}"
        ) from error
    return made.to(torch.int64) if made.numel() == 0 else made
