"""Grouping of tables: which are packed together, and with which plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from bitslab import RowCodec
from bitslab.engine.kernels import shared_row_items
from bitslab.tables import (
    Layout,
    Rows,
    as_tensor,
    draw_items,
    fitted_to_items,
    items_as_rows,
    items_per_row,
    take_rows,
)

#: Rows of a table that its plan is chosen on, in bytes at the most.
SAMPLE_BYTES = 2 << 20
#: Tables share a plan where that takes at most so many more bytes than plans of their own.
TOLERANCE = 0.01


@dataclass(frozen=True, eq=False)
class Sample:
    """Sampled rows of a table, for planning.

    Parameters
    ----------
    n_rows : int
        Rows of the table.
    rows : torch.Tensor
        ``[n, D]``, some of them, or all.
    trainable : bool
        Whether its rows may change.
    """

    n_rows: int
    rows: torch.Tensor
    trainable: bool = True

    def nbytes(self, codec: RowCodec) -> float:
        """Bytes that the table takes with a codec, row metadata included."""
        n = self.rows.shape[0]
        if not n:
            return 0.0
        packed_rows = items_as_rows(self.rows, items_per_row(codec, tuple(self.rows.shape[1:])))
        taken = int(codec.packed_bytes(packed_rows).sum())
        taken += codec.row_metadata_bytes(len(packed_rows))
        return taken * self.n_rows / n


@dataclass(eq=False)
class Group:
    """Tables that lie back to back in one packed table.

    Parameters
    ----------
    tables : list of int
        The tables, by number, in order.
    codec : str or RowCodec
        How their rows are packed.
    """

    tables: list[int] = field(default_factory=list)
    codec: str | RowCodec = "auto"


def sample_of(rows: Rows, seed: int = 0) -> torch.Tensor:
    """Draw some rows ``[n, D]`` of a table ``[N, D]``, all when they are few."""
    n, wanted = rows.shape[0], max(1, SAMPLE_BYTES // max(1, rows[:1].nbytes))
    if n <= wanted:
        return as_tensor(rows)
    picked = draw_items(n, wanted, shared_row_items(rows[:1].nbytes), seed)
    return as_tensor(rows[picked]) if isinstance(rows, np.ndarray) else take_rows(rows, picked)


def group_tables(
    samples: Sequence[Sample], codec: str | RowCodec = "auto", layout: Layout = "compact"
) -> list[Group]:
    """Divide tables into groups that are packed with one plan each.

    Rows of one group have one shape and dtype, and all may change or none. With ``codec="auto"``
    tables that packing does not make smaller form raw groups, and the others share a plan as far as
    that takes no more than `TOLERANCE` more bytes than a plan for each.

    Parameters
    ----------
    samples : sequence of Sample
        The tables.
    codec, layout
        As in `bitslab.CompressedTable.from_tensor`.

    Returns
    -------
    list of Group
        In the order of their first tables; the tables of a group are in order.
    """
    alike: dict[tuple[torch.dtype, int, bool], list[int]] = {}
    for i, sample in enumerate(samples):
        key = (sample.rows.dtype, sample.rows.shape[1], sample.trainable)
        alike.setdefault(key, []).append(i)
    groups: list[Group] = []
    for members in alike.values():
        if codec == "auto":
            groups += _planned(samples, members, layout)
        else:
            groups.append(Group(members, codec))
    for group in groups:
        group.tables.sort()
    return sorted(groups, key=lambda group: group.tables[0])


@dataclass(eq=False)
class _Shared:
    """A group so far: its bytes, and those with a plan for each table."""

    group: Group
    codec: RowCodec
    taken: float
    alone: float


def _planned(samples: Sequence[Sample], members: Sequence[int], layout: Layout) -> list[Group]:
    raw = Group(codec="raw")
    own: list[tuple[float, int, RowCodec]] = []
    for i in members:
        fitted = _fitted([samples[i]], layout)
        taken = samples[i].nbytes(fitted) + fitted.profile_bytes
        if fitted.keeps_raw:
            raw.tables.append(i)
        else:
            own.append((taken, i, fitted))
    together = _one_group(samples, own, layout)
    if together is not None:
        return [together] + ([raw] if raw.tables else [])
    shared: list[_Shared] = []
    # The largest first: it is what a plan has to suit.
    for alone, i, fitted in sorted(own, key=lambda entry: (-entry[0], entry[1])):
        offers = [(samples[i].nbytes(s.codec), s) for s in shared]
        offers = [
            (taken, s)
            for taken, s in offers
            if s.taken + taken <= (1 + TOLERANCE) * (s.alone + alone)
        ]
        if offers:
            taken, best = min(offers, key=lambda offer: offer[0])
            best.group.tables.append(i)
            best.taken += taken
            best.alone += alone
        else:
            shared.append(_Shared(Group([i], fitted), fitted, alone, alone))
    for s in shared:
        s.group.codec = _refitted(samples, s, layout)
    return [s.group for s in shared] + ([raw] if raw.tables else [])


def _fitted(tables: Sequence[Sample], layout: Layout) -> RowCodec:
    """Return one codec for the rows of tables."""
    rows = tables[0].rows if len(tables) == 1 else _joint(tables)
    return fitted_to_items(rows, "auto", sum(t.n_rows for t in tables), {"seed": 0}, layout)


def _one_group(
    samples: Sequence[Sample], own: Sequence[tuple[float, int, RowCodec]], layout: Layout
) -> Group | None:
    """Return one group of all tables that are packed, if one plan suits them all."""
    if len(own) < 2:
        return None
    tables = [samples[i] for _, i, _ in own]
    fitted = _fitted(tables, layout)
    taken = sum(t.nbytes(fitted) for t in tables) + fitted.profile_bytes
    if taken > (1 + TOLERANCE) * sum(alone for alone, _, _ in own):
        return None
    return Group([i for _, i, _ in own], fitted)


def _refitted(samples: Sequence[Sample], shared: _Shared, layout: Layout) -> RowCodec:
    """Return a plan for all tables of a group, or that of its largest where this is no better."""
    tables = [samples[i] for i in shared.group.tables]
    if len(tables) == 1:
        return shared.codec
    fitted = _fitted(tables, layout)
    if fitted.keeps_raw:
        return shared.codec
    return min((shared.codec, fitted), key=lambda c: sum(t.nbytes(c) for t in tables))


def _joint(tables: Iterable[Sample]) -> torch.Tensor:
    """Return rows of several tables, as many of each as its size asks for."""
    tables = [t for t in tables if t.n_rows]
    share = min(t.rows.shape[0] / t.n_rows for t in tables)
    parts = []
    for t in tables:
        count = max(1, round(share * t.n_rows))
        positions = torch.linspace(0, t.rows.shape[0] - 1, count, dtype=torch.float64)
        parts.append(take_rows(t.rows, positions.long().numpy()))
    return torch.cat(parts)
