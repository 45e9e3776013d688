"""Accuracy over the scale of K or of V alone, and the turning points: figures 5 to 7 of the paper.

The other side has steps so fine that they do not count. A turning point is the largest scale of a
curve up to which SmolLM2 names the next token of the text right nearly as often as with plain K and
V: at least 97 % as often, which is the paper's criterion (section 4.2.1).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.arguments import DTYPES
from kvcomp_ratio import bits_of
from kvcomp_states import smollm2, text
from llm_workload import Rows
from textgen.accuracy import CHUNK_TOKENS, scores
from transformers import DynamicCache

from bitslab.integrations.transformers import KVCompCache

#: Of the plain model's share of tokens that are named right.
CRITERION = 0.97
#: Of all curves.
PLAIN = "plain"


@dataclass(frozen=True)
class Curve:
    """Scales of one side.

    Parameters
    ----------
    granularity : str
        Where steps come from.
    kind : int
        0 for K, 1 for V.
    scales : tuple of float
        What is measured.
    fine : float
        The scale of the other side.
    """

    granularity: str
    kind: int
    scales: tuple[float, ...]
    fine: float

    def options(self, scale: float) -> dict[str, Any]:
        """Return what makes a cache of a scale."""
        both = [self.fine, self.fine]
        both[self.kind] = scale
        return {"granularity": self.granularity, "key_scale": both[0], "value_scale": both[1]}


CURVES = {
    "K by block, as published": Curve("block", 0, (0.02, 0.04, 0.06, 0.08, 0.12), 0.02),
    "K by channel, as published": Curve("channel", 0, (0.1, 0.2, 0.25, 0.3, 0.4), 0.02),
    "V by token, as published": Curve("channel", 1, (0.05, 0.1, 0.15, 0.2, 0.3), 0.02),
    "K weighted": Curve("weighted", 0, (0.5, 1.0, 2.0, 3.0, 4.5), 0.125),
    "V by rms": Curve("weighted", 1, (0.5, 0.7, 1.0, 1.4, 2.0), 0.125),
}


def run(arguments: argparse.Namespace, report: Any) -> dict[str, Rows]:
    """Return a row for each scale, and the turning points."""
    model = smollm2(arguments.device).to(DTYPES[arguments.dtype])
    model.set_attn_implementation("bitslab")
    made: dict[str, KVCompCache] = {}

    def keeping(name: str, options: dict[str, Any]) -> KVCompCache:
        made[name] = KVCompCache(
            model.config, window=CHUNK_TOKENS, block_tokens=CHUNK_TOKENS, **options
        )
        return made[name]

    caches: dict[str, Callable[[], Any]] = {PLAIN: partial(DynamicCache, config=model.config)}
    points = {
        f"{curve} {scale:g}": (curve, scale)
        for curve in arguments.curves
        for scale in CURVES[curve].scales
    }
    for name, (curve, scale) in points.items():
        caches[name] = partial(keeping, name, CURVES[curve].options(scale))
    ids = text(arguments.tokens, arguments.device)
    found = scores(model, ids, caches, prompt_tokens=arguments.prompt_tokens, progress=report)
    plain = found[PLAIN]
    rows: Rows = []
    for name, (curve, scale) in points.items():
        score = found[name]
        bits = bits_of(made[name], CURVES[curve].kind)
        rows.append(
            {
                "curve": curve,
                "scale": scale,
                "bits": bits,
                "ratio": 16 / bits,
                "accuracy, of plain": score.right / max(1, plain.right),
                "perplexity, of plain": score.row["perplexity"] / plain.row["perplexity"],
                "KL to plain": score.row["KL to plain"],
                "same top token %": score.row["same top token %"],
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr)
    return {
        f"SmolLM2: accuracy over the scale of one side, {plain.tokens:,} tokens predicted": rows,
        f"Turning points: accuracy is {CRITERION:.0%} of the plain model's": turning_points(rows),
    }


def turning_points(rows: Rows) -> Rows:
    """Return for each curve the last row up to which accuracy holds; a note where none does."""
    found: Rows = []
    for curve in dict.fromkeys(row["curve"] for row in rows):
        mine = [row for row in rows if row["curve"] == curve]
        fine = 0
        while fine < len(mine) and mine[fine]["accuracy, of plain"] >= CRITERION:
            fine += 1
        if not fine:
            found.append({"curve": curve, "note": f"below {mine[0]['scale']:g}"})
            continue
        row = {name: mine[fine - 1][name] for name in ("curve", "scale", "bits", "ratio")}
        found.append(row | ({"note": "or more"} if fine == len(mine) else {}))
    return found
