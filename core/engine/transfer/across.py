"""Packed rows copied from host memory to a GPU piece by piece, and decoded as they arrive.

Contiguous rows cross by the copy engine, piece by piece, into a small ring of staging buffers: a
piece is decoded while the next ones cross. Rows chosen by index are read over the link by the
decoding kernel itself (zero-copy), which page-locked memory allows. On an H200 the copy engine
moves 55 GB/s and a kernel's own reads 51 to 54, so the engine takes what it can.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from typing import Literal

import torch

from ...errors import ArgumentError, ArgumentTypeError, CorruptedDataError
from ..kernels.format import BLOCK_ROWS, PAD_WORDS, RowStorage, ceil_div
from ..kernels.row_kernels import RowKernels
from .lanes import StreamLane
from .staging import StagingBuffer, StagingRing

Via = Literal["auto", "copy-engine", "zero-copy"]

PIECE_BYTES = 16 << 20  # large enough for the copy engine's full rate, small enough to overlap
RING = 3  # pieces in flight: one decoded, one arriving, one queued behind it

_lock = threading.Lock()
_local = threading.local()
_being_read: list[tuple[torch.cuda.Event, torch.Tensor]] = []


def decode_across(
    kernels: RowKernels,
    storage: RowStorage,
    facts: Mapping[str, int],
    ids: torch.Tensor | None,
    row_begin: int,
    out: torch.Tensor,
    via: Via = "auto",
    sm_budget: int | None = None,
) -> None:
    """Decode rows of `storage` in host memory to `out` on a GPU, on torch's current stream.

    Parameters
    ----------
    kernels : RowKernels
        Of the rows' codec, on the GPU.
    storage : RowStorage
        In host memory; page-locked (``PackedRows.pin_memory``), or the copies wait for the host.
    facts : mapping of str to int
        Sizes of `storage`.
    ids : torch.Tensor or None
        int64 rows to decode; None for the rows from `row_begin` on.
    row_begin : int
        First row when `ids` is None.
    out : torch.Tensor
        uint8 ``[n, row_bytes]`` on the GPU, contiguous.
    via : {"auto", "copy-engine", "zero-copy"}
        How the words cross. "auto" is zero-copy for rows chosen by index.
    sm_budget : int, optional
        Multiprocessors that decoding may use; all when left out.

    Raises
    ------
    ArgumentTypeError
        When words would be read by the GPU itself and are not page-locked.
    ArgumentError
        When rows chosen by index are to cross by the copy engine.
    """
    if ids is not None and via == "copy-engine":
        raise ArgumentError("via: rows chosen by index cross by zero-copy, got 'copy-engine'")
    device = out.device
    on_device = RowStorage(
        storage.words,
        storage.bases.to(device, non_blocking=True),
        storage.lengths.to(device, non_blocking=True),
        storage.row_clusters.to(device, non_blocking=True),
    )
    if ids is not None or via == "zero-copy":
        if storage.words.data_ptr() % 16:
            raise ArgumentError(
                "packed: words start at an address that is no multiple of 16 bytes, which the GPU "
                "cannot read in place; pin a copy of their own"
            )
        if not storage.words.is_pinned():
            raise ArgumentTypeError(
                "packed: the GPU would read these rows itself, which needs page-locked host "
                "memory: use packed.pin_memory(), or packed.to(out.device)"
            )
        ids = None if ids is None else ids.to(device)
        kernels.decode(on_device, ids, row_begin, out, facts, sm_budget)
        _keep_until_read(storage.words, device)
        return
    current = torch.cuda.current_stream(device)
    copies = _copy_lane(device)
    copies.follow(current)
    ring: StagingRing[int] = StagingRing([StagingBuffer() for _ in range(RING)])
    # A piece is unpacked as if it were all rows.
    unit = math.lcm(BLOCK_ROWS, kernels.row_period)
    for begin, end in _pieces(storage, row_begin, row_begin + out.shape[0], unit):
        first, last = begin // unit * (unit // BLOCK_ROWS), ceil_div(end, BLOCK_ROWS)
        first_word, end_word = int(storage.bases[first]), int(storage.bases[last])
        limit = min(
            storage.words.shape[0] - PAD_WORDS,
            first_word + (last - first) * facts["max_block_words"],
        )
        if not 0 <= first_word <= end_word <= limit:
            raise CorruptedDataError(
                f"packed: the offsets of rows {first * BLOCK_ROWS} to {end} are damaged"
            )
        staged = ring.take((), must=True)
        copies.wait(staged.released)
        n_words = end_word - first_word + PAD_WORDS
        if staged.memory is None:
            n_allocated = max(PIECE_BYTES // 4 + PAD_WORDS, n_words)
            staged.memory = torch.empty(n_allocated, dtype=torch.int32, device=device)
        elif staged.memory.shape[0] < n_words:
            staged.memory = torch.empty(n_words, dtype=torch.int32, device=device)
            copies.follow(current)
        words = staged.memory[:n_words]
        with copies.on():
            words.copy_(storage.words[first_word : end_word + PAD_WORDS], non_blocking=True)
        staged.ready = copies.record(staged.ready)
        staged.use(current)
        rows = slice(first * BLOCK_ROWS, min(last * BLOCK_ROWS, storage.lengths.shape[0]))
        clusters = on_device.row_clusters
        piece = RowStorage(
            words,
            on_device.bases[first : last + 1] - first_word,
            on_device.lengths[rows],
            clusters[rows] if clusters.numel() else clusters,
        )
        target = out[begin - row_begin : end - row_begin]
        kernels.decode(piece, None, begin - rows.start, target, facts, sm_budget)
        staged.release(current)


def _pieces(
    storage: RowStorage, row_begin: int, row_end: int, unit: int
) -> Iterator[tuple[int, int]]:
    """Cut a range of rows at multiples of `unit`, into pieces of about PIECE_BYTES packed.

    `unit` is a multiple of BLOCK_ROWS.
    """
    bases = storage.bases
    begin = row_begin
    while begin < row_end:
        limit = bases[begin // BLOCK_ROWS] + PIECE_BYTES // 4
        last = (int(torch.searchsorted(bases, limit, right=True)) - 1) * BLOCK_ROWS // unit
        end = min(max(begin // unit + 1, last) * unit, row_end)
        yield begin, end
        begin = end


def _copy_lane(device: torch.device) -> StreamLane:
    """Return the lane that this thread's copies to a device run on."""
    lanes: dict[torch.device, StreamLane] = _local.__dict__.setdefault("lanes", {})
    if device not in lanes:
        lanes[device] = StreamLane(device)
    return lanes[device]


def _keep_until_read(words: torch.Tensor, device: torch.device) -> None:
    """Hold host memory that a kernel reads by its address, until it has read it.

    Torch's allocator of page-locked memory does not know of such reads and would hand the memory
    out again as soon as the caller lets it go. A captured graph's reads are the caller's to guard.
    """
    if torch.cuda.is_current_stream_capturing():
        return
    event = torch.cuda.current_stream(device).record_event()
    with _lock:
        done: list[bool] = [e.query() for e, _ in _being_read]  # type: ignore[no-untyped-call]
        _being_read[:] = [kept for kept, past in zip(_being_read, done, strict=True) if not past]
        _being_read.append((event, words))
