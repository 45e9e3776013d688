"""Compile most kernels for the CPU into Numba's cache, before the workers of pytest ask for them.

Both workers would begin with an empty cache, and wait for each other where they need the same
function. ``make test`` runs this in a fresh clone, while mypy has the other processor; without it
the tests are the same, and slower.
"""

from __future__ import annotations

import sys

import torch

import bitslab
from bitslab.engine.codecs import CsrCodec, RleCodec, ZfpCodec, ZvcCodec


def compile_rows(dtype: torch.dtype) -> None:
    """Pack rows, and gather some, in every layout."""
    x = (torch.arange(256 * 16) % 7).view(256, 16).to(dtype)
    ids = torch.arange(0, 256, 3)
    for layout in ("compact", "inplace"):
        with bitslab.CompressedTable.from_tensor(x, layout, progress=False) as table:
            assert torch.equal(table.gather(ids), x[ids])
            assert torch.equal(table[:], x)


def compile_tensors(dtype: torch.dtype) -> None:
    """Pack and unpack whole tensors in the forms that take the dtype."""
    t = ((torch.arange(64 * 33) % 5) * (torch.arange(64 * 33) % 3 == 0)).view(64, 33).to(dtype)
    for form in (ZvcCodec, RleCodec, CsrCodec, ZfpCodec):
        codec = form.fit(t.float() if form is ZfpCodec else t)
        if codec.takes(dtype):
            codec.decode(codec.encode(t))


def main() -> int:
    """Compile for the four widths of chunks and of elements."""
    for dtype in (torch.int32, torch.int16, torch.int64, torch.int8):
        compile_rows(dtype)
    for dtype in (torch.float32, torch.float16, torch.int8, torch.float64):
        compile_tensors(dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
