"""Masks and values of candidates, learnt from rows where these are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...kernels import kernels_for
from ...kernels.candidates import CandidateTable, CandidateTables, MaskRule, PlanMemory


@dataclass(frozen=True, eq=False)
class Counted:
    """Rules, and the rows that they are learnt from.

    Parameters
    ----------
    rules : sequence of MaskRule
        The rules.
    counts : torch.Tensor
        int64 ``[row_bytes, 8]``: of each bit, the rows that have it set.
    n_rows : int
        Rows that were counted.
    rows : torch.Tensor
        uint8 ``[N, row_bytes]``, contiguous: values are learnt from these.
    """

    rules: Sequence[MaskRule]
    counts: torch.Tensor
    n_rows: int
    rows: torch.Tensor


@dataclass(frozen=True, eq=False)
class Learnt:
    """What rows gave rules, on the device of the rows.

    Parameters
    ----------
    rules : sequence of MaskRule
        The last rules, which are measured.
    candidates : CandidateTables
        All rules.
    memory : PlanMemory
        Their masks and values.
    """

    rules: Sequence[MaskRule]
    candidates: CandidateTables
    memory: PlanMemory


def learn(*counted: Counted) -> Learnt:
    """Learn masks from the counts of bits, and values from rows, of one or two lots of rules.

    Two take a GPU as many launches as one.
    """
    rows = [each.rows for each in counted]
    tables = [CandidateTable.of(c.rules, c.rows.shape[1], c.n_rows) for c in counted]
    candidates = CandidateTables.of(*tables)
    kernels = kernels_for(rows[0].device)
    memory = kernels.plan_memory(rows, candidates)
    kernels.agreed_masks([each.counts for each in counted], candidates, memory)
    kernels.frequent_values(rows, candidates, memory)
    return Learnt(counted[-1].rules, candidates, memory)
