"""Coded tiles on a GPU: measured and encoded, or packed at once, and decoded; see quantized.cu."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ....errors import ArgumentError
from ..format import (
    BLOCK_ROWS,
    PAD_WORDS,
    RowFormat,
    TableStorage,
    bases_of_rows,
    ceil_div,
    words_of_rows,
)
from ..tile_format import (
    MAX_SYMBOLS,
    TILE_LANES,
    UNIT_BITS,
    Granularity,
    TileFormat,
    TileTables,
)
from .ids import ALL_GOOD, check_ids_count
from .parameters import Address, Int32, Int64, Parameters, UInt32, Value
from .runner import Launch, Runner, do_nothing
from .source import (
    MAX_ENCODE_WARPS,
    MOVE_WARPS,
    decode_stage_bytes,
    max_decode_warps,
    quantized_variant,
    tile_stride,
)
from .tiles import WORDS_ALIGN_BYTES, aligned_to

#: Warps of a block, as many as the tiles have use for and as fit.
WARP_COUNTS = (1, 2, 4, 8, 12, 16, 18, 20, 22, 24)
RING_BYTES = 1 << 10  # packed words of a warp on their way, as in tile_reader.cuh
RESERVED_BYTES = (1 << 10) + 128  # of each block's shared memory: the system's, and static
MOST_BLOCKS = 2  # of a multiprocessor
MOVE_BLOCKS = 8  # of a multiprocessor
#: Bytes of the slots that tiles are coded in before they are moved together: those that run at once
#: take some 32 MiB, and several of each warp keep most of them busy to the end.
SLOTS_BYTES = 128 << 20
#: Units of a lane beyond the bits of its symbols: those that it has asked for, and rounding.
AHEAD_UNITS = 4


@dataclass(init=False)
class MeasureTiles(Parameters):
    """Parameters of `measure_tiles`.

    Tiles, the tensors and sizes of a `TileTables`, whose scale is squared for levels, and the
    inverse of its dim, both as bits of float32; shared memory of a warp; unsigned `lengths`.
    """

    kernel = "measure_tiles"

    rows: Address
    n_rows: Int64
    order: Address
    steps: Address
    centers: Address
    level_steps: Address
    level_squares: Address
    block_class: Address
    radius: Address
    class_bits: Address
    codes: Address
    classes: Int32
    heads: Int32
    rows_per_head: Int64
    scale: UInt32
    inverse_dim: UInt32
    warp_bytes: Int32
    lengths: Address
    length_bytes: Int32


@dataclass(init=False)
class EncodeTiles(MeasureTiles):
    """Parameters of `encode_tiles`: as of `MeasureTiles`, int64 bases, int32 words."""

    kernel = "encode_tiles"

    bases: Address
    words: Address


@dataclass(init=False)
class PackTiles(MeasureTiles):
    """Parameters of `pack_tiles`: as of `MeasureTiles`, of tiles from `row_begin` to `n_rows`.

    Int32 slots, of `slot_words` each.
    """

    kernel = "pack_tiles"

    row_begin: Int64
    slots: Address
    slot_words: Int64


@dataclass(init=False)
class MoveTiles(Parameters):
    """Parameters of `move_tiles`: as of `PackTiles` and `EncodeTiles`."""

    kernel = "move_tiles"

    rows: Address
    n_rows: Int64
    lengths: Address
    length_bytes: Int32
    row_begin: Int64
    slots: Address
    slot_words: Int64
    bases: Address
    words: Address


@dataclass(init=False)
class DecodeTiles(Parameters):
    """Parameters of `decode_tiles`.

    The tensors of a compact `TableStorage`; int32 or int64 ids, or None for the tiles from
    `row_begin` on; what `MeasureTiles` has of a `TileTables`, whose `lookup` stands for `codes`.
    """

    kernel = "decode_tiles"

    words: Address
    n_words: Int64
    bases: Address
    lengths: Address
    length_bytes: Int32
    n_rows: Int64
    ids: Address
    id_bytes: Int32
    row_begin: Int64
    n: Int64
    order: Address
    steps: Address
    centers: Address
    level_steps: Address
    level_squares: Address
    block_class: Address
    radius: Address
    class_bits: Address
    codes: Address
    classes: Int32
    heads: Int32
    rows_per_head: Int64
    scale: UInt32
    inverse_dim: UInt32
    warp_bytes: Int32
    out: Address
    first_bad: Address
    lowest: Int64
    mailbox: Address


class TileKernels:
    """The kernels of quantized.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._bound: WeakKeyDictionary[TileTables, _Bound] = WeakKeyDictionary()

    def measure_tiles(self, rows: torch.Tensor, tables: TileTables) -> torch.Tensor:
        """Measure coded tiles; see `kernels.cpu.measure_tiles`."""
        n = rows.shape[0]
        plain = RowFormat(tables.format.row_bytes, 1, 1, grouped=False, uniform=True)
        lengths = torch.empty(n, dtype=plain.length_dtype, device=rows.device)
        if n:
            rows = aligned_to(rows, 16)
            launch, blocks = self._launch(tables, MeasureTiles, n)
            launch(blocks, rows.data_ptr(), n, lengths.data_ptr(), lengths.element_size())
        return lengths

    def encode_tiles(
        self,
        rows: torch.Tensor,
        tables: TileTables,
        lengths: torch.Tensor,
        bases: torch.Tensor,
        n_words: int,
    ) -> torch.Tensor:
        """Code tiles, whose lengths are not looked at again; see `kernels.cpu.encode_tiles`."""
        n = rows.shape[0]
        words = torch.zeros(n_words + PAD_WORDS, dtype=torch.int32, device=rows.device)
        if n:
            rows = aligned_to(rows, 16)
            launch, blocks = self._launch(tables, EncodeTiles, n)
            launch(
                blocks,
                rows.data_ptr(),
                n,
                lengths.data_ptr(),
                lengths.element_size(),
                bases.data_ptr(),
                words.data_ptr(),
            )
        return words

    def pack_tiles(
        self, rows: torch.Tensor, tables: TileTables
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Code tiles whose lengths are not known, without waiting for the GPU.

        Values are quantised once: tiles are coded in slots, a part of them at a time, and moved
        together when the lengths of the part are known to the GPU.

        Parameters
        ----------
        rows, tables
            As for `measure_tiles`.

        Returns
        -------
        words : torch.Tensor
            int32, as many as all tiles take when they are kept raw, and PAD_WORDS. Behind the
            packed tiles are PAD_WORDS of 0; what is behind these is undefined.
        lengths : torch.Tensor
            What `measure_tiles` returns.
        bases : torch.Tensor
            int64 ``[ceil(N / 32) + 1]``, the first word of each block of 32 tiles, and the end.
        """
        n, fmt = rows.shape[0], tables.format
        plain = RowFormat(fmt.row_bytes, 1, 1, grouped=False, uniform=True)
        lengths = torch.empty(n, dtype=plain.length_dtype, device=rows.device)
        most_words = n * plain.row_words + PAD_WORDS
        if not n:
            words = torch.zeros(most_words, dtype=torch.int32, device=rows.device)
            return words, lengths, torch.zeros(1, dtype=torch.int64, device=rows.device)
        words = torch.empty(most_words, dtype=torch.int32, device=rows.device)
        rows = aligned_to(rows, 16)
        slot_words = _slot_words(fmt)
        step = max(1, SLOTS_BYTES // (4 * slot_words * BLOCK_ROWS)) * BLOCK_ROWS
        slots = torch.empty(min(n, step) * slot_words, dtype=torch.int32, device=rows.device)
        bases = torch.zeros(ceil_div(n, BLOCK_ROWS) + 1, dtype=torch.int64, device=rows.device)
        for begin in range(0, n, step):
            end = min(n, begin + step)
            found = (rows.data_ptr(), end, lengths.data_ptr(), lengths.element_size(), begin)
            launch, blocks = self._launch(tables, PackTiles, end - begin)
            launch(blocks, *found, slots.data_ptr(), slot_words)
            part, _ = bases_of_rows(words_of_rows(lengths[begin:end], plain.row_words))
            first = begin // BLOCK_ROWS
            torch.add(part[1:], bases[first], out=bases[first + 1 : first + len(part)])
            launch, blocks = self._launch(tables, MoveTiles, end - begin)
            launch(blocks, *found, slots.data_ptr(), slot_words, bases.data_ptr(), words.data_ptr())
        return words, lengths, bases

    def decode_tiles(
        self,
        table: TableStorage,
        tables: TileTables,
        ids: torch.Tensor | None,
        out: torch.Tensor,
        *,
        row_begin: int = 0,
        first_bad: torch.Tensor | None = None,
        lowest: int = ALL_GOOD,
        sm_budget: int | None = None,
    ) -> int:
        """Decode tiles without waiting for the GPU.

        Parameters
        ----------
        table : TableStorage
            Compact, with no row moved. Its words may lie in page-locked host memory.
        tables : TileTables
            On the device.
        ids : torch.Tensor or None
            int32 or int64 ``[n]``, negative ones counted from the end, NO_ROW for none; None for
            the tiles from `row_begin` on.
        out : torch.Tensor
            ``[n, ...]`` contiguous, of `row_bytes` each.
        row_begin : int
            First tile without `ids`.
        first_bad, lowest
            As for `GatherKernels.gather_rows`.
        sm_budget : int, optional
            Multiprocessors that the kernel may use; all when left out.

        Returns
        -------
        int
            -1. Bad ids leave `out` untouched and damaged tiles their rows of it; both are reported
            in the mailbox.
        """
        n = out.shape[0]
        if n:
            aligned = out if out.data_ptr() % 16 == 0 else out.clone()
            self._decode(table, tables, ids, aligned, row_begin, first_bad, lowest, sm_budget)()
            if aligned is not out:
                out.copy_(aligned)
        return -1

    def prepare_tiles(
        self,
        table: TableStorage,
        tables: TileTables,
        ids: torch.Tensor,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> Callable[[], None]:
        """Return what decodes good ids, as they are then, on torch's current stream.

        Raises
        ------
        ArgumentError
            When `out` or the words lie where the kernel cannot store or load: a copy made now would
            hold what the words are now.
        """
        for name, tensor in (("out", out), ("table: words", table.words)):
            if tensor.data_ptr() % WORDS_ALIGN_BYTES:
                raise ArgumentError(f"{name}: starts at no multiple of {WORDS_ALIGN_BYTES} bytes")
        if not out.shape[0]:
            return do_nothing
        return self._decode(table, tables, ids, out, 0, None, ALL_GOOD, sm_budget)

    def _decode(
        self,
        table: TableStorage,
        tables: TileTables,
        ids: torch.Tensor | None,
        out: torch.Tensor,
        row_begin: int,
        first_bad: torch.Tensor | None,
        lowest: int,
        sm_budget: int | None,
    ) -> Callable[[], None]:
        _check_compact(table)
        n = out.shape[0]
        if ids is not None:
            check_ids_count(n)
        lengths = table.lengths
        assert lengths is not None
        launch, blocks = self._launch(tables, DecodeTiles, n, sm_budget)
        tensors = (
            aligned_to(table.words, WORDS_ALIGN_BYTES),
            table.bases,
            lengths,
            ids,
            out,
            first_bad,
        )
        words, bases, _, _, _, _ = tensors
        values: tuple[Value, ...] = (
            words,
            words.shape[0] - PAD_WORDS,
            bases,
            lengths,
            lengths.element_size(),
            table.n_rows,
            ids,
            0 if ids is None else ids.element_size(),
            row_begin,
            n,
            out,
            first_bad,
            lowest,
        )
        return partial(_start, launch, blocks, values)

    def _launch(
        self,
        tables: TileTables,
        parameters: type[Parameters],
        n: int,
        sm_budget: int | None = None,
    ) -> tuple[Launch, int]:
        """Return a kernel and the blocks that it has use for."""
        bound = self._bound.get(tables)
        if bound is None:
            bound = self._bound[tables] = _Bound(self._runner, tables)
        return bound.launch(parameters, n, sm_budget)


class _Bound:
    """The kernels of a `TileTables`, ready to be started.

    Parameters
    ----------
    runner : Runner
        Of the device.
    tables : TileTables
        On the device.
    """

    def __init__(self, runner: Runner, tables: TileTables) -> None:
        fmt = tables.format
        self._runner = runner
        self._format = fmt
        self._classes = tables.classes
        squared = fmt.granularity is Granularity.TOKEN_LEVEL
        self._fixed: dict[str, Value] = {
            "order": tables.order,
            "steps": tables.steps,
            "centers": tables.centers,
            "level_steps": tables.level_steps,
            "level_squares": tables.level_squares,
            "block_class": tables.block_class,
            "radius": tables.radius,
            "class_bits": tables.class_bits,
            "classes": tables.classes,
            "heads": tables.heads,
            "rows_per_head": tables.rows_per_head,
            "scale": _float_bits(tables.scale * tables.scale if squared else tables.scale),
            "inverse_dim": _float_bits(1 / fmt.dim),
        }
        self._codes, self._lookup = tables.codes, tables.lookup
        self._launches: dict[tuple[type[Parameters], int], tuple[Launch, int]] = {}

    def launch(
        self, parameters: type[Parameters], n: int, sm_budget: int | None
    ) -> tuple[Launch, int]:
        """Return a kernel for n tiles and its blocks."""
        multiprocessors = self._runner.multiprocessors
        if parameters is MoveTiles:
            return self._mover, min(ceil_div(n, MOVE_WARPS), MOVE_BLOCKS * multiprocessors)
        if sm_budget is not None:
            multiprocessors = max(1, min(sm_budget, multiprocessors))
        useful = ceil_div(n, multiprocessors)
        wanted = next((w for w in WARP_COUNTS if w >= useful), WARP_COUNTS[-1])
        key = (parameters, wanted)
        found = self._launches.get(key)
        if found is None:
            found = self._launches[key] = self._bind(parameters, wanted)
        launch, warps = found
        at_once = 1 if sm_budget is not None else MOST_BLOCKS
        return launch, min(ceil_div(n, warps), at_once * multiprocessors)

    @cached_property
    def _mover(self) -> Launch:
        return self._runner.bind(quantized_variant(self._format), MoveTiles, 32 * MOVE_WARPS)

    def _shared(self, decodes: bool) -> tuple[int, int]:
        """Return the bytes of shared memory of a block, and of each of its warps."""
        each = _warp_bytes(self._format, decodes)
        if decodes:
            return self._classes * 4 << self._format.code_bits, each + RING_BYTES
        return self._classes * MAX_SYMBOLS * np.dtype(np.uint16).itemsize, each

    def _bind(self, parameters: type[Parameters], wanted: int) -> tuple[Launch, int]:
        """Return a kernel and its warps: as many as are wanted and fit."""
        decodes = parameters is DecodeTiles
        warp_bytes = _warp_bytes(self._format, decodes)
        tables = self._lookup if decodes else self._codes
        shared, each = self._shared(decodes)
        limit = self._runner.shared_bytes_per_multiprocessor - RESERVED_BYTES
        most = min(wanted, max_decode_warps(self._format) if decodes else MAX_ENCODE_WARPS)
        fitting = [w for w in WARP_COUNTS if w <= most and shared + w * each <= limit]
        # What cannot be decoded is not coded either.
        least = max(sum(self._shared(way)) for way in (decodes, True))
        if least > limit or not fitting:
            raise ArgumentError(
                f"format: a tile of {self._format.tokens} x {self._format.dim} takes {least} bytes "
                f"of shared memory, coded and decoded, the device has {limit}"
            )
        warps = fitting[-1]
        fixed = {**self._fixed, "codes": tables, "warp_bytes": warp_bytes}
        if decodes:
            fixed["mailbox"] = self._runner.mailbox
        launch = self._runner.bind(
            quantized_variant(self._format),
            parameters,
            32 * warps,
            shared + warps * each,
            **fixed,
        )
        return launch, warps


def _start(launch: Launch, blocks: int, values: tuple[Value, ...]) -> None:
    """Start a kernel with the addresses of tensors, which live as long as what holds this."""
    launch(
        blocks,
        *(
            0 if v is None else v.data_ptr() if isinstance(v, torch.Tensor) else int(v)
            for v in values
        ),
    )


def _warp_bytes(fmt: TileFormat, decodes: bool) -> int:
    """Return the shared memory of a warp: codes, and what goes with them, but for a ring."""
    granularity = fmt.granularity
    if granularity in (Granularity.CHANNEL, Granularity.CHANNEL_RANGE):
        span = fmt.dim
    else:
        by_tile = granularity in (Granularity.BLOCK_RANGE, Granularity.LOSSLESS)
        span = 1 if by_tile else fmt.tokens
    if decodes:
        floats = span if granularity is Granularity.TOKEN_LEVEL else 2 * span
        total = decode_stage_bytes(fmt) + 4 * floats
    else:
        stage = fmt.tokens * tile_stride(fmt.dim)
        total = stage + 4 * (3 * span + fmt.dim + fmt.parameter_words)
    return ceil_div(total, 16) * 16


def _slot_words(fmt: TileFormat) -> int:
    """Return the words of a slot for a tile: a whole number of 16 bytes.

    All that is written of a tile that is kept raw fits too: its streams.
    """
    lane_units = ceil_div(fmt.values // TILE_LANES * fmt.code_bits, UNIT_BITS) + AHEAD_UNITS
    streams = ceil_div(TILE_LANES * lane_units * UNIT_BITS, 32)
    return ceil_div(max(1 + fmt.parameter_words + streams, fmt.row_bytes // 4), 4) * 4


def _float_bits(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


def _check_compact(table: TableStorage) -> None:
    if table.bases is None or table.lengths is None:
        raise ArgumentError("table: neither bases nor lengths, coded tiles lie in a compact table")
    if table.moved is not None or table.items_per_row != 1:
        raise ArgumentError("table: rows moved or shared by items, coded tiles take neither")
