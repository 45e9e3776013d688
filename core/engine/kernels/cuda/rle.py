"""Runs of equal units on a GPU; see rle.cu."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kept_format import COUNT_BYTES, RLE_FORM, KeptLayout
from .kept import ROW_THREADS, RowPlacer
from .parameters import Address, Int32, Int64, Parameters
from .runner import Launch, Runner
from .source import kept_variant


@dataclass(init=False)
class CountRle(Parameters):
    """Parameters of `count_rle`: units at a multiple of their size; int64 `counts` of rows."""

    kernel = "count_rle"

    x: Address
    units: Int64
    counts: Address


@dataclass(init=False)
class PackRle(Parameters):
    """Parameters of `pack_rle`: as of `CountRle`, sizes of a `KeptLayout`, and the buffer."""

    kernel = "pack_rle"

    x: Address
    units: Int64
    starts_at: Int64
    values_at: Int64
    out: Address


@dataclass(init=False)
class DecodeRle(Parameters):
    """Parameters of `decode_rle`: the buffer, and units at a multiple of their size."""

    kernel = "decode_rle"

    data: Address
    data_bytes: Int64
    elements: Int64
    element_bytes: Int32
    starts_at: Int64
    values_at: Int64
    out: Address
    mailbox: Address


class RleKernels:
    """The kernels of rle.cu on one GPU.

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
        self._launches: dict[tuple[type[Parameters], int], Launch] = {}

    def encode_rle(
        self,
        x: torch.Tensor,
        element_bytes: int,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> None:
        """Encode a tensor; see `kernels.cpu.encode_rle`."""
        layout = KeptLayout(x.shape[0] // element_bytes, element_bytes, COUNT_BYTES)
        blocks, starts = self._placer.blocks(layout, sm_budget), out.data_ptr() + layout.starts_at
        if layout.units:
            count = self._launch(CountRle, layout.unit_bytes)
            count(blocks, x.data_ptr(), layout.units, starts)
        self._placer.place(layout, RLE_FORM, True, out)
        if layout.units:
            sizes = (layout.units, layout.starts_at, layout.values_at)
            pack = self._launch(PackRle, layout.unit_bytes)
            pack(blocks, x.data_ptr(), *sizes, out.data_ptr())

    def decode_rle(
        self,
        data: torch.Tensor,
        element_bytes: int,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> bool:
        """Decode a tensor; True, since damage is reported in the mailbox."""
        layout = KeptLayout(out.shape[0] // element_bytes, element_bytes, COUNT_BYTES)
        self._launch(DecodeRle, layout.unit_bytes)(
            self._placer.blocks(layout, sm_budget),
            data.data_ptr(),
            data.shape[0],
            layout.elements,
            element_bytes,
            layout.starts_at,
            layout.values_at,
            out.data_ptr(),
            self._runner.mailbox.data_ptr(),
        )
        return True

    def _launch(self, parameters: type[Parameters], unit_bytes: int) -> Launch:
        key = parameters, unit_bytes
        found = self._launches.get(key)
        if found is None:
            variant = kept_variant("rle", unit_bytes)
            found = self._runner.bind(variant, parameters, ROW_THREADS)
            self._launches[key] = found
        return found
