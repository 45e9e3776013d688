"""Packed rows of a whole tensor in one buffer; see `blob_format.PackedLayout`."""

from __future__ import annotations

import numpy as np
import torch

from ...errors import CorruptedDataError
from . import cpu
from .blob_format import PackedLayout
from .cpu.blobs import check_header, value_bytes_of, write_header
from .cuda import kernels_on
from .format import (
    BLOCK_ROWS,
    PAD_WORDS,
    RowLayout,
    RowStorage,
    bases_of_rows,
    ceil_div,
    words_of_rows,
)

#: Elements, bytes of one, form.
Header = tuple[int, int, int]


def pack_blob(
    x: torch.Tensor,
    layout: RowLayout,
    parts: PackedLayout,
    data: torch.Tensor,
    header: Header,
    sm_budget: int | None = None,
    *,
    counted: bool = False,
) -> None:
    """Pack the rows of a tensor; on a GPU without waiting for it.

    Parameters
    ----------
    x : torch.Tensor
        uint8 ``[n_rows * row_bytes + tail_bytes]``, contiguous.
    layout : RowLayout
        On the same device, uniform, of one cluster.
    parts : PackedLayout
        Where the parts go.
    data : torch.Tensor
        uint8 ``[max_bytes]`` or more, contiguous, at a multiple of ALIGN_BYTES, to write to.
    header : tuple of int
        For the header: elements, bytes of one, form.
    sm_budget : int, optional
        Multiprocessors that a launch may use; all when left out.
    counted : bool
        Whether the header is there already: only rows that hold the value bytes that it says are
        packed, and of it the used bytes alone are written.
    """
    if x.device.type == "cuda":
        kernels_on(x.device).pack_blob(x, layout, parts, data, header, sm_budget, counted=counted)
        return
    f = layout.format
    n_rows = _rows_present(data, f.row_bytes, parts) if counted else parts.n_rows
    rows = x[: n_rows * f.row_bytes].view(n_rows, f.row_bytes)
    lengths, clusters = cpu.packed_words(rows, layout)
    bases, _ = bases_of_rows(words_of_rows(lengths, f.row_words))
    n_words = int(bases[-1])
    words = cpu.encode_rows(rows, layout, lengths, clusters, bases, n_words)
    raw = data.numpy()
    raw[parts.lengths_at : parts.words_at] = 0
    for at, part in (
        (parts.lengths_at, lengths),
        (parts.bases_at, bases),
        (parts.tail_at, x[parts.n_rows * f.row_bytes :][: parts.tail_bytes]),
        (parts.words_at, words),
    ):
        content = part.contiguous().view(torch.uint8).numpy()
        raw[at : at + len(content)] = content
    used = parts.used_bytes(n_words)
    if counted:
        raw[:8].view(np.int64)[0] = used
    else:
        write_header(data, used, *header)


def unpack_blob(
    data: torch.Tensor,
    layout: RowLayout,
    parts: PackedLayout,
    out: torch.Tensor,
    header: Header,
    sm_budget: int | None = None,
    *,
    counted: bool = False,
) -> None:
    """Unpack the rows of a tensor; on a GPU without waiting for it.

    Parameters
    ----------
    data : torch.Tensor
        uint8 ``[n]``, contiguous, at a multiple of ALIGN_BYTES; may hold anything, but has as many
        bytes as a buffer of no words, or more.
    layout, parts, header, sm_budget, counted
        As for `pack_blob`.
    out : torch.Tensor
        uint8 ``[n_rows * row_bytes + tail_bytes]``, contiguous.

    Raises
    ------
    CorruptedDataError
        When header, lengths, bases and rows do not fit together; nothing was written. On a GPU by a
        later call.
    """
    if data.device.type == "cuda":
        kernels_on(data.device).unpack_blob(
            data, layout, parts, out, header, sm_budget, counted=counted
        )
        return
    f = layout.format
    used = check_header(data, *header, least_bytes=parts.used_bytes(0))
    n_rows = _rows_present(data, f.row_bytes, parts) if counted else parts.n_rows
    stored = parts.storage(data[:used], f.length_dtype)
    bases = stored.bases[: ceil_div(n_rows, BLOCK_ROWS) + 1]
    storage = RowStorage(stored.words, bases, stored.lengths[:n_rows], stored.row_clusters)
    n_words = stored.words.shape[0] - PAD_WORDS
    expected, _ = bases_of_rows(words_of_rows(storage.lengths, f.row_words))
    if not torch.equal(expected, bases) or parts.used_bytes(int(expected[-1])) != used:
        raise CorruptedDataError(
            f"blob: lengths and bases of its rows do not fit its {n_words} words; "
            "nothing was decoded"
        )
    bad = cpu.decode_rows(
        storage, layout, None, 0, out[: n_rows * f.row_bytes].view(n_rows, f.row_bytes)
    )
    if bad >= 0:
        raise CorruptedDataError(f"blob: row {bad} is damaged; nothing was decoded")
    if parts.tail_bytes:
        out[parts.n_rows * f.row_bytes :] = data[parts.tail_at :][: parts.tail_bytes]


def _rows_present(data: torch.Tensor, row_bytes: int, parts: PackedLayout) -> int:
    return min(parts.n_rows, ceil_div(value_bytes_of(data), row_bytes))
