"""The bytes that a layer keeps, by its shape, beside what models of transformers keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from bitslab.activations.layer_sizes import TransformerLayer
from bitslab.errors import ArgumentError

BATCH, SEQUENCE, HIDDEN, HEADS = 2, 64, 128, 4
IDS = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % 100

GPT = TransformerLayer(HIDDEN, HEADS)
LLAMA = TransformerLayer(
    HIDDEN, HEADS, intermediate=352, norm="rms", activation="swiglu", float_softmax=True
)
T5 = TransformerLayer(HIDDEN, HEADS, norm="t5", activation="relu", attention="eager")
EAGER: dict[str, Any] = {"attention": "eager"}
DROPPED: dict[str, Any] = {"dropout": True, "attention_dropout": True, "attention": "eager"}


def saved_bytes(model: nn.Module, **inputs: torch.Tensor) -> int:
    """Return the bytes of all storages that a forward pass saves, parameters left out."""
    own = [*model.parameters(), *model.buffers()]
    skipped = {t.untyped_storage().data_ptr() for t in own}
    seen: dict[int, torch.UntypedStorage] = {}  # alive, so that no address is used twice

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in skipped:
            seen[storage.data_ptr()] = storage
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(**inputs)
    return sum(storage.nbytes() for storage in seen.values())


def of_one_layer(make: Callable[[int], nn.Module], dtype: torch.dtype, **inputs: Any) -> int:
    """Return what a layer adds."""
    two, three = (saved_bytes(make(n).to(dtype).train(), **inputs) for n in (2, 3))
    return three - two


def gpt2(layers: int, attention: str, drop: float, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=HIDDEN, n_head=HEADS, n_layer=layers, vocab_size=100, n_positions=SEQUENCE,
        resid_pdrop=drop, attn_pdrop=drop, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        **options,
    )  # fmt: skip
    config._attn_implementation = attention
    model: nn.Module = transformers.GPT2Model(config)
    return model


def bert(layers: int, attention: str, drop: float) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, intermediate_size=4 * HIDDEN,
        num_hidden_layers=layers, vocab_size=100, hidden_dropout_prob=drop,
        attention_probs_dropout_prob=drop,
    )  # fmt: skip
    config._attn_implementation = attention
    model: nn.Module = transformers.BertModel(config)
    return model


def llama(layers: int, attention: str, kv_heads: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=kv_heads,
        intermediate_size=352, num_hidden_layers=layers, vocab_size=100,
    )  # fmt: skip
    config._attn_implementation = attention
    model: nn.Module = transformers.LlamaModel(config)
    return model


def t5(layers: int, decoders: int, drop: float) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=HIDDEN, d_kv=HIDDEN // HEADS, num_heads=HEADS, d_ff=4 * HIDDEN, num_layers=layers,
        num_decoder_layers=decoders, vocab_size=100, dropout_rate=drop,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model: nn.Module = transformers.T5Model(config)
    return model


GELU: dict[str, Any] = {"activation_function": "gelu_pytorch_tanh"}
#: A model of so many layers, and the shape of one.
CASES: dict[str, tuple[Callable[[int], nn.Module], TransformerLayer]] = {
    "gpt2": (lambda n: gpt2(n, "eager", 0.0, **GELU), replace(GPT, **EAGER)),
    "gpt2-fused": (lambda n: gpt2(n, "sdpa", 0.0, **GELU), replace(GPT, fused_qkv=True)),
    "gpt2-dropout": (lambda n: gpt2(n, "eager", 0.1, **GELU), replace(GPT, **DROPPED)),
    "gpt2-gelu-new": (
        lambda n: gpt2(n, "eager", 0.0, activation_function="gelu_new"),
        replace(GPT, activation="gelu_new", **EAGER),
    ),
    "bert-fused": (lambda n: bert(n, "sdpa", 0.0), GPT),
    "bert-dropout": (lambda n: bert(n, "eager", 0.1), replace(GPT, **DROPPED)),
    "llama-fused": (lambda n: llama(n, "sdpa", HEADS), LLAMA),
    "llama-eager": (lambda n: llama(n, "eager", HEADS), replace(LLAMA, **EAGER)),
    "llama-shared-heads": (lambda n: llama(n, "sdpa", 2), replace(LLAMA, kv_heads=2)),
    "llama-shared-heads-eager": (
        lambda n: llama(n, "eager", 2),
        replace(LLAMA, kv_heads=2, **EAGER),
    ),
}


@pytest.mark.drawn(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_layer_keeps_what_its_shape_says(name: str, dtype: torch.dtype) -> None:
    make, layer = CASES[name]
    # On a CPU the mask of dropout has the dtype of what it drops.
    sizes: dict[str, Any] = {"dtype_bytes": dtype.itemsize, "mask_bytes": dtype.itemsize}
    expected = layer.saved_bytes(BATCH, SEQUENCE, **sizes)
    assert of_one_layer(make, dtype, input_ids=IDS) == pytest.approx(expected, rel=0.02)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("drop", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_t5_keeps_what_its_shape_says(dtype: torch.dtype, drop: float) -> None:
    """Of two encoders and two decoders more: cross attention counts."""
    dropout = bool(drop)
    layer = replace(T5, dropout=dropout, attention_dropout=dropout, activation_dropout=dropout)
    sizes: dict[str, Any] = {"dtype_bytes": dtype.itemsize, "mask_bytes": dtype.itemsize}
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS}
    encoder = layer.saved_bytes(BATCH, SEQUENCE, **sizes)
    found = of_one_layer(lambda n: t5(n, 1, drop), dtype, **inputs)
    assert found == pytest.approx(encoder, rel=0.02)
    both = replace(layer, cross_attention=True).saved_bytes(BATCH, SEQUENCE, **sizes)
    found = of_one_layer(lambda n: t5(1, n, drop), dtype, **inputs)
    assert found == pytest.approx(both, rel=0.05)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_published_formulas(ranks: int) -> None:
    """Korthikanti et al., equations 1, 2 and 4; statistics of norms are not counted there."""
    h, a, s, b = 4096, 32, 2048, 4
    layer = TransformerLayer(h, a, **DROPPED)
    plain = s * b * h * (10 + 24 / ranks + 5 * a * s / (h * ranks))
    found = layer.saved_bytes(b, s, tensor_parallel=ranks)
    assert found == pytest.approx(plain, rel=1e-3)
    split = s * b * h * (34 + 5 * a * s / h) / ranks
    found = layer.saved_bytes(b, s, tensor_parallel=ranks, sequence_parallel=True)
    assert found == pytest.approx(split, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 0}, "hidden: 0, expected an int from 1"),
        ({"kv_heads": 1.5}, "kv_heads: 1.5, expected"),
        ({"norm": "batch"}, "norm: 'batch', accepted are layer, rms, t5"),
        ({"activation": "tanh"}, "activation: 'tanh', accepted are gelu, gelu_new, relu, swiglu"),
        ({"attention": "linear"}, "attention: 'linear', accepted are fused, eager"),
    ],
)
def test_shapes_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        TransformerLayer(**({"hidden": 8, "heads": 2} | options))
    with pytest.raises(ArgumentError, match="sequence: 0"):
        GPT.saved_bytes(1, 0)
