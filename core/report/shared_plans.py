"""Choosing a codec for each tensor of a file; tensors of one kind share a plan.

A plan of a tensor takes longer than packing many megabytes. Tensors of one dtype and row size
mostly differ in scale, not in kind: the masks of the first one serve the others, which learn the
values alone. Each is checked by what a plan of a few of its own rows packs a larger sample to: it
keeps the masks where that saves hardly more, and is planned anew otherwise. What is chosen depends
on the tensors and their order alone, not on the number of threads or on where they are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..engine.codecs import RowCodec
from .tensor_rows import TensorRows
from .workers import Workers

#: Smaller tensors are planned as quickly as checked.
LEAST_SHARED_BYTES = 1 << 20
#: What values are learnt from, and codecs are compared on.
SAMPLE_BYTES = 1 << 20
#: What a plan is made of to compare with.
PROBE_BYTES = 96 << 10
PROBE_ROWS = 8
#: A tensor keeps a plan that takes up to so many times the bytes of the one that is compared.
WORSE = 1.003

#: Plans a codec for rows of a tensor, given ``[n, row_elements]`` of them.
Fit = Callable[[TensorRows, torch.Tensor], RowCodec]


def choose_codecs(
    tensors: Sequence[TensorRows],
    fit: Fit,
    workers: Workers,
    *,
    share: bool,
    then: Callable[[TensorRows], object] = lambda _: None,
) -> list[RowCodec]:
    """Return a codec for each tensor.

    Parameters
    ----------
    tensors : sequence of TensorRows
        In the order that decides whose plan is shared.
    fit : callable
        ``(rows, sample)``: plans a codec for all rows, like ``[n, row_elements]`` of them.
    workers : Workers
        What plans and checks.
    share : bool
        Whether tensors may share plans.
    then : callable
        Called with each tensor once it has a codec, in the calling thread.
    """
    chosen: dict[int, RowCodec] = {}
    groups: dict[object, list[int]] = {}
    for i, rows in enumerate(tensors):
        alone = not share or rows.data.shape[0] < LEAST_SHARED_BYTES
        groups.setdefault(i if alone else (rows.dtype, rows.row_bytes), []).append(i)
    checks = {i: _Check(tensors[i], fit) for group in groups.values() for i in group[1:]}
    waiting = list(groups.values())

    def give(i: int, codec: RowCodec | None) -> None:
        if codec is not None:
            chosen[i] = codec
            then(tensors[i])

    while waiting:
        leaders = [group[0] for group in waiting]
        workers.each(
            lambda i: fit(tensors[i], tensors[i].typed(0, tensors[i].n_rows)), leaders, give
        )
        followers = [(i, chosen[group[0]]) for group in waiting for i in group[1:]]
        workers.each(
            lambda pair: checks[pair[0]].shared(pair[1]),
            followers,
            lambda pair, codec: give(pair[0], codec),
        )
        left = ([i for i in group if i not in chosen] for group in waiting)
        # Where a plan serves few others, each of them gets its own at once.
        waiting = [
            part
            for group, rest in zip(waiting, left, strict=True)
            for part in (_alone(rest) if 2 * len(rest) > len(group) else [rest])
            if part
        ]
    return [chosen[i] for i in range(len(tensors))]


def _alone(group: Sequence[int]) -> list[list[int]]:
    return [[i] for i in group]


class _Check:
    """What decides whether a tensor takes another one's plan."""

    def __init__(self, rows: TensorRows, fit: Fit) -> None:
        self._rows = rows
        self._fit = fit
        self._asked: float | None = None

    def shared(self, codec: RowCodec) -> RowCodec | None:
        """Return a codec with the plan of `codec`, or None where a plan of its own saves more."""
        sample = self._rows.sample(SAMPLE_BYTES, PROBE_ROWS)
        if self._asked is None:
            probe = self._fit(self._rows, self._rows.sample(PROBE_BYTES, PROBE_ROWS))
            self._asked = _packed_bytes(probe, sample, self._rows.n_rows)
        refitted = codec.refitted(sample)
        taken = _packed_bytes(refitted, sample, self._rows.n_rows)
        return refitted if taken <= WORSE * self._asked else None


def _packed_bytes(codec: RowCodec, sample: torch.Tensor, n_rows: int) -> float:
    """Return the bytes of `n_rows` rows like those of a sample, and of what the codec learnt."""
    packed = float(codec.packed_bytes(sample).sum())
    return packed * n_rows / sample.shape[0] + codec.profile_bytes
