"""In-flight blocks of a history, and asynchronous copies to the host."""

from __future__ import annotations

import torch

from ..engine.codecs.base import rows_as_bytes
from .packing import Packed, TokenRows, pack_rows
from .segment import Segment, Sequences


class InFlightBlocks:
    """Blocks that are being packed on the device; their tokens are still in the tail."""

    def __init__(
        self,
        rows: TokenRows,
        segment: Segment,
        tokens: torch.Tensor,
        n_blocks: int,
        sequences: Sequences,
    ) -> None:
        self.tokens = tokens.shape[2]
        self.n_blocks = n_blocks
        self.sequences = sequences
        self._sizes: list[int] | None = None
        self.made: torch.cuda.Event | None = None  # of words whose size is known at once
        data = rows_as_bytes(rows.rows_of(tokens), rows.row_bytes)
        if segment.kernels is None:
            n = data.shape[0]
            empty = torch.empty(n, dtype=torch.uint8, device="meta")
            self.packed = Packed(data.flatten().view(torch.int32), empty, empty, empty)
            self._sizes = [self.packed.words.shape[0], 0]
            if data.device.type == "cuda":
                self.made = torch.cuda.current_stream(data.device).record_event()
            return
        self.packed = pack_rows(data, segment.kernels)
        self._sizes_copy = AsyncCopy(self.packed.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes on the device of the packed blocks."""
        p = self.packed
        return p.words.nbytes + p.bases.nbytes + (0 if p.lengths.is_meta else p.lengths.nbytes)

    def known(self, wait: bool) -> bool:
        """Return whether the packed size is known; with `wait`, wait for it."""
        if self._sizes is None:
            sizes = self._sizes_copy.get(wait)
            self._sizes = None if sizes is None else sizes.tolist()
        return self._sizes is not None

    def sizes(self) -> tuple[int, int]:
        """Return the words of all rows, and of the longest packed one."""
        assert self._sizes is not None
        return self._sizes[0], self._sizes[1]


class AsyncCopy:
    """An asynchronous copy of a tensor to the host."""

    def __init__(self, t: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._on_host = t
        if t.device.type == "cuda":
            self._on_host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
            self._on_host.copy_(t, non_blocking=True)
            self._event = torch.cuda.current_stream(t.device).record_event()

    def get(self, wait: bool) -> torch.Tensor | None:
        """Return the tensor on the host; None if it is in flight and not waited for."""
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            if not wait:
                return None
            self._event.synchronize()
        return self._on_host
