"""What SmolLM2 predicts from packed history: perplexity, distance to the plain model, bytes."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from graphsage.options import DTYPES
from llm_workload import Rows
from textgen.accuracy import scores
from textgen.compared import compared, named_caches
from textgen.smollm import load_model, load_tokenizer, text_ids

#: At this ratio or more: the largest KL, and the least share of same top tokens, in percent.
ASKED = ((7.3, 0.03, 90.0), (6.6, 0.015, 92.0), (5.5, 0.006, 95.0))
#: What perplexity may be, in those of the plain model's.
PERPLEXITY = 1.02


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
        model, ids, caches, prompt_tokens=arguments.prompt_tokens, progress=_shown(report)
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
    return {
        f"SmolLM2 ({arguments.dtype}, {where}): {tokens:,} tokens predicted behind a prompt of "
        f"{arguments.prompt_tokens:,}": rows
    }


def _shown(report: Any) -> Any:
    def progress(done: int, total: int) -> None:
        report(done, total)
        if done % 512 == 0:
            print(f"accuracy: {done} of {total} tokens", file=sys.stderr)

    return progress


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
