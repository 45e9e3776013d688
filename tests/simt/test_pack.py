"""Rows of whole tensors in one pass: kernels write and read the bytes of their twins."""

from __future__ import annotations

import pytest
import torch

import bitslab
from bitslab.engine.codecs import ChainCodec, InvariantBlobCodec
from bitslab.engine.codecs.packed_blob import ROW_BYTES
from bitslab.engine.kernels.blob_format import PackedLayout, ZvcLayout
from bitslab.engine.kernels.cuda.runner import BLOB_ERROR, NO_ERROR
from bitslab.engine.kernels.cuda.source import PACK_BLOCKS
from bitslab.engine.kernels.packed_blob import unpack_blob
from tests.helpers import bits_of
from tests.simt.module import guarded
from tests.simt.runner import simt_kernels

FILL = 0xA5
# Chunks of each width, codes with and without groups, the kernels of one-byte exponents.
OPTIONS = {
    "1B-k2-grouped": (torch.int8, {"chunk_bytes": 1, "code_bits": 2, "grouped": True}),
    "2B-k3-bytes": (torch.bfloat16, {"chunk_bytes": 2, "code_bits": 3, "grouped": False}),
    "4B-k3-bytes": (torch.float32, {"chunk_bytes": 4, "code_bits": 3, "grouped": False}),
    "4B-k3-bytes-grouped": (torch.float32, {"chunk_bytes": 4, "code_bits": 3, "grouped": True}),
    "8B-k1": (torch.float64, {"chunk_bytes": 8, "code_bits": 1, "grouped": False}),
}


def numbers(dtype: torch.dtype, n: int) -> torch.Tensor:
    """Close in size, some rows of noise that do not shrink, and some rows of one number."""
    t = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 3).to(dtype)
    row = ROW_BYTES // dtype.itemsize
    noise = torch.randint(0, 256, (t.nbytes,), generator=torch.Generator().manual_seed(1))
    bits = t.view(torch.uint8)
    for r in range(0, n // row, 5):
        bits[r * ROW_BYTES : (r + 1) * ROW_BYTES] = noise[:ROW_BYTES].to(torch.uint8)
    for r in range(1, n // row, 7):
        t[r * row : (r + 1) * row] = t[0]
    return t


@pytest.mark.drawn(2)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_kernels_write_and_read_the_bytes_of_the_twins(options):
    dtype, given = options
    row = ROW_BYTES // dtype.itemsize
    sample = numbers(dtype, 64 * row)
    codec = InvariantBlobCodec.fit(sample, **given)
    layout = codec.layout_on(torch.device("cpu"))
    for n, budget, seed in ((0, None, 0), (5, None, 0), (70 * row + 3, None, 1), (33 * row, 1, 2)):
        t = numbers(dtype, n)
        wanted = codec.encode(t).trimmed().data
        parts = codec.parts_of(t.shape, dtype)[0]
        kernels, runner = simt_kernels(seed)
        data = torch.full((parts.max_bytes,), FILL, dtype=torch.uint8)
        header = (n, dtype.itemsize, codec.form)
        kernels.pack_blob(guarded(bits_of(t)), layout, parts, data, header, budget)
        assert torch.equal(data[: len(wanted)], wanted)
        assert (data[len(wanted) :] == FILL).all()
        # At a multiple of an element alone.
        moved = torch.cat([bits_of(t[:1]), bits_of(t)])[min(n, 1) * dtype.itemsize :]
        data.fill_(FILL)
        kernels.pack_blob(moved, layout, parts, data, header, budget)
        assert torch.equal(data[: len(wanted)], wanted)
        out = guarded(torch.full((t.nbytes,), FILL, dtype=torch.uint8))
        kernels.unpack_blob(wanted, layout, parts, out, header, budget)
        assert torch.equal(out, bits_of(t)) and runner.mailbox[0] == NO_ERROR


@pytest.mark.parametrize("zeros", [0.5, 0.97, 1.0])
def test_a_chain_counts_its_rows_on_the_device(zeros):
    n = 70 * ROW_BYTES // 2 + 5
    t = torch.randn(n, generator=torch.Generator().manual_seed(2)).abs().bfloat16()
    t[torch.rand(n, generator=torch.Generator().manual_seed(3)) < zeros] = 0
    codec = ChainCodec.fit(t, code_bits=3, grouped=False)
    wanted = codec.encode(t).trimmed().data
    zvc: ZvcLayout
    parts: PackedLayout
    zvc, parts = codec.layouts(t.shape, t.dtype)
    layout = codec.packer.layout_on(torch.device("cpu"))
    header = (n, 2, codec.form)
    for budget, seed in ((None, 1), (1, 0)):
        kernels, runner = simt_kernels(seed)
        data = torch.full((parts.max_bytes,), FILL, dtype=torch.uint8)
        values = torch.full((parts.n_rows * ROW_BYTES,), FILL, dtype=torch.uint8)
        x = guarded(bits_of(t))
        kernels.encode_zvc(x, zvc, codec.form, data, budget, values, ROW_BYTES)
        kernels.pack_blob(values, layout, parts, data, header, budget, counted=True)
        assert torch.equal(data[: len(wanted)], wanted)
        values.fill_(FILL)
        out = guarded(torch.full((t.nbytes,), FILL, dtype=torch.uint8))
        kernels.unpack_blob(data, layout, parts, values, header, budget, counted=True)
        kernels.decode_zvc(data, zvc, codec.form, out, budget, values)
        assert torch.equal(out, x) and runner.mailbox[0] == NO_ERROR
    assert (PACK_BLOCKS,) in runner.grids or parts.blocks <= PACK_BLOCKS


@pytest.mark.parametrize("cls", [InvariantBlobCodec, ChainCodec], ids=lambda cls: cls.name)
def test_both_backends_refuse_the_same_headers(cls):
    """And the same ends of the words; a damaged header leaves the tail as it is."""
    n = 40 * ROW_BYTES // 2 + 3
    t = torch.randn(n, generator=torch.Generator().manual_seed(4)).abs().bfloat16()
    codec = cls.fit(t, code_bits=3, grouped=False)
    counted = cls is ChainCodec
    parts: PackedLayout = (
        codec.layouts(t.shape, t.dtype)[1] if counted else codec.parts_of(t.shape, t.dtype)[0]
    )
    good = codec.encode(t).trimmed().data
    layout = (codec.packer if counted else codec).layout_on(torch.device("cpu"))
    header = (n, 2, codec.form)
    kernels, runner = simt_kernels()

    def refused(data: torch.Tensor) -> tuple[bool, bool]:
        out = torch.full((parts.n_rows * ROW_BYTES + parts.tail_bytes,), FILL, dtype=torch.uint8)
        runner.mailbox.zero_()
        kernels.unpack_blob(data.clone(), layout, parts, out, header, counted=counted)
        if runner.mailbox[0] == BLOB_ERROR:
            assert (out[parts.n_rows * ROW_BYTES :] == FILL).all()
        try:
            unpack_blob(data, layout, parts, out, header, counted=counted)
        except bitslab.CorruptedDataError:
            return bool(runner.mailbox[0] != NO_ERROR), True
        return bool(runner.mailbox[0] != NO_ERROR), False

    assert refused(good) == (False, False)
    last_base = parts.bases_at + 8 * parts.blocks
    for place in (*range(24), parts.bases_at, last_base, last_base + 7):
        for bit in (0, 5, 7):
            data = good.clone()
            data[place] ^= 1 << bit
            assert refused(data) == (True, True), (place, bit)
    for size in (parts.used_bytes(0), len(good) - 16, len(good) - 1):
        assert refused(good[:size].clone()) == (True, True), size
