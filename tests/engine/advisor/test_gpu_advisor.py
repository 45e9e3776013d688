"""The advisor on a real GPU: what it measures, how long that takes, and graph capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitslab import InvariantCodec
from bitslab.engine.advisor import (
    Advisor,
    LinkModel,
    advisor_for,
    decode_bytes_per_s,
    fit_time_model,
    measure_link,
)
from bitslab.engine.advisor import decoding as decoding_module
from bitslab.engine.advisor import link as link_module
from bitslab.engine.codecs.registry import get_codec

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

GIB = 1 << 30
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(link_module, "_measured", {})
    monkeypatch.setattr(decoding_module, "_known", {})
    monkeypatch.setenv("BITSLAB_CACHE", str(tmp_path))
    monkeypatch.delenv("BITSLAB_LINK", raising=False)


def test_measuring_draws_none_of_the_callers_random_numbers():
    """As dropout's: a policy that measures would train with other masks."""
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    measure_link("cuda", deep_bytes=GIB)
    after = torch.cuda.get_rng_state(), torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_link_is_measured_once():
    model = measure_link("cuda")
    assert model.source.startswith("measured on ")
    assert 1e9 < model.zero_copy_bytes_per_s < 1.1 * model.host_to_device_bytes_per_s
    assert 1e9 < model.device_to_host_bytes_per_s < 1e12
    assert measure_link(DEVICE) is model


def test_random_rows_are_measured_on_request():
    model = measure_link("cuda", deep_bytes=2 * GIB)
    assert [size for size, _ in model.random_rows_per_s] == [
        size for size, _ in LinkModel().random_rows_per_s
    ]
    assert all(rate > 1e6 for _, rate in model.random_rows_per_s)
    assert measure_link("cuda") is model


def test_the_share_of_a_direction_while_both_are_used(monkeypatch):
    monkeypatch.setattr(link_module, "_shares", {})
    before = torch.cuda.memory_allocated()
    share = link_module.share_both_ways(torch.device("cuda"))
    assert 0.3 < share <= 1.0
    assert link_module.share_both_ways(DEVICE) == share and len(link_module._shares) == 1
    assert torch.cuda.memory_allocated() == before


def test_the_rate_of_decoding_is_measured_and_kept(monkeypatch):
    rows = (torch.randn(3000, 256) / 8).bfloat16()
    codec = InvariantCodec.fit(rows)
    rate = decode_bytes_per_s(codec, "cuda", rows)
    assert rate is not None and 1e9 < rate < 1e13
    monkeypatch.setattr(decoding_module, "_known", {})
    assert decode_bytes_per_s(codec, "cuda") == rate


def test_a_decision_inside_a_capture_measures_nothing():
    advisor = Advisor("cuda")
    x = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert advisor.sort(8 * GIB, 512, 1_000_000)
        x += 1
    assert not link_module._measured
    graph.replay()
    assert advisor.sort(8 * GIB, 512, 1_000_000)
    assert DEVICE in link_module._measured


def test_the_advisor_of_a_device():
    assert advisor_for(torch.device("cuda", 0)) is advisor_for(torch.device("cuda", 0))
    advice = advisor_for(DEVICE).advise(
        n_rows=1 << 24, row_bytes=512, packed_bytes=4 * GIB, batch_rows=1_000_000
    )
    assert advice.packed
    assert advice.via == "zero-copy"


def test_codecs_are_measured_and_a_launch_setting_is_found():
    codec: Any = get_codec("zvc")
    model = fit_time_model("cuda", [codec], dtypes=[torch.float32], budget_s=5.0, cache=False)
    times = model.codecs["zvc", 4]
    most = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    assert times.sm_budget is not None and 1 <= times.sm_budget <= most
    assert times.size_edges[-1] > 100e6
    encode_s, decode_s = model.predict("zvc", 256e6, 0.53)
    for seconds in (encode_s, decode_s):
        assert 10e9 < 256e6 / seconds < 10e12
