"""LZ4 of whole tensors: a general byte codec, by the package `lz4` or by nvCOMP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ...errors import load_optional
from ..kernels.blob_format import HEADER_BYTES, aligned
from ..kernels.cuda import kernels_on
from ..kernels.cuda.nvcomp import is_installed
from ..kernels.format import ceil_div
from ..kernels.kept_format import LZ4_BLOCK_BYTES, LZ4_FORM
from .base import elements
from .plain_blobs import PlainBlobCodec

CHUNK_BYTES = LZ4_BLOCK_BYTES


class Lz4Codec(PlainBlobCodec):
    """Encodes whole tensors as LZ4 blocks of 64 KiB each.

    Behind the header are the bytes of each block, uint32, and then the blocks, each at a multiple
    of 16 bytes, with zeros between them. A block that has as many bytes as its part of the tensor
    is that part. Blocks know nothing of each other: any reader of LZ4's block format can decode
    them. On a CPU the package `lz4` does, on a GPU nvCOMP's batches; each reads what the other
    wrote. Which of its many forms a block has depends on what wrote it.

    `device_types` has ``"cuda"`` where nvCOMP is installed. It starts as many blocks of threads as
    it likes: `sm_budget` bounds what is launched around it.

    Raises
    ------
    MissingExtraError
        By `encode` and `decode`, on a CPU where `lz4` is not installed, on a GPU where nvCOMP is
        not: ``pip install "bitslab[lz4]"``, ``pip install "bitslab[lz4-cuda13]"`` or
        ``"bitslab[lz4-cuda12]"``.
    """

    name = "lz4"
    form = LZ4_FORM
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda") if is_installed() else ("cpu",)

    @classmethod
    def fit(cls, sample: torch.Tensor) -> Lz4Codec:
        """Return the codec; a sample teaches it nothing."""
        return cls()

    def takes(self, dtype: torch.dtype) -> bool:
        """Return True: bytes are bytes."""
        return True

    def max_encoded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of the raw tensor, the header, and four for each block."""
        raw = elements(shape) * dtype.itemsize
        return _blocks_at(ceil_div(raw, CHUNK_BYTES)) + aligned(raw)

    def write(
        self, x: torch.Tensor, dtype: torch.dtype, data: torch.Tensor, sm_budget: int | None
    ) -> None:
        """Encode a tensor's bytes."""
        if x.device.type == "cuda":
            kernels_on(x.device).encode_lz4(x, dtype.itemsize, data, sm_budget)
            return
        lz4 = _lz4()
        raw, to = x.numpy(), data.numpy()
        blocks = [
            lz4.compress(raw[begin : begin + CHUNK_BYTES], store_size=False)
            for begin in range(0, len(raw), CHUNK_BYTES)
        ]
        first = at = _blocks_at(len(blocks))
        sizes = np.zeros((first - HEADER_BYTES) // 4, np.uint32)
        for i, block in enumerate(blocks):
            part = raw[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]
            found = np.frombuffer(block, np.uint8) if len(block) < len(part) else part
            sizes[i] = len(found)
            to[at : at + len(found)] = found
            end = at + len(found)
            if i + 1 < len(blocks):
                to[end : aligned(end)] = 0
                end = aligned(end)
            at = end
        to[HEADER_BYTES:first] = sizes.view(np.uint8)
        header = (at, x.shape[0] // dtype.itemsize, self.form | dtype.itemsize << 32, 0)
        to[:HEADER_BYTES].view(np.int64)[:] = header

    def read(
        self, data: torch.Tensor, dtype: torch.dtype, x: torch.Tensor, sm_budget: int | None
    ) -> bool:
        """Decode to a tensor's bytes."""
        count = ceil_div(x.shape[0], CHUNK_BYTES)
        at = _blocks_at(count)
        if x.device.type == "cuda":
            if data.shape[0] < at:  # no room for header and sizes
                return False
            return kernels_on(x.device).decode_lz4(data, dtype.itemsize, x, sm_budget)
        lz4 = _lz4()
        to, given = x.numpy(), data.numpy()
        used, *rest = map(int, given[:HEADER_BYTES].view(np.int64))
        expected = [len(to) // dtype.itemsize, self.form | dtype.itemsize << 32, 0]
        if rest != expected or not at <= used <= len(given):
            return False
        sizes = given[HEADER_BYTES : HEADER_BYTES + 4 * count].view(np.uint32)
        parts: list[Any] = []
        for i, size in enumerate(sizes.tolist()):
            part_bytes = min(CHUNK_BYTES, len(to) - i * CHUNK_BYTES)
            at = aligned(at)
            if not 0 < size <= part_bytes or at + size > used:
                return False
            part = given[at : at + size]
            if size < part_bytes:
                try:
                    block = lz4.decompress(part, uncompressed_size=part_bytes)
                except lz4.LZ4BlockError:
                    return False
                part = np.frombuffer(block, np.uint8)
                if len(part) != part_bytes:
                    return False
            parts.append(part)
            at += size
        if at != used:
            return False
        # Not before all are sound.
        for i, part in enumerate(parts):
            to[i * CHUNK_BYTES :][: len(part)] = part
        return True


def _blocks_at(count: int) -> int:
    """Return the first byte of the first of so many blocks."""
    return aligned(HEADER_BYTES + 4 * count)


def _lz4() -> Any:
    return load_optional("lz4.block", extra="lz4", purpose='the codec "lz4"')
