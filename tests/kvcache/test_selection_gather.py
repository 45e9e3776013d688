"""Chosen tokens come out of a history as they went in, and only their rows are counted."""

from __future__ import annotations

import pytest
import torch

from bitslab.kvcache import CodecPlans, HistoryReader, PackedHistory
from bitslab.kvcache.arena import HostArena
from bitslab.kvcache.selection import Selection
from bitslab.kvcache.words import HostWords

CPU = torch.device("cpu")


def activations(
    batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, tokens, dim, generator=generator).to(dtype)


def history_of(
    tokens: torch.Tensor, *, offload: bool = True, device: torch.device = CPU
) -> tuple[HistoryReader, PackedHistory]:
    reader = HistoryReader(device, offload=offload, sm_budget=None)
    history = PackedHistory(reader.new_words(), CodecPlans(), "k", window=8, block_tokens=32)
    history.append(tokens.to(device))
    return reader, history


def choice(history: PackedHistory, n: int, group: int, seed: int = 0) -> Selection:
    """Return n random groups of each head."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads = history.tail.shape[:2]
    groups = torch.rand(batch, heads, history.packed_tokens // group, generator=generator)
    chosen = groups.argsort(dim=2)[:, :, :n].sort(dim=2).values
    return Selection(chosen.to(history.tail.device), group, history.packed_tokens)


def of_tokens(tokens: torch.Tensor, selection: Selection) -> torch.Tensor:
    index = selection.positions()[..., None].expand(-1, -1, -1, tokens.shape[3])
    return tokens.to(index.device).gather(2, index)


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(128, torch.bfloat16), (64, torch.bfloat16), (16, torch.float16), (80, torch.float32)],
    ids=str,
)
def test_chosen_tokens(dim: int, dtype: torch.dtype, offload: bool) -> None:
    tokens = activations(2, 3, 200, dim, dtype)
    reader, history = history_of(tokens, offload=offload)
    group = 2 * history.packed.tokens_per_row
    chosen = choice(history, 3, group)
    found = reader.chosen.gather([history], chosen)
    assert found.holds([history])
    [part] = found.get()
    assert part.is_contiguous() and torch.equal(part, of_tokens(tokens, chosen))
    history.append(activations(2, 3, 40, dim, dtype, seed=1))
    assert not found.holds([history])


def test_tokens_packed_since_the_choice_come_as_well() -> None:
    tokens = activations(1, 2, 200, 64, torch.bfloat16)
    reader, history = history_of(tokens)
    chosen = choice(history, 5, history.packed.tokens_per_row)
    more = activations(1, 2, 40, 64, torch.bfloat16, seed=1)
    history.append(more)
    begin, end = chosen.packed, history.packed_tokens
    assert end > begin
    [part] = reader.chosen.gather([history], chosen).get()
    behind = torch.cat([tokens, more], dim=2)[:, :, begin:end]
    assert torch.equal(part, torch.cat([of_tokens(tokens, chosen), behind], dim=2))


def test_only_the_chosen_rows_are_counted() -> None:
    tokens = activations(2, 4, 520, 128, torch.bfloat16)
    reader, history = history_of(tokens)
    chosen = choice(history, 16, 1)
    [segment] = history.segments
    assert segment.kernels is not None
    rows = segment.row_ids(chosen.groups).flatten()
    words = segment._lengths[rows].long()
    words[words == 0] = segment.kernels.row_words
    reader.chosen.gather([history], chosen).get()
    assert reader.moved_to_device_bytes == 4 * int(words.sum())
    reader.chosen.gather([history], chosen).get()
    assert reader.moved_to_device_bytes == 8 * int(words.sum())
    share = 16 / history.packed_tokens
    assert reader.moved_to_device_bytes / 2 < 1.1 * share * 4 * history.words.n_words


def test_nothing_crosses_from_words_on_the_device() -> None:
    reader, history = history_of(activations(1, 2, 200, 64, torch.bfloat16), offload=False)
    reader.chosen.gather([history], choice(history, 5, 4)).get()
    assert reader.moved_to_device_bytes == 0


def noise(batch: int, heads: int, tokens: int, dim: int) -> torch.Tensor:
    """Return bfloat16 whose bits are random, which no codec packs."""
    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(-(2**15), 2**15, (batch, heads, tokens, dim), generator=generator)
    return bits.to(torch.int16).view(torch.bfloat16)


def test_raw_rows() -> None:
    tokens = noise(2, 2, 200, 128)
    reader, history = history_of(tokens)
    assert history.segments[0].kernels is None
    chosen = choice(history, 7, 1)
    [part] = reader.chosen.gather([history], chosen).get()
    assert torch.equal(part.view(torch.int16), of_tokens(tokens.view(torch.int16), chosen))
    assert reader.moved_to_device_bytes == part.nbytes


def test_several_segments() -> None:
    reader, history = history_of(activations(2, 2, 200, 64, torch.bfloat16))
    parts = [activations(2, 2, 200, 64, torch.bfloat16)]
    for scale in (2.0**40, 2.0**-40):
        for seed in range(12):
            more = activations(2, 2, 32, 64, torch.bfloat16, seed=seed) * scale
            history.append(more)
            parts.append(more)
    assert len(history.segments) > 1
    tokens = torch.cat(parts, dim=2)
    for n in (1, 9, history.packed_tokens // 4 - 1):
        chosen = choice(history, n, 4, seed=n)
        [part] = reader.chosen.gather([history], chosen).get()
        assert torch.equal(part, of_tokens(tokens, chosen))


def test_sequences_that_were_reordered() -> None:
    tokens = activations(3, 2, 200, 64, torch.bfloat16)
    reader, history = history_of(tokens)
    index = torch.tensor([2, 0, 0])
    history.reorder(index)
    chosen = choice(history, 6, 4)
    [part] = reader.chosen.gather([history], chosen).get()
    assert torch.equal(part, of_tokens(tokens[index], chosen))


def test_words_in_many_pieces_are_merged() -> None:
    reader, history = history_of(activations(1, 2, 4, 128, torch.bfloat16))
    history.packed.words = words = HostWords(reader.arena, reader.link)  # as on a GPU
    parts = [activations(1, 2, 4, 128, torch.bfloat16)]
    for seed in range(1, 40):
        parts.append(activations(1, 2, 64, 128, torch.bfloat16, seed=seed))
        history.append(parts[-1])
    assert len(words._pieces) > 1
    tokens = torch.cat(parts, dim=2)
    for seed in range(40, 44):
        chosen = choice(history, 20, 1, seed=seed)
        [part] = reader.chosen.gather([history], chosen).get()
        assert torch.equal(part, of_tokens(tokens, chosen))
        assert words._pieces[0].shape[0] >= words.n_words
        more = activations(1, 2, 64, 128, torch.bfloat16, seed=seed)
        history.append(more)
        tokens = torch.cat([tokens, more], dim=2)
    assert torch.equal(history.decode(), tokens)


def test_pieces_are_aligned_for_kernels_that_read_them_where_they_lie() -> None:
    arena = HostArena(pin=False, slab_bytes=1 << 20)
    pieces = [arena.take(n, n + 3) for n in (1, 100, 4097, 64, 1 << 19)]
    assert all(piece.data_ptr() % 256 == 0 for piece in pieces)
    for i, piece in enumerate(pieces):
        piece.fill_(i)
    assert all(bool((piece == i).all()) for i, piece in enumerate(pieces))


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("kind", ["packed", "raw", "segments"])
def test_chosen_tokens_on_a_gpu(offload: bool, kind: str) -> None:
    device = torch.device("cuda", 0)
    if kind == "raw":
        tokens = noise(2, 2, 520, 128)
    else:
        tokens = activations(2, 2, 520, 128, torch.bfloat16)
    reader, history = history_of(tokens, offload=offload, device=device)
    reader.finish_packing()
    if kind == "segments":
        parts = [tokens]
        for seed in range(12):
            parts.append(activations(2, 2, 64, 128, torch.bfloat16, seed=seed) * 2.0**40)
            history.append(parts[-1].to(device))
            reader.finish_packing()
        assert len(history.segments) > 1
        tokens = torch.cat(parts, dim=2)
    for seed in range(3):
        chosen = choice(history, 24, 1, seed=seed)
        [part] = reader.chosen.gather([history], chosen).get()
        expected = of_tokens(tokens.to(device), chosen)
        assert torch.equal(part.view(torch.int16), expected.view(torch.int16))
        moved = reader.moved_to_device_bytes
        assert 0 < moved <= (seed + 1) * expected.nbytes if offload else moved == 0
