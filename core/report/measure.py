"""The figures of `bitslab inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..compressed import AnyCompressed, CompressedTensor, compress
from ..compressed_blob import CompressedBlob
from ..dtypes import dtype_name, element_bytes
from ..engine.codecs import RowCodec
from ..engine.codecs.base import rows_as_bytes
from ..engine.kernels import kernels_for
from ..engine.row_map import as_rows, natural_row_elements, row_map
from ..errors import ArgumentError
from ..options import DECODE_GBPS, LINK_GBPS

#: A bit position counts as invariant when at least this share of the rows agree on it.
INVARIANT_AT = 0.8


@dataclass(frozen=True)
class Link:
    """What tensors are moved over and decoded by.

    Parameters
    ----------
    link_gbps : float
        Rate of the link, 10**9 bytes a second.
    decode_gbps : float
        Rate of decoding, 10**9 bytes of output a second.
    """

    link_gbps: float = LINK_GBPS
    decode_gbps: float = DECODE_GBPS

    def __post_init__(self) -> None:
        for name in ("link_gbps", "decode_gbps"):
            rate = getattr(self, name)
            if not 0 < rate < float("inf"):
                raise ArgumentError(f"{name}: {rate}, expected a positive number")

    def speedup(self, raw_bytes: int, packed_bytes: int, decoded: bool) -> float:
        """Return how many times faster a tensor is there packed than raw.

        Decoding goes on while packed bytes arrive, so the slower of the two decides.

        Parameters
        ----------
        raw_bytes, packed_bytes : int
            Bytes that cross the link either way.
        decoded : bool
            Whether anything is to be decoded, which is not so for a tensor that is kept raw.
        """
        if not raw_bytes:
            return 1.0
        packed_time = packed_bytes / self.link_gbps
        decode_time = raw_bytes / self.decode_gbps if decoded else 0.0
        return raw_bytes / self.link_gbps / max(packed_time, decode_time)


@dataclass(frozen=True)
class TensorReport:
    """What `inspect_tensor` found.

    Parameters
    ----------
    name : str
        Name of the tensor.
    shape : tuple of int
        Shape of the tensor.
    dtype : str
        Dtype, as torch writes it, without the module.
    plan : str
        The codec and what it chose, `RowCodec.describe`.
    raw_bytes : int
        Bytes of the tensor.
    packed_bytes : int
        Bytes of packed rows, their metadata and the profile.
    ratio : float
        `raw_bytes` over `packed_bytes`; 1.0 for an empty tensor.
    saved_mb : float
        Bytes saved, in 10**6.
    invariant_share : float
        Share of a row's bit positions on which at least 80 % of the rows agree; 0.0 for an empty
        tensor.
    speedup : float
        Expected speed-up of the transfer.
    equal_bits : tuple of float
        For each bit of a number, the least significant first, the share of the numbers that have
        its more frequent value, 0.5 to 1; empty for an empty tensor. A complex element is two
        numbers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    plan: str
    raw_bytes: int
    packed_bytes: int
    ratio: float
    saved_mb: float
    invariant_share: float
    speedup: float
    equal_bits: tuple[float, ...]


@dataclass(frozen=True)
class Total:
    """Sums over tensors; parameters as in `TensorReport`.

    Parameters
    ----------
    tensors : int
        Number of tensors.
    invariant_share : float
        Mean over tensors, weighted by their bytes.
    speedup : float
        Of moving all of them one after another.
    """

    tensors: int
    raw_bytes: int
    packed_bytes: int
    ratio: float
    saved_mb: float
    invariant_share: float
    speedup: float


def inspect_tensor(
    name: str,
    tensor: torch.Tensor | AnyCompressed,
    codec: str | RowCodec = "auto",
    link: Link | None = None,
    **options: Any,
) -> TensorReport:
    """Compress a tensor and return its sizes, ratio and times.

    Parameters
    ----------
    name : str
        Name for the report.
    tensor : torch.Tensor, CompressedTensor or CompressedBlob
        A compressed one is reported as it is; `codec` and `options` are ignored.
    codec : str or RowCodec
        As for `compress`.
    link : Link, optional
        Link and decoding rate; PCIe 5 x16 when left out.
    **options
        As for `compress`.
    """
    link = Link() if link is None else link
    ct: AnyCompressed
    if isinstance(tensor, (CompressedTensor, CompressedBlob)):
        ct, raw = tensor, tensor.decompress()
    else:
        ct, raw = compress(tensor, codec, **options), tensor
    invariant_share, equal_bits = bit_shares(raw)
    return TensorReport(
        name=name,
        shape=tuple(ct.shape),
        dtype=dtype_name(ct.dtype),
        plan=ct.codec.describe(),
        raw_bytes=ct.raw_nbytes,
        packed_bytes=ct.nbytes,
        ratio=ct.ratio,
        saved_mb=(ct.raw_nbytes - ct.nbytes) / 1e6,
        invariant_share=invariant_share,
        speedup=link.speedup(ct.raw_nbytes, ct.nbytes, decoded=ct.codec.name != "raw"),
        equal_bits=equal_bits,
    )


def bit_shares(tensor: torch.Tensor) -> tuple[float, tuple[float, ...]]:
    """Return the share of invariant bit positions of a row, and the equal bits of a number.

    See `TensorReport` for both. Rows are those that `compress` makes.
    """
    if not tensor.numel():
        return 0.0, ()
    row_elements = natural_row_elements(tensor.shape, tensor.dtype.itemsize)
    rows = as_rows(tensor, row_map(tensor.shape, row_elements), (row_elements,))
    data = rows_as_bytes(rows, row_elements * tensor.dtype.itemsize)
    counts = kernels_for(data.device).count_bits(data, 1).cpu()  # [row_bytes, 8]
    share = counts.double() / data.shape[0]
    invariant = torch.maximum(share, 1 - share) >= INVARIANT_AT - 1e-12
    of_number = share.view(-1, 8 * element_bytes(tensor.dtype)).mean(0)
    equal = torch.maximum(of_number, 1 - of_number)
    return float(invariant.double().mean()), tuple(equal.tolist())


def total(reports: Sequence[TensorReport], link: Link | None = None) -> Total:
    """Sum up reports."""
    link = Link() if link is None else link
    raw_bytes = sum(r.raw_bytes for r in reports)
    packed_bytes = sum(r.packed_bytes for r in reports)
    raw_time = raw_bytes / link.link_gbps
    packed_time = sum(r.raw_bytes / link.link_gbps / r.speedup for r in reports)
    invariant = sum(r.invariant_share * r.raw_bytes for r in reports)
    return Total(
        tensors=len(reports),
        raw_bytes=raw_bytes,
        packed_bytes=packed_bytes,
        ratio=raw_bytes / packed_bytes if packed_bytes else 1.0,
        saved_mb=(raw_bytes - packed_bytes) / 1e6,
        invariant_share=invariant / raw_bytes if raw_bytes else 0.0,
        speedup=raw_time / packed_time if packed_time else 1.0,
    )


def as_json(reports: Sequence[TensorReport], link: Link | None = None) -> dict[str, Any]:
    """Return reports as JSON-able values.

    Returns
    -------
    dict
        ``link_gbps`` and ``decode_gbps``, 10**9 bytes a second; ``invariant_at``, the share of
        rows that must agree; ``tensors``, a list with the fields of `TensorReport`; ``total``,
        the fields of `Total`.
    """
    link = Link() if link is None else link
    return {
        **asdict(link),
        "invariant_at": INVARIANT_AT,
        "tensors": [asdict(r) for r in reports],
        "total": asdict(total(reports, link)),
    }
