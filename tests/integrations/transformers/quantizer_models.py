"""Tiny models with random weights, written as checkpoints, and what a plain load of them gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def _bert() -> Any:
    options = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
    return transformers.BertConfig(**options)


def _mixtral() -> Any:
    return transformers.MixtralConfig(**BASE, num_local_experts=4)


def _gpt2() -> Any:
    return transformers.GPT2Config(
        n_embd=64, n_layer=3, n_head=4, vocab_size=512, n_positions=64, tie_word_embeddings=True
    )


def _opt() -> Any:
    return transformers.OPTConfig(
        hidden_size=64,
        word_embed_proj_dim=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        ffn_dim=128,
        vocab_size=512,
        max_position_embeddings=64,
    )


#: A plain one, one with tied embeddings, learnt positions, transposed weights, merged experts, and
#: an encoder.
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "gemma": lambda: transformers.GemmaConfig(**BASE, head_dim=16),
    "opt": _opt,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "bert": _bert,
}


def auto_class(kind: str) -> Any:
    return (
        transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    )


def make_model(kind: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """Make a model whose biases and norms are drawn too, so that none is all zeros."""
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = auto_class(kind).from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def write_model(
    kind: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Path:
    """Write a model as a checkpoint; return its folder."""
    make_model(kind, dtype, **changes).save_pretrained(folder)
    return folder


def inputs(lines: int = 2, tokens: int = 9) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 512, (lines, tokens), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(**inputs()).logits
    return found


def weights_file(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()
