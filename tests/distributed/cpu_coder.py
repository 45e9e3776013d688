"""Tensors on the CPU in the place of those on a GPU: coded where they are, by the CPU's codec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from bitslab.distributed import device
from bitslab.distributed.caller import Caller
from bitslab.engine.codecs.vectors import decode_body, encode_body
from bitslab.engine.kernels.cuda import kernels_on
from bitslab.engine.kernels.vector_chunks import VectorOptions
from bitslab.engine.kernels.vector_format import raw_body_bytes


class CpuCoder:
    """The codec's bodies of tensors on the CPU, behind the arguments of the kernels."""

    def encode_vectors(
        self,
        values: Sequence[torch.Tensor],
        options: Sequence[VectorOptions],
        out: torch.Tensor,
        *,
        numbers: torch.Tensor,
    ) -> None:
        offsets, sizes = [0], []
        for t, option in zip(values, options, strict=True):
            bound = float(option.bound)
            if bound and option.relative:
                bound *= float(t.max() - t.min())
            body = out[offsets[-1] :].numpy()
            body = body[: raw_body_bytes(t.nbytes)]
            how = {"references": option.references, "huffman": option.huffman}
            sizes.append(encode_body(t, bound, option.window, body, **how))
            offsets.append(-(-(offsets[-1] + sizes[-1]) // 16) * 16)
        numbers.copy_(torch.tensor([*offsets, *sizes]))

    def decode_vectors(
        self, bodies: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], bounded: Sequence[bool]
    ) -> None:
        for body, out, codes in zip(bodies, outs, bounded, strict=True):
            assert body.data_ptr() % 4 == 0
            decode_body(body.numpy(), out, bounded=codes)


@contextmanager
def coded_where_rows_are(*, own_rows_cross: bool = False) -> Iterator[None]:
    """Exchange tensors on the CPU as those on a GPU are; of a group of one rank its own rows."""
    before = Caller.coded_on_device, Caller.own_rows_cross, kernels_on
    setattr(Caller, "coded_on_device", lambda self, of: True)  # noqa: B010 - mypy
    setattr(device, "kernels_on", lambda of: CpuCoder())  # noqa: B010 - mypy
    Caller.own_rows_cross = own_rows_cross
    try:
        yield
    finally:
        setattr(Caller, "coded_on_device", before[0])  # noqa: B010 - mypy
        setattr(device, "kernels_on", before[2])  # noqa: B010 - mypy
        Caller.own_rows_cross = before[1]
