"""compress_embeddings puts cached modules into a model and says what it did and did not do."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, prune

from bitslab import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.embedding import EvictionStrategy
from bitslab.integrations.embedding import (
    CachedEmbedding,
    CachedEmbeddingBag,
    TablesReport,
    compress_embeddings,
    restore_embeddings,
)
from tests.helpers import random_bits
from tests.integrations.embedding.support import D, N, assert_same, batches, lookup, loss_of, table

SMALL: dict[str, Any] = {"min_rows": 20, "cache_ratio": 0.3}


class Model(torch.nn.Module):
    """Embeddings in every place that a model keeps modules in."""

    # What stands in these places changes.
    bag: Any
    items: Any
    more: Any
    again: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = torch.nn.EmbeddingBag(N, D, mode="sum", padding_idx=3)
        self.items = torch.nn.ModuleList([torch.nn.Embedding(N, D), torch.nn.Embedding(10, D)])
        self.more = torch.nn.ModuleDict({"seq": torch.nn.Sequential(torch.nn.Embedding(N, D))})
        self.again = self.items[0]
        self.top = torch.nn.Linear(D, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = lookup(self.bag, ids).sum(0) + self.items[0](ids).sum(0) + self.again(ids[:2]).sum(0)
        out = out + self.more["seq"](ids[1:]).sum(0) + self.items[1](ids % 10).sum(0)
        found: torch.Tensor = self.top(out)
        return found


def steps(model: torch.nn.Module, count: int = 6) -> list[torch.Tensor]:
    optimizer = torch.optim.Adagrad(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=False
    )
    losses = []
    for ids in batches(count):
        optimizer.zero_grad()
        loss = loss_of(model(ids))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    optimizer.zero_grad()
    return losses


def test_a_model_trains_as_before_and_is_what_it_was_when_restored():
    plain, ours = Model(), Model()
    report = compress_embeddings(ours, **SMALL)
    assert sorted(report.compressed) == ["bag", "items.0", "more.seq.0"]
    assert report.left == {"items.1": "has 10 rows, fewer than min_rows=20"}
    assert type(ours.bag) is CachedEmbeddingBag and type(ours.again) is CachedEmbedding
    assert ours.again is ours.items[0]
    assert not any(isinstance(m, torch.nn.EmbeddingBag) for m in ours.modules())
    for a, b in zip(steps(ours), steps(plain), strict=True):
        assert_same(a, b)
    state = ours.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert_same(state[name], value, name)
    assert restore_embeddings(ours) is ours
    assert repr(ours) == repr(plain) and ours.again is ours.items[0]
    for a, b in zip(steps(ours), steps(plain), strict=True):
        assert_same(a, b)
    assert restore_embeddings(ours) is ours  # nothing is left to do


def test_the_report_is_for_people_and_for_machines():
    model = Model()
    model.bag.weight.data = random_bits(torch.float32, (N, D))
    report = compress_embeddings(model, **SMALL)
    text = str(report)
    for words in ("table", "ratio", "bag", "more.seq.0", "all", "left alone:", "items.1: has 10"):
        assert words in text
    assert "kept raw: packing would not make this table smaller" in text
    facts = json.loads(json.dumps(report.as_dict()))
    assert facts["compressed"]["bag"]["cache_rows"] == report.compressed["bag"]["cache_rows"]
    assert facts["raw_bytes"] == 3 * N * D * 4 and facts["left"] == report.left
    assert str(compress_embeddings(torch.nn.Linear(2, 2))) == "no embedding tables"
    assert TablesReport().as_dict()["compressed"] == {}


def test_a_ratio_of_less_than_a_row_is_noted():
    model: Any = torch.nn.Sequential(torch.nn.Embedding(N, D))
    report = compress_embeddings(model, min_rows=1)
    assert report.compressed["0"]["cache_rows"] == 1
    assert "less than one row" in str(report)


def test_tables_that_pack_are_smaller_and_are_freed():
    model: Any = torch.nn.Sequential(torch.nn.Embedding(30_000, 16), torch.nn.Embedding(30_000, 16))
    model[1].weight.data.uniform_(-0.01, 0.01)
    gone = [weakref.ref(m) for m in model] + [weakref.ref(m.weight) for m in model]
    report = compress_embeddings(model)
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4
    assert report.compressed["1"]["ratio"] > 1.03
    assert report.host_bytes < report.raw_bytes
    rows = weakref.ref(model[1].rows)
    restore_embeddings(model)
    gc.collect()
    assert rows() is None


def test_the_weight_of_one_table_is_gone_before_the_next_is_packed():
    model: Any = torch.nn.Sequential(*(torch.nn.Embedding(N, D) for _ in range(3)))
    refs = [weakref.ref(m) for m in model]
    alive = []
    real = torch.nn.Module.train

    def seen(self: Any, mode: bool = True) -> Any:
        if isinstance(self, CachedEmbedding):
            gc.collect()
            alive.append(sum(ref() is not None for ref in refs))
        return real(self, mode)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CachedEmbedding, "train", seen)
        compress_embeddings(model, min_rows=1)
    assert alive == [3, 2, 1]


def test_options_reach_every_table():
    model = Model()
    compress_embeddings(
        model,
        min_rows=20,
        cache_ratio=0.5,
        evict_strategy=EvictionStrategy.LRU,
        codec="raw",
        layout="inplace",
        buffer_size=4,
        warmup_ratio=0.0,
        pin_weight=False,
    )
    for module in (model.bag, model.items[0]):
        assert module.rows.slot_table.evict is EvictionStrategy.LRU
        assert module.evict_strategy is EvictionStrategy.LRU
        assert module.rows.table.layout == "inplace" and module.rows.buffer_rows == 4
        assert module.stats()["codec"] == "raw" and module.rows.cache_rows - N // 2 in (0, 1)
    model = Model()
    report = compress_embeddings(model, min_rows=20, cache="packed", device="cpu")
    assert model.bag.rows.cache == "packed"
    assert report.compressed["bag"]["cache_rows"] == 1


def test_mode_dtype_and_gradients_are_kept():
    model = Model().to(torch.bfloat16).eval()
    model.bag.weight.requires_grad_(False)
    model.items[0].train()
    compress_embeddings(model, **SMALL)
    assert model.bag.rows.dtype == torch.bfloat16
    assert not model.bag.training and model.items[0].training
    assert not model.bag.rows.trainable and model.items[0].rows.trainable
    assert [p.requires_grad for p in model.bag.parameters()] == [False]
    restore_embeddings(model)
    assert not model.bag.weight.requires_grad and model.items[0].weight.requires_grad
    assert not model.bag.training and model.items[0].training
    assert model.bag.weight.dtype == torch.bfloat16


def test_what_is_frozen_for_now_can_be_unfrozen_later():
    model = Model()
    model.requires_grad_(False)
    compress_embeddings(model, freeze=False, **SMALL)
    assert not any(p.requires_grad for p in model.parameters())
    assert not model(batches(1)[0]).requires_grad
    model.requires_grad_(True)
    plain = Model()
    for a, b in zip(steps(model), steps(plain), strict=True):
        assert_same(a, b)
    model = Model()
    compress_embeddings(model, freeze=True, **SMALL)
    assert not model.bag.rows.trainable
    model.bag.requires_grad_(True)
    with pytest.raises(BitslabError, match="freeze=False"):
        model(batches(1)[0])


# torch says this of full backward hooks of any module whose inputs are integers.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_hooks_and_their_handles_are_kept():
    model: Any = torch.nn.Sequential(torch.nn.Embedding(N, D))
    seen: list[str] = []
    handles = [
        model[0].register_forward_pre_hook(lambda *a: seen.append("pre")),
        model[0].register_forward_hook(lambda *a, **k: seen.append("kwargs"), with_kwargs=True),
        model[0].register_forward_hook(lambda m, a, out: out * 2),
        model[0].register_full_backward_pre_hook(lambda *a: seen.append("backward")),
    ]
    ids = torch.tensor([3, 3, 7])
    compress_embeddings(model, **SMALL)
    for _ in range(2):
        out = model(ids)
        assert_same(out.detach(), model[0].weight.detach()[ids] * 2)
        out.sum().backward()
        assert seen == ["pre", "kwargs", "backward"]
        seen.clear()
        restore_embeddings(model)
    for handle in handles:
        handle.remove()
    model(ids)
    assert not seen


# Weights that modules share


def tied() -> Any:
    torch.manual_seed(0)
    model: Any = torch.nn.ModuleDict(
        {
            "encoder": torch.nn.Embedding(N, D, padding_idx=0),
            "decoder": torch.nn.Embedding(N, D, padding_idx=5, scale_grad_by_freq=True),
            "pool": torch.nn.EmbeddingBag(N, D, mode="max"),
        }
    )
    model["decoder"].weight = model["pool"].weight = model["encoder"].weight
    return model


def train_tied(model: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    losses = []
    for ids in batches(6):
        optimizer.zero_grad()
        loss = loss_of(model["encoder"](ids)) + loss_of(lookup(model["pool"], (ids + 1) % N))
        loss = loss + loss_of(model["decoder"](ids[:5]))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def test_modules_that_share_a_weight_share_their_rows():
    plain, ours = tied(), tied()
    report = compress_embeddings(ours, **SMALL)
    assert ours["encoder"].rows is ours["decoder"].rows is ours["pool"].rows
    assert sorted(ours["encoder"].rows.pinned_ids) == [0, 5]
    assert len(list(ours.parameters())) == 1
    assert ours["decoder"].scale_grad_by_freq and not ours["encoder"].scale_grad_by_freq
    assert report.raw_bytes == N * D * 4
    assert report.compressed["pool"]["same_rows_as"] == "encoder"
    assert "same rows as encoder" in str(report)
    for a, b in zip(train_tied(ours), train_tied(plain), strict=True):
        assert_same(a, b)
    for copied in (ours, copy.deepcopy(ours)):
        assert copied["encoder"].rows is copied["decoder"].rows
        assert copied["pool"].rows.parameter is copied["pool"]._parameters["weight"]
        state = copied.state_dict()
        assert_same(state["encoder.weight"], state["pool.weight"])
        copied.load_state_dict(state)
        restored: Any = restore_embeddings(copied)
        assert restored["encoder"].weight is restored["decoder"].weight is restored["pool"].weight
        assert_same(restored["encoder"].weight.detach(), state["encoder.weight"])


def test_tied_modules_move_together():
    ours = tied()
    compress_embeddings(ours, **SMALL)
    ours.double()
    assert ours["pool"].rows.dtype == torch.float64
    assert ours["pool"].rows.parameter is ours["encoder"]._parameters["weight"]
    expected = tied().double()
    for name in ours:
        assert_same(lookup(ours[name], batches(1)[0]), lookup(expected[name], batches(1)[0]))


def test_weights_tied_to_something_else_are_left_alone():
    model: Any = torch.nn.ModuleDict(
        {
            "emb": torch.nn.Embedding(N, D),
            "head": torch.nn.Linear(D, N, bias=False),
            "view": torch.nn.Embedding(N, D),
            "part": torch.nn.Embedding(N // 2, D),
            "one": torch.nn.Embedding(N, D),
            "two": torch.nn.EmbeddingBag(N, D),
        }
    )
    model["head"].weight = model["emb"].weight
    model["part"].weight = torch.nn.Parameter(model["view"].weight.detach()[: N // 2])
    model["two"].weight = model["one"].weight
    model["one"].forward = lambda ids: ids
    before = dict(model.named_modules())
    report = compress_embeddings(model, **SMALL)
    assert not report.compressed and dict(model.named_modules()) == before
    assert report.left == {
        "emb": "shares its weight with head (Linear)",
        "view": "shares its weight with part (Embedding)",
        "part": "shares its weight with view (Embedding)",
        "one": "has a forward of its own",
        "two": "shares its weight with one (Embedding), which is left alone: "
        "has a forward of its own",
    }
    assert model["head"].weight is model["emb"].weight


# What is left alone


class _Own(torch.nn.Embedding):
    pass


def _with(change: Any, **options: Any) -> torch.nn.Embedding:
    module = torch.nn.Embedding(N, D, **options)
    return change(module) or module


def _old_spectral(module: torch.nn.Module) -> torch.nn.Module:
    torch.nn.utils.spectral_norm(module)
    return module


def _with_grad(module: Any) -> None:
    module(torch.tensor([1])).sum().backward()


LEFT: dict[str, tuple[Any, str]] = {
    "subclass": (lambda: _Own(N, D), "is a _Own, a class of its own"),
    "parametrized": (lambda: _with(parametrizations.weight_norm), "is parametrized"),
    "old-norm": (lambda: _with(_old_spectral), "has more to it than a weight"),
    "pruned": (lambda: _with(lambda m: prune.identity(m, "weight")), "has more to it than"),
    "meta": (lambda: torch.nn.Embedding(N, D, device="meta"), "is on the meta device"),
    "integers": (
        lambda: _with(lambda m: setattr(m, "weight", torch.nn.Parameter(m.weight.int(), False))),
        "holds torch.int32",
    ),
    "gradient": (lambda: _with(_with_grad), "has a gradient"),
    "hooks": (lambda: _with(lambda m: m.weight.register_hook(print) and None), "has hooks"),
    "shared": (lambda: _with(lambda m: m.share_memory()), "processes share"),
    "own-forward": (lambda: _with(lambda m: setattr(m, "forward", len)), "a forward of its own"),
    "small": (lambda: torch.nn.Embedding(5, D), "has 5 rows, fewer than min_rows=20"),
    "cached": (lambda: CachedEmbedding(N, D, device="cpu"), "is compressed already"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone_and_why(name):
    make, says = LEFT[name]
    model: Any = torch.nn.ModuleDict({"a": make(), "b": torch.nn.Embedding(N, D)})
    kept = model["a"]
    report = compress_embeddings(model, **SMALL)
    assert list(report.left) == ["a"] and says in report.left["a"]
    assert list(report.compressed) == ["b"] and model["a"] is kept


def test_a_predicate_chooses():
    model = Model()
    asked: list[str] = []

    def choose(name: str, module: torch.nn.Module) -> bool:
        asked.append(name)
        return isinstance(module, torch.nn.EmbeddingBag)

    report = compress_embeddings(model, predicate=choose, **SMALL)
    assert asked == ["bag", "items.0", "more.seq.0"]
    assert list(report.compressed) == ["bag"]
    assert report.left["items.0"] == "the predicate says so"


def test_modules_that_a_list_holds_too_are_left_alone():
    model = Model()
    vars(model)["plain_list"] = [model.bag]
    vars(model)["by_name"] = {"x": model.items[0]}
    report = compress_embeddings(model, **SMALL)
    assert "is also held by plain_list" in report.left["bag"]
    assert "is also held by by_name" in report.left["items.0"]
    assert list(report.compressed) == ["more.seq.0"]


# Bad input


@pytest.mark.parametrize(
    ("model", "options", "error", "says"),
    [
        ("model", {}, ArgumentTypeError, "model: expected a torch.nn.Module, got str"),
        (torch.nn.Embedding(N, D), {}, ArgumentError, "use CachedEmbedding.from_module"),
        (torch.nn.EmbeddingBag(N, D), {}, ArgumentError, "use CachedEmbeddingBag.from_module"),
        (Model(), {"min_rows": -1}, ArgumentError, "min_rows: -1"),
        (Model(), {"min_rows": 1.5}, ArgumentError, "min_rows: 1.5"),
        (Model(), {"cache_ratio": 0}, ArgumentError, "cache_ratio: 0, accepted are more than 0"),
        (Model(), {"cache_ratio": 1.5}, ArgumentError, "cache_ratio: 1.5"),
        (Model(), {"predicate": "bag"}, ArgumentTypeError, "predicate: expected a function"),
        (Model(), {"codec": "none", "min_rows": 1}, ArgumentError, "none"),
        (Model(), {"cache": "none", "min_rows": 1}, ArgumentError, "cache: 'none'"),
        (Model(), {"evict_strategy": "LFU", "min_rows": 1}, ArgumentTypeError, "evict"),
    ],
    ids=str,
)
def test_bad_arguments_change_nothing(model, options, error, says):
    before = dict(model.named_modules()) if isinstance(model, torch.nn.Module) else {}
    with pytest.raises(error, match=says):
        compress_embeddings(model, **options)
    if before:
        assert dict(model.named_modules()) == before


def test_wrapped_models_are_refused():
    class DistributedDataParallel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Model()

    with pytest.raises(ArgumentError, match="compress the model before it is wrapped"):
        compress_embeddings(DistributedDataParallel(), **SMALL)


def test_a_failure_half_way_takes_all_back(monkeypatch):
    model, plain = Model(), Model()
    real = CachedEmbedding.from_module
    calls = []

    def fail_later(module: Any, **options: Any) -> Any:
        calls.append(module)
        if len(calls) == 2:
            raise MemoryError("no more")
        return real(module, **options)

    monkeypatch.setattr(CachedEmbedding, "from_module", fail_later)
    with pytest.raises(MemoryError):
        compress_embeddings(model, **SMALL)
    monkeypatch.undo()
    assert repr(model) == repr(plain)
    for a, b in zip(steps(model), steps(plain), strict=True):
        assert_same(a, b)


def test_a_cached_module_itself_cannot_be_restored_in_place():
    with pytest.raises(ArgumentError, match="to_module"):
        restore_embeddings(CachedEmbedding(N, D, _weight=table(), device="cpu"))
    with pytest.raises(ArgumentTypeError, match="model: expected"):
        restore_embeddings("model")  # type: ignore[arg-type]
