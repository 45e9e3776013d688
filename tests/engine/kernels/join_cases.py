"""Tokens of a K/V layer, packed and not, for the kernel that joins them and for its twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from bitslab.engine.kernels.joins import PackedRun, SideTokens
from tests.engine.kernels.cases import Case, table_of

BATCH, HEADS = 2, 3

#: Puts a tensor where a kernel reads it.
Place = Callable[[torch.Tensor], torch.Tensor]


def here(t: torch.Tensor) -> torch.Tensor:
    """Leave a tensor where it is."""
    return t


def runs_of(
    case: Case, rows: list[int], row_tokens: int = 1, seed: int = 0, place: Place = here
) -> list[PackedRun]:
    """Return runs of so many rows of a head each, of one table."""
    rng = np.random.default_rng(seed)
    table = table_of(case, "compact")
    # At an address as a tensor of its own has.
    words = place(torch.nn.functional.pad(table.words, (0, -len(table.words) % 4)))
    assert table.bases is not None and table.lengths is not None
    bases, lengths = table.bases.to(words.device), table.lengths.to(words.device)
    table = replace(table, words=words, bases=bases, lengths=lengths)
    found, first = [], 0
    for n in rows:
        ids = rng.integers(0, len(case.rows), BATCH * HEADS * n).astype(np.int32)
        numbers, tokens = place(torch.from_numpy(ids)), n * row_tokens
        layout = case.layout.to(numbers.device)
        found.append(PackedRun(table, layout, numbers, first, tokens, row_tokens))
        first += tokens
    return found


def side_of(
    token_bytes: int,
    packed: int,
    tail: int,
    new: int,
    room: int | None,
    seed: int,
    place: Place = here,
) -> SideTokens:
    """Return tokens that are not packed.

    The tail lies at the begin of memory with so much room; elsewhere where `room` is None.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, (*shape, token_bytes), dtype=torch.uint8, generator=generator)

    # As a projection leaves them: heads behind tokens.
    fresh = place(drawn(BATCH, new, HEADS)).transpose(1, 2)
    whole = place(drawn(BATCH, HEADS, tail + (3 if room is None else new + room)))
    memory = whole
    if room is None:
        memory = place(torch.full((BATCH, HEADS, tail + new, token_bytes), 7).byte())
    out = place(torch.full((BATCH, HEADS, packed + tail + new, token_bytes), 9).byte())
    return SideTokens(whole, tail, fresh, memory, out)
