"""Damaged bodies, decoded by the twins and by the kernels: refused, or decoded alike in bounds.

``python -m tests.simt.vector_fuzz --seed 1 --decodes 1000000`` decodes so many on the CPU;
``--simt`` decodes them by the kernels too. A body and the tensor that it is decoded to end where
nobody may read or write, so that a decode out of bounds ends the process.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import bitslab
from bitslab.engine.codecs.vectors import decode_body
from bitslab.engine.kernels.cuda.runner import NO_ERROR
from bitslab.engine.kernels.cuda.vector_decode import VectorDecodeKernels
from tests.helpers import same_bits
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner
from tests.simt.test_vector_decode import CASES, body_of, header_of

#: Rows of a tensor: few, that are coded as many are.
ROWS = 70
#: Bodies that kernels decode at once.
AT_ONCE = 32
FILL = 7


@dataclass
class Fuzzed:
    """What was decoded.

    Parameters
    ----------
    decodes, refused : int
        Bodies, and those that were refused.
    """

    decodes: int = 0
    refused: int = 0


class Case:
    """A body that is damaged again and again, in as many copies as are decoded at once."""

    def __init__(self, name: str, copies: int) -> None:
        codec, t, _, _ = CASES[name]
        self.like, self.bounded = t[:ROWS].contiguous(), codec.error_bound is not None
        self.sound = body_of(codec, self.like)
        self.head = header_of(self.sound).nbytes
        self.bodies = [body_of(codec, self.like) for _ in range(copies)]
        self.outs = [guarded(torch.full_like(self.like, FILL)) for _ in range(copies)]
        self.filled = torch.full_like(self.like, FILL)

    def damaged(self, draw: np.random.Generator) -> list[torch.Tensor]:
        """Return each copy with other bytes, bits, or an end that is cut off."""
        found = []
        for body in self.bodies:
            body.copy_(self.sound)
            whole = body.numpy()
            kind = int(draw.integers(8))
            end = self.head if kind < 3 else len(whole)
            places = draw.integers(0, end, int(draw.integers(1, 5)))
            if kind % 2:
                whole[places] ^= (1 << draw.integers(0, 8, len(places))).astype(np.uint8)
            else:
                whole[places] = draw.integers(0, 256, len(places), dtype=np.uint8)
            # What ends early ends where nobody may read, too.
            cut = 4 * int(draw.integers(1, 1 + len(whole) // 4)) if kind == 7 else 0
            found.append(body[cut:])
        return found

    def by_the_twins(self, bodies: list[torch.Tensor], seen: Fuzzed) -> list[torch.Tensor]:
        """Decode each; return what was written."""
        found = []
        for body, out in zip(bodies, self.outs, strict=True):
            out.copy_(self.filled)
            seen.decodes += 1
            try:
                decode_body(body.numpy(), out, bounded=self.bounded)
            except bitslab.CorruptedDataError:
                seen.refused += 1
                assert same_bits(out, self.filled), "a part of a refused body was written"
            found.append(out)
        return found


def fuzz(decodes: int, seed: int, *, simt: bool, names: tuple[str, ...] = tuple(CASES)) -> Fuzzed:
    """Decode so many damaged bodies; by the kernels too, they write what the twins write."""
    draw, seen = np.random.default_rng(seed), Fuzzed()
    copies = AT_ONCE if simt else 1
    cases = [Case(name, copies) for name in names]
    runner = SimtRunner(seed) if simt else None
    outs: list[list[torch.Tensor]] = [
        [guarded(each) for each in case.outs] if simt else [] for case in cases
    ]
    while seen.decodes < decodes:
        number = int(draw.integers(len(cases)))
        case, there = cases[number], outs[number]
        bodies, refused = case.damaged(draw), seen.refused
        wanted = case.by_the_twins(bodies, seen)
        if runner is None:
            continue
        for out in there:
            out.copy_(case.filled)
        VectorDecodeKernels(runner).decode_vectors(bodies, there, [case.bounded] * len(bodies))
        assert bool(runner.mailbox[0] == NO_ERROR) == (seen.refused == refused)
        runner.mailbox.zero_()
        for found, expected in zip(there, wanted, strict=True):
            assert same_bits(found, expected)
    return seen


def main() -> None:
    parser: Any = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decodes", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--simt", action="store_true", help="by the kernels on the CPU too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.monotonic()
    seen = fuzz(options.decodes, options.seed, simt=options.simt)
    where = "twins and kernels" if options.simt else "twins"
    took = time.monotonic() - begin
    print(
        f"{where}: {seen.decodes:,} damaged bodies, seed {options.seed}: {seen.refused:,} refused, "
        f"the others decoded in bounds; {took:.0f} s"
    )


if __name__ == "__main__":
    main()
