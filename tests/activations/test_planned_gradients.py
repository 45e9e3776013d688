"""Gradients under random plans are those of plain training, bit for bit, with delays too."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from bitslab.activations import crossing, policy_choice
from bitslab.activations import hooks as hooks_module
from bitslab.activations import planned as planned_module
from bitslab.activations.checkpointed import checkpointable
from bitslab.activations.disk import PosixFile
from bitslab.activations.local_copies import replayed_copy
from bitslab.activations.pass_record import PassPlan, PassRecord
from bitslab.activations.planned import PlannedPolicy
from bitslab.activations.policies import CHECKPOINT, KEEP, RAW, REPLAY, Choice
from bitslab.activations.replay import replayable
from bitslab.activations.sites import Site, inside_module, is_compiled
from tests.activations.cases import CASES, Offloaded
from tests.activations.test_gradients import check_case

CHOICES = (
    Choice(KEEP, "Drawn."),
    Choice(REPLAY, "Drawn.", "device"),
    Choice("zvc", "Drawn.", "device"),
    Choice("ibp-blob", "Drawn.", "device"),
    Choice("zvc+ibp", "Drawn."),
    Choice(RAW, "Drawn."),
    Choice("zvc+ibp", "Drawn.", "disk"),
    Choice(RAW, "Drawn.", "disk"),
)
CHECKPOINTED = Choice(CHECKPOINT, "Drawn.", "device")

pytestmark = [
    pytest.mark.usefixtures("one_thread", "quick_disk"),
    # Of modules that change their buffers, which are tried nevertheless.
    pytest.mark.filterwarnings("ignore:.*is not computed again in the backward pass any more"),
]


class DrawnPolicy(PlannedPolicy):
    """Follows a plan that is drawn for each site, from the first pass on."""

    seed = 0
    keeps = True
    passes = 0
    #: Those that any plan has checkpointed, and what was done with sites.
    proven: ClassVar[set[str]] = set()
    chosen: ClassVar[set[Choice]] = set()

    def decide(self, site: Site) -> Choice:
        self._seen[site.name] = site
        inside = any(inside_module(site.name, module) for module in self.drawn_modules())
        drawn = random.Random(f"{self.seed} {site.name}").choice(CHOICES)
        found = CHECKPOINTED if inside else drawn
        self.chosen.add(found)
        return found

    def drawn_modules(self) -> frozenset[str]:
        """Return modules that are checkpointed; none in two of three plans."""
        draw = random.Random(f"{self.seed} modules")
        names = () if self._modules is None else self._modules.modules
        return (
            frozenset(name for name in names if draw.random() < 0.5)
            if draw.random() < 0.3
            else frozenset()
        )

    def packed_bytes(self, site: str) -> float:
        # On a GPU some get too little room, and remain as they are.
        share = random.Random(f"{self.seed} {site} room").choice([0.2, 1.2])
        return share * self._seen[site].nbytes

    def begin(self, entered: PassRecord) -> bool:
        # Any site lets any other be fetched, what is not there is passed over.
        DrawnPolicy.passes += 1
        if self._modules is not None:
            self._modules.apply(self.drawn_modules())
            self.proven.update(self._modules._proven)
        names = [f"{i}:{j}" for i in range(4) for j in range(3)]
        draw = random.Random(self.seed)
        begins = ["", *names, *([] if self._modules is None else self._modules.modules)]
        fetches = {draw.choice(begins): tuple(draw.sample(names, 3)) for _ in range(4)}
        entered.plan = PassPlan(
            fetches=fetches,
            reads={draw.choice(["", *names]): tuple(draw.sample(names, 3)) for _ in range(2)},
            in_flight_bytes={name: draw.choice([0, 1 << 30]) for name in names},
            backward_in_flight_bytes={name: draw.choice([0, 4096]) for name in names[::2]},
            replays=defaultdict(tuple),
            modules=self.drawn_modules(),
            named={name: draw.choice(names) for name in draw.sample(names, 4)},
            falls_back_to_keeping=self.keeps,
        )
        self._running.record = entered
        return False


def children(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that may be checkpointed here: more than the layers of lists."""
    found = checkpointable(model)
    others = {name: m for name, m in model.named_children() if not is_compiled(m)}
    return found or others


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[DrawnPolicy]]:
    """Plan by draws; replay what is found exact when it is saved."""
    real: Any = replayed_copy

    def proven(name: str, flat: torch.Tensor, span: Any, root: torch.Tensor, *rest: Any) -> Any:
        made_in: PassRecord = rest[-2]
        if made_in.plan is None:  # a graph of a backward pass that a GPU's thread makes, in no pass
            return real(name, flat, span, root, *rest)
        # Plans replay nothing from what lies in a checkpointed module, which gives it back once.
        found = None if made_in.plan.modules else replayable(root)
        signature = None if found is None else found.signature
        return real(name, flat, span, root, *rest[:-1], signature)

    monkeypatch.setattr(hooks_module, "replayed_copy", proven)
    monkeypatch.setattr(policy_choice, "PlannedPolicy", DrawnPolicy)
    monkeypatch.setattr(planned_module, "checkpointable", children)
    DrawnPolicy.passes = 0
    DrawnPolicy.proven.clear()
    DrawnPolicy.chosen.clear()
    yield DrawnPolicy
    assert DrawnPolicy.passes, "no pass followed a drawn plan"


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Let every copy to the host and back, every write and every read take a drawn time."""
    draw = random.Random(0)

    def slow(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            time.sleep(draw.random() * 2e-3)
            return real(*args)

        return call

    for owner, name in (
        (crossing, "copy_on_host"),
        (crossing, "fill_on_host"),
        (PosixFile, "write"),
        (PosixFile, "read"),
    ):
        monkeypatch.setattr(owner, name, slow(getattr(owner, name)))
    return draw


DRAWS = settings(
    max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.drawn(19)
@pytest.mark.parametrize("name", CASES)
@DRAWS
@given(seed=st.integers(0, 1 << 20), keeps=st.booleans())
def test_gradients_under_random_plans(
    name: str, drawn: type[DrawnPolicy], tmp_path: Path, seed: int, keeps: bool
) -> None:
    drawn.seed, drawn.keeps = seed, keeps
    check_case(name, Offloaded(slowdown=0.5, disk=tmp_path), None)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", CASES)
@DRAWS
@given(seed=st.integers(0, 1 << 20))
def test_gradients_under_random_plans_with_delays(
    name: str, drawn: type[DrawnPolicy], delayed: random.Random, tmp_path: Path, seed: int
) -> None:
    drawn.seed, drawn.keeps = seed, False
    delayed.seed(seed)
    check_case(name, Offloaded(slowdown=0.5, disk=tmp_path), None)


def test_drawn_plans_have_every_tier(drawn: type[DrawnPolicy], tmp_path: Path) -> None:
    written = 0
    for seed in range(6):
        drawn.seed, drawn.keeps = seed, True
        training = Offloaded(slowdown=0.5, disk=tmp_path)
        check_case("adapters-on-frozen-weights", training)
        written += sum(offload.stats()["disk_written_bytes"] for offload in training.offloads)
    assert drawn.chosen == {*CHOICES, CHECKPOINTED} and drawn.proven and written > 0
