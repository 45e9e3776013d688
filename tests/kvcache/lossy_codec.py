"""A lossy row codec of tests: bytes that decode to something else than what gives the same bytes.

So a value that is quantised twice is not the one that was quantised once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from bitslab.dtypes import dtype_from_name, dtype_name
from bitslab.engine.codecs import HostRowKernels, WordRowCodec

STEP, SHRINK = 1 / 16, 0.9


def quantised(tokens: torch.Tensor) -> torch.Tensor:
    """Return what the codec makes of tokens within its range, -7 to 7."""
    return ((tokens.float() / STEP).round().to(torch.int8) * (STEP * SHRINK)).to(tokens.dtype)


class RoundingKernels(HostRowKernels):
    """A packed row: a byte a value; rows with values out of range are raw."""

    def __init__(self, row_bytes: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(row_bytes, device)
        self._dtype = dtype

    def _codes(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows.contiguous().view(self._dtype).float() / STEP).round()

    def measure(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fits = (self._codes(rows).abs() <= 127).all(1)
        words = -(-self.row_bytes // self._dtype.itemsize // 4)
        lengths = torch.where(fits, words, 0)
        return lengths.to(self.length_dtype), torch.empty(0, dtype=torch.uint8)

    def pack(
        self, rows: torch.Tensor, lengths: torch.Tensor, row_clusters: torch.Tensor
    ) -> torch.Tensor:
        codes = self._codes(rows).to(torch.int8)
        padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4))
        return padded.contiguous().view(torch.int32).flatten()

    def unpack(
        self,
        words: torch.Tensor,
        at: torch.Tensor,
        lengths: torch.Tensor,
        row_clusters: torch.Tensor,
        out: torch.Tensor,
    ) -> int:
        n = self.row_bytes // self._dtype.itemsize
        index = at[:, None] + torch.arange(-(-n // 4))
        codes = words[index].view(torch.int8)[:, :n]
        values = (codes.float() * (STEP * SHRINK)).to(self._dtype)
        out.copy_(values.view(torch.uint8))
        return -1


class RoundingCodec(WordRowCodec):
    """Values as multiples of a step."""

    name: ClassVar[str] = "rounding-test"
    error_bound: ClassVar[str | None] = "step / 2 + |x| / 10"

    def __init__(self, row_shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.row_shape, self.dtype = tuple(row_shape), dtype

    @property
    def profile_bytes(self) -> int:
        return 0

    def kernels(self, device: torch.device) -> RoundingKernels:
        return RoundingKernels(self.row_bytes, device, self.dtype)

    def to_config(self) -> dict[str, Any]:
        return {"row_shape": list(self.row_shape), "dtype": dtype_name(self.dtype)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RoundingCodec:
        return cls(tuple(config["row_shape"]), dtype_from_name(config["dtype"]))


class RoundingPlans:
    """Fits the codec for histories; `fits` counts."""

    def __init__(self) -> None:
        self.samples: list[torch.Tensor] = []

    def fit(self, kind: str, sample: torch.Tensor, *, search_all: bool = False) -> RoundingCodec:
        self.samples.append(sample)
        return RoundingCodec(tuple(sample.shape[1:]), sample.dtype)
