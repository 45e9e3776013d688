"""What an exchange of rows that are coded where they are costs the host, in both its threads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import torch

from bitslab.distributed import CompressedAllToAll, Table
from bitslab.distributed.helpers import helper_of
from tests.distributed.cpu_coder import CpuCoder, coded_where_rows_are
from tests.distributed.ranks import world

#: Rows of a table for each rank, and their elements.
ROWS, ROW = 48, 16
#: Tables of an exchange.
TABLES = (1, 26)


class Calls:
    """Counts functions of the library, and C functions that it calls, in threads that begin it."""

    def __init__(self) -> None:
        self.count = 0

    def begin(self) -> None:
        sys.setprofile(self._seen)

    def _seen(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            self.count += str(frame.f_globals.get("__name__")).startswith("bitslab.")


class UncountedCoder(CpuCoder):
    """What a GPU does: none of it is the host's."""

    def encode_vectors(
        self,
        values: Sequence[torch.Tensor],
        options: Any,
        out: torch.Tensor,
        *,
        numbers: torch.Tensor,
    ) -> None:
        _uncounted(partial(super().encode_vectors, numbers=numbers), values, options, out)

    def decode_vectors(
        self, bodies: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], bounded: Any
    ) -> None:
        _uncounted(super().decode_vectors, bodies, outs, bounded)


def _uncounted(work: Callable[..., Any], *args: Any) -> Any:
    counting = sys.getprofile()
    sys.setprofile(None)
    try:
        return work(*args)
    finally:
        sys.setprofile(counting)


def calls(rank: int, ranks: int) -> dict[str, int]:
    """Return the calls of a step by codec, tables and way; the least of some, as steps repeat."""
    seen = {}
    with (
        coded_where_rows_are(),
        mock.patch("bitslab.distributed.device.kernels_on", lambda of: UncountedCoder()),
    ):
        for codec in ("raw", "compressed"):
            for tables in TABLES:
                forward, back = _calls_of(codec, tables, ranks)
                seen[f"{codec} {tables}"] = forward
                seen[f"{codec} {tables} back"] = back
    return seen


def _calls_of(codec: str, tables: int, ranks: int) -> tuple[int, int]:
    names = [f"table {i}" for i in range(tables)]
    exchange = CompressedAllToAll(tables=[Table(name, ROW) for name in names], codec=codec)
    rows = torch.randn(5, ROW, generator=torch.Generator().manual_seed(1))
    rows = rows[torch.arange(ROWS * ranks) % 5]
    inputs = {name: rows.clone().requires_grad_() for name in names}
    sizes = {name: [ROWS] * ranks for name in names}
    lane = helper_of(world()).lane
    found = []
    for _ in range(4):
        both = []
        out: dict[str, torch.Tensor] = {}
        for backward in (False, True):
            counted = Calls()
            total = sum(t.sum() for t in out.values())
            lane.submit(counted.begin).result()
            counted.begin()
            try:
                if backward:
                    assert isinstance(total, torch.Tensor)
                    total.backward()
                else:
                    out = exchange.exchange_tables(inputs, sizes, sizes)
            finally:
                sys.setprofile(None)
                lane.submit(sys.setprofile, None).result()
            both.append(counted.count)
        found.append(both)
    forward, back = (min(each) for each in zip(*found, strict=True))
    return forward, back


CHECKS: dict[str, Callable[[int, int], Any]] = {"calls": calls}
