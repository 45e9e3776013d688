"""Ctrl-C at any line of an exchange: nothing is left taken, nobody goes on beside the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bitslab.distributed import CompressedAllToAll, all_to_all_single
from bitslab.distributed.caller import Caller
from bitslab.distributed.faults import ExchangeError
from bitslab.distributed.work import Over
from tests.distributed.interrupt_ranks import CHECKS
from tests.distributed.ranks import run_checks
from tests.interrupts import interrupt_often


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("with_gradients", [False, True])
def test_interrupts_at_any_line_leave_an_object_free(
    with_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without stages: one that is interrupted there raises from there on."""
    exchange = CompressedAllToAll(codec="compressed")
    t = torch.ones(4, 2, requires_grad=with_gradients)
    monkeypatch.setattr(Caller, "exchange", lambda *args, **options: Over())

    def step() -> None:
        found = exchange(t)
        if with_gradients:
            found.sum().backward()

    interrupts = interrupt_often(step, 1.5, 2e-6)
    assert interrupts > 100
    step()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("async_op", [False, True])
def test_exchanges_that_are_interrupted_at_any_line_are_right_or_raise(async_op: bool) -> None:
    t, found = torch.randn(64, 4), torch.empty(64, 4)
    exchange = CompressedAllToAll(codec="compressed")

    def step() -> None:
        if async_op:
            all_to_all_single(found, t, async_op=True, codec="compressed").wait()
            return
        try:
            exchange(t)
        except ExchangeError as error:
            assert "an earlier exchange failed" in str(error)
            assert "KeyboardInterrupt" in str(error)

    step()
    assert interrupt_often(step, 1.5, 5e-6) > 50
    found.zero_()
    step()
    if async_op:
        assert torch.equal(found, t)


@pytest.mark.parametrize("ranks", [2, 3])
def test_who_is_interrupted_does_not_go_on_beside_the_others(ranks: int, tmp_path: Path) -> None:
    seen_by: dict[str, list[Any]] = run_checks(tuple(CHECKS), ranks, tmp_path)
    for check, of_ranks in seen_by.items():
        for rank, seen in enumerate(of_ranks):
            assert all(found is True for found in seen.values()), (check, rank, seen)
