"""zfp's blocks on a GPU; see zfp.cu."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..blob_format import HEADER_BYTES
from ..kept_format import ZFP_FORM
from ..zfp_format import FLOAT_KINDS, zfp_layout
from .kept import ROW_THREADS, RowPlacer
from .parameters import Address, Int32, Int64, Parameters
from .runner import Launch, Runner
from .source import zfp_variant


@dataclass(init=False)
class EncodeZfp(Parameters):
    """Parameters of `encode_zfp`: values at a multiple of their size; int64 `counts` of rows."""

    kernel = "encode_zfp"

    x: Address
    n: Int64
    block_bits: Int32
    stream: Address
    stream_words: Int64
    counts: Address


@dataclass(init=False)
class PackZfp(Parameters):
    """Parameters of `pack_zfp`: as of `EncodeZfp`, sizes of a `KeptLayout`, and the buffer."""

    kernel = "pack_zfp"

    x: Address
    units: Int64
    starts_at: Int64
    values_at: Int64
    out: Address


@dataclass(init=False)
class DecodeZfp(Parameters):
    """Parameters of `decode_zfp`: the buffer, and values at a multiple of their size."""

    kernel = "decode_zfp"

    data: Address
    data_bytes: Int64
    n: Int64
    block_bits: Int32
    stream_words: Int64
    starts_at: Int64
    values_at: Int64
    out: Address
    mailbox: Address


class ZfpKernels:
    """The kernels of zfp.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    placer : RowPlacer
        Of the device.
    """

    def __init__(self, runner: Runner, placer: RowPlacer) -> None:
        self._runner = runner
        self._placer = placer
        self._launches: dict[tuple[type[Parameters], torch.dtype], Launch] = {}

    def encode_zfp(
        self,
        x: torch.Tensor,
        dtype: torch.dtype,
        block_bits: int,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> None:
        """Encode a tensor; see `kernels.cpu.encode_zfp`."""
        layout = zfp_layout(x.shape[0] // dtype.itemsize, dtype, block_bits)
        packs = layout.before_bytes < layout.raw_bytes
        blocks, to = self._placer.blocks(layout, sm_budget), out.data_ptr()
        if packs:
            self._launch(EncodeZfp, dtype)(
                blocks,
                x.data_ptr(),
                layout.units,
                block_bits,
                to + HEADER_BYTES,
                (layout.before_bytes - HEADER_BYTES) // 4,
                to + layout.starts_at,
            )
        self._placer.place(layout, ZFP_FORM, packs, out)
        if layout.units:
            sizes = (layout.units, layout.starts_at, layout.values_at)
            self._launch(PackZfp, dtype)(blocks, x.data_ptr(), *sizes, to)

    def decode_zfp(
        self,
        data: torch.Tensor,
        dtype: torch.dtype,
        block_bits: int,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> bool:
        """Decode a tensor; True, since damage is reported in the mailbox."""
        layout = zfp_layout(out.shape[0] // dtype.itemsize, dtype, block_bits)
        self._launch(DecodeZfp, dtype)(
            self._placer.blocks(layout, sm_budget),
            data.data_ptr(),
            data.shape[0],
            layout.units,
            block_bits,
            (layout.before_bytes - HEADER_BYTES) // 4,
            layout.starts_at,
            layout.values_at,
            out.data_ptr(),
            self._runner.mailbox.data_ptr(),
        )
        return True

    def _launch(self, parameters: type[Parameters], dtype: torch.dtype) -> Launch:
        key = parameters, dtype
        found = self._launches.get(key)
        if found is None:
            variant = zfp_variant(FLOAT_KINDS[dtype])
            found = self._launches[key] = self._runner.bind(variant, parameters, ROW_THREADS)
        return found
