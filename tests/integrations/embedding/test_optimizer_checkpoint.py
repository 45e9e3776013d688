"""Checkpoints with an optimizer: training goes on from a file as if it had never stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch as st
import torch
from torch.optim import SGD, Adagrad, SparseAdam

from bitslab import ArgumentError, ArgumentTypeError, CorruptedDataError
from bitslab.integrations.embedding import (
    CachedEmbedding,
    CachedEmbeddingBag,
    load_state,
    save_state,
)
from tests.integrations.embedding.support import (
    D,
    N,
    Peak,
    assert_same,
    bags,
    batches,
    lookup,
    loss_of,
    singles,
    step,
    table,
    train_both,
    whole,
)

# torch's own Adagrad says this of its own sparse tensors, once a process.

#: How a model's optimizer is made, and whether its tables have sparse gradients.
MADE: dict[str, tuple[Any, bool]] = {
    "adagrad": (lambda m: Adagrad(_groups(m), lr=0.1), False),
    "adagrad-sparse": (
        lambda m: Adagrad(_groups(m), lr=torch.tensor(0.1), lr_decay=0.1, eps=1e-4),
        True,
    ),
    "adagrad-that-starts-high": (
        lambda m: Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.3),
        False,
    ),
    "sgd": (lambda m: SGD(_groups(m), lr=0.1), False),
    "momentum-for-layers": (
        lambda m: SGD(
            [{"params": _tables(m)}, {"params": m["top"].parameters(), "momentum": 0.9}], lr=0.1
        ),
        False,
    ),
    "sparse-adam": (lambda m: SparseAdam(_tables(m), lr=0.01, betas=(0.5, 0.7)), True),
}
EACH = pytest.mark.parametrize("name", MADE)


def _tables(model: Any) -> list[torch.nn.Parameter]:
    return [*model["bag"].parameters(), *model["single"].parameters()]


def _groups(model: Any) -> list[dict[str, Any]]:
    """Return parameter groups in another order than the model has its parts."""
    return [
        {"params": model["top"].parameters(), "weight_decay": 0.01},
        {"params": model["single"].parameters(), "lr": 0.05},
        {"params": [*model["bag"].parameters(), *model["never"].parameters()]},
    ]


def model_of(plain: bool, sparse: bool = False, seed: int = 0, cache_ratio: float = 0.3) -> Any:
    """Make a model with two tables, a layer, and a table that nobody looks up."""
    kinds: Any = (torch.nn.EmbeddingBag, torch.nn.Embedding)
    options: dict[str, Any] = {"sparse": sparse}
    if not plain:
        kinds = (CachedEmbeddingBag, CachedEmbedding)
        options |= {"cache_ratio": cache_ratio, "device": "cpu"}
    torch.manual_seed(seed)
    return torch.nn.ModuleDict(
        {
            "bag": kinds[0](N, D, _weight=table() * (seed + 1), mode="sum", **options),
            "single": kinds[1](40, D, _weight=table(40) * (seed + 1), padding_idx=3, **options),
            "never": kinds[1](30, 3, _weight=table(30, 3), **options),
            "top": torch.nn.Linear(D, 1),
        }
    )


def train(model: Any, optimizer: torch.optim.Optimizer, seed: int, count: int = 6) -> None:
    for a, b in zip(batches(count, seed=seed), batches(count, n=40, seed=seed + 1), strict=True):
        model.zero_grad()
        out = model["top"](lookup(model["bag"], a) + lookup(model["single"], b[:4]))
        loss_of(out).backward()
        optimizer.step()


def assert_same_training(
    a: Any, mine: torch.optim.Optimizer, b: Any, theirs: torch.optim.Optimizer
) -> None:
    """Compare models and what optimizers hold, bit for bit."""
    for part in ("bag", "single", "never"):
        assert_same(whole(a[part]), whole(b[part]), part)
    assert_same(a["top"].weight.detach(), b["top"].weight.detach(), "top")
    assert_same_values(mine.state_dict(), theirs.state_dict())


def assert_same_values(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(b, torch.Tensor):
        assert_same(a, b)
    elif isinstance(b, dict):
        assert a.keys() == b.keys()
        for key in b:
            assert_same_values(a[key], b[key])
    elif isinstance(b, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same_values(one, other)
    else:
        assert a == b


@pytest.mark.drawn(6)
@EACH
@pytest.mark.parametrize("stepped", [True, False], ids=["new-has-stepped", "new-is-fresh"])
def test_training_goes_on_as_if_it_had_never_stopped(name, stepped, tmp_path):
    make, sparse = MADE[name]
    model = model_of(plain=False, sparse=sparse)
    optimizer = make(model)
    train(model, optimizer, 0)
    save_state(model, tmp_path / "m", optimizer=optimizer)
    again = model_of(plain=False, sparse=sparse, seed=1, cache_ratio=0.5)
    other = make(again)
    if stepped:
        train(again, other, 8)
    other.param_groups[0]["lr"] = 0.7
    keys = load_state(again, tmp_path / "m", optimizer=other)
    assert not keys.missing_keys and not keys.unexpected_keys
    assert_same_training(again, other, model, optimizer)
    for one, its in ((model, optimizer), (again, other)):
        train(one, its, 4)
    assert_same_training(again, other, model, optimizer)


@pytest.mark.drawn(3)
@EACH
def test_files_go_to_plain_models_and_come_from_them(name, tmp_path):
    make, sparse = MADE[name]
    models = [model_of(plain, sparse) for plain in (True, False)]
    optimizers = [make(m) for m in models]
    for model, optimizer, path in zip(models, optimizers, ("plain", "ours"), strict=True):
        train(model, optimizer, 0)
        save_state(model, tmp_path / path, optimizer=optimizer)
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "ours").read_bytes()
    for plain in (True, False):
        again = model_of(plain, sparse, seed=1)
        other = make(again)
        load_state(again, tmp_path / "ours", optimizer=other)
        assert_same_training(again, other, models[0], optimizers[0])
        train(again, other, 4)
        if not plain:
            train(models[0], optimizers[0], 4)
            assert_same_training(again, other, models[0], optimizers[0])


@pytest.mark.parametrize("cache", ["rows", "packed"])
@pytest.mark.parametrize("cache_ratio", [0.001, 0.3, 1.0], ids=["one-row", "some", "all"])
def test_every_kind_of_cache_saves_and_takes_the_same(cache, cache_ratio, tmp_path):
    plain, ours = bags(mode="sum", cache=cache, cache_ratio=cache_ratio)
    theirs, mine = train_both(plain, ours, lambda p: Adagrad(p, lr=0.1), batches(6))
    save_state(plain, tmp_path / "plain", optimizer=theirs)
    save_state(ours, tmp_path / "ours", optimizer=mine)
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "ours").read_bytes()
    again = bags(mode="sum", cache=cache, cache_ratio=cache_ratio)[1]
    other = Adagrad(again.parameters(), lr=0.1)
    load_state(again, tmp_path / "plain", optimizer=other)
    for ids in batches(6, seed=3):
        assert_same(step(again, other, ids), step(plain, theirs, ids))
    assert_same(whole(again), whole(plain))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_state_takes_the_dtype_of_the_parameters(dtype, tmp_path):
    plain, ours = singles(n=64)
    optimizer = Adagrad(ours.parameters(), lr=0.1)
    for ids in batches(3, n=64):
        step(ours, optimizer, ids)
    save_state(ours, tmp_path / "m", optimizer=optimizer)
    both = []
    for other in singles(dtype, n=64, cache_ratio=0.25):
        its = Adagrad(other.parameters(), lr=0.1)
        load_state(other, tmp_path / "m", optimizer=its)
        for ids in batches(6, n=64, seed=3):
            step(other, its, ids)
        both.append((whole(other), its.state_dict()))
    assert both[0][0].dtype == both[1][1]["state"][0]["sum"].dtype == dtype
    assert_same(both[1][0], both[0][0])
    assert_same_values(both[1][1], both[0][1])


def test_an_optimizer_that_has_not_stepped_is_saved_too(tmp_path):
    plain, ours = bags()
    for module, path in ((plain, "plain"), (ours, "ours")):
        optimizer = Adagrad(module.parameters(), initial_accumulator_value=0.3)
        save_state(module, tmp_path / path, optimizer=optimizer)
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "ours").read_bytes()


class _Own(torch.optim.Optimizer):
    """An optimizer of one's own whose state is of many kinds."""

    def __init__(self, params: Any, rows: int = N) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.9, None), "name": "own"})
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"sum": torch.ones(rows), "step": 3, "of": {"a": [1.5, torch.eye(2)]}}
        self.state["all"] = {"count": torch.tensor(7)}  # type: ignore[index]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError


def test_state_of_every_kind_comes_back_as_it_was(tmp_path):
    _, ours = bags()
    optimizer = _Own(ours.parameters())
    ours.attach_optimizer(optimizer, row_wise=True)
    optimizer.load_state_dict(
        optimizer.state_dict() | {"param_groups": [{"params": [0], "lr": float("inf"), "k": True}]}
    )
    before = optimizer.state_dict()
    save_state(ours, tmp_path / "m", optimizer=optimizer)
    again = bags()[1]
    other = _Own(again.parameters())
    again.attach_optimizer(other, row_wise=True)
    load_state(again, tmp_path / "m", optimizer=other)
    assert_same_values(other.state_dict(), before)
    again.load_state_dict({"weight": table()})
    Path(tmp_path / "m").unlink()  # nothing lies in memory of the file
    assert_same_values(other.state_dict(), before)


def test_files_with_an_optimizer_are_files_of_the_model_too(tmp_path):
    path = tmp_path / "m"
    plain, ours = singles()
    _, optimizer = train_both(plain, ours, lambda p: Adagrad(p, lr=0.1), batches(4))
    save_state(ours, path, optimizer=optimizer)
    again = singles()[1]
    keys = load_state(again, path)
    assert not keys.missing_keys and not keys.unexpected_keys
    assert_same(whole(again), whole(plain))
    read = st.load_file(path)
    extra = torch.nn.Embedding(N, D).load_state_dict(read, strict=False).unexpected_keys
    assert extra == [".optimizer.0.weight.step", ".optimizer.1.weight.sum"]
    assert_same(read[extra[1]], optimizer.state_dict()["state"][0]["sum"])
    save_state(ours, path)
    assert sorted(st.load_file(path)) == ["weight"]


def test_memory_is_bounded_whatever_the_size_of_the_state(tmp_path):
    some_rows = torch.randn(1 << 13, 128)
    n = 50 << 13
    rows: Any = (some_rows + number for number in range(50))
    ours = CachedEmbedding(
        n,
        128,
        _weight=rows,
        cache_ratio=0.001,
        device="cpu",
        codec="raw",
    )
    optimizer = Adagrad(ours.parameters())
    ours.attach_optimizer(optimizer)
    (adapter,) = ours.rows.training.adapters
    trained = np.arange(n // 2, n // 2 + (1 << 14))  # 8 MB of more than 200
    adapter.stores["sum"].write(trained, torch.rand(len(trained), 128))
    path = tmp_path / "m"
    with Peak() as peak:
        save_state(ours, path, optimizer=optimizer)
    assert peak.bytes < 32e6
    assert path.stat().st_size > 2 * n * 128 * 4
    kept = adapter.stores["sum"].read(trained, torch.device("cpu"))
    adapter.stores["sum"].write(trained, torch.zeros(len(trained), 128))
    with Peak() as peak:
        load_state(ours, path, optimizer=optimizer)
    assert peak.bytes < n * 128 * 4 + 48e6  # once more in addition to what it replaces, not twice
    assert_same(adapter.stores["sum"].read(trained, torch.device("cpu")), kept)
    (whole,) = optimizer.state_dict()["state"].values()  # what it would be
    assert whole["sum"].nbytes > 200e6
    ours.close()


# Errors


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return all that an error must leave as it is."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, json.dumps(optimizer.state_dict(), default=lambda t: t.tolist())


def saved(path: Any, name: str = "adagrad") -> Any:
    make, sparse = MADE[name]
    model = model_of(plain=False, sparse=sparse)
    optimizer = make(model)
    train(model, optimizer, 0, count=2)
    save_state(model, path, optimizer=optimizer)
    return model


def _reversed(model: Any) -> torch.optim.Optimizer:
    return Adagrad(list(reversed(_groups(model))), lr=0.1)


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1
    return optimizer


BAD: dict[str, tuple[Any, str]] = {
    "other-class": (lambda m: SGD(_groups(m), lr=0.1), "a SGD; .* holds the state of a Adagrad"),
    "fewer-groups": (
        lambda m: Adagrad(m.parameters()),
        r"1 parameter group \[bag.weight, single.weight, never.weight, top.weight, top.bias\]; in "
        r".* it is 3 parameter groups \[top.weight, top.bias\]; \[single.weight\]; \[bag.weight, ",
    ),
    "groups-in-another-order": (_reversed, r"3 parameter groups \[bag.weight, never.weight\]; "),
    "fewer-parameters": (lambda m: Adagrad(_groups(m)[:2]), "2 parameter groups"),
    "other-model": (
        lambda m: Adagrad(torch.nn.Linear(5, 7).parameters()),
        r"has a parameter \[7, 5\] that the model does not have; make it from model.parameters",
    ),
    "refused-here": (
        lambda m: decaying(Adagrad(_groups(m))),
        "Adagrad has weight_decay=0.1, which moves rows",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_an_optimizer_that_does_not_fit_is_refused_and_changes_nothing(case, tmp_path):
    make, says = BAD[case]
    path = tmp_path / "m"
    saved(path)
    again = model_of(plain=False, seed=1)
    optimizer = make(again)
    before = state_of(again, optimizer)
    with pytest.raises(ArgumentError, match=f"optimizer: .*{says}"):
        load_state(again, path, optimizer=optimizer)
    after = state_of(again, optimizer)
    assert_same_values(after, before)


def test_other_errors_of_loading_change_nothing(tmp_path):
    path, without = tmp_path / "m", tmp_path / "without"
    model = saved(path)
    save_state(model, without)
    again = model_of(plain=False, seed=1)
    optimizer = MADE["adagrad"][0](again)
    train(again, optimizer, 3, count=2)
    before = state_of(again, optimizer)
    says = r"optimizer: .*without holds no state of an optimizer; save_state\(model, path, optimiz"
    with pytest.raises(ArgumentError, match=says):
        load_state(again, without, optimizer=optimizer)
    with pytest.raises(ArgumentTypeError, match="optimizer: expected a torch.optim.Optimizer"):
        load_state(again, path, optimizer="adagrad")  # type: ignore[arg-type]
    assert_same_values(state_of(again, optimizer), before)
    small = model_of(plain=False, seed=1)
    small["single"] = singles(n=60)[1]
    its = MADE["adagrad"][0](small)
    train(small, its, 3, count=2)
    before = state_of(small, its)
    says = r"parameter 'single.weight' is \[60, 8\], in .* it is \[40, 8\]"
    with pytest.raises(ArgumentError, match=f"optimizer: its {says}"):
        load_state(small, path, optimizer=its)
    assert_same_values(state_of(small, its), before)


def test_a_file_that_lacks_a_part_of_the_model_leaves_the_optimizer_alone(tmp_path):
    path = tmp_path / "m"
    saved(path)
    again = model_of(plain=False, seed=1)
    optimizer = MADE["adagrad"][0](again)
    train(again, optimizer, 3, count=2)
    again["more"] = torch.nn.Linear(2, 2)
    before = state_of(again, optimizer)
    with pytest.raises(RuntimeError, match="Missing key"):
        load_state(again, path, optimizer=optimizer)
    assert state_of(again, optimizer)[1] == before[1]
    keys = load_state(again, path, optimizer=optimizer, strict=False)
    assert keys.missing_keys == ["more.weight", "more.bias"]
    assert state_of(again, optimizer)[1] != before[1]


@pytest.mark.parametrize("when", ["pre", "post"])
def test_an_error_of_the_optimizer_itself_leaves_it_as_it_was(when, tmp_path):
    path = tmp_path / "m"
    saved(path)
    again = model_of(plain=False, seed=1)
    optimizer = MADE["adagrad"][0](again)
    optimizer.param_groups[0]["lr"] = 0.7
    train(again, optimizer, 3, count=2)
    before = state_of(again, optimizer)[1]

    def refuse(*args: Any) -> None:
        raise KeyError("refused")

    handle = getattr(optimizer, f"register_load_state_dict_{when}_hook")(refuse)
    with pytest.raises(KeyError, match="refused"):
        load_state(again, path, optimizer=optimizer)
    handle.remove()
    assert state_of(again, optimizer)[1] == before
    train(again, optimizer, 4, count=2)


class Noting(Adagrad):
    """Keeps notes besides its state, under keys of its own too."""

    notes: Any = None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"notes": self.notes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.notes = state_dict.pop("notes")
        super().load_state_dict(state_dict)


def test_what_an_optimizer_keeps_besides_its_state_comes_back(tmp_path):
    layer = torch.nn.Linear(2, 2)
    optimizer: Any = Noting(layer.parameters())
    other: Any = Noting(layer.parameters())
    optimizer.notes = {"seen": torch.arange(3), "at": (1, 2.5, None)}
    optimizer.state[("mine", 1)] = {"more": torch.ones(2)}
    save_state(layer, tmp_path / "m", optimizer=optimizer)
    load_state(layer, tmp_path / "m", optimizer=other)
    assert other.notes["at"] == (1, 2.5, None) and torch.equal(other.notes["seen"], torch.arange(3))
    assert torch.equal(other.state[("mine", 1)]["more"], torch.ones(2))


def test_state_that_starts_high_in_the_file_costs_no_row_that_was_not_written(tmp_path):
    plain, ours = bags(n=200)
    theirs = Adagrad(plain.parameters(), lr=0.1, initial_accumulator_value=0.5)
    plain(torch.arange(5), torch.tensor([0])).sum().backward()
    theirs.step()
    save_state(plain, tmp_path / "m", optimizer=theirs)
    mine = Adagrad(ours.parameters(), lr=0.1)
    load_state(ours, tmp_path / "m", optimizer=mine)
    adapter = ours.rows.training.adapters.of(mine)
    assert adapter is not None
    assert int(adapter.stores["sum"]._values.any(1).sum()) == 5
    found, expected = (o.state_dict()["state"][0]["sum"] for o in (mine, theirs))
    assert_same(found, expected)


def test_options_in_the_file_that_cached_rows_refuse_are_reported_at_once(tmp_path):
    plain, ours = bags()
    theirs = SGD(plain.parameters(), lr=0.1, momentum=0.9)
    step(plain, theirs, batches(1)[0])
    save_state(plain, tmp_path / "m", optimizer=theirs)
    mine = SGD(ours.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="optimizer: .*SGD has momentum=0.9"):
        load_state(ours, tmp_path / "m", optimizer=mine)
    assert mine.param_groups[0]["momentum"] == 0
    assert_same(whole(ours), table())


def test_state_of_another_number_of_rows_is_refused(tmp_path):
    plain, ours = bags()
    save_state(plain, tmp_path / "m", optimizer=_Own(plain.parameters(), rows=3))
    mine = _Own(ours.parameters())
    ours.attach_optimizer(mine, row_wise=True)
    with pytest.raises(ArgumentError, match="optimizer: its state 'sum' has 3 rows, the table has"):
        load_state(ours, tmp_path / "m", optimizer=mine)


def test_what_cannot_be_saved_is_refused_and_leaves_the_file_there_was(tmp_path, monkeypatch):
    path = tmp_path / "m"
    _, ours = bags()
    mine = Adagrad(ours.parameters())
    save_state(ours, path, optimizer=mine)
    kept = path.read_bytes()
    layer = torch.nn.Linear(2, 2)
    strange, sparse = _Own(layer.parameters()), _Own(layer.parameters())
    strange.state[layer.weight]["sum"] = np.float32(3)
    sparse.state[layer.weight]["sum"] = torch.eye(3).to_sparse()
    named = torch.nn.Sequential(torch.nn.Linear(2, 2))
    named._register_state_dict_hook(
        lambda m, state, *_: state.update({".optimizer.x": state["0.bias"]})
    )
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (
            ours,
            "adagrad",
            ArgumentTypeError,
            "optimizer: expected a torch.optim.Optimizer, got str",
        ),
        (ours, _Own(ours.parameters()), ArgumentError, "optimizer: .*_Own moves rows"),
        (ours, SGD(layer.parameters()), ArgumentError, "optimizer: has a parameter .* the model"),
        (
            layer,
            strange,
            ArgumentTypeError,
            "optimizer: its state dict holds 'weight.sum', a float",
        ),
        (layer, sparse, ArgumentTypeError, "optimizer: its .*weight.sum', a Tensor of layout"),
        (named, SGD(named.parameters()), ArgumentError, "model: .* holds '.optimizer.x'; names"),
    ]
    for model, optimizer, error, says in cases:
        with pytest.raises(error, match=says):
            save_state(model, path, optimizer=optimizer)

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    (adapter,) = (each for each in ours.rows.training.adapters if each.optimizer is mine)
    with monkeypatch.context() as patched:
        patched.setattr(adapter.stores["sum"], "read", fail)
        with pytest.raises(OSError, match="No space left"):
            save_state(ours, path, optimizer=mine)
    assert path.read_bytes() == kept and os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[:-20], "its bitslab_optimizer is damaged"),
        (lambda text: text.replace('"version":1', '"version":2'), "format version 2, this bitslab"),
        (lambda text: text.replace(".sum", ".gone"), "is damaged: KeyError"),
        (lambda text: "[]", "is damaged"),
    ],
    ids=["cut", "newer", "tensor-gone", "no-object"],
)
def test_a_damaged_entry_is_reported_and_changes_nothing(change, says, tmp_path):
    path = tmp_path / "m"
    saved(path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    metadata["bitslab_optimizer"] = change(metadata["bitslab_optimizer"])
    st.save_file(st.load_file(path), path, metadata)
    again = model_of(plain=False, seed=1)
    optimizer = MADE["adagrad"][0](again)
    train(again, optimizer, 3, count=2)
    before = state_of(again, optimizer)
    with pytest.raises(CorruptedDataError, match=says):
        load_state(again, path, optimizer=optimizer)
    assert_same_values(state_of(again, optimizer), before)
