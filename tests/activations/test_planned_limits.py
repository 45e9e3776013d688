"""Plans within limits of the host and the disk: what these refuse is planned some other way."""

from __future__ import annotations

from typing import Any

import pytest

from tests.activations.test_planned import KEPT_BYTES, LIMIT, blocks, check

pytestmark = pytest.mark.usefixtures("one_thread", "quick_measuring", "holds")


@pytest.mark.parametrize("host_bytes", [0, 300_000])
def test_what_a_full_host_refuses_is_planned(host_bytes: int) -> None:
    offload = check(blocks, memory=LIMIT, host_bytes=host_bytes)
    profile, plan = offload.step_profile, offload.plan
    assert profile is not None and sum(site.nbytes for site in profile.sites) == KEPT_BYTES
    assert plan is not None and not plan.declined and plan.memory_bytes == LIMIT
    assert plan.prediction.peak_bytes <= LIMIT
    moved = [s.nbytes for s in plan.sites if s.candidate.action == "host"]
    assert sum(moved) <= host_bytes
    assert plan.modules or any(s.candidate.action == "replay" for s in plan.sites)
    offload.detach()


def test_a_limit_that_a_full_host_cannot_meet_names_the_least() -> None:
    with pytest.warns(UserWarning, match="memory_bytes: 1,000, and the least possible is"):
        offload = check(blocks, memory=1000, host_bytes=0, recompute=False, codecs=[])
    notes = "".join(offload.report().notes)
    assert "Declined: all fits" in notes and "Nothing is planned" not in notes
    offload.detach()


def test_a_few_small_copies_tell_no_rate_of_the_link(tmp_path: Any, quick_disk: None) -> None:
    offload = check(blocks, memory=LIMIT, disk=tmp_path, write_budget=1e-6)
    plan = offload.plan
    assert plan is not None and plan.prediction.written_bytes <= 1000
    assert plan.prediction.step_s < 100 * plan.plain.step_s
    offload.close()
