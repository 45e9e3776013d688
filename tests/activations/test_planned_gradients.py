"""Gradients under random plans are those of plain training, bit for bit, with delays too."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitslab.activations import crossing, policy_choice
from bitslab.activations import hooks as hooks_module
from bitslab.activations.local_copies import replayed_copy
from bitslab.activations.pass_record import PassPlan, PassRecord
from bitslab.activations.planned import PlannedPolicy
from bitslab.activations.policies import KEEP, RAW, REPLAY, Choice
from bitslab.activations.replay import replayable
from bitslab.activations.sites import Site
from tests.activations.cases import CASES, Offloaded
from tests.activations.test_gradients import check_case

CHOICES = (
    Choice(KEEP, "Drawn."),
    Choice(REPLAY, "Drawn.", "device"),
    Choice("zvc", "Drawn.", "device"),
    Choice("ibp-blob", "Drawn.", "device"),
    Choice("zvc+ibp", "Drawn."),
    Choice(RAW, "Drawn."),
)

pytestmark = pytest.mark.usefixtures("one_thread")


class DrawnPolicy(PlannedPolicy):
    """Follows a plan that is drawn for each site, from the first pass on."""

    seed = 0
    keeps = True
    passes = 0

    def decide(self, site: Site) -> Choice:
        self._seen[site.name] = site
        return random.Random(f"{self.seed} {site.name}").choice(CHOICES)

    def packed_bytes(self, site: str) -> float:
        # On a GPU some get too little room, and remain as they are.
        share = random.Random(f"{self.seed} {site} room").choice([0.2, 1.2])
        return share * self._seen[site].nbytes

    def begin(self, entered: PassRecord) -> bool:
        # Any site lets any other be fetched, what is not there is passed over.
        DrawnPolicy.passes += 1
        names = [f"{i}:{j}" for i in range(4) for j in range(3)]
        draw = random.Random(self.seed)
        fetches = {draw.choice(["", *names]): tuple(draw.sample(names, 3)) for _ in range(4)}
        entered.plan = PassPlan(
            fetches=fetches,
            reads={draw.choice(["", *names]): tuple(draw.sample(names, 3)) for _ in range(2)},
            in_flight_bytes={name: draw.choice([0, 1 << 30]) for name in names},
            backward_in_flight_bytes={name: draw.choice([0, 4096]) for name in names[::2]},
            replays=defaultdict(tuple),
            modules=frozenset(),
            named={name: draw.choice(names) for name in draw.sample(names, 4)},
            falls_back_to_keeping=self.keeps,
        )
        return False


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[DrawnPolicy]]:
    """Plan by draws, and replay what is found exact when it is saved."""
    real: Any = replayed_copy

    def proven(name: str, flat: torch.Tensor, span: Any, root: torch.Tensor, *rest: Any) -> Any:
        found = replayable(root)
        signature = None if found is None else found.signature
        return real(name, flat, span, root, *rest[:-1], signature)

    monkeypatch.setattr(hooks_module, "replayed_copy", proven)
    monkeypatch.setattr(policy_choice, "PlannedPolicy", DrawnPolicy)
    DrawnPolicy.passes = 0
    yield DrawnPolicy
    assert DrawnPolicy.passes, "no pass followed a drawn plan"


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Let every copy to the host and back take a drawn time."""
    draw = random.Random(0)
    send, fill = crossing.copy_on_host, crossing.fill_on_host

    def slow_send(*args: Any) -> None:
        time.sleep(draw.random() * 2e-3)
        send(*args)

    def slow_fill(*args: Any) -> None:
        time.sleep(draw.random() * 2e-3)
        fill(*args)

    monkeypatch.setattr(crossing, "copy_on_host", slow_send)
    monkeypatch.setattr(crossing, "fill_on_host", slow_fill)
    return draw


DRAWS = settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.drawn(19)
@pytest.mark.parametrize("name", CASES)
@DRAWS
@given(seed=st.integers(0, 1 << 20), keeps=st.booleans())
def test_gradients_under_random_plans(
    name: str, drawn: type[DrawnPolicy], seed: int, keeps: bool
) -> None:
    drawn.seed, drawn.keeps = seed, keeps
    check_case(name, Offloaded(slowdown=0.5), None)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "name", ["chunks", "retained-graph", "in-another-order", "dropout-and-random-numbers"]
)
@DRAWS
@given(seed=st.integers(0, 1 << 20))
def test_gradients_under_random_plans_with_delays(
    name: str, drawn: type[DrawnPolicy], delayed: random.Random, seed: int
) -> None:
    drawn.seed, drawn.keeps = seed, False
    delayed.seed(seed)
    check_case(name, Offloaded(slowdown=0.5), None)
