"""Packed or raw, sort or not, zero-copy or copy engine: the decisions and their reasons."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from bitslab import ArgumentError, ArgumentTypeError, RawCodec
from bitslab.engine.advisor import Advisor, LinkModel, advise, advisor_for
from bitslab.engine.advisor import advice as advice_module
from bitslab.engine.advisor import link as link_module

GIB = 1 << 30
LINK = LinkModel()


def table(**changed):
    """An 8 GiB table of 512-byte rows that packs to a half, gathered a million rows at a time."""
    facts = {"n_rows": 1 << 24, "row_bytes": 512, "packed_bytes": 4 * GIB, "batch_rows": 1_000_000}
    return {**facts, **changed}


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr(link_module, "_measured", {})
    monkeypatch.setattr(advice_module, "_advisors", {})
    monkeypatch.delenv("BITSLAB_LINK", raising=False)


# Packed or raw


@pytest.mark.parametrize(
    ("facts", "packed"),
    [
        (table(), True),
        (table(decode_bytes_per_s=1e12), True),
        (table(decode_bytes_per_s=20e9), False),  # a decoder slower than the link
        (table(packed_bytes=8 * GIB), False),  # nothing saved
        (table(packed_bytes=9 * GIB), False),
        # In place: fewer bytes cross, no memory is saved.
        (table(packed_span_bytes=8 * GIB), True),
        # Bound by lookups, so that bytes do not matter: packed for its memory alone.
        (table(batch_rows=1_000, packed_bytes=7 * GIB, packed_span_bytes=8 * GIB), False),
        (table(contiguous=True), True),
        (table(contiguous=True, packed_bytes=8 * GIB), False),
        (table(contiguous=True, decode_bytes_per_s=30e9), False),
        (table(n_rows=0, packed_bytes=0, batch_rows=0), False),
    ],
)
def test_packed_or_raw(facts, packed):
    advice = advise(LINK, **facts)
    assert advice.packed is packed
    assert advice.seconds["packed" if packed else "raw"] <= advice.seconds["raw"], "never worse"


def test_a_decoder_is_the_limit_when_it_is_slower_than_the_link():
    seconds = advise(LINK, **table(decode_bytes_per_s=60e9)).seconds
    assert seconds["packed"] == seconds["decode"] == pytest.approx(512e6 / 60e9)


def test_on_the_cpu_packing_is_for_memory():
    slow = table(decode_bytes_per_s=1e8)
    assert advise(LINK, **slow, crosses_link=False).packed
    assert not advise(LINK, **slow).packed
    assert not advise(LINK, **table(packed_span_bytes=8 * GIB), crosses_link=False).packed


# The way


@pytest.mark.parametrize(
    ("facts", "via"),
    [
        (table(), "zero-copy"),
        (table(contiguous=True), "copy-engine"),
        (table(contiguous=True, batch_rows=1_000), "zero-copy"),  # a copy costs 8 us by itself
    ],
)
def test_the_way(facts, via):
    advice = advise(LINK, **facts)
    assert advice.via == via
    other = {"zero-copy": "copy-engine", "copy-engine": "zero-copy"}[via]
    assert advice.seconds[via] < advice.seconds[other]


def test_ranges_are_never_sorted():
    advice = advise(LINK, **table(contiguous=True))
    assert not advice.sort
    assert "sorted" not in advice.seconds


def test_rows_that_the_host_collects_are_not_sorted_on_the_device():
    fast_host = LinkModel(host_gather_bytes_per_s=1e12, zero_copy_bytes_per_s=1e9)
    advice = advise(fast_host, **table())
    assert (advice.via, advice.sort) == ("copy-engine", False)


# Reasons


def test_reasons_and_seconds_as_a_plain_dict():
    advice = advise(LINK, **table(decode_bytes_per_s=1e12))
    shown = json.loads(json.dumps(advice.as_dict()))
    assert (shown["packed"], shown["sort"], shown["via"]) == (True, True, "zero-copy")
    assert shown["reasons"] == {
        "packed": [
            "Packed rows are 4 GiB of 8 GiB raw and take 4 GiB of host memory.",
            "A batch of 1000000 rows takes 6.98 ms packed, 10.1 ms raw.",
            "Decoding takes 0.512 ms of it; the link is the limit.",
        ],
        "sort": [
            "Random rows out of 4 GiB: at most 41 million address lookups a second.",
            "1000000 rows of 256 B take 24.4 ms as they come and 6.98 ms sorted, the sort "
            "included.",
        ],
        "via": [
            "A kernel that reads host memory moves 51 GB/s at most: 6.98 ms.",
            "The copy engine moves 55.5 GB/s, after the host has collected the rows: 187 ms.",
            "Link: figures of an H200.",
        ],
    }
    assert shown["seconds"]["sorted"] == shown["seconds"]["packed"] < shown["seconds"]["unsorted"]


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("packed_bytes", [0, 1, 4 * GIB, 8 * GIB])
def test_every_decision_has_reasons(packed_bytes, contiguous):
    advice = advise(LINK, **table(packed_bytes=packed_bytes, contiguous=contiguous))
    for reasons in advice.as_dict()["reasons"].values():
        assert reasons
        assert all(sentence.endswith(".") for sentence in reasons)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"row_bytes": 0}, ArgumentError, "row_bytes: 0, accepted are numbers from 1 on"),
        ({"batch_rows": -1}, ArgumentError, "batch_rows: -1, accepted are numbers from 0"),
        ({"n_rows": 2.0}, ArgumentTypeError, "n_rows: expected an int, got 2.0"),
        ({"packed_span_bytes": -1}, ArgumentError, "packed_span_bytes: -1, accepted"),
        ({"decode_bytes_per_s": 0.0}, ArgumentError, "decode_bytes_per_s: 0.0, accepted"),
    ],
)
def test_bad_facts(changed, error, message):
    with pytest.raises(error, match=message):
        advise(LINK, **table(**changed))


# The advisor of a device


def test_an_advisor_decides_as_its_link_does_and_remembers():
    advisor = Advisor("cpu", given=LINK)
    for n_rows in (0, 1, 100, 20_000, 200_000, 1_000_000):
        for table_bytes in (GIB, 8 * GIB):
            expected = LINK.pays_to_sort(table_bytes, 512, n_rows)
            assert advisor.sort(table_bytes, 512, n_rows) is expected
            assert advisor.sort(table_bytes, 512, n_rows) is expected


def test_the_decision_does_not_depend_on_which_batch_came_first():
    for n_rows in range(16_384, 32_768, 1_000):
        one, other = Advisor("cpu", given=LINK), Advisor("cpu", given=LINK)
        other.sort(8 * GIB, 256, 16_384)
        assert one.sort(8 * GIB, 256, n_rows) is other.sort(8 * GIB, 256, n_rows)


def test_a_decision_at_every_gather_calls_nothing_more():
    advisor = Advisor("cpu", given=LINK)
    first = advisor.sort(8 * GIB, 512, 1_000_000)
    events: list[tuple[str, str]] = []
    sys.setprofile(lambda frame, event, arg: events.append((event, frame.f_code.co_name)))
    again = advisor.sort(8 * GIB, 512, 1_000_000)
    sys.setprofile(None)
    assert again is first
    assert [name for event, name in events if event == "call"] == ["sort"]


def test_the_link_is_measured_at_the_first_decision():
    advisor = Advisor("cpu")
    assert not link_module._measured
    assert not advisor.sort(8 * GIB, 512, 1_000_000)
    assert torch.device("cpu") in link_module._measured
    assert advisor.link is link_module._measured[torch.device("cpu")]


def test_one_advisor_a_device():
    assert advisor_for(torch.device("cpu")) is advisor_for(torch.device("cpu"))
    assert advisor_for(torch.device("cpu", 0)) is advisor_for(torch.device("cpu"))
    with pytest.raises(ArgumentTypeError, match="device: meta, accepted are cpu and cuda"):
        advisor_for(torch.device("meta"))


def test_an_advisor_measures_the_decoder_on_a_sample(tmp_path, monkeypatch):
    monkeypatch.setenv("BITSLAB_CACHE", str(tmp_path))
    rows = torch.randn(40, 32)
    codec = RawCodec((32,), torch.float32)
    advisor = Advisor("cpu", given=LINK)
    facts = table(row_bytes=128, packed_bytes=1 * GIB)
    assert "decode" not in advisor.advise(codec=codec, **facts).seconds
    advice = advisor.advise(codec=codec, sample=rows, **facts)
    assert advice.seconds["decode"] > 0
    assert (
        advice.packed_reasons[1] == "Rows are used on the CPU: packing is decided by memory alone."
    )
    assert advisor.advise(codec=codec, **facts).seconds["decode"] == advice.seconds["decode"]
    assert advisor.advise(decode_bytes_per_s=1e9, **facts).seconds["decode"] == 0.128
