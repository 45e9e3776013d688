"""What stands around LZ4's blocks: the kernels write and read the bytes of the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import lz4.block
import pytest
import torch

from bitslab.engine.codecs import Lz4Codec
from bitslab.engine.kernels.cuda.lz4 import Lz4Kernels
from bitslab.engine.kernels.cuda.runner import BLOB_ERROR, NO_ERROR
from bitslab.engine.kernels.kept_format import LZ4_BLOCK_BYTES
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner

FILL = 0xA5


class PackageCoder:
    """Codes blocks by the package lz4, where nvCOMP would: from addresses, and to addresses."""

    def __init__(self, device: torch.device, block_bytes: int) -> None:
        self.slot_bytes = block_bytes + 272

    def compress(self, sources, sizes, targets, found, statuses):
        for i, (source, size, target) in enumerate(_numbers(sources, sizes, targets)):
            block = lz4.block.compress(ctypes.string_at(source, size), store_size=False)
            assert target % 16 == 0 and len(block) <= self.slot_bytes
            ctypes.memmove(target, block, len(block))
            found[i], statuses[i] = len(block), 0

    def decompress(self, sources, sizes, rooms, targets, found, statuses):
        for i, (source, size, room, target) in enumerate(_numbers(sources, sizes, rooms, targets)):
            found[i], statuses[i] = 0, 12
            try:
                part = lz4.block.decompress(ctypes.string_at(source, size), uncompressed_size=room)
            except lz4.block.LZ4BlockError:
                continue
            ctypes.memmove(target, part, len(part))
            found[i], statuses[i] = len(part), 0


def _numbers(*columns: torch.Tensor) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in columns), strict=True))


def mixed(n: int) -> torch.Tensor:
    """Bytes of which the second block of each three does not shrink."""
    t = (torch.arange(n) // 50).to(torch.uint8)
    noise = torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).to(torch.uint8)
    noisy = torch.arange(n) // LZ4_BLOCK_BYTES % 3 == 1
    return torch.where(noisy, noise, t)


SIZES = (0, 1, 5, LZ4_BLOCK_BYTES, 3 * LZ4_BLOCK_BYTES + 1234)


@pytest.mark.parametrize("seed", [0, 1])
def test_kernels_write_and_read_the_bytes_of_the_cpu(seed):
    codec = Lz4Codec()
    for n in SIZES:
        t = mixed(n)
        wanted = codec.encode(t).trimmed().data
        runner = SimtRunner(seed)
        kernels = Lz4Kernels(runner, PackageCoder)
        most = codec.max_encoded_bytes(t.shape, t.dtype)
        data = guarded(torch.full((-(-most // 16) * 16,), FILL, dtype=torch.uint8))
        kernels.encode_lz4(guarded(t) if n % 16 == 0 else t, 1, data[:most], sm_budget=1)
        assert torch.equal(data[: len(wanted)], wanted), n
        assert (data[len(wanted) :] == FILL).all()
        out = torch.full((n,), FILL, dtype=torch.uint8)
        assert kernels.decode_lz4(wanted.clone(), 1, out)
        assert torch.equal(out, t) and runner.mailbox[0] == NO_ERROR
        # A tensor and a target at no multiple of 16 bytes.
        again = torch.full((most,), FILL, dtype=torch.uint8)
        kernels.encode_lz4(torch.cat([t[:1], t])[1:], 1, again)
        assert torch.equal(again[: len(wanted)], wanted)
        memory = torch.full((n + 3,), FILL, dtype=torch.uint8)
        kernels.decode_lz4(wanted.clone(), 1, memory[1 : n + 1])
        assert torch.equal(memory[1 : n + 1], t) and (memory[n + 1 :] == FILL).all()


def test_blocks_that_were_not_compressed_are_kept_as_they_are():
    class Refusing(PackageCoder):
        def compress(self, sources, sizes, targets, found, statuses):
            super().compress(sources, sizes, targets, found, statuses)
            statuses[0] = 19

    t = torch.zeros(2 * LZ4_BLOCK_BYTES + 9, dtype=torch.uint8)
    data = torch.zeros(Lz4Codec().max_encoded_bytes(t.shape, t.dtype), dtype=torch.uint8)
    Lz4Kernels(SimtRunner(), Refusing).encode_lz4(t, 1, data)
    sizes = data[32:44].view(torch.int32).tolist()
    assert sizes[0] == LZ4_BLOCK_BYTES and sizes[1] < 1000


def damages(good: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    def flipped(place: int, change: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def flip(data: torch.Tensor) -> torch.Tensor:
            data[place] ^= change
            return data

        return flip

    places = [*range(32), *range(32, 44)]
    changes = [flipped(place, change) for place in places for change in (1, 0x80)]
    return changes + [lambda data, n=n: data[:n].clone() for n in (48, 64, len(good) - 1)]


def test_both_backends_refuse_the_same_headers_and_sizes():
    n = 2 * LZ4_BLOCK_BYTES + 40
    t = mixed(n)
    codec = Lz4Codec()
    good = codec.encode(t).trimmed().data
    for change in damages(good):
        data = change(good.clone())
        runner = SimtRunner(1)
        out = torch.full((n,), FILL, dtype=torch.uint8)
        assert not codec.read(data, t.dtype, out.clone(), None)
        Lz4Kernels(runner, PackageCoder).decode_lz4(data, 1, out)
        assert runner.mailbox[0] == BLOB_ERROR
        if runner.mailbox[1] == -1:
            assert (out == FILL).all()


def test_a_damaged_block_is_reported_by_its_number():
    t = (torch.arange(3 * LZ4_BLOCK_BYTES) // 999).to(torch.uint8)
    good = Lz4Codec().encode(t).trimmed().data
    first = int(good[32:36].view(torch.int32))
    data = good.clone()
    data[48 + -(-first // 16) * 16 :][:60] = 255  # lengths that do not end
    runner, out = SimtRunner(), torch.full_like(t, FILL)
    Lz4Kernels(runner, PackageCoder).decode_lz4(data, 1, out)
    assert runner.mailbox.tolist()[:2] == [BLOB_ERROR, 1]
    assert torch.equal(out[:LZ4_BLOCK_BYTES], t[:LZ4_BLOCK_BYTES])
    assert torch.equal(out[2 * LZ4_BLOCK_BYTES :], t[2 * LZ4_BLOCK_BYTES :])


def decoded_bytes(block: bytes) -> int | None:
    """Return how many bytes a block becomes; None where it breaks the rules of LZ4's format."""
    at = made = 0

    def length(nibble: int) -> int:
        nonlocal at
        more = nibble == 15
        while more:
            more = block[at] == 255
            nibble += block[at]
            at += 1
        return nibble

    try:
        while True:
            token = block[at]
            at += 1
            literals = length(token >> 4)
            at, made = at + literals, made + literals
            if at == len(block):
                return made
            offset = block[at] | block[at + 1] << 8
            if not 0 < offset <= made:
                return None
            at += 2
            made += 4 + length(token & 15)
    except IndexError:
        return None


def test_the_decoder_sees_no_block_that_does_not_fill_its_part_and_no_more():
    given: list[tuple[int | None, int]] = []

    class Watching(PackageCoder):
        def decompress(self, sources, sizes, rooms, targets, found, statuses):
            for source, size, room in _numbers(sources, sizes, rooms):
                made = decoded_bytes(ctypes.string_at(source, size))
                given.append((made, room))
                assert made == room or (made, room, size) == (1, 16, 2)
            super().decompress(sources, sizes, rooms, targets, found, statuses)

    generator = torch.Generator().manual_seed(torch.initial_seed() % (1 << 32))
    t = mixed(3 * LZ4_BLOCK_BYTES + 4321)
    t[:5000] = torch.randint(0, 4, (5000,), generator=generator).to(torch.uint8)
    good = Lz4Codec().encode(t).trimmed().data
    sizes = good[32:48].view(torch.int32).tolist()
    refused = 0
    for _ in range(60):
        data, runner, out = good.clone(), SimtRunner(), torch.full_like(t, FILL)
        for part in (0, 2, 3):
            begin = 48 + sum(-(-size // 16) * 16 for size in sizes[:part])
            place = begin + int(torch.randint(0, min(sizes[part], 200), (), generator=generator))
            data[place] ^= 1 << int(torch.randint(0, 8, (), generator=generator))
        Lz4Kernels(runner, Watching).decode_lz4(data, 1, out)
        refused += int(runner.mailbox[0]) == BLOB_ERROR
    assert refused > 10 and (1, 16) in given
