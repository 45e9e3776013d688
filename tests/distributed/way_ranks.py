"""What ranks check of how each table's rows are written where they are, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from bitslab.distributed import CompressedAllToAll, ErrorBound, Table, caller
from bitslab.distributed.selection import EVERY_BIT, WITHIN_BOUND, Decision
from bitslab.engine.advisor import NetworkModel
from tests.distributed.cpu_coder import coded_where_rows_are
from tests.distributed.device_ranks import crossed

CPU = torch.device("cpu")
BOUND = 0.01
PLANNED = [
    Table("repeats", 16),
    Table("noise", 16),
    Table("within", 16, error_bound=ErrorBound(BOUND, "absolute")),
    Table("halves", 8, torch.bfloat16),
]


def _rows(rank: int, ranks: int, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    found = {}
    for table in PLANNED:
        rows = torch.randn(60 * ranks, table.row_elements, generator=generator)
        if table.name != "noise":
            rows = rows[torch.arange(60 * ranks) % 7]
        found[table.name] = rows.to(device, table.dtype).requires_grad_()
    return found


def ways_on_device(rank: int, ranks: int, device: torch.device = CPU) -> dict[str, Any]:
    """Rows arrive whatever way each table has, with ids and without; gradients too."""
    seen: dict[str, Any] = {}
    sizes = {table.name: [60] * ranks for table in PLANNED}
    rows = _rows(rank, ranks, device)
    exact = {name: crossed(t, sizes[name], sizes[name]) for name, t in rows.items()}
    ids = {"repeats": torch.arange(60 * ranks, device=device) % 7}
    exchange = CompressedAllToAll(tables=PLANNED, codec="compressed")
    for turn in range(len(WITHIN_BOUND)):
        for given in ({}, ids):
            for number, (table, state) in enumerate(
                zip(PLANNED, exchange._states.values(), strict=True)
            ):
                ways = WITHIN_BOUND if table.error_bound else EVERY_BIT
                state.choice.candidate = ways[(turn + number) % len(ways)]
                state.backward_choice.candidate = EVERY_BIT[(turn + number) % len(EVERY_BIT)]
            found = exchange.exchange_tables(rows, sizes, sizes, row_ids=given)
            loss = torch.zeros((), device=device)
            for name, t in found.items():
                limit = BOUND if name == "within" else 0.0
                error = (t.detach().double() - exact[name].double()).abs().max()
                seen[f"{turn} {bool(given)} {name}"] = float(error) <= limit
                rows[name].grad = None
                loss = loss + t.float().sum()
            loss.backward()
            for name, leaf in rows.items():
                assert leaf.grad is not None
                total = float(leaf.grad.double().sum())
                seen[f"{turn} {bool(given)} {name} back"] = total == leaf.numel()
    return seen


def chosen_on_device(rank: int, ranks: int, device: torch.device = CPU) -> dict[str, Any]:
    """A call that decides measures all ways, and takes what the link makes fastest."""
    seen: dict[str, Any] = {}
    sizes = {table.name: [60] * ranks for table in PLANNED}
    rows = _rows(rank, ranks, device)
    for name, rate in (("slow", 1e3), ("fast", 1e15)):
        model = NetworkModel(((1.0, 1e-9), (1.0 + rate, 1.0 + 1e-9)))
        exchange = CompressedAllToAll(tables=PLANNED, decide_every=2)
        with (
            mock.patch.object(caller, "network_model", lambda *_, model=model: model),
            mock.patch.object(Decision, "decide_way"),
        ):
            for _ in range(4):
                found = exchange.exchange_tables(rows, sizes, sizes)
        stats = exchange.stats()["tables"]
        seen[name] = {key: of_table["codec"] for key, of_table in stats.items()}
        ways = {key: set(state.choice.measured) for key, state in exchange._states.items()}
        every, within = ({c.name for c in given} for given in (EVERY_BIT, WITHIN_BOUND))
        seen[f"{name} measured"] = ways == {
            key: within if key == "within" else every for key in ways
        }
        exact = crossed(rows["noise"], sizes["noise"], sizes["noise"])
        seen[f"{name} equal"] = torch.equal(found["noise"].detach(), exact)
    return seen


def ways_as_on_a_gpu(rank: int, ranks: int) -> dict[str, Any]:
    """Both of rows on the CPU."""
    with coded_where_rows_are():
        return {"ways": ways_on_device(rank, ranks), "chosen": chosen_on_device(rank, ranks)}


def nccl_ways(rank: int, ranks: int) -> dict[str, Any]:
    """Both of rows on GPUs."""
    device = torch.device("cuda", rank)
    return {
        "ways": ways_on_device(rank, ranks, device),
        "chosen": chosen_on_device(rank, ranks, device),
    }


CHECKS: dict[str, Callable[[int, int], Any]] = {
    f.__name__: f for f in (ways_as_on_a_gpu, nccl_ways)
}
