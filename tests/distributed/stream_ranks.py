"""What ranks check of memory that another stream uses than the one on which it was allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast
from unittest import mock

import torch

from bitslab.distributed import CompressedAllToAll, Table, passes
from bitslab.distributed.buffers import Buffers
from bitslab.distributed.caller import Caller
from bitslab.distributed.device import DeviceExchange
from bitslab.distributed.device_repeats import DeferredRepeats, FoundRepeats, RowsById
from bitslab.distributed.faults import Faults
from bitslab.distributed.helpers import helper_of
from bitslab.distributed.layout import Rows
from bitslab.distributed.parts import Call, spread_to_copies
from bitslab.distributed.passes import Pass
from bitslab.distributed.plain import PlainExchange
from bitslab.distributed.stats import Counters
from bitslab.engine.transfer import StreamLane
from tests.distributed.cpu_coder import CpuCoder, coded_where_rows_are
from tests.distributed.device_ranks import crossed
from tests.distributed.ranks import world

#: Rows for each rank, of so many ids.
ROWS, IDS = 50, 11


def _memory(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}


class Lane:
    """Records what is kept for the stream on which messages cross."""

    stream = None

    def __init__(self) -> None:
        self.kept: set[int] = set()

    def on(self) -> AbstractContextManager[None]:
        return nullcontext()

    def keep(self, *tensors: torch.Tensor) -> None:
        self.kept |= _memory(tensors)

    def record(self) -> None:
        return None


def kept_on_the_lane(rank: int, ranks: int) -> dict[str, bool]:
    """What the helper's stream reads to encode, and writes, is kept for it before it does."""
    ids = torch.arange(ROWS * ranks) % IDS
    t = torch.randn(IDS, 8, generator=torch.Generator().manual_seed(rank))[ids]
    sizes = [ROWS] * ranks
    found = FoundRepeats([RowsById("t", t, sizes, ids)])
    out, bound = torch.zeros_like(t), torch.full((), 0.01, dtype=torch.float64)
    table = Rows(t, out, sizes, sizes, bound, name="t", deferred=DeferredRepeats(found, 0))
    lane, seen = Lane(), dict[str, bool]()
    encode, choose = CpuCoder.encode_vectors, torch.Tensor.__getitem__

    def encoded(
        coder: CpuCoder, values: Any, options: Any, to: torch.Tensor, *, numbers: torch.Tensor
    ) -> None:
        seen["bound"] = _memory(each.bound for each in options) <= lane.kept
        encode(coder, values, options, to, numbers=numbers)

    def chosen(rows: torch.Tensor, at: Any) -> torch.Tensor:
        if isinstance(at, torch.Tensor) and rows.dim() == 2:
            seen["rows and first"] = _memory([rows, at]) <= lane.kept
        return choose(rows, at)

    exchange = DeviceExchange(
        helper_of(world()),
        [table],
        Counters(),
        Faults(lasting=True),
        buffers=Buffers(),
        coder=CpuCoder(),
        lane=cast(StreamLane, lane),
        async_op=True,
    )
    with (
        mock.patch.object(CpuCoder, "encode_vectors", encoded),
        mock.patch.object(torch.Tensor, "__getitem__", chosen),
    ):
        exchange.run()
    seen["received"] = _memory([out]) <= lane.kept
    errors = (out - crossed(t, sizes, sizes)).abs().max()
    seen["within"] = float(errors) <= 0.01
    return seen


def kept_where_it_is_waited_for(rank: int, ranks: int) -> dict[str, bool]:
    """A pass names all memory that it reads and returns behind the exchange."""
    named: list[set[int]] = []
    seen: dict[str, bool] = {}
    made, spread = Pass.__init__, spread_to_copies

    def begun(self: Pass, under_way: Any, then: Any, used: Sequence[torch.Tensor] = ()) -> None:
        named.append(_memory(used))

        def checked() -> Any:
            found = then()
            if len(named) % 2:
                seen[f"{key} forward"] = _memory(found) <= named[-1]
            return found

        made(self, under_way, checked, used)

    def read(call: Call, table: int, found: torch.Tensor, back: Any) -> torch.Tensor:
        first = (each.first_on_device for each in call.repeats[table] or () if each is not None)
        used = [found, *(t for t in first if t is not None)]
        seen[f"{key} back {table}"] = _memory(used) <= named[-1]
        if table == 0:  # of rows by id
            seen[f"{key} summed"] = (len(used) > 1) == (key == "compressed True")
        return spread(call, table, found, back)

    with (
        coded_where_rows_are(own_rows_cross=ranks == 1),
        mock.patch.object(Pass, "__init__", begun),
        mock.patch.object(passes, "spread_to_copies", read),
    ):
        for codec in ("compressed", "raw"):
            for with_ids in (False, True):
                key = f"{codec} {with_ids}"
                summed, wanted = _trained(rank, ranks, torch.device("cpu"), codec, with_ids)
                seen[f"{key} equal"] = torch.allclose(summed, wanted)
    return seen


def what_is_sent_is_kept_where_it_is_waited_for(rank: int, ranks: int) -> dict[str, bool]:
    """Of one table torch's own collective reads rows, and gradients, where they lie."""
    sent: list[set[int]] = []
    seen: dict[str, bool] = {}
    made, run = Pass.__init__, PlainExchange.run

    def began(self: PlainExchange, *, async_op: bool = False) -> Any:
        sent.append(_memory(each.sent for each in self._tables))
        return run(self, async_op=async_op)

    def begun(self: Pass, under_way: Any, then: Any, used: Sequence[torch.Tensor] = ()) -> None:
        seen[f"{len(seen)} named"] = bool(sent[-1]) and sent[-1] <= _memory(used)
        made(self, under_way, then, used)

    sizes = {"users": [ROWS] * ranks}
    t = torch.randn(ROWS * ranks, 8, requires_grad=True)
    exchange = CompressedAllToAll(tables=[Table("users", 8)], codec="raw")
    with (
        coded_where_rows_are(own_rows_cross=ranks == 1),
        mock.patch.object(PlainExchange, "run", began),
        mock.patch.object(Pass, "__init__", begun),
    ):
        exchange.begin_tables({"users": t}, sizes, sizes).wait()["users"].sum().backward()
    return seen | {"forward and back": len(seen) == 2}


def _trained(
    rank: int,
    ranks: int,
    device: torch.device,
    codec: str,
    with_ids: bool,
    begins_on: Callable[[], AbstractContextManager[Any]] = nullcontext,
    waits_on: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of a table's rows, and what they are by torch's own collective."""
    planned = [Table("users", 8), Table("items", 4)]
    exchange = CompressedAllToAll(tables=planned, codec=codec)
    sizes = {table.name: [ROWS] * ranks for table in planned}
    with begins_on():
        ids = torch.arange(ROWS * ranks, device=device) % IDS
        weights = torch.randn(IDS, 8, generator=torch.Generator().manual_seed(rank)).to(device)
        weights.requires_grad_()
        items = torch.ones(ROWS * ranks, 4, device=device, requires_grad=True)
        factors = (torch.arange(ROWS * ranks, device=device) % 7 + 1.0 + rank)[:, None]
        wanted = torch.zeros_like(weights)
        back = crossed(factors.expand(-1, 8).contiguous(), sizes["users"], sizes["users"])
        wanted.index_add_(0, ids, back)
    again: list[torch.Tensor] = []

    def take_free(gradient: torch.Tensor) -> None:
        # Memory that is free for who waited, of all sizes that an exchange has, before the other
        # stream has come to the gradients. Behind backward() it would wait for that one.
        with waits_on():
            again.extend(torch.full((n,), float("nan"), device=device) for n in range(64, 4096, 64))

    if device.type == "cuda":
        torch.cuda.synchronize()
    with begins_on():
        rows = weights[ids]
        rows.register_hook(take_free)
        begun = exchange.begin_tables(
            {"users": rows, "items": items},
            sizes,
            sizes,
            row_ids={"users": ids} if with_ids else None,
        )
    with waits_on():
        found = begun.wait()
        loss = (found["users"] * factors).sum() + found["items"].sum()
        if device.type == "cuda":
            with begins_on():
                torch.cuda._sleep(400_000_000)  # gradients come while this stream is behind
        loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert again and weights.grad is not None
    return weights.grad, wanted


def nccl_streams(rank: int, ranks: int) -> dict[str, bool]:
    """Begun on one stream and waited for on another, which gets no memory that is still read."""
    Caller.own_rows_cross = ranks == 1
    device = torch.device("cuda", rank)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    begins_on, waits_on = (partial(torch.cuda.stream, each) for each in streams)
    seen = {}
    for codec in ("compressed", "raw"):
        for with_ids in (False, True):
            for turn in range(2):  # kernels are compiled in the first one
                given = rank, ranks, device, codec, with_ids
                found, wanted = _trained(*given, begins_on, waits_on)
                seen[f"{codec} {with_ids} {turn}"] = torch.allclose(found, wanted)
    return seen | _waited_for_twice(rank, ranks, device)


def _waited_for_twice(rank: int, ranks: int, device: torch.device) -> dict[str, bool]:
    """Another stream that waits again is behind the rows, too."""
    seen, first, second = {}, torch.cuda.Stream(), torch.cuda.Stream()
    sizes = {"users": [ROWS] * ranks}
    t = torch.randn(ROWS * ranks, 8, device=device)
    exact = crossed(t, sizes["users"], sizes["users"])
    for codec in ("compressed", "raw"):
        exchange = CompressedAllToAll(tables=[Table("users", 8)], codec=codec)
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            torch.cuda._sleep(400_000_000)
            begun = exchange.begin_tables({"users": t}, sizes, sizes)
            begun.wait()
        with torch.cuda.stream(second):
            copy = begun.wait()["users"].clone()
        second.synchronize()
        seen[f"{codec} again"] = torch.equal(copy, exact)
    return seen


CHECKS: dict[str, Callable[[int, int], Any]] = {
    f.__name__: f
    for f in (
        kept_on_the_lane,
        kept_where_it_is_waited_for,
        what_is_sent_is_kept_where_it_is_waited_for,
        nccl_streams,
    )
}
