"""Batches that generate together on a real GPU: the plain model's tokens, one pass of bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitslab.integrations.accelerate import generate_blocks, offload_compressed
from tests.offload.models import stats, tiny_llama, token_ids

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

PLACES: dict[str, dict[str, Any]] = {
    "streamed": {},
    "packed": {"keep": "packed"},
    "half": {"keep": 0.5},
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 3.0},
    "beams": {"do_sample": False, "num_beams": 3},
}


def streamed(**options: Any) -> Any:
    model = tiny_llama(dtype=torch.bfloat16)
    offload_compressed(model, execution_device="cuda", min_bytes=0, **options)
    return model


def prompts() -> list[dict[str, torch.Tensor]]:
    shapes = [(2, 9), (1, 4), (3, 13), (2, 9)]
    ids = [token_ids(*shape, seed).cuda() for seed, shape in enumerate(shapes)]
    return [{"input_ids": i, "attention_mask": torch.ones_like(i)} for i in ids]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("options", PLACES.values(), ids=PLACES)
def test_tokens_are_those_of_the_plain_model(options, mode):
    mode = {"max_new_tokens": 8, **mode}
    plain = tiny_llama(dtype=torch.bfloat16).cuda()
    expected = []
    for number, batch in enumerate(prompts()):
        torch.manual_seed(number)
        expected.append(plain.generate(**batch, **mode))
    model = streamed(**options)
    for _ in range(2):
        found = generate_blocks(model, prompts(), seeds=range(len(expected)), **mode)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.is_cuda and torch.equal(one, other)


def test_a_unit_crosses_once_for_all_batches():
    model = streamed()
    batches = [token_ids(1, 6, seed).cuda() for seed in range(4)]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}

    def moved(given: list[torch.Tensor]) -> int:
        before = stats(model)["moved_bytes"]
        generate_blocks(model, given, **options)
        return stats(model)["moved_bytes"] - before

    moved(batches[:1])  # the order of the units is known from here on
    alone = [moved([batch]) for batch in batches]
    together = moved(batches)
    assert min(alone) > 0
    assert together < 1.25 * max(alone)


def test_nothing_crosses_for_units_that_are_packed_on_the_device():
    model = streamed(keep="packed")
    generate_blocks(model, prompts(), max_new_tokens=4, do_sample=False)
    assert stats(model)["moved_bytes"] == 0
    assert stats(model)["loads"] > 0
    assert stats(model)["buffers"] <= 2


def test_batches_run_on_the_callers_stream():
    model = streamed()
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = generate_blocks(model, prompts(), **options)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    seen = []
    hook = model.model.norm.register_forward_pre_hook(
        lambda *_: seen.append(torch.cuda.current_stream().cuda_stream)
    )
    with torch.cuda.stream(side):
        found = generate_blocks(model, prompts(), **options)
    torch.cuda.current_stream().wait_stream(side)
    hook.remove()
    assert set(seen) == {side.cuda_stream}
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
