"""KVCompCache.captured_steps: caches, changes, passes and arguments that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitslab import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.integrations.transformers import HeavyHitterSelector, KVCompCache
from tests.integrations.transformers.models import prompt_of
from tests.integrations.transformers.steps import (
    PROMPT,
    SIZES,
    Decoding,
    open_block,
    stepped_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")


CHANGES: dict[str, Any] = {
    "crop": lambda cache: cache.crop(-1),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([0])),
    "reset": lambda cache: cache.reset(),
    "another-block": lambda cache: cache.captured_steps(3).__enter__(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_refuses_what_would_move_its_tokens(change: str) -> None:
    stepped = Decoding(stepped_model("llama"))
    with stepped.steps(4):
        stepped.take(stepped.forward())
        with pytest.raises(BitslabError, match=r"captured_steps\(\)"):
            CHANGES[change](stepped.cache)
        stepped.take(stepped.forward())
    assert stepped.cache.get_seq_length() == PROMPT + 2
    if change != "another-block":
        CHANGES[change](stepped.cache)


def test_a_step_that_cannot_be_read_packed_is_refused() -> None:
    stepped = Decoding(stepped_model("llama"), batch=2)
    model, cache = stepped.model, stepped.cache
    with stepped.steps(4) as steps:
        with torch.no_grad(), pytest.raises(ArgumentError, match="key_states: 3 tokens; within"):
            model(prompt_of(batch=2, length=3), past_key_values=cache)
        with torch.no_grad(), pytest.raises(ArgumentError, match="shape"):
            model(prompt_of(batch=3, length=1), past_key_values=cache)
        mask = torch.ones(2, PROMPT + 1, dtype=torch.int64)
        mask[0, :5] = 0
        with torch.no_grad(), pytest.raises(BitslabError, match="without a mask"):
            model(stepped.ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(BitslabError, match=r"gradients \(run the model within torch.no_grad"):
            model(stepped.ids, past_key_values=cache)
        model.set_attn_implementation("sdpa")
        with torch.no_grad(), pytest.raises(BitslabError, match='attention by "bitslab"'):
            model(stepped.ids, past_key_values=cache)
        model.set_attn_implementation("bitslab")
        assert steps.tokens == 0 and cache.get_seq_length() == PROMPT
        stepped.take(stepped.forward())
    plain = Decoding(model, batch=2)
    plain.eager(1)
    assert torch.allclose(stepped.all_logits(), plain.all_logits(), rtol=1e-4, atol=1e-4)


ARGUMENTS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "none": (0, {}, ArgumentError, "tokens: 0, accepted are integers from 1"),
    "float": (2.5, {}, ArgumentTypeError, "tokens: expected an int, got 2.5"),
    "mask-list": (
        4,
        {"attention_mask": [1]},
        ArgumentTypeError,
        "attention_mask: expected a tensor",
    ),
    "mask-short": (
        4,
        {"attention_mask": torch.ones(1, 9)},
        ArgumentError,
        rf"attention_mask: shape \[1, 9\], accepted is \[1, {PROMPT}\]",
    ),
    "mask-right": (
        4,
        {"attention_mask": torch.ones(1, PROMPT).index_fill(1, torch.tensor([9]), 0)},
        ArgumentError,
        "accepted are sequences with padding on the left alone",
    ),
}


@pytest.mark.parametrize(("tokens", "options", "kind", "text"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_are_checked(
    tokens: Any, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    stepped = Decoding(stepped_model("llama"))
    with pytest.raises(kind, match=text):
        open_block(stepped.cache, tokens, **options)
    stepped.eager(2)


@pytest.mark.parametrize("offload", [True, 0.5, "auto"])
def test_words_in_host_memory_are_refused(offload: Any) -> None:
    stepped = Decoding(stepped_model("llama"), offload=offload)
    with pytest.raises(ArgumentError, match="offload: packed words lie in host memory"):
        open_block(stepped.cache)


def test_caches_that_attention_does_not_read_packed_are_refused() -> None:
    model = stepped_model("llama")
    selecting = KVCompCache(model.config, select=HeavyHitterSelector(0.5, 4), offload=False)
    with pytest.raises(ArgumentError, match="select: "):
        open_block(selecting)
    with pytest.raises(BitslabError, match="hold a prompt, on one device, this one is on none"):
        open_block(KVCompCache(model.config, offload=False))
    for options, text in (
        ({"error": 0}, r"layer 0 .*\(error 0\)"),
        ({"granularity": "token", "error": 0.3}, r"layer 0 .*\(granularity 'token'\)"),
        ({"window": 64}, rf"layer 0 .*of {PROMPT} tokens none is packed: there are 4 first and 64"),
    ):
        with pytest.raises(BitslabError, match=text):
            open_block(Decoding(model, **options).cache)
    stepped = Decoding(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(BitslabError, match=r'call model.set_attn_implementation\("bitslab"\)'):
        open_block(stepped.cache)


def test_layers_of_other_kinds_are_refused() -> None:
    model = stepped_model("gemma2")
    cache = KVCompCache(model.config, **SIZES)
    with torch.no_grad():
        model(prompt_of(length=PROMPT), past_key_values=cache)
    with pytest.raises(BitslabError, match="layers all have full attention, this one has Dynamic"):
        open_block(cache)
