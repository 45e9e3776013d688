"""Rows in ordinary host memory brought to a GPU piece by piece, the next ones while one is used.

A copy from memory that is not page-locked waits for the GPU and runs at a fraction of the link's
rate. Here the host copies a piece to a small page-locked buffer, the copy engine takes it from
there, and meanwhile the host fills the next buffer and the GPU works on the piece before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

import numpy as np
import torch
from numpy.typing import NDArray

from ..kernels.format import BLOCK_ROWS
from ..memory.arena import host_arena
from .lanes import StreamLane, wait_on_host
from .staging import StagingBuffer, StagingRing

#: Bytes of a piece: large enough for the copy engine's full rate.
PIECE_BYTES = 16 << 20
RING = 3  # pieces in flight: one used, one crossing, one that the host fills


class RowUploader:
    """Brings rows in host memory to a GPU, for kernels that run on torch's current stream.

    Parameters
    ----------
    device : torch.device
        The GPU.

    Notes
    -----
    One thread at a time. Its buffers, `RING` pieces in page-locked memory of the arena and as many
    on the GPU, are made at the first use and go with it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = StreamLane(device)
        self._in_host = _ring()
        self._on_device = _ring()

    def pieces(self, rows: torch.Tensor) -> Generator[torch.Tensor]:
        """Yield rows on the GPU, in order.

        Parameters
        ----------
        rows : torch.Tensor
            uint8 ``[N, row_bytes]`` on the CPU, contiguous; N at least 1. It must not change until
            the last piece was asked for.

        Yields
        ------
        torch.Tensor
            uint8 ``[n, row_bytes]``, n a multiple of BLOCK_ROWS but for the last piece. Work on it
            must be queued on torch's current stream before the next piece is asked for; then its
            memory is used again.
        """
        n_rows, row_bytes = rows.shape
        step = max(1, PIECE_BYTES // (BLOCK_ROWS * row_bytes)) * BLOCK_ROWS
        user = torch.cuda.current_stream(self._device)
        source = rows.numpy()
        crossing: deque[tuple[StagingBuffer[int], torch.Tensor]] = deque()
        for begin in range(0, n_rows, step):
            part = source[begin : begin + step]
            crossing.append(self._send(part, min(step, n_rows) * row_bytes, user))
            if len(crossing) == RING - 1:
                yield from self._use(*crossing.popleft(), user)
        while crossing:
            yield from self._use(*crossing.popleft(), user)

    def _send(
        self, rows: NDArray[np.uint8], most_bytes: int, user: torch.cuda.Stream
    ) -> tuple[StagingBuffer[int], torch.Tensor]:
        """Queue the copy of a piece; return its buffer on the GPU, and the piece in it."""
        staged = self._in_host.take((), must=True)
        if staged.released is not None:
            wait_on_host(staged.released)
        if staged.memory is None or staged.memory.numel() < rows.nbytes:
            reserved = host_arena().reserve(max(PIECE_BYTES, most_bytes))
            # Not to be used by others before the copy engine has read it.
            copies = self._copies
            staged.memory = reserved.cut(reserved.nbytes, lambda: [copies.record()])
        held = staged.data[: rows.nbytes]
        # By numpy, which lets other threads run; torch would start a team of threads for each.
        np.copyto(held.numpy().reshape(rows.shape), rows)
        target = self._on_device.take((), must=True)
        self._copies.wait(target.released)
        if target.memory is None or target.memory.numel() < rows.nbytes:
            nbytes = max(PIECE_BYTES, most_bytes)
            target.memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._copies.follow(user)
            self._copies.keep(target.memory)
        piece = target.data[: rows.nbytes]
        with self._copies.on():
            piece.copy_(held, non_blocking=True)
        target.ready = self._copies.record(target.ready)
        staged.released = self._copies.record(staged.released)
        return target, piece.view(rows.shape)

    @staticmethod
    def _use(
        buffer: StagingBuffer[int], piece: torch.Tensor, user: torch.cuda.Stream
    ) -> Generator[torch.Tensor]:
        buffer.use(user)
        try:
            yield piece
        finally:
            buffer.release(user)


def _ring() -> StagingRing[int]:
    return StagingRing([StagingBuffer() for _ in range(RING)])
