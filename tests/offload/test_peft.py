"""Adapters of peft on top of streamed weights, put there before and after."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from bitslab.errors import BitslabError
from bitslab.offload import WeightHandle, offload_weights, restore_weights
from tests.helpers import same_bits
from tests.offload.models import logits, tiny_llama, token_ids

# peft asks transformers for what that calls by another name now.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def with_adapters(model):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], lora_dropout=0.0)
    adapted = get_peft_model(model, config)
    torch.manual_seed(7)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return adapted


def gradients(model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    ids = token_ids()
    model(input_ids=ids, labels=ids).loss.backward()
    return {
        n.replace("base_model.model.", ""): p.grad.clone()
        for n, p in model.named_parameters()
        if p.grad is not None
    }


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_train_on_streamed_weights(when):
    plain = with_adapters(tiny_llama())
    expected, wanted = logits(plain), gradients(plain)
    assert any("lora_A" in name for name in wanted)
    if when == "before":
        model = with_adapters(tiny_llama())
        offload_weights(model, execution_device="cpu", min_bytes=0)
    else:
        base = tiny_llama()
        offload_weights(base, execution_device="cpu", min_bytes=0)
        model = with_adapters(base)
    packed = [n for n, p in model.named_parameters() if isinstance(p, WeightHandle)]
    assert len(packed) == 30 - 0 - sum("lora" in n for n in packed)
    assert same_bits(logits(model), expected)
    found = gradients(model)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    state = plain.state_dict()
    assert all(same_bits(t, state[n]) for n, t in model.state_dict().items())


def test_a_merge_needs_plain_weights():
    model = with_adapters(tiny_llama())
    offload_weights(model, execution_device="cpu", min_bytes=0)
    with pytest.raises(BitslabError, match="restore_weights"):
        model.merge_and_unload()
    restore_weights(model)
    expected = logits(model)
    assert torch.allclose(logits(model.merge_and_unload()), expected, atol=1e-5)
