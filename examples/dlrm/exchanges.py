"""The ways that looked-up rows and their gradients cross between ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bitslab.distributed import AdaptiveBound, CompressedAllToAll, Table

#: What `--exchange` accepts, and what it says of each.
WAYS = {
    "raw": "torch's all-to-all",
    "lossless": "bitslab, every bit",
    "adaptive": "bitslab, forward within bounds by class of table, falling at first",
    "fp16": "halves",
    "int8": "bytes by row",
}
DIRECTIONS = ("forward", "backward")
STAGES = ("encode_s", "sizes_s", "payload_s", "decode_s")
Rows = Mapping[str, torch.Tensor]
Sizes = Mapping[str, Sequence[int]]


class Exchange(Protocol):
    """Rows of all tables for the ranks, and what they send."""

    def exchange_tables(
        self,
        inputs: Rows,
        output_split_sizes: Sizes,
        input_split_sizes: Sizes,
        *,
        row_ids: Rows | None = None,
    ) -> dict[str, torch.Tensor]: ...

    def stats(self) -> dict[str, Any]: ...


def make_exchange(
    way: str, names: Sequence[str], width: int, bound: AdaptiveBound | None, codec: str
) -> Exchange:
    """Return what sends the rows of all tables; only adaptive has a bound."""
    if way in ("lossless", "adaptive"):
        tables = [Table(name, width) for name in names]
        return CompressedAllToAll(tables=tables, error_bound=bound, codec=codec)
    return PackedAllToAll(way, names)


class PackedAllToAll:
    """Rows as they are, as halves or as bytes, both ways: sizes are known, nothing is agreed.

    Parameters
    ----------
    way : str
        ``"raw"``, ``"fp16"``, or ``"int8"``: a row as bytes between its least and largest element.
    names : sequence of str
        The tables, in the same order on all ranks.
    """

    def __init__(self, way: str, names: Sequence[str]) -> None:
        self.way = way
        self._stats: dict[str, Any] = {
            direction: dict.fromkeys(STAGES, 0.0) for direction in DIRECTIONS
        }
        bytes_of = ("raw_bytes", "moved_bytes", "backward_raw_bytes", "backward_moved_bytes")
        self._tables = {name: dict.fromkeys(bytes_of, 0) for name in names}

    def exchange_tables(
        self,
        inputs: Rows,
        output_split_sizes: Sizes,
        input_split_sizes: Sizes,
        *,
        row_ids: Rows | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the rows that came of each table ``[M, D]``; ids are not looked at."""
        names = list(self._tables)
        receive = [output_split_sizes[name] for name in names]
        send = [input_split_sizes[name] for name in names]
        found: tuple[torch.Tensor, ...] = _Packed.apply(
            self, receive, send, *(inputs[name] for name in names)
        )
        return dict(zip(names, found, strict=True))

    def stats(self) -> dict[str, Any]:
        """Return bytes and seconds, as `CompressedAllToAll.stats` has them."""
        tables = {name: dict(counts) for name, counts in self._tables.items()}
        return {**{d: dict(self._stats[d]) for d in DIRECTIONS}, "tables": tables}

    def exchange(
        self,
        tables: Sequence[torch.Tensor],
        receive: Sequence[Sequence[int]],
        send: Sequence[Sequence[int]],
        direction: str,
    ) -> list[torch.Tensor]:
        """Pack rows of all tables, exchange them at once, unpack what came."""
        stats, rank = self._stats[direction], dist.get_rank()
        begin = time.perf_counter()
        dim = tables[0].shape[1]
        packed = pack(by_rank(tables, send), self.way)
        encoded = time.perf_counter()
        came = packed.new_empty(sum(map(sum, receive)), packed.shape[1])
        dist.all_to_all_single(came, packed, totals(receive), totals(send))
        moved = time.perf_counter()
        found = by_table(unpack(came, self.way, dim), receive)
        stats["encode_s"] += encoded - begin
        stats["payload_s"] += moved - encoded
        stats["decode_s"] += time.perf_counter() - moved
        prefix = "" if direction == "forward" else "backward_"
        for counts, rows, sizes in zip(self._tables.values(), tables, send, strict=True):
            others = len(rows) - sizes[rank]
            counts[f"{prefix}raw_bytes"] += others * dim * rows.element_size()
            counts[f"{prefix}moved_bytes"] += others * packed.shape[1]
        return found


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, owner: PackedAllToAll, receive: Any, send: Any, *tables: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = owner, receive, send
        rows = [table.detach() for table in tables]
        return tuple(owner.exchange(rows, receive, send, "forward"))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        owner, receive, send = ctx.call
        return None, None, None, *owner.exchange(gradients, send, receive, "backward")


def totals(sizes: Sequence[Sequence[int]]) -> list[int]:
    """Return the rows of all tables for each rank."""
    return [sum(part) for part in zip(*sizes, strict=True)]


def by_rank(tables: Sequence[torch.Tensor], sizes: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return rows ``[N, D]``, rank after rank, table after table."""
    cut = [torch.split(rows, list(part)) for rows, part in zip(tables, sizes, strict=True)]
    return torch.cat([piece for part in zip(*cut, strict=True) for piece in part])


def by_table(rows: torch.Tensor, sizes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Undo `by_rank`."""
    order = list(zip(*sizes, strict=True))
    cut = iter(torch.split(rows, [n for part in order for n in part]))
    pieces = [[next(cut) for _ in part] for part in order]
    return [torch.cat(list(part)) for part in zip(*pieces, strict=True)]


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
    numbers = packed[:, dim:].clone(memory_format=torch.contiguous_format)
    least, step = numbers.view(torch.float32).unbind(1)
    return packed[:, :dim] * step.unsqueeze(1) + least.unsqueeze(1)
