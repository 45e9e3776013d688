"""Batches that generate together get the tokens that they get alone, from fewer transfers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from bitslab.errors import ArgumentError
from bitslab.integrations.accelerate import generate_blocks, offload_compressed
from tests.offload.models import logits, stats, tiny_llama, token_ids


@pytest.fixture
def model():
    model = tiny_llama()
    offload_compressed(model, execution_device="cpu", min_bytes=0)
    return model


def prompts() -> list[dict[str, Any]]:
    shapes = [(2, 9), (1, 4), (3, 13), (2, 9)]
    ids = [token_ids(*shape, seed) for seed, shape in enumerate(shapes)]
    return [{"input_ids": i, "attention_mask": torch.ones_like(i)} for i in ids]


OPTIONS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 3.0},
    "beams": {"do_sample": False, "num_beams": 3},
    "prompt-lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tokens_equal_those_of_each_batch_alone(model, options):
    options = {"max_new_tokens": 4, **options}
    batches = prompts()
    if "prompt_lookup_num_tokens" in options:
        batches = [{name: t[:1] for name, t in batch.items()} for batch in batches]
    alone = []
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        alone.append(model.generate(**batch, **options))
    together = generate_blocks(model, batches, seeds=range(len(batches)), **options)
    assert len(together) == len(alone)
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)
    if options["do_sample"]:
        assert torch.equal(torch.rand(3), rand_after(model, batches[-1], len(batches) - 1, options))


def rand_after(model, batch, seed, options):
    torch.manual_seed(seed)
    model.generate(**batch, **options)
    return torch.rand(3)


def test_one_transfer_serves_all_batches(model):
    batches = [token_ids(1, 6, seed) for seed in range(4)]
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    before = stats(model)["loads"]
    generate_blocks(model, batches[:1], **options)
    once = stats(model)["loads"] - before
    generate_blocks(model, batches, **options)
    assert stats(model)["loads"] - before - once <= once + 1
    assert stats(model)["buffers"] <= 2


def test_batches_end_when_they_are_done(model):
    batches = prompts()
    lengths = [1, 9, 3, 5]
    given = [{**b, "max_new_tokens": n} for b, n in zip(batches, lengths, strict=True)]
    together = generate_blocks(model, given, do_sample=False)
    for batch, found in zip(given, together, strict=True):
        assert torch.equal(found, model.generate(**batch, do_sample=False))


def test_an_error_stops_all_and_leaves_the_model_usable(model):
    expected = logits(model)
    batches = prompts()
    calls: list[int] = []

    def fails(ids, scores):
        calls.append(len(calls))
        if len(calls) == 3:
            raise RuntimeError("no more")
        return scores

    batches[1]["logits_processor"] = [fails]
    with pytest.raises(RuntimeError, match="no more"):
        generate_blocks(model, batches, do_sample=False, max_new_tokens=8)
    assert not [t for t in threading.enumerate() if t.name.startswith("bitslab-generate")]
    assert torch.equal(logits(model), expected)
    assert stats(model)["buffers"] <= 2
    generate_blocks(model, prompts(), do_sample=False, max_new_tokens=2)


def test_the_callers_modes_hold_in_every_batch(model):
    seen = []
    hook = model.model.norm.register_forward_pre_hook(
        lambda *_: seen.append(
            (torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))
        )
    )
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        generate_blocks(model, [token_ids(), token_ids()], do_sample=False, max_new_tokens=2)
    hook.remove()
    assert set(seen) == {(True, True)}


def test_bad_arguments_are_refused(model):
    with pytest.raises(ArgumentError, match="none of its weights"):
        generate_blocks(tiny_llama(), [token_ids()])
    with pytest.raises(ArgumentError, match="no batches"):
        generate_blocks(model, [])
    with pytest.raises(TypeError, match="sequence of batches"):
        generate_blocks(model, token_ids())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="batch 1 is a str"):
        generate_blocks(model, [token_ids(), "text"])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="seeds"):
        generate_blocks(model, [token_ids()], seeds=[1, 2])
    with pytest.raises(ArgumentError, match="past_key_values"):
        generate_blocks(model, [token_ids()], past_key_values=object())
    with pytest.raises(ArgumentError, match="static"):
        generate_blocks(model, [token_ids()], cache_implementation="static")
