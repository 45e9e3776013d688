"""What ranks check of decisions: kinds of calls of the function, ids, tables' memory and shapes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist

from bitslab.distributed import CompressedAllToAll, Table, all_to_all_single, selection
from bitslab.distributed import caller as of_callers
from bitslab.distributed.caller import Caller
from bitslab.distributed.collective import function_caller
from bitslab.distributed.kinds import Kind
from bitslab.distributed.selection import PLAIN, Measured, WayRecord
from bitslab.engine.advisor import NetworkModel
from tests.distributed.cpu_coder import coded_where_rows_are
from tests.distributed.ranks import error_of, noise, splits, world
from tests.distributed.table_ranks import by_torch

#: Bytes of rows for others from which a mocked decision is to compress them.
LARGE = 4000
SLOW = NetworkModel(((8.0, 1e-4), (1e6, 1e-2 + 1e-4)))  # 0.1 GB/s


def _mocked(there: bool) -> Any:
    """Predict, or measure, that large rows cross faster compressed and others plain."""

    def predicted(record: WayRecord, *args: Any) -> tuple[float, float]:
        if not record.calls:
            return -1.0, -1.0
        large = record.raw_bytes / record.calls >= LARGE
        return (1.0, 2.0) if large else (2.0, 1.0)

    def seconds_of(self: Caller, group: Any, tables: Any, layout: Any, mode: str, turn: Any) -> Any:
        large = layout.all_raw_bytes >= LARGE
        return 1.0 if large == (mode != PLAIN) else 2.0

    if there:
        return mock.patch.object(Caller, "_seconds_of", seconds_of)
    return mock.patch.object(WayRecord, "predicted", predicted)


def kinds_of_calls(rank: int, ranks: int) -> dict[str, Any]:
    """Calls that take turns, of rows of one size: splits of each rank are its own."""
    seen: dict[str, Any] = {}
    for there in (False, True):
        with coded_where_rows_are() if there else nullcontext(), _mocked(there):
            group = dist.new_group()
            # Few rows of 4, many of them, few of 8: two kinds, and one of two places.
            calls = [
                _call(rank, ranks, rows, row, group) for rows, row in ((1, 4), (200, 4), (1, 8))
            ]
            equal = [call() for _ in range(45) for call in calls]
            caller = function_caller(group, "auto")
            of_rows = _kinds_of(caller)
            kinds = {row: of_rows["torch.float32", row.bit_length()] for row in (4, 8)}
            places = {row: kind.places for row, kind in kinds.items()}
            modes = {row: [d.modes[0] for d in kind._decisions] for row, kind in kinds.items()}
            gathered: list[Any] = [None] * ranks
            dist.all_gather_object(gathered, [places, modes])
            seen[f"{there}"] = {
                "equal": all(equal),
                "agreed": all(found == gathered[0] for found in gathered),
                "places": [places[4], places[8]],
                "modes": [sorted(modes[4]), sorted(modes[8])],
            }
    return seen


def _kinds_of(caller: Caller) -> dict[Any, Kind]:
    """Return the kinds of calls by dtype and the bits of a row's elements."""
    return cast("dict[Any, Kind]", caller._kinds._kept._kept)


def _call(
    rank: int, ranks: int, rows: int, row: int, group: dist.ProcessGroup, **options: Any
) -> Callable[[], bool]:
    """Return a call of unequal splits, which returns whether what came is what torch delivers."""
    received, sent = splits(rank, ranks, row)
    received, sent = [rows * n for n in received], [rows * n for n in sent]
    t = torch.randn(sum(sent), row, generator=torch.Generator().manual_seed(rank))
    expected = by_torch(t, received, sent)

    def call() -> bool:
        found = torch.empty_like(expected)
        all_to_all_single(found, t, received, sent, group, **options)
        return torch.equal(found, expected)

    return call


def calls_of_no_kind(rank: int, ranks: int) -> dict[str, Any]:
    """Sizes, bounds and ids that each rank alone knows, in no order: ranks decide alike."""
    seen: dict[str, Any] = {}
    for there in (False, True):
        own = torch.Generator().manual_seed(100 + rank)  # of this rank alone
        of_all = torch.Generator().manual_seed(7)
        with coded_where_rows_are() if there else nullcontext(), _mocked(there):
            group = dist.new_group()
            within = []
            for _ in range(150):
                rows = int(torch.randint(1, 9, (1,), generator=of_all)) ** 2
                received, sent = splits(rank, ranks, rows)
                received, sent = [rows * n for n in received], [rows * n for n in sent]
                t = torch.rand(sum(sent), 4, generator=own)
                bound, ids = torch.randint(2, (2,), generator=own).tolist()
                expected = by_torch(t, received, sent)
                found = torch.empty_like(expected)
                all_to_all_single(
                    found,
                    t,
                    received,
                    sent,
                    group,
                    error_bound=0.01 if bound else None,
                    row_ids=torch.arange(len(t)) if ids else None,
                )
                within.append(bool(((found - expected).abs() <= 0.01).all()))
            caller = function_caller(group, "auto")
            (kind,) = _kinds_of(caller).values()
            modes: list[Any] = [None] * ranks
            dist.all_gather_object(modes, [kind.places, [d.modes for d in kind._decisions]])
        seen[f"{there}"] = {"within": all(within), "agreed": modes == [modes[0]] * ranks}
        seen[f"{there}"]["places"] = kind.places
    return seen


def rows_of_any_size(rank: int, ranks: int) -> dict[str, Any]:
    """Rows that have another size in each call are decided of all the same."""
    seen: dict[str, Any] = {}
    for there in (False, True):
        with coded_where_rows_are() if there else nullcontext(), _mocked(there):
            group = dist.new_group()
            equal = [_even(ranks, row, group) for row in range(64, 64 + 15)]
            counters = function_caller(group, "auto").counters[0]
            seen[f"{there}"] = [all(equal), counters.plain_calls]
    return seen


def _even(ranks: int, row: int, group: dist.ProcessGroup) -> bool:
    t = torch.arange(ranks * row).view(ranks, row).float()
    found, expected = torch.empty_like(t), torch.empty_like(t)
    all_to_all_single(found, t, group=group)
    dist.all_to_all_single(expected, t)
    return torch.equal(found, expected)


def a_dtype_apart(rank: int, ranks: int) -> dict[str, Any]:
    """One rank calls once with another dtype: all raise, and go on."""
    seen: dict[str, Any] = {}
    for there in (False, True):
        with coded_where_rows_are() if there else nullcontext(), _mocked(there):
            group = dist.new_group()
            t = noise(rank, ranks, 4)
            ids = torch.arange(len(t))

            def call(t: torch.Tensor = t, group: Any = group, ids: torch.Tensor = ids) -> None:
                all_to_all_single(torch.empty_like(t), t, group=group, row_ids=ids)

            for _ in range(5):
                call()
            other = t.double() if rank == 1 else t
            said = error_of(lambda other=other, call=call: call(other))  # type: ignore[misc]
            behind = [error_of(call) for _ in range(20)]
            plain = function_caller(group, "auto").counters[0].plain_calls
            seen[f"{there}"] = {"said": said, "behind": sorted(set(behind)), "plain": plain}
    return seen


def ids_decide(rank: int, ranks: int) -> dict[str, Any]:
    """While torch's own collective delivers rows, decisions count what their ids save."""
    seen: dict[str, Any] = {}
    given: list[bool] = []

    def measure(rows: Any, bound: float, candidate: Any, repeats: Any) -> Measured:
        given.append(repeats is not None)
        # Forward alone ids save nothing, or much: rows are counted.
        ratio = 1.0 if repeats is None else forward * len(repeats.places) / len(repeats.first)
        return Measured(max(1.0, ratio), 1e-12, 1e-12)

    t = noise(rank, ranks, 60)
    ids = torch.arange(len(t)) % 5
    t = t[ids]
    network = mock.patch.object(of_callers, "network_model", lambda *args: SLOW)
    with network, mock.patch.object(selection, "measure", measure):
        for forward, with_ids, with_gradient in (
            (1.0, True, False),
            (1.0, False, False),
            (0.0, True, True),
            (0.0, True, False),
            (0.0, False, True),
        ):
            exchange = CompressedAllToAll(decide_every=2)
            decision = exchange._caller.decision
            decision.modes = [PLAIN, PLAIN]
            given.clear()
            for _ in range(3):
                rows = t.clone().requires_grad_(with_gradient)
                exchange(rows, row_ids=ids if with_ids else None)
            seen[f"{forward} {with_ids} {with_gradient}"] = [decision.modes[0], any(given)]
    return seen


def ids_decide_there(rank: int, ranks: int) -> dict[str, Any]:
    """The same of exchanges that are measured as a whole."""
    seen: dict[str, Any] = {}
    t = noise(rank, ranks, 60)
    ids = torch.arange(len(t)) % 5
    t = t[ids]
    ids_were: list[bool] = []

    def seconds_of(self: Caller, group: Any, tables: Any, layout: Any, mode: str, turn: Any) -> Any:
        ids_were.append(tables[0].repeats is not None)
        return 1e-3 if mode != PLAIN else 0.9e-3  # forward alone, plain is faster

    network = mock.patch.object(of_callers, "network_model", lambda *args: SLOW)
    with network, mock.patch.object(Caller, "_seconds_of", seconds_of), coded_where_rows_are():
        for with_ids, with_gradient in ((True, True), (True, False), (False, True)):
            exchange = CompressedAllToAll(decide_every=2)
            exchange._caller.decision.modes = [PLAIN, PLAIN]
            ids_were.clear()
            for _ in range(3):
                rows = t.clone().requires_grad_(with_gradient)
                exchange(rows, row_ids=ids if with_ids else None)
            modes = exchange.stats()["modes"]
            seen[f"{with_ids} {with_gradient}"] = [modes["forward"], any(ids_were)]
    return seen


def memory_of_tables(rank: int, ranks: int) -> dict[str, Any]:
    """Outputs and gradients of tables of one width are changed in place, each alone."""
    planned = [Table(name, 4) for name in ("a", "b", "c")]
    seen: dict[str, Any] = {}
    for codec in ("compressed", "raw"):
        exchange = CompressedAllToAll(tables=planned, codec=codec)
        sizes = {table.name: [5] * ranks for table in planned}
        given = {name: torch.ones(5 * ranks, 4, requires_grad=True) for name in sizes}
        found = exchange.exchange_tables(given, sizes, sizes)
        found["a"].mul_(3).add_(1)  # autograd sees it
        seen[f"{codec} outputs"] = all(bool((found[name] == 1).all()) for name in ("b", "c"))
        sum(t.sum() for t in found.values()).backward()  # type: ignore[union-attr]
        gradients = {name: t.grad for name, t in given.items()}
        assert all(g is not None for g in gradients.values())
        before = {name: g.clone() for name, g in gradients.items() if g is not None}
        seen[f"{codec} gradients"] = [float(g[0, 0]) for g in before.values()]
        gradients["b"].fill_(9)  # type: ignore[union-attr]
        seen[f"{codec} others"] = all(
            torch.equal(gradients[name], before[name])  # type: ignore[arg-type]
            for name in ("a", "c")
        )
        # And they are added to.
        found = exchange.exchange_tables(given, sizes, sizes)
        sum(t.sum() for t in found.values()).backward()  # type: ignore[union-attr]
        seen[f"{codec} added"] = [float(t.grad[0, 0]) for t in given.values()]  # type: ignore[index]
    return seen


def shapes(rank: int, ranks: int) -> dict[str, Any]:
    """Outputs of any shape are changed in place, and their gradients follow."""
    seen: dict[str, Any] = {}
    for shape in ((), (3,), (2, 3), (2, 1, 3)):
        for codec in ("compressed", "raw"):
            exchange = CompressedAllToAll(codec=codec)
            t = torch.ones(4 * ranks, *shape, requires_grad=True)
            found = exchange(t)
            found.mul_(2)
            found[0] = 0
            (found * found).sum().backward()
            # Of (2 x)^2, but for the first row that each rank got, which rank 0 sent.
            expected = torch.full_like(t, 8.0)
            if rank == 0:
                expected[::4] = 0
            key = f"{shape} {codec}"
            seen[key] = found.shape == t.shape and torch.equal(t.grad, expected)  # type: ignore[arg-type]
    return seen


def where_rows_are(rank: int, ranks: int) -> dict[str, Any]:
    """A rank without an input, in a group for both kinds of tensors."""
    both = mock.patch.object(dist, "get_backend_config", lambda of: "cpu:gloo,cuda:nccl")
    planned, none = [Table("a", 4)], {"a": [0] * ranks}
    sizes = {"a": [1] * ranks}
    rows = {"a": torch.ones(ranks, 4)}
    exchange = CompressedAllToAll(tables=planned)
    seen: dict[str, Any] = {}
    with both:
        seen["unknown"] = error_of(lambda: exchange.exchange_tables({}, none, none))
        given = CompressedAllToAll(tables=planned, device="cpu")
        seen["given"] = str(given.exchange_tables({}, none, none)["a"].device)
        exchange.exchange_tables(rows, sizes, sizes)
        seen["seen"] = str(exchange.exchange_tables({}, none, none)["a"].device)
    fresh = CompressedAllToAll(tables=planned)
    seen["gloo"] = str(fresh.exchange_tables({}, none, none)["a"].device)
    seen["no device"] = error_of(lambda: CompressedAllToAll(device="cuda:99"))
    seen["known"] = world().rank() == rank
    return seen


CHECKS: dict[str, Callable[[int, int], Any]] = {
    f.__name__: f
    for f in (
        kinds_of_calls,
        calls_of_no_kind,
        rows_of_any_size,
        a_dtype_apart,
        ids_decide,
        ids_decide_there,
        memory_of_tables,
        shapes,
        where_rows_are,
    )
}
