"""What language models save for their backward pass, by kind of tensor.

MiniLM is tuned for some steps on text of this checkout, as SimCSE does, in training mode, and saves
a batch of it. SmolLM2, a Llama of 135 million parameters as it was trained, saves a text in a
forward pass with eager attention. Kinds are distinguished by shape and bits: a cast of bfloat16 is
float32 whose lower halves are all zero, and what has few zeros is dense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from cnn.saved import Saved, recorded
from textgen.smollm import ModelMissingError, load_model, load_tokenizer, text_ids
from torch.nn import functional

#: Rows of a table: which kinds of saved tensors they sum, None for all.
KINDS: dict[str, tuple[str, ...] | None] = {
    "dropout masks": ("dropout mask",),
    "dropped softmax": ("dropped softmax",),
    "softmax, float32": ("softmax, float32",),
    "softmax, bfloat16": ("softmax, bfloat16",),
    "casts of bfloat16 to float32": ("cast",),
    "dense": ("dense",),
    "everything": None,
}
#: A tensor with fewer zeros is dense.
DENSE_ZEROS = 0.01
#: Lines of text in a batch of MiniLM, each seen twice, their tokens, and steps of tuning.
LINES, TOKENS, TUNED_STEPS = 2, 128, 3
#: Of SmolLM2.
TEXT_TOKENS = 256
TEMPERATURE = 0.05

Report = Callable[[str], None]
#: A title, and what was saved.
Found = tuple[str, list[Saved]]


def minilm(dtype: torch.dtype, report: Report) -> Found:
    """Tune MiniLM, and return what it saves."""
    import llm_minilm

    model = llm_minilm.load(dtype).train()
    report(f"minilm, {dtype}: {TUNED_STEPS} steps")
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    for step in range(TUNED_STEPS):
        optimizer.zero_grad()
        loss = contrastive_loss(model, llm_minilm.batch(LINES, TOKENS, seed=step))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    optimizer.zero_grad()
    inputs = llm_minilm.batch(LINES, TOKENS, seed=TUNED_STEPS)
    with recorded(model, inputs["input_ids"]) as recorder:
        loss = contrastive_loss(model, inputs)
    found = recorder.named()
    del loss
    title = f"tuned for {TUNED_STEPS} steps, {2 * LINES} x {TOKENS} tokens"
    return f"all-MiniLM-L6-v2, {_name(dtype)}, {title}", by_kind(found, dtype, TOKENS)


def smollm2(dtype: torch.dtype, report: Report) -> Found:
    """Return what SmolLM2 saves of a text."""
    report(f"smollm2, {dtype}: loading")
    model = load_model(dtype)
    model.set_attn_implementation("eager")
    model.config.use_cache = False
    ids = text_ids(load_tokenizer(), TEXT_TOKENS)
    with recorded(model, ids) as recorder:
        logits = model(ids).logits
    found = recorder.named()
    del logits
    title = f"eager attention, {TEXT_TOKENS} tokens"
    return f"SmolLM2-135M, {_name(dtype)}, {title}", by_kind(found, dtype, TEXT_TOKENS)


MODELS: dict[str, Callable[[torch.dtype, Report], Found]] = {"minilm": minilm, "smollm2": smollm2}
#: What a model raises that is not installed.
MISSING = (ImportError, FileNotFoundError, ModelMissingError)


def by_kind(saved: Sequence[Saved], dtype: torch.dtype, tokens: int) -> list[Saved]:
    """Return saved tensors with the kinds of `KINDS`, where they are of one.

    Parameters
    ----------
    saved : sequence of Saved
        As they were recorded.
    dtype : torch.dtype
        What the model computes in.
    tokens : int
        Of a sequence: attention's weights are ``[..., tokens, tokens]``.
    """
    return [replace(each, kind=_kind(each, dtype, tokens)) for each in saved]


def _kind(saved: Saved, dtype: torch.dtype, tokens: int) -> str:
    values = saved.values
    if saved.kind == "dropout mask":
        return saved.kind
    if len(saved.shape) > 2 and saved.shape[-2:] == (tokens, tokens):
        return _kind_of_weights(values.view(-1, tokens, tokens))
    if values.dtype == torch.float32 != dtype and _is_cast(values):
        return "cast"
    if values.dtype == dtype and saved.zeros < DENSE_ZEROS:
        return "dense"
    return saved.kind


def _kind_of_weights(weights: torch.Tensor) -> str:
    """Return what attention's weights are, ``[n, tokens, tokens]``, by where they have zeros."""
    below = torch.ones(weights.shape[-2:]).tril().bool()
    values = weights[:, below]
    if len(values.unique()) <= 2:  # type: ignore[no-untyped-call]
        return "dropout mask"
    if values.eq(0).float().mean() > DENSE_ZEROS:  # not those above, of a causal mask
        return "dropped softmax"
    return f"softmax, {_name(weights.dtype)}"


def _is_cast(values: torch.Tensor) -> bool:
    """Return whether float32 values are those of bfloat16."""
    words = values.view(torch.int32)
    return bool(words.any()) and not bool((words & 0xFFFF).any())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def contrastive_loss(model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return SimCSE's loss: lines are seen twice, under two masks of dropout, and find each other.

    Parameters
    ----------
    model : transformers.BertModel
        In training mode.
    inputs : mapping
        ``input_ids`` and ``attention_mask``, ``[lines, tokens]``.
    """
    twice = {name: torch.cat([values, values]) for name, values in inputs.items()}
    hidden = model(**twice).last_hidden_state  # [2 lines, tokens, width]
    first, second = functional.normalize(hidden.mean(1).float(), dim=-1).chunk(2)
    scores = first @ second.T / TEMPERATURE
    return functional.cross_entropy(scores, torch.arange(len(first)))
