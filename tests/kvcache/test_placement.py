"""Which layers lie in host memory: shares, and the balance of crossing and computing."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch

from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.kvcache import Balance, Placement, check_offload, free_bytes
from bitslab.kvcache.placement import AGAIN_PASSES, spread


@pytest.mark.parametrize(
    ("given", "expected"),
    [(True, 1.0), (False, 0.0), (0, 0.0), (1, 1.0), (0.25, 0.25), ("auto", "auto")],
    ids=str,
)
def test_shares(given: Any, expected: Any) -> None:
    assert check_offload(given) == expected


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (1.01, ArgumentError),
        (-0.1, ArgumentError),
        (2, ArgumentError),
        (float("nan"), ArgumentError),
        ("host", ArgumentError),
        (None, ArgumentTypeError),
        ([0.5], ArgumentTypeError),
    ],
    ids=str,
)
def test_what_is_no_share_is_refused(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"offload: .*accepted are True, False, shares from 0 to 1"):
        check_offload(given)


def test_layers_are_evenly_spread() -> None:
    for n in range(1, 20):
        for chosen in range(n + 1):
            found = spread(n, chosen)
            assert len(found) == chosen
            around = (
                [b - a for a, b in zip(found, [*found[1:], n + found[0]], strict=True)]
                if (chosen)
                else []
            )
            assert not around or max(around) - min(around) <= 1
            assert not chosen or found[-1] == n - 1


@pytest.mark.parametrize(
    ("share", "hosted"), [(0, set()), (0.5, {2, 5}), (0.3, {5}), (1.0, {1, 2, 4, 5})], ids=str
)
def test_a_share_is_rounded_to_layers(share: float, hosted: set[int]) -> None:
    """Of those that are packed: 0 and 3 are of another kind."""
    placement = Placement(share, [1, 2, 4, 5])
    assert placement.hosted == hosted
    assert placement.balance is None


@pytest.mark.parametrize(
    ("share", "n_layers", "hosted"),
    [(0.5, 1, 1), (0.5, 3, 2), (0.5, 5, 3), (0.01, 6, 1), (0.01, 0, 0), (0.0, 6, 0), (0.99, 6, 6)],
)
def test_halves_are_rounded_up_and_a_share_is_of_a_layer_at_least(
    share: float, n_layers: int, hosted: int
) -> None:
    assert len(Placement(share, range(n_layers)).hosted) == hosted


def test_the_next_layer_in_host_memory() -> None:
    assert Placement(0.5, range(4)).next_hosted() == {0: 1, 1: 3, 2: 3, 3: 1}
    assert Placement(1.0, [2, 3]).next_hosted() == {2: 3, 3: 2}
    assert Placement(1.0, [2]).next_hosted() == {2: 2}
    assert Placement(0.0, range(2)).next_hosted() == {0: None, 1: None}
    assert Placement(1.0, []).next_hosted() == {}


def test_few_layers_move() -> None:
    placement = Placement(0.5, range(12))
    fewer, more = placement.with_hosted(4), placement.with_hosted(9)
    assert len(fewer) == 4
    assert fewer < placement.hosted < more
    assert len(more) == 9
    assert placement.with_hosted(6) == placement.hosted


class Machine:
    """Passes that take what computing or crossing takes, whichever is longer.

    The link has a share of the rate that was measured. Between passes there may be a gap, in which
    no more than the words of two layers cross.
    """

    def __init__(
        self,
        compute_s: float,
        layer_s: float,
        n_layers: int = 32,
        *,
        link_share: float = 1.0,
        gap_s: float = 0.0,
    ) -> None:
        self.now_s = 0.0
        self.link_share, self.gap_s = link_share, gap_s
        self.compute_s, self.layer_s, self.n_layers = compute_s, layer_s, n_layers
        self.layer_bytes, self.free_bytes = 1000.0, 1e9
        self.hosted = n_layers
        self.balance = Balance(lambda: self.now_s)
        self.moves: list[int] = []

    def run(self, passes: int, *, ahead: bool = False) -> int:
        for _ in range(passes):
            if self.balance.begin(1):
                found = self.balance.hosted(
                    self.n_layers, self.hosted, self.layer_bytes, self.layer_s, self.free_bytes
                )
                self.moves += [found] * (found != self.hosted)
                self.free_bytes += (found - self.hosted) * self.layer_bytes
                self.hosted = found
            self.now_s += 1e-4 if ahead else self.pass_s
        return self.hosted

    @property
    def pass_s(self) -> float:
        layer_s = self.layer_s / self.link_share
        ahead_s = min(self.gap_s, 2 * layer_s)
        return self.gap_s + max(self.compute_s, self.hosted * layer_s - ahead_s)


@pytest.mark.parametrize("compute_s", [0.002, 0.006, 0.012, 0.02, 0.03, 0.05], ids=str)
def test_crossing_ends_with_computing(compute_s: float) -> None:
    machine = Machine(compute_s, layer_s=1e-3)
    hosted = machine.run(400)
    crossing_s = hosted * machine.layer_s
    assert crossing_s <= compute_s
    assert hosted == 32 or crossing_s > 0.75 * compute_s - 3 * machine.layer_s
    assert len(machine.moves) <= 6
    before = len(machine.moves)
    machine.run(1000)
    assert len(machine.moves) == before, "it is settled"


@pytest.mark.parametrize("gap", [0.0, 0.4], ids=str)
@pytest.mark.parametrize("link_share", [0.75, 0.88, 0.9, 0.95, 1.0, 1.1, 1.3, 1.8], ids=str)
@pytest.mark.parametrize("compute_s", [0.002, 0.006, 0.01, 0.02, 0.05], ids=str)
def test_the_link_may_be_other_than_measured(
    compute_s: float, link_share: float, gap: float
) -> None:
    """And time may pass between passes, `gap` of what computing takes.

    What crosses is still about what computing hides.
    """
    gap_s = gap * compute_s
    machine = Machine(compute_s, layer_s=1e-3, link_share=link_share, gap_s=gap_s)
    hosted = machine.run(1000)
    assert len(machine.moves) <= 6
    least_s = compute_s + gap_s
    assert machine.pass_s <= 1.15 * least_s / min(1.0, link_share)
    assert hosted == 32 or hosted * machine.layer_s > 0.6 * compute_s - 3 * machine.layer_s


def test_layers_that_cannot_be_moved_are_tried_again_much_later() -> None:
    machine = Machine(compute_s=0.004, layer_s=1e-3)
    asked = []
    for i in range(4 * AGAIN_PASSES):
        if machine.balance.begin(1):
            asked.append(i)
            assert machine.balance.hosted(32, 32, 1000.0, 1e-3, 1e9) == 16
            machine.balance.settle()
        machine.now_s += machine.pass_s
    assert 3 <= len(asked) <= 4
    assert min(b - a for a, b in pairwise(asked)) >= AGAIN_PASSES


@pytest.mark.parametrize(
    ("fraction", "expected"), [(1.0, 700 + 100 - 50), (0.9, 900 - 200 - 50), (0.5, 500 - 200 - 50)]
)
def test_free_bytes_are_those_that_the_process_may_take(
    fraction: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1000 bytes 300 are reserved, of which 200 are allocated; a twentieth is left free."""
    figures: dict[str, Any] = {
        "mem_get_info": (700, 1000),
        "memory_reserved": 300,
        "memory_allocated": 200,
        "get_per_process_memory_fraction": fraction,
    }
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, figure=figure: figure)
    assert free_bytes(torch.device("cuda", 0)) == expected


def test_longer_histories_leave_fewer_layers_in_host_memory() -> None:
    machine = Machine(compute_s=0.016, layer_s=1e-3)
    short = machine.run(300)
    machine.layer_s *= 2
    assert machine.run(3 * AGAIN_PASSES) <= short // 2 + 1
    assert machine.hosted * machine.layer_s <= machine.compute_s


@pytest.mark.parametrize("free_layers", [0, 5, 12])
def test_layers_remain_in_host_memory_where_the_device_lacks_room(free_layers: int) -> None:
    machine = Machine(compute_s=0.004, layer_s=1e-3)
    machine.free_bytes = free_layers * machine.layer_bytes
    assert machine.run(300) == 32 - free_layers
    assert machine.free_bytes == 0


def test_layers_go_back_when_the_device_lacks_room() -> None:
    machine = Machine(compute_s=0.004, layer_s=1e-3)
    machine.run(300)
    there = 32 - machine.hosted
    machine.free_bytes = -5.5 * machine.layer_bytes
    machine.run(AGAIN_PASSES)
    assert 32 - machine.hosted == there - 6


def test_passes_that_are_not_waited_for_change_nothing() -> None:
    machine = Machine(compute_s=0.002, layer_s=1e-3)
    assert machine.run(500, ahead=True) == 32
    assert machine.balance.compute_s is None


def test_prompts_are_not_measured() -> None:
    balance = Balance(lambda: pytest.fail("a prompt was measured"))
    assert not any(balance.begin(100) for _ in range(200))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_begin_to_measure_anew(copied: Any) -> None:
    """The clock of another process says nothing."""
    placement = Placement("auto", range(4))
    assert placement.balance is not None
    for _ in range(5):
        placement.balance.begin(1)
    twin = copied(placement)
    assert twin.hosted == placement.hosted == {0, 1, 2, 3}
    assert twin.balance._begin_s is None
    assert twin.balance.begin(1) is False
