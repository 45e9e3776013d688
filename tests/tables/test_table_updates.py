"""Updates of rows: compared with a plain tensor, with concurrent readers, and bad arguments."""

from __future__ import annotations

import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitslab import (
    ArgumentError,
    ArgumentTypeError,
    BitslabError,
    CompressedTable,
    IndexRangeError,
    SlabCache,
)
from bitslab.engine.memory import page_locking
from bitslab.tables import overflow
from bitslab.tables.build import items_as_rows
from tests.helpers import packable, random_bits, same_bits, take
from tests.tables.kinds import KINDS, even_rows, make, weights
from tests.tables.support import Recorder

N, COLUMNS = 70, 9


def rows_of(seed: int, n: int) -> torch.Tensor:
    """Return rows of which some are packed short, some long and some kept raw."""
    some = (packable, random_bits, lambda dtype, shape, seed: torch.zeros(shape))
    parts = [make_(torch.float32, (n, COLUMNS), seed) for make_ in some]
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(3, (n,), generator=generator)
    return torch.stack(parts)[which, torch.arange(n)]


steps: st.SearchStrategy[Any] = st.one_of(
    st.tuples(st.just("update"), st.lists(st.integers(-N, N - 1), max_size=40), st.integers(0, 99)),
    st.tuples(st.just("gather"), st.lists(st.integers(-N, N - 1), max_size=40), st.just(0)),
    st.tuples(
        st.sampled_from(["compact", "save", "pickle", "fill"]), st.just([]), st.integers(0, 9)
    ),
)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 99), clusters=st.sampled_from([1, 3]), actions=st.lists(steps, max_size=12)
)
def test_any_sequence_of_changes_leaves_what_it_leaves_in_a_tensor(
    kind, seed, clusters, actions, tmp_path_factory
):
    x = rows_of(seed, N)
    options = {} if kind == "raw" else {"clusters": clusters, "chunk_bytes": 4}
    table = make(x, kind, **options)
    cache = SlabCache(table, 600, ["cpu", "cpu"])
    folder = tmp_path_factory.mktemp("tables")
    for action, ids, number in actions:
        index = torch.tensor(ids, dtype=torch.int64)
        if action == "update":
            fresh = rows_of(number, len(ids))
            table.update(index, fresh)
            for one, row in zip(ids, fresh, strict=True):  # in order: the last one counts
                x[one] = row
        elif action == "gather":
            assert same_bits(table.gather(index), take(x, index % N))
            assert same_bits(cache.gather(index.int()), take(x, index % N))
        elif action == "compact":
            table.compact()
            assert table.stats()["moved_rows"] == 0
        elif action == "fill":
            cache.fill(torch.randperm(N, generator=torch.Generator().manual_seed(number)))
        elif action == "save":
            table.save(folder / "t")
            table = CompressedTable.from_file(
                folder / "t", ("compact", "inplace")[number % 2], False
            )
            if table._ownership.file is not None:  # mapped
                table = make(table[:], kind, **options)
            cache = SlabCache(table, 600, ["cpu"])
        elif table._rows.overflow is None:
            table = pickle.loads(pickle.dumps(table))
            cache = SlabCache(table, 600, ["cpu"])
    everything = torch.arange(N)
    assert same_bits(table[:], x)
    assert same_bits(cache.gather(everything), x)
    if table.layout == "inplace" and not table._parts.raw:
        each = table.rows_per_packed_row
        packed = table.codec.packed_bytes(items_as_rows(x, each)) < table.codec.row_bytes
        assert table.stats()["packed_rows"] == int(packed.repeat_interleave(each)[:N].sum())


def test_rows_that_do_not_fit_move_and_come_back():
    x = torch.zeros(1000, 256)
    x[:, 0] = torch.arange(1000)
    x[7] = random_bits(torch.float32, (256,))
    table = make(x, "compact")
    small = table.nbytes
    packed_rows = table.stats()["packed_rows"]
    assert packed_rows == 999
    x[10:20] = random_bits(torch.float32, (10, 256))
    table.update(torch.arange(10, 20), x[10:20])
    stats = table.stats()
    assert stats["moved_rows"] == 10 and stats["packed_rows"] == packed_rows - 10
    assert 10 * 1024 < stats["overflow_bytes"] == table.nbytes - small
    x[12:14] = torch.nn.functional.pad(torch.tensor([[13.0], [12.0]]), (0, 255))  # fit again
    table.update(torch.tensor([13, 12]), x[[13, 12]])
    assert table.stats()["moved_rows"] == 8
    x[[30, 31]] = random_bits(torch.float32, (2, 256), seed=1)  # take the two free entries
    before = table.stats()["overflow_bytes"]
    table.update(torch.tensor([30, 31]), x[[30, 31]])
    stats = table.stats()
    assert stats["moved_rows"] == 10 and stats["overflow_bytes"] == before
    assert same_bits(table[:], x)
    calls: list[int] = []
    table.compact(progress=lambda done, total: calls.append(done))
    stats = table.stats()
    assert calls == [1000] and stats["moved_rows"] == stats["overflow_bytes"] == 0
    assert stats["packed_rows"] == 1000 - 11
    fresh = CompressedTable.from_tensor(x, codec=table.codec)
    assert table.nbytes == fresh.nbytes and same_bits(table[:], x)


def test_the_overflow_grows_by_doubling(monkeypatch):
    monkeypatch.setattr(overflow, "FIRST_BYTES", 0)
    x = torch.zeros(500, 64)
    table = make(x, "compact")
    sizes = set()
    for i in range(500):
        x[i] = random_bits(torch.float32, (64,), seed=i)
        table.update(torch.tensor([i]), x[i : i + 1])
        sizes.add(table.stats()["overflow_bytes"])
    assert len(sizes) <= 11 and same_bits(table[:], x)


def test_the_overflow_takes_places_for_all_rows_at_most(monkeypatch):
    monkeypatch.setattr(overflow, "FIRST_BYTES", 0)
    area = overflow.Overflow(100, 8, pin=False)
    for rows, capacity in [(3, 3), (4, 6), (60, 60), (61, 100), (500, 100)]:
        area.reserve(rows)
        assert area.capacity == capacity


def test_memory_that_gpus_read_is_not_replaced_by_what_they_cannot(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(page_locking, "registrar", recorder)
    monkeypatch.setattr(page_locking, "_warned_of_refusal", True)
    recorder.there = False
    area = overflow.Overflow(10_000, 8, pin=True)
    recorder.there = True  # from here on there is a GPU
    assert area.buffer.ensure_pinned()
    assert area.reserve(3000) is not None and area.buffer.pinned
    kept, recorder.refusal = area.buffer, "no"
    with pytest.raises(BitslabError, match="288016 bytes .* could not be page-locked"):
        area.reserve(9000)
    assert area.buffer is kept and kept.pinned and not kept.closed
    recorder.refusal = ""
    assert area.reserve(9000) is kept


@pytest.mark.parametrize("kind", KINDS)
def test_of_equal_ids_the_last_counts_and_negative_ones_count_from_the_end(kind):
    x = weights(100, 8)
    table = make(x, kind)
    fresh = weights(5, 8, seed=3)
    table.update(torch.tensor([99, 3, -1, -97, 50], dtype=torch.int32), fresh)
    x[99], x[3], x[50] = fresh[2], fresh[3], fresh[4]
    assert same_bits(table[:], x)
    table.update(torch.tensor([], dtype=torch.int64), x[:0])
    doubled = torch.nn.Parameter(fresh.T.contiguous().T)
    table.update(torch.tensor([1, 1, 1, 1, 2]), doubled)
    x[1], x[2] = fresh[3], fresh[4]
    assert same_bits(table[:], x)


@pytest.mark.parametrize(
    ("ids", "rows", "error", "says"),
    [
        (torch.tensor([1, 100]), weights(2, 8), IndexRangeError, "index 100 at position 1"),
        (torch.tensor([1]), weights(2, 8), ArgumentError, "ids, rows: 1 ids for 2 rows"),
        (torch.tensor([1]), weights(1, 7), ArgumentError, r"rows: shape \[1, 7\]"),
        (torch.tensor([1]), weights(1, 8).double(), ArgumentTypeError, "rows: dtype"),
        (torch.tensor([1.0]), weights(1, 8), ArgumentTypeError, "ids: dtype"),
        ([1], weights(1, 8), ArgumentTypeError, "ids: expected a torch.Tensor"),
        (torch.tensor([1]), [[1.0]], ArgumentTypeError, "rows: expected a torch.Tensor"),
    ],
    ids=["range", "count", "shape", "dtype", "id-dtype", "ids", "rows"],
)
def test_an_update_that_does_not_fit_changes_nothing(ids, rows, error, says):
    x = weights(100, 8)
    for kind in KINDS:
        table = make(x, kind)
        with pytest.raises(error, match=says):
            table.update(ids, rows)
        assert same_bits(table[:], x) and not table._rows.dirty


def test_no_room_for_rows_that_move_changes_nothing(monkeypatch):
    x = torch.zeros(100, 64)
    table = make(x, "compact")
    cache = SlabCache(table, 10_000, ["cpu"])
    cache.fill(torch.arange(100))

    def refuse(self, rows):
        raise BitslabError("nbytes: no room")

    fresh = random_bits(torch.float32, (3, 64))
    with monkeypatch.context() as patched:
        patched.setattr(overflow.Overflow, "_allocate", refuse)
        with pytest.raises(BitslabError, match="no room"):
            table.update(torch.tensor([1, 2, 3]), fresh)
    assert same_bits(table[:], x) and same_bits(cache[torch.arange(100)], x)
    table.update(torch.tensor([1, 2, 3]), fresh)
    assert same_bits(table[1:4], fresh)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("cached", [False, True], ids=["table", "cache"])
@pytest.mark.parametrize("kind", KINDS)
def test_readers_see_old_or_new_rows_and_never_a_mix(kind, cached):
    x = even_rows(400, 300)
    table = make(x, kind)
    cache = SlabCache(table, 100_000, ["cpu", "cpu"])
    cache.fill(torch.arange(400))
    source = cache if cached else table
    stop, failures, reads = threading.Event(), [], [0]

    def read(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        while not stop.is_set():
            got = source.gather(torch.randint(400, (500,), generator=generator))
            reads[0] += 1
            if not (got == got[:, :1]).all():
                failures.append(seed)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for reader in readers:
        reader.start()
    generator = torch.Generator().manual_seed(9)
    for round_ in range(40):
        ids = torch.randperm(400, generator=generator)[:150]
        x[ids] = even_rows(150, 300, seed=round_)
        table.update(ids, x[ids])
        if round_ % 15 == 14:
            table.compact()
        if round_ % 10 == 9:
            cache.refresh(ids)
    stop.set()
    for reader in readers:
        reader.join()
    assert not failures and reads[0] > 0
    assert same_bits(source.gather(torch.arange(400)), x)


def test_compact_can_be_watched_and_its_watcher_may_read_and_save(tmp_path):
    x = torch.zeros(300, 64)
    table = make(x, "compact")
    x[5] = random_bits(torch.float32, (64,))
    table.update(torch.tensor([5]), x[5:6])
    cache = SlabCache(table, 5000, ["cpu"])
    seen = []

    def watch(done, total):
        assert same_bits(table[:], x)
        table.save(tmp_path / "t")
        cache.fill(torch.arange(300))
        for change in (table.compact, lambda: table.update(torch.tensor([0]), x[:1])):
            with pytest.raises(BitslabError, match="from inside compact of the same table"):
                change()
        seen.append((done, total))

    table.compact(progress=watch)
    assert (
        seen == [(300, 300)] and same_bits(table[:], x) and same_bits(cache[torch.arange(300)], x)
    )
    assert same_bits(CompressedTable.from_file(tmp_path / "t")[:], x)


def test_a_compact_that_fails_or_is_overtaken_by_close_leaves_the_table_as_it_was():
    x = torch.zeros(300, 64)
    for closes in (False, True):
        table = make(x, "compact")
        fresh = random_bits(torch.float32, (1, 64))
        table.update(torch.tensor([5]), fresh)

        def fail(done, total, table=table, closes=closes):
            if not closes:
                raise ZeroDivisionError
            table.close()

        with pytest.raises(BitslabError if closes else ZeroDivisionError):
            table.compact(progress=fail)
        if not closes:
            assert table.stats()["moved_rows"] == 1 and same_bits(table[5:6], fresh)
            table.compact()
            assert table.stats()["moved_rows"] == 0 and same_bits(table[5:6], fresh)


def test_gathers_see_rows_that_moved_wherever_the_overflow_lies() -> None:
    """Gathers run between the updates: the prepared state of gathers must follow."""
    n = 2000
    x = packable(torch.float32, (n, 32), 0)
    table = CompressedTable.from_tensor(x, codec="ibp", chunk_bytes=4, progress=False)
    ids = torch.arange(n)
    assert same_bits(table.gather(ids), x)
    sizes = []
    for first in range(0, n, 400):
        some = ids[first : first + 400]
        x[some] = random_bits(torch.float32, (len(some), 32), first)
        table.update(some, x[some])
        assert same_bits(table.gather(ids), x)
        sizes.append(table.overflow_bytes)
    assert sizes[0] < sizes[-1]
    table.compact(progress=False)
    assert same_bits(table.gather(ids), x)


def test_what_a_table_keeps_for_gathers_goes_with_its_rows() -> None:
    x = packable(torch.float32, (500, 32), 0)
    table = CompressedTable.from_tensor(x, codec="ibp", chunk_bytes=4, progress=False)
    for free in (lambda: table.compact(progress=False), table.close):
        table.gather(torch.arange(9))
        kept = weakref.ref(table._rows.parts.tensors["words"])
        table.update(torch.tensor([3]), torch.zeros(1, 32))
        free()
        assert kept() is None
