"""`offload_activations` of models with LoRA adapters of peft, attached before them or after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import bitslab

accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # peft asks transformers for what that calls by another name now.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

#: All that is saved moves.
RAW: dict[str, Any] = {"policy": "raw", "min_bytes": 256, "in_flight_bytes": 0, "verify": True}
PACKED = {**RAW, "policy": "static", "codecs": "zvc"}
PLANNED: dict[str, Any] = {"memory": 150_000, "min_bytes": 256, "codecs": []}
Attach = Callable[[Any], bitslab.ActivationOffload]


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            use_cache=False,
        )
    ).train()


def adapted(model: Any) -> Any:
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], lora_dropout=0.1
    )
    torch.manual_seed(7)
    found = peft.get_peft_model(model, config)
    for name, parameter in found.named_parameters():
        if "lora_" in name:  # of which peft sets one of two to zero
            torch.nn.init.normal_(parameter, std=0.05)
    return found


def trained(model: Any, backward: Callable[[torch.Tensor], object]) -> list[torch.Tensor]:
    """Return losses and gradients of steps, and what the adapters are then."""
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(adapters, lr=0.1)
    found = []
    torch.manual_seed(11)  # of dropout
    generator = torch.Generator().manual_seed(3)
    for _ in range(8):
        ids = torch.randint(96, (4, 16), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        backward(loss)
        found += [loss.detach(), *(p.grad.clone() for p in adapters)]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.detach().clone() for p in adapters]


@pytest.mark.drawn(3)
@pytest.mark.filterwarnings("ignore:bitslab. memory_bytes:UserWarning")  # of the least possible
@pytest.mark.parametrize("options", [RAW, PACKED, PLANNED], ids=["raw", "packed", "planned"])
@pytest.mark.parametrize("when", ["before", "after", "prepared"])
def test_adapters_train_alike(when: str, options: dict[str, Any]) -> None:
    expected = trained(adapted(llama()), lambda loss: loss.backward())
    base = llama()
    backward: Callable[[torch.Tensor], object] = lambda loss: loss.backward()  # noqa: E731
    if when == "before":
        offload = bitslab.offload_activations(base, **options)
        model = adapted(base)
    elif when == "after":
        model = adapted(base)
        offload = bitslab.offload_activations(model, **options)
    else:
        from bitslab.integrations.accelerate import offload_activations

        accelerator = accelerate.Accelerator(cpu=True)
        model, backward = accelerator.prepare(adapted(base)), accelerator.backward
        offload = offload_activations(accelerator, model, **options)
    found = trained(model, backward)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert offload.stats()["moved_tensors"] > 0
    if options is PLANNED:
        assert offload.plan is not None and not offload.plan.declined
    offload.close()


def test_the_report_names_adapters() -> None:
    model = adapted(llama())
    offload = bitslab.offload_activations(model, **RAW)
    trained(model, lambda loss: loss.backward())
    named = [str(site.unit.name) for site in offload.report().sites if site.tensors]
    assert any("lora_A" in name for name in named)
    offload.close()
