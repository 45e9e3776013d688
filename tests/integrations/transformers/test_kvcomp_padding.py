"""KVCompCache: errors of prompts with padding on the left, and what they are measured without."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bitslab.integrations.transformers import KVCompCache
from tests.integrations.transformers.models import prompt_of
from tests.integrations.transformers.test_kvcomp_cache import (
    BATCH,
    DIM,
    HEADS,
    QUERY_HEADS,
    SIZES,
    attend,
    causal,
    config,
    normal,
    prompted,
    run,
)
from tests.integrations.transformers.test_kvcomp_generate import attended_model

pytestmark = pytest.mark.usefixtures("one_thread")

ERROR = 0.3
SCALES: dict[str, dict[str, Any]] = {
    "none": {},
    "both": {"key_scale": 1.0, "value_scale": 0.7},
    "of-keys": {"key_scale": 1.0},
}
#: All but one token of 100 and 300; 63 and 64 of them are queries that a fit looks at.
LENGTHS = st.sampled_from([100, 300]).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(0, n - 1))
)


def padded(tokens: int, padding: int, batch: int, **options: Any) -> Any:
    """Return a cache of a batch whose last sequence is padded, after two more tokens."""
    model, tokens_of = attended_model("llama"), prompt_of(batch, tokens)
    cache: Any = KVCompCache(model.config, **{"error": ERROR, **SIZES, **options})
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    mask[-1, :padding] = 0
    with torch.no_grad():
        model(tokens_of, attention_mask=mask, past_key_values=cache)
        for _ in range(2):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            out = model(tokens_of[:, :1], attention_mask=mask, past_key_values=cache)
    assert bool(out.logits.isfinite().all())
    return cache


@settings(max_examples=16, deadline=None)
@given(LENGTHS, st.sampled_from([1, 3]), st.sampled_from(list(SCALES)))
@example((100, 36), 3, "none")
@example((100, 37), 3, "none")
@example((100, 79), 1, "both")  # one coded token of the sequence is seen
@example((100, 80), 1, "both")
@example((100, 99), 3, "of-keys")
@example((300, 299), 3, "both")
@example((300, 283), 1, "none")
@example((300, 260), 1, "of-keys")
def test_short_sequences_leave_a_batch_quantised(
    lengths: tuple[int, int], batch: int, scales: str
) -> None:
    tokens, padding = lengths
    options = SCALES[scales]
    stats, plain = (padded(tokens, p, batch, **options).stats() for p in (padding, 0))
    packed = plain["packed_tokens"]
    assert stats["packed_tokens"] == packed == (tokens - 20) // 16 * 16
    assert not stats["lossless"] and not plain["lossless"]
    if batch == 1 and padding >= packed:  # its first four tokens are not coded
        assert not stats["errors"]
        assert "no query of the prompt sees a token that is packed" in stats["measured_without"][0]
        assert stats["packed_ratio"] > 0.5 * plain["packed_ratio"]
        return
    assert not stats["measured_without"]
    assert set(stats["errors"]) == {0, 1}
    for error in stats["errors"].values():
        assert math.isfinite(error) and 0 < error <= (math.inf if scales == "both" else ERROR)
    # One token says little of the steps that a prompt needs.
    few = batch == 1 and tokens - padding < 64
    assert (0.6 if few else 0.85) < stats["packed_ratio"] / plain["packed_ratio"] < 2


def test_nothing_to_measure_is_learnt_no_more_until_a_reset() -> None:
    cache = padded(100, 90, 1)
    before = cache.stats()["measured_without"]
    assert set(before) == {0, 1}
    cache = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
    assert cache.stats()["measured_without"] == before
    cache.reset()
    assert not cache.stats()["measured_without"]


def filled(**options: Any) -> Any:
    """Return a cache of one prompt, attended to as `options` say, and packed."""
    cache: Any = KVCompCache(config("bitslab"), **{"error": ERROR, **SIZES})
    run(cache, 100, **options)
    for layer in cache.layers:
        layer.settle()
    return cache


class Sinks(torch.nn.Module):
    """An attention module of GPT-OSS, as far as attention knows it."""

    def __new__(cls) -> Any:
        from transformers.models.gpt_oss import modeling_gpt_oss

        module = modeling_gpt_oss.GptOssAttention.__new__(modeling_gpt_oss.GptOssAttention)
        torch.nn.Module.__init__(module)
        module.num_key_value_groups, module.training = QUERY_HEADS // HEADS, False
        module.sinks = torch.nn.Parameter(torch.tensor([4.0, 5.0, 1.0, 6.0]))
        return module


@pytest.mark.parametrize("later", [False, True], ids=["at-once", "after-a-copy"])
def test_errors_are_those_of_attention_with_its_sinks(later: bool) -> None:
    from bitslab.integrations.transformers.attention import attention

    module: Any = Sinks()
    cache: Any = KVCompCache(config("bitslab"), **{**SIZES, **SCALES["both"]})
    k, v = (normal(BATCH, HEADS, 100, DIM, seed=i) for i in range(2))
    query = normal(BATCH, QUERY_HEADS, 100, DIM, seed=100)
    found = cache.update(k, v, 0)
    options: dict[str, Any] = {"scaling": 0.3, "s_aux": module.sinks}
    with torch.no_grad():
        plain, _ = attention(module, query, found[0], found[1], None, **options)
        if later:
            cache.batch_select_indices(torch.tensor([1, 0]))
            plain, query = plain.flip(0), query.flip(0)
        cache.layers[0].settle()
        layer = cache.layers[0]
        kept, _ = attention(module, query, layer.keys, layer.values, None, **options)
    kept, plain = kept[:, -64:], plain[:, -64:]
    error = float((kept - plain).norm() / plain.norm())
    stats = cache.stats()
    assert stats["errors"][0] == pytest.approx(error, rel=1e-3)
    assert not stats["measured_without"]
    without = prompted(**SCALES["both"]).stats()["errors"][0]
    assert abs(error - without) > 0.02 * error  # of the same K, V and queries


#: Masks that transformers made are known; those of a test are not.
UNKNOWN_MASK = "a mask not known to be causal with padding on the left"
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "position-bias": ({"position_bias": torch.zeros(1)}, "a position bias"),
    "window": ({"sliding_window": 50}, "a sliding window"),
    "window-of-all": ({"sliding_window": 100}, ""),
    "none": ({}, ""),
}


@pytest.mark.parametrize(("options", "text"), OTHERS.values(), ids=OTHERS)
def test_stats_say_what_errors_were_measured_without(options: dict[str, Any], text: str) -> None:
    cache = filled(mask=causal(100, 100), **options)
    stats = cache.stats()
    assert set(stats["errors"]) == {0, 1}
    said = f"{UNKNOWN_MASK}, {text}" if text else UNKNOWN_MASK
    assert stats["measured_without"] == {0: said, 1: said}
    cache.reset()
    assert not cache.stats()["measured_without"]


def test_stats_say_that_there_was_another_mask() -> None:
    cache: Any = KVCompCache(config("bitslab"), **{"error": ERROR, **SIZES})
    k, v = (normal(BATCH, HEADS, 100, DIM, seed=i) for i in range(2))
    found = cache.update(k, v, 0)
    query = normal(BATCH, QUERY_HEADS, 100, DIM, seed=100)
    found[0].update.see(query, None, {"scaling": 0.3}, other_mask=True)
    cache.layers[0].settle()
    assert cache.stats()["measured_without"] == {0: UNKNOWN_MASK}


def test_sinks_of_another_shape_are_left_out() -> None:
    cache: Any = KVCompCache(config("bitslab"), **{"error": ERROR, **SIZES})
    k, v = (normal(BATCH, HEADS, 100, DIM, seed=i) for i in range(2))
    found = cache.update(k, v, 0)
    query = normal(BATCH, QUERY_HEADS, 100, DIM, seed=100)
    found[0].update.see(query, None, {"scaling": 0.3, "s_aux": torch.zeros(3)})
    cache.layers[0].settle()
    assert cache.stats()["measured_without"] == {0: "sinks other than one a head"}
    assert attend(cache.update(k[:, :, :1], v[:, :, :1], 0)).isfinite().all()


@pytest.mark.parametrize(
    ("sink", "reason"), [("-inf", "no steps kept the error"), ("nan", "a NaN or an infinity")]
)
def test_a_sink_that_takes_no_share_is_no_reason(sink: str, reason: str) -> None:
    cache: Any = KVCompCache(config("bitslab"), **{"error": 1e-6, **SIZES})
    k, v = (normal(BATCH, HEADS, 100, DIM, seed=i) for i in range(2))
    found = cache.update(k, v, 0)
    query = normal(BATCH, QUERY_HEADS, 100, DIM, seed=100)
    sinks = torch.full((QUERY_HEADS,), float(sink))
    found[0].update.see(query, None, {"scaling": 0.3, "s_aux": sinks})
    cache.layers[0].settle()
    assert reason in cache.stats()["lossless"][0]
