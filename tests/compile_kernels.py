"""Compile most kernels for the CPU into Numba's cache, before the workers of pytest ask for them.

Both workers would begin with an empty cache, and wait for each other where they need the same
function. ``make test`` runs this in a fresh clone, while mypy has the other processor; without it
the tests are the same, and slower.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

import bitslab
from bitslab.engine.codecs import (
    BlobCodec,
    BoundedVectorCodec,
    CsrCodec,
    RleCodec,
    VectorLzCodec,
    ZfpCodec,
    ZvcCodec,
)
from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cpu.attend import attend
from bitslab.engine.kernels.cuda.source import Variant
from tests.embedding.support import Pair
from tests.engine.kernels.cases import cache_of, make_case, table_of
from tests.tile_spans import span_of


def compile_rows(dtype: torch.dtype) -> None:
    """Pack rows, and gather some, in every layout."""
    x = (torch.arange(256 * 16) % 7).view(256, 16).to(dtype)
    ids = torch.arange(0, 256, 3)
    for layout in ("compact", "inplace"):
        with bitslab.CompressedTable.from_tensor(x, layout, progress=False) as table:
            assert torch.equal(table.gather(ids), x[ids])
            assert torch.equal(table[:], x)


def compile_gathers(chunk_bytes: int) -> None:
    """Gather from tables and caches, and items of which several share a row."""
    ids = torch.arange(-9, 9)
    for plan in ((3, False, True), (2, True, False)):
        case = make_case(Variant("gather", chunk_bytes, *plan), n_rows=41, row_bytes=240)
        for kind in ("compact", "inplace"):
            table = table_of(case, kind)
            out = torch.empty(len(ids), case.rows.shape[1], dtype=torch.uint8)
            for cache in (None, cache_of(case, table, ids)):
                assert cpu.gather_rows(table, case.layout, ids, out, cache=cache) == -1
                assert torch.equal(out, case.rows[ids])
        items = replace(table, items_per_row=15, filler_items=0)
        assert cpu.gather_rows(items, case.layout, ids, out[:, :16].contiguous()) == -1


def compile_tensors(dtype: torch.dtype) -> None:
    """Pack and unpack whole tensors in the forms that take the dtype."""
    t = ((torch.arange(64 * 33) % 5) * (torch.arange(64 * 33) % 3 == 0)).view(64, 33).to(dtype)
    for form in (ZvcCodec, RleCodec, CsrCodec, ZfpCodec):
        codec = form.fit(t.float() if form is ZfpCodec else t)
        if codec.takes(dtype):
            codec.decode(codec.encode(t))


def compile_vectors(dtype: torch.dtype) -> None:
    """Pack and unpack vectors of which some come again, of floats within a bound too."""
    for columns in (8, 6, 5):  # compared by words of as many bytes as divide a vector
        distinct = torch.arange(80 * columns).view(80, columns)
        t = distinct[torch.arange(160) % 80].to(dtype)
        codecs: list[BlobCodec] = [VectorLzCodec.fit(t)]
        if dtype.is_floating_point:
            codecs.append(BoundedVectorCodec(0.01))
        for codec in codecs:
            codec.decode(codec.encode(t))


def compile_tiles(dtype: torch.dtype, lossless: bool) -> None:
    """Pack tiles of keys and values, and attend to them."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(1, 1, n, 32, generator=generator) for n in (1, 64, 64))
    span = span_of(keys.to(dtype), values.to(dtype), lossless=lossless)
    attend(query.to(dtype), [span], length=64, scaling=0.1)


def compile_cached_rows(options: dict[str, Any]) -> None:
    """Train rows that are cached."""
    pair = Pair(30, 6, optimizer="adagrad", **options)
    pair.train((1, 2, 3, 4), (7, 8, 9), range(10, 22))
    pair.rows.flush(evict=True)


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: What two processes compile, each a part: for the four widths of chunks and of elements.
WORK: tuple[tuple[Callable[[], object], ...], ...] = (
    (
        partial(compile_rows, torch.int32),
        *(partial(compile_vectors, dtype) for dtype in FLOATS),
        *(partial(compile_vectors, dtype) for dtype in (torch.int64, torch.uint8)),
        partial(import_module, "tests.distributed.warm"),
        partial(compile_gathers, 8),
    ),
    (
        *(partial(compile_rows, d) for d in (torch.int16, torch.int64, torch.int8)),
        *(partial(compile_tensors, d) for d in (torch.float32, torch.float16)),
        *(partial(compile_tensors, d) for d in (torch.int8, torch.float64)),
        *(partial(compile_gathers, width) for width in (1, 2, 4)),
        partial(compile_tiles, torch.float32, lossless=False),
        partial(compile_tiles, torch.bfloat16, lossless=True),
        partial(compile_cached_rows, {}),
        partial(compile_cached_rows, {"cache": "packed"}),
    ),
)


def main() -> int:
    """Compile one part of the work, and the others in processes of their own."""
    if len(sys.argv) > 1:
        for work in WORK[int(sys.argv[1])]:
            work()
        return 0
    command = [sys.executable, "-m", "tests.compile_kernels"]
    others = [subprocess.Popen([*command, str(part)]) for part in range(len(WORK))]
    return max(process.wait() for process in others)


if __name__ == "__main__":
    sys.exit(main())
