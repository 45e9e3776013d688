"""The kernels on the CPU: Numba functions over torch tensors in ordinary memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...errors import load_optional
from ..format import GROUP_CHUNKS, PAD_WORDS, RowLayout, RowStorage
from .compiling import call
from .threads import run_ranges

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_NO_IDS = np.empty(0, np.int64)


def _jitted() -> Any:
    """Load the Numba functions on first use, so that importing bitslab does not load Numba."""
    load_optional("numba", extra=None, purpose="packing rows on the CPU")
    from . import rows

    return rows


def _unsigned(t: torch.Tensor) -> np.ndarray[Any, Any]:
    """View a tensor of integers as the unsigned numpy array of the same width."""
    return t.numpy().view(_UNSIGNED[t.element_size()])


def _chunks(rows: torch.Tensor, chunk_bytes: int) -> np.ndarray[Any, Any]:
    """View contiguous ``[N, row_bytes]`` uint8 rows as ``[N, C]`` chunks.

    An address that is no multiple of the chunk is fine: numpy marks such a view, and Numba
    compiles accesses for it.
    """
    return rows.numpy().view(_UNSIGNED[chunk_bytes])


def _tables(layout: RowLayout) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return tables and starts as the kernels read them: for each position, or 32 times the one."""
    tables, starts = _unsigned(layout.tables), layout.starts.numpy()
    if layout.format.uniform:
        tables = np.repeat(tables, GROUP_CHUNKS, axis=2)
        starts = starts[:, 1:] * np.arange(GROUP_CHUNKS + 1, dtype=np.int32)
    return tables, starts


def count_bits(rows: torch.Tensor, chunk_bytes: int) -> torch.Tensor:
    """Count, for every bit of every chunk position, the rows that have it set.

    Parameters
    ----------
    rows : torch.Tensor
        uint8 ``[N, row_bytes]``, contiguous.
    chunk_bytes : int
        Bytes of a chunk; divides row_bytes.

    Returns
    -------
    torch.Tensor
        int64 ``[C, 8 * chunk_bytes]``, bit 0 the least significant.
    """
    kernel = _jitted().count_bits
    chunks = _chunks(rows, chunk_bytes)

    def work(begin: int, end: int) -> np.ndarray[Any, Any]:
        counts = np.zeros((chunks.shape[1], 8 * chunk_bytes), np.int64)
        call(kernel, chunks, counts, begin, end)
        return counts

    return torch.from_numpy(sum(run_ranges(work, *rows.shape)))


def packed_words(rows: torch.Tensor, layout: RowLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Measure packed rows.

    Parameters
    ----------
    rows : torch.Tensor
        uint8 ``[N, row_bytes]``, contiguous.
    layout : RowLayout
        On the same device.

    Returns
    -------
    lengths : torch.Tensor
        ``[N]`` of the format's length dtype: words of the packed row, 0 for a row kept raw.
    row_clusters : torch.Tensor
        uint8 ``[N]``: the cluster that packs the row best; ``[0]`` when there is only one.
    """
    f = layout.format
    lengths = torch.empty(rows.shape[0], dtype=f.length_dtype)
    row_clusters = torch.empty(rows.shape[0] if f.clusters > 1 else 0, dtype=torch.uint8)
    kernel = _jitted().packed_words
    chunks = _chunks(rows, f.chunk_bytes)
    tables, starts = _tables(layout)
    lengths_out, clusters_out = _unsigned(lengths), row_clusters.numpy()

    def work(begin: int, end: int) -> None:
        call(
            kernel,
            chunks,
            tables,
            starts,
            f.code_bits,
            f.grouped,
            f.uniform,
            f.row_words,
            lengths_out,
            clusters_out,
            begin,
            end,
        )

    run_ranges(work, rows.shape[0], f.row_bytes * f.clusters)
    return lengths, row_clusters


def encode_rows(
    rows: torch.Tensor,
    layout: RowLayout,
    lengths: torch.Tensor,
    row_clusters: torch.Tensor,
    bases: torch.Tensor,
    n_words: int,
) -> torch.Tensor:
    """Pack rows whose places are known.

    Parameters
    ----------
    rows : torch.Tensor
        uint8 ``[N, row_bytes]``, contiguous.
    layout : RowLayout
        On the same device.
    lengths, row_clusters : torch.Tensor
        What `packed_words` gave for these rows.
    bases : torch.Tensor
        int64 ``[ceil(N / 32) + 1]``, the first word of each block of 32 rows.
    n_words : int
        Words of all rows together.

    Returns
    -------
    torch.Tensor
        int32 ``[n_words + PAD_WORDS]``.
    """
    f = layout.format
    words = torch.empty(n_words + PAD_WORDS, dtype=torch.int32)
    words[n_words:] = 0
    kernel = _jitted().encode_rows
    chunks = _chunks(rows, f.chunk_bytes)
    words_out = _unsigned(words)
    arguments = (
        chunks,
        rows.numpy(),
        *_tables(layout),
        f.code_bits,
        f.grouped,
        f.uniform,
        f.row_words,
        f.keep_section,
        f.levels,
        _unsigned(lengths),
        row_clusters.numpy(),
        bases.numpy(),
        words_out,
        words_out.view(np.uint8),
    )
    run_ranges(lambda begin, end: call(kernel, *arguments, begin, end), rows.shape[0], f.row_bytes)
    return words


def check_ids(ids: torch.Tensor, n_rows: int) -> int:
    """Return the first position of an id outside -n_rows..n_rows - 1, or -1."""
    return int(call(_jitted().check_ids, ids.numpy(), n_rows))


def check_rows(storage: RowStorage, layout: RowLayout, ids: torch.Tensor | None = None) -> int:
    """Return the first row that is damaged, or -1.

    Parameters
    ----------
    storage : RowStorage
        Packed rows; their words may be damaged in any way, the other tensors too.
    layout : RowLayout
        On the same device.
    ids : torch.Tensor, optional
        int64 rows to look at, checked by `check_ids`; all rows when left out.
    """
    n = storage.lengths.shape[0] if ids is None else ids.shape[0]
    return _check_range(storage, layout, ids, 0, n)


def _check_range(
    storage: RowStorage, layout: RowLayout, ids: torch.Tensor | None, first: int, count: int
) -> int:
    if count == 0:
        return -1
    f = layout.format
    kernel = _jitted().check_rows
    arguments = (
        _unsigned(storage.words),
        storage.bases.numpy(),
        _unsigned(storage.lengths),
        storage.row_clusters.numpy(),
        _tables(layout)[1],
        f.chunks,
        8 * f.chunk_bytes,
        f.code_bits,
        f.grouped,
        f.uniform,
        f.row_words,
        _NO_IDS if ids is None else ids.numpy(),
    )
    bad = run_ranges(
        lambda begin, end: int(call(kernel, *arguments, first + begin, first + end)),
        count,
        f.row_bytes,
    )
    return next((row for row in bad if row >= 0), -1)


def decode_rows(
    storage: RowStorage,
    layout: RowLayout,
    ids: torch.Tensor | None,
    row_begin: int,
    out: torch.Tensor,
    facts: Mapping[str, int] | None = None,
    sm_budget: int | None = None,
) -> int:
    """Decode rows to `out`, after checking that they are sound.

    Parameters
    ----------
    storage : RowStorage
        Packed rows.
    layout : RowLayout
        On the same device.
    ids : torch.Tensor or None
        int64 ``[n]`` rows to decode, negative ones counted from the end, checked by `check_ids`;
        None for the rows from `row_begin` on.
    row_begin : int
        First row when `ids` is None.
    out : torch.Tensor
        uint8 ``[n, row_bytes]``, contiguous.
    facts, sm_budget
        For the launch on a GPU; not needed here.

    Returns
    -------
    int
        -1, or the number of a damaged row; then nothing was written.
    """
    n = out.shape[0]
    if n == 0:
        return -1
    f = layout.format
    bad = _check_range(storage, layout, ids, 0 if ids is not None else row_begin, n)
    if bad >= 0:
        return bad
    kernel = _jitted().decode_rows
    words = _unsigned(storage.words)
    arguments = (
        words,
        words.view(np.uint8),
        storage.bases.numpy(),
        _unsigned(storage.lengths),
        storage.row_clusters.numpy(),
        *_tables(layout),
        f.code_bits,
        f.grouped,
        f.uniform,
        f.row_words,
        f.keep_section,
        f.levels,
        _NO_IDS if ids is None else ids.numpy(),
        row_begin,
        _chunks(out, f.chunk_bytes),
        out.numpy(),
    )
    run_ranges(lambda begin, end: call(kernel, *arguments, begin, end), n, f.row_bytes)
    return -1
