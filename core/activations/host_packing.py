"""``policy="host"`` (vDNN++): copies cross raw, and the CPU packs them where they have many zeros.

Packing saves host memory, and time on no link: the paper's peer for what CSWAP+ does on the device.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..engine.codecs import count_zeros
from ..engine.codecs.blob import Blob, BlobCodec
from ..engine.kernels.cuda.runner import do_nothing
from ..engine.transfer import Event, Mark, StreamLane, ThreadLane, wait_on_host
from .host_room import HostMemoryError, HostRoom
from .traffic import failed

#: Share of zeros above which a copy is packed, as published.
PACKED_ABOVE = 0.6

#: Returns the codec for bytes ``[n]`` on the CPU; None where there is none that takes them.
CodecOf = Callable[[torch.Tensor], BlobCodec | None]


class PackedOnHost(NamedTuple):
    """What the CPU has made of a raw copy."""

    codec: BlobCodec
    blob: Blob


class RawOnHost:
    """Where a copy lies on the host: raw, and later maybe packed.

    Parameters
    ----------
    host : torch.Tensor
        uint8 ``[n]``.
    stored : Event or ThreadTask
        When it is filled.
    elements : int
        Number of elements.
    dtype : torch.dtype
        Their dtype.
    codec_of : callable
        See `CodecOf`.

    Attributes
    ----------
    packed : PackedOnHost or None
        Set before `host` becomes None, so that whoever finds no bytes finds a blob.
    """

    __slots__ = ("__weakref__", "codec_of", "dtype", "elements", "host", "packed", "stored")

    def __init__(
        self,
        host: torch.Tensor,
        stored: Mark,
        elements: int,
        dtype: torch.dtype,
        codec_of: CodecOf,
    ) -> None:
        self.host: torch.Tensor | None = host
        self.stored = stored
        self.elements, self.dtype = elements, dtype
        self.codec_of = codec_of
        self.packed: PackedOnHost | None = None


class HostPacking:
    """Packs copies of one device in a thread, and unpacks them in another one.

    What computes waits for the CPU where a copy is read that is not unpacked yet.

    Parameters
    ----------
    device : torch.device
        Where copies go back to.

    Attributes
    ----------
    tensors : int
        Number of copies that were packed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._room, self._unpacked_room = HostRoom(on_gpu), HostRoom(on_gpu)
        self._scratch: torch.Tensor | None = None
        self.tensors = 0
        self._open()

    def _open(self) -> None:
        self._packing, self._unpacking = ThreadLane("bitslab-pack"), ThreadLane("bitslab-unpack")

    def pack(self, raw: RawOnHost) -> None:
        """Pack a copy as soon as it has crossed, if anybody still wants it then."""
        self._packing.run(self._pack, weakref.ref(raw), after=raw.stored)

    def _pack(self, ref: weakref.ref[RawOnHost]) -> None:
        raw = ref()
        if raw is None or raw.host is None or failed(raw.stored):
            return
        flat = raw.host.view(raw.dtype)
        if int(count_zeros(flat)) <= PACKED_ABOVE * raw.elements:
            return
        codec = raw.codec_of(flat)
        if codec is None:
            return
        most = codec.max_encoded_bytes(flat.shape, flat.dtype)
        if self._scratch is None or self._scratch.shape[0] < most:
            self._scratch = torch.empty(most, dtype=torch.uint8)
        used = codec.encode(flat, out=self._scratch).nbytes
        if used >= flat.nbytes:
            return
        try:
            with self._current():
                memory = self._room.cut(used, [])
        except HostMemoryError:
            return  # it remains as it is
        memory.copy_(self._scratch[:used])
        raw.packed = PackedOnHost(codec, Blob(memory, flat.shape, flat.dtype))
        raw.host = None
        self.tensors += 1

    def unpack(
        self,
        packed: PackedOnHost,
        out: torch.Tensor,
        lane: StreamLane | ThreadLane,
        after: Mark | None,
    ) -> Mark:
        """Begin to bring a packed copy back to ``out [n]`` uint8, on its device.

        Returns
        -------
        ThreadTask
            Of an event behind the copy to a GPU; of None on a CPU.
        """
        if isinstance(lane, StreamLane):
            return self._unpacking.run(self._unpack_to_gpu, packed, out, lane, after)
        return self._unpacking.run(_unpack, packed, out)

    def _unpack_to_gpu(
        self, packed: PackedOnHost, out: torch.Tensor, lane: StreamLane, after: Mark | None
    ) -> torch.cuda.Event:
        events: list[Event] = []
        try:
            with self._current():
                raw = self._unpacked_room.cut(out.shape[0], events)
        except HostMemoryError:
            raw = torch.empty(out.shape[0], dtype=torch.uint8)  # from which copying is slower
        _unpack(packed, raw)
        done = lane.run(_copy_to_device, out, raw, after=after)
        events.append(done)
        return done

    def _current(self) -> contextlib.AbstractContextManager[object]:
        """Make the GPU a thread's current one: page-locking makes a context on that."""
        if self._device.type == "cuda":
            return torch.cuda.device(self._device)
        return contextlib.nullcontext()

    def close(self) -> None:
        """Wait for the work under way, and end threads; they start again when a copy is read."""
        for lane in (self._packing, self._unpacking):
            wait_on_host(lane.run(do_nothing))  # behind all, which closing would cancel
            lane.close()
        self._room.close()
        self._unpacked_room.close()
        self._scratch = None
        self._open()


def _unpack(packed: PackedOnHost, out: torch.Tensor) -> None:
    packed.codec.decode(packed.blob, out=out.view(packed.blob.dtype))


def _copy_to_device(out: torch.Tensor, raw: torch.Tensor) -> None:
    out.copy_(raw, non_blocking=True)
