"""Saved tensors that remain on the device in another form: as the way to compute them, or packed.

Views of them are those of any copy; nothing crosses a link.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import torch

from ..engine.advisor.planning import SIZED_BEHIND
from ..engine.codecs.blob import HEADER_BYTES, Blob, BlobCodec
from ..engine.kernels.cuda import kernels_on
from ..engine.kernels.cuda.stream import current_stream
from ..engine.transfer import record_on
from .copies import StoredCopy
from .identity import Span
from .pass_record import PassRecord
from .replay import Replay, replay_of

#: Room for a packed tensor on a GPU, where its size is not known yet, over what was expected.
ROOM = 1.1


class LocalCopy(StoredCopy, ABC):
    """A saved tensor that is on its device, but not as it was.

    Parameters
    ----------
    name, span, root, version, made_in
        As for `StoredCopy`.
    flat : torch.Tensor
        ``[n]`` over its bytes; not held.
    """

    def __init__(
        self,
        name: str,
        flat: torch.Tensor,
        span: Span,
        root: torch.Tensor,
        version: int,
        made_in: PassRecord,
    ) -> None:
        super().__init__(name, flat, span, root, version, made_in)
        self.original = None

    def bytes_of(self, more: bool) -> torch.Tensor:
        """Return the bytes, ``[n]`` of its dtype; held while `more` views will be read soon."""
        on_gpu = self.device.type == "cuda"
        flat = self.still_restored()
        if flat is None:
            flat = self._made()
            self.restores(flat)
            if on_gpu:
                self.restored_on = current_stream(self.device)
        elif on_gpu:
            self.use_here(flat, current_stream(self.device))
        self.restored = flat if more else None
        return flat

    @abstractmethod
    def _made(self) -> torch.Tensor:
        """Return the bytes anew."""


class ReplayedCopy(LocalCopy):
    """A saved tensor that its operation computes again."""

    replay: Replay

    def _made(self) -> torch.Tensor:
        t = self.replay.tensor()
        made = torch.empty(0, dtype=self.dtype, device=self.device)
        return made.set_(t.untyped_storage(), t.storage_offset(), (self.elements,), (1,))


def replayed_copy(
    name: str,
    flat: torch.Tensor,
    span: Span,
    root: torch.Tensor,
    version: int,
    made_in: PassRecord,
    signature: tuple[Any, ...] | None,
) -> ReplayedCopy | None:
    """Return a tensor that is replayed; None where it is not one that was found exact."""
    if signature is None or span != Span(0, root.nbytes) or root.storage_offset():
        return None
    replay = None if made_in.operands is None else replay_of(root, made_in.operands)
    if replay is None or replay.signature != signature:
        return None
    copy = ReplayedCopy(name, flat, span, root, version, made_in)
    copy.replay = replay
    return copy


class PackedCopy(LocalCopy):
    """A saved tensor that is packed in device memory.

    On a GPU its size is not known when it is packed: it gets the memory that is expected, and its
    original remains until it is known to fit.
    """

    flat: torch.Tensor | None
    packed: torch.Tensor | None
    #: uint8 ``[16]`` on the host, its header, and when it is there: the bytes that are used.
    used: tuple[torch.Tensor, torch.cuda.Event] | None

    def settle(self, *, wait: bool = False) -> bool:
        """Give up the original, or what was cut off; return whether that is known yet.

        With `wait` it is: the host waits until the tensor is packed.
        """
        if self.used is None:
            return True
        here, event = self.used
        if wait:
            event.synchronize()
        elif not event.query():  # type: ignore[no-untyped-call]
            return False
        self.used = None
        assert self.packed is not None
        if HEADER_BYTES <= int(here[:8].view(torch.int64)) <= self.packed.shape[0]:
            self.flat = None
        else:
            self.packed = None
        return True

    def _made(self) -> torch.Tensor:
        self.settle()
        if self.flat is not None:
            return self.flat
        assert self.packed is not None and self.codec is not None
        return self.codec.decode(Blob(self.packed, torch.Size([self.elements]), self.dtype))


class UnsizedCopies:
    """Packed copies whose originals remain until these are known to fit, the oldest first."""

    def __init__(self) -> None:
        self._copies: deque[weakref.ref[PackedCopy]] = deque()

    def add(self, copy: PackedCopy) -> None:
        """Add a copy that was packed now."""
        self._copies.append(weakref.ref(copy))

    def settle(self, behind: int = SIZED_BEHIND - 1) -> None:
        """Give up the originals of copies that fit; wait for the sizes of all but the last ones.

        The host is ahead of a GPU by as much as these leave.
        """
        while self._copies:
            copy = self._copies[0]()
            if copy is not None and not copy.settle(wait=len(self._copies) > behind):
                return
            self._copies.popleft()


def packed_copy(
    name: str,
    flat: torch.Tensor,
    span: Span,
    root: torch.Tensor,
    version: int,
    made_in: PassRecord,
    codec: BlobCodec,
    expected_bytes: float,
) -> PackedCopy | None:
    """Return a tensor that is packed where it lies; None where packing saves nothing.

    Raises
    ------
    OutOfMemoryError
        When there is no device memory to encode it in.
    """
    with torch.no_grad():
        data = codec.encode(flat).data
        if flat.device.type != "cuda":
            used = int(data[:8].view(torch.int64))
            if used >= flat.nbytes:
                return None
            packed = data[:used].clone()
        else:
            packed = data[: int(expected_bytes * ROOM) + 2 * HEADER_BYTES].clone()
    copy = PackedCopy(name, flat, span, root, version, made_in)
    copy.encoded_by(codec, None)
    copy.packed, copy.flat, copy.used = packed, None, None
    if flat.device.type == "cuda":
        # By a kernel: the copy engine is busy with tensors that leave, and all would wait.
        here = torch.empty(16, dtype=torch.uint8, pin_memory=True)
        kernels_on(flat.device).copy_blob(data, here)
        copy.flat = flat
        copy.used = here, record_on(current_stream(flat.device))
    return copy
