"""Checkpoints: whole tables in id order, plain files, bounded memory."""

from __future__ import annotations

import os
from typing import Any

import pytest
import safetensors.torch as st
import torch

from bitslab import ArgumentError, ArgumentTypeError, CorruptedDataError
from bitslab.integrations.embedding import (
    CachedEmbedding,
    compress_embeddings,
    load_state,
    save_state,
)
from tests.helpers import dtype_id
from tests.integrations.embedding.support import (
    FLOATS,
    D,
    N,
    Peak,
    assert_same,
    bags,
    batches,
    singles,
    table,
    train_both,
    whole,
)


class Model(torch.nn.Module):
    """Two embeddings, one of them by two names, layers and buffers of several dtypes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.user = torch.nn.EmbeddingBag(N, D, mode="sum")
        self.towers = torch.nn.ModuleDict({"item": torch.nn.Embedding(40, 6)})
        self.again = self.towers["item"]
        self.top = torch.nn.Linear(D, 3).to(torch.bfloat16)
        self.tied = torch.nn.Linear(D, 3, bias=False)
        self.tied.weight = torch.nn.Parameter(torch.randn(3, D))
        self.other = torch.nn.Linear(D, 3, bias=False)
        self.other.weight = self.tied.weight
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("mask", torch.rand(3, 5).t() > 0.5)
        self.register_buffer("nothing", torch.empty(0, 4, dtype=torch.float64))


def compressed(seed: int = 0) -> Model:
    model = Model(seed)
    assert len(compress_embeddings(model, min_rows=1, cache_ratio=0.2).compressed) == 2
    return model


def assert_same_states(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert sorted(a) == sorted(b)
    for name, value in b.items():
        assert_same(a[name], value, name)


def test_state_dicts_go_both_ways():
    plain, ours = Model(), compressed()
    assert_same_states(ours.state_dict(), plain.state_dict())
    ours.load_state_dict(Model(1).state_dict())
    assert_same_states(ours.state_dict(), Model(1).state_dict())
    plain.load_state_dict(ours.state_dict())
    assert_same_states(plain.state_dict(), Model(1).state_dict())


@pytest.mark.parametrize("make", [bags, singles])
@pytest.mark.parametrize("cache", ["rows", "packed"])
def test_trained_rows_are_in_it_whether_resident_or_not(make, cache):
    plain, ours = make(cache_ratio=0.3, cache=cache)
    train_both(plain, ours, lambda p: torch.optim.SGD(p, lr=0.1), batches(6))
    assert_same_states(ours.state_dict(), plain.state_dict())
    other = make(cache_ratio=0.5, cache=cache)[1]
    other.load_state_dict(ours.state_dict())
    assert_same(whole(other), whole(plain))


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_files_are_plain_and_go_both_ways(tmp_path, dtype):
    plain, ours = Model().to(dtype), compressed().to(dtype)
    save_state(ours, tmp_path / "ours.safetensors")
    read = st.load_file(tmp_path / "ours.safetensors")
    assert_same_states(read, plain.state_dict())
    other = Model(1).to(dtype)
    other.load_state_dict(read)
    assert_same_states(other.state_dict(), plain.state_dict())
    # torch's own tensors that share memory are refused by the library that writes the other file.
    st.save_file(
        {k: v.clone().contiguous() for k, v in read.items()}, tmp_path / "plain.safetensors"
    )
    again = compressed(2).to(dtype)
    keys = load_state(again, tmp_path / "plain.safetensors")
    assert not keys.missing_keys and not keys.unexpected_keys
    assert_same_states(again.state_dict(), plain.state_dict())
    load_state(other, tmp_path / "ours.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["ours.safetensors", "plain.safetensors"]


def test_a_model_without_cached_tables_is_written_too(tmp_path):
    save_state(Model(3), tmp_path / "m.safetensors")
    other = Model()
    load_state(other, tmp_path / "m.safetensors")
    assert_same_states(other.state_dict(), Model(3).state_dict())
    assert st.load_file(tmp_path / "m.safetensors")["mask"].is_contiguous()


def test_names_that_hooks_change_are_those_of_the_file(tmp_path):
    ours = torch.nn.Sequential(singles()[1])

    def rename(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in list(state):
            state[f"model.{key}"] = state.pop(key)

    ours._register_state_dict_hook(rename)
    save_state(ours, tmp_path / "m.safetensors")
    assert_same_states(st.load_file(tmp_path / "m.safetensors"), {"model.0.weight": table()})


def test_strictness_is_torchs(tmp_path):
    save_state(torch.nn.ModuleDict({"a": singles()[1]}), tmp_path / "m.safetensors")
    other = torch.nn.ModuleDict({"b": singles()[1]})
    with pytest.raises(RuntimeError, match=r'Missing key.*"b.weight"[\s\S]*Unexpected.*"a.weight"'):
        load_state(other, tmp_path / "m.safetensors")
    keys = load_state(other, tmp_path / "m.safetensors", strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["b.weight"], ["a.weight"])


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.zeros(N + 1, D), r"size mismatch for weight: \[51, 8\].*\[50, 8\]"),
        (torch.zeros(N, D + 1), "size mismatch"),
        (torch.zeros(N * D), "size mismatch"),
        (torch.zeros(N, D, dtype=torch.int64), "expected floating-point rows"),
        ("rows", "expected a torch.Tensor, got str"),
    ],
    ids=["rows", "columns", "flat", "integers", "no-tensor"],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(value, says):
    for ours in (bags()[1], singles()[1]):
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=says):
                ours.load_state_dict({"weight": value}, strict=strict)
        assert_same(whole(ours), table())


def test_other_dtypes_are_cast_as_torch_does():
    plain, ours = singles()
    state = {"weight": table(dtype=torch.float64) * 3}
    plain.load_state_dict(state), ours.load_state_dict(state)
    assert_same(whole(ours), whole(plain))


def test_files_that_cannot_be_written_leave_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    _, ours = singles()
    save_state(ours, path)
    kept = path.read_bytes()
    ours.load_state_dict({"weight": table() * 2})

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ours.rows, "decoded", fail)
        with pytest.raises(OSError, match="No space left"):
            save_state(ours, path)
    assert path.read_bytes() == kept and os.listdir(tmp_path) == ["m.safetensors"]
    with pytest.raises(OSError, match="no such folder"):
        save_state(ours, tmp_path / "none" / "m.safetensors")


class _Extra(torch.nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError


def test_what_a_file_cannot_hold_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    meta = torch.nn.Linear(2, 2, device="meta")
    sparse = torch.nn.Module()
    sparse.register_buffer("s", torch.eye(3).to_sparse())
    exotic = torch.nn.Module()
    exotic.register_buffer("c", torch.zeros(3, dtype=torch.complex128))
    for model, error, says in (
        (_Extra(), ArgumentTypeError, "'_extra_state', a dict"),
        (meta, ArgumentError, "'weight' is on the meta device"),
        (sparse, ArgumentTypeError, "'s', a Tensor of layout torch.sparse_coo"),
        (exotic, ArgumentError, "'c' is complex128"),
        ("model", ArgumentTypeError, "model: expected a torch.nn.Module, got str"),
    ):
        with pytest.raises(error, match=says):
            save_state(model, path)  # type: ignore[arg-type]
    assert not os.listdir(tmp_path)
    with pytest.raises(ArgumentTypeError, match="model: expected"):
        load_state("model", path)  # type: ignore[arg-type]


def test_damaged_files_are_reported(tmp_path):
    path = tmp_path / "m.safetensors"
    _, ours = singles()
    save_state(ours, path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CorruptedDataError, match="truncated"):
        load_state(ours, path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(CorruptedDataError, match="no safetensors file"):
        load_state(ours, path)
    with pytest.raises(FileNotFoundError):
        load_state(ours, tmp_path / "none")
    assert_same(whole(ours), table())


def test_memory_is_bounded_whatever_the_size_of_a_table(tmp_path):
    some_rows = torch.randn(1 << 13, 128)

    def rows() -> Any:
        for number in range(50):
            yield some_rows + number

    n = 50 << 13
    nbytes = n * 128 * 4
    assert nbytes > 200e6
    ours = CachedEmbedding(n, 128, _weight=rows(), cache_ratio=0.001, device="cpu", codec="raw")
    path = tmp_path / "m.safetensors"
    with Peak() as peak:
        save_state(ours, path)
    assert peak.bytes < 32e6
    assert path.stat().st_size > nbytes
    some = torch.tensor([0, n // 2, n - 1])
    kept = ours(some).detach()
    ours.rows.load(torch.zeros(n // 2 + 1, 128), begin=n // 2 - 1)
    assert not ours(some)[1:].any()
    with Peak() as peak:
        load_state(ours, path)
    assert peak.bytes < 32e6
    assert_same(ours(some).detach(), kept)
    whole = ours.state_dict()  # what it would be
    assert sum(t.nbytes for t in whole.values()) > 200e6
    ours.close()
