"""Compressed sparse rows on a GPU; see csr.cu."""

from __future__ import annotations

from dataclasses import dataclass

from ..kept_format import COLUMN_BYTES, CSR_FORM
from .kept import KeptKernels
from .parameters import Address, Int32, Int64, Parameters


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


class CsrKernels(KeptKernels):
    """The kernels of csr.cu on one GPU."""

    file = "csr"
    counting, packing, decoding = CountCsr, PackCsr, DecodeCsr
    form, place_bytes = CSR_FORM, COLUMN_BYTES
