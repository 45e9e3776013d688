"""What ranks check where one fails before it could send its sizes: nobody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bitslab.distributed import (
    CompressedAllToAll,
    Table,
    all_to_all_single,
    caller,
    collective,
    passes,
)
from bitslab.distributed import exchange as stages
from bitslab.distributed.buffers import Buffers
from bitslab.distributed.device import DeviceExchange
from bitslab.distributed.device_repeats import FoundRepeats
from bitslab.distributed.layout import Layout
from bitslab.distributed.selection import PLAIN, TableChoice
from tests.distributed.cpu_coder import coded_where_rows_are
from tests.distributed.ranks import error_of, noise

#: Where rank 1 fails in a call, by name: what has no memory then.
PLACES: dict[str, tuple[Any, str, Exception]] = {
    "ids": (passes, "repeats_of", MemoryError("no memory for ids")),
    "ids_on_device": (passes, "FoundRepeats", MemoryError("no memory for ids")),
    "ids_read": (FoundRepeats, "of", MemoryError("no memory for ids")),
    "output": (Layout, "memory_on", torch.OutOfMemoryError("no memory for rows")),
    "buffers": (Buffers, "take", RuntimeError("DefaultCPUAllocator: can't allocate memory: 9")),
    "descriptors": (stages.Exchange, "_first_messages", MemoryError("no memory for words")),
    "thread": (DeviceExchange, "_joined", torch.OutOfMemoryError("no memory to join")),
    "bug": (stages.Exchange, "__init__", KeyError("a bug")),
    "gradients": (passes, "sums_of", MemoryError("no memory for sums")),
    "gradient_rows": (passes, "rows_of", MemoryError("no memory for rows of gradients")),
}
OF_HOSTS, THERE = ("ids", "descriptors", "bug"), ("ids_on_device", "ids_read", "thread")
#: The same of the function, by whether rows are coded where they are.
FUNCTION_PLACES: dict[tuple[bool, str], tuple[Any, str, Exception]] = {
    (False, "ids"): (collective, "repeats_of", MemoryError("no memory for ids")),
    (True, "ids"): (collective, "FoundRepeats", MemoryError("no memory for ids")),
    (True, "ids_read"): PLACES["ids_read"],
    (False, "output"): (collective, "Rows", MemoryError("no memory for rows")),
    (False, "exchange"): (caller, "Exchange", MemoryError("no memory for words")),
    (True, "exchange"): (caller, "DeviceExchange", MemoryError("no memory for words")),
    (True, "thread"): PLACES["thread"],
}


#: What has no memory in a call that decides, by whether rows are coded where they are.
MEASURING: dict[bool, list[tuple[Any, str]]] = {
    False: [(TableChoice, "choose"), (Layout, "memory_on")],
    True: [(TableChoice, "take_fastest"), (Layout, "memory_on"), (FoundRepeats, "of")],
}


def fails_before(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 1 fails in each place of a call: all raise at once, and from there on."""
    seen: dict[str, Any] = {}
    for there in (False, True):
        for name, (place, attribute, error) in PLACES.items():
            if name in (OF_HOSTS if there else THERE):
                continue
            key = f"{name} {'there' if there else 'here'}"
            for pieces in (1,) if name.startswith("ids") else (1, 3):
                failing = mock.patch.object(place, attribute, side_effect=error)
                own = failing if rank == 1 else nullcontext()
                with coded_where_rows_are() if there else nullcontext():
                    seen[f"{key} {pieces}"] = _of_a_call(own, name, rank, ranks, pieces)
    return seen


def _of_a_call(failing: Any, name: str, rank: int, ranks: int, pieces: int) -> dict[str, Any]:
    exchange = CompressedAllToAll(dist.new_group(), codec="compressed", pieces=pieces)
    t = noise(rank, ranks, 8).requires_grad_()
    ids = torch.arange(len(t)) if pieces == 1 else None
    outputs: list[torch.Tensor] = []

    def call() -> None:
        outputs.append(exchange(t, row_ids=ids))

    call()
    back = outputs.pop().sum().backward
    work = back if name.startswith("gradient") else call
    started = time.monotonic()
    with failing:
        found = {"failed": any_error_of(work), "grad": t.grad is not None}
    found |= {"next": any_error_of(call), "again": any_error_of(call), "outputs": len(outputs)}
    buffers = exchange._caller.buffers
    found["lent"] = buffers.nbytes - buffers.kept_bytes
    return found | {"prompt": time.monotonic() - started < 10}  # the timeout is longer


def any_error_of(work: Callable[[], Any]) -> str:
    try:
        return error_of(work)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def function_fails_before(rank: int, ranks: int) -> dict[str, Any]:
    """The same of the function, at once and asynchronous: it goes on behind it."""
    seen: dict[str, Any] = {}
    t = noise(rank, ranks, 8)
    expected = torch.empty_like(t)
    dist.all_to_all_single(expected, t)
    for there, name in FUNCTION_PLACES:
        place, attribute, error = FUNCTION_PLACES[there, name]
        for async_op in (False, True):
            for codec in ("compressed", "auto"):
                group = dist.new_group()
                found = torch.full_like(t, 7.0)
                exchange = partial(_exchanged, found, t, group, codec, async_op)
                failing = mock.patch.object(place, attribute, side_effect=error)
                with coded_where_rows_are() if there else nullcontext():
                    exchange()
                    found.fill_(7.0)
                    with failing if rank == 1 else nullcontext():
                        said = any_error_of(exchange)
                    kept = bool((found == 7).all())
                    exchange()
                key = f"{there} {name} {async_op} {codec}"
                seen[key] = {"said": said, "kept": kept, "next": torch.equal(found, expected)}
    return seen


def _exchanged(
    found: torch.Tensor, t: torch.Tensor, group: dist.ProcessGroup, codec: str, async_op: bool
) -> None:
    ids = torch.arange(len(t))
    work = all_to_all_single(found, t, group=group, codec=codec, async_op=async_op, row_ids=ids)
    if async_op:
        work.wait()


def fails_to_measure(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 1 has no memory to measure, or for what it measures, in a call that decides."""
    seen: dict[str, Any] = {}
    for there in (False, True):
        for plain in (False, True):
            for place, attribute in MEASURING[there]:
                exchange = CompressedAllToAll(dist.new_group(), decide_every=2)
                t = noise(rank, ranks, 8)
                ids = torch.arange(len(t)) if place is FoundRepeats else None
                error = MemoryError("no memory to measure")
                failing = mock.patch.object(place, attribute, side_effect=error)
                started = time.monotonic()
                with coded_where_rows_are() if there else nullcontext():
                    exchange(t, row_ids=ids)
                    exchange(t, row_ids=ids)
                    if plain:
                        exchange._caller.decision.modes = [PLAIN, PLAIN]
                    with failing if rank == 1 else nullcontext():
                        said = any_error_of(partial(exchange, t, row_ids=ids))
                    after = any_error_of(partial(exchange, t, row_ids=ids))
                key = f"{there} {plain} {attribute}"
                prompt = time.monotonic() - started < 10
                seen[key] = {"said": said, "next": after, "prompt": prompt}
    return seen


def fails_while_plain(rank: int, ranks: int) -> dict[str, str]:
    """All ranks fail before torch's own collective, which has no place to say it."""
    exchange = CompressedAllToAll(dist.new_group(), [Table("a", 4), Table("b", 4)])
    exchange._caller.decision.modes = [PLAIN, PLAIN]
    rows = dict.fromkeys(("a", "b"), torch.ones(ranks, 4))
    sizes = dict.fromkeys(rows, [1] * ranks)
    call = partial(exchange.exchange_tables, rows, sizes, sizes)
    call()
    seen = {}
    for name, place, attribute in (("rows", Layout, "memory_on"), ("buffers", Buffers, "take")):
        with mock.patch.object(place, attribute, side_effect=MemoryError("none left")):
            seen[name] = any_error_of(call)
    return seen


def other_decisions(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 0 decides in other calls, or by another codec, or goes on from a state alone."""
    seen: dict[str, Any] = {}
    for there in (False, True):
        with coded_where_rows_are() if there else nullcontext():
            for what in ("every", "codec", "state", "both"):
                options: dict[str, Any] = {"decide_every": 3}
                if rank == 0 and what in ("every", "both"):
                    options = {"decide_every": 1}
                if rank == 0 and what == "codec":
                    options = {"codec": "compressed"}
                exchange = CompressedAllToAll(dist.new_group(), **options)
                if what == "both" or (rank == 0 and what == "state"):
                    exchange.load_state_dict(_state_of_plain(exchange))
                started = time.monotonic()
                t = noise(rank, ranks, 8)
                key = f"{there} {what}"
                seen[key] = error_of(partial(exchange, t))
                seen[f"{key} next"] = error_of(partial(exchange, t))
                seen[f"{key} prompt"] = time.monotonic() - started < 10
    return seen


def _state_of_plain(exchange: CompressedAllToAll) -> dict[str, Any]:
    state = exchange.state_dict()
    decision = state["decision"] | {"modes": ["plain", "plain"], "calls": [12, 12]}
    return state | {"decision": decision}


def resumed(rank: int, ranks: int) -> dict[str, Any]:
    """All ranks go on from a state: compressed once, then as was decided."""
    seen: dict[str, Any] = {}
    t = noise(rank, ranks, 8)
    for there in (False, True):
        exchange = CompressedAllToAll(dist.new_group(), decide_every=50)
        exchange.load_state_dict(_state_of_plain(exchange))
        with coded_where_rows_are() if there else nullcontext():
            for _ in range(3):
                exchange(t)
        stats = exchange.stats()["forward"]
        seen[f"{there}"] = [stats["calls"], stats["plain_calls"]]
    return seen


CHECKS: dict[str, Callable[[int, int], Any]] = {
    f.__name__: f
    for f in (
        fails_before,
        function_fails_before,
        fails_to_measure,
        fails_while_plain,
        other_decisions,
        resumed,
    )
}
