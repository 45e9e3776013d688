"""Packing weights on a GPU, and bringing them to host memory, ahead of who waits for them.

What takes the time is neither the codec nor the link but memory of the host: reading weights that
lie there, and taking and locking the pages that packed ones go to. So these run in threads, several
at a time, while the caller chooses codecs and queues work for the GPU:

- weights on the GPU are packed on the caller's stream, at once;
- weights in host memory cross by a ring of staging buffers and are packed on arrival, each worker
  with a ring and a stream of its own; those that the GPU keeps as they are cross in the same way;
- when the last weight of a unit is packed, a thread takes memory of exactly the size of its image,
  and the copy engine fills it.

What is on the way is bounded in bytes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from ..compressed import CompressedTensor
from ..dtypes import flat_bytes
from ..engine.kernels.format import ceil_div
from ..engine.memory.page_taking import available_cores
from ..engine.tasks import ThreadTask
from ..engine.transfer import RowUploader, StreamLane, ThreadLane
from ..engine.transfer.lanes import Mark, record_on
from ..engine.transfer.upload import PIECE_BYTES, RING
from .records import TensorRecord, write_parts
from .tensor_packer import PackingPlan

T = TypeVar("T")

THREAD_NAME = "bitslab-packing"
#: Threads that read weights in host memory, half of the cores at most. One reads a mapped file at 2
#: to 5 GB/s, as it enters its pages in the page table meanwhile. Their pieces on the GPU take at
#: most half of the bytes that its memory allows to be on the way.
UPLOADERS = 6
#: Memory of the GPU that each of them takes at first: for so many tensors such as its first one.
TENSORS_AHEAD = 4
#: Threads that take memory for images, which page-locking keeps waiting for the driver.
IMAGE_THREADS = 3
#: Raw bytes on the way, at most, and at least where memory of the GPU is short; and the share of
#: its free memory between both.
MOST_BYTES, LEAST_BYTES, FREE_SHARE = 2 << 30, 256 << 20, 0.5
#: The share of all tensors' bytes that may be on the way, above one piece of them: what is on the
#: way comes on top of a model's own memory. From 3 GiB of tensors on `MOST_BYTES` is less.
TENSORS_SHARE = 2 / 3
#: Bytes of all tensors for which one more thread reads them: each takes `STAGED` page-locked
#: buffers, and `RING` pieces on the GPU.
UPLOADER_BYTES = RING * PIECE_BYTES


class OnDevice:
    """A tensor that was packed or kept raw, and the event behind the work that made it.

    Parameters
    ----------
    tensor : CompressedTensor
        On the GPU or in host memory.
    made : torch.cuda.Event or None
        The event; None where nothing has to be waited for.
    """

    def __init__(self, tensor: CompressedTensor, made: torch.cuda.Event | None = None) -> None:
        self.tensor = tensor
        self.made = made

    def on_host(self) -> OnDevice:
        """Return it in host memory; waits for the GPU."""
        if self.made is None:
            return self
        self.made.synchronize()
        return OnDevice(self.tensor.to("cpu"))


class DevicePacking:
    """Packs tensors on a GPU, and fills images of units with them, in threads.

    Parameters
    ----------
    device : torch.device
        The GPU.
    images_in_turn : bool
        Whether images are made one after the other, as those of a file are.
    tensors_bytes : int or None
        Raw bytes of all tensors, where they are known: of few, fewer are on the way at a time, in
        fewer threads.

    Notes
    -----
    One thread at a time queues work. Work that failed raises its error from its future alone.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        images_in_turn: bool = False,
        tensors_bytes: int | None = None,
    ) -> None:
        self.device = device
        room = _room_bytes(device)
        self._limit_bytes = limit_bytes(room, tensors_bytes)
        uploaders = n_uploaders(room, tensors_bytes, available_cores())
        self._bytes_of_uploader = self._limit_bytes // uploaders
        self._uploading = ThreadLane(f"{THREAD_NAME}-upload", uploaders)
        self._imaging = ThreadLane(f"{THREAD_NAME}-image", 1 if images_in_turn else IMAGE_THREADS)
        self._downloads = StreamLane(device)
        self._of_thread = threading.local()
        # Entered by itself: an interrupt inside the condition's own code would leave it taken.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._bytes_on_way = 0
        self._ending = 0  # images and uploads, whose end makes room

    # Room

    def admit(self, nbytes: int, make_room: Callable[[], int]) -> None:
        """Wait until so many raw bytes more may be on the way, and count them.

        Parameters
        ----------
        nbytes : int
            Of a tensor. One larger than all that is allowed goes alone.
        make_room : callable
            Called where no image or upload is under way whose end would make room: takes other
            tensors off the GPU and returns their raw bytes.
        """
        with self._mutex:
            while self._bytes_on_way and self._bytes_on_way + nbytes > self._limit_bytes:
                if not self._ending:
                    self._bytes_on_way -= make_room()
                    break
                self._changed.wait()
            self._bytes_on_way += nbytes

    # Work

    def pack(self, plan: PackingPlan) -> ThreadTask[OnDevice]:
        """Pack a tensor; one in host memory in a thread, in which it must not change."""
        if plan.uploadable:
            return self._uploading.submit(self._uploaded, plan)
        if plan.stored.device != self.device:
            return packed_here(plan)
        try:
            ct = plan.packed()
        except torch.OutOfMemoryError:
            self.wait()  # what leaves the GPU makes room
            torch.cuda.empty_cache()
            ct = plan.packed()
        return ThreadTask.of(OnDevice(ct, record_on(torch.cuda.current_stream(self.device))))

    def upload(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ThreadTask[Mark]]:
        """Copy a contiguous tensor in host memory to the GPU as it is, in a thread.

        Parameters
        ----------
        tensor : torch.Tensor
            It must not change before the copy is there. `admit` has counted its bytes.

        Returns
        -------
        copy : torch.Tensor
            On the GPU, made on torch's current stream.
        crossed : ThreadTask
            Of a mark: behind it the bytes are there.
        """
        copy = torch.empty_like(tensor, device=self.device)
        made = record_on(torch.cuda.current_stream(self.device))
        return copy, self._counted(tensor.nbytes, self._uploading, self._copied, tensor, copy, made)

    def image(
        self,
        pieces: Mapping[str, ThreadTask[OnDevice]],
        nbytes: int,
        make: Callable[[dict[str, OnDevice]], T],
    ) -> ThreadTask[T]:
        """Call ``make(pieces)`` in a thread, when all pieces of a unit are packed.

        Parameters
        ----------
        pieces : mapping of str to ThreadTask
            What `pack` returned, by the tensors' names.
        nbytes : int
            The raw bytes that are off the way afterwards.
        make : callable
            Makes the image, with `fill`.
        """
        return self._counted(nbytes, self._imaging, self._made, pieces, make)

    def _counted(
        self, nbytes: int, lane: ThreadLane, work: Callable[..., T], *args: object
    ) -> ThreadTask[T]:
        """Queue work in a thread, at whose end raw bytes are off the way."""
        with self._mutex:
            self._ending += 1
        task = lane.submit(work, *args)
        task.add_done_callback(lambda _: self._arrived(nbytes))
        return task

    def fill(
        self,
        image: torch.Tensor,
        records: Mapping[str, TensorRecord],
        pieces: Mapping[str, OnDevice],
    ) -> None:
        """Copy packed tensors to their offsets in an image; wait until they are there.

        The image is in host memory, or on the GPU and was made on torch's current stream. What lies
        on the GPU goes by the copy engine while the host copies the rest.
        """
        lane = self._downloads
        on_device = image.device.type == "cuda"
        if on_device:
            lane.follow(torch.cuda.current_stream(self.device))
        by_host = []
        for name, record in records.items():
            piece = pieces[name]
            if piece.made is None and not on_device:
                by_host.append((piece, record))
                continue
            lane.wait(piece.made)
            with lane.on():
                _copy_parts(piece.tensor, record, image)
        crossed = lane.record()
        for piece, record in by_host:
            write_parts(piece.tensor, record, image)
        crossed.synchronize()

    def wait(self) -> None:
        """Wait until no image or upload is under way."""
        with self._mutex:
            while self._ending:
                self._changed.wait()

    def close(self) -> None:
        """Cancel what has not begun, and wait for the rest; again does nothing."""
        self._uploading.close(None)
        self._imaging.close(None)
        self._downloads.close()

    # In threads

    def _uploaded(self, plan: PackingPlan) -> OnDevice:
        with self._on_device():
            lane, uploader = self._own()
            try:
                with lane.on():
                    if not hasattr(self._of_thread, "packs"):
                        self._of_thread.packs = True
                        wanted = TENSORS_AHEAD * plan.stored.nbytes
                        take_device_memory(min(wanted, self._bytes_of_uploader), self.device)
                    ct = plan.packed_by(uploader)
            except torch.OutOfMemoryError:
                # Of the GPU: the host has what is packed here.
                return OnDevice(plan.packed())
            return OnDevice(ct, None if ct.device.type == "cpu" else lane.record())

    def _copied(self, tensor: torch.Tensor, copy: torch.Tensor, made: Mark) -> Mark:
        with self._on_device():
            _, uploader = self._own()
            return uploader.copy(flat_bytes(tensor), flat_bytes(copy), made)

    def _own(self) -> tuple[StreamLane, RowUploader]:
        """Return the stream and the uploader of the calling thread."""
        own = self._of_thread
        if not hasattr(own, "lane"):
            own.lane, own.uploader = StreamLane(self.device), RowUploader(self.device)
        return own.lane, own.uploader

    def _made(
        self,
        pieces: Mapping[str, ThreadTask[OnDevice]],
        make: Callable[[dict[str, OnDevice]], T],
    ) -> T:
        with self._on_device():
            return make({name: piece.result() for name, piece in pieces.items()})

    def _arrived(self, nbytes: int) -> None:
        with self._mutex:
            self._ending -= 1
            self._bytes_on_way -= nbytes
            self._changed.notify_all()

    def _on_device(self) -> AbstractContextManager[object]:
        """Return a context with the GPU as the current one: a new thread's is the first."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def take_device_memory(nbytes: int, device: torch.device) -> None:
    """Take memory of a GPU at once, for what torch gives out on its current stream from now on.

    Each smaller piece that torch takes from the driver waits while memory of the host is locked.
    Where there is less, nothing is taken.
    """
    if device.type == "cuda" and nbytes:
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(nbytes, dtype=torch.uint8, device=device)


def packed_here(plan: PackingPlan) -> ThreadTask[OnDevice]:
    """Pack a tensor where it is and bring it to host memory, in the calling thread."""
    return ThreadTask.of(OnDevice(plan.packed().to("cpu")))


def _copy_parts(ct: CompressedTensor, record: TensorRecord, image: torch.Tensor) -> None:
    for name, part in record.parts.items():
        part.of(image).copy_(ct.packed.parts[name], non_blocking=True)


def limit_bytes(room: int, tensors_bytes: int | None) -> int:
    """Return the raw bytes that may be on the way at a time.

    Parameters
    ----------
    room : int
        Bytes that the GPU's memory allows.
    tensors_bytes : int or None
        Raw bytes of all tensors, where they are known.
    """
    if tensors_bytes is None:
        return room
    return min(room, max(PIECE_BYTES, int(TENSORS_SHARE * tensors_bytes)))


def n_uploaders(room: int, tensors_bytes: int | None, cores: int) -> int:
    """Return the number of threads that read weights in host memory, on a number of cores."""
    most = min(UPLOADERS, cores // 2, room // (2 * RING * PIECE_BYTES))
    if tensors_bytes is not None:
        most = min(most, ceil_div(tensors_bytes, UPLOADER_BYTES))
    return max(1, most)


def _room_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return MOST_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(LEAST_BYTES, min(MOST_BYTES, int(FREE_SHARE * (free + cached))))
