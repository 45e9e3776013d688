"""Models to generate with: one of the caller's, or one with random weights, made offline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """Sizes of a random model; `mlp` is the width of its MLP, `vocabulary` the tokens it knows."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SIZES = {
    "tiny": Shape(2, 128, 4, 2, 256, 512),
    "small": Shape(4, 512, 8, 4, 1376, 8_192),
    "medium": Shape(12, 1024, 16, 8, 2816, 32_000),
    "1b": Shape(16, 2048, 32, 8, 8192, 32_000),
    "7b": Shape(32, 4096, 32, 32, 11008, 32_000),
}


@dataclass(frozen=True)
class Prompt:
    """Tokens to begin with.

    Attributes
    ----------
    ids : torch.Tensor
        int64 ``[batch, tokens]``.
    mask : torch.Tensor
        int64, of the same shape: 0 where there is padding, on the left.
    """

    ids: torch.Tensor
    mask: torch.Tensor

    def to(self, device: torch.device) -> Prompt:
        return Prompt(self.ids.to(device), self.mask.to(device))


def _llama(shape: Shape, positions: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_shared(shape, positions))


def _qwen3(shape: Shape, positions: int) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(head_dim=shape.head_dim, **_shared(shape, positions))


def _gemma(shape: Shape, positions: int) -> Any:
    from transformers import GemmaConfig

    return GemmaConfig(head_dim=shape.head_dim, **_shared(shape, positions))


def _opt(shape: Shape, positions: int) -> Any:
    from transformers import OPTConfig

    return OPTConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        word_embed_proj_dim=shape.hidden,
        num_attention_heads=shape.heads,
        ffn_dim=shape.mlp,
        vocab_size=shape.vocabulary,
        max_position_embeddings=positions,
    )


def _shared(shape: Shape, positions: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.mlp,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": positions,
    }


#: Gemma ties its head to the embeddings and scales them; OPT has learnt positions and biases.
RANDOM: dict[str, Callable[[Shape, int], Any]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "opt": _opt,
}


def write_random_model(
    kind: str,
    shape: Shape,
    dtype: torch.dtype,
    positions: int,
    seed: int,
    folder: Path,
    device: torch.device = CPU,
) -> None:
    """Make a model with random weights and write it as `save_pretrained` does.

    Parameters
    ----------
    kind : {"llama", "qwen3", "gemma", "opt"}
        Which architecture.
    shape : Shape
        One of SIZES, or another.
    dtype : torch.dtype
        Of the weights.
    positions : int
        Tokens that it must be able to attend to.
    seed : int
        Of the weights.
    folder : Path
        Where the model is written.
    device : torch.device
        Where weights are drawn: a GPU is faster, and draws others than a CPU.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = RANDOM[kind](shape, positions)
    config.dtype = dtype
    # Random weights end a text as soon as any token; lengths must be the requested ones.
    config.eos_token_id = None
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)


def random_prompt(vocabulary: int, batch: int, tokens: int, seed: int) -> Prompt:
    """Draw a prompt evenly from the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (batch, tokens), generator=generator)
    return Prompt(ids, torch.ones_like(ids))


def written_prompt(tokenizer: Any, texts: list[str]) -> Prompt:
    """Tokenise texts, and pad the shorter ones on the left."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    found = tokenizer(texts, return_tensors="pt", padding=True)
    return Prompt(found["input_ids"], found["attention_mask"])
