"""What ranks check of bounds: shares of messages, gradients of plain calls, schedules that fail."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from bitslab.distributed import CompressedAllToAll, ErrorBound, all_to_all_single
from tests.distributed.ranks import error_of, noise


def bounds_of_messages(rank: int, ranks: int) -> dict[str, Any]:
    """Bounds are shares of what crosses; gradients that cross by torch's collective are exact."""
    seen: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(rank)
    rows = torch.rand(ranks, 40, 4, generator=generator)
    for to in range(ranks):
        rows[to] *= 10.0**to
    rows[rank] *= 1e6  # what does not cross says nothing of the others
    given = rows.flatten(0, 1)
    for way in ("object", "function"):
        if way == "object":
            found = CompressedAllToAll(error_bound=0.02, codec="compressed")(given)
        else:
            found = torch.empty_like(given)
            all_to_all_single(found, given, error_bound=0.02, codec="compressed")
        exact = torch.empty_like(given)
        dist.all_to_all_single(exact, given)
        errors = (found - exact).abs().view(ranks, -1).amax(1)
        others = [source for source in range(ranks) if source != rank]
        seen[way] = all(0 < float(errors[i]) <= 0.02 * 10.0**rank * 1.0001 for i in others)
    shares: list[int] = []

    def noted(iteration: int) -> float:
        shares.append(iteration)
        return 1.0

    plain = CompressedAllToAll(backward=ErrorBound(0.3, schedule=noted), codec="auto")
    plain._caller.decision.modes = ["plain", "plain"]
    t = given.clone().requires_grad_()
    gradient = torch.rand(t.shape, generator=generator)
    plain(t).backward(gradient)
    exact = torch.empty_like(gradient)
    dist.all_to_all_single(exact, gradient)
    assert t.grad is not None
    seen["plain back"] = bool(torch.equal(t.grad, exact))
    seen["not asked"] = not shares
    coded = CompressedAllToAll(backward=ErrorBound(0.3, schedule=noted), codec="compressed")
    for _ in range(2):
        coded(t).backward(gradient)
    seen["iterations back"] = shares == [0, 1]
    return seen


def schedules_that_fail(rank: int, ranks: int) -> dict[str, str]:
    """One rank's schedule gives no bound in the second call: all raise, none waits."""

    def on_one(iteration: int) -> float:
        return -1.0 if rank == 0 and iteration == 1 else 1.0

    seen = {}
    t = noise(rank, ranks, 40)
    for way in ("forward", "backward"):
        bound = ErrorBound(0.1, schedule=on_one)
        options: dict[str, Any] = {"error_bound" if way == "forward" else "backward": bound}
        exchange = CompressedAllToAll(codec="compressed", **options)

        def step(exchange: CompressedAllToAll = exchange) -> None:
            exchange(t.clone().requires_grad_()).sum().mul(t.sum() * 0 + 1).pow(2).backward()

        step()
        seen[way] = error_of(step)
    return seen


CHECKS = {f.__name__: f for f in (bounds_of_messages, schedules_that_fail)}
