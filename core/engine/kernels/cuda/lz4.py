"""LZ4 of whole tensors on a GPU: what stands around blocks that nvCOMP codes; see lz4.cu."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..format import ceil_div
from ..kept_format import LZ4_BLOCK_BYTES
from .nvcomp import NvcompLz4
from .parameters import Address, Int32, Int64, Parameters
from .runner import Launch, Runner
from .source import LZ4
from .tiles import aligned_to

PLACE_THREADS = 1024
COPY_THREADS = 256
CHECK_THREADS = 32  # each walks along a block of its own, so that they are spread out
COPY_BLOCKS = 8  # of a multiprocessor
SPARE_BYTES = 32
ALIGN_BYTES = 16  # of what is copied


@dataclass(init=False)
class PlaceParts(Parameters):
    """Parameters of `place_parts`: what the coder found, numbers for the header, the buffer."""

    kernel = "place_parts"

    found: Address
    statuses: Address
    count: Int64
    bytes: Int64
    elements: Int64
    element_bytes: Int32
    data: Address
    places: Address


@dataclass(init=False)
class MoveParts(Parameters):
    """Parameters of `move_parts`: the tensor, the compressed blocks, the buffer."""

    kernel = "move_parts"

    x: Address
    bytes: Int64
    count: Int64
    slots: Address
    slot_bytes: Int64
    places: Address
    data: Address


@dataclass(init=False)
class FindParts(Parameters):
    """Parameters of `find_parts`: the buffer, what its header is to say, the tables to write."""

    kernel = "find_parts"

    data: Address
    data_bytes: Int64
    count: Int64
    bytes: Int64
    elements: Int64
    element_bytes: Int32
    out: Address
    spare: Address
    sources: Address
    packed_bytes: Address
    rooms: Address
    targets: Address
    raw: Address
    mailbox: Address


@dataclass(init=False)
class CheckParts(Parameters):
    """Parameters of `check_parts`: tables of `find_parts`."""

    kernel = "check_parts"

    count: Int64
    spare: Address
    sources: Address
    packed_bytes: Address
    rooms: Address
    targets: Address
    mailbox: Address


@dataclass(init=False)
class FinishParts(Parameters):
    """Parameters of `finish_parts`: what the decoder found, and tables of `find_parts`."""

    kernel = "finish_parts"

    count: Int64
    bytes: Int64
    found: Address
    statuses: Address
    rooms: Address
    targets: Address
    raw: Address
    spare: Address
    out: Address
    mailbox: Address


class BlockCoder(Protocol):
    """Compresses blocks of LZ4, and decodes them: `nvcomp.NvcompLz4`."""

    slot_bytes: int

    def compress(
        self,
        sources: torch.Tensor,
        sizes: torch.Tensor,
        targets: torch.Tensor,
        found: torch.Tensor,
        statuses: torch.Tensor,
    ) -> None:
        """Compress blocks."""
        ...

    def decompress(
        self,
        sources: torch.Tensor,
        sizes: torch.Tensor,
        rooms: torch.Tensor,
        targets: torch.Tensor,
        found: torch.Tensor,
        statuses: torch.Tensor,
    ) -> None:
        """Decode blocks."""
        ...


class Lz4Kernels:
    """The kernels of lz4.cu on one GPU, and what codes blocks there.

    Parameters
    ----------
    runner : Runner
        Of the device.
    coder : callable
        Makes a `BlockCoder` for a device and the bytes of a block, at the first call.
    """

    def __init__(
        self,
        runner: Runner,
        coder: Callable[[torch.device, int], BlockCoder] = NvcompLz4,
    ) -> None:
        self._runner = runner
        self._make_coder = coder
        self._coder: BlockCoder | None = None
        self._launches: dict[type[Parameters], Launch] = {}

    def encode_lz4(
        self,
        x: torch.Tensor,
        element_bytes: int,
        data: torch.Tensor,
        sm_budget: int | None = None,
    ) -> None:
        """Encode a tensor, without waiting for the GPU.

        Parameters
        ----------
        x : torch.Tensor
            uint8 ``[n]``, contiguous.
        element_bytes : int
            Bytes of an element.
        data : torch.Tensor
            uint8, contiguous, at a multiple of 16 bytes: the buffer.
        sm_budget : int, optional
            Multiprocessors that the launches here may use; nvCOMP takes what it takes.
        """
        coder = self._coder_on(x.device)
        x = aligned_to(x, ALIGN_BYTES)
        n, count = x.shape[0], ceil_div(x.shape[0], LZ4_BLOCK_BYTES)
        found, sizes, sources, targets, places = _table(5, count, x.device)
        statuses = torch.empty(count, dtype=torch.int32, device=x.device)
        slots = torch.empty(count * coder.slot_bytes, dtype=torch.uint8, device=x.device)
        if count:
            numbers = torch.arange(count, dtype=torch.int64, device=x.device)
            torch.add(numbers * LZ4_BLOCK_BYTES, x.data_ptr(), out=sources)
            torch.add(numbers * coder.slot_bytes, slots.data_ptr(), out=targets)
            sizes.fill_(LZ4_BLOCK_BYTES)
            sizes[count - 1 :].fill_(n - (count - 1) * LZ4_BLOCK_BYTES)
            coder.compress(sources, sizes, targets, found, statuses)
        self._launch(PlaceParts, PLACE_THREADS)(
            1,
            found.data_ptr(),
            statuses.data_ptr(),
            count,
            n,
            n // element_bytes,
            element_bytes,
            data.data_ptr(),
            places.data_ptr(),
        )
        if count:
            self._launch(MoveParts, COPY_THREADS)(
                self._blocks(count, sm_budget),
                x.data_ptr(),
                n,
                count,
                slots.data_ptr(),
                coder.slot_bytes,
                places.data_ptr(),
                data.data_ptr(),
            )

    def decode_lz4(
        self,
        data: torch.Tensor,
        element_bytes: int,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> bool:
        """Decode a tensor, without waiting for the GPU.

        Parameters
        ----------
        data : torch.Tensor
            uint8, contiguous, at a multiple of 16 bytes; may hold anything, but has room for header
            and sizes.
        element_bytes : int
            Bytes of an element.
        out : torch.Tensor
            uint8 ``[n]``, contiguous.
        sm_budget : int, optional
            As for `encode_lz4`.

        Returns
        -------
        bool
            True, since damage is reported in the mailbox.
        """
        coder = self._coder_on(data.device)
        to = out if out.data_ptr() % ALIGN_BYTES == 0 else torch.empty_like(out)
        n, count = to.shape[0], ceil_div(to.shape[0], LZ4_BLOCK_BYTES)
        sources, packed_bytes, rooms, targets, raw, found = _table(6, count, data.device)
        statuses = torch.empty(count, dtype=torch.int32, device=data.device)
        spare = torch.empty(SPARE_BYTES, dtype=torch.uint8, device=data.device)
        mailbox = self._runner.mailbox.data_ptr()
        self._launch(FindParts, PLACE_THREADS)(
            1,
            data.data_ptr(),
            data.shape[0],
            count,
            n,
            n // element_bytes,
            element_bytes,
            to.data_ptr(),
            spare.data_ptr(),
            *(t.data_ptr() for t in (sources, packed_bytes, rooms, targets, raw)),
            mailbox,
        )
        if count:
            self._launch(CheckParts, CHECK_THREADS)(
                ceil_div(count, CHECK_THREADS),
                count,
                spare.data_ptr(),
                *(t.data_ptr() for t in (sources, packed_bytes, rooms, targets)),
                mailbox,
            )
            coder.decompress(sources, packed_bytes, rooms, targets, found, statuses)
            self._launch(FinishParts, COPY_THREADS)(
                self._blocks(count, sm_budget),
                count,
                n,
                found.data_ptr(),
                statuses.data_ptr(),
                rooms.data_ptr(),
                targets.data_ptr(),
                raw.data_ptr(),
                spare.data_ptr(),
                to.data_ptr(),
                mailbox,
            )
        if to is not out:
            out.copy_(to)
        return True

    def _coder_on(self, device: torch.device) -> BlockCoder:
        if self._coder is None:
            self._coder = self._make_coder(device, LZ4_BLOCK_BYTES)
        return self._coder

    def _launch(self, parameters: type[Parameters], threads: int) -> Launch:
        found = self._launches.get(parameters)
        if found is None:
            found = self._launches[parameters] = self._runner.bind(LZ4, parameters, threads)
        return found

    def _blocks(self, count: int, sm_budget: int | None) -> int:
        processors = self._runner.multiprocessors
        if sm_budget is not None:
            processors = min(sm_budget, processors)
        return max(1, min(count, COPY_BLOCKS * processors))


def _table(rows: int, count: int, device: torch.device) -> list[torch.Tensor]:
    """Return rows of int64 ``[count]``, each at an address of its own."""
    return list(torch.empty((rows, count), dtype=torch.int64, device=device).unbind())
