"""Bags of one id each whose rows are all resident: sums in one compiled call on a CPU."""

from __future__ import annotations

import pytest
import torch

from bitslab.embedding import CachedRows, plain_lookups
from bitslab.embedding.resident_bags import ResidentBags
from bitslab.errors import IndexRangeError
from bitslab.integrations.embedding import CachedEmbeddingBag
from tests.helpers import same_bits

N_ROWS = 3000


def some(dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dim)
    weight = torch.randn(N_ROWS, dim, generator=generator, dtype=torch.float64).to(dtype)
    bits = weight.view({4: torch.int32, 8: torch.int64}[dtype.itemsize])
    weight[0] = -0.0
    bits[1] |= 0x7FC00000 << 8 * (dtype.itemsize - 4)  # NaNs with payloads
    bits[2] &= 0xFFFF  # subnormals
    return weight


def sums(rows: CachedRows, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor | None:
    return ResidentBags().sums(rows.slot_table, rows.parameter, ids, offsets)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [1, 15, 16, 33, 700])
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 31, 33, 48, 2000])
def test_sums_are_those_of_torch(threads, n, dim, dtype):
    weight = some(dim, dtype)
    rows = CachedRows.from_tensor(weight, cache_rows=N_ROWS - 1, warmup_ratio=1.0, device="cpu")
    ids = torch.randint(N_ROWS - 1, (n,))
    ids[: min(n, 3)] = torch.arange(min(n, 3))
    offsets = torch.arange(n)
    found = sums(rows, ids, offsets)
    assert type(found) is torch.Tensor and found.shape == (n, dim)
    if n:
        wanted = torch.nn.functional.embedding_bag(ids, weight, offsets, mode="sum")
        assert same_bits(found, wanted)


BAD = {
    "away": lambda ids, offsets: ids[-1:].fill_(N_ROWS - 1),
    "away first": lambda ids, offsets: ids[:1].fill_(N_ROWS - 1),
    "negative": lambda ids, offsets: ids[5:6].fill_(-1),
    "large": lambda ids, offsets: ids[-1:].fill_(N_ROWS),
    "very large": lambda ids, offsets: ids[7:8].fill_(1 << 62),
    "bags of two": lambda ids, offsets: offsets[3:].add_(1),
    "an empty bag": lambda ids, offsets: offsets[3:].sub_(1),
    "begins late": lambda ids, offsets: offsets[:1].fill_(1),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("n", [40, 2000])
def test_what_is_no_such_batch_is_left_to_others(threads, n, bad):
    weight = some(16)
    rows = CachedRows.from_tensor(weight, cache_rows=N_ROWS - 1, warmup_ratio=1.0, device="cpu")
    ids, offsets = torch.randint(N_ROWS - 1, (n,)), torch.arange(n)
    assert sums(rows, ids, offsets) is not None
    BAD[bad](ids, offsets)
    assert sums(rows, ids, offsets) is None


def resident_bag(**options) -> tuple[torch.nn.EmbeddingBag, CachedEmbeddingBag]:
    weight = some(16)
    plain = torch.nn.EmbeddingBag.from_pretrained(weight, mode="sum")
    bag = CachedEmbeddingBag.from_pretrained(
        weight, mode="sum", device="cpu", cache_ratio=0.5, warmup_ratio=1.0, **options
    )
    return plain.eval(), bag.eval()


def served(monkeypatch) -> list[bool]:
    """Keep whether batches were served in one go."""
    found: list[bool] = []
    before = ResidentBags.sums

    def watched(self, *args):
        out = before(self, *args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(ResidentBags, "sums", watched)
    return found


@torch.no_grad()
def test_batches_that_hit_after_one_that_hit_are_served_in_one_go(monkeypatch):
    plain, bag = resident_bag()
    found, offsets = served(monkeypatch), torch.arange(50)
    resident = torch.from_numpy(bag.rows.slot_table.id_of)
    away = torch.arange(N_ROWS)[bag.rows.slot_table.slot_of < 0]
    hits = [resident[torch.randint(len(resident), (50,))] for _ in range(4)]
    mixed = torch.cat([hits[0][:49], away[:1]])
    for ids in (*hits, mixed, hits[0], hits[1]):
        assert same_bits(bag(ids, offsets), plain(ids, offsets))
    assert found == [True, True, True, False, True]
    assert bag.rows.stats()["lookups"] == 350
    assert bag.rows.stats()["hits"] == 349


@torch.no_grad()
def test_a_bad_id_after_batches_that_hit_is_reported():
    _, bag = resident_bag()
    ids, offsets = torch.arange(10), torch.arange(10)
    for _ in range(2):
        bag(ids, offsets)
    ids[3] = N_ROWS
    with pytest.raises(IndexRangeError, match="position 3"):
        bag(ids, offsets)


def test_a_row_that_changed_or_moved_is_read_as_it_is():
    plain, bag = resident_bag(freeze=False)
    ids, offsets = torch.arange(10), torch.arange(10)
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    for step in range(3):
        with torch.no_grad():
            for _ in range(2):
                assert same_bits(bag(ids, offsets), plain(ids, offsets))
        bag.train()
        optimizer.zero_grad()
        bag(ids + 1000 * step, offsets).sum().backward()
        optimizer.step()
        bag.rows.flush(evict=step == 1)
        plain.weight.data[ids + 1000 * step] -= 0.1
        bag.eval()


@torch.no_grad()
def test_large_batches_are_left_to_torch(monkeypatch):
    plain, bag = resident_bag()
    found = served(monkeypatch)
    monkeypatch.setattr(plain_lookups, "COPIED_BYTES", 64 * 50)
    for n in (50, 50, 51, 50):
        ids, offsets = torch.arange(n), torch.arange(n)
        assert same_bits(bag(ids, offsets), plain(ids, offsets))
    assert found == [True, True]


@torch.no_grad()
def test_without_threads_of_torch_lookups_are_the_same(monkeypatch):
    monkeypatch.setattr("bitslab.embedding.resident_bags.team_of_torch", lambda: None)
    plain, bag = resident_bag()
    ids, offsets = torch.arange(50), torch.arange(50)
    for _ in range(3):
        assert same_bits(bag(ids, offsets), plain(ids, offsets))


@torch.no_grad()
def test_bits_of_resident_rows_are_made_in_time_and_anew_when_rows_change_places():
    plain, bag = resident_bag(freeze=False)
    rows, offsets = bag.rows, torch.arange(N_ROWS // 32)
    away = torch.arange(N_ROWS)[rows.slot_table.slot_of < 0]
    wanted = away[: len(offsets)]

    def bits_after_a_lookup() -> bool:
        assert same_bits(bag(wanted, offsets), plain(wanted, offsets))
        return rows.resident_bags.slot_map(rows.slot_table).bits_at != 0

    assert [bits_after_a_lookup() for _ in range(4)] == [False, False, True, True]
    # One row comes, and differs from then on from what the table on the host has.
    slot = rows.fetch(wanted[:1])
    rows.parameter.data[slot] = plain.weight.data[wanted[:1]] = 7.0
    assert [bits_after_a_lookup() for _ in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("cache_rows", [N_ROWS - 1, N_ROWS // 2], ids=["hits", "misses"])
def test_rows_of_other_strides_are_summed_as_they_are(cache_rows):
    rows = CachedRows.from_tensor(some(16), cache_rows=cache_rows, warmup_ratio=1.0, device="cpu")
    ids, offsets = torch.arange(cache_rows)[:20], torch.arange(20)
    if cache_rows < N_ROWS - 1:
        ids = ids.flip(0) + cache_rows - 10
    expected = rows.table.decoded(0, N_ROWS)[ids] + 0.0
    rows.watch.set_data(rows.parameter.data.t().contiguous().t())
    for _ in range(3):
        found = rows.plain_lookup(ids, offsets, include_last=False, one_each=True)
        assert found is not None
        matrix, places = found
        assert same_bits(matrix.detach() if places is None else matrix[places] + 0.0, expected)
