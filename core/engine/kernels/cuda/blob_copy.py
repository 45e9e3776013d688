"""Encoded tensors between device and host memory, as many bytes as are used; see blob_copy.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..format import ceil_div
from .parameters import Address, Int64, Parameters
from .runner import Launch, Runner
from .source import BLOB_COPY

THREADS = 512  # of a block
THREAD_BYTES = 64  # that a thread has under way
#: More add nothing on a link; of fewer multiprocessors the rest is free for what computes.
BLOCKS = 16


class Memory(Protocol):
    """Memory of a device, or page-locked memory of the host: a tensor uint8, or a piece of it."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""

    def data_ptr(self) -> int:
        """Return its address."""


@dataclass(init=False)
class CopyBlob(Parameters):
    """Parameters of `copy_blob`: two buffers, the bytes of the smaller one, the first to copy."""

    kernel = "copy_blob"

    source: Address
    target: Address
    bytes: Int64
    first_byte: Int64


class BlobCopyKernels:
    """The kernel of blob_copy.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launch: Launch | None = None

    def copy_blob(
        self, source: Memory, target: Memory, first_byte: int = 0, stream: int | None = None
    ) -> None:
        """Copy the used bytes of an encoded tensor, without waiting for the GPU.

        Parameters
        ----------
        source : torch.Tensor or piece of memory
            An encoded tensor (see `codecs.blob`), on the device or in page-locked host memory, at a
            multiple of 16 bytes.
        target : torch.Tensor or piece of memory
            On the device or in page-locked host memory, at a multiple of 16 bytes. What it has no
            room for is left out.
        first_byte : int
            A multiple of 16: what comes before has been copied, by the copy engine, which disturbs
            what computes less than a kernel that writes over the link.
        stream : int, optional
            Address of the stream; torch's current one when left out.
        """
        if self._launch is None:
            self._launch = self._runner.bind(BLOB_COPY, CopyBlob, THREADS)
        nbytes = min(source.nbytes, target.nbytes)
        if nbytes < max(8, first_byte + 1):
            return
        blocks = min(BLOCKS, ceil_div(nbytes - first_byte, THREADS * THREAD_BYTES))
        addresses = source.data_ptr(), target.data_ptr()
        self._launch(blocks, *addresses, nbytes, first_byte, stream=stream)
