"""Bytes in ordinary host memory brought to a GPU piece by piece, the next ones while one is used.

A copy from memory that is not page-locked waits for the GPU and runs at a fraction of the link's
rate. Here the host copies a part to a small page-locked buffer, the copy engine takes it from
there, and meanwhile the host fills the next buffer and the GPU works on what came before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

import numpy as np
import torch
from numpy.typing import NDArray

from ..kernels.format import BLOCK_ROWS
from ..memory.arena import host_arena
from .lanes import Mark, StreamLane, wait_on_host
from .staging import StagingBuffer, StagingRing

#: Bytes of a copy: large enough for the copy engine's full rate.
COPY_BYTES = 16 << 20
STAGED = 3  # copies in flight: one that arrives, one that waits, one that the host fills
#: Bytes of a piece: who packs one launches a dozen kernels and waits for its size.
PIECE_BYTES = 64 << 20
RING = 2  # pieces on the GPU: one used, one crossing


class RowUploader:
    """Brings rows in host memory to a GPU, for kernels that run on torch's current stream.

    Parameters
    ----------
    device : torch.device
        The GPU.

    Notes
    -----
    One thread at a time. Its buffers, `STAGED` copies in page-locked memory of the arena and up to
    `RING` pieces on the GPU, are made at the first use and go with it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = StreamLane(device)
        self._in_host = _ring(STAGED)
        self._on_device = _ring(RING)

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
            crossing.append(self._send(source[begin : begin + step], user))
            if len(crossing) == RING:
                yield from self._use(*crossing.popleft(), user)
        while crossing:
            yield from self._use(*crossing.popleft(), user)

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Mark | None) -> Mark:
        """Bring bytes to memory on the GPU; return a mark behind the last copy.

        Parameters
        ----------
        source : torch.Tensor
            uint8 ``[N]`` on the CPU, contiguous. It is read before this returns.
        target : torch.Tensor
            uint8 ``[N]`` on the GPU.
        after : event or task, optional
            What the copies wait for.
        """
        self._copies.wait(after)
        self._copies.keep(target)
        self._fill(target, source.numpy())
        return self._copies.record()

    def _send(
        self, rows: NDArray[np.uint8], user: torch.cuda.Stream
    ) -> tuple[StagingBuffer[int], torch.Tensor]:
        """Queue the copies of a piece; return its buffer on the GPU, and the piece in it."""
        buffer = self._on_device.take((), must=True)
        self._copies.wait(buffer.released)
        if buffer.memory is None or buffer.memory.numel() < rows.nbytes:
            nbytes = max(COPY_BYTES, rows.nbytes)
            buffer.memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._copies.follow(user)
            self._copies.keep(buffer.memory)
        piece = buffer.data[: rows.nbytes]
        self._fill(piece, rows.reshape(-1))
        buffer.ready = self._copies.record(buffer.ready)
        return buffer, piece.view(rows.shape)

    def _fill(self, target: torch.Tensor, source: NDArray[np.uint8]) -> None:
        """Queue copies of bytes through the page-locked buffers."""
        for begin in range(0, source.nbytes, COPY_BYTES):
            part = source[begin : begin + COPY_BYTES]
            staged = self._staging_buffer()
            held = staged.data[: part.nbytes]
            # By numpy, which lets other threads run; torch would start a team of threads for each.
            np.copyto(held.numpy(), part)
            with self._copies.on():
                target[begin : begin + part.nbytes].copy_(held, non_blocking=True)
            staged.released = self._copies.record(staged.released)

    def _staging_buffer(self) -> StagingBuffer[int]:
        """Return a page-locked buffer whose last bytes have crossed."""
        staged = self._in_host.take((), must=True)
        if staged.released is not None:
            wait_on_host(staged.released)
        if staged.memory is None or staged.memory.numel() < COPY_BYTES:
            reserved = host_arena().reserve(COPY_BYTES)
            # Not to be used by others before the copy engine has read it.
            copies = self._copies
            staged.memory = reserved.cut(reserved.nbytes, lambda: [copies.record()])
        return staged

    @staticmethod
    def _use(
        buffer: StagingBuffer[int], piece: torch.Tensor, user: torch.cuda.Stream
    ) -> Generator[torch.Tensor]:
        buffer.use(user)
        try:
            yield piece
        finally:
            buffer.release(user)


def _ring(buffers: int) -> StagingRing[int]:
    return StagingRing([StagingBuffer() for _ in range(buffers)])
