"""Tiny random models of ten architectures."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

from bitslab.integrations.transformers import CompressedCache

#: Options so small that blocks are packed many times.
SMALL: dict[str, Any] = {"window": 4, "block_tokens": 8}
VOCABULARY = 96
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "qwen3": ("Qwen3", GROUPED),
    "gemma2": ("Gemma2", {**GROUPED, **SLIDING}),
    "gemma3": ("Gemma3Text", {**GROUPED, **SLIDING}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": None}),
    "phi3": ("Phi3", {"num_key_value_heads": 2}),
    "gpt-neox": ("GPTNeoX", {}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt2": (
        "GPT2",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
        },
    ),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
#: Whose layers are of further kinds: linear ones beside attention, some that share the K and V of
#: another, values narrower than keys.
UNUSUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "Qwen3Next",
        {
            **GROUPED,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "gemma3n": (
        "Gemma3nText",
        {
            **GROUPED,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 24,
            "num_kv_shared_layers": 1,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "deepseek": (
        "DeepseekV3",
        {
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "first_k_dense_replace": 2,
        },
    ),
}
CLASSES = {
    "Gemma3Text": "Gemma3ForCausalLM",
    "Gemma3nText": "Gemma3nForCausalLM",
    "GPT2": "GPT2LMHeadModel",
}


def cache_traits(name: str) -> tuple[bool, ...]:
    """Return what of an architecture its cache sees: fewer heads, a sliding window, rotation."""
    _, options = {**CONFIGS, **UNUSUAL}[name]
    return "num_key_value_heads" in options, "layer_types" in options, name in ("opt", "gpt2")


def config_of(name: str, **changes: Any) -> Any:
    """Return the config of an architecture."""
    kind, options = {**CONFIGS, **UNUSUAL}[name]
    return getattr(transformers, f"{kind}Config")(**{**BASE, **options, **changes})


@functools.cache
def model_of(name: str, seed: int = 0) -> Any:
    """Return a model with random weights; one for all tests, which leave it as it is."""
    kind, _ = {**CONFIGS, **UNUSUAL}[name]
    model_class = getattr(transformers, CLASSES.get(kind, f"{kind}ForCausalLM"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_of(name)).eval()
    model.generation_config.pad_token_id = 0
    return model


def prompt_of(batch: int = 1, length: int = 50, seed: int = 0) -> torch.Tensor:
    """Return int64 ``[batch, length]`` tokens, with repeats in them for prompt lookup."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, VOCABULARY, (batch, length), generator=generator)
    half = length // 2
    tokens[:, half : 2 * half] = tokens[:, :half]
    return tokens


def compressed(config: Any, **options: Any) -> Any:
    """Return a CompressedCache, whose layers the type checker takes for any."""
    return CompressedCache(config, **options)


def dynamic(config: Any) -> Any:
    """Return the cache that it is compared with."""
    return transformers.DynamicCache(config=config)
