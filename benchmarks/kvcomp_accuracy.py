"""What SmolLM2 predicts from packed history: perplexity, distance to the plain model, bytes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from common.arguments import DTYPES
from llm_workload import Rows
from textgen.accuracy import Score, scores
from textgen.compared import compared, named_caches
from textgen.smollm import load_model, load_tokenizer, text_ids

#: At this ratio or more: the largest KL, and the least share of same top tokens, in percent.
ASKED = ((7.3, 0.03, 90.0), (6.6, 0.015, 92.0), (5.5, 0.006, 95.0))
#: What perplexity may be, in those of the plain model's.
PERPLEXITY = 1.02
#: Predicted tokens between two prints of the scores so far.
EVERY_TOKENS = 512


def run(arguments: argparse.Namespace, report: Any) -> dict[str, Rows]:
    """Return the table."""
    dtype = DTYPES[arguments.dtype]
    model = load_model(dtype, arguments.device)
    model.set_attn_implementation("bitslab")
    ids = text_ids(load_tokenizer(), arguments.tokens).to(arguments.device)
    caches = named_caches(
        model.config,
        errors=arguments.error,
        scales=arguments.scales or (),
        peers=arguments.peers,
    )
    found = scores(
        model,
        ids,
        caches,
        prompt_tokens=arguments.prompt_tokens,
        padding_tokens=arguments.padding,
        progress=report,
        interim=_shown,
    )
    rows: Rows = []
    plain = 0.0
    for each in compared(found, dtype):
        row = each.as_dict()
        tokens = row.pop("tokens")
        plain = plain or row["perplexity"]
        row["perplexity %"] = 100 * (row["perplexity"] / plain - 1)
        if each.cache.startswith("KVCompCache"):
            row["measured error"] = _mean_error(each.score.stats)
            row["lossless layers"] = len(each.score.stats["lossless"])
            row["asked"] = _verdict(row, plain)
        rows.append(row)
        print(json.dumps(row), file=sys.stderr)
    where = arguments.device.type
    behind = f", padded by {arguments.padding:,}" if arguments.padding else ""
    return {
        f"SmolLM2 ({arguments.dtype}, {where}): {tokens:,} tokens predicted behind a prompt of "
        f"{arguments.prompt_tokens:,}{behind}": rows
    }


def _shown(found: Mapping[str, Score]) -> None:
    """Print the scores so far, every EVERY_TOKENS."""
    (_, plain), *others = found.items()
    if plain.tokens % EVERY_TOKENS:
        return
    for name, score in others:
        row = {"cache": name, **score.row}
        row["perplexity %"] = 100 * (row["perplexity"] / plain.row["perplexity"] - 1)
        print("so far:", json.dumps(row), file=sys.stderr, flush=True)


def _mean_error(stats: Any) -> float:
    errors = stats["errors"].values()
    return float(sum(errors)) / max(1, len(errors))


def _verdict(row: dict[str, Any], plain: float) -> str:
    for ratio, divergence, same in ASKED:
        if row["ratio"] >= ratio:
            fine = (
                row["KL to plain"] <= divergence
                and row["same top token %"] >= same
                and abs(row["perplexity"] / plain - 1) <= PERPLEXITY - 1
            )
            return f"KL <= {divergence}, top >= {same:g} %: {'ok' if fine else 'missed'}"
    return f"ratio >= {ASKED[-1][0]}: missed"
