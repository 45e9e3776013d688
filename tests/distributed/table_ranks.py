"""What ranks check of `CompressedAllToAll`: tables, adaptive bounds, gradients, decisions."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from bitslab.distributed import (
    AdaptiveBound,
    CompressedAllToAll,
    ErrorBound,
    Table,
    all_to_all_single,
    linear,
)
from bitslab.distributed import exchange as stages
from bitslab.distributed.caller import Caller
from bitslab.distributed.groups import timeout_of
from bitslab.distributed.helpers import helper_of
from bitslab.engine.advisor import network_model
from tests.distributed.clock import Clock
from tests.distributed.ranks import error_of, splits, world

#: Backward passes whose gradients are rounded.
CALLS = 20
TABLES = [Table("users", 8), Table("items", 3), Table("days", 2, torch.int64)]


def rows_of(table: Table, n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(11, table.row_elements, generator=generator) * 100
    return values.to(table.dtype)[torch.randint(11, (n,), generator=generator)]


def by_torch(t: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
    found = torch.empty(sum(received), *t.shape[1:], dtype=t.dtype)
    dist.all_to_all_single(found, t.detach(), received, sent)
    return found


def tables(rank: int, ranks: int) -> dict[str, Any]:
    """Rows of three tables at once, one of them sent by rank 0 alone, in one and three pieces."""
    seen: dict[str, Any] = {}
    for pieces in (1, 3):
        exchange = CompressedAllToAll(tables=TABLES, pieces=pieces, codec="compressed")
        inputs, receive, send, expected = {}, {}, {}, {}
        for i, table in enumerate(TABLES):
            received, sent = splits(rank, ranks, i)
            if table.name == "items":
                sent = sent if rank == 0 else [0] * ranks
                received = [received[0], *[0] * (ranks - 1)]
            t = rows_of(table, sum(sent), 10 * rank + i)
            expected[table.name] = by_torch(t, received, sent)
            receive[table.name] = received
            if sum(sent):
                inputs[table.name], send[table.name] = t, sent
        found = exchange.exchange_tables(inputs, receive, send)
        seen[f"equal in {pieces}"] = list(found) == [t.name for t in TABLES] and all(
            torch.equal(found[name], t) for name, t in expected.items()
        )
        stats = exchange.stats()
        by_table = sum(t["raw_bytes"] for t in stats["tables"].values())
        seen[f"raw in {pieces}"] = by_table == stats["forward"]["raw_bytes"] > 0
        moved = sum(t["moved_bytes"] for t in stats["tables"].values())
        seen[f"moved in {pieces}"] = 0 < moved < stats["forward"]["moved_bytes"]
        seen[f"calls in {pieces}"] = stats["forward"]["calls"] == 1
    plain = CompressedAllToAll(tables=TABLES, codec="raw")
    real = distributed_c10d.all_to_all_single
    with mock.patch.object(distributed_c10d, "all_to_all_single", wraps=real) as of_torch:
        found = plain.exchange_tables(inputs, receive, send)
    seen["one for all raw"] = of_torch.call_count == 1
    seen["equal raw"] = all(torch.equal(found[name], t) for name, t in expected.items())
    seen["all moved raw"] = all(
        t["moved_bytes"] == t["raw_bytes"] for t in plain.stats()["tables"].values()
    )
    send["users"] = [n + (to == 1 and rank == 0) for to, n in enumerate(send["users"])]
    inputs["users"] = rows_of(TABLES[0], sum(send["users"]), 1)
    seen["error"] = error_of(lambda: exchange.exchange_tables(inputs, receive, send))
    return seen


def gradients_of_tables(rank: int, ranks: int) -> dict[str, Any]:
    """Gradients of two tables, with repeated ids, beside sums in float64; a third one has none."""
    exchange = CompressedAllToAll(tables=TABLES)
    weights, ids, inputs, receive, send, exact = {}, {}, {}, {}, {}, {}
    loss = torch.zeros(())
    for i, table in enumerate(TABLES[:2]):
        receive[table.name], send[table.name] = splits(rank, ranks, i)
        generator = torch.Generator().manual_seed(rank + i)
        weights[table.name] = torch.randn(5, table.row_elements, generator=generator)
        weights[table.name].requires_grad_()
        ids[table.name] = torch.randint(5, (sum(send[table.name]),), generator=generator)
        inputs[table.name] = weights[table.name][ids[table.name]]
    receive["days"], send["days"] = splits(rank, ranks, 9)
    days = rows_of(TABLES[2], sum(send["days"]), rank)
    found = exchange.exchange_tables(inputs | {"days": days}, receive, send, row_ids=ids)
    integers = found.pop("days")
    for name, t in found.items():
        factors = torch.arange(t.numel()).view(t.shape) + 1.0 + rank
        loss = loss + (t * factors).sum()
        back = by_torch(factors, send[name], receive[name])
        exact[name] = torch.zeros(weights[name].shape, dtype=torch.float64)
        exact[name].index_add_(0, ids[name], back.double())
    loss.backward()
    return {
        name: bool(torch.allclose(weights[name].grad.double(), exact[name], rtol=1e-6))  # type: ignore[union-attr]
        for name in exact
    } | {
        "iteration": exchange.state_dict()["iteration"] == 1,
        "days": torch.equal(integers, by_torch(days, receive["days"], send["days"])),
        "no gradient": not integers.requires_grad,
    }


def adaptive(rank: int, ranks: int) -> dict[str, Any]:
    """Classes by the first rows, bounds that fall, and a resumed run with the same bounds."""
    planned = [Table(name, 16) for name in ("merging", "few")]
    bound = AdaptiveBound(0.03, schedule=linear(3, start=2.0))
    exchange = CompressedAllToAll(tables=planned, error_bound=bound, codec="compressed")
    generator = torch.Generator().manual_seed(rank)
    noise = torch.rand(64 * ranks, 16, generator=generator) * 1e-3
    corners = torch.randint(2, (64 * ranks, 1), generator=generator).float()
    few = torch.randn(4, 16, generator=generator)
    inputs = {
        "merging": corners + noise,
        "few": few[torch.randint(4, (64 * ranks,), generator=generator)],
    }
    sizes = {name: [64] * ranks for name in inputs}
    exact = {name: by_torch(t, [64] * ranks, [64] * ranks) for name, t in inputs.items()}
    spans: list[dict[str, float]] = [{} for _ in range(ranks)]
    dist.all_gather_object(spans, {name: float(t.max() - t.min()) for name, t in inputs.items()})

    def errors(of: CompressedAllToAll) -> dict[str, float]:
        found = of.exchange_tables(inputs, sizes, sizes)
        return {
            name: max(
                float((a.double() - b.double()).abs().max()) / spans[source][name]
                for source, (a, b) in enumerate(
                    zip(found[name].split(64), exact[name].split(64), strict=True)
                )
            )
            for name in found
        }

    first = errors(exchange)
    state = exchange.state_dict()
    second = errors(exchange)
    resumed = CompressedAllToAll(tables=planned, error_bound=bound, codec="compressed")
    resumed.load_state_dict(state)
    again = errors(resumed)
    stats = resumed.stats()["tables"]
    return {
        "first": first,
        "second": second,
        "again": again,
        "classes": {name: t["class"] for name, t in stats.items()},
        "indices": {name: t["homogenisation_index"] for name, t in stats.items()},
        "bounds": {name: t["error_bound"] for name, t in stats.items()},
    }


def rounded_gradients(rank: int, ranks: int) -> dict[str, Any]:
    """Gradients within two bounds, unbiased, the same bits again, and what was lost kept by id."""
    rows, bound = 200, 0.05
    generator = torch.Generator().manual_seed(rank)
    gradient = torch.randn(rows * ranks, 4, generator=generator)
    exact = by_torch(gradient, [rows] * ranks, [rows] * ranks)
    own = slice(rank * rows, (rank + 1) * rows)

    def back(exchange: CompressedAllToAll, ids: torch.Tensor | None = None) -> torch.Tensor:
        t = torch.zeros(rows * ranks, 4, requires_grad=True)
        exchange(t, received_ids=ids).backward(gradient)
        assert t.grad is not None
        return t.grad

    def make(**options: Any) -> CompressedAllToAll:
        return CompressedAllToAll(
            backward=ErrorBound(bound, "absolute"), seed=7, codec="compressed", **options
        )

    exchange = make()
    found = [back(exchange) for _ in range(CALLS)]
    errors = torch.stack(found).double() - exact.double()
    mean = errors.mean(0)
    others = torch.ones(len(exact), dtype=torch.bool)
    others[own] = False
    resumed = make()
    resumed.load_state_dict(exchange.state_dict() | {"backward_calls": 3})
    kept = make(error_feedback=4 * rows)
    ids = torch.arange(rows * ranks)
    with_feedback = [back(kept, ids) for _ in range(CALLS)]
    drift = (torch.stack(with_feedback).double() - exact.double()).sum(0)
    restored = make(error_feedback=4 * rows)
    restored.load_state_dict(kept.state_dict())
    return {
        "within two bounds": bool(errors.abs().max() <= 2 * bound),
        "rounded": bool((errors[:, others] != 0).any()),
        "own rows": bool((errors[:, own] == 0).all()),
        "unbiased": bool(mean.abs().max() < 5 * bound / CALLS**0.5),
        "mean of all": float(mean[others].mean().abs()) < 0.005,
        "differs by call": not torch.equal(found[0], found[1]),
        "same bits again": torch.equal(back(resumed), found[3]),
        # What was lost comes back: the sum of all is off by one rounding alone.
        "feedback": bool(drift.abs().max() <= 2.1 * bound),
        "without it": float(errors.sum(0).abs().max()) > 2.1 * bound,
        "restored": torch.equal(back(restored, ids), back(kept, ids)),
        # Of slots, of which there are at most twice as many as rows that were met.
        "bytes": 1 <= kept.stats()["feedback_bytes"] / (rows * ranks * (4 * 4 + 16)) <= 2,
        "no ids": error_of(lambda: back(kept)),
    }


def function_by_ids(rank: int, ranks: int) -> dict[str, Any]:
    """Rows of one id cross once, and rows that share none are as many."""
    ids = torch.arange(60 * ranks) % 3
    table = torch.randn(3, 32, generator=torch.Generator().manual_seed(rank))
    t = table[ids]
    found = torch.empty_like(t)
    all_to_all_single(found, t, codec="compressed", row_ids=ids)
    distinct = torch.randn(ranks, 4)
    other = torch.empty_like(distinct)
    all_to_all_single(other, distinct, row_ids=torch.arange(ranks))
    return {
        "equal": torch.equal(found, by_torch(t, [60] * ranks, [60] * ranks)),
        "distinct": torch.equal(other, by_torch(distinct, [1] * ranks, [1] * ranks)),
    }


def decisions(rank: int, ranks: int) -> dict[str, Any]:
    """What shrinks goes compressed over a slow link, what does not plain; all ranks agree."""
    clock, of_torch = Clock(), dist.all_to_all_single
    slowed = clock.slowed(of_torch, lambda _, given, *__: 0.01 + given.nbytes / 40e6)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(20, 64, generator=generator)[torch.arange(1000 * ranks) % 20]
    # Too long to follow descriptors at once: compressed, these take a second round.
    noise = torch.randint(-(1 << 60), 1 << 60, (5000 * ranks, 8), generator=generator)
    seen: dict[str, Any] = {}
    exchange = CompressedAllToAll(decide_every=2)
    # Figures of this link are kept where no other test finds them.
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BITSLAB_CACHE"] = folder
        with clock.running(), mock.patch.object(distributed_c10d, "all_to_all_single", slowed):
            for name, t in (("rows", rows), ("noise", noise), ("again", rows)):
                for _ in range(5):
                    found = exchange(t)
                stats = exchange.stats()
                seen[name] = stats["modes"]["forward"], stats["tables"][""]["codec"]
                expected = torch.empty_like(t)
                of_torch(expected, t)
                seen[f"{name} equal"] = torch.equal(found, expected)
                modes: list[Any] = [None] * ranks
                dist.all_gather_object(modes, stats["modes"])
                seen[f"{name} agreed"] = all(mode == modes[0] for mode in modes)
            seen["plain calls"] = exchange.stats()["forward"]["plain_calls"]
    return seen


def network(rank: int, ranks: int) -> dict[str, Any]:
    """The model of a group is the same on all ranks, and the second one is read from the cache."""
    found, again = (network_model(world(), torch.device("cpu")) for _ in range(2))
    models: list[Any] = [None] * ranks
    dist.all_gather_object(models, found)
    alone = [dist.new_group([r]) for r in range(ranks)][rank]
    assert found is not None
    return {
        "same": all(model == found for model in models),
        "kept": again == found,
        "rises": found.seconds(1 << 20) > found.fixed_s > 0,
        "alone": network_model(alone, torch.device("cpu")) is None,
    }


def timeout(rank: int, ranks: int) -> dict[str, bool]:
    """Asynchronous exchanges wait as long as those of their group."""
    of_seconds = dist.new_group(timeout=timedelta(seconds=17))
    helper = helper_of(of_seconds)
    return {
        "own": timeout_of(helper.group, torch.device("cpu")) == timedelta(seconds=17),
        "once": helper_of(of_seconds) is helper,
        "not its group": helper.group is not of_seconds,
    }


def threads(rank: int, ranks: int) -> dict[str, str]:
    """A second thread in a call of the object is refused."""
    exchange = CompressedAllToAll()
    t = torch.ones(ranks, 2)
    exchange(t)
    inside, leave = threading.Event(), threading.Event()

    def held(*args: Any, **options: Any) -> None:
        inside.set()
        leave.wait(20)

    with mock.patch.object(Caller, "exchange", held):
        first = threading.Thread(target=exchange, args=(t,))
        first.start()
        inside.wait(20)
        refused = error_of(lambda: exchange(t))
        leave.set()
        first.join()
    return {"refused": refused, "later": error_of(lambda: exchange(t))}


def broken_encoding(rank: int, ranks: int) -> dict[str, str]:
    """All ranks fail while they encode: later calls raise at once, on a group of its own."""
    exchange = CompressedAllToAll(dist.new_group())
    t = torch.ones(ranks, 2)
    exchange(t)
    seen = {}
    with mock.patch.object(stages, "encode_part", side_effect=MemoryError("none left")):
        try:
            exchange(t)
        except MemoryError as error:
            seen["first"] = str(error)
    seen["later"] = error_of(lambda: exchange(t))
    return seen


def wrong_tables(rank: int, ranks: int) -> dict[str, str]:
    """Each refused before anything is sent."""
    planned = CompressedAllToAll(tables=TABLES)
    placed = CompressedAllToAll(tables=TABLES, device="cpu")
    single = CompressedAllToAll(pieces=2)
    sizes = {"users": [1] * ranks}
    t = torch.ones(ranks, 8)
    calls: dict[str, Callable[[], Any]] = {
        "planned": lambda: planned(t),
        "unplanned": lambda: single.exchange_tables({}, {}, {}),
        "unknown": lambda: planned.exchange_tables({"cities": t}, sizes, sizes),
        "no mapping": lambda: planned.exchange_tables([t], sizes, sizes),  # type: ignore[arg-type]
        "width": lambda: planned.exchange_tables({"users": t[:, :3]}, sizes, sizes),
        "dtype": lambda: planned.exchange_tables({"users": t.double()}, sizes, sizes),
        "device": lambda: placed.exchange_tables({"users": t.to("meta")}, sizes, sizes),
        "no backend": lambda: planned.exchange_tables({"users": t.to("meta")}, sizes, sizes),
        "no sizes": lambda: planned.exchange_tables({"users": t}, sizes, {}),
        "ids with pieces": lambda: single(t, row_ids=torch.zeros(ranks, dtype=torch.int64)),
        "feedback": lambda: CompressedAllToAll(backward=0.1, error_feedback=5)(
            t, received_ids=torch.zeros(1, dtype=torch.int64)
        ),
    }
    return {name: error_of(call) for name, call in calls.items()}


CHECKS: dict[str, Callable[[int, int], Any]] = {
    f.__name__: f
    for f in (
        tables,
        gradients_of_tables,
        adaptive,
        rounded_gradients,
        function_by_ids,
        decisions,
        network,
        timeout,
        threads,
        broken_encoding,
        wrong_tables,
    )
}
