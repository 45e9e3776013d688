"""zfp at a fixed rate: whole floating-point tensors in so many bits for each four values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import CorruptedDataError
from ..kernels import kernels_for
from ..kernels.kept_format import ZFP_FORM
from ..kernels.zfp_format import (
    BLOCK_VALUES,
    FLOAT_KINDS,
    LEAST_BLOCK_BITS,
    MOST_BLOCK_BITS,
    error_of_blocks,
    zfp_layout,
)
from .base import check_integer, check_tensor_argument, elements
from .plain_blobs import PlainBlobCodec


class ZfpCodec(PlainBlobCodec):
    """Encodes whole floating-point tensors lossily, with zfp in blocks of four values.

    Of float32, P bits of a block make it P / 128 of its size, of float64 P / 256, of float16 and
    bfloat16, which are widened first, P / 64. The stream is that of zfp 1.0 for the rate P / 4 and
    one dimension; NaN and infinities follow the stream, and are 0 in it. A tensor that would not
    shrink, or has too many of these, is kept raw.

    Parameters
    ----------
    block_bits : int
        P: 12 to 128.

    Raises
    ------
    ArgumentError
        When it is another number.
    """

    name = "zfp"
    form = ZFP_FORM
    error_bound = (
        "(3.125 * 2 ** (m - 30) + 6 * 2 ** -30) * 2 ** e and the rounding to the dtype, where all "
        "values of the block are below 2 ** e and m = 32 - (P - 12) // 4; 3 * 2 ** e where m > 28"
    )

    def __init__(self, block_bits: int) -> None:
        check_integer("block_bits", block_bits, range(LEAST_BLOCK_BITS, MOST_BLOCK_BITS + 1))
        self.block_bits = block_bits

    @classmethod
    def fit(cls, sample: torch.Tensor, *, block_bits: int = 32) -> ZfpCodec:
        """Return the codec; a sample teaches it nothing."""
        return cls(block_bits)

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether it is float16, bfloat16, float32 or float64."""
        return dtype in FLOAT_KINDS

    def max_encoded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of the raw tensor and the header, or of a few values somewhat more."""
        return zfp_layout(elements(shape), dtype, self.block_bits).max_bytes

    def write(
        self, x: torch.Tensor, dtype: torch.dtype, data: torch.Tensor, sm_budget: int | None
    ) -> None:
        """Encode a tensor's bytes."""
        kernels_for(x.device).encode_zfp(x, dtype, self.block_bits, data, sm_budget)

    def read(
        self, data: torch.Tensor, dtype: torch.dtype, x: torch.Tensor, sm_budget: int | None
    ) -> bool:
        """Decode to a tensor's bytes."""
        return kernels_for(x.device).decode_zfp(data, dtype, self.block_bits, x, sm_budget)

    def bounds(self, t: torch.Tensor) -> torch.Tensor:
        """Return how far each element may be from its decoded one; see `error_of_blocks`.

        Returns
        -------
        torch.Tensor
            float64 of the shape of `t`, on its device; 0 for what is not finite, for blocks of
            zeros, and in tensors that are raw whatever they hold. Infinite where it is too large
            for float64.
        """
        check_tensor_argument("t", t)
        n = t.numel()
        layout = zfp_layout(n, t.dtype, self.block_bits) if self.takes(t.dtype) else None
        if layout is None or layout.before_bytes >= layout.raw_bytes:
            return torch.zeros(t.shape, dtype=torch.float64, device=t.device)
        x = t.detach().to(torch.float64).reshape(-1)
        finite = x.isfinite()
        blocks = torch.zeros(-(-n // BLOCK_VALUES) * BLOCK_VALUES, dtype=x.dtype, device=x.device)
        blocks[:n] = x.where(finite, 0)
        most = blocks.view(-1, BLOCK_VALUES).abs().amax(1)
        bound = error_of_blocks(most, t.dtype, self.block_bits)
        return bound.repeat_interleave(BLOCK_VALUES)[:n].where(finite, 0).view(t.shape)

    def to_config(self) -> dict[str, Any]:
        """Return the bits of a block."""
        return {"block_bits": self.block_bits}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ZfpCodec:
        """Build the codec that `to_config` described."""
        named = isinstance(config, Mapping) and set(config) == {"block_bits"}
        bits = config["block_bits"] if named else None
        accepted = range(LEAST_BLOCK_BITS, MOST_BLOCK_BITS + 1)
        if not isinstance(bits, int) or isinstance(bits, bool) or bits not in accepted:
            raise CorruptedDataError(
                f"zfp: configuration is {config!r:.60}, expected block_bits alone, "
                f"{accepted[0]} to {accepted[-1]}"
            )
        return cls(bits)

    def describe(self) -> str:
        """Return the codec and the bits of a block."""
        return f"zfp {self.block_bits}"
