"""Rows chosen by id to a GPU: ids checked and, where that pays, ordered first.

A gather never waits for the GPU and allocates nothing but its output once it is warm: its scratch
memory is kept for each thread and stream. Under capture in a CUDA graph that memory is the graph's
own instead, so that replays do not interfere with other gathers.
"""

from __future__ import annotations

import threading

import torch

from ..kernels.cuda import CudaKernels, kernels_on
from ..kernels.cuda.ids import CHECKED_BY_ALL, IdScratch
from ..kernels.cuda.stream import stream_pointer
from ..kernels.format import CacheStorage, TableStorage
from ..kernels.row_kernels import RowKernels

MIN_SCRATCH_IDS = 1 << 16

_local = threading.local()


def gather_copied_rows(
    rows: torch.Tensor,
    row_bytes: int,
    ids: torch.Tensor,
    out: torch.Tensor,
    *,
    sort: bool = False,
    sm_budget: int | None = None,
    from_end: bool = True,
) -> None:
    """Copy raw rows chosen by id to a GPU, on torch's current stream.

    Parameters
    ----------
    rows : torch.Tensor
        uint8 ``[N, stride_bytes]`` in page-locked host memory or on the GPU.
    row_bytes : int
        Bytes of a row, up to stride_bytes.
    ids : torch.Tensor
        int32 or int64 ``[n]`` on the GPU, contiguous. A bad id leaves `out` untouched and is raised
        by the next call on the GPU or by `bitslab.raise_pending_errors`.
    out : torch.Tensor
        ``[n, ...]`` of any dtype on the GPU, rows of row_bytes bytes, contiguous.
    sort : bool
        Whether to order the ids first; see `bitslab.engine.advisor.pays_to_sort`.
    sm_budget : int, optional
        Multiprocessors that the kernels may use; all when left out.
    from_end : bool
        Whether negative ids count from the end; they are out of range if not.
    """
    n = out.shape[0]
    if not n:
        return
    n_rows = rows.shape[0]
    kernels = kernels_on(out.device)
    lowest = -n_rows if from_end else 0
    first_bad, order = _look_at_ids(kernels, ids, n_rows, sort, lowest)
    kernels.copy_rows(
        rows,
        row_bytes,
        ids,
        out,
        first_bad=first_bad,
        lowest=lowest,
        order=order,
        sm_budget=sm_budget,
    )


def gather_packed_rows(
    table: TableStorage,
    packed: RowKernels,
    ids: torch.Tensor,
    out: torch.Tensor,
    *,
    cache: CacheStorage | None = None,
    counters: torch.Tensor | None = None,
    sort: bool = False,
    sm_budget: int | None = None,
    from_end: bool = True,
) -> None:
    """Decode rows chosen by id to a GPU, on torch's current stream.

    Parameters
    ----------
    table : TableStorage
        Words in page-locked host memory or on the GPU, the rest on the GPU.
    packed : RowKernels
        On the GPU, of the table's codec, or of the cache's where the table is raw.
    ids, out, sort, sm_budget, from_end
        As in `gather_copied_rows`.
    cache : CacheStorage, optional
        Rows that need not be read from the table.
    counters : torch.Tensor, optional
        int64 ``[2 * (MAX_SLABS + 1)]`` on the GPU, to which rows and words by source are added.
    """
    n = out.shape[0]
    if not n:
        return
    kernels = kernels_on(out.device)
    n_items = table.n_items
    lowest = -n_items if from_end else 0
    first_bad, order = _look_at_ids(kernels, ids, n_items, sort, lowest)
    packed.gather(
        table,
        ids,
        out,
        cache=cache,
        counters=counters,
        first_bad=first_bad,
        lowest=lowest,
        order=order,
        sm_budget=sm_budget,
    )


def _look_at_ids(
    kernels: CudaKernels, ids: torch.Tensor, n_rows: int, sort: bool, lowest: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Check ids on the GPU, if the gather is not to do so itself, and order them with `sort`.

    Returns
    -------
    first_bad : torch.Tensor or None
        What was found; None where it is left to the gather.
    order : torch.Tensor or None
        What to take the ids in.
    """
    n = ids.shape[0]
    if n <= CHECKED_BY_ALL and not sort:
        return None, None
    scratch = _scratch(ids.device, n)
    if sort:
        order = kernels.ids.order(ids, n_rows, scratch, lowest)
        return scratch.first_bad, order
    kernels.ids.check(ids, n_rows, scratch.first_bad, lowest)
    return scratch.first_bad, None


def _scratch(device: torch.device, n_ids: int) -> IdScratch:
    """Return this thread's scratch memory for its current stream on a GPU."""
    if torch.cuda.is_current_stream_capturing():
        return IdScratch.allocate(device, n_ids)
    kept: dict[tuple[torch.device, int], IdScratch] = _local.__dict__.setdefault("scratch", {})
    key = (device, stream_pointer(device))
    found = kept.get(key)
    if found is None or found.order.shape[0] < n_ids:
        # Grown by half at least, so that batches of changing size soon fit.
        capacity = n_ids if found is None else max(n_ids, found.order.shape[0] * 3 // 2)
        found = kept[key] = IdScratch.allocate(device, max(capacity, MIN_SCRATCH_IDS))
    return found
