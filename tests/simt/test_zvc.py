"""Zero-value compression: the kernels write and read the bytes of their twins."""

from __future__ import annotations

import pytest
import torch

from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.blob_format import (
    HEADER_BYTES,
    ZVC_BLOCK_BYTES,
    ZVC_FORM,
    ZVC_UNIT_BYTES,
    ZvcLayout,
    zvc_blocks,
)
from bitslab.engine.kernels.cuda.runner import BLOB_ERROR, NO_ERROR
from bitslab.engine.kernels.cuda.zvc import ZvcKernels
from bitslab.errors import CorruptedDataError
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner

FORM = ZVC_FORM
FILL = 0xA5
UNITS = pytest.mark.parametrize("unit_bytes", ZVC_UNIT_BYTES)


def elements_of(unit_bytes: int, n: int, zeros: float, seed: int = 0) -> torch.Tensor:
    """Return n elements as bytes, in memory that ends where no kernel may read."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 256, (n, unit_bytes), generator=generator).to(torch.uint8)
    found[torch.rand(n, generator=generator) < zeros] = 0
    return guarded(found.flatten())


def encoded(x: torch.Tensor, layout: ZvcLayout) -> torch.Tensor:
    """Return what the twin writes, whose length is a multiple of 16."""
    data = torch.full((layout.max_bytes,), FILL, dtype=torch.uint8)
    cpu.encode_zvc(x, layout, layout.form, data)
    return data[: int(data[:8].view(torch.int64))]


def assert_same_bytes(
    x: torch.Tensor, layout: ZvcLayout, runner: SimtRunner, budget: int | None = None
) -> None:
    wanted = encoded(x, layout)
    data = guarded(torch.full((layout.max_bytes,), FILL, dtype=torch.uint8))
    kernels = ZvcKernels(runner)
    kernels.encode_zvc(x, layout, layout.form, data, budget)
    assert torch.equal(data[: len(wanted)], wanted)
    # Starts are written before it is known whether there are values.
    behind = max(len(wanted), layout.values_at)
    assert (data[behind:] == FILL).all(), "nothing behind what is used"
    out = guarded(torch.full((len(x),), FILL, dtype=torch.uint8))
    kernels.decode_zvc(guarded(wanted), layout, layout.form, out, budget)
    assert torch.equal(out, x) and runner.mailbox[0] == NO_ERROR


@pytest.mark.drawn(4)
@UNITS
@pytest.mark.parametrize("seed", [0, 1])
def test_kernels_write_and_read_the_bytes_of_the_twins(unit_bytes, seed):
    per_block = ZVC_BLOCK_BYTES // unit_bytes
    sizes = (0, 1, 33, per_block - 1, per_block, 3 * per_block + 77)
    for i, n in enumerate(sizes):
        zeros = (0.5, 0.0, 0.9, 1.0, 0.3)[(i + seed) % 5]
        x = elements_of(unit_bytes, n, zeros, seed + i)
        assert_same_bytes(x, ZvcLayout(n, unit_bytes), SimtRunner(seed))


def test_more_blocks_than_a_budget_allows_are_taken_in_order():
    # More blocks than a warp looks back at, and than the budget's multiprocessor holds.
    n = 40 * ZVC_BLOCK_BYTES // 8 + 5
    for budget in (1, 2, None):
        runner = SimtRunner(3)
        assert_same_bytes(elements_of(8, n, 0.5), ZvcLayout(n, 8), runner, budget)
        grid = 41 if budget is None else budget * zvc_blocks(8)
        assert runner.grids == [(grid,)] * 2


def test_elements_of_16_bytes_are_two_of_8():
    x = elements_of(8, 2 * 1500, 0.5)
    assert_same_bytes(x, ZvcLayout(1500, 16), SimtRunner())


def test_blocks_of_zeros_and_ones_are_bits():
    block = ZVC_BLOCK_BYTES
    x = (torch.rand(3 * block + 40) < 0.5).to(torch.uint8)
    layout = ZvcLayout(len(x), 1)
    assert len(encoded(x, layout)) == layout.values_at
    assert_same_bytes(guarded(x), layout, SimtRunner(1))
    x[block : 2 * block] = 0  # nothing to be left out
    x[2 * block + 7] = 2
    assert_same_bytes(guarded(x), layout, SimtRunner(2))


def test_a_bitmap_that_comes_first_ends_the_buffer_of_bits():
    n = 3 * ZVC_BLOCK_BYTES + 40
    layout = ZvcLayout(n, 1, bits_first=True)
    bits = guarded((torch.rand(n) < 0.5).to(torch.uint8))
    bits[ZVC_BLOCK_BYTES : 2 * ZVC_BLOCK_BYTES] = 0
    assert len(encoded(bits, layout)) == layout.starts_at == HEADER_BYTES + 4 * -(-n // 128) * 4
    mixed = bits.clone()
    mixed[n - 1] = 2
    for x in (bits, guarded(mixed), elements_of(1, n, 0.5), guarded(torch.zeros_like(bits))):
        assert_same_bytes(x, layout, SimtRunner(1))
        assert_same_bytes(x, layout, SimtRunner(2), budget=1)
        # What earlier versions wrote.
        old = encoded(x, ZvcLayout(n, 1))
        assert old[16] == ZVC_FORM
        runner, out = SimtRunner(), guarded(torch.full((n,), FILL, dtype=torch.uint8))
        ZvcKernels(runner).decode_zvc(guarded(old), layout, layout.form, out)
        assert torch.equal(out, x) and runner.mailbox[0] == NO_ERROR
        out.fill_(FILL)
        cpu.decode_zvc(old, layout, layout.form, out)
        assert torch.equal(out, x)


def test_both_backends_refuse_damaged_bitmaps_that_come_first():
    n = 2 * ZVC_BLOCK_BYTES + 40
    layout = ZvcLayout(n, 1, bits_first=True)
    bits = (torch.rand(n) < 0.5).to(torch.uint8)
    mixed = bits.clone()
    mixed[5] = 2
    for x in (bits, mixed):
        good = encoded(x, layout)
        places = [*range(32), layout.bitmap_at + 4 * (n // 32) + 3]
        if len(good) > layout.starts_at:
            places += range(layout.starts_at, layout.starts_at + 4 * layout.blocks)
        damaged = []
        for place in places:
            data = good.clone()
            data[place] ^= 0x81
            damaged.append(data)
        for size in (layout.starts_at, layout.values_at, len(good) - 16):
            if layout.starts_at <= size < len(good):
                damaged.append(good[:size].clone())
        for data in damaged:
            runner, out = SimtRunner(), torch.full((n,), FILL, dtype=torch.uint8)
            ZvcKernels(runner).decode_zvc(guarded(data), layout, layout.form, out)
            with pytest.raises(CorruptedDataError, match="blob: "):
                cpu.decode_zvc(data, layout, layout.form, out.clone())
            assert runner.mailbox[0] == BLOB_ERROR


@pytest.mark.parametrize("unit_bytes", [1, 4])
def test_damage_is_reported_and_confined_to_its_blocks(unit_bytes):
    per_block = ZVC_BLOCK_BYTES // unit_bytes
    n = 2 * per_block + 40
    layout, x = ZvcLayout(n, unit_bytes), elements_of(unit_bytes, n, 0.5)
    good = encoded(x, layout)
    block_of = torch.arange(n * unit_bytes) // ZVC_BLOCK_BYTES
    # Place of a byte, the bits that flip, and the blocks that are not written.
    starts, last_word = layout.starts_at, layout.bitmap_at + 4 * (n // 32)
    damages: list[tuple[int, int, tuple[int, ...]]]
    damages = [(place, 1, (0, 1, 2)) for place in range(24)]
    damages += [
        (starts, 1, (0,)),
        (starts + 4, 1, (0, 1)),
        (starts + 8, 1, (1, 2)),
        (starts + 4 + 3, 0x80, (1,) if unit_bytes == 1 else (0, 1)),
        (starts + 8 + 3, 0x70, (1, 2)),
        (last_word + 3, 0x80, (2,)),
        (layout.bitmap_at, 255, (0,)),
    ]
    for place, change, spoilt in damages:
        data = good.clone()
        data[place] ^= change
        if place == layout.bitmap_at:
            data[place : place + 128] = 255
        runner = SimtRunner(1)
        out = guarded(torch.full((len(x),), FILL, dtype=torch.uint8))
        ZvcKernels(runner).decode_zvc(guarded(data), layout, FORM, out)
        assert runner.mailbox[0] == BLOB_ERROR, place
        assert int(runner.mailbox[1]) in ((-1,) if place < 24 else spoilt)
        bad = torch.isin(block_of, torch.tensor(spoilt))
        assert (out[bad] == FILL).all() and torch.equal(out[~bad], x[~bad]), place


def test_damage_of_an_empty_tensor_is_reported():
    layout = ZvcLayout(0, 4)
    data = encoded(torch.zeros(0, dtype=torch.uint8), layout)
    data[0] += 16
    data = torch.cat([data, data])
    runner = SimtRunner()
    ZvcKernels(runner).decode_zvc(data, layout, FORM, torch.zeros(0, dtype=torch.uint8))
    assert runner.mailbox.tolist()[:2] == [BLOB_ERROR, -1]
