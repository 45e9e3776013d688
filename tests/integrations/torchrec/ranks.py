"""What two ranks check of sharded tables, in one process group: each check is a test.

Every rank calls all checks in the same order, as they talk to each other.
"""

from __future__ import annotations

import copy
import faulthandler
import multiprocessing
import os
import queue
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from bitslab import ArgumentError, IndexRangeError
from bitslab.integrations.torchrec import (
    CompressedEmbeddingBagCollectionSharder,
    CompressedEmbeddingCollectionSharder,
    packed_plan,
)
from bitslab.integrations.torchrec.fused import RowWiseAdagrad
from tests.integrations.torchrec.batches import bag_configs, batch, configs, joined, same_state

WORLD = 2
STEPS = 3
TIMEOUT = timedelta(seconds=60)
TIMEOUT_SECONDS = 120
#: Of what a process that ended by itself wrote last.
STDERR_CHARACTERS = 6_000
CPU = torch.device("cpu")
LR = {"learning_rate": 0.1}
#: Arguments of the sharder, and the optimizer of an unsharded model that does the same.
OPTIMIZERS: dict[str, tuple[dict[str, Any] | None, Callable[..., Any]]] = {
    "dense": (None, lambda p: torch.optim.SGD(p, lr=0.1)),
    "sgd": ({"optimizer": EmbOptimType.EXACT_SGD, **LR}, lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (
        {"optimizer": EmbOptimType.EXACT_ADAGRAD, **LR},
        lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8),
    ),
    "rowwise": (
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, **LR},
        lambda p: RowWiseAdagrad(p, lr=0.1),
    ),
}
OPTIONS: dict[str, Any] = {"cache_ratio": 0.1}


class Pair:
    """An unsharded model, and the same with packed tables on all ranks."""

    def __init__(
        self, optimizer: str, sharding: Any, *, sequences: bool = False, make: Any = None
    ) -> None:
        fused_params, factory = OPTIMIZERS[optimizer]
        torch.manual_seed(0)
        if sequences:
            inner = EmbeddingCollection(tables=configs(), need_indices=True)
            self.sharder: Any = CompressedEmbeddingCollectionSharder(fused_params, **OPTIONS)
        else:
            inner = EmbeddingBagCollection(tables=(make or bag_configs)())
            self.sharder = CompressedEmbeddingBagCollectionSharder(fused_params, **OPTIONS)
        self.plain = torch.nn.ModuleDict({"tables": inner})
        model = copy.deepcopy(self.plain)
        self.plan = packed_plan(model, [self.sharder], sharding, device_type="cpu")
        self.packed = DistributedModelParallel(
            model, plan=self.plan, sharders=[self.sharder], device=CPU
        )
        self.optimizers = [factory(self.plain.parameters())]
        if fused_params is None:
            self.optimizers.append(factory(self.packed.parameters()))

    def step(self, seed: int, **drawn: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Train both with one batch of all ranks; return this rank's outputs in pairs."""
        rank = dist.get_rank()
        parts = [batch(WORLD * seed + r, bags=5, **drawn) for r in range(WORLD)]
        mine, whole = tensors_of(self.packed, parts[rank]), tensors_of(self.plain, joined(parts))
        pairs = []
        total = torch.zeros(())
        local = torch.zeros(())
        for number, (a, b) in enumerate(zip(whole, mine, strict=True)):
            grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(number))
            shares = [tensors_of(self.plain, part)[number].shape[0] for part in parts]
            begin = sum(shares[:rank])
            here = slice(begin, begin + shares[rank])
            pairs.append((a[here].detach(), b.detach()))
            # TorchRec averages gradients over ranks.
            total = total + (a * grad).sum() / WORLD
            local = local + (b * grad[here]).sum()
        total.backward()
        local.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return pairs

    def gathered(self) -> dict[str, torch.Tensor]:
        """Return the whole tables, on all ranks."""
        return {key: gather(value) for key, value in self.packed.state_dict().items()}


def tensors_of(model: Any, features: KeyedJaggedTensor) -> list[torch.Tensor]:
    """Return what a model gives for each feature; sharding changes the order."""
    inner = model["tables"] if isinstance(model, torch.nn.ModuleDict) else model.module["tables"]
    out = inner(features)
    if hasattr(out, "wait"):
        out = out.wait()
    if isinstance(out, dict):
        return [value.values() for value in out.values()]
    return [out[key] for key in sorted(out.keys())]


def device() -> torch.device:
    """Return where this rank has its tables and batches."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else CPU


def gather(value: Any) -> torch.Tensor:
    """Return a whole sharded table, on all ranks and on their CPUs."""
    whole = torch.zeros(value.size(), dtype=value.dtype, device=device())
    value.gather(0, whole if dist.get_rank() == 0 else None)
    dist.broadcast(whole, 0)
    return whole.cpu()


def unmodified(pair: Pair, optimizer: str) -> DistributedModelParallel:
    """Return TorchRec's own sharded model with the same plan and weights."""
    fused_params, _ = OPTIMIZERS[optimizer]
    plan = copy.deepcopy(pair.plan)
    for sharding in plan.plan["tables"].values():
        sharding.compute_kernel = "dense" if fused_params is None else "fused"
    model = copy.deepcopy(pair.plain)
    bags = isinstance(model["tables"], EmbeddingBagCollection)
    kind = EmbeddingBagCollectionSharder if bags else EmbeddingCollectionSharder
    made = DistributedModelParallel(
        model, plan=plan, sharders=[kind(fused_params=fused_params)], device=CPU
    )
    made.load_state_dict(copy.deepcopy(pair.plain.state_dict()))
    return made


# Checks


def table_wise(optimizer: str, sequences: bool = False) -> None:
    """Bit for bit what the unsharded model gives and learns."""
    pair = Pair(optimizer, "table_wise", sequences=sequences)
    for seed in range(STEPS):
        assert all(torch.equal(a, b) for a, b in pair.step(seed, most=5))
    assert same_state(pair.plain, pair.gathered())


def sums() -> list[EmbeddingBagConfig]:
    return bag_configs(pooling=PoolingType.SUM)


def means() -> list[EmbeddingBagConfig]:
    return bag_configs(pooling=PoolingType.MEAN)


def row_wise(optimizer: str, sequences: bool = False) -> None:
    """Bit for bit where bags hold one value: no sum is rounded in another order."""
    pair = Pair(optimizer, "row_wise", sequences=sequences, make=sums)
    for seed in range(STEPS):
        assert all(torch.equal(a, b) for a, b in pair.step(seed, least=1, most=1))
    assert same_state(pair.plain, pair.gathered())


def row_wise_bags(optimizer: str, make: Callable[[], Any]) -> None:
    """Bags are summed rank by rank, so the last bits differ."""
    pair = Pair(optimizer, "row_wise", make=make)
    for seed in range(STEPS):
        for a, b in pair.step(seed):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    found = pair.gathered()
    for key, value in pair.plain.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


def as_torchrec_shards(optimizer: str, sharding: str) -> None:
    """TorchRec's own kernels round otherwise; state dicts and their keys are the same."""
    pair = Pair(optimizer, sharding)
    theirs = unmodified(pair, optimizer)
    fused_params, factory = OPTIMIZERS[optimizer]
    dense = [] if fused_params else [factory(m.parameters()) for m in (theirs, pair.packed)]
    for seed in range(STEPS):
        features = batch(WORLD * seed + dist.get_rank(), bags=5)
        for model in (theirs, pair.packed):
            outs = tensors_of(model, features)
            weighed = [o * torch.linspace(-1, 1, o.numel()).view(o.shape) for o in outs]
            torch.cat(weighed, 1).sum().backward()
        for o in dense:
            o.step()
            o.zero_grad()
    states = [model.state_dict() for model in (theirs, pair.packed)]
    assert list(states[0]) == list(states[1])
    for key in states[0]:
        x, y = (state[key] for state in states)
        assert x.metadata().shards_metadata == y.metadata().shards_metadata
        assert x.metadata().tensor_properties.dtype == y.metadata().tensor_properties.dtype
        torch.testing.assert_close(gather(y), gather(x), rtol=1e-5, atol=1e-6)
    states = [model.fused_optimizer.state_dict()["state"] for model in (theirs, pair.packed)]
    assert states[0].keys() == states[1].keys()
    for key in states[0]:
        assert states[0][key].keys() == states[1][key].keys(), (states[0][key], states[1][key])
    theirs.load_state_dict(pair.packed.state_dict())
    for key, value in theirs.state_dict().items():
        assert torch.equal(gather(value), pair.gathered()[key])


def state_goes_to_unsharded_models_and_back(sharding: Any) -> None:
    pair = Pair("sgd", sharding)
    for seed in range(STEPS):
        pair.step(seed)
    whole = pair.gathered()
    alone = EmbeddingBagCollection(tables=bag_configs())
    alone.load_state_dict({k.removeprefix("tables."): v for k, v in whole.items()})
    other = Pair("sgd", sharding)
    assert not same_state(whole, other.gathered())
    assert not any(other.packed.load_state_dict(copy.copy(whole)))
    assert same_state(whole, other.gathered())
    again = Pair("sgd", sharding)
    assert not any(again.packed.load_state_dict(pair.packed.state_dict()))
    assert same_state(whole, again.gathered())
    # Both go on alike.
    features = batch(dist.get_rank(), bags=5)
    outs = [torch.cat(tensors_of(model.packed, features), 1) for model in (again, other)]
    assert torch.equal(*outs)


def state_that_does_not_fit_is_refused() -> None:
    pair = Pair("sgd", {"t1": "row_wise", "t2": 0, "t3": 1})
    before = pair.gathered()
    wrong = {**before, "tables.embedding_bags.t1.weight": torch.zeros(500, 8)}
    assert "t1.weight: size mismatch" in refusal(pair.packed.load_state_dict, wrong)
    other = Pair("sgd", {"t1": 0, "t2": 0, "t3": 1}).packed.state_dict()
    assert "t1.weight: is sharded otherwise" in refusal(pair.packed.load_state_dict, other)
    missing = {k: v for k, v in before.items() if "t3" not in k}
    assert "t3.weight" in refusal(pair.packed.load_state_dict, missing)
    assert same_state(before, pair.gathered())


def refusal(function: Callable[..., Any], *arguments: Any) -> str:
    """Return the message of the error that a call raises."""
    try:
        function(*arguments)
    except Exception as error:
        return str(error)
    raise AssertionError("was accepted")


def optimizers_go_on_from_checkpoints(optimizer: str, sharding: str) -> None:
    pair = Pair(optimizer, sharding)
    for seed in range(STEPS):
        pair.step(seed)
    other = Pair(optimizer, sharding)
    other.packed.load_state_dict(pair.packed.state_dict())
    other.packed.fused_optimizer.load_state_dict(pair.packed.fused_optimizer.state_dict())
    for model in (pair, other):
        model.step(7)
    assert same_state(pair.gathered(), other.gathered())


def learning_rates_are_those_of_the_fused_optimizer() -> None:
    pair = Pair("sgd", "table_wise")
    for group in pair.packed.fused_optimizer.param_groups:
        group["lr"] = 0.5
    pair.optimizers = [torch.optim.SGD(pair.plain.parameters(), lr=0.5)]
    for seed in range(2):
        pair.step(seed)
    assert same_state(pair.plain, pair.gathered())


def some_tables_are_torchrecs() -> None:
    pair = Pair("sgd", {"t1": 0, "t2": 1, "t3": 0})
    theirs = unmodified(pair, "sgd")
    plan = copy.deepcopy(pair.plan)
    plan.plan["tables"]["t1"].compute_kernel = "fused"
    mixed = DistributedModelParallel(
        copy.deepcopy(pair.plain), plan=plan, sharders=[pair.sharder], device=CPU
    )
    mixed.load_state_dict(pair.plain.state_dict())
    features = batch(dist.get_rank(), bags=5)
    outs = tensors_of(mixed, features)
    for a, b in zip(tensors_of(theirs, features), outs, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    torch.cat(outs, 1).sum().backward()
    assert list(mixed.state_dict()) == list(theirs.state_dict())


def a_whole_model_trains() -> None:
    """Dense layers are replicated by DDP, which leaves packed tables alone."""
    fused_params, _ = OPTIMIZERS["sgd"]
    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = EmbeddingBagCollection(tables=bag_configs())
            self.dense = torch.nn.Linear(88, 1)

        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            out: torch.Tensor = self.dense(self.tables(features).values())
            return out

    model = Model()
    sharder = CompressedEmbeddingBagCollectionSharder(fused_params, **OPTIONS)
    plan = packed_plan(model, [sharder], "row_wise", device_type="cpu")
    packed = DistributedModelParallel(model, plan=plan, sharders=[sharder], device=CPU)
    names = dict(in_backward_optimizer_filter(packed.named_parameters()))
    assert set(names) == {"dense.weight", "dense.bias"}
    optimizer = KeyedOptimizerWrapper(names, lambda p: torch.optim.SGD(p, lr=0.01))
    before = {key: gather(v) for key, v in packed.state_dict().items() if "tables" in key}
    losses = []
    for _ in range(4):
        loss = (packed(batch(dist.get_rank(), bags=5)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    state = packed.state_dict()
    assert all(not torch.equal(gather(state[key]), value) for key, value in before.items())


def optimizers_applied_in_backward_are_followed() -> None:
    # Here, because its import warns of torch.jit.
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

    torch.manual_seed(0)
    plain = torch.nn.ModuleDict({"tables": EmbeddingBagCollection(tables=bag_configs())})
    model = copy.deepcopy(plain)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    sharder = CompressedEmbeddingBagCollectionSharder(**OPTIONS)
    plan = packed_plan(model, [sharder], device_type="cpu")
    packed = DistributedModelParallel(model, plan=plan, sharders=[sharder], device=CPU)
    pair = Pair("sgd", "table_wise")
    pair.packed = packed
    for seed in range(2):
        pair.step(seed)
    assert same_state(pair.plain, pair.gathered())


def tables_on_the_meta_device_are_filled() -> None:
    tables = bag_configs(weight_init_min=0.25, weight_init_max=0.5)
    model = torch.nn.ModuleDict(
        {"tables": EmbeddingBagCollection(tables=tables, device=torch.device("meta"))}
    )
    sharder = CompressedEmbeddingBagCollectionSharder(**OPTIONS)
    plan = packed_plan(model, [sharder], {"t1": "row_wise"}, device_type="cpu")
    packed = DistributedModelParallel(model, plan=plan, sharders=[sharder], device=CPU)
    for value in packed.state_dict().values():
        whole = gather(value)
        assert 0.25 <= whole.min()
        assert whole.max() < 0.5
        # Ranks may draw the same numbers.
        assert whole.unique().numel() > 0.4 * whole.numel()


def shards_without_rows_are_fine() -> None:
    """Row-wise, a table of one row leaves the other rank none."""

    def make():
        return [
            EmbeddingBagConfig(
                name="t", num_embeddings=1, embedding_dim=8, feature_names=["unused"]
            )
        ]

    pair = Pair("sgd", "row_wise", make=make)
    features = KeyedJaggedTensor(["unused"], torch.zeros(3).long(), lengths=torch.tensor([1, 2, 0]))
    (a,), (b,) = tensors_of(pair.plain, features), tensors_of(pair.packed, features)
    torch.testing.assert_close(b, a)
    b.sum().backward()
    assert pair.gathered()["tables.embedding_bags.t.weight"].shape == (1, 8)


def evaluation_reaches_the_kernels() -> None:
    pair = Pair("sgd", "table_wise")
    pair.step(0)
    pair.packed.eval()
    kernels = [k for lookup in pair.packed.module["tables"]._lookups for k in lookup._emb_modules]
    assert not any(kernel.tables.training for kernel in kernels)
    for kernel in kernels:
        kernel.flush()
    with torch.no_grad():
        tensors_of(pair.packed, batch(3, bags=5))
    written = [kernel.tables.stats()["written_back"] for kernel in kernels]
    pair.packed.train()
    assert all(kernel.tables.training for kernel in kernels)
    assert written == [kernel.tables.stats()["written_back"] for kernel in kernels]
    stats = pair.packed.module["tables"].stats()
    assert all(facts["raw_bytes"] for facts in stats.values())
    names = [list(s) for s in gathered_objects(list(stats))]
    assert sorted(name for part in names for name in part) == ["t1", "t2", "t3"]


def gathered_objects(value: Any) -> list[Any]:
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, value)
    return found


def plans_that_are_not_supported_are_refused() -> None:
    model = torch.nn.ModuleDict({"tables": EmbeddingBagCollection(tables=bag_configs())})
    sharder = CompressedEmbeddingBagCollectionSharder(**OPTIONS)
    assert "'sideways'" in refusal(packed_plan, model, [sharder], "sideways")
    assert "ranks 0 to 1" in refusal(packed_plan, model, [sharder], {"t1": 2})
    assert "no table 't9'" in refusal(packed_plan, model, [sharder], {"t9": 0})
    assert "sharders" in refusal(packed_plan, model, [EmbeddingBagCollectionSharder()])
    assert "no collection" in refusal(packed_plan, torch.nn.Linear(2, 2), [sharder])
    plan = packed_plan(model, [sharder], device_type="cpu")
    plan.plan["tables"]["t1"].sharding_type = "column_wise"

    def shard(sharder: Any = sharder) -> None:
        DistributedModelParallel(copy.deepcopy(model), plan=plan, sharders=[sharder], device=CPU)

    assert "'t1' is packed and column_wise" in refusal(shard)
    plan = packed_plan(model, [sharder], device_type="cpu")
    for fused_params, text in [
        ({"optimizer": EmbOptimType.ADAM}, "EXACT_ADAGRAD"),
        ({"optimizer": EmbOptimType.EXACT_SGD, "weight_decay": 0.1}, "weight_decay=0.1"),
    ]:
        other = CompressedEmbeddingBagCollectionSharder(fused_params, **OPTIONS)
        assert text in refusal(shard, other)


def bad_values_are_refused_where_they_arrive() -> None:
    pair = Pair("sgd", {"t1": 0, "t2": 0, "t3": 0})
    tables = pair.packed.module["tables"]
    if dist.get_rank() == 0:
        (lookup,) = tables._lookups
        (kernel,) = [k for k in lookup._emb_modules if k.config.table_names() == ["t2"]]
        features = KeyedJaggedTensor(["c"], torch.tensor([300]), lengths=torch.tensor([1]))
        for error, made in [
            (IndexRangeError, features),
            (
                ArgumentError,
                KeyedJaggedTensor(
                    ["c"],
                    torch.tensor([1]),
                    lengths=torch.tensor([1]),
                    stride_per_key_per_rank=[[1]],
                ),
            ),
        ]:
            try:
                kernel(made)
            except error:
                continue
            raise AssertionError(f"no {error}")


CHECKS: dict[str, tuple[Callable[..., None], Sequence[Any]]] = {
    **{f"table_wise-{name}": (table_wise, (name,)) for name in OPTIMIZERS},
    **{f"row_wise-{name}": (row_wise, (name,)) for name in OPTIMIZERS},
    "row_wise-sums": (row_wise_bags, ("dense", sums)),
    "row_wise-means": (row_wise_bags, ("sgd", means)),
    "sequences-table_wise": (table_wise, ("adagrad", True)),
    "sequences-row_wise": (row_wise, ("dense", True)),
    "shards-table_wise-rowwise": (as_torchrec_shards, ("rowwise", "table_wise")),
    "shards-row_wise-adagrad": (as_torchrec_shards, ("adagrad", "row_wise")),
    "shards-row_wise-dense": (as_torchrec_shards, ("dense", "row_wise")),
    "state-table_wise": (state_goes_to_unsharded_models_and_back, ("table_wise",)),
    "state-row_wise": (state_goes_to_unsharded_models_and_back, ("row_wise",)),
    "state-mixed": (state_goes_to_unsharded_models_and_back, ({"t1": "row_wise", "t2": 1},)),
    "checkpoint-adagrad": (optimizers_go_on_from_checkpoints, ("adagrad", "row_wise")),
    "checkpoint-rowwise": (optimizers_go_on_from_checkpoints, ("rowwise", "table_wise")),
    **{
        check.__name__: (check, ())
        for check in (
            state_that_does_not_fit_is_refused,
            learning_rates_are_those_of_the_fused_optimizer,
            some_tables_are_torchrecs,
            a_whole_model_trains,
            optimizers_applied_in_backward_are_followed,
            tables_on_the_meta_device_are_filled,
            shards_without_rows_are_fine,
            evaluation_reaches_the_kernels,
            plans_that_are_not_supported_are_refused,
            bad_values_are_refused_where_they_arrive,
        )
    },
}


def run(rank: int, folder: str, outcomes: Any) -> None:
    """Run all checks on one rank."""
    run_checks(CHECKS, rank, folder, outcomes)


def run_checks(
    checks: dict[str, tuple[Callable[..., None], Sequence[Any]]],
    rank: int,
    folder: str,
    outcomes: Any,
    backend: str = "gloo",
) -> None:
    """Run checks on one rank, up to the first that fails; put what each raised, or nothing."""
    with _stderr_of(rank, folder).open("wb") as file:
        os.dup2(file.fileno(), 2)  # what C++ says before it ends a process
    faulthandler.enable(2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(Path(folder, "store")), WORLD)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=TIMEOUT)
    for name, (check, arguments) in checks.items():
        try:
            check(*arguments)
        except Exception:
            # The other rank waits for this one in vain from here on; it sees its end.
            outcomes.put((name, rank, traceback.format_exc()))
            return
        outcomes.put((name, rank, ""))
    dist.destroy_process_group()


def outcomes_of(
    module: Any, folder: str, *given: Any, timeout_s: float = TIMEOUT_SECONDS
) -> dict[str, dict[int, str]]:
    """Run the checks of a module on both ranks; return what each raised, by rank.

    `given` are further arguments of the module's `run`.
    """
    # Both ranks begin in forks of one process that has imported TorchRec, and loaded the codecs.
    context = multiprocessing.get_context("forkserver")
    # Not those that use a GPU: FBGEMM looks for GPUs as it is imported, and CUDA does not start in
    # a fork of a process that has.
    modules = [__name__, module.__name__, "torch._dynamo", "tests.distributed.warm"]
    context.set_forkserver_preload([] if "nccl" in given else modules)
    found: dict[str, dict[int, str]] = {name: {} for name in module.CHECKS}
    results = context.Queue()
    ended: list[int | None] = []
    workers = [
        context.Process(target=module.run, args=(rank, folder, results, *given), daemon=True)
        for rank in range(WORLD)
    ]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            alive = any(worker.is_alive() for worker in workers)
            try:
                name, rank, failure = results.get(timeout=0.2)
                found[name][rank] = failure
            except queue.Empty:
                if not alive:
                    break
        for worker in workers:
            if worker.is_alive() and worker.pid:
                os.kill(worker.pid, signal.SIGABRT)  # it says where its threads are
                worker.join(10)
        ended = [worker.exitcode for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    for rank, code in enumerate(ended):
        reached = [name for name, outcomes in found.items() if rank not in outcomes]
        if reached and code:  # a failed check ends a process with 0
            last = _stderr_of(rank, folder).read_text(errors="replace")[-STDERR_CHARACTERS:]
            found[reached[0]][rank] = f"the process ended with exit code {code}:\n{last}"
    return found


def _stderr_of(rank: int, folder: str) -> Path:
    return Path(folder, f"stderr{rank}")


def check_outcome(outcomes: dict[str, dict[int, str]], name: str) -> None:
    """Fail with what the ranks raised in a check."""
    failures = [f"rank {rank}:\n{text}" for rank, text in outcomes[name].items() if text]
    assert not failures, "\n".join(failures)
    assert len(outcomes[name]) == WORLD, "was not reached: see the check before"
