"""A rank of an exchange: ``python -m`` style, started by `run_ranks` with the name of a check."""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional

import bitslab
from bitslab.distributed import (
    CompressedAllToAll,
    ErrorBound,
    agreement,
    all_to_all_single,
    linear,
)
from bitslab.distributed import exchange as stages
from bitslab.distributed.pairs import Pairs
from bitslab.distributed.wire import SHORT_BYTES, VERSION, Terms
from tests.helpers import random_bits, same_bits

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(check: str, ranks: int, folder: Path, *, timeout_s: int = 30) -> list[Any]:
    """Run a check on so many ranks; return what each returned, None of a dead one."""
    from tests.forked import run_forked_together

    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.distributed.ranks import main\n"
        "main()\n"
    )
    done = run_forked_together(
        [
            ["-c", code, ROOT, check, str(rank), str(ranks), folder, str(timeout_s)]
            for rank in range(ranks)
        ],
        imports=("torch", "bitslab", "numba", "torch.distributed", "tests.distributed.warm"),
    )
    found = []
    for result in done:
        if "dead" not in check:
            assert result.returncode == 0, result.stderr
        # Gloo of torch 2.8 writes to the same stream; a rank that ends early, nothing else.
        killed = result.returncode != 0
        found.append(None if killed else json.loads(result.stdout.splitlines()[-1]))
    return found


def run_checks(checks: Sequence[str], ranks: int, folder: Path) -> dict[str, list[Any]]:
    """Run checks one after the other on so many ranks; return by check what each rank returned."""
    found = run_ranks("+".join(checks), ranks, folder)
    return {check: [seen[check] for seen in found] for check in checks}


def main() -> None:
    """Join the group, run a check, print what it returned."""
    check, rank, ranks, folder, timeout_s = sys.argv[2:7]
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    if check.startswith("nccl"):
        torch.cuda.set_device(int(rank))
    dist.init_process_group(
        "nccl" if check.startswith("nccl") else "gloo",
        store=getattr(dist, "FileStore")(f"{folder}/store", int(ranks)),  # noqa: B009 - mypy
        rank=int(rank),
        world_size=int(ranks),
        timeout=timedelta(seconds=int(timeout_s)),
    )
    from tests.distributed import (
        bound_ranks,
        calls_ranks,
        device_ranks,
        drawn_ranks,
        early_ranks,
        fault_ranks,
        group_ranks,
        in_flight_ranks,
        interrupt_ranks,
        kind_ranks,
        mode_ranks,
        stream_ranks,
        table_ranks,
        way_ranks,
        work_ranks,
    )

    known = CHECKS | table_ranks.CHECKS | device_ranks.CHECKS | fault_ranks.CHECKS
    known |= calls_ranks.CHECKS | early_ranks.CHECKS | kind_ranks.CHECKS | drawn_ranks.CHECKS
    known |= bound_ranks.CHECKS | work_ranks.CHECKS | group_ranks.CHECKS
    known |= mode_ranks.CHECKS | interrupt_ranks.CHECKS | in_flight_ranks.CHECKS
    known |= way_ranks.CHECKS | stream_ranks.CHECKS
    names = check.split("+")
    results = {name: known[name](int(rank), int(ranks)) for name in names}
    result = results if len(names) > 1 else results[check]
    print(json.dumps(result), flush=True)
    if "dead" not in check:
        dist.destroy_process_group()


def splits(rank: int, ranks: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Return rows of and for each rank, unequal; of three, none from the first to the last."""
    sizes = torch.randint(1, 40, (ranks, ranks), generator=torch.Generator().manual_seed(seed))
    if ranks > 2:
        sizes[0, -1] = 0
    return sizes[:, rank].tolist(), sizes[rank].tolist()


def repeated(n: int, row: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    table = random_bits(dtype, (7, *row), seed)
    return table[torch.randint(7, (n,), generator=generator)]


def world() -> dist.ProcessGroup:
    found = dist.group.WORLD
    assert found is not None
    return found


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except bitslab.BitslabError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def lossless(rank: int, ranks: int) -> dict[str, bool]:
    """Every dtype, row shape and split as torch's own collective delivers them."""
    seen = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8):
        for row in ((), (5,), (3, 4), (0,)):
            received, sent = splits(rank, ranks, len(row))
            t = repeated(sum(sent), row, rank, dtype)
            found = torch.empty((sum(received), *row), dtype=dtype)
            bits = t.reshape(len(t), -1).view(torch.uint8) if t.numel() and row else None
            all_to_all_single(found, t, received, sent)
            if bits is None:
                expected = torch.empty_like(found)
                dist.all_to_all_single(expected, t, received, sent)
                seen[f"{dtype} {row}"] = same_bits(found, expected)
            else:  # by bytes: any bits
                expected = torch.empty((sum(received), bits.shape[1]), dtype=torch.uint8)
                dist.all_to_all_single(expected, bits, received, sent)
                seen[f"{dtype} {row}"] = same_bits(
                    found.reshape(len(found), -1).view(torch.uint8), expected
                )
    even = repeated(ranks * 6, (4,), rank, torch.float32)
    found, expected = torch.empty_like(even), torch.empty_like(even)
    seen["no splits"] = all_to_all_single(found, even) is None
    dist.all_to_all_single(expected.view(torch.int32), even.view(torch.int32))
    seen["no splits equal"] = same_bits(found, expected)
    found.zero_()
    all_to_all_single(found, even, [], [])
    seen["empty splits"] = same_bits(found, expected)
    flat = torch.empty(even.numel())
    all_to_all_single(flat, even.view(-1), row_shape=(4,))
    seen["flat"] = same_bits(flat.view(-1, 4), expected)
    none = torch.empty(0, 4)
    all_to_all_single(none, torch.empty(0, 4))
    raw = torch.empty_like(even)
    all_to_all_single(raw.view(torch.int32), even.view(torch.int32), codec="raw")
    seen["raw"] = same_bits(raw, expected)
    return seen


def bounded(rank: int, ranks: int) -> dict[str, bool]:
    """What comes is within the bound of its sender, relative or absolute; NaN bit for bit."""
    seen = {}
    for dtype in (torch.float32, torch.bfloat16):
        for bound in (0.05, ErrorBound(0.01, "absolute")):
            received, sent = splits(rank, ranks)
            generator = torch.Generator().manual_seed(rank)
            t = torch.randn(sum(sent), 16, generator=generator).to(dtype)
            t[0, 0] = float("nan")
            found, exact = (torch.empty(sum(received), 16, dtype=dtype) for _ in range(2))
            all_to_all_single(found, t, received, sent, codec="compressed", error_bound=bound)
            dist.all_to_all_single(exact, t, received, sent)
            finite = exact.isfinite()
            spread: list[Any] = [None] * ranks
            values = t[t.isfinite()].double()
            dist.all_gather_object(spread, float(values.max() - values.min()))
            own = torch.tensor(spread).double().repeat_interleave(torch.tensor(received))
            limit = 0.05 * own if bound == 0.05 else torch.full_like(own, 0.01)
            errors = (found.double() - exact.double()).abs().where(finite, 0)
            key = f"{dtype} {bound}"
            seen[key] = bool((errors <= limit[:, None] * (1 + 1e-6)).all())
            alone = sum(received) == received[rank]
            seen[f"{key} rounded"] = alone or not same_bits(found, exact)
            seen[f"{key} nan"] = same_bits(found[~finite], exact[~finite])
    return seen


def asynchronous(rank: int, ranks: int) -> dict[str, Any]:
    """Several exchanges under way beside an all-reduce, waited for in any order."""
    received, sent = splits(rank, ranks)
    given = [repeated(sum(sent), (8,), 10 * rank + i, torch.int64) for i in range(4)]
    found = [torch.empty(sum(received), 8, dtype=torch.int64) for _ in given]
    work = []
    total = torch.ones(1000)
    for t, out in zip(given, found, strict=True):
        work.append(all_to_all_single(out, t, received, sent, async_op=True))
        dist.all_reduce(total)
    order = reversed(work) if rank % 2 else work
    waited = all(w.wait() for w in order)
    equal = []
    for t, out in zip(given, found, strict=True):
        expected = torch.empty_like(out)
        dist.all_to_all_single(expected, t, received, sent)
        equal.append(torch.equal(out, expected))
    done = all(w.is_completed() and isinstance(w, dist.Work) for w in work)
    return {"waited": waited, "equal": all(equal), "done": done, "total": float(total[0])}


def subgroup(rank: int, ranks: int) -> dict[str, bool]:
    """Ranks 0 and the last one exchange; then each alone."""
    pair = dist.new_group([0, ranks - 1])
    alone = [dist.new_group([r]) for r in range(ranks)][rank]
    t = torch.arange(12).view(4, 3) + 100 * rank
    seen = {}
    if rank in (0, ranks - 1):
        for async_op in (False, True):
            found, expected = torch.empty_like(t), torch.empty_like(t)
            work = all_to_all_single(found, t, group=pair, async_op=async_op)
            if async_op:
                work.wait()
            dist.all_to_all_single(expected, t, group=pair)
            seen[f"pair {async_op}"] = torch.equal(found, expected)
    turned = list(range(ranks))[::-1]
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        other_order = dist.new_group(turned, sort_ranks=False)
        rows = torch.arange(2.0 * ranks).view(ranks, 2) + 100 * rank
        for async_op in (False, True):
            found, expected = torch.empty_like(rows), torch.empty_like(rows)
            work = all_to_all_single(found, rows, group=other_order, async_op=async_op)
            if async_op:
                work.wait()
            dist.all_to_all_single(expected, rows, group=other_order)
            seen[f"other order {async_op}"] = torch.equal(found, expected)
    own = torch.empty_like(t)
    all_to_all_single(own, t, group=alone, error_bound=None)
    seen["alone"] = torch.equal(own, t)
    inexact = torch.randn(4, 3)
    out = torch.empty_like(inexact)
    all_to_all_single(out, inexact, group=alone, error_bound=0.5)
    seen["own rows are copied"] = torch.equal(out, inexact)
    return seen


def short_and_long(rank: int, ranks: int) -> dict[str, bool]:
    """Messages that follow their descriptors, and longer ones in a second stage, by pair of ranks.

    Rows of bytes that do not shrink are messages of their own size.
    """
    seen = {}
    edge = SHORT_BYTES // 64
    for shorter, longer in ((edge, edge + 1), (0, 3 * edge), (edge - 1, edge)):
        # To rank 0 all send short messages, and it sends long ones.
        sizes = [
            [longer if row == 0 or to == 1 else shorter for to in range(ranks)]
            for row in range(ranks)
        ]
        received, sent = [row[rank] for row in sizes], sizes[rank]
        generator = torch.Generator().manual_seed(rank)
        t = torch.randint(256, (sum(sent), 64), dtype=torch.uint8, generator=generator)
        exchange = CompressedAllToAll(codec="compressed")
        for _ in range(2):
            found = exchange(t, received, sent)
        expected = torch.empty_like(found)
        dist.all_to_all_single(expected, t, received, sent)
        stats = exchange.stats()["forward"]
        others = [n for to, n in enumerate(sent) if to != rank] + [
            n for of, n in enumerate(received) if of != rank
        ]
        seen[f"{shorter} {longer}"] = torch.equal(found, expected)
        seen[f"{shorter} {longer} stages"] = (stats["payload_s"] > 0) == (max(others) > edge)
    return seen


def few_rows(rank: int, ranks: int) -> dict[str, bool]:
    """One row in all, none, rows for one rank alone, and rows that are all equal."""
    one = [[int(of == 0 and to == ranks - 1) for to in range(ranks)] for of in range(ranks)]
    to_first = [[5 * int(to == 0) for to in range(ranks)] for _ in range(ranks)]
    cases: dict[str, list[list[int]]] = {
        "one row": one,
        "none": [[0] * ranks for _ in range(ranks)],
        "to the first": to_first,
        "equal": [[9] * ranks for _ in range(ranks)],
    }
    seen = {}
    for name, sizes in cases.items():
        received, sent = [row[rank] for row in sizes], sizes[rank]
        for bound in (None, 0.01, ErrorBound(0.5, "absolute")):
            t = torch.full((sum(sent), 6), 1.5 + rank)
            found = torch.empty(sum(received), 6)
            all_to_all_single(found, t, received, sent, codec="compressed", error_bound=bound)
            expected = torch.empty_like(found)
            dist.all_to_all_single(expected, t, received, sent)
            error = (found - expected).abs().max() if len(found) else 0.0
            limit = 0.5 if isinstance(bound, ErrorBound) else 0.0  # of no range: every bit
            seen[f"{name} {bound}"] = bool(error <= limit)
    return seen


def longer_buffers(rank: int, ranks: int) -> dict[str, bool]:
    """gloo takes what is sent, and leaves the rest of a longer buffer as it was."""
    others = [other for other in range(ranks) if other != rank]
    buffers = {other: torch.full((1000,), 7, dtype=torch.uint8) for other in others}
    pairs = Pairs(world(), buffers, 5)
    pairs.cross({to: torch.full((10 + rank,), rank, dtype=torch.uint8) for to in others})
    return {
        str(other): buffers[other].tolist() == [other] * (10 + other) + [7] * (990 - other)
        for other in others
    }


def gradients(rank: int, ranks: int) -> dict[str, Any]:
    """Losses and gradients of tables beside plain torch's, and beside sums in float64."""
    received, sent = splits(rank, ranks)
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(9, (sum(sent),), generator=generator)
    target = torch.randn(sum(received), 6, generator=generator)
    seen: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    for kind in ("plain", "compressed", "ids", "bounded"):
        table = torch.randn(9, 6, generator=torch.Generator().manual_seed(5)).requires_grad_()
        rows = functional.embedding(ids, table)
        if kind == "plain":
            from torch.distributed.nn.functional import all_to_all_single as of_torch

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = of_torch(torch.empty(sum(received), 6), rows, received, sent)
        else:
            exchange = CompressedAllToAll(error_bound=0.01 if kind == "bounded" else None)
            row_ids = ids if kind == "ids" else None
            found = exchange(rows, received, sent, row_ids=row_ids)
        loss = ((found - target) ** 2).sum()
        loss.backward()
        tables[kind] = (float(loss.detach()), table.grad)
        if kind == "ids":
            seen["stats"] = exchange.stats()
    exact = tables["plain"][1].double()
    seen["loss"] = tables["plain"][0] == tables["compressed"][0] == tables["ids"][0]
    seen["equal"] = same_bits(tables["compressed"][1], tables["plain"][1])
    seen["summed"] = torch.allclose(tables["ids"][1].double(), exact, rtol=1e-5, atol=1e-5)
    seen["bounded"] = bool(0 < (tables["bounded"][1].double() - exact).abs().max() < 2)
    return seen


def disagreement(rank: int, ranks: int) -> dict[str, str]:
    """Ranks 0 and 1 disagree: both raise, nobody hangs, no output is written."""
    seen = {}
    for what in ("rows", "row", "dtype", "version"):
        n = 6 if what == "rows" and rank == 0 else 4
        row = 3 if what == "row" and rank == 0 else 2
        dtype = torch.float64 if what == "dtype" and rank == 0 else torch.float32
        sent = [4] * ranks
        sent[1] = n
        if rank == 1:
            sent = [4] * ranks
        t = torch.ones(sum(sent), row, dtype=dtype)
        out = torch.full((4 * ranks, row), 7.0, dtype=dtype)
        call = partial(all_to_all_single, out, t, [4] * ranks, sent, codec="compressed")
        older: Any = nullcontext()
        if what == "version" and rank == 0:
            older = mock.patch.object(agreement, "Terms", partial(Terms, version=VERSION - 1))
        with older:
            seen[what] = error_of(call)
        seen[f"{what} kept"] = str(bool((out == 7).all()))
        received = torch.empty(ranks, 2)
        after = partial(all_to_all_single, received, torch.ones(ranks, 2), codec="compressed")
        seen[f"{what} next"] = error_of(after)
    received = torch.empty(ranks, 2)
    all_to_all_single(received, torch.full((ranks, 2), float(rank)))
    seen["later"] = str(received[:, 0].tolist() == list(map(float, range(ranks))))
    exchange = CompressedAllToAll()
    for key in ("object", "object next", "object again"):
        sent = [2 if rank == 0 and to == 1 else 1 for to in range(ranks)]
        call = partial(exchange, torch.ones(sum(sent), 2), [1] * ranks, sent)
        seen[key] = error_of(call)
    return seen


def dead(rank: int, ranks: int) -> dict[str, Any] | None:
    """The last rank ends before the sizes: the others raise in time and name the stage."""
    exchange = CompressedAllToAll()
    t = torch.ones(ranks, 4)
    exchange(t)
    if rank == ranks - 1:
        os._exit(1)
    return after_a_death(exchange, t)


def dead_between(rank: int, ranks: int) -> dict[str, Any] | None:
    """The last rank ends between the stages of messages that are too long for one."""
    if rank == ranks - 1:
        of_first = stages.Exchange._first

        def last(self: Any, *args: Any) -> Any:
            of_first(self, *args)
            time.sleep(0.5)  # the other one has read them
            os._exit(1)

        setattr(stages.Exchange, "_first", last)  # noqa: B010 - mypy
    return after_a_death(CompressedAllToAll(), noise(rank, ranks, 2000))


def noise(rank: int, ranks: int, rows: int) -> torch.Tensor:
    """Return rows that do not shrink: 2,000 for a rank are a long message."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ranks * rows, 64, generator=generator)


def after_a_death(exchange: CompressedAllToAll, t: torch.Tensor) -> dict[str, Any]:
    first = error_of(lambda: exchange(t))
    with mock.patch.object(Pairs, "cross") as crossed:
        second = error_of(lambda: exchange(t))
    return {"first": first, "second": second, "at once": not crossed.called}


def dead_in_payload(rank: int, ranks: int) -> dict[str, Any] | None:
    """The last rank ends while its message of tens of megabytes crosses."""
    if rank == ranks - 1:
        of_pairs = Pairs.cross

        def last(self: Pairs, sent: Any) -> None:
            if max(map(len, sent.values())) <= SHORT_BYTES:
                return of_pairs(self, sent)
            time.sleep(0.5)  # the other one has read the sizes
            for to, data in sent.items():
                self._group.send([data], to, self._tag)
            os._exit(1)

        setattr(Pairs, "cross", last)  # noqa: B010 - mypy
    # What is under way when a rank ends may last to the timeout.
    of_seconds = dist.new_group(timeout=timedelta(seconds=3))
    return after_a_death(CompressedAllToAll(of_seconds), noise(rank, ranks, 150_000))


def dead_in_backward(rank: int, ranks: int) -> dict[str, Any] | None:
    """The last rank ends behind the forward exchange."""
    exchange = CompressedAllToAll()
    t = torch.ones(ranks, 4, requires_grad=True)
    found = exchange(t).sum()
    if rank == ranks - 1:
        os._exit(1)
    first = error_of(found.backward)
    return {"first": first} | {"second": error_of(lambda: exchange(t))}


def bad_arguments(rank: int, ranks: int) -> dict[str, str]:
    """Each refused before anything is sent, so that ranks need not agree."""
    t, out = torch.ones(4, 2), torch.empty(4, 2)
    calls: dict[str, Callable[[], Any]] = {
        "bound": lambda: all_to_all_single(out, t, error_bound=0.0),
        "bound of integers": lambda: all_to_all_single(out.int(), t.int(), error_bound=0.1),
        "bound of raw": lambda: all_to_all_single(out, t, codec="raw", error_bound=0.1),
        "codec": lambda: all_to_all_single(out, t, codec="zip"),
        "sum": lambda: all_to_all_single(out, t, [1, 3], [3, 3]),
        "count": lambda: all_to_all_single(out, t, [4], [2, 2]),
        "negative": lambda: all_to_all_single(out, t, [5, -1], [2, 2]),
        "uneven": lambda: all_to_all_single(torch.empty(3, 2), torch.ones(3, 2)),
        "overlap": lambda: all_to_all_single(t, t),
        "dtype": lambda: all_to_all_single(out.double(), t),
        "strange dtype": lambda: all_to_all_single(
            out.to(torch.float8_e5m2), t.to(torch.float8_e5m2)
        ),
        "strides": lambda: all_to_all_single(torch.empty(2, 4).t(), t),
        "rows": lambda: all_to_all_single(torch.empty(4, 3), t),
        "row_shape": lambda: all_to_all_single(out, t, row_shape=(3,)),
        "integer row_shape": lambda: all_to_all_single(
            torch.empty(8),
            torch.ones(8),
            row_shape=2,  # type: ignore[arg-type]
        ),
        "negative row_shape": lambda: all_to_all_single(
            torch.empty(8), torch.ones(8), row_shape=(-2, -1)
        ),
        "float splits": lambda: all_to_all_single(
            out,
            t,
            [2.5, 1.5],  # type: ignore[list-item]
            [2.5, 1.5],  # type: ignore[list-item]
        ),
        "flat splits": lambda: all_to_all_single(
            torch.empty(8), torch.ones(8), [4, 4], [3, 5], row_shape=(2,)
        ),
        "conjugate": lambda: all_to_all_single(
            out.to(torch.complex64).conj(), t.to(torch.complex64)
        ),
        "list": lambda: all_to_all_single(out, t.tolist()),  # type: ignore[arg-type]
        "group": lambda: all_to_all_single(out, t, group="world"),  # type: ignore[arg-type]
        "ids": lambda: CompressedAllToAll()(t, row_ids=torch.ones(3, dtype=torch.int64)),
        "ids differ": lambda: CompressedAllToAll()(
            torch.arange(8.0).view(4, 2), row_ids=torch.zeros(4, dtype=torch.int64)
        ),
        "float ids": lambda: CompressedAllToAll()(t, row_ids=torch.ones(4)),
    }
    return {name: error_of(call) for name, call in calls.items()}


def schedule(rank: int, ranks: int) -> dict[str, Any]:
    """The bound falls with the iterations, and a resumed object goes on."""
    generator = torch.Generator().manual_seed(rank)
    t = torch.randn(50 * ranks, 8, generator=generator)
    exact = torch.empty_like(t)
    dist.all_to_all_single(exact, t)
    exchange = CompressedAllToAll(
        error_bound=ErrorBound(0.01, "absolute", schedule=linear(4, start=9.0))
    )
    errors = []
    for _ in range(5):
        errors.append(float((exchange(t).double() - exact.double()).abs().max()))
    with torch.no_grad():
        exchange(t)
    resumed = CompressedAllToAll(error_bound=exchange.error_bound)
    resumed.load_state_dict(exchange.state_dict() | {"iteration": 2})
    third = float((resumed(t).double() - exact.double()).abs().max())
    return {"errors": errors, "state": exchange.state_dict(), "third": third}


CHECKS: dict[str, Callable[[int, int], Any]] = {
    f.__name__: f
    for f in (
        lossless,
        bounded,
        asynchronous,
        subgroup,
        short_and_long,
        few_rows,
        longer_buffers,
        gradients,
        disagreement,
        dead,
        dead_between,
        dead_in_payload,
        dead_in_backward,
        bad_arguments,
        schedule,
    )
}
