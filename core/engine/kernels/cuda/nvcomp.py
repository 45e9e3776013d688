"""LZ4 blocks on a GPU by nvCOMP, through the C interface of its library.

Its batches know nothing of a container: each block is compressed to a buffer of its own, or decoded
from one, and neither call waits for the GPU. They need `nvidia-libnvcomp-cu12` or
`nvidia-libnvcomp-cu13`, 5.1 or newer, which `nvidia-nvcomp-cu12` and `nvidia-nvcomp-cu13` bring.
"""

from __future__ import annotations

import ctypes
import importlib
from importlib.util import find_spec
from typing import Any

import torch

from ....errors import BitslabError, MissingExtraError
from .stream import stream_pointer

MODULE = "nvidia.libnvcomp"
LEAST_VERSION = 5100  # as the library counts: its interface of 5.1
SUCCESS = 0
#: Decoders in CUDA check every bound; of the hardware's, what damage does is not known.
CUDA_BACKEND = 2


class _Properties(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("cudart_version", ctypes.c_uint32))


class _CompressOptions(ctypes.Structure):
    """Bytes, with no shuffling of bits: all zeros."""

    _fields_ = (("data_type", ctypes.c_int), ("reserved", ctypes.c_char * 60))


class _DecompressOptions(ctypes.Structure):
    _fields_ = (
        ("backend", ctypes.c_int),
        ("sort_before_hw_decompress", ctypes.c_int),
        ("reserved", ctypes.c_char * 56),
    )


def is_installed() -> bool:
    """Return whether nvCOMP's library is there, without loading it."""
    try:
        return find_spec(MODULE) is not None
    except ModuleNotFoundError:
        return False


class NvcompLz4:
    """LZ4 blocks in batches on one GPU.

    Parameters
    ----------
    device : torch.device
        The GPU.
    block_bytes : int
        Bytes of a block before it is compressed; the last one of a batch may have fewer.

    Attributes
    ----------
    slot_bytes : int
        Bytes to keep for a compressed block, a multiple of 16.

    Raises
    ------
    MissingExtraError
        When nvCOMP is not installed.
    BitslabError
        When it is older than 5.1, or does not load.
    """

    def __init__(self, device: torch.device, block_bytes: int) -> None:
        self._library = load_library()
        self._device = device
        self._block_bytes = block_bytes
        most = ctypes.c_size_t()
        self._call(
            "CompressGetMaxOutputChunkSize",
            ctypes.c_size_t(block_bytes),
            _CompressOptions(),
            ctypes.byref(most),
        )
        self.slot_bytes = -(-most.value // 16) * 16

    def compress(
        self,
        sources: torch.Tensor,
        sizes: torch.Tensor,
        targets: torch.Tensor,
        found: torch.Tensor,
        statuses: torch.Tensor,
    ) -> None:
        """Compress blocks on torch's current stream, without waiting for it.

        Parameters
        ----------
        sources, sizes : torch.Tensor
            int64 ``[n]`` on the GPU: address and bytes of each block.
        targets : torch.Tensor
            int64 ``[n]``: address of `slot_bytes` for each.
        found : torch.Tensor
            int64 ``[n]``, to write to: bytes of each compressed block.
        statuses : torch.Tensor
            int32 ``[n]``, to write to: 0 for a block that was compressed.
        """
        count, options = sources.shape[0], _CompressOptions()
        temporary = self._temporary("CompressGetTempSize", count, options)
        self._call(
            "CompressAsync",
            _address(sources),
            _address(sizes),
            ctypes.c_size_t(self._block_bytes),
            ctypes.c_size_t(count),
            _address(temporary),
            ctypes.c_size_t(temporary.shape[0]),
            _address(targets),
            _address(found),
            options,
            _address(statuses),
            self._stream(),
        )

    def decompress(
        self,
        sources: torch.Tensor,
        sizes: torch.Tensor,
        rooms: torch.Tensor,
        targets: torch.Tensor,
        found: torch.Tensor,
        statuses: torch.Tensor,
    ) -> None:
        """Decode blocks on torch's current stream, without waiting for it.

        Parameters
        ----------
        sources, sizes : torch.Tensor
            int64 ``[n]`` on the GPU: address and bytes of each compressed block.
        rooms, targets : torch.Tensor
            int64 ``[n]``: bytes that each may become, and the address to write them to.
        found : torch.Tensor
            int64 ``[n]``, to write to: bytes that each became.
        statuses : torch.Tensor
            int32 ``[n]``, to write to: 0 for a block that was sound.
        """
        count, options = sources.shape[0], _DecompressOptions(backend=CUDA_BACKEND)
        temporary = self._temporary("DecompressGetTempSize", count, options)
        self._call(
            "DecompressAsync",
            _address(sources),
            _address(sizes),
            _address(rooms),
            _address(found),
            ctypes.c_size_t(count),
            _address(temporary),
            ctypes.c_size_t(temporary.shape[0]),
            _address(targets),
            options,
            _address(statuses),
            self._stream(),
        )

    def _temporary(self, function: str, count: int, options: ctypes.Structure) -> torch.Tensor:
        """Return the memory that a call needs meanwhile."""
        size = ctypes.c_size_t()
        self._call(
            function,
            ctypes.c_size_t(count),
            ctypes.c_size_t(self._block_bytes),
            options,
            ctypes.byref(size),
            ctypes.c_size_t(count * self._block_bytes),
            self._stream(),
        )
        return torch.empty(max(16, size.value), dtype=torch.uint8, device=self._device)

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(stream_pointer(self._device))

    def _call(self, function: str, *arguments: Any) -> None:
        with torch.cuda.device(self._device):
            status = self._library[f"nvcompBatchedLZ4{function}"](*arguments)
        if status != SUCCESS:
            raise BitslabError(f"lz4: nvCOMP's {function} ended with status {status}")


def load_library() -> ctypes.CDLL:
    """Return nvCOMP's library.

    Raises
    ------
    MissingExtraError
        When it is not installed.
    BitslabError
        When it is older than 5.1, or does not load.
    """
    cuda = (torch.version.cuda or "13").split(".")[0]
    if not is_installed():
        raise MissingExtraError(
            f'the codec "lz4" on a GPU needs the package "nvidia-libnvcomp-cu{cuda}", which is not '
            f'installed: pip install "bitslab[lz4-cuda{cuda}]"'
        )
    library: ctypes.CDLL | None = importlib.import_module(f"{MODULE}.load").load_library()
    if library is None:
        raise BitslabError('lz4: the library of "nvidia-libnvcomp" does not load')
    properties = _Properties()
    status = library["nvcompGetProperties"](ctypes.byref(properties))
    if status != SUCCESS or properties.version < LEAST_VERSION:
        raise BitslabError(
            f"lz4: nvCOMP counts its version as {properties.version}, accepted are "
            f"{LEAST_VERSION} and newer"
        )
    return library


def _address(t: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(t.data_ptr())
