"""What ranks check of exchanges that are coded where the rows are: on a GPU, or as if on one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import bitslab
from bitslab.distributed import CompressedAllToAll, ErrorBound, Table, all_to_all_single
from bitslab.distributed.buffers import Buffers
from bitslab.distributed.caller import Caller
from bitslab.distributed.device import DeviceExchange
from bitslab.distributed.faults import Faults
from bitslab.distributed.helpers import helper_of
from bitslab.distributed.layout import Rows
from bitslab.distributed.rounding import round_stochastically
from bitslab.distributed.stats import Counters
from tests.distributed import ranks as of_hosts
from tests.distributed import table_ranks
from tests.distributed.clock import Clock
from tests.distributed.cpu_coder import CpuCoder, coded_where_rows_are
from tests.distributed.ranks import error_of, splits, world
from tests.distributed.table_ranks import TABLES, by_torch, rows_of
from tests.helpers import same_bits

CPU = torch.device("cpu")


def as_on_a_gpu(rank: int, ranks: int) -> dict[str, Any]:
    """The exchange of tensors on a GPU, with the CPU's codec and gloo in place of its own."""
    helper = helper_of(world())
    planned = [*TABLES, Table("odd", 7, torch.uint8), Table("few", 5)]
    seen: dict[str, Any] = {}

    def exchange(bound: float, faults: Faults, wrong: int = 0) -> tuple[list[Rows], DeviceExchange]:
        tables = []
        for i, table in enumerate(planned):
            received, sent = splits(rank, ranks, i)
            sent = [n + wrong * (to == 1) for to, n in enumerate(sent)]
            t = rows_of(table, sum(sent), 10 * rank + i)
            out = torch.zeros(sum(received), table.row_elements, dtype=table.dtype)
            limit = bound if table.dtype == torch.float32 else 0.0
            tables.append(Rows(t, out, sent, received, limit, relative=True, name=table.name))
        counters = Counters()
        made = DeviceExchange(
            helper,
            tables,
            counters,
            faults,
            buffers=Buffers(),
            coder=CpuCoder(),
        )
        return tables, made

    for bound in (0.0, 0.02):
        tables, made = exchange(bound, Faults(lasting=True))
        trial = made.trial()
        made.run()
        equal = []
        for i, table in enumerate(tables):
            exact = by_torch(table.sent, list(table.receive_rows), list(table.send_rows))
            spread = 900.0 if table.bound else 0.0
            errors = (table.received.double() - exact.double()).abs()
            equal.append(bool((errors <= bound * spread).all()))
            seen[f"moved {i} {bound}"] = table.moved_bytes > 0
        seen[f"equal {bound}"] = all(equal)
        parts = sum(table.moved_bytes for table in tables)
        seen[f"trial {bound}"] = (
            trial.moved_bytes == [table.moved_bytes for table in tables]
            and trial.raw_bytes == [table.raw_bytes(rank) for table in tables]
            and trial.encode_s > 0 < trial.decode_s
        )
        seen[f"fewer {bound}"] = parts < sum(table.raw_bytes(rank) for table in tables)
    faults = Faults(lasting=True)
    # Rank 0 has rows for rank 1 that it does not expect.
    seen["wrong"] = error_of(exchange(0.0, faults, wrong=int(rank == 0))[1].run)
    seen["next"] = error_of(exchange(0.0, faults)[1].run)
    seen["at once"] = error_of(exchange(0.0, faults)[1].run)
    return seen


def as_on_a_gpu_too(rank: int, ranks: int) -> dict[str, Any]:
    """What ranks check of tensors on the CPU, with those on a GPU in their place."""
    seen: dict[str, Any] = {}
    with coded_where_rows_are():
        for check in (
            of_hosts.asynchronous,
            of_hosts.gradients,
            of_hosts.disagreement,
            table_ranks.tables,
            table_ranks.gradients_of_tables,
        ):
            seen[check.__name__] = check(rank, ranks)
        seen |= on_device(rank, ranks, CPU)
    return seen


def alone(rank: int, ranks: int) -> dict[str, Any]:
    """One rank, whose rows for itself cross."""
    with coded_where_rows_are(own_rows_cross=True):
        return on_device(rank, ranks, CPU)


def decisions_there(rank: int, ranks: int) -> dict[str, Any]:
    """Both ways go on with what whole exchanges of these rows took: the host's coding, the link.

    First coding is slow, then the link.
    """
    clock = Clock()
    coder = clock.slowed(CpuCoder.encode_vectors, lambda *_: 0.04)
    link = clock.slowed(dist.all_to_all_single, lambda _, given, *__: 0.002 + given.nbytes / 1e6)
    slow: dict[str, Any] = {
        "coding": mock.patch.object(CpuCoder, "encode_vectors", coder),
        "link": mock.patch.object(distributed_c10d, "all_to_all_single", link),
    }
    planned = [Table("a", 8), Table("b", 8)]
    exchange = CompressedAllToAll(tables=planned, decide_every=3)
    sizes = {table.name: [400] * ranks for table in planned}
    given = {t.name: rows_of(t, 400 * ranks, rank).requires_grad_() for t in planned}
    exact = {name: crossed(t, sizes[name], sizes[name]) for name, t in given.items()}
    back = (torch.arange(400 * ranks) % 7 + 1.0)[:, None].expand(-1, 8).contiguous()
    seen: dict[str, Any] = {}
    done = 0
    with coded_where_rows_are(), clock.running():
        for name, calls in (("coding", 4), ("link", 4)):
            equal = []
            with slow[name]:
                for _ in range(calls):
                    found = exchange.exchange_tables(given, sizes, sizes)
                    equal += [torch.equal(found[key], t) for key, t in exact.items()]
                    for t in given.values():
                        t.grad = None
                    sum((t * back).sum() for t in found.values()).backward()  # type: ignore[union-attr]
                    equal += [
                        torch.equal(t.grad, crossed(back, sizes["a"], sizes["a"]))  # type: ignore[arg-type]
                        for t in given.values()
                    ]
            done += calls
            stats = exchange.stats()
            seen[name] = stats["modes"]
            modes: list[Any] = [None] * ranks
            dist.all_gather_object(modes, stats["modes"])
            seen[f"{name} agreed"] = all(mode == modes[0] for mode in modes)
            seen[f"{name} equal"] = all(equal)
            seen[f"{name} counted"] = all(
                stats[way]["calls"] + stats[way]["plain_calls"] == done
                for way in ("forward", "backward")
            )
            parts = sum(table["raw_bytes"] for table in stats["tables"].values())
            seen[f"{name} bytes"] = parts == stats["forward"]["raw_bytes"]
    return seen


def of_kept_sizes(rank: int, ranks: int) -> dict[str, str]:
    """Calls of sizes that are known are checked as the first one was."""
    planned = [Table("a", 8), Table("b", 3)]
    exchange = CompressedAllToAll(tables=planned, codec="compressed")
    even, more = [4] * ranks, [6, *[4] * (ranks - 1)]
    rows = {t.name: rows_of(t, 4 * ranks, rank) for t in planned}
    more_rows = {t.name: rows_of(t, 4 * ranks + 2, rank) for t in planned}
    sizes, longer = dict.fromkeys(rows, even), dict.fromkeys(rows, more)
    own = sizes if rank else dict.fromkeys(rows, [6] * ranks)
    seen: dict[str, str] = {}
    with coded_where_rows_are():
        exchange.exchange_tables(rows, sizes, sizes)
        exchange.exchange_tables(more_rows, own, longer)  # all send rank 0 more rows
        calls: dict[str, Callable[[], Any]] = {
            "dtype": lambda: exchange.exchange_tables(rows | {"b": rows["b"].int()}, sizes, sizes),
            "width": lambda: exchange.exchange_tables(
                rows | {"b": rows["b"].view(3, -1)}, sizes, sizes
            ),
            "rows": lambda: exchange.exchange_tables(more_rows, sizes, sizes),
            "unknown": lambda: exchange.exchange_tables(rows, sizes, sizes | {"c": even}),
            "a tensor": lambda: exchange.exchange_tables(rows | {"a": [1]}, sizes, sizes),  # type: ignore[arg-type]
        }
        seen |= {name: error_of(call) for name, call in calls.items()}
        # Both sizes are known, and now not those that the others have.
        sent = (more_rows, longer) if rank else (rows, sizes)
        of_each = partial(exchange.exchange_tables, sent[0], sizes, sent[1])
        seen["disagreement"] = error_of(of_each)
    return seen


def on_device(rank: int, ranks: int, there: torch.device) -> dict[str, Any]:
    """All that exchanges of rows on a device can do, by ON_DEVICE."""
    return {name: check(rank, ranks, there) for name, check in ON_DEVICE.items()}


def crossed(t: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
    """Return what torch's own collective delivers, of any bits."""
    given = t.detach().contiguous().view(torch.uint8)
    found = torch.empty(sum(received), *given.shape[1:], dtype=torch.uint8, device=t.device)
    dist.all_to_all_single(found, given, received, sent)
    return found.view(t.dtype)


def summed(rank: int, ranks: int, there: torch.device) -> dict[str, bool]:
    """Rows of one id cross once, and their gradients back as sums; 16 bits, ids there or not."""
    seen = {}
    sizes = [60] * ranks
    of_both = dict.fromkeys(("rows", "single"), sizes)
    for dtype in (torch.float32, torch.bfloat16):
        for where in (CPU, there):
            generator = torch.Generator().manual_seed(rank)
            ids = torch.randint(9, (sum(sizes),), generator=generator)
            weights = torch.randn(9, 32, generator=generator).to(there, dtype).requires_grad_()
            single = torch.randn(sum(sizes), 3, generator=generator).to(there)
            rows = weights[ids.to(there)]
            planned = [Table("rows", 32, dtype), Table("single", 3)]
            exchange = CompressedAllToAll(tables=planned, codec="compressed")
            found = exchange.exchange_tables(
                {"rows": rows, "single": single},
                of_both,
                of_both,
                row_ids={"rows": ids.to(where), "single": torch.arange(sum(sizes))},
            )
            key = f"{dtype} {where.type}"
            seen[f"equal {key}"] = torch.equal(found["rows"], crossed(rows, sizes, sizes))
            seen[f"single {key}"] = torch.equal(found["single"], crossed(single, sizes, sizes))
            factors = (torch.arange(sum(sizes), device=there) % 13 + 1.0 + rank)[:, None]
            (found["rows"] * factors.to(dtype)).sum().backward()
            back = crossed(factors.expand(-1, 32), sizes, sizes)
            wanted = torch.zeros(9, 32, dtype=torch.float64, device=there)
            wanted.index_add_(0, ids.to(there), back.double())
            assert weights.grad is not None
            near = 1e-6 if dtype == torch.float32 else 0.03
            seen[f"summed {key}"] = torch.allclose(weights.grad.double(), wanted, rtol=near)
            stats = exchange.stats()["tables"]["rows"]
            if ranks > 1 or Caller.own_rows_cross:
                seen[f"fewer {key}"] = 0 < stats["moved_bytes"] < stats["raw_bytes"] / 3
                raw_back = stats["backward_raw_bytes"]
                seen[f"fewer back {key}"] = 0 < raw_back <= 9 * 32 * dtype.itemsize * ranks
    differ = torch.arange(4.0 * ranks, device=there)[:, None]
    zeros = torch.zeros(4 * ranks, dtype=torch.int64)
    refused = error_of(lambda: CompressedAllToAll()(differ, row_ids=zeros))
    seen["refused"] = "row_ids: rows of one id differ" in refused
    return seen


def in_pieces(rank: int, ranks: int, there: torch.device) -> dict[str, bool]:
    """Pieces of three tables, of which one has fewer rows than pieces."""
    exchange = CompressedAllToAll(tables=TABLES, pieces=3, codec="compressed")
    inputs, receive, send, expected = {}, {}, {}, {}
    for i, table in enumerate(TABLES):
        receive[table.name], send[table.name] = splits(rank, ranks, i)
        if i == 1:
            receive[table.name] = send[table.name] = [1] * ranks
        inputs[table.name] = rows_of(table, sum(send[table.name]), 10 * rank + i).to(there)
        expected[table.name] = crossed(inputs[table.name], receive[table.name], send[table.name])
    equal = []
    for _ in range(3):
        found = exchange.exchange_tables(inputs, receive, send)
        equal += [torch.equal(found[name], t) for name, t in expected.items()]
    stats = exchange.stats()
    return {
        "equal": all(equal),
        "calls": stats["forward"]["calls"] == 3,
        "mode": stats["modes"]["forward"] == "pieces",
    }


def every_bit(rank: int, ranks: int, there: torch.device) -> dict[str, bool]:
    """NaN of any bits come as they were, of tables of one kind and of several, back too."""
    seen = {}
    sizes = [30] * ranks
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for width in (8, 12):
            tables = [Table(name, n, dtype=dtype) for name, n in (("a", 8), ("b", width))]
            given, gradients = {}, {}
            for number, table in enumerate(tables):
                random = torch.Generator().manual_seed(10 * rank + number)
                shape = (2, 30 * ranks, table.row_elements * dtype.itemsize)
                raw = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
                raw[:, ::3, dtype.itemsize - 2] |= 128
                raw[:, ::3, dtype.itemsize - 1] = 127  # NaN of many kinds
                given[table.name], gradients[table.name] = raw.view(dtype).to(there)
            of_both = {table.name: sizes for table in tables}
            for codec in ("compressed", "raw"):
                exchange = CompressedAllToAll(tables=tables, codec=codec)
                leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
                found = exchange.exchange_tables(leaves, of_both, of_both)
                torch.autograd.backward(list(found.values()), list(gradients.values()))
                for name, t in given.items():
                    key = f"{codec} {dtype} {width} {name}"
                    wanted = crossed(t, sizes, sizes)
                    seen[key] = same_bits(found[name].detach().cpu(), wanted.cpu())
                    back = leaves[name].grad
                    wanted = crossed(gradients[name], sizes, sizes)
                    seen[f"{key} back"] = back is not None and same_bits(back.cpu(), wanted.cpu())
    return seen


def rounded(rank: int, ranks: int, there: torch.device) -> dict[str, bool]:
    """Gradients within two bounds, the bits that the CPU would draw, NaN and infinities kept."""
    seen = {}
    rows = 50
    for dtype in (torch.float32, torch.float16):
        for bound in (ErrorBound(0.05, "absolute"), ErrorBound(0.01)):
            generator = torch.Generator().manual_seed(rank)
            gradient = torch.randn(rows * ranks, 6, generator=generator).to(dtype)
            gradient[-1, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
            exchange = CompressedAllToAll(backward=bound, seed=7, codec="compressed")
            t = torch.zeros(rows * ranks, 6, dtype=dtype, device=there, requires_grad=True)
            exchange(t).backward(gradient.to(there))
            assert t.grad is not None
            own = slice(rank * rows, (rank + 1) * rows)
            own = slice(0, 0) if Caller.own_rows_cross else own
            crossing = torch.cat([gradient[: own.start], gradient[own.stop :]])
            limit = bound.absolute(crossing)  # of what crosses
            on_host = round_stochastically(gradient, limit, 7, rank) if limit else gradient.clone()
            on_host[own] = gradient[own]
            wanted = crossed(on_host.to(there), [rows] * ranks, [rows] * ranks)
            key = f"{dtype} {bound.kind}"
            seen[f"same bits {key}"] = same_bits(t.grad.cpu(), wanted.cpu())
            errors = (on_host.double() - gradient.double()).abs()[:-1]
            seen[f"within {key}"] = bool(errors.max() <= 2 * limit)
            alone = ranks == 1 and not Caller.own_rows_cross
            seen[f"rounded {key}"] = alone or bool(errors.max() > 0)
    constant = CompressedAllToAll(backward=0.1, codec="compressed")
    t = torch.zeros(ranks, 2, device=there, requires_grad=True)
    constant(t).backward(torch.ones(ranks, 2, device=there))
    seen["all equal"] = t.grad is not None and bool((t.grad == 1).all())
    return seen


def with_feedback(rank: int, ranks: int, there: torch.device) -> dict[str, bool]:
    """What was lost comes back: the sum of all passes is off by one rounding alone."""
    rows, bound, passes = 40, 0.05, 12
    generator = torch.Generator().manual_seed(rank)
    gradient = torch.randn(rows * ranks, 4, generator=generator).to(there)
    exact = crossed(gradient, [rows] * ranks, [rows] * ranks)
    kept = CompressedAllToAll(
        backward=ErrorBound(bound, "absolute"), error_feedback=4096, codec="compressed"
    )
    ids = torch.arange(rows * ranks, device=there)
    total = torch.zeros_like(exact, dtype=torch.float64)
    for _ in range(passes):
        t = torch.zeros(rows * ranks, 4, device=there, requires_grad=True)
        kept(t, received_ids=ids).backward(gradient)
        assert t.grad is not None
        total += t.grad.double()
    drift = (total - passes * exact.double()).abs().max()
    return {
        "drift": bool(drift <= 2.1 * bound),
        # Of slots: the host hears of how many are used when the GPU is done.
        "bytes": rows * ranks <= kept.stats()["feedback_bytes"] / (4 * 4 + 16) <= 4096,
    }


def several_under_way(rank: int, ranks: int, there: torch.device) -> dict[str, Any]:
    """Asynchronous exchanges beside an all-reduce, waited for in any order, plain ones too."""
    received, sent = splits(rank, ranks)
    given = [rows_of(Table("t", 16), sum(sent), 10 * rank + i).to(there) for i in range(4)]
    found = [torch.full((sum(received), 16), 7.0, device=there) for _ in given]
    total = torch.ones(1000, device=there)
    work = []
    for i, (t, out) in enumerate(zip(given, found, strict=True)):
        codec, bound = ("compressed", "compressed", "raw", "auto")[i], 0.02 if i == 1 else None
        work.append(
            all_to_all_single(out, t, received, sent, async_op=True, codec=codec, error_bound=bound)
        )
        dist.all_reduce(total)
    sums = [each.get_future().then(lambda done: done.value()[0].double().sum()) for each in work]
    for i, each in enumerate(reversed(work) if rank % 2 else work):
        if i % 2:
            each.get_future().wait()
        else:
            each.wait()
    seen: dict[str, Any] = {}
    for i, (of_future, out) in enumerate(zip(sums, found, strict=True)):
        seen[f"future {i}"] = bool(of_future.wait() == out.double().sum())
    for i, (t, out) in enumerate(zip(given, found, strict=True)):
        errors = (out - crossed(t, received, sent)).abs().max()
        seen[f"exchange {i}"] = bool(errors <= (0.02 * 900 if i == 1 else 0))
    seen["done"] = all(each.is_completed() for each in work)
    seen["total"] = float(total[0]) == ranks**4
    return seen


def in_torchs_place(rank: int, ranks: int, there: torch.device) -> dict[str, bool]:
    """Whoever puts the function in the place of torch's gets the same rows, by each codec."""
    received, sent = splits(rank, ranks)
    t = rows_of(Table("t", 16), sum(sent), rank).to(there)
    exact, seen = crossed(t, received, sent), {}
    for codec in ("auto", "compressed", "raw"):
        ours = partial(all_to_all_single, codec=codec)
        with mock.patch.object(dist, "all_to_all_single", ours):
            found = torch.empty_like(exact)
            dist.all_to_all_single(found, t, received, sent)
        seen[codec] = torch.equal(found, exact)
    return seen


def buffers(rank: int, ranks: int, there: torch.device) -> dict[str, bool]:
    """Buffers are kept from one call to the next, and bounded."""
    t = rows_of(Table("t", 64), 500 * ranks, rank).to(there)
    bytes_of: dict[bool, list[int]] = {False: [], True: []}
    for bounded, found in bytes_of.items():
        most_bytes = 1000 if bounded else 1 << 30
        exchange = CompressedAllToAll(codec="compressed", buffer_bytes=most_bytes)
        for _ in range(4):
            exchange(t.clone().requires_grad_()).sum().backward()
            found.append(exchange.stats()["buffer_bytes"])
    _, *kept = bytes_of[False]
    return {
        "kept": 0 < min(kept) == max(kept) < 4 * t.nbytes + 65536,
        "bounded": bytes_of[True] == [0] * 4,
    }


def damaged(rank: int, ranks: int, there: torch.device) -> dict[str, Any]:
    """Messages that change on their way: fields of ids, sizes of parts, bodies."""
    of_torch = dist.all_to_all_single
    ids = torch.arange(40 * ranks) % 5
    rows = torch.randn(5, 16, generator=torch.Generator().manual_seed(rank))[ids].to(there)
    sizes = [40] * ranks
    seen: dict[str, Any] = {}

    def after(at: int, value: int, call: Callable[[], Any]) -> str:
        def exchange(output: Any, given: Any, *args: Any, **options: Any) -> Any:
            done = of_torch(output, given, *args, **options)
            if output.dtype == torch.uint8 and len(output) > at:
                output[at] = value
            return done

        setattr(distributed_c10d, "all_to_all_single", exchange)  # noqa: B010 - mypy
        try:
            call()
            if there.type == "cuda":
                torch.cuda.synchronize()
                bitslab.raise_pending_errors()
        except bitslab.BitslabError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            setattr(distributed_c10d, "all_to_all_single", of_torch)  # noqa: B010 - mypy
        return "no error"

    for name, at, value in (("bits", 1, 40), ("field", 8, 255)):
        exchange = CompressedAllToAll(codec="compressed")
        call = partial(exchange, rows, row_ids=ids)
        seen[name] = after(at, value, call).startswith("CorruptedDataError: message: ")
        seen[f"{name} again"] = "an earlier exchange failed" in error_of(call)
    tables = CompressedAllToAll(tables=[Table("a", 16), Table("b", 16)], codec="compressed")
    two, of_both = {"a": rows, "b": rows}, {"a": sizes, "b": sizes}
    said = after(3, 255, lambda: tables.exchange_tables(two, of_both, of_both))
    seen["sizes"] = "bytes, expected 2 parts" in said
    # On a group of its own: later calls there would raise.
    group = dist.new_group(list(range(ranks)))
    found = torch.full_like(rows, 7.0)
    body = partial(all_to_all_single, found, rows, group=group, codec="compressed")
    seen["body"] = after(0, 77, body).startswith("CorruptedDataError: ")
    first = 0 if Caller.own_rows_cross or rank else 1
    seen["as it was"] = bool((found[40 * first : 40 * (first + 1)] == 7).all())
    return seen


def elsewhere_than_planned(rank: int, ranks: int, there: torch.device) -> dict[str, bool]:
    """Rows on another device than planned are refused before anything is sent, in all calls."""
    other = CPU if there.type == "cuda" else torch.device("meta")
    sizes, rows = {"rows": [1] * ranks}, torch.ones(ranks, 8, device=there)
    planned = CompressedAllToAll(tables=[Table("rows", 8)], device=there)
    single = CompressedAllToAll(device=there, codec="compressed")
    anywhere = CompressedAllToAll(codec="compressed")
    seen = {}
    for call in ("first", "later"):
        said = error_of(lambda: planned.exchange_tables({"rows": rows.to(other)}, sizes, sizes))
        seen[f"tables, {call}"] = said.endswith(f"inputs: rows: on {other}, planned is {there}")
        said = error_of(lambda: single(rows.to(other)))
        ends = f"planned is {there}" if other.type == "cpu" else "accepted are cpu and cuda"
        seen[f"one tensor, {call}"] = said.endswith(f"input: on {other}, {ends}")
        for exchange in (single, anywhere):
            seen[f"goes on, {call}"] = same_bits(exchange(rows), rows)
    if there.type == "cuda":
        # Rows of the same sizes for which the group has no backend.
        seen["no backend"] = error_of(lambda: anywhere(rows.cpu())).startswith("ArgumentError")
        other_plan = CompressedAllToAll(tables=[Table("rows", 8)], device="cpu")
        said = error_of(lambda: other_plan.exchange_tables({"rows": rows}, sizes, sizes))
        seen["of a CPU"] = said.endswith(f"inputs: rows: on {there}, planned is cpu")
    return seen


#: Checks by name.
ON_DEVICE: dict[str, Callable[[int, int, torch.device], dict[str, Any]]] = {
    check.__name__: check
    for check in (
        summed,
        in_pieces,
        every_bit,
        rounded,
        with_feedback,
        several_under_way,
        in_torchs_place,
        buffers,
        damaged,
        elsewhere_than_planned,
    )
}


def nccl(rank: int, ranks: int) -> dict[str, Any]:
    """Rows on a GPU by function and object, of every bit and within a bound, and gradients."""
    device = torch.device("cuda", rank)
    received, sent = splits(rank, ranks)
    table = torch.randn(5, 64, generator=torch.Generator().manual_seed(rank)).to(device)
    t = table[torch.arange(sum(sent), device=device) % 5]
    exact = torch.empty(sum(received), 64, device=device)
    dist.all_to_all_single(exact, t, received, sent)
    seen: dict[str, Any] = {}
    for bound in (None, 0.05):
        found = torch.full_like(exact, 7.0)
        all_to_all_single(found, t, received, sent, codec="compressed", error_bound=bound)
        limit = 0.0 if bound is None else bound * 12
        seen[f"function {bound}"] = bool((found - exact).abs().max() <= limit)
    exchange = CompressedAllToAll(tables=[Table("rows", 64), Table("none", 3)], decide_every=2)
    weights = t.clone().requires_grad_()
    total = torch.ones(1000, device=device)
    for _ in range(5):
        weights.grad = None
        out = exchange.exchange_tables({"rows": weights}, {"rows": received}, {"rows": sent})
        dist.all_reduce(total)  # beside the helper's communicator
        (out["rows"] * (rank + 1)).sum().backward()
        seen["object"] = torch.equal(out["rows"], exact)
    assert weights.grad is not None
    factors = torch.repeat_interleave(torch.arange(ranks) + 1.0, torch.tensor(sent)).to(device)
    seen["gradient"] = torch.equal(weights.grad, factors[:, None].expand(-1, 64))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total.add_(1)  # torch warns of graphs that hold nothing
        seen["capture"] = error_of(lambda: all_to_all_single(found, t, received, sent))
    seen["stats"] = exchange.stats()
    bitslab.raise_pending_errors()
    return seen


def nccl_paths(rank: int, ranks: int) -> dict[str, Any]:
    """All that exchanges can do on GPUs; of one rank its own rows cross."""
    Caller.own_rows_cross = ranks == 1
    return on_device(rank, ranks, torch.device("cuda", rank))


CHECKS: dict[str, Callable[[int, int], Any]] = {
    f.__name__: f
    for f in (
        as_on_a_gpu,
        as_on_a_gpu_too,
        alone,
        decisions_there,
        of_kept_sizes,
        nccl,
        nccl_paths,
    )
}
