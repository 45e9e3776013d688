"""What two ranks check of ids of rows, and of gradients that go back while other work runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

from bitslab.distributed import ErrorBound, ExchangeError
from bitslab.distributed.selection import PLAIN
from bitslab.integrations.torchrec import (
    compress_communication,
    output_dists,
    restore_communication,
)
from bitslab.integrations.torchrec.row_ids import bag_ids
from tests.distributed.cpu_coder import coded_where_rows_are
from tests.integrations.torchrec.batches import bag_configs, batch
from tests.integrations.torchrec.communication_pairs import (
    PLANS,
    Pair,
    compress,
    features_of,
    looked_up,
    sharded,
    weighed,
)
from tests.integrations.torchrec.ranks import device, gather


def as_on_a_gpu(function: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """A check of rows that are coded where they are, whose ids are found there."""
    with nullcontext() if device().type == "cuda" else coded_where_rows_are():
        function(*arguments, **options)


def repeated_rows_cross_once() -> None:
    """Of bags with one id, gradients of a row go back as one."""
    pair = Pair("table_wise")
    rank = dist.get_rank()
    n = 64
    generator = torch.Generator().manual_seed(rank)
    features = KeyedJaggedTensor(
        ["b", "unused", "a", "c"],
        torch.cat([torch.randint(4, (n,), generator=generator) for _ in range(4)]),
        lengths=torch.ones(4 * n, dtype=torch.int64),
    )
    plain, compressed = pair.step(features)
    assert torch.equal(plain, compressed)
    pair.check_trained_alike()
    for name, (raw, moved, raw_back, moved_back) in pair.moved().items():
        if raw:
            # t1 is looked up by two features.
            assert moved < raw / 5, (name, pair.moved())
            assert moved_back < (n * raw) / 100, (name, pair.moved())
        if raw_back:
            assert raw_back <= 8 * 8 * 4 + 4 * 64 * 4 + 4 * 8 * 4, (name, pair.moved())


def rows_of_others_cost_nothing_row_wise() -> None:
    """Half of the rows are zeros of bags that the other rank has."""
    pair = Pair("row_wise")
    plain, compressed = pair.step(batch(dist.get_rank(), bags=64, least=1, most=1))
    assert torch.equal(plain, compressed)
    pair.check_trained_alike()
    for raw, moved, back, _ in pair.moved().values():
        assert moved < 0.8 * raw and back < 0.9 * raw, (raw, moved, back)


def weights_of_bags_are_kept() -> None:
    """A weighted row is not the row of the table: such rows are never summed."""

    def make() -> Any:
        return bag_configs(pooling=PoolingType.SUM)

    pair = Pair("table_wise", is_weighted=True, make=make)
    for seed in range(2):
        plain, compressed = pair.step(features_of(seed, least=1, most=1, weighted=True))
        assert torch.equal(plain, compressed)
    assert all(torch.equal(*both) for both in pair.states())


def what_rounding_took_is_added_the_next_time(plan: str, **options: Any) -> None:
    """However many steps: a table is off by what one rounding takes, and by more without."""
    bound, steps = 0.05, 16
    plain = sharded(PLANS[plan], **options)
    others = [sharded(PLANS[plan], **options) for _ in range(2)]
    reports = [
        compress(other, None, ErrorBound(bound, "absolute"), error_feedback=rows)
        for other, rows in zip(others, (1000, 0), strict=True)
    ]
    for seed in range(steps):
        features = features_of(seed % 2, least=1, most=1)
        for model in (plain, *others):
            weighed(looked_up(model, features)).backward()
    errors = []
    for other in others:
        states = [model.state_dict() for model in (plain, other)]
        errors.append(max(_error(states[0][key], states[1][key]) for key in states[0]))
    # Of one rank's gradients, below two bounds; halved, and times the learning rate of 0.1.
    assert 0 < errors[0] < 0.1 * bound * 1.01 < errors[1], errors
    for report, kept in zip(reports, (True, False), strict=True):
        stats = report.stats().values()
        found = torch.tensor(sum(each["feedback_bytes"] for each in stats), device=device())
        dist.all_reduce(found)
        assert bool(found > 0) == kept


def _error(a: Any, b: Any) -> float:
    return float((gather(a) - gather(b)).abs().max())


def ids_are_not_made_where_all_rows_cross() -> None:
    """As on a GPU, where to make them takes the host as long as an exchange."""
    model = sharded(PLANS["table_wise"])
    for codec, needed in (("raw", False), ("compressed", True)):
        report = compress_communication(model, codec=codec)
        with mock.patch.object(output_dists, "bag_ids", wraps=bag_ids) as made:
            weighed(looked_up(model, features_of(0, least=1, most=1))).backward()
        assert made.called == needed and report.compressed
        restore_communication(model)


def a_rank_that_cannot_make_ids_keeps_nobody_waiting(sequences: bool) -> None:
    """What is made for an exchange may have no memory: the other rank knows at once."""
    # One sharding: what the other rank begins behind it would be met by none.
    model = sharded(PLANS["table_wise"], sequences=sequences)
    compress(model, codec="compressed")
    rank, error = dist.get_rank(), MemoryError("no memory for ids")
    place = "value_ids" if sequences else "bag_ids"
    failing = mock.patch.object(output_dists, place, side_effect=error)
    started = time.monotonic()
    with failing if rank == 1 else nullcontext():
        try:
            looked_up(model, features_of(0, least=1, most=1))
        except (MemoryError, ExchangeError) as raised:
            found = raised
    assert found is error if rank == 1 else "rank 1" in str(found)
    assert time.monotonic() - started < 20  # the timeout is longer


def ranks_go_on_while_rows_are_under_way() -> None:
    """Rank 0's exchanges begin, forward and back, while rank 1 waits for its word."""
    plain, compressed = sharded(PLANS["mixed"]), sharded(PLANS["mixed"])
    compress(compressed)
    store = dist.distributed_c10d._get_default_store()
    rank, outs = dist.get_rank(), []
    for number, model in enumerate((plain, compressed)):
        tables = model.module["tables"]
        # Communicators are made in the first one. A GPU that waits for another rank may load no
        # kernel, and the second one may be the first to use some.
        for step in range(3):
            features = features_of(0, least=1).to(device())
            context = tables.create_context()
            shards = tables.input_dist(context, features).wait().wait()
            word = f"under way {number} {step}"
            weight = torch.ones(3, device=device(), requires_grad=True)
            if rank and step == 2:
                store.wait([f"{word} forward"])
            begun = tables.compute_and_output_dist(context, shards)
            if not rank:
                store.set(f"{word} forward", "")
            dense = weight * 2.0  # autograd comes to it between waiting and beginning
            if not rank:
                dense.register_hook(lambda _, word=word: store.set(f"{word} back", ""))
            found = begun.wait().values()
            if rank and step == 2:
                store.wait([f"{word} back"])
            (weighed(found) + dense.sum()).backward()
            outs.append(found.detach())
    assert torch.equal(outs[0], outs[3])
    for step in (1, 2):
        torch.testing.assert_close(outs[3 + step], outs[step], rtol=1e-5, atol=1e-6)


def feedback_costs_nothing_where_nothing_is_rounded() -> None:
    """Ids neither cross nor are made while torch's own collective brings gradients back."""
    plain, compressed = sharded(PLANS["table_wise"]), sharded(PLANS["table_wise"])
    bound = ErrorBound(0.05, "absolute")
    report = compress_communication(compressed, backward=bound, error_feedback=1000)
    for exchange in report.exchanges.values():
        exchange._caller.decision.modes = [PLAIN, PLAIN]
    with mock.patch.object(output_dists, "bag_ids", wraps=bag_ids) as made:
        for seed in range(3):
            features = features_of(seed, least=1, most=1)
            outs = [looked_up(model, features) for model in (plain, compressed)]
            assert torch.equal(*outs)
            for out in outs:
                weighed(out).backward()
    states = [model.state_dict() for model in (plain, compressed)]
    assert all(torch.equal(gather(states[0][key]), gather(states[1][key])) for key in states[0])
    assert not made.called
    for stats in report.stats().values():
        assert stats["feedback_bytes"] == 0
        moved = {name: table["raw_bytes"] for name, table in stats["tables"].items()}
        assert not any(n for name, n in moved.items() if name.endswith(":ids")), moved
    # A call that decides rounds, or may: there ids cross.
    for exchange in report.exchanges.values():
        exchange._caller.decision.modes = ["compressed", "compressed"]
    weighed(looked_up(compressed, features)).backward()
    assert any(stats["feedback_bytes"] for stats in _of_all_ranks(report.stats()))


def _of_all_ranks(stats: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, list(stats.values()))
    return [each for of_rank in found for each in of_rank]


def looked_up_in_inference_mode(plan: str) -> None:
    """Evaluation in inference mode, before and between steps of training."""
    pair = Pair(plan, optimizer="dense")  # of fused kernels FBGEMM has none there, on a CPU
    for seed in range(3):
        with torch.inference_mode():
            outs = [looked_up(m, features_of(seed)) for m in (pair.plain, pair.compressed)]
        if seed == 0:
            assert torch.equal(*outs)
        torch.testing.assert_close(outs[1], outs[0], rtol=1e-5, atol=1e-5)
        pair.step(features_of(seed))
    pair.check_trained_alike()
