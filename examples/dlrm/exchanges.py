"""The ways that looked-up rows and their gradients cross between ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bitslab.distributed import (
    CompressedAllToAll,
    ErrorBound,
    bound_classes,
    homogenisation_index,
    stepwise,
)

#: What `--exchange` accepts, and what it says of each.
WAYS = {
    "raw": "torch's all-to-all",
    "lossless": "bitslab, every bit",
    "adaptive": "bitslab, forward within bounds by class of table, falling at first",
    "fp16": "halves",
    "int8": "bytes by row",
}
#: Indices up to the first give the class large, from the second on small.
THRESHOLDS = (0.01, 0.3)
CLASSES = ("large", "medium", "small")
DIRECTIONS = ("forward", "backward")
STAGES = ("encode_s", "sizes_s", "payload_s", "decode_s")
Stats = dict[str, dict[str, int | float]]


class Exchange(Protocol):
    """Rows for the ranks, and what they send."""

    def __call__(
        self,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        *,
        row_ids: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def stats(self) -> Stats: ...


def make_exchange(way: str, bound: ErrorBound | None) -> Exchange:
    """Return what sends the rows of one table."""
    if way == "lossless":
        return CompressedAllToAll()
    if way == "adaptive":
        return CompressedAllToAll(error_bound=bound)
    return PackedAllToAll(way)


def adaptive_bounds(
    samples: dict[str, torch.Tensor], value: float, iterations: int
) -> tuple[dict[str, ErrorBound], dict[str, str]]:
    """Return the bound and the class of each table.

    Parameters
    ----------
    samples : dict of str to torch.Tensor
        Rows ``[N, D]`` that the first batch looks up.
    value : float
        The bound of the class medium, as a share of the range of a message.
    iterations : int
        Over so many steps bounds fall from twice themselves.
    """
    indices = {}
    for name, rows in samples.items():
        span = float(rows.max() - rows.min()) if rows.numel() else 0.0
        indices[name] = homogenisation_index(rows, value * span) if span else 0.0
    by_class = bound_classes(indices, value, thresholds=THRESHOLDS)
    schedule = stepwise(iterations)
    bounds = {name: ErrorBound(bound.value, schedule=schedule) for name, bound in by_class.items()}
    low, high = THRESHOLDS
    classes = {
        name: CLASSES[0] if index <= low else CLASSES[2] if index >= high else CLASSES[1]
        for name, index in indices.items()
    }
    return bounds, classes


class PackedAllToAll:
    """Rows as they are, as halves or as bytes, both ways: sizes are known, nothing is agreed.

    Parameters
    ----------
    way : str
        ``"raw"``, ``"fp16"``, or ``"int8"``: a row as bytes between its least and largest element.
    """

    def __init__(self, way: str) -> None:
        self.way = way
        self._stats: Stats = {
            direction: {"raw_bytes": 0, "moved_bytes": 0, **dict.fromkeys(STAGES, 0.0)}
            for direction in DIRECTIONS
        }

    def __call__(
        self,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        *,
        row_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the rows that came ``[M, D]``; ids are not looked at."""
        found: torch.Tensor = _Packed.apply(
            input, self, list(output_split_sizes or []), list(input_split_sizes or [])
        )
        return found

    def stats(self) -> Stats:
        """Return bytes and seconds each way, as `CompressedAllToAll.stats` has them."""
        return {direction: dict(stats) for direction, stats in self._stats.items()}

    def exchange(
        self, rows: torch.Tensor, receive: list[int], send: list[int], direction: str
    ) -> torch.Tensor:
        """Pack rows, exchange them, unpack what came."""
        stats, rank = self._stats[direction], dist.get_rank()
        begin = time.perf_counter()
        packed = pack(rows, self.way)
        encoded = time.perf_counter()
        came = packed.new_empty(sum(receive), packed.shape[1])
        dist.all_to_all_single(came, packed, receive, send)
        moved = time.perf_counter()
        found = unpack(came, self.way, rows.shape[1])
        others = len(rows) - send[rank]
        stats["raw_bytes"] += others * rows.shape[1] * rows.element_size()
        stats["moved_bytes"] += others * packed.shape[1]
        stats["encode_s"] += encoded - begin
        stats["payload_s"] += moved - encoded
        stats["decode_s"] += time.perf_counter() - moved
        return found


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, owner: PackedAllToAll, receive: list[int], send: list[int]
    ) -> torch.Tensor:
        ctx.call = owner, receive, send
        return owner.exchange(rows.detach(), receive, send, "forward")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        owner, receive, send = ctx.call
        back = owner.exchange(gradients[0].contiguous(), send, receive, "backward")
        return back, None, None, None


def pack(rows: torch.Tensor, way: str) -> torch.Tensor:
    """Return float32 rows ``[N, D]`` as bytes ``[N, row]``."""
    if way == "raw":
        return rows.contiguous().view(torch.uint8)
    if way == "fp16":
        return rows.half().view(torch.uint8)
    if not rows.numel():
        return torch.empty(len(rows), rows.shape[1] + 8, dtype=torch.uint8)
    least = rows.amin(1, keepdim=True)
    step = ((rows.amax(1, keepdim=True) - least) / 255).clamp_(min=1e-30)
    codes = ((rows - least) / step).round_().to(torch.uint8)
    return torch.cat([codes, torch.cat([least, step], 1).view(torch.uint8)], 1)


def unpack(packed: torch.Tensor, way: str, dim: int) -> torch.Tensor:
    """Return the float32 rows ``[N, dim]`` of bytes."""
    if way == "raw":
        return packed.view(torch.float32)
    if way == "fp16":
        return packed.view(torch.float16).float()
    # Bytes behind codes need not lie at whole numbers.
    least, step = packed[:, dim:].clone().view(torch.float32).unbind(1)
    return packed[:, :dim] * step.unsqueeze(1) + least.unsqueeze(1)
