"""Tables whose rows a kernel rewrites, beside the same ones that its twin rewrites."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cuda.source import Variant
from bitslab.engine.kernels.format import NO_ROW, PAD_WORDS, ceil_div, words_of_rows
from bitslab.engine.kernels.rewriting import (
    FREE,
    LAUNCHES,
    REWRITTEN,
    USED,
    USED_BITS,
    LeavingRows,
    OverflowPlaces,
)
from tests.engine.kernels.cases import Case, make_case, table_of

CPU = torch.device("cpu")
KINDS = ("compact", "inplace")
N_ROWS, N_SLOTS, BATCH_ROWS, BATCHES = 70, 40, 30, 3
METADATA = ("row_clusters", "flags", "moved")


def cases_of(variant: Variant) -> Iterator[Case]:
    """Yield rows of odd and of aligned sizes, with clusters where the variant knows them."""
    if variant.byte_field:
        for row_bytes in (16 * 8, variant.chunk_bytes * 37):
            yield make_case(variant, n_rows=N_ROWS, row_bytes=row_bytes)
        return
    for clusters in (1, 3):
        for size in (None, 16 * 37):
            yield make_case(variant, clusters=clusters, n_rows=N_ROWS, row_bytes=size)


class Packed:
    """A table with room for all of its rows in the overflow area, and its places.

    `share` takes each tensor of the table that is in host memory, and returns it for the kernel.
    """

    def __init__(
        self, case: Case, kind: str, share: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    ) -> None:
        table, row_words = table_of(case, kind), case.layout.format.row_words
        moved, overflow = table.moved, table.overflow
        if kind == "compact":
            moved = torch.zeros(ceil_div(N_ROWS, 32), dtype=torch.int32)
            overflow = share(torch.full((N_ROWS * row_words + PAD_WORDS,), -7).to(torch.int32))
        self.table = replace(
            table,
            words=share(table.words),
            moved=moved,
            overflow=overflow,
            max_words=row_words,
            max_packed_words=row_words - 1,
        )
        self.layout = case.layout
        report = share(torch.zeros(2, dtype=torch.int64))
        none = torch.empty(0, dtype=torch.int32)
        self.places = OverflowPlaces.on(CPU, none, 0, N_ROWS, report)

    def gathered(self) -> torch.Tensor:
        """Return all rows, decoded."""
        out = torch.empty(N_ROWS, self.layout.format.row_bytes, dtype=torch.uint8)
        assert cpu.gather_rows(self.table, self.layout, torch.arange(N_ROWS), out) == -1
        return out

    def outside(self) -> torch.Tensor:
        """Return which rows are in the overflow area; places are theirs alone, or free."""
        at, _, kind = cpu.locate_rows(self.table, self.layout, torch.arange(N_ROWS))
        used = (at[kind == 1] // self.layout.format.row_words).tolist()
        free = self.places.free[: int(self.places.state[FREE])].tolist()
        assert sorted(used + free) == list(range(int(self.places.state[USED])))
        return kind == 1


def batches(case: Case, seed: int) -> Iterator[LeavingRows]:
    """Draw rows of a cache: as others are in the table, so that some are longer, or noise."""
    generator = np.random.default_rng(seed)
    for _ in range(BATCHES):
        rows = case.rows[torch.from_numpy(generator.integers(0, N_ROWS, N_SLOTS))].clone()
        rows[::5] = torch.from_numpy(generator.integers(0, 256, rows[::5].shape, np.uint8))
        slots = torch.from_numpy(generator.permutation(N_SLOTS)[:BATCH_ROWS])
        leaving = torch.from_numpy(generator.permutation(N_ROWS)[:BATCH_ROWS])
        leaving[::7] = NO_ROW
        yield LeavingRows(rows, slots, leaving, torch.tensor([BATCH_ROWS - 2, 0]), BATCH_ROWS)


def check(
    case: Case,
    kind: str,
    seed: int,
    rewrite: Callable[[Packed, LeavingRows], None],
    share: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
) -> bool:
    """Rewrite rows with the twin, and others like them by `rewrite`, and compare the tables.

    Return whether rows went to the overflow area, or back to their places.
    """
    wanted, found = Packed(case, kind), Packed(case, kind, share)
    expected, rewritten, moves = case.rows.clone(), 0, False
    for number, batch in enumerate(batches(case, seed)):
        cpu.rewrite_rows(wanted.table, case.layout, wanted.places, batch)
        rewrite(found, batch)
        leaves = (batch.leaving >= 0) & (torch.arange(BATCH_ROWS) < int(batch.coming[0]))
        expected[batch.leaving[leaves]] = batch.rows[batch.slots[leaves]]
        rewritten += int(leaves.sum())
        for each in (wanted, found):
            assert torch.equal(each.gathered(), expected)
            state, report = each.places.state, each.places.report
            assert report.tolist() == [(number + 1) << USED_BITS | int(state[USED]), rewritten]
            assert state[[LAUNCHES, REWRITTEN]].tolist() == [number + 1, rewritten]
        assert_same(wanted, found)
        moves |= bool(wanted.places.state[FREE])
    return moves


def assert_same(wanted: Packed, found: Packed) -> None:
    """Compare all bytes but for which place each row outside the table has."""
    outside = wanted.outside()
    assert torch.equal(outside, found.outside())
    assert torch.equal(wanted.places.state, found.places.state)
    words, table = found.table.words.clone(), wanted.table
    if table.lengths is not None:
        # The first word of a row outside says where it is.
        sizes = words_of_rows(table.lengths, wanted.layout.format.row_words)
        at = (sizes.cumsum(0) - sizes)[outside]
        words[at] = table.words[at]
    assert torch.equal(words, table.words)
    for name in METADATA:
        one, other = getattr(table, name), getattr(found.table, name)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other), name
