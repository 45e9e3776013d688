"""Packing rows into the buffers of a table, batch after batch, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

import numpy as np
import torch

from ..engine.codecs import RawCodec, RowCodec, WordRowCodec
from ..engine.codecs.base import (
    bits_in_order,
    check_tensor_argument,
    elements,
    gathered_by_kernels,
    on_codec_device,
    rows_as_bytes,
)
from ..engine.codecs.registry import codec_class, fit_codec, get_codec, is_codec_name
from ..engine.kernels import cpu
from ..engine.kernels.format import (
    BLOCK_ROWS,
    MAX_ROW_BYTES,
    MAX_SHARED_ROW_BYTES,
    PAD_WORDS,
    ceil_div,
    shared_row_items,
)
from ..engine.memory.writer import HostWriter
from ..engine.progress import Progress
from ..engine.row_map import as_rows, row_map
from ..engine.tensor_bits import INTEGERS
from ..errors import ArgumentError, ArgumentTypeError
from .parts import Layout, TableParts, bits_of, items_per_row, widened

Rows = torch.Tensor | np.ndarray[Any, Any]

SAMPLE_BYTES = 8 << 20  # most bytes that a codec is fitted on, but at least
MIN_SAMPLE_ROWS = 8
BATCH_BYTES = 32 << 20  # rows that are packed at once
#: Batches of shorter rows are sized as if rows had this many bytes: their metadata takes more.
COUNTED_ROW_BYTES = 64
#: Narrow rows are packed one by one, so that a gather reads no others, where that saves anything
#: and takes at most this many times their size when packed together.
MOST_TAKEN_ALONE = 3.0
#: Narrow rows that could share packed rows are kept raw unless they take at least this many times
#: their packed size: gathers of packed ones take several times as long on a CPU.
LEAST_SHARED_RATIO = 1.125
#: Share of the packed rows of a table in place that a first read of `typical_words` covers.
TYPICAL_SHARE = 0.95
#: Lengths of rows above this many words are not counted one by one.
COUNTED_WORDS = 1 << 16


class PartsBuilder:
    """Packs batches of items into the buffers of a table; see `TableParts`.

    Parameters
    ----------
    codec : RowCodec
        A fitted codec; one that keeps rows raw for a raw table.
    item_shape : tuple of int
        Shape of an item, of which a whole number makes a row of the codec.
    layout : {"compact", "inplace"}
        How rows are stored; raw tables are stored in place either way.
    pin : bool
        Whether the words are page-locked at the end.
    device : torch.device or None
        Where batches are packed; their own device when None.
    """

    def __init__(
        self,
        codec: RowCodec,
        item_shape: tuple[int, ...],
        layout: Layout,
        *,
        pin: bool,
        device: torch.device | None = None,
    ) -> None:
        self.codec = codec
        self.item_shape = item_shape
        self.layout: Layout = layout
        self.raw = codec.keeps_raw
        self._kernels = codec.kernels(torch.device("cpu"))
        self.row_words = ceil_div(codec.row_bytes, 4)
        self._each = items_per_row(codec, item_shape)
        self._item_bytes = codec.row_bytes // self._each
        self._device = device
        self._waiting: list[torch.Tensor] = []
        self._waiting_items = self._n_items = 0
        # Enough that the cost of a call is negligible, few enough that joining them takes no room.
        self._enough_items = self._each * max(BLOCK_ROWS, rows_per_batch(codec.row_bytes) // 4)
        self._counts = np.zeros(min(self.row_words, COUNTED_WORDS) + 1, np.int64)
        self._packed_rows = self._packed_words = self._max_packed = 0
        self._end_word = 0
        names = ["words"]
        if not self.raw:
            names += ["bases", "lengths"] if layout == "compact" else ["flags"]
            names += ["row_clusters"] if self._kernels.clusters > 1 else []
        self._writers = {name: HostWriter(pin=pin and name == "words") for name in names}

    def add(self, items: torch.Tensor) -> None:
        """Pack more items, ``[n, *item_shape]`` of the codec's dtype, of any number."""
        check_items(items, self.item_shape, self.codec.dtype)
        if not items.shape[0]:
            return
        self._n_items += items.shape[0]
        data = rows_as_bytes(items, self._item_bytes)
        if self._waiting_items + data.shape[0] < self._enough_items:
            # A copy: an iterator may reuse the memory for its next batch.
            self._wait(data.clone())
            return
        if self._waiting:
            device = self._waiting[0].device
            data = torch.cat([*self._waiting, data.to(device)])
            self._waiting, self._waiting_items = [], 0
        # Blocks of 32 rows share an offset and a word of flags, so only whole blocks are packed.
        block = BLOCK_ROWS * self._each
        whole = data.shape[0] // block * block
        self._pack(data[:whole])
        if whole < data.shape[0]:
            self._wait(data[whole:].clone())

    def _wait(self, data: torch.Tensor) -> None:
        if self._waiting:
            data = data.to(self._waiting[0].device)
        self._waiting.append(data)
        self._waiting_items += data.shape[0]

    def _pack(self, data: torch.Tensor) -> None:
        """Pack the bytes ``[n, item_bytes]`` of items; only the last ones need not fill a row."""
        if self.raw:
            self._writers["words"].append(data.cpu())
            return
        n, row_words = ceil_div(data.shape[0], self._each), self.row_words
        if n * self._each > data.shape[0]:
            filler = data[-1:].expand(n * self._each - data.shape[0], -1)
            data = torch.cat([data, filler])
        rows = data.flatten().view(self.codec.dtype).view(n, *self.codec.row_shape)
        rows = rows if self._device is None else rows.to(self._device)
        packed = self.codec.encode(on_codec_device(self.codec, rows))
        parts = {name: part.cpu() for name, part in packed.parts.items()}
        lengths = widened(parts["lengths"])
        sizes = np.where(lengths == 0, row_words, lengths)
        n_words = packed.facts["n_words"]
        self._packed_rows += int(np.count_nonzero(lengths))
        self._packed_words += n_words
        self._max_packed = max(self._max_packed, int(lengths.max()))
        self._counts += np.bincount(
            np.minimum(lengths, len(self._counts) - 1), minlength=len(self._counts)
        )
        if self.layout == "compact":
            self._writers["words"].append(parts["words"][:n_words])
            self._writers["bases"].append(parts["bases"][:-1] + self._end_word)
            self._writers["lengths"].append(parts["lengths"])
            self._end_word += n_words
        else:
            placed = torch.zeros(n * row_words, dtype=torch.int32)
            at = np.cumsum(sizes) - sizes
            target = np.arange(n, dtype=np.int64) * row_words
            cpu.move_rows(
                parts["words"],
                torch.from_numpy(at),
                torch.from_numpy(sizes),
                placed,
                torch.from_numpy(target),
            )
            self._writers["words"].append(placed)
            self._writers["flags"].append(bits_of(lengths != 0))
        if "row_clusters" in self._writers:
            self._writers["row_clusters"].append(parts["row_clusters"])

    def finish(self) -> TableParts:
        """Return the table's buffers; the builder cannot be used again."""
        if self._waiting:
            self._pack(torch.cat(self._waiting))
            self._waiting = []
        raw_bytes = self._n_items * self._item_bytes if self.raw else 0
        padding = torch.zeros(4 * PAD_WORDS + -raw_bytes % 4, dtype=torch.uint8)
        self._writers["words"].append(padding)
        if "bases" in self._writers:
            self._writers["bases"].append(torch.tensor([self._end_word]))
        dtypes = {
            "words": torch.int32,
            "bases": torch.int64,
            "flags": torch.int32,
            "row_clusters": torch.uint8,
            "lengths": self._kernels.length_dtype,
        }
        buffers = {name: writer.finish() for name, writer in self._writers.items()}
        tensors = {name: b.tensor.view(dtypes[name]) for name, b in buffers.items()}
        facts = {
            "max_packed_words": self._max_packed,
            "typical_words": self._typical_words(),
            "packed_words": ceil_div(raw_bytes, 4) if self.raw else self._packed_words,
            "packed_rows": self._packed_rows,
        }
        shape = (self._n_items, *self.item_shape)
        return TableParts(self.codec, self.layout, shape, tensors, buffers, facts)

    def _typical_words(self) -> int:
        """Return a number of words that most packed rows fit in."""
        counts = self._counts.copy()
        counts[0] = 0
        if not counts.any() or counts[-1]:
            return max(1, min(self._max_packed, self.row_words - 1))
        share = np.cumsum(counts) / counts.sum()
        return int(np.searchsorted(share, TYPICAL_SHARE))

    def discard(self) -> None:
        """Free what was built so far."""
        for writer in self._writers.values():
            writer.discard()


def build_parts(
    batches: Iterable[torch.Tensor],
    codec: RowCodec,
    item_shape: tuple[int, ...],
    layout: Layout,
    *,
    pin: bool,
    progress: Progress,
    device: torch.device | None = None,
) -> TableParts:
    """Pack batches ``[n, *item_shape]`` one after another; an error frees everything."""
    builder = PartsBuilder(codec, item_shape, layout, pin=pin, device=device)
    step = rows_per_batch(codec.row_bytes) * items_per_row(codec, item_shape)
    try:
        for batch in batches:
            check_items(batch, item_shape, codec.dtype)
            for part in torch.split(batch, step):
                builder.add(part)
                progress.advance(part.shape[0])
        return builder.finish()
    except BaseException:
        builder.discard()
        raise


def choose_codec(
    sample: torch.Tensor,
    codec: str | RowCodec,
    n_rows: int | None,
    options: Mapping[str, Any],
    seed: int | None = None,
) -> RowCodec:
    """Return a fitted codec for rows like those of a sample.

    Parameters
    ----------
    sample : torch.Tensor
        ``[n, *row_shape]``: rows as they are packed.
    codec : str or RowCodec
        ``"auto"``: invariant bit packing, or raw where that does not make the sample smaller. A
        name: that codec, fitted with `options`. A codec: that one.
    n_rows : int or None
        Rows of the table, None when not known.
    options : mapping
        For the codec's `fit`.
    seed : int or None
        Of the choice of sample rows by `fit`, where it makes one; its default when None.
    """
    if isinstance(codec, RowCodec):
        if options:
            raise ArgumentTypeError(
                f"options: {sorted(options)} are for fitting; `codec` is fitted"
            )
        if codec.dtype != sample.dtype or tuple(codec.row_shape) != tuple(sample.shape[1:]):
            raise ArgumentError(
                f"codec: fitted for rows {list(codec.row_shape)} {codec.dtype}, the table's are "
                f"{list(sample.shape[1:])} {sample.dtype}"
            )
        check_table_codec(type(codec), "codec")
        fitted = codec
    elif isinstance(codec, str):
        raw = RawCodec(tuple(sample.shape[1:]), sample.dtype)
        cls = codec_class(codec)
        check_table_codec(cls, "codec")
        if cls.keeps_raw:
            return cls.fit(sample, **options)
        if not sample.numel() or (codec == "auto" and raw.row_bytes > MAX_ROW_BYTES):
            return raw
        fitted = fit_codec(cls, sample, options, n_rows=n_rows, seed=seed)
        if codec == "auto" and not shrinks(fitted, sample):
            return raw
    else:
        raise ArgumentTypeError(f"codec: expected a name or a codec, got {type(codec).__name__}")
    return fitted


def fitted_to_items(
    sample: torch.Tensor,
    codec: str | RowCodec,
    n_items: int | None,
    options: Mapping[str, Any],
    layout: Layout = "compact",
    seed: int | None = None,
) -> RowCodec:
    """Return a fitted codec for a table of items like those of a sample; see `choose_codec`.

    Parameters
    ----------
    sample : torch.Tensor
        ``[n, *item_shape]``; items that share a row are consecutive.
    codec, options, seed
        As in `choose_codec`. A fitted codec is for items, or for rows of several items.
    n_items : int or None
        Items of the table, None when not known.
    layout : {"compact", "inplace"}
        How rows are stored. In place a row takes whole words, so narrow items whose size is no
        whole number of words are never packed one by one.
    """
    shape = tuple(sample.shape[1:])
    each = _items_of_rows(codec, shape, sample.dtype)
    n_rows = None if n_items is None else ceil_div(n_items, each)
    rows = items_as_rows(sample, each)
    fitted = choose_codec(rows, codec, n_rows, options, seed)
    if isinstance(codec, str) and not fitted.keeps_raw and each > 1:
        together = _packed_bytes(fitted, rows)
        if layout == "compact" or sample[:1].nbytes % 4 == 0:
            alone = choose_codec(sample, codec, n_items, options, seed)
            if not alone.keeps_raw and shrinks(alone, sample):
                if _packed_bytes(alone, sample) <= MOST_TAKEN_ALONE * together:
                    return alone
        if codec == "auto" and rows.nbytes < LEAST_SHARED_RATIO * together:
            return RawCodec(shape, sample.dtype)
    return RawCodec(shape, sample.dtype) if fitted.keeps_raw else fitted


def _items_of_rows(codec: str | RowCodec, item_shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the number of items that share a row."""
    item_bytes = elements(item_shape) * dtype.itemsize
    if not isinstance(codec, RowCodec):
        return shared_row_items(item_bytes) if _shares_rows(codec) else 1
    each = items_per_row(codec, item_shape)
    shared = codec.shares_rows and codec.row_bytes <= MAX_SHARED_ROW_BYTES
    if shared and item_bytes and codec.row_shape == (each * elements(item_shape),):
        return each
    return 1


def _shares_rows(codec: object) -> bool:
    """Return whether items may share rows of a codec by name; others are refused elsewhere."""
    return isinstance(codec, str) and codec_class(codec).shares_rows


def check_table_codec(cls: type[RowCodec], where: str) -> None:
    """Refuse a codec with no kernels that gather its rows.

    So is a subclass of one with no kernels of its own: they would ignore what it overrides.

    Parameters
    ----------
    cls : type
        The codec's class.
    where : str
        The argument or file that the codec comes from, for the message.

    Raises
    ------
    ArgumentError
        When the class has no `kernels` for the rows that its `encode` packs.
    """
    if not gathered_by_kernels(cls) or not (cls.keeps_raw or issubclass(cls, WordRowCodec)):
        raise ArgumentError(
            f"{where}: codec {cls.name!r} of {cls.__module__}.{cls.__qualname__}; tables, their "
            "caches and embeddings accept 'auto', 'ibp' and 'raw', whose rows kernels gather, and "
            "codecs with a method `kernels` of their own (bitslab.engine.codecs.WordRowCodec). "
            "Other codecs serve bitslab.compress and files"
        )
    if cls.error_bound is not None:
        raise ArgumentError(
            f"{where}: codec {cls.name!r} is lossy; tables, their caches and embeddings accept "
            "codecs that keep every bit"
        )
    if not is_codec_name(cls.name) or get_codec(cls.name) is not cls:
        # Other processes, files and `compact` find the codec by its name.
        raise ArgumentError(
            f"{where}: codec {cls.name!r} of {cls.__module__}.{cls.__qualname__} is not the codec "
            "of that name; use bitslab.register_codec, and a name of its own"
        )


def shrinks(fitted: RowCodec, sample: torch.Tensor) -> bool:
    """Return whether packing makes rows like the sample's smaller, their metadata included."""
    return _packed_bytes(fitted, sample) < sample.shape[0] * fitted.row_bytes


def _packed_bytes(codec: RowCodec, rows: torch.Tensor) -> int:
    """Return the bytes of rows when packed, their metadata included."""
    # Rows kept raw take whole words among packed ones.
    words = (codec.packed_bytes(rows) + 3) // 4
    return 4 * int(words.sum()) + codec.row_metadata_bytes(rows.shape[0])


def items_as_rows(items: torch.Tensor, each: int) -> torch.Tensor:
    """Return items ``[n, *item_shape]`` as rows of `each` items, ``[ceil(n / each), elements]``.

    The last row is padded with copies of the last item.
    """
    if each == 1 or not items.shape[0]:
        return items
    rows = row_map(items.shape, each * elements(items.shape[1:]))
    return as_rows(items, rows, (each * elements(items.shape[1:]),))


def check_items(items: torch.Tensor, item_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse rows whose dtype or shape differs from the table's."""
    check_tensor_argument("rows", items)
    if items.dtype != dtype:
        raise ArgumentTypeError(f"rows: dtype {items.dtype}, the table's are {dtype}")
    if items.dim() < 1 or tuple(items.shape[1:]) != item_shape:
        raise ArgumentError(
            f"rows: shape {list(items.shape)}, the table's are {['N', *item_shape]}"
        )


def rows_per_batch(row_bytes: int) -> int:
    """Return the rows that are packed at once: whole blocks, of about BATCH_BYTES."""
    counted = max(COUNTED_ROW_BYTES, row_bytes)
    return max(1, BATCH_BYTES // counted // BLOCK_ROWS) * BLOCK_ROWS


def sample_rows(t: Rows, seed: int) -> torch.Tensor:
    """Draw rows of a tensor or array to fit a codec on, all when they are few.

    Narrow rows are drawn in groups of as many as share a packed row.
    """
    n = t.shape[0]
    wanted = max(MIN_SAMPLE_ROWS, SAMPLE_BYTES // max(1, t[:1].nbytes))
    if n <= wanted:
        return as_tensor(t)
    picked = draw_items(n, wanted, shared_row_items(t[:1].nbytes), seed)
    if isinstance(t, np.ndarray):
        return as_tensor(t[picked])
    return take_rows(t, picked)


def draw_items(n_items: int, wanted: int, each: int, seed: int) -> np.ndarray[Any, Any]:
    """Return int64 ids, ascending, of about `wanted` items of whole rows of `each` items."""
    n_rows = n_items // each
    count = min(n_rows, max(1, wanted // each))
    rows = np.sort(np.random.default_rng(seed).choice(n_rows, count, replace=False))
    return (rows[:, None] * each + np.arange(each)).reshape(-1)


def take_rows(rows: torch.Tensor, positions: np.ndarray[Any, Any]) -> torch.Tensor:
    """Index rows of any dtype, without a copy of the whole tensor if it is not contiguous."""
    index = torch.from_numpy(positions).to(rows.device)
    rows = rows.detach()
    if rows.is_complex() or not bits_in_order(rows):
        # Lazy conjugates and negatives are complex numbers or parts of them.
        plain = rows.is_complex() or rows.is_neg() or rows.dtype.itemsize > 8
        if plain:
            return rows[index]
        return rows.view(INTEGERS[rows.dtype.itemsize])[index].view(rows.dtype)
    data = rows_as_bytes(rows, rows[:1].nbytes)[index]
    return data.flatten().view(rows.dtype).view(len(positions), *rows.shape[1:])


def slices_of(t: Rows) -> Iterator[torch.Tensor]:
    """Yield the rows of a tensor or array in batches; a memory-mapped array is read as needed."""
    step = rows_per_batch(t[:1].nbytes)
    for begin in range(0, t.shape[0], step):
        yield as_tensor(t[begin : begin + step])


def as_tensor(rows: Rows) -> torch.Tensor:
    """Return rows as a tensor, or refuse them."""
    if isinstance(rows, np.ndarray):
        # Torch warns of arrays that cannot be written to, and knows no other byte order.
        native = rows.dtype.newbyteorder("=")
        flags = rows.flags
        plain = flags.writeable and flags.c_contiguous and flags.aligned
        copied = not plain or rows.dtype != native
        array = np.array(rows, dtype=native) if copied else np.asarray(rows)
        try:
            return torch.from_numpy(array)
        except TypeError as error:
            raise ArgumentTypeError(
                f"rows: torch has no dtype like numpy's {rows.dtype}"
            ) from error
    check_tensor_argument("rows", rows)
    return rows.detach()


def check_layout(layout: str) -> None:
    """Refuse an unknown layout."""
    if layout not in get_args(Layout):
        raise ArgumentError(f"layout: {layout!r}, accepted are {', '.join(get_args(Layout))}")


def peek(batches: Iterable[Rows], seed: int) -> tuple[torch.Tensor, Iterator[torch.Tensor]]:
    """Return the first rows of an iterable of batches, and all its batches."""
    if not isinstance(batches, Iterable):
        raise ArgumentTypeError(
            f"t: expected a tensor, an array or an iterable of them, got {type(batches).__name__}"
        )
    rest = map(as_tensor, batches)
    first: deque[torch.Tensor] = deque()
    seen_bytes = 0
    for batch in rest:
        if batch.dim() < 1:
            raise ArgumentError("t: a batch has no dimension; a table needs rows")
        seen_bytes += max(1, batch.nbytes)
        enough = seen_bytes >= SAMPLE_BYTES
        # A copy: the iterator may reuse the memory for its next batch.
        first.append(batch if enough else batch.clone())
        if enough:
            break
    if not first:
        raise ArgumentError("t: has no batches, so shape and dtype of its rows are not known")
    like = first[0]
    if any(b.dtype != like.dtype or b.shape[1:] != like.shape[1:] for b in first):
        raise ArgumentError("t: its batches differ in dtype or in the shape of their rows")
    row_bytes = elements(like.shape[1:]) * like.dtype.itemsize
    samples = [rows_as_bytes(sample_rows(b, seed), row_bytes).cpu() for b in first]
    data = torch.cat(samples)
    sample = data.flatten().view(like.dtype).view(data.shape[0], *like.shape[1:])
    return sample, _emptied(first, rest)


def _emptied(first: deque[torch.Tensor], rest: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the batches that were peeked at, keeping no reference, and then the rest."""
    while first:
        yield first.popleft()
    yield from rest
