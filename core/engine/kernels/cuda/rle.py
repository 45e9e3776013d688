"""Runs of equal units on a GPU; see rle.cu."""

from __future__ import annotations

from dataclasses import dataclass

from ..kept_format import COUNT_BYTES, RLE_FORM
from .kept import KeptKernels
from .parameters import Address, Int32, Int64, Parameters


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


class RleKernels(KeptKernels):
    """The kernels of rle.cu on one GPU."""

    file = "rle"
    counting, packing, decoding = CountRle, PackRle, DecodeRle
    form, place_bytes = RLE_FORM, COUNT_BYTES
