"""What a planner counts, against plain Python."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.candidates import (
    DIFFERING,
    FIRST,
    POSITIONAL_ROWS,
    VALUES,
    CandidateTable,
    CandidateTables,
    MaskRule,
)
from bitslab.errors import ArgumentError
from tests.engine.codecs import model
from tests.engine.kernels.plan_cases import KINDS, some_rows, some_rules

SHAPES = [(1, 8), (37, 24), (60, 18), (9, 40 * 8 + 8)]


def learnt(rows: torch.Tensor, rules: list[MaskRule]):
    table = CandidateTable.of(rules, rows.shape[1], len(rows))
    candidates = CandidateTables.of(table)
    memory = cpu.plan_memory([rows], candidates)
    cpu.agreed_masks([cpu.count_bits(rows, 1)], candidates, memory)
    cpu.frequent_values([rows], candidates, memory)
    return table, memory


def sizes_of(rows: torch.Tensor, table: CandidateTable, memory, unit_bits: int = 32):
    memory.totals.zero_()
    cpu.sizes_by_option(rows, CandidateTables.of(table), memory, unit_bits)
    return memory.totals.clone()


def of(rule: MaskRule, first: int, row_bytes: int) -> slice:
    return slice(first, first + (1 if rule.uniform else row_bytes // rule.chunk_bytes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "row_bytes"), SHAPES, ids=str)
def test_masks_values_and_sizes_are_those_of_their_definition(kind, n, row_bytes):
    rows, rules = some_rows(kind, n, row_bytes), some_rules(row_bytes)
    other = some_rows(kind, n + 5, row_bytes, seed=1)
    table, memory = learnt(rows, rules)
    masks, values = memory.found(0)[0], memory.found(0)[1:]
    totals, bits = (
        sizes_of(other, table, memory, unit_bits)[:, :DIFFERING].view(-1, 3, 3)
        for unit_bits in (32, 1)
    )
    differ = sizes_of(other, table, memory)[:, DIFFERING]
    for c, rule in enumerate(rules):
        entries = of(rule, int(table.numbers[c, FIRST]), row_bytes)
        dtype = f"<u{rule.chunk_bytes}"
        chunks, tested = (each.numpy().view(dtype) for each in (rows, other))
        shares = model.bit_shares(chunks)
        if rule.uniform:
            shares = shares.mean(0, keepdims=True)
        threshold = 1.0 if rule.threshold is None else rule.threshold
        expected = model.threshold_masks(shares, threshold, chunks.dtype) | chunks.dtype.type(
            rule.field
        )
        assert masks[entries].numpy().astype(dtype).tolist() == expected.tolist(), rule
        assert int(differ[c]) == (expected != expected[0]).sum(), rule
        columns = chunks.reshape(-1, 1) if rule.uniform else chunks
        mine = values[:, entries].numpy().view(np.uint64)
        for i, mask in enumerate(expected):
            counted = Counter((columns[:, i] & mask).tolist())
            ranked = sorted(counted, key=lambda x: (-counted[x], x))[:VALUES]
            assert mine[:, i].tolist() == ranked + ranked[:1] * (VALUES - len(ranked)), rule
        for k in (1, 2, 3):
            top = mine[: (1 << k) - 1].astype(dtype).T
            where = (tested.shape[1], 1)
            all_masks = np.tile(expected, where[0]) if rule.uniform else expected
            all_values = np.tile(top, where) if rule.uniform else top
            coded = ((tested & all_masks)[:, :, None] == all_values[None]).any(2)
            assert int(totals[c, k - 1, 2]) == (~coded).any(1).sum(), rule
            assert totals[c, k - 1, 2] == bits[c, k - 1, 2]
            for grouped in (False, True):
                words = model.row_words(tested, all_masks, all_values, k, grouped)
                raw = -(-row_bytes // 4)
                assert int(totals[c, k - 1, int(grouped)]) == np.minimum(words, raw).sum(), rule
                size = int(bits[c, k - 1, int(grouped)])
                # Ends on words: of each row up to three, one in a row that is kept as it is.
                assert size <= 32 * np.minimum(words, raw).sum()
                assert size >= 32 * np.minimum(words - 3, raw - 1).sum()


def test_two_tables_are_counted_each_on_its_own_rows():
    first, second = some_rows("few", 41, 24), some_rows("random", 9, 264, seed=3)
    tested = some_rows("random", 30, 264, seed=4)
    table, alone = learnt(first, some_rules(24)[:3])
    measured, beside = learnt(second, some_rules(264))
    both = CandidateTables.of(table, measured)
    memory = cpu.plan_memory([first, second], both)
    cpu.agreed_masks([cpu.count_bits(rows, 1) for rows in (first, second)], both, memory)
    cpu.frequent_values([first, second], both, memory)
    cpu.sizes_by_option(tested, both, memory)
    assert torch.equal(memory.found(0), alone.found(0))
    assert torch.equal(memory.found(1), beside.found(0))
    totals, found = memory.on_host()
    assert totals.tolist() == sizes_of(tested, measured, beside).tolist()
    assert len(found) == 1 and found[0].tolist() == alone.found(0).tolist()
    assert both is CandidateTables.of(table, measured)
    with pytest.raises(ArgumentError, match="tables: 3, accepted are 1 to 2"):
        CandidateTables.of(table, measured, table)


def test_more_rows_than_a_table_has_places_for_are_refused():
    rows = torch.zeros(POSITIONAL_ROWS + 1, 4, dtype=torch.uint8)
    for uniform in (True, False):
        candidates = CandidateTables.of(CandidateTable.of([MaskRule(4, uniform, None, 255)], 4, 1))
        memory = cpu.plan_memory([rows], candidates)
        memory.found(0)[0] = 255
        if uniform:
            cpu.frequent_values([rows], candidates, memory)
            assert memory.found(0)[1:].tolist() == [[0]] * VALUES
            continue
        with pytest.raises(ArgumentError, match="rows: 2049, accepted are 2048 where masks are p"):
            cpu.frequent_values([rows], candidates, memory)
