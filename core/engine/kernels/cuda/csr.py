"""Compressed sparse rows on a GPU; see csr.cu."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kept_format import COLUMN_BYTES, CSR_FORM, KeptLayout
from .kept import ROW_THREADS, RowPlacer
from .parameters import Address, Int32, Int64, Parameters
from .runner import Launch, Runner
from .source import kept_variant


@dataclass(init=False)
class CountCsr(Parameters):
    """Parameters of `count_csr`: units at a multiple of their size; int64 `counts` of rows."""

    kernel = "count_csr"

    x: Address
    units: Int64
    counts: Address


@dataclass(init=False)
class PackCsr(Parameters):
    """Parameters of `pack_csr`: as of `CountCsr`, sizes of a `KeptLayout`, and the buffer."""

    kernel = "pack_csr"

    x: Address
    units: Int64
    starts_at: Int64
    values_at: Int64
    out: Address


@dataclass(init=False)
class DecodeCsr(Parameters):
    """Parameters of `decode_csr`: the buffer, and units at a multiple of their size."""

    kernel = "decode_csr"

    data: Address
    data_bytes: Int64
    elements: Int64
    element_bytes: Int32
    starts_at: Int64
    values_at: Int64
    out: Address
    mailbox: Address


class CsrKernels:
    """The kernels of csr.cu on one GPU.

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

    def encode_csr(
        self,
        x: torch.Tensor,
        element_bytes: int,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> None:
        """Encode a tensor; see `kernels.cpu.encode_csr`."""
        layout = KeptLayout(x.shape[0] // element_bytes, element_bytes, COLUMN_BYTES)
        blocks, starts = self._placer.blocks(layout, sm_budget), out.data_ptr() + layout.starts_at
        if layout.units:
            count = self._launch(CountCsr, layout.unit_bytes)
            count(blocks, x.data_ptr(), layout.units, starts)
        self._placer.place(layout, CSR_FORM, True, out)
        if layout.units:
            sizes = (layout.units, layout.starts_at, layout.values_at)
            pack = self._launch(PackCsr, layout.unit_bytes)
            pack(blocks, x.data_ptr(), *sizes, out.data_ptr())

    def decode_csr(
        self,
        data: torch.Tensor,
        element_bytes: int,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> bool:
        """Decode a tensor; True, since damage is reported in the mailbox."""
        layout = KeptLayout(out.shape[0] // element_bytes, element_bytes, COLUMN_BYTES)
        self._launch(DecodeCsr, layout.unit_bytes)(
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
            variant = kept_variant("csr", unit_bytes)
            found = self._runner.bind(variant, parameters, ROW_THREADS)
            self._launches[key] = found
        return found
