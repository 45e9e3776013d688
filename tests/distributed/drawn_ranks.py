"""Exchanges of any shape, split, dtype and repeats, by any way, beside torch's own collective."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bitslab.distributed import CompressedAllToAll, ErrorBound, Table, all_to_all_single
from bitslab.distributed.wire import DTYPES
from tests.distributed.cpu_coder import coded_where_rows_are
from tests.helpers import random_bits, same_bits

CASES = 24 if os.environ.get("BITSLAB_FULL") == "1" else 12
SEED = "BITSLAB_DRAWN_SEED"  # of the environment, all ranks alike
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Draw:
    """What all ranks draw alike."""

    def __init__(self, seed: int, rank: int, ranks: int) -> None:
        self.of_all, self.of_rank = np.random.default_rng(seed), np.random.default_rng([seed, rank])
        self.rank, self.ranks = rank, ranks

    def one_of(self, *choices: Any) -> Any:
        return choices[int(self.of_all.integers(len(choices)))]

    def sizes(self) -> tuple[list[int], list[int]]:
        """Return rows for each rank and of each: none, one, some or many."""
        most = self.one_of(0, 1, 3, 70, 900)
        sizes = self.of_all.integers(0, most + 1, (self.ranks, self.ranks))
        if self.one_of(True, False):
            sizes[:, int(self.of_all.integers(self.ranks))] = 0
        return sizes[self.rank].tolist(), sizes[:, self.rank].tolist()

    def rows(self, n: int, row: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows of a table ``[n, row]``, and their ids."""
        distinct = int(self.of_rank.integers(1, max(2, n + 1)))
        kind, seed = self.one_of("bits", "small", "equal"), int(self.of_rank.integers(1 << 31))
        table = random_bits(dtype, (distinct, row), seed)
        if kind != "bits" and dtype in FLOATS:
            generator = torch.Generator().manual_seed(seed)
            table = (torch.randn(distinct, row, generator=generator) * 0.01).to(dtype)
            table = table[:1].expand(distinct, row).contiguous() if kind == "equal" else table
        ids = torch.from_numpy(self.of_rank.integers(0, distinct, n))
        return table[ids], ids


def within(found: torch.Tensor, exact: torch.Tensor, bound: float) -> bool:
    """Return whether each element is as near as it must be; all else keeps its bits."""
    finite = exact.isfinite()
    if bound and exact.dtype in FLOATS:
        off = (found.double() - exact.double()).abs()[finite]
        if off.numel() and float(off.max()) > bound:
            return False
        found, exact = found[~finite], exact[~finite]
    return same_bits(found, exact)


def drawn(rank: int, ranks: int) -> dict[str, Any]:
    """Return the cases in which something else came than torch's collective gives, and the seed."""
    seed = int(os.environ[SEED])
    draw, wrong = Draw(seed, rank, ranks), []
    for case in range(CASES):
        dtype, row = draw.one_of(*DTYPES), draw.one_of(0, 1, 2, 5, 33, 64)
        bound = draw.one_of(0.0, 1e-3, 0.5) if dtype in FLOATS else 0.0
        codec = draw.one_of("auto", "compressed", "compressed")
        way, there = draw.one_of("function", "object", "pieces", "tables"), draw.one_of(0, 0, 1)
        with_ids = draw.one_of(True, False) and way != "pieces"
        sent, received = draw.sizes()
        rows, ids = draw.rows(sum(sent), row, dtype)
        exact = torch.empty(sum(received), row, dtype=dtype)
        if row:  # gloo knows bytes, and not all dtypes
            dist.all_to_all_single(exact.view(torch.uint8), rows.view(torch.uint8), received, sent)
        limit = ErrorBound(bound, "absolute") if bound else None
        of_ids: Any = ids if with_ids else None
        with coded_where_rows_are() if there else nullcontext():
            if way == "function":
                found = torch.empty_like(exact)
                work = all_to_all_single(
                    found, rows, received, sent, async_op=bool(draw.one_of(0, 1)), codec=codec,
                    error_bound=limit, row_ids=of_ids,
                )  # fmt: skip
                if work is not None:
                    work.wait()
            elif way == "tables" and row:
                tables = [Table("a", row, dtype, limit), Table("b", 3, torch.int64)]
                other = torch.arange(3 * sum(sent)).view(-1, 3)
                both = CompressedAllToAll(tables=tables, codec=codec).exchange_tables(
                    {"a": rows, "b": other},
                    {"a": received, "b": received},
                    {"a": sent, "b": sent},
                    row_ids={"a": ids} if with_ids else None,
                )
                found = both["a"]
                beside = torch.empty(sum(received), 3, dtype=torch.int64)
                dist.all_to_all_single(beside, other, received, sent)
                if not torch.equal(both["b"], beside):
                    wrong.append([case, "b"])
            else:
                pieces = 3 if way == "pieces" else 1
                exchange = CompressedAllToAll(error_bound=limit, codec=codec, pieces=pieces)
                found = exchange(rows, received, sent, row_ids=of_ids)
        if not within(found, exact, bound):
            wrong.append([case, way, str(dtype), row, bound, codec, there, with_ids])
    return {"seed": seed, "wrong": wrong}


CHECKS = {"drawn": drawn}
