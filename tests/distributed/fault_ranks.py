"""What ranks check of exchanges that fail on one of them, and of what `Work` says of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bitslab.distributed import CompressedAllToAll, all_to_all_single
from bitslab.distributed import exchange as stages
from bitslab.distributed.buffers import Buffers
from bitslab.distributed.faults import Faults
from bitslab.distributed.layout import Rows
from bitslab.distributed.pairs import Pairs
from bitslab.distributed.stats import Counters
from tests.distributed.cpu_coder import CpuCoder, coded_where_rows_are
from tests.distributed.ranks import error_of, noise
from tests.helpers import same_bits


def encoding_fails(rank: int, ranks: int, *, there: bool = False) -> dict[str, Any]:
    """Rank 1 has no memory to encode its last piece: all raise, and no row of another call comes.

    Of pieces the last one fails, behind others that are under way.
    """
    seen: dict[str, Any] = {}
    rows = [noise(rank + 10 * call, ranks, 8) for call in range(3)]
    for pieces in (1, 2):
        exchange = CompressedAllToAll(codec="compressed", pieces=pieces)
        exchange(rows[0])
        outputs: list[torch.Tensor] = []
        append = partial(_append, outputs, exchange)
        failing = (
            _out_of_memory((pieces - 1) * (1 if there else ranks - 1))
            if rank == 1
            else nullcontext()
        )
        with failing:
            seen[f"failed in {pieces}"] = _any_error_of(partial(append, rows[1]))
        seen[f"next in {pieces}"] = _any_error_of(partial(append, rows[2]))
        seen[f"rows in {pieces}"] = len(outputs)
    found, expected = torch.empty_like(rows[1]), torch.empty_like(rows[1])
    function = partial(all_to_all_single, found, rows[1], codec="compressed")
    with _out_of_memory(0) if rank == 1 else nullcontext():
        seen["failed in a function"] = _any_error_of(function)
    all_to_all_single(found, rows[2], codec="compressed")
    dist.all_to_all_single(expected, rows[2])
    seen["function goes on"] = same_bits(found, expected)
    return seen


def encoding_there_fails(rank: int, ranks: int) -> dict[str, Any]:
    """The same of rows that are coded where they are, as on a GPU: all ranks' by one call."""
    with coded_where_rows_are():
        return encoding_fails(rank, ranks, there=True)


def _append(outputs: list[torch.Tensor], exchange: CompressedAllToAll, t: torch.Tensor) -> None:
    outputs.append(exchange(t))


def _out_of_memory(calls: int) -> Any:
    """Let parts be encoded so many times, then none."""
    left = iter(range(calls))

    def limited(work: Callable[..., Any]) -> Callable[..., Any]:
        def encode(*args: Any, **options: Any) -> Any:
            if next(left, None) is None:
                raise MemoryError("no memory to encode")
            return work(*args, **options)

        return encode

    patched = ExitStack()
    for place, name in ((stages, "encode_part"), (CpuCoder, "encode_vectors")):
        patched.enter_context(mock.patch.object(place, name, limited(getattr(place, name))))
    return patched


def _any_error_of(work: Callable[[], Any]) -> str:
    try:
        return error_of(work)
    except (MemoryError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"


def interrupted(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 1 is interrupted between two waits: it sends nothing more, others raise in time."""
    exchange = CompressedAllToAll(dist.new_group(timeout=timedelta(seconds=3)))
    t = torch.ones(ranks, 4)
    exchange(t)

    def cross(self: Pairs, sent: Any) -> None:
        raise KeyboardInterrupt

    with mock.patch.object(Pairs, "cross", cross) if rank == 1 else nullcontext():
        first = _any_error_of(lambda: exchange(t))
    return {"first": first, "second": _any_error_of(lambda: exchange(t))}


def works(rank: int, ranks: int) -> dict[str, Any]:
    """What torch's `Work` says of an exchange that goes on, ended well or failed."""
    t = torch.arange(4.0 * ranks).view(-1, 2) + 100 * rank
    expected, found = torch.empty_like(t), torch.zeros_like(t)
    dist.all_to_all_single(expected, t)
    seen: dict[str, Any] = {}
    start = partial(all_to_all_single, found, async_op=True, codec="compressed")
    start(t).wait()
    if rank:
        dist.barrier()
    found.zero_()
    work = start(t)
    if not rank:  # others have not begun
        try:
            work.wait(timedelta(milliseconds=20))
        except TimeoutError as late:
            seen["in time"] = str(late) == "timeout: the exchange takes longer than 0.02 s"
        seen["goes on"] = not (work.is_completed() or work.is_success() or work.exception())
        dist.barrier()
    work.synchronize()
    seen["synchronize waits"] = torch.equal(found, expected)
    seen["limit"] = "in time" in seen or rank > 0
    seen["ended well"] = work.is_success() and work.exception() is None
    seen["no limit"] = start(t).wait(timedelta(0))
    # One more row for all than they expect.
    wrong = start(torch.ones((2 + (rank == 0)) * ranks, 2))
    error = error_of(wrong.synchronize)
    said = wrong.exception()
    seen["failed"] = wrong.is_completed() and not wrong.is_success()
    seen["error"] = error != "no error" and f"{type(said).__name__}: {said}" == error
    return seen


def other_pieces(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 0 has fewer pieces than others, or more: all know at once, where rows are or not."""
    seen: dict[str, Any] = {}
    for there in (False, True):
        for pieces in (1, 5):
            exchange = CompressedAllToAll(
                dist.new_group(), codec="compressed", pieces=3 if rank else pieces
            )
            with coded_where_rows_are() if there else nullcontext():
                said = error_of(partial(exchange, noise(rank, ranks, 8)))
                seen[f"{there} {pieces} next"] = error_of(partial(exchange, noise(rank, ranks, 8)))
            seen[f"{there} {pieces}"] = said
    return seen


def other_numbers(rank: int, ranks: int) -> dict[str, str]:
    """Rank 0 has other numbers of a decision beside short and long messages."""
    seen = {}
    for rows in (8, 2000):
        t = noise(rank, ranks, rows)
        sizes = [rows] * ranks
        table = Rows(t, torch.full_like(t, 7.0), sizes, sizes)
        exchange = stages.Exchange(
            dist.new_group(),
            [table],
            Counters(),
            Faults(lasting=True),
            buffers=Buffers(),
            numbers=[] if rank else [1, 2, 3, 4, 5, 6],
        )
        seen[f"{rows}"] = error_of(exchange.run)
        seen[f"{rows} kept"] = str(bool((table.received == 7).all()))
    return seen


def decoding_fails(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 1 has no memory to decode: the next call raises on all ranks."""
    seen: dict[str, Any] = {}
    for there in (False, True):
        exchange = CompressedAllToAll(dist.new_group(), codec="compressed")
        t = noise(rank, ranks, 8)
        t[:] = t[:1]
        place, name = (CpuCoder, "decode_vectors") if there else (stages, "decode_part")
        failing = mock.patch.object(place, name, side_effect=MemoryError("no memory to decode"))
        with coded_where_rows_are() if there else nullcontext():
            exchange(t)
            with failing if rank == 1 else nullcontext():
                seen[f"{there}"] = _any_error_of(partial(exchange, t))
            seen[f"{there} next"] = _any_error_of(partial(exchange, t))
    return seen


def deciding_fails(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 1 has no memory to decode in a call that decides: nobody waits, and all decide alike."""
    seen: dict[str, Any] = {}
    for there in (False, True):
        exchange = CompressedAllToAll(dist.new_group(), decide_every=3)
        t = noise(rank, ranks, 8)
        t[:] = t[:1]
        place, name = (CpuCoder, "decode_vectors") if there else (stages, "decode_part")
        failing = mock.patch.object(place, name, side_effect=MemoryError("no memory to decode"))
        with coded_where_rows_are() if there else nullcontext():
            for _ in range(2):
                exchange(t)
            for call in range(3, 6):  # the fourth decides
                with failing if rank == 1 and call == 4 else nullcontext():
                    seen[f"{there} {call}"] = _any_error_of(partial(exchange, t))
        seen[f"{there} mode"] = exchange.stats()["modes"]["forward"]
    return seen


CHECKS: dict[str, Callable[[int, int], Any]] = {
    f.__name__: f
    for f in (
        encoding_fails,
        encoding_there_fails,
        interrupted,
        works,
        other_pieces,
        other_numbers,
        decoding_fails,
        deciding_fails,
    )
}
