"""Fits to an error of attention that padding hides tokens from, or that has sinks of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bitslab.engine.codecs.quantized import AttentionFit, NothingSeenError, fit_error, query_weights
from bitslab.errors import ArgumentError
from tests.engine.codecs.test_tile_fit import TILE, coded, prompt

TOKENS, SINKS, WINDOW, LAST = 512, 4, 28, 64
#: Tokens between the sinks and the window, whole tiles.
CODED = slice(SINKS, SINKS + (TOKENS - SINKS - WINDOW) // TILE * TILE)


def is_coded(begin: int) -> torch.Tensor:
    """Return which tokens of a sequence that begins there are coded, of those that count."""
    at = torch.arange(TOKENS)
    return (at >= max(CODED.start, begin + SINKS)) & (at < CODED.stop)


def outputs(
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
    first: list[int],
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention of the queries that see a coded token, float64 ``[queries, heads, dim]``."""
    k, v = (t.double().repeat_interleave(2, dim=1) for t in (keys, values))
    logits = queries.double() @ k.transpose(2, 3) / keys.shape[3] ** 0.5
    at = torch.arange(TOKENS)
    places = at[-queries.shape[2] :]
    found = []
    for b, begin in enumerate(first):
        sees = (at >= begin) & (at <= places[:, None])
        counts = (sees & is_coded(begin)).any(dim=1)
        shown = logits[b].masked_fill(~sees, -torch.inf)
        if sinks is not None:
            beside = sinks.double().view(-1, 1, 1).expand(-1, len(places), 1)
            shown = torch.cat([shown, beside], dim=2)
        shares = shown.softmax(dim=2)[..., :TOKENS].nan_to_num()
        found.append((shares @ v[b])[:, counts].transpose(0, 1))
    return torch.cat(found)


def fitted(first: list[int], sinks: torch.Tensor | None = None, **options: Any) -> AttentionFit:
    keys, values, queries = prompt(TOKENS, len(first))
    given = {"error": 0.1, "tile_tokens": TILE, "sinks": SINKS, "window": WINDOW, **options}
    found = fit_error(
        keys, values, queries, first_valid=torch.tensor(first), sink_logits=sinks, **given
    )
    assert found is not None
    return found


@settings(max_examples=12)
@given(st.lists(st.integers(0, TOKENS), min_size=1, max_size=3), st.booleans(), st.booleans())
@example([0, 449], False, False)  # 63 tokens
@example([TOKENS, 0], False, True)  # no token
@example([CODED.stop - SINKS - 1], True, True)  # one coded token
@example([CODED.stop - SINKS, CODED.stop - 1], True, True)  # none
@example([0, CODED.stop, 500], False, False)  # none
@example([2, 3], False, True)  # own first tokens among those that are never coded
def test_the_error_is_that_of_queries_that_see_coded_tokens(
    first: list[int], with_sinks: bool, by_hand: bool
) -> None:
    sinks = torch.tensor([-1.0, 2.0, 4.0, float("-inf")]) if with_sinks else None
    scales = {"key_scale": 1.0, "value_scale": 0.7} if by_hand else {}
    if min(first) + SINKS >= CODED.stop:
        with pytest.raises(NothingSeenError, match="queries: none of them sees a token"):
            fitted(first, sinks, **scales)
        return
    fit = fitted(first, sinks, **scales)
    keys, values, queries = prompt(TOKENS, len(first))
    k, v = keys.clone(), values.clone()
    for kept, plan in ((k, fit.keys), (v, fit.values)):
        decoded = kept.clone()
        decoded[:, :, CODED] = coded(kept[:, :, CODED], plan)[0]
        for b, begin in enumerate(first):
            kept[b, :, is_coded(begin)] = decoded[b, :, is_coded(begin)]
    last = queries[:, :, -LAST:]
    plain = outputs(keys, values, last, first, sinks)
    error = (outputs(k, v, last, first, sinks) - plain).norm() / plain.norm()
    assert fit.measured.error == pytest.approx(float(error), rel=0.02)
    if by_hand:
        assert (fit.measured.key_scale, fit.measured.value_scale) == (1.0, 0.7)
    else:
        assert fit.measured.error <= 0.1


def test_sequences_that_see_nothing_coded_do_not_hide_the_error_of_others() -> None:
    """Outputs that cannot change would make the error of all the smaller."""
    scales: dict[str, Any] = {"key_scale": 1.0, "value_scale": 0.7}
    alone, beside = (fitted(first, **scales) for first in ([0], [0, 500]))
    assert beside.measured.error == pytest.approx(alone.measured.error, rel=0.05)


def test_queries_of_padding_have_no_weight() -> None:
    _, _, queries = prompt(TOKENS, 3)
    n = queries.shape[2]
    counted = torch.arange(n) >= torch.tensor([0, 70, n])[:, None]
    real = torch.cat([queries[0], queries[1, :, 70:]], dim=1)[None]
    expected = query_weights(real, 2, scaling=0.3)
    queries[1, :, :70], queries[2] = 100, float("nan")
    found = query_weights(queries, 2, scaling=0.3, counted=counted)
    assert torch.allclose(found, expected, rtol=1e-5)


def test_weights_of_a_fit_are_those_of_queries_that_are_no_padding() -> None:
    keys, values, queries = prompt(TOKENS, 2)
    first = torch.tensor([0, TOKENS - 30])
    options: dict[str, Any] = {"error": 0.1, "tile_tokens": TILE, "first_valid": first}
    before = fit_error(keys, values, queries, **options)
    queries[1, :, :-30] *= 50
    after = fit_error(keys, values, queries, **options)
    assert before is not None and after is not None
    assert before.weights is not None and after.weights is not None
    assert torch.equal(before.weights, after.weights)
    assert before.measured == after.measured


def test_sinks_that_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"sink_logits: \[2\], expected \[4\]"):
        fitted([0], torch.zeros(2))
