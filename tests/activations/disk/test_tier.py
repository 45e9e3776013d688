"""The disk tier: what is stored comes back, from memory or a file; faults keep what they can."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitslab.activations.disk import DiskError, DiskRates, DiskTier, Drive, PosixFile, Ticket
from bitslab.activations.disk.budget import DAY_S, WriteBudget
from bitslab.activations.disk.tickets import Stored
from bitslab.engine.memory import host_arena
from bitslab.engine.transfer import ThreadLane
from bitslab.errors import ArgumentError, ArgumentTypeError, BitslabError
from tests.activations.disk.waiting import WAIT_S, used_bytes_become

KIB, MIB = 1 << 10, 1 << 20
RATES = DiskRates(64 * KIB, 2, 2, 1e9, 1e9, 1e9, 1e9, direct=True)


def random_bytes(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator)


def stored(tier: DiskTier, data: torch.Tensor) -> Ticket:
    ticket = tier.store(data)
    assert ticket is not None, tier.stats()
    return ticket


class Faulty(PosixFile):
    """A file whose writes and reads wait, and fail, as a test says."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.error: OSError | None = None
        self.changed = False

    def write(self, offset: int, data: torch.Tensor) -> None:
        self.begun.set()
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise DiskError(f"{self.path}: {self.error.strerror}") from self.error
        super().write(offset, data)

    def read(self, offset: int, out: torch.Tensor) -> None:
        if self.error is not None:
            raise DiskError(f"{self.path}: {self.error.strerror}") from self.error
        super().read(offset, out)
        if self.changed:
            out[-1] ^= 1


def faulty(folder: Path | list[Path], **options: Any) -> tuple[DiskTier, list[Faulty]]:
    """Return a tier with one thread each way, and its files."""
    files: list[Faulty] = []

    def open_file(path: str) -> Faulty:
        files.append(Faulty(path))
        return files[-1]

    rates = DiskRates(64 * KIB, 1, 1, 1e9, 1e9, 1e9, 1e9, direct=True)
    options = {"rates": rates, "open_file": open_file, **options}
    return DiskTier(folder, **options), files


@pytest.fixture(params=[1, 3])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    some = [tmp_path / str(i) for i in range(request.param)]
    for folder in some:
        folder.mkdir()
    return some


SIZES = (1, 4095, 4096, 4097, 64 * KIB, 64 * KIB + 1, 700_001)


@pytest.mark.parametrize("verify", [False, True])
def test_what_is_stored_comes_back(folders: list[Path], verify: bool) -> None:
    with DiskTier(folders, rates=RATES, verify=verify) as tier:
        data = [random_bytes(n, seed) for seed, n in enumerate(SIZES)]
        tickets = [stored(tier, tier.host_buffer(len(t)).copy_(t)) for t in data]
        assert tier.drain(WAIT_S)
        assert not any(ticket.in_memory for ticket in tickets)
        for _ in range(2):  # a retained graph reads twice
            for ticket, t in zip(reversed(tickets), reversed(data), strict=True):
                assert torch.equal(tier.fetch(ticket).result(WAIT_S), t)
        out = torch.zeros(700_001, dtype=torch.uint8)
        assert tier.fetch(tickets[-1], out).result(WAIT_S) is out
        assert torch.equal(out, data[-1])
        found = tier.stats()
        assert found["written_bytes"] == sum(SIZES)
        assert found["read_bytes"] == 2 * sum(SIZES) + 700_001
        assert (found["queued_bytes"], found["forwarded_bytes"], found["failed_bytes"]) == (0, 0, 0)
        # Every folder has a part of the large one.
        assert all(stripe.used_bytes for stripe in tier._stripes)
        del ticket, tickets, t
        gc.collect()
        assert used_bytes_become(tier, 0)
    assert not [path for folder in folders for path in folder.iterdir()]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_order_of_storing_fetching_and_forgetting(data: st.DataObject, tmp_path: Path) -> None:
    with DiskTier(tmp_path, rates=RATES, verify=True, disk_bytes=2 * MIB) as tier:
        kept: dict[int, tuple[Ticket, torch.Tensor]] = {}
        for step in range(data.draw(st.integers(5, 40))):
            if data.draw(st.booleans()) or not kept:
                t = random_bytes(data.draw(st.integers(1, 300 * KIB)), step)
                ticket = tier.store(tier.host_buffer(len(t)).copy_(t))
                if ticket is not None:
                    kept[step] = ticket, t
            else:
                key = data.draw(st.sampled_from(sorted(kept)))
                ticket, t = kept[key]
                assert torch.equal(tier.fetch(ticket).result(WAIT_S), t)
                if data.draw(st.booleans()):
                    tier.forget(ticket)
                    del kept[key]
        for ticket, t in kept.values():
            assert torch.equal(tier.fetch(ticket).result(WAIT_S), t)
        assert tier.stats()["disk_bytes"] <= 2 * MIB


def test_bytes_reach_the_device(tmp_path: Path) -> None:
    """The kernel counts what a process makes the device write; a page cache is not counted."""

    def written() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))

    n = 8 * MIB
    with DiskTier(tmp_path, rates=RATES) as tier:
        before = written()
        ticket = stored(tier, tier.host_buffer(n).random_())
        assert tier.drain(WAIT_S)
        (folder,) = tier.stats()["folders"]
        if folder["direct"]:
            assert written() - before >= n
        else:  # the kernel says so, or it is a file system in memory
            tier._stripes[0].file.sync()  # type: ignore[attr-defined]
            assert written() - before >= n or folder["file_system"] in {"tmpfs", "ramfs"}
        assert tier.stats()["written_bytes"] == n and not ticket.in_memory


# Forwarding


def test_bytes_that_wait_come_from_memory_and_are_not_written(tmp_path: Path) -> None:
    tier, (file,) = faulty(tmp_path)
    file.gate.clear()
    first, second = random_bytes(100, 1), tier.host_buffer(200 * KIB).copy_(random_bytes(200 * KIB))
    tickets = [stored(tier, first), stored(tier, second)]
    assert file.begun.wait(WAIT_S)
    assert tier.fetch(tickets[1]).result(WAIT_S) is second  # the very memory
    out = torch.zeros(100, dtype=torch.uint8)
    # Its write has begun, and goes on.
    assert torch.equal(tier.fetch(tickets[0], out).result(WAIT_S), first)
    file.gate.set()
    assert tier.drain(WAIT_S)
    found = tier.stats()
    assert (found["written_bytes"], found["cancelled_bytes"]) == (100, 200 * KIB)
    assert found["forwarded_bytes"] == 200 * KIB + 100
    assert tickets[1].in_memory
    assert tier.fetch(tickets[1]).result(WAIT_S) is second
    tier.close()


def test_bytes_that_nobody_wants_any_more_are_not_written(tmp_path: Path) -> None:
    tier, (file,) = faulty(tmp_path)
    file.gate.clear()
    first = stored(tier, random_bytes(10))
    assert file.begun.wait(WAIT_S)
    dropped, forgotten = (tier.host_buffer(100 * KIB) for _ in range(2))
    refs = [weakref.ref(dropped.untyped_storage()), weakref.ref(forgotten.untyped_storage())]
    ticket = stored(tier, dropped)
    other = stored(tier, forgotten)
    del ticket, dropped, forgotten  # as of a graph that is dropped
    tier.forget(other)
    with pytest.raises(BitslabError, match="ticket: was forgotten"):
        tier.fetch(other)
    file.gate.set()
    assert tier.drain(WAIT_S)
    found = tier.stats()
    assert (found["written_bytes"], found["cancelled_bytes"]) == (10, 200 * KIB)
    tier.close()
    assert [ref() for ref in refs] == [None, None]
    assert first.nbytes == 10


def test_memory_is_given_back_once_it_is_written(tmp_path: Path) -> None:
    with DiskTier(tmp_path, rates=RATES) as tier:
        data = tier.host_buffer(300 * KIB)
        ref = weakref.ref(data.untyped_storage())
        ticket = stored(tier, data)
        del data
        assert tier.drain(WAIT_S)
        tier._store_lane.close()  # threads hold nothing of their last work
        assert ref() is None and not ticket.in_memory


def test_memory_is_not_used_again_while_a_gpu_uses_it(tmp_path: Path) -> None:
    class Event:
        passed = False

        def query(self) -> bool:
            return self.passed

    event = Event()
    with DiskTier(tmp_path, rates=RATES) as tier:
        data = tier.host_buffer(5 * MIB, pending=lambda: [event])
        before = host_arena().stats()["used_bytes"]
        del data
        assert host_arena().stats()["used_bytes"] == before
        event.passed = True
        assert host_arena().stats()["used_bytes"] <= before - 5 * MIB


def test_bytes_that_come_later_are_waited_for(tmp_path: Path) -> None:
    gate, lane = threading.Event(), ThreadLane("test")
    with DiskTier(tmp_path, rates=RATES) as tier:
        data, right = tier.host_buffer(150 * KIB).zero_(), random_bytes(150 * KIB)

        def fill() -> None:
            assert gate.wait(WAIT_S)
            data.copy_(right)

        ticket = tier.store(data, after=lane.submit(fill))
        assert ticket is not None
        forwarded = tier.fetch(ticket)
        gate.set()
        assert torch.equal(forwarded.result(WAIT_S), right)
        again = tier.store(data, after=lane.submit(data.copy_, right))
        assert again is not None and tier.drain(WAIT_S)
        assert torch.equal(tier.fetch(again).result(WAIT_S), right)

        def fail() -> None:
            raise ValueError("no such bytes")

        lost = tier.store(data, after=lane.submit(fail))
        assert lost is not None and tier.drain(WAIT_S)
        with pytest.raises(ValueError, match="no such bytes"):
            tier.fetch(lost).result(WAIT_S)
        assert tier.stats()["folders"][0]["error"] is None
    lane.close()


# What is not taken


def test_bytes_are_not_taken_while_the_disk_is_behind(tmp_path: Path) -> None:
    tier, (file,) = faulty(tmp_path, queue_bytes=100 * KIB)
    file.gate.clear()
    large = stored(tier, random_bytes(150 * KIB))  # alone it may be larger
    assert tier.store(random_bytes(10)) is None
    file.gate.set()
    assert tier.drain(WAIT_S)
    small = stored(tier, random_bytes(10))
    assert tier.stats()["refused_bytes"] == {"behind": 10, "full": 0, "failed": 0, "budget": 0}
    assert tier.drain(WAIT_S)
    assert (large.in_memory, small.in_memory) == (False, False)
    tier.close()


def test_bytes_are_not_taken_when_the_disk_is_full(folders: list[Path]) -> None:
    limit = len(folders) * 128 * KIB
    with DiskTier(folders, rates=RATES, disk_bytes=limit) as tier:
        tickets = [stored(tier, random_bytes(64 * KIB, i)) for i in range(limit // (64 * KIB))]
        assert tier.store(random_bytes(1)) is None
        assert tier.stats()["refused_bytes"]["full"] == 1
        assert tier.stats()["disk_bytes"] == limit
        assert tier.drain(WAIT_S)
        assert torch.equal(
            tier.fetch(tickets.pop()).result(WAIT_S),
            random_bytes(64 * KIB, -1 + limit // (64 * KIB)),
        )
        assert used_bytes_become(tier, limit - 64 * KIB)
        again = stored(tier, random_bytes(64 * KIB))
        assert tier.drain(WAIT_S) and not again.in_memory
        # What does not fit as a whole takes nothing.
        tickets.pop()
        assert used_bytes_become(tier, limit - 64 * KIB)
        assert tier.store(random_bytes(65 * KIB)) is None
        assert used_bytes_become(tier, limit - 64 * KIB)


def test_file_system_that_fills_up_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bitslab.activations.disk.stripe.GROWTH_BYTES", 4 * MIB)
    with DiskTier(tmp_path, rates=RATES) as tier:
        kept = stored(tier, random_bytes(MIB))
        assert tier.drain(WAIT_S)
        monkeypatch.setattr("bitslab.activations.disk.posix_file.free_bytes", lambda fd: 0)
        some = [tier.store(random_bytes(MIB)) for _ in range(6)]
        assert [ticket is None for ticket in some] == [False] * 3 + [True] * 3
        assert tier.stats()["refused_bytes"]["full"] == 3 * MIB
        assert tier.stats()["disk_bytes"] == 4 * MIB
        assert tier.stats()["folders"][0]["error"] is None
        assert torch.equal(tier.fetch(kept).result(WAIT_S), random_bytes(MIB))


def test_budget_of_a_day() -> None:
    now = [0.0]
    budget = WriteBudget(24_000.0, lambda: now[0])
    assert budget.take(1000) and not budget.take(1)
    now[0] = 1800.0
    assert budget.take(500) and not budget.take(1)
    budget.give_back(100)
    assert budget.take(100)
    now[0] += 10 * DAY_S
    assert budget.left_bytes == 1000


def test_bytes_beyond_the_budget_are_not_taken(tmp_path: Path) -> None:
    with DiskTier(tmp_path, rates=RATES, write_budget=24 * MIB / 1e12) as tier:
        ticket = stored(tier, random_bytes(MIB))
        assert tier.store(random_bytes(MIB)) is None
        assert tier.stats()["refused_bytes"]["budget"] == MIB
        assert tier.drain(WAIT_S) and not ticket.in_memory


def test_cancelled_bytes_go_back_to_the_budget(tmp_path: Path) -> None:
    tier, (file,) = faulty(tmp_path, write_budget=24 * MIB / 1e12)
    file.gate.clear()
    first = stored(tier, random_bytes(64 * KIB))
    assert file.begun.wait(WAIT_S)
    second = stored(tier, random_bytes(MIB - 64 * KIB))
    assert tier.store(random_bytes(64 * KIB)) is None
    assert torch.equal(tier.fetch(second).result(WAIT_S), random_bytes(MIB - 64 * KIB))
    third = stored(tier, random_bytes(MIB - 64 * KIB, 3))
    file.gate.set()
    assert tier.drain(WAIT_S)
    assert [ticket.in_memory for ticket in (first, second, third)] == [False, True, False]
    tier.close()


def test_short_life_is_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitslab.activations.disk.tier.WEAR_BYTES", 1.0)
    lasting, worn = Drive(1e18, writes_per_day=1e9), Drive(1.0, rated_bytes=MIB)
    for drive, warned in ((lasting, 0), (worn, 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with DiskTier(tmp_path, rates=RATES, drive=drive) as tier:
                assert tier.stats()["lifespan_days"] is None
                tickets = []
                for _ in range(3):
                    tickets.append(stored(tier, random_bytes(MIB)))
                    assert tier.drain(WAIT_S)
                days = tier.stats()["lifespan_days"]
        assert (days < 365) == bool(warned)
        assert len(caught) == warned
        assert all("write_budget= limits" in str(each.message) for each in caught)


def test_interruption_leaves_nothing_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskTier(tmp_path, rates=RATES) as tier:
        submit, calls = tier._store_lane.submit, []

        def interrupted(*arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return submit(*arguments)

        monkeypatch.setattr(tier._store_lane, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tier.store(random_bytes(300 * KIB))
        calls.clear()
        assert tier.drain(WAIT_S)
        monkeypatch.undo()
        ticket = stored(tier, random_bytes(300 * KIB))
        assert torch.equal(tier.fetch(ticket).result(WAIT_S), random_bytes(300 * KIB))
        assert tier.drain(WAIT_S)


# Faults


def test_failed_write_keeps_the_bytes_and_ends_the_tier(tmp_path: Path) -> None:
    tier, (file,) = faulty(tmp_path)
    before = stored(tier, random_bytes(100 * KIB, 1))
    assert tier.drain(WAIT_S)
    file.error = OSError(errno.EIO, "Input/output error")
    data = random_bytes(200 * KIB, 2)
    failed = stored(tier, data)
    assert tier.drain(WAIT_S)
    assert failed.in_memory and "Input/output error" in str(failed.error)
    assert torch.equal(tier.fetch(failed).result(WAIT_S), random_bytes(200 * KIB, 2))
    # Later steps go on without it.
    assert tier.store(random_bytes(5)) is None
    assert tier.refused_bytes("failed") == 5 and "Input/output error" in str(tier.error)
    tier.rest()
    assert "Input/output error" in str(tier.error)
    found = tier.stats()
    assert found["refused_bytes"]["failed"] == 5 and found["failed_bytes"] > 0
    assert "Input/output error" in found["folders"][0]["error"]
    file.error = None  # what was written before can be read
    assert torch.equal(tier.fetch(before).result(WAIT_S), random_bytes(100 * KIB, 1))
    tier.close()


def test_other_folders_go_on(tmp_path: Path) -> None:
    some = [tmp_path / "a", tmp_path / "b"]
    for folder in some:
        folder.mkdir()
    tier, (bad, _) = faulty(some)
    bad.error = OSError(errno.EIO, "Input/output error")
    failed = stored(tier, random_bytes(300 * KIB))
    assert tier.drain(WAIT_S)
    assert failed.in_memory and tier.error is None
    later = stored(tier, random_bytes(300 * KIB, 3))
    assert tier.drain(WAIT_S)
    assert not later.in_memory
    assert torch.equal(tier.fetch(later).result(WAIT_S), random_bytes(300 * KIB, 3))
    assert torch.equal(tier.fetch(failed).result(WAIT_S), random_bytes(300 * KIB))
    tier.close()


def test_failed_read_raises_and_names_the_file(tmp_path: Path) -> None:
    tier, (file,) = faulty(tmp_path)
    ticket = stored(tier, random_bytes(200 * KIB))
    assert tier.drain(WAIT_S)
    file.error = OSError(errno.EIO, "Input/output error")
    with pytest.raises(DiskError, match=f"{tmp_path}.*Input/output error"):
        tier.fetch(ticket).result(WAIT_S)
    assert tier.store(random_bytes(5)) is None
    tier.close()


@pytest.mark.parametrize("verify", [True, False])
def test_other_bytes_are_noticed_under_verify(tmp_path: Path, verify: bool) -> None:
    tier, (file,) = faulty(tmp_path, verify=verify)
    ticket = stored(tier, random_bytes(1000))
    assert tier.drain(WAIT_S)
    file.changed = True
    back = tier.fetch(ticket)
    if verify:
        with pytest.raises(DiskError, match="bytes 0 to 1000 of the file came back other than"):
            back.result(WAIT_S)
    else:
        assert not torch.equal(back.result(WAIT_S), random_bytes(1000))
    tier.close()


def test_file_that_is_cut_raises(tmp_path: Path) -> None:
    with DiskTier(tmp_path, rates=RATES) as tier:
        ticket = stored(tier, random_bytes(MIB))
        assert tier.drain(WAIT_S)
        os.truncate(f"/proc/self/fd/{tier._stripes[0].file._fd}", 0)  # type: ignore[attr-defined]
        with pytest.raises(DiskError, match="was cut from .* to 0 bytes by somebody else"):
            tier.fetch(ticket).result(WAIT_S)


# Its life


def test_closed_tier_refuses_and_releases(tmp_path: Path) -> None:
    tier, (file,) = faulty(tmp_path)
    file.gate.clear()
    tickets = [stored(tier, random_bytes(10)) for _ in range(3)]
    assert file.begun.wait(WAIT_S)
    threading.Timer(0.05, file.gate.set).start()
    tier.close()
    tier.close()
    assert tier.drain(0.0)
    assert tier.stats()["cancelled_bytes"] == 20
    for call in (lambda: tier.store(random_bytes(1)), lambda: tier.fetch(tickets[0])):
        with pytest.raises(BitslabError, match="this DiskTier is closed"):
            call()
    with pytest.raises(DiskError, match="is closed"):
        file.write(0, random_bytes(1))


def test_copies_have_files_of_their_own(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, rates=RATES, disk_bytes=5 * MIB, verify=True)
    for other in (copy.deepcopy(tier), pickle.loads(pickle.dumps(tier))):
        assert (other.disk_bytes, other.verify, other.rates) == (5 * MIB, True, (RATES,))
        ticket = stored(other, random_bytes(9))
        assert other.drain(WAIT_S)
        assert tier.stats()["written_bytes"] == 0
        assert torch.equal(other.fetch(ticket).result(WAIT_S), random_bytes(9))
        other.close()
    tier.close()


def test_folder_in_memory_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="/dev/shm is memory, so that nothing is saved .tmpfs"):
        tier = DiskTier("/dev/shm", rates=RATES)
    ticket = stored(tier, random_bytes(MIB))
    assert tier.drain(WAIT_S)
    assert torch.equal(tier.fetch(ticket).result(WAIT_S), random_bytes(MIB))
    assert tier.stats()["folders"][0]["direct"] is False
    tier.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"folders": []}, ArgumentError, "disk: expected one folder or more, got none"),
        ({"folders": 3}, ArgumentTypeError, "disk: expected a folder or several, got 3"),
        ({"folders": ["."], "disk_bytes": 1.5}, ArgumentTypeError, "disk_bytes: expected int"),
        ({"folders": ".", "disk_bytes": 0}, ArgumentError, "disk_bytes: 0, accepted are numbers"),
        ({"folders": ".", "write_budget": True}, ArgumentTypeError, "write_budget: expected float"),
        ({"folders": ".", "queue_bytes": -1}, ArgumentError, "queue_bytes: -1, accepted"),
        ({"folders": "/nowhere"}, DiskError, "/nowhere: "),
    ],
)
def test_options_are_checked(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        DiskTier(**options)


def test_tensors_are_checked(tmp_path: Path) -> None:
    with DiskTier(tmp_path, rates=RATES) as tier:
        with pytest.raises(ArgumentTypeError, match="data: expected uint8 on the CPU, got torch.f"):
            tier.store(torch.zeros(3))
        for t in (torch.zeros(0), torch.zeros(2, 2), torch.zeros(8)[::2]):
            with pytest.raises(ArgumentError, match="data: shape"):
                tier.store(t.to(torch.uint8) if t.is_contiguous() else t.byte().repeat(2)[::2])
        ticket = stored(tier, random_bytes(5))
        with pytest.raises(ArgumentError, match="out: 4 bytes, expected 5"):
            tier.fetch(ticket, torch.zeros(4, dtype=torch.uint8))


def test_a_piece_that_is_written_looks_at_its_own_ticket_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of pieces may wait: with each of them looking at all, threads did little else."""
    looked, real = [0], Stored.pending.fget  # type: ignore[attr-defined]
    gate = threading.Event()
    write = PosixFile.write

    def pending(stored: Stored) -> bool:
        looked[0] += 1
        assert real is not None
        return bool(real(stored))

    def late(*arguments: Any) -> None:
        assert gate.wait(WAIT_S)
        write(*arguments)

    monkeypatch.setattr(Stored, "pending", property(pending))
    monkeypatch.setattr(PosixFile, "write", late)
    with DiskTier(tmp_path, rates=RATES) as tier:
        tickets = [stored(tier, random_bytes(150 * KIB)) for _ in range(40)]  # three pieces each
        looked[0] = 0
        gate.set()
        assert tier.drain(WAIT_S)
        assert 3 * len(tickets) <= looked[0] < 3 * len(tickets) + 10 * len(tickets)
        assert tier.stats()["queued_bytes"] == 0
