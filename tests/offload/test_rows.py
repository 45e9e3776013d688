"""Operations that take rows of a packed weight decode these rows, and give what torch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bitslab.offload import deferred_state_dict, find_offloaded, offload_weights
from tests.helpers import packable, random_bits, same_bits

ROWS = 96
TAKES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ids": lambda w: w[torch.tensor([3, 0, 3])],
    "negative ids": lambda w: w[torch.tensor([[-1, 5], [-ROWS, ROWS - 1]])],
    "int32 ids": lambda w: w[torch.tensor([7, -2], dtype=torch.int32)],
    "a list": lambda w: w[[1, 2]],
    "one id": lambda w: w[torch.tensor(9)],
    "no ids": lambda w: w[torch.empty(2, 0, dtype=torch.int64)],
    "index_select": lambda w: w.index_select(0, torch.tensor([7, 7, 1])),
    "index_select of one id": lambda w: torch.index_select(w, -w.dim(), torch.tensor(7)),
    "index_select of no ids": lambda w: w.index_select(0, torch.empty(0, dtype=torch.int32)),
    "a row": lambda w: w[5],
    "the last row": lambda w: w[-1],
    "select": lambda w: w.select(-w.dim(), -ROWS),
    "a slice": lambda w: w[5:7],
    "a slice from the end": lambda w: w[-3:],
    "a slice with a step": lambda w: w[3:90:40],
    "a slice that goes beyond": lambda w: w[94:1000],
    "an empty slice": lambda w: w[7:5],
    "narrow": lambda w: w.narrow(0, 3, 2),
}
WHOLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a mask": lambda w: w[torch.arange(ROWS) % 7 == 0],
    "a mask of numpy": lambda w: w[(torch.arange(ROWS) % 7 == 0).numpy()],
    "two indices": lambda w: w[torch.tensor([3, 4]), torch.tensor([0, 1])],
    "ids behind a new dimension": lambda w: w[None, torch.tensor([3])],
    "columns by ids": lambda w: w[:, torch.tensor([3])],
    "columns by index_select": lambda w: w.index_select(1, torch.tensor([3])),
    "a column": lambda w: w[:, 3],
    "columns": lambda w: w[:, 3:5],
    "all rows": lambda w: w[0:ROWS],
    "split": lambda w: w.split(50)[1],
}
FAILS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "an id too large": lambda w: w[torch.tensor([0, ROWS])],
    "an id too small": lambda w: w[torch.tensor([0, -ROWS - 1])],
    "ids that are no integers": lambda w: w[torch.tensor([0.5])],
    "ids of a short dtype": lambda w: w[torch.tensor([1], dtype=torch.int16)],
    "index_select too large": lambda w: w.index_select(0, torch.tensor([ROWS])),
    "index_select of a negative id": lambda w: w.index_select(0, torch.tensor([-1])),
    "index_select of a table": lambda w: w.index_select(0, torch.tensor([[1]])),
    "a row too far": lambda w: w[ROWS],
    "a row before the first": lambda w: w.select(0, -ROWS - 1),
    "a step of nothing": lambda w: torch.ops.aten.slice.Tensor(w, 0, 1, 5, 0),
    "narrow beyond the end": lambda w: w.narrow(0, 90, 10),
}


def packed(tensor: torch.Tensor, **options: Any) -> Any:
    """Return a model whose only weight is a tensor, packed."""
    model = nn.Module()
    model.weight = nn.Parameter(tensor.clone(), requires_grad=False)
    offload_weights(model, execution_device="cpu", min_bytes=0, **options)
    return model


def watched(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the rows that are decoded, and make whole tensors fail."""
    attached = find_offloaded(model)
    rows, reported = attached.weights.rows, []

    def telling(name: str, ids: torch.Tensor) -> torch.Tensor:
        reported.extend(ids.flatten().tolist())
        return rows(name, ids)

    def refuse(*_: Any) -> Any:
        raise AssertionError("a whole tensor was decoded")

    monkeypatch.setattr(attached.weights, "rows", telling)
    monkeypatch.setattr(attached.weights, "read", refuse)
    monkeypatch.setattr(attached.stream, "whole", refuse)
    return reported


@pytest.mark.drawn(36)
@pytest.mark.parametrize("kind", ["packed", "raw", "convolution", "file"])
@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
def test_rows_are_decoded_alone(take, kind, monkeypatch, tmp_path):
    shape = (ROWS, 8, 3, 3) if kind == "convolution" else (ROWS, 128)
    plain = packable(torch.bfloat16, shape)
    options = {"raw": {"codec": "raw"}, "file": {"disk": tmp_path / "weights"}}.get(kind, {})
    model = packed(plain, **options)
    decoded = watched(model, monkeypatch)
    found, expected = take(model.weight), take(plain)
    assert type(found) is torch.Tensor and same_bits(found, expected)
    assert found.device == expected.device and found.is_contiguous()
    numbers = torch.arange(ROWS).view(ROWS, *(1 for _ in shape[1:]))
    assert decoded == take(numbers).flatten().tolist()


@pytest.mark.parametrize("take", [*TAKES.values(), *WHOLE.values()], ids=[*TAKES, *WHOLE])
def test_what_is_no_row_of_its_own_is_taken_from_the_whole(take):
    transposed = packable(torch.float32, (128, ROWS)).T
    assert same_bits(take(packed(transposed).weight), take(transposed))
    plain = random_bits(torch.int8, (ROWS, 70))
    assert same_bits(take(packed(plain).weight), take(plain))


@pytest.mark.parametrize(
    "take",
    [
        lambda w: w[torch.arange(3 * ROWS) % 5],
        lambda w: w.index_select(0, torch.arange(ROWS - 2)),
        lambda w: w[: ROWS - 2],
    ],
    ids=["ids", "index_select", "range"],
)
def test_nearly_all_rows_come_with_the_others(take, monkeypatch):
    plain = packable(torch.bfloat16, (ROWS, 128))
    model = packed(plain)
    weights = find_offloaded(model).weights
    monkeypatch.setattr(weights, "rows", lambda *_: pytest.fail("one by one"))
    assert same_bits(take(model.weight), take(plain))


def test_weights_of_one_dimension_and_of_no_elements_are_decoded_whole():
    for shape in ((ROWS,), (ROWS, 0), (0, ROWS)):
        plain = packable(torch.bfloat16, shape)
        model = nn.ModuleDict({"a": nn.Linear(64, 64)})
        model["a"].bias = nn.Parameter(plain, requires_grad=False)
        offload_weights(model, execution_device="cpu", min_bytes=0)
        weight = model["a"].bias
        assert same_bits(weight[2:5], plain[2:5])
        ids = torch.arange(min(3, shape[0]))
        assert same_bits(weight[ids], plain[ids])
        assert same_bits(weight.index_select(0, ids), plain.index_select(0, ids))
        if shape[0]:
            assert same_bits(weight[-1], plain[-1])


@pytest.mark.parametrize("fail", FAILS.values(), ids=FAILS)
def test_errors_are_those_of_torch(fail):
    plain = packable(torch.bfloat16, (ROWS, 128))
    with pytest.raises((IndexError, RuntimeError)) as expected:
        fail(plain)
    model = packed(plain)
    with pytest.raises(expected.type) as found:
        fail(model.weight)
    assert type(found.value) is expected.type and str(found.value) == str(expected.value)
    assert same_bits(model.weight[:], plain)


def test_results_are_the_callers_to_change_and_to_train():
    plain = packable(torch.float32, (ROWS, 128))
    weight = packed(plain).weight
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for take in (*TAKES.values(), *WHOLE.values()):
            with mode():
                take(weight).zero_()
        assert same_bits(weight[:], plain)
    rows = weight[5:7].requires_grad_()
    (gradient,) = torch.autograd.grad(rows.square().sum(), rows)
    assert same_bits(gradient, 2 * plain[5:7])


def test_views_in_inference_mode_are_ordinary_tensors_as_those_of_a_parameter():
    plain = packable(torch.float32, (ROWS, 128))
    weight = packed(plain).weight
    for view in (
        lambda w: w[5],
        lambda w: w[5:7],
        lambda w: w[:, 1:3],
        lambda w: w[:],
        lambda w: w.view(-1),
    ):
        with torch.inference_mode():
            found, expected = view(weight), view(plain)
            assert found.is_inference() == expected.is_inference()
        assert same_bits(found + 0, expected + 0)


def test_rows_of_a_deferred_state_dict_are_decoded_on_the_host(monkeypatch):
    plain = packable(torch.bfloat16, (ROWS, 128))
    model = packed(plain)
    weight = deferred_state_dict(model)["weight"]
    decoded = watched(model, monkeypatch)
    assert weight.is_meta
    ids = torch.tensor([-1])
    assert same_bits(weight[5:7], plain[5:7]) and same_bits(weight[ids], plain[ids])
    assert decoded == [5, 6, ROWS - 1]
