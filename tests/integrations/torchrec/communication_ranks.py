"""What two ranks check of compressed output dists, in one process group: each check is a test.

Every rank calls all checks in the same order, as they talk to each other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, comm_ops
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

from bitslab import CorruptedDataError
from bitslab.distributed import AdaptiveBound, ErrorBound, all_to_all_single, stepwise
from bitslab.integrations.torchrec import (
    CommunicationReport,
    compress_communication,
    restore_communication,
)
from bitslab.integrations.torchrec.output_dists import CompressedDist
from tests.integrations.torchrec import ranks, torchrec_suite
from tests.integrations.torchrec.batches import VALUES, bag_configs, batch, configs, joined
from tests.integrations.torchrec.communication_gradient_ranks import (
    a_rank_that_cannot_make_ids_keeps_nobody_waiting,
    as_on_a_gpu,
    feedback_costs_nothing_where_nothing_is_rounded,
    ids_are_not_made_where_all_rows_cross,
    looked_up_in_inference_mode,
    ranks_go_on_while_rows_are_under_way,
    repeated_rows_cross_once,
    rows_of_others_cost_nothing_row_wise,
    weights_of_bags_are_kept,
    what_rounding_took_is_added_the_next_time,
)
from tests.integrations.torchrec.communication_pairs import (
    PLANS,
    STEPS,
    Pair,
    compress,
    features_of,
    looked_up,
    output_of,
    sharded,
    weighed,
)
from tests.integrations.torchrec.ranks import OPTIMIZERS, WORLD, device, gather, refusal
from tests.pairwise import FULL


def every_bit(plan: str, optimizer: str = "sgd", **options: Any) -> None:
    """Lookups bit for bit; training but for the order of additions."""
    uneven = options.pop("uneven", 0)
    drawn = options.pop("drawn", {})
    pair = Pair(plan, optimizer=optimizer, **options)
    for seed in range(STEPS):
        plain, compressed = pair.step(features_of(seed, uneven=uneven, **drawn))
        if seed == 0:
            assert torch.equal(plain, compressed)
        else:
            torch.testing.assert_close(compressed, plain, rtol=1e-5, atol=1e-5)
    pair.check_trained_alike()
    forward, _, backward, _ = (sum(part) for part in zip(*pair.moved().values(), strict=True))
    # A rank without tables sends gradients alone.
    assert (forward or plan == "one_rank") and forward + backward > 0


def losses_are_bit_equal_where_no_sums_are_merged(plan: str) -> None:
    """Of bags with several ids nothing is summed on the way: the very same training."""
    pair = Pair(plan)
    for seed in range(STEPS):
        plain, compressed = pair.step(features_of(seed, least=2, most=4))
        assert torch.equal(plain, compressed)
    assert all(torch.equal(*both) for both in pair.states())


def bit_equal_without_sums(plan: str) -> None:
    """Without row ids each gradient goes back by itself: the very same training."""
    plain, compressed = sharded(PLANS[plan]), sharded(PLANS[plan])
    report = compress(compressed, row_ids=False)
    for seed in range(STEPS):
        outs = [looked_up(m, features_of(seed, least=1, most=1)) for m in (plain, compressed)]
        assert torch.equal(*outs)
        for out in outs:
            weighed(out).backward()
    states = [m.state_dict() for m in (plain, compressed)]
    assert all(torch.equal(gather(states[0][key]), gather(states[1][key])) for key in states[0])
    assert report.compressed and restore_communication(compressed) == ["tables"]
    assert not any(lookup._forward_hooks for lookup in compressed.module["tables"]._lookups)


def all_messages_by_the_function(plan: str, **options: Any) -> None:
    """TorchRec's own features, rows and gradients by `all_to_all_single` in torch's place."""
    plain, plugged = (sharded(PLANS[plan], **options) for _ in range(2))
    calls = []

    def compressed(*arguments: Any, **given: Any) -> Any:
        calls.append(given)
        return all_to_all_single(*arguments, **given, codec="compressed")

    for seed in range(STEPS):
        features = features_of(seed, uneven=2)
        exact = looked_up(plain, features)
        exact.sum().backward()
        with mock.patch.object(dist, "all_to_all_single", compressed):
            found = looked_up(plugged, features)
            found.sum().backward()
        assert torch.equal(found, exact)
    states = [m.state_dict() for m in (plain, plugged)]
    assert all(torch.equal(gather(states[0][key]), gather(states[1][key])) for key in states[0])
    assert len(calls) >= 4 * STEPS and any(given.get("async_op") for given in calls)


def bounded(plan: str, bound: Any, limit: float, **options: Any) -> None:
    """Every element is within the bound, and not all are exact."""
    pair = Pair(plan, bound, **options)
    uneven = 0 if plan in ("row_wise", "mixed") else 2
    features = features_of(0, uneven=uneven)
    errors = (looked_up(pair.plain, features) - looked_up(pair.compressed, features)).double()
    assert 0 < float(errors.abs().max()) <= limit, float(errors.abs().max())


def a_bound_for_each_table() -> None:
    """Tables that are not named keep every bit."""
    pair = Pair("mixed", {"t1": ErrorBound(0.2, "absolute"), "t3": 0.01})
    features = features_of(0, most=1, least=1)
    outs = [output_of(m, features) for m in (pair.plain, pair.compressed)]
    errors = {key: float((outs[0][key] - outs[1][key]).abs().max()) for key in outs[0].keys()}
    assert errors["c"] == 0 and 0 < errors["b"] <= 0.2
    facts = pair.report.compressed
    assert facts["tables.table_wise"]["error_bound"] is None
    assert facts["tables.column_wise"]["error_bound"] == "0.01"
    assert facts["tables.row_wise"]["tables"] == ["t1"]
    assert "no table 'x'" in refusal(compress_communication, pair.plain, {"x": 0.1})
    assert "t1: every bit" not in str(pair.report) and "ErrorBound" in str(pair.report)


def a_bound_for_each_table_of_sequences(plan: str) -> None:
    """Tables of a sequence collection have bounds and classes of their own."""
    bounds = {"t1": ErrorBound(0.2, "absolute"), "t3": 0.01}
    pair = Pair(plan, bounds, sequences=True)
    owner = {key: config.name for config in configs() for key in config.feature_names}
    seen = dict.fromkeys(bounds, 0.0)
    for seed in range(STEPS):
        features = features_of(seed, uneven=2)
        outs = [output_of(m, features) for m in (pair.plain, pair.compressed)]
        for key, exact in outs[0].items():
            error = float((outs[1][key].values() - exact.values()).abs().max())
            table = key.partition("@")[2] or owner[key]  # of a feature of two tables
            assert error <= {"t1": 0.2, "t3": 0.01 * 12}.get(table, 0.0), (key, error)
            if table in seen:
                seen[table] = max(seen[table], error)
        for out in outs:
            torch.cat([t.values() for t in out.values()]).sum().backward()
    of_all = torch.tensor(list(seen.values()), device=device())  # a rank's own rows are copied
    dist.all_reduce(of_all, dist.ReduceOp.MAX)
    assert bool((of_all > 0).all()), seen
    adaptive = Pair(plan, AdaptiveBound(schedule=None), sequences=True)
    looked_up(adaptive.compressed, features_of(0))
    (stats,) = adaptive.report.stats().values()
    assert len(stats["tables"]) >= len(set(owner.values()))


def classes_of_tables_are_found() -> None:
    """An adaptive bound has a class for each table, and parts of sums get their share of it."""
    bound = AdaptiveBound(0.03, schedule=None)
    for plan, ranks_of_sum in (("table_wise", 1), ("row_wise", WORLD)):
        pair = Pair(plan, bound)
        features = features_of(0, least=1)
        plain, compressed = (looked_up(m, features) for m in (pair.plain, pair.compressed))
        assert 0 < float((plain - compressed).abs().max()) < 0.05 * 40
        (stats,) = pair.report.stats().values()
        found = [t for t in stats["tables"].values() if t["moved_bytes"]]
        assert found or plan == "table_wise"
        for table in found:
            assert table["class"] in AdaptiveBound.CLASSES
            largest = 0.05 / ranks_of_sum
            assert 0 < table["error_bound"] <= largest + 1e-9, table
    assert str(Pair("table_wise", "adaptive").report).count("adaptive") == 1


def gradients_are_rounded_on_request() -> None:
    plain, compressed = sharded(PLANS["mixed"]), sharded(PLANS["mixed"])
    report = compress(compressed, None, ErrorBound(0.05, "absolute"))
    outs = [looked_up(m, features_of(0, least=2)) for m in (plain, compressed)]
    assert torch.equal(*outs)
    for out in outs:
        weighed(out).backward()
    errors = []
    states = [m.state_dict() for m in (plain, compressed)]
    for key in states[0]:
        a, b = (gather(state[key]) for state in states)
        errors.append(float((a - b).abs().max()))
    # Below two bounds each, by the learning rate, of some bags that name a row.
    assert 0 < max(errors) < 0.1 * 2 * 0.05 * 20, errors
    assert all("0.05" in facts["backward"] for facts in report.compressed.values())


def raw_exchanges_are_plain() -> None:
    plain, compressed = sharded(PLANS["table_wise"]), sharded(PLANS["table_wise"])
    report = compress_communication(compressed, codec="raw")
    assert torch.equal(*(looked_up(m, features_of(0)) for m in (plain, compressed)))
    (stats,) = report.stats().values()
    assert stats["forward"]["plain_calls"] == 1


def batches_that_differ_by_feature(plan: str) -> None:
    """Variable batches, of TorchRec's own where gloo carries them, and of the unsharded model."""
    rank = dist.get_rank()
    made = []
    for each in range(WORLD):
        generator = torch.Generator().manual_seed(each)
        strides = {"b": 3 + each, "unused": 1, "a": 2, "c": 4 - each}
        lengths = [torch.randint(3, (n,), generator=generator) for n in strides.values()]
        values = [
            torch.randint(VALUES[key], (int(part.sum()),), generator=generator)
            for key, part in zip(strides, lengths, strict=True)
        ]
        inverse = torch.stack(
            [torch.randint(n, (6,), generator=generator) for n in strides.values()]
        )
        made.append(
            KeyedJaggedTensor(
                list(strides),
                torch.cat(values),
                lengths=torch.cat(lengths),
                stride_per_key_per_rank=[[n] for n in strides.values()],
                inverse_indices=(list(strides), inverse),
            )
        )
    # FBGEMM's kernels of a CPU take such batches in one group of tables only.
    pair = Pair(plan, make=ranks.sums)
    if plan != "row_wise":
        for _ in range(2):
            plain, compressed = pair.step(made[rank])
            torch.testing.assert_close(compressed, plain, rtol=1e-5, atol=1e-6)
        pair.check_trained_alike()
        return
    whole = EmbeddingBagCollection(tables=ranks.sums())
    state = {k.removeprefix("tables."): gather(v) for k, v in pair.plain.state_dict().items()}
    whole.load_state_dict(state)
    out = looked_up(pair.compressed, made[rank]).cpu()
    expected = whole(made[rank])
    expected = torch.cat([expected[key] for key in sorted(expected.keys())], 1)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    grads = [
        torch.linspace(-1, 1, out.numel()).view(out.shape),
        torch.linspace(-1, 1, expected.numel()).view(out.shape),
    ]
    out.backward(grads[0])
    total = torch.zeros(())
    for features in made:
        every = whole(features)
        every = torch.cat([every[key] for key in sorted(every.keys())], 1)
        total = total + (every * grads[1]).sum() / WORLD
    total.backward()
    with torch.no_grad():
        for parameter in whole.parameters():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad
    found = {k.removeprefix("tables."): gather(v) for k, v in pair.compressed.state_dict().items()}
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5)


def uneven_row_wise() -> None:
    """Which gloo does not carry without: beside the unsharded model."""
    compressed = sharded(PLANS["row_wise"], make=ranks.sums)
    compress(compressed)
    whole = EmbeddingBagCollection(tables=ranks.sums())
    state = {k.removeprefix("tables."): gather(v) for k, v in compressed.state_dict().items()}
    whole.load_state_dict(state)
    parts = [batch(rank, bags=5 + 2 * rank) for rank in range(WORLD)]
    out = looked_up(compressed, parts[dist.get_rank()]).cpu()
    every = whole(joined(parts))
    every = torch.cat([every[key] for key in sorted(every.keys())], 1)
    begin = 5 * dist.get_rank()
    expected = every[begin : begin + len(out)]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    (out.square().sum()).backward()
    (every.square().sum() / WORLD).backward()
    with torch.no_grad():
        for parameter in whole.parameters():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad
    found = {k.removeprefix("tables."): gather(v) for k, v in compressed.state_dict().items()}
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5)


def frozen_and_without_gradients() -> None:
    """Evaluation, and losses that only some ranks take from a table."""
    pair = Pair("table_wise")
    with torch.no_grad():
        outs = [looked_up(m, features_of(0)) for m in (pair.plain, pair.compressed)]
    assert torch.equal(*outs) and not outs[1].requires_grad
    states = [exchange["iteration"] for exchange in pair.report.state_dict().values()]
    assert set(states) == {0}


def gradients_are_divided_as_torchrec_says() -> None:
    comm_ops.set_gradient_division(False)
    try:
        pair = Pair("mixed")
        pair.step(features_of(0))
        pair.check_trained_alike()
    finally:
        comm_ops.set_gradient_division(True)


def it_is_undone() -> None:
    pair = Pair("mixed")
    tables = pair.compressed.module["tables"]
    replaced = list(tables._output_dists)
    hooks = [len(lookup._forward_hooks) for lookup in tables._lookups]
    assert restore_communication(pair.compressed) == ["tables"]
    assert [type(d) for d in tables._output_dists] == [
        type(d) for d in pair.plain.module["tables"]._output_dists
    ]
    assert all(a is b.plain for a, b in zip(tables._output_dists, replaced, strict=True))
    assert [len(lookup._forward_hooks) for lookup in tables._lookups] == [n - 1 for n in hooks]
    before = pair.moved()
    plain, restored = pair.step(features_of(1))
    assert torch.equal(plain, restored) and pair.moved() == before
    assert restore_communication(pair.compressed) == []
    report = compress_communication(pair.compressed)
    again = compress_communication(pair.compressed)
    assert len(report.compressed) == 3 and not again.compressed
    assert set(again.left) == set(report.compressed)
    assert "restore_communication first" in next(iter(again.left.values()))


def later_than_the_first_step() -> None:
    """Output dists that TorchRec makes at the first step may be there already."""
    plain, late = (sharded(PLANS["mixed"]) for _ in range(2))
    for seed in range(STEPS):
        if seed == 1:
            compress(late)
        outs = [looked_up(m, features_of(seed)) for m in (plain, late)]
        torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-6)
        for out in outs:
            out.sum().backward()


def what_cannot_be_compressed_is_left() -> None:
    plan = {"t1": data_parallel(), "t2": table_row_wise(host_index=0), "t3": table_wise(rank=1)}
    grid = sharded({**PLANS["table_wise"], "t3": grid_shard(host_indexes=[0])}, optimizer="dense")
    assert "within a host" in compress_communication(grid).left["tables.grid_shard"]
    model = sharded(plan, optimizer="dense")
    report = compress_communication(model)
    assert list(report.compressed) == ["tables.table_wise"]
    assert "no rows are sent" in report.left["tables.data_parallel"]
    assert "within a host" in report.left["tables.table_row_wise"]
    assert "left alone:" in str(report) and report.as_dict()["left"] == report.left
    assert str(CommunicationReport()) == "no sharded collections"


def what_is_refused() -> None:
    model = sharded(PLANS["table_wise"])
    before = list(model.module["tables"]._output_dists)
    assert "codec: 'zip'" in refusal(lambda: compress_communication(model, codec="zip"))
    assert "backward" in refusal(compress_communication, model, None, "fp16")
    assert "row_ids: expected a bool" in refusal(
        lambda: compress_communication(model, row_ids=1)  # type: ignore[arg-type]
    )
    assert "error_feedback: given with backward='lossless'" in refusal(
        lambda: compress_communication(model, error_feedback=10)
    )
    assert "with codec='raw'" in refusal(
        lambda: compress_communication(model, backward=0.1, error_feedback=10, codec="raw")
    )
    assert "error_bound: -1" in refusal(compress_communication, model, -1.0)
    assert "error_bound" in refusal(compress_communication, model, {"t1": float("nan")})
    comm_ops.set_use_sync_collectives(True)
    try:
        assert "set_use_sync_collectives(False)" in refusal(compress_communication, model)
    finally:
        comm_ops.set_use_sync_collectives(False)
    registry = get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16))
    other = sharded(PLANS["table_wise"], registry=registry)
    assert "without qcomm_codecs_registry" in refusal(compress_communication, other)
    inner = model.module["tables"]
    inner._compiled_call_impl = lambda *args: None
    try:
        assert "compile the dense part alone" in refusal(compress_communication, model)
    finally:
        inner._compiled_call_impl = None
    assert "with codec='raw'" in refusal(lambda: compress_communication(model, 0.1, codec="raw"))
    with mock.patch.object(CompressedDist, "watch", side_effect=KeyboardInterrupt):
        try:
            compress_communication(model)
        except KeyboardInterrupt:
            pass
    assert before == list(inner._output_dists)
    compress_communication(model)
    comm_ops.set_use_sync_collectives(True)
    try:
        assert "restore_communication" in refusal(looked_up, model, features_of(0))
    finally:
        comm_ops.set_use_sync_collectives(False)


def a_resumed_run_goes_on_with_its_bounds() -> None:
    bound = ErrorBound(0.01, "absolute", schedule=stepwise(4, start=20.0, steps=4))
    pair = Pair("table_wise", bound)
    errors = []
    for _ in range(3):
        features = features_of(0)
        outs = [looked_up(m, features) for m in (pair.plain, pair.compressed)]
        errors.append(float((outs[0] - outs[1]).detach().abs().max()))
    limits = [0.2, 0.1525, 0.105]
    assert all(
        after < e <= now + 1e-9
        for e, now, after in zip(errors, limits, [0.1525, 0.1, 0.05], strict=True)
    ), errors
    state = pair.report.state_dict()
    other = Pair("table_wise", bound)
    other.report.load_state_dict(copy.deepcopy(state))
    assert other.report.state_dict() == state
    try:
        other.report.load_state_dict({"x": {}})
    except CorruptedDataError as error:
        assert "state: of x" in str(error)
    else:
        raise AssertionError
    first = next(iter(state))
    try:
        other.report.load_state_dict({**state, first: {"version": 9}})
    except CorruptedDataError:
        assert other.report.state_dict() == state
    else:
        raise AssertionError


def pipelines_train_alike() -> None:
    """TrainPipelineSparseDist looks up the next batch while this one trains."""
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = EmbeddingBagCollection(tables=bag_configs())
            self.dense = torch.nn.Linear(88, 1)

        def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss = (self.dense(self.tables(features).values()) - 1).square().mean()
            return loss, loss.detach()

    losses = []
    for compressed in (False, True):
        torch.manual_seed(0)
        model = Model()
        sharder = EmbeddingBagCollectionSharder(fused_params=OPTIMIZERS["sgd"][0])
        part = construct_module_sharding_plan(
            model.tables,
            PLANS["mixed"],
            sharder,
            local_size=2,
            world_size=2,
            device_type=device().type,
        )
        made = DistributedModelParallel(
            model, plan=ShardingPlan({"tables": part}), sharders=[sharder], device=device()
        )
        for value in made.state_dict().values():
            for shard in getattr(value, "local_shards", list)():
                drawn = torch.empty(shard.tensor.shape)
                torch.nn.init.uniform_(drawn, generator=torch.Generator().manual_seed(3))
                shard.tensor.copy_(drawn)
        if compressed:
            compress(made)
        optimizer = torch.optim.SGD([made.module.dense.weight], lr=0.01)
        pipeline: Any = TrainPipelineSparseDist(made, optimizer, device())
        source = iter([features_of(seed) for seed in range(4)])
        losses.append([float(pipeline.progress(source)) for _ in range(4)])
    assert losses[0][0] == losses[1][0]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]))


SEQUENCES = {"sequences": True}
CHECKS: dict[str, tuple[Callable[..., None], Sequence[Any]]] = {}


def check(name: str, function: Callable[..., None], *arguments: Any, **options: Any) -> None:
    def called(*given: Any) -> None:
        function(*given, **options)

    CHECKS[name] = called, arguments


for _plan in ("table_wise", "one_rank", "column_wise", "row_wise", "mixed"):
    # Plans and kernels do not meet in what exchanges rows: each is here once, all pairs in full.
    for _optimizer in ("sgd", "dense") if FULL or _plan == "mixed" else ("sgd",):
        check(f"every_bit-{_plan}-{_optimizer}", every_bit, _plan, _optimizer)
check("every_bit-rowwise_adagrad", every_bit, "mixed", "rowwise")
check("every_bit-uneven-table_wise", every_bit, "table_wise", uneven=2)
check("every_bit-uneven-column_wise", every_bit, "column_wise", uneven=3)
for _plan in ("table_wise", "row_wise", "columns", "one_rank"):
    check(f"sequences-{_plan}", every_bit, _plan, sequences=True, uneven=2)
    if FULL or _plan == "columns":
        check(f"sequences-even-{_plan}", every_bit, _plan, sequences=True)
for _plan in ("table_wise", "column_wise") if FULL else ("column_wise",):
    check(f"bit_equal-bags-{_plan}", losses_are_bit_equal_where_no_sums_are_merged, _plan)
for _plan in ("table_wise", "column_wise", "row_wise", "mixed") if FULL else ("mixed",):
    check(f"bit_equal-ids-{_plan}", bit_equal_without_sums, _plan)
for _plan in ("table_wise", "column_wise", "row_wise"):
    check(f"by_feature-{_plan}", batches_that_differ_by_feature, _plan)
    check(f"bounded-{_plan}", bounded, _plan, ErrorBound(0.25, "absolute"), 0.25)
    check(f"relative-{_plan}", bounded, _plan, 0.02, 0.02 * 10)
for _plan in ("table_wise", "row_wise", "columns", "one_rank"):
    check(f"bounds-sequences-{_plan}", a_bound_for_each_table_of_sequences, _plan)
check("bounded-sequences", bounded, "table_wise", ErrorBound(0.25, "absolute"), 0.25, **SEQUENCES)
for _name in torchrec_suite.SUITE if FULL else torchrec_suite.FEW:
    check(f"suite-{_name}", torchrec_suite.check, _name)
for _plan, _options in (("table_wise", {}), ("columns", SEQUENCES)):
    check(f"by_function-{_plan}", all_messages_by_the_function, _plan, **_options)
for _plan, _options in (
    ("table_wise", {}),
    ("row_wise", {}),
    ("column_wise", {}),
    ("table_wise", SEQUENCES),
):
    _name = f"feedback-{_plan}{'-sequences' * bool(_options)}"
    check(_name, what_rounding_took_is_added_the_next_time, _plan, **_options)
check("as_on_a_gpu-feedback", as_on_a_gpu, what_rounding_took_is_added_the_next_time, "table_wise")
for _function in (repeated_rows_cross_once, rows_of_others_cost_nothing_row_wise):
    check(f"as_on_a_gpu-{_function.__name__}", as_on_a_gpu, _function)
check("as_on_a_gpu-no_ids", as_on_a_gpu, ids_are_not_made_where_all_rows_cross)
check("as_on_a_gpu-no_feedback", as_on_a_gpu, feedback_costs_nothing_where_nothing_is_rounded)
check("as_on_a_gpu-every_bit", as_on_a_gpu, every_bit, "mixed")
check("as_on_a_gpu-sequences", as_on_a_gpu, every_bit, "columns", sequences=True, uneven=2)
for _function in (
    repeated_rows_cross_once,
    rows_of_others_cost_nothing_row_wise,
    a_bound_for_each_table,
    classes_of_tables_are_found,
    gradients_are_rounded_on_request,
    raw_exchanges_are_plain,
    uneven_row_wise,
    weights_of_bags_are_kept,
    frozen_and_without_gradients,
    gradients_are_divided_as_torchrec_says,
    it_is_undone,
    later_than_the_first_step,
    what_cannot_be_compressed_is_left,
    what_is_refused,
    a_resumed_run_goes_on_with_its_bounds,
    ranks_go_on_while_rows_are_under_way,
    pipelines_train_alike,
):
    check(_function.__name__, _function)
for _options in ({}, SEQUENCES):
    _name = f"no_memory_for_ids{'-sequences' * bool(_options)}"
    _given = a_rank_that_cannot_make_ids_keeps_nobody_waiting, bool(_options)
    check(_name, *_given)
    check(f"as_on_a_gpu-{_name}", as_on_a_gpu, *_given)
# The last ones: see test_gpu_communication.py.
check("inference", looked_up_in_inference_mode, "mixed")
check("as_on_a_gpu-inference", as_on_a_gpu, looked_up_in_inference_mode, "mixed")


def run(rank: int, folder: str, outcomes: Any, backend: str = "gloo") -> None:
    """Run all checks on one rank."""
    ranks.run_checks(CHECKS, rank, folder, outcomes, backend)
