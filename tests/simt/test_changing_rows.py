"""Tensors that others change while they are packed: nothing is written outside of their places.

A program may refill a buffer whose last content is still being packed. What is packed then, nobody
wants; but sizes were measured before, and memory ends where these end.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitslab.engine.codecs import VectorLzCodec
from bitslab.engine.codecs.quantized import TileCodec
from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cpu.csr import count_csr, pack_csr
from bitslab.engine.kernels.cpu.rle import count_rle, pack_rle
from bitslab.engine.kernels.cuda import CudaKernels
from bitslab.engine.kernels.cuda.source import Variant
from bitslab.engine.kernels.cuda.vector_encode import VectorEncodeKernels
from bitslab.engine.kernels.format import bases_of_rows, words_of_rows
from bitslab.engine.kernels.kept_format import COLUMN_BYTES, COUNT_BYTES, ROW_UNITS, KeptLayout
from tests.engine.kernels.cases import Case, make_case, pack_on_cpu
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner, simt_kernels
from tests.simt.variants import variants_drawn

FILL = 0xA5
ENCODERS = variants_drawn(
    "encode",
    [
        Variant("encode", 2, 3, False, True, byte_field=True),
        Variant("encode", 4, 3, False, True, byte_field=True),
        Variant("encode", 1, 3, False, True, words=True),
        Variant("encode", 2, 1, False, True, words=True),
        Variant("encode", 4, 2, True, True),
        Variant("encode", 4, 2, True, False),
        Variant("encode", 8, 1, False, False),
    ],
)
#: Rows of which a warp packs several, one, and one that does not fit shared memory.
ROW_BYTES = {"short": 64, "staged": 16 * 37, "in-place": 16 * 401}


def alike(case: Case, n: int) -> torch.Tensor:
    """Return rows of the value that a profile packs best, of each position."""
    f = case.layout.format
    first = np.broadcast_to(case.profile.values[0, :, 0], (n, f.chunks))
    return torch.from_numpy(np.ascontiguousarray(first).view(np.uint8))


@pytest.mark.drawn(6)
@pytest.mark.parametrize("row_bytes", ROW_BYTES.values(), ids=ROW_BYTES)
@pytest.mark.parametrize("variant", ENCODERS, ids=lambda variant: variant.name)
def test_rows_that_grow_after_they_were_measured_keep_to_their_places(variant, row_bytes):
    mask = {1: 0x7C, 2: 0x7C00}[variant.chunk_bytes] if variant.words else None
    case = make_case(variant, n_rows=45, row_bytes=row_bytes, mask=mask)
    f, changed = case.layout.format, torch.arange(45) % 3 != 0
    changed[-1] = True
    case.rows[changed] = alike(case, int(changed.sum()))
    expected, _ = pack_on_cpu(case)
    assert bool((expected.lengths[changed] != 0).all())
    sizes = words_of_rows(expected.lengths, f.row_words).tolist()
    n_words = sum(sizes)
    rows = case.rows.clone()
    rows[changed] = torch.randint(0, 256, (int(changed.sum()), row_bytes), dtype=torch.uint8)
    for kernels in (cpu, simt_kernels(1)[0]):
        words = kernels.encode_rows(
            guarded(rows),
            case.layout,
            expected.lengths,
            expected.row_clusters,
            expected.bases,
            n_words,
        )
        assert not words[n_words:].any()
        found, wanted = words[:n_words].split(sizes), expected.words[:n_words].split(sizes)
        for r in range(45):
            assert bool(changed[r]) or torch.equal(found[r], wanted[r]), r


class Changing(SimtRunner):
    """A device on which a tensor is changed once its units were counted."""

    def __init__(self, x: torch.Tensor, then: torch.Tensor) -> None:
        super().__init__()
        self._x, self._then = x, then

    def ended(self, kernel: str) -> None:
        if kernel in ("count_csr", "count_rle", "measure_pieces"):
            self._x.copy_(self._then)


def sparse_then_dense(units: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int32 units of which few are kept by any form, and of which all are."""
    dense = torch.arange(1, units + 1, dtype=torch.int32)
    few = torch.zeros(units, dtype=torch.int32)
    few[:: ROW_UNITS // 3] = 7
    few[-1] = 9
    return few, dense


@pytest.mark.parametrize("form", ["csr", "rle"])
@pytest.mark.parametrize("units", [ROW_UNITS // 4, 3 * ROW_UNITS - 5])
def test_units_that_are_no_longer_alike_keep_to_their_places(form, units):
    few, dense = sparse_then_dense(units)
    place_bytes = {"csr": COLUMN_BYTES, "rle": COUNT_BYTES}[form]
    most = KeptLayout(units, 4, place_bytes).max_bytes
    x = few.clone().view(torch.uint8)
    runner = Changing(x, dense.view(torch.uint8))
    kernels = CudaKernels(runner)
    whole = torch.full((most,), FILL, dtype=torch.uint8)
    getattr(cpu, f"encode_{form}")(few.view(torch.uint8), 4, whole)
    used = int(whole[:8].view(torch.int64))
    out = torch.full((most,), FILL, dtype=torch.uint8)
    getattr(kernels, f"encode_{form}")(x, 4, out)
    assert torch.equal(x.view(torch.int32), dense)
    assert int(out[:8].view(torch.int64)) == used < most
    assert (out[used:] == FILL).all()


@pytest.mark.parametrize(
    ("count", "pack"), [(count_csr, pack_csr), (count_rle, pack_rle)], ids=["csr", "rle"]
)
def test_the_twins_keep_units_that_are_no_longer_alike_in_their_places(count, pack):
    few, dense = (t.numpy().view(np.uint32) for t in sparse_then_dense(2 * ROW_UNITS))
    counts = np.zeros(2, np.int64)
    count(few, counts, 0, 2)
    starts = np.concatenate([[0], np.cumsum(counts)])
    values = np.full(starts[-1] + ROW_UNITS, 5, np.uint32)
    places = np.full(len(values), 5, np.uint16)
    pack(dense, starts, values, places, 0, 2)
    assert (values[starts[-1] :] == 5).all() and (places[starts[-1] :] == 5).all()


def test_streams_of_numbers_that_become_rare_ones_keep_to_their_places():
    """Of equal rows that are kept once: numbers that were rare have the longest codes."""
    draw = np.random.default_rng(0)
    share = np.ones(256)
    share[:24] = 60
    numbers = draw.choice(256, 984, p=share / share.sum()).astype(np.uint8)
    rare = np.flatnonzero(np.bincount(numbers, minlength=256) == 1).astype(np.uint8)
    x, codec = torch.from_numpy(numbers), VectorLzCodec()
    used = int(codec.encode(x).data[:8].view(torch.int64))
    most = codec.max_encoded_bytes(x.shape, x.dtype)
    data = torch.full((most + 8192,), FILL, dtype=torch.uint8)
    runner = Changing(x, torch.from_numpy(np.resize(rare, len(numbers))))
    VectorEncodeKernels(runner).encode_vector(x, codec.options(), codec.form, data)
    assert int(data[:8].view(torch.int64)) == used <= most
    assert (data[used:] == FILL).all()


def test_a_tile_of_zeros_that_becomes_noise_leaves_its_neighbours():
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(64, 64, 64, generator=draw).bfloat16()
    tables = TileCodec.fit(noise, granularity="channel", scale=1.5).plan.tables()
    rows = torch.zeros(64, 64 * 64 * 2, dtype=torch.uint8)
    kernels, _ = simt_kernels(1)
    lengths = kernels.measure_tiles(rows, tables)
    sizes = words_of_rows(lengths, rows.shape[1] // 4)
    bases, _ = bases_of_rows(sizes)
    n_words = int(bases[-1])
    expected = kernels.encode_tiles(rows, tables, lengths, bases, n_words + 4)
    rows[[60, 63]] = noise[[60, 63]].view(2, -1).view(torch.uint8)
    words = kernels.encode_tiles(rows, tables, lengths, bases, n_words + 4)
    assert not words[n_words:].any()
    for r, (found, wanted) in enumerate(
        zip(*(each[:n_words].split(sizes.tolist()) for each in (words, expected)), strict=True)
    ):
        assert r in (60, 63) or torch.equal(found, wanted), r
