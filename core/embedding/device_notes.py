"""Lookups by ids on a GPU of rows that are all resident: nothing is read back for them.

What the host would note of such a batch is noted on the GPU, until the host asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import BitslabError
from ..kernels.cuda import CudaKernels, kernels_on
from .eviction import EvictionStrategy
from .gradients import NONE

if TYPE_CHECKING:
    from .rows import CachedRows


class DeviceNotes:
    """What lookups have noted of each row, on the device; row n lies in slot n.

    Parameters
    ----------
    n_rows : int
        Rows of the table.
    device : torch.device
        Where they are resident.
    counts_uses : bool
        Whether to count how often each row is looked up.
    """

    def __init__(self, n_rows: int, device: torch.device, *, counts_uses: bool) -> None:
        self.device = device
        self._uses: torch.Tensor | None = None
        # Also where nothing else may be written to in training later.
        with torch.inference_mode(False):
            self._dirty = torch.zeros(n_rows, dtype=torch.bool, device=device)
            if counts_uses:
                self._uses = torch.zeros(n_rows, dtype=torch.int64, device=device)
        if device.type == "cuda":
            # Other streams may write to them.
            torch.cuda.current_stream(device).synchronize()
        # Whether there is anything that the host does not know.
        self._fresh = False

    def used(self, index: torch.Tensor) -> None:
        """Note that rows int64 ``[n]`` were looked up."""
        if self._uses is not None:
            self._fresh = True  # first: an interrupt may come in between
            self._uses.index_add_(0, index, torch.ones_like(index))

    def changed(self, index: torch.Tensor) -> None:
        """Note that rows int64 ``[n]`` may change."""
        self._fresh = True
        self._dirty.index_fill_(0, index, True)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._dirty.nbytes + (0 if self._uses is None else self._uses.nbytes)

    def take(self, rows: CachedRows) -> None:
        """Hand over to the host what it does not know; waits for the GPU if there is anything.

        Raises
        ------
        IndexRangeError
            When one of the lookups was given a bad id; nothing was handed over.
        """
        if not self._fresh:
            return
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.device)  # on whatever streams they were noted
            kernels_on(self.device)  # raises what has been told
        residents = rows.residents
        residents.dirty |= self._dirty.cpu().numpy()
        self._dirty.zero_()
        if self._uses is not None:
            residents.keys += self._uses.cpu().numpy()
            self._uses.zero_()
        if on_gpu:
            torch.cuda.current_stream(self.device).synchronize()  # before others note again
        self._fresh = False


def take_notes(rows: CachedRows) -> None:
    """Let the host know which rows may have changed, and how often each was used."""
    if rows.notes is not None:
        rows.notes.take(rows)


def notes_of(rows: CachedRows) -> DeviceNotes:
    """Return what is noted on the device of the rows."""
    if rows.notes is None or rows.notes.device != rows.device:
        take_notes(rows)
        counts_uses = rows.residents.evict is EvictionStrategy.LFU
        rows.notes = DeviceNotes(len(rows), rows.device, counts_uses=counts_uses)
    return rows.notes


def stays_on_gpu(rows: CachedRows, ids: torch.Tensor) -> bool:
    """Tell whether a lookup needs nothing that the host knows."""
    if not ids.is_cuda or ids.device != rows.device:
        return False
    return rows.cache == "rows" and rows.all_resident and rows.table.row_bytes > 0


def look_up_on_gpu(
    rows: CachedRows,
    ids: torch.Tensor,
    *,
    counts: bool,
    wants_grad: bool,
    padding_idx: int | None,
) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """Look up rows that are all resident; nothing waits for the GPU.

    A bad id is told by the next call on the GPU, by what writes the rows back, or by
    `bitslab.raise_pending_errors`. Until then it stands for the first or the last row, as what a
    kernel of torch can take: a step that is made before moves that one.

    Parameters
    ----------
    rows : CachedRows
        The rows.
    ids : torch.Tensor
        int64 or int32 on their GPU.
    counts : bool
        Whether the batch counts for what leaves first.
    wants_grad : bool
        Whether a gradient may come.
    padding_idx : int, optional
        As for `CachedRows.lookup_padded`.

    Raises
    ------
    BitslabError
        When a CUDA graph is captured: its replays would note nothing on the host.
    """
    if rows.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise BitslabError(
            "a lookup in training cannot be captured by a CUDA graph: call eval() first, or leave "
            "the lookup out of the graph"
        )
    flat = ids.detach().reshape(-1).contiguous()
    kernels = kernels_on(rows.device)
    if len(flat):
        _tell_bad_ids(kernels, rows, flat)
    # Always new memory: ids may be written to before backward.
    index = flat.to(torch.int64).clamp(0, len(rows) - 1)
    notes = notes_of(rows)
    if counts:
        notes.used(index)
    rows.statistics.note_on_device(index)
    matrix: torch.Tensor = rows.parameter.data
    if wants_grad:
        # Of its own: the caller may write to what is returned.
        matrix = rows.training.hold(matrix, NONE, NONE, whole=True, on_device=index.clone())
    return matrix, index.view(ids.shape), padding_idx


def _tell_bad_ids(kernels: CudaKernels, rows: CachedRows, ids: torch.Tensor) -> None:
    """Let the mailbox of the GPU tell of an id out of range."""
    found = torch.empty(2, dtype=torch.int64, device=ids.device)
    first_bad, unused = found[:1], found[1:]
    kernels.check_ids(ids, len(rows), first_bad, 0)
    # A copy of one piece of a row, since it is copies that tell what a check has found.
    data = rows.parameter.detach().view(torch.uint8)
    kernels.copy_rows(data, min(4, data.shape[1]), ids[:1], unused, first_bad=first_bad)
