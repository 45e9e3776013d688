"""Attention over coded tiles on a real GPU, against the CPU twin; also in a CUDA graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import bitslab
from bitslab.engine.kernels import cuda as kernels_module
from bitslab.engine.kernels.cpu.attend import attend as twin
from bitslab.engine.kernels.cuda import attend, kernels_on
from bitslab.engine.kernels.cuda.attend import AttendKernels
from bitslab.engine.kernels.cuda.prepared_attention import Run
from bitslab.errors import CorruptedDataError
from tests.gpu import waiting_raises
from tests.helpers import dtype_id
from tests.tile_spans import span_of, span_to

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU


def drawn(batch, heads, group, n, dim, tokens, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    keys = normal(batch, heads, tokens, dim) * (torch.rand(dim, generator=generator) + 0.1)
    values = normal(batch, heads, tokens, dim)
    query = normal(batch, heads * group, n, dim)
    return query.to(dtype), (keys + normal(dim)).to(dtype), values.to(dtype)


def relative_error(found, expected):
    return float((found.cpu().double() - expected.double()).norm() / expected.double().norm())


def attend_on_gpu(query, spans, raw, **options):
    options = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    found = kernels_on(torch.device("cuda")).attend(
        query.cuda(),
        [span_to(span, "cuda") for span in spans],
        [(at, k.cuda(), v.cuda()) for at, k, v in raw],
        **options,
    )
    bitslab.raise_pending_errors()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize(
    ("batch", "heads", "group", "n", "dim", "tokens"),
    [
        (1, 2, 1, 1, 64, 64),
        (3, 2, 4, 1, 128, 1000),
        (2, 3, 2, 3, 80, 500),
        (1, 2, 8, 1, 96, 2049),
        (1, 1, 4, 9, 256, 640),
        (2, 1, 16, 1, 128, 130),
        (64, 8, 1, 1, 64, 192),
    ],
    ids=str,
)
def test_attention_is_that_of_the_twin(dtype, batch, heads, group, n, dim, tokens):
    query, keys, values = drawn(batch, heads, group, n, dim, tokens + 140, dtype)
    query[0, 0] *= 20
    keys[0, 0, 50, 3], values[0, 0, 60, 5] = 500.0, -700.0  # exceptions
    span = span_of(keys[:, :, 4 : 4 + tokens], values[:, :, 4 : 4 + tokens], first_token=4)
    end = 4 + tokens
    raw = [(0, keys[:, :, :4], values[:, :, :4]), (end, keys[:, :, end:], values[:, :, end:])]
    first_valid = torch.arange(batch, dtype=torch.int32) * 3
    sinks = torch.linspace(-2, 2, heads * group)
    cases: list[dict[str, Any]] = [
        {"scaling": dim**-0.5},
        {"scaling": 0.3, "softcap": 9.0, "sinks": sinks, "first_valid": first_valid},
    ]
    for options in cases:
        options["length"] = tokens + 140
        found = attend_on_gpu(query, [span], raw, **options)
        expected = twin(query, [span], raw, computed_in=torch.float64, **options)
        # Decoded values of short dtypes are rounded by the twin alone.
        assert relative_error(found, expected) < (1e-4 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize(
    ("batch", "heads", "group", "n", "dim", "tokens"),
    [
        (1, 2, 1, 1, 64, 64),
        (3, 2, 4, 1, 128, 1000),
        (2, 3, 2, 3, 80, 500),
        (1, 2, 8, 1, 96, 2049),
        (1, 1, 4, 9, 256, 640),
        (2, 1, 16, 1, 128, 130),
        (1, 8, 4, 1, 128, 8200),  # V of which other warps decode
        (64, 8, 1, 1, 64, 192),
    ],
    ids=str,
)
def test_lossless_tiles_are_read_as_the_tokens_that_came(
    dtype, batch, heads, group, n, dim, tokens, monkeypatch
):
    query, keys, values = drawn(batch, heads, group, n, dim, tokens + 140, dtype)
    query[0, 0] *= 20
    keys[0, 0, 50, 3], values[0, 0, 60, 5] = 500.0, -700.0
    keys[0, 0, 51, 7], values[0, 0, 61, 2] = 1e-7, -0.0  # an exception, or none
    end = 4 + tokens
    span = span_of(keys[:, :, 4:end], values[:, :, 4:end], first_token=4, lossless=True)
    raw = [(0, keys[:, :, :4], values[:, :, :4]), (end, keys[:, :, end:], values[:, :, end:])]
    sinks = torch.linspace(-2, 2, heads * group)
    first_valid = torch.arange(batch, dtype=torch.int32) * 3
    came = [(0, keys.float(), values.float())]
    cases: list[dict[str, Any]] = [
        {"scaling": dim**-0.5},
        {"scaling": 0.3, "softcap": 9.0, "sinks": sinks, "first_valid": first_valid},
    ]
    limit = 4e-3 if dtype == torch.bfloat16 else 1e-3
    for options in cases:
        options["length"] = tokens + 140
        expected = twin(query.float(), [], came, computed_in=torch.float64, **options)
        assert relative_error(attend_on_gpu(query, [span], raw, **options), expected) < limit
        monkeypatch.setattr(attend, "STAGES", ())
        kernels = AttendKernels(kernels_module._runner(torch.device("cuda")))
        there: dict[str, Any] = {
            k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in options.items()
        }
        runs = [(at, k.cuda(), v.cuda()) for at, k, v in raw]
        plain = kernels.attend(query.cuda(), [span_to(span, "cuda")], runs, **there)
        bitslab.raise_pending_errors()
        assert relative_error(plain, expected) < limit
        monkeypatch.undo()


@pytest.mark.parametrize("tile_tokens", [16, 32, 48, 96, 128, 192, 256])
def test_tiles_of_other_sizes(tile_tokens):
    query, keys, values = drawn(2, 2, 2, 1, 64, 700, torch.float32)
    span = span_of(keys, values, tile_tokens=tile_tokens)
    found = attend_on_gpu(query, [span], [], length=700, scaling=0.125)
    expected = twin(query, [span], [], length=700, scaling=0.125)
    assert relative_error(found, expected) < 1e-4


def test_a_long_context_loses_no_accuracy_and_a_budget_changes_nothing_else():
    query, keys, values = drawn(1, 2, 4, 1, 128, 20_000, torch.float32)
    span = span_of(keys, values)
    expected = twin(query, [span], [], length=20_000, scaling=0.01)
    for budget in (None, 1, 7):
        found = attend_on_gpu(query, [span], [], length=20_000, scaling=0.01, sm_budget=budget)
        assert relative_error(found, expected) < 2e-4


def test_it_runs_in_a_graph_and_never_waits():
    query, keys, values = drawn(2, 2, 4, 1, 128, 400, torch.bfloat16)
    span = span_to(span_of(keys[:, :, :320], values[:, :, :320]), "cuda")
    raw = [(320, keys[:, :, 320:].cuda(), values[:, :, 320:].cuda())]
    given = query.cuda()
    on_gpu = kernels_on(torch.device("cuda")).attend
    options: dict[str, Any] = {"length": 400, "scaling": 0.09}
    first = on_gpu(given, [span], raw, **options)
    # With tables that are not known yet, as those behind a prompt are not.
    other = span_to(span_of(2 * keys[:, :, :320], values[:, :, :320]), "cuda")
    with waiting_raises():
        again = on_gpu(given, [span], raw, **options)
        on_gpu(given, [other], raw, **options)
    assert torch.equal(first, again)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = on_gpu(given, [span], raw, **options)
    graph.replay()
    assert torch.equal(out, first)
    given.copy_(torch.randn_like(given))
    graph.replay()
    assert torch.equal(out, on_gpu(given, [span], raw, **options))
    assert not torch.equal(out, first)


@pytest.mark.parametrize("lossless", [False, True])
@pytest.mark.parametrize("part", ["k", "v"])
def test_damaged_tiles_are_reported(part, lossless):
    query, keys, values = drawn(1, 2, 1, 1, 64, 256, torch.bfloat16)
    span = span_of(keys, values, lossless=lossless)
    table = getattr(span, part)
    generator = torch.Generator().manual_seed(1)
    reported = 0
    for trial in range(40):
        words = table.words.clone()
        at = int(torch.randint(words.numel() - 4, (), generator=generator))
        if lossless and trial % 4:  # not in a plane, which may hold anything
            at = int(table.lengths[: trial % 8].sum()) + trial % 3
        words[at] = int(torch.randint(-(1 << 31), 1 << 31, (), generator=generator))
        damaged = replace(span, **{part: replace(table, words=words)})
        try:
            twin(query, [damaged], [], length=256, scaling=0.1)
        except CorruptedDataError:
            reported += 1
            with pytest.raises(CorruptedDataError, match=r"row \d+ of an earlier decode"):
                attend_on_gpu(query, [damaged], [], length=256, scaling=0.1)
        else:
            attend_on_gpu(query, [damaged], [], length=256, scaling=0.1)
    assert reported > (12 if lossless else 20)


@pytest.mark.parametrize("group", [1, 4, 8, 16])
@pytest.mark.parametrize("tokens", [2048, 8200, 20_000])
def test_contexts_that_warps_serve_in_pairs_and_longer_ones(tokens, group, monkeypatch):
    """Of eight heads: those of which V is decoded by other warps, and behind a window."""
    query, keys, values = drawn(1, 8, group, 1, 128, tokens, torch.bfloat16)
    keys[0, :, 50, 3], values[0, :, 60, 5] = 500.0, -700.0  # exceptions
    end = tokens - 150
    span = span_of(keys[:, :, 4:end], values[:, :, 4:end], first_token=4)
    raw = [(0, keys[:, :, :4], values[:, :, :4]), (end, keys[:, :, end:], values[:, :, end:])]
    options: dict[str, Any] = {"length": tokens, "scaling": 0.09}
    expected = twin(query, [span], raw, computed_in=torch.float64, **options)
    found = attend_on_gpu(query, [span], raw, **options)
    assert relative_error(found, expected) < 6e-3
    monkeypatch.setattr(attend, "STAGES", ())
    alone = AttendKernels(kernels_module._runner(torch.device("cuda")))
    plain = alone.attend(
        query.cuda(),
        [span_to(span, "cuda")],
        [(at, k.cuda(), v.cuda()) for at, k, v in raw],
        **options,
    )
    bitslab.raise_pending_errors()
    assert relative_error(plain, expected) < 6e-3
    assert relative_error(found, plain.cpu()) < 4e-3  # both rounded to bfloat16


def test_prepared_calls_on_two_streams_and_again_and_again():
    query, keys, values = drawn(2, 8, 4, 1, 128, 1500, torch.bfloat16)
    span = span_to(span_of(keys[:, :, :1408], values[:, :, :1408]), "cuda")
    raw = [(1408, keys[:, :, 1408:].cuda(), values[:, :, 1408:].cuda())]
    runs = [Run.of(*each)[0] for each in raw]
    prepare = kernels_on(torch.device("cuda")).prepare_attention
    queries = [query.cuda(), (2 * query).cuda()]
    options: dict[str, Any] = {"length": 1500, "scaling": 0.09}
    prepared = [prepare(q, [span], raw, **options) for q in queries]
    first = [each(q, runs, 1500) for each, q in zip(prepared, queries, strict=True)]
    torch.cuda.synchronize()
    assert not torch.equal(*first)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(200):
        found = []
        for each, q, stream in zip(prepared, queries, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(each(q, runs, 1500))
        torch.cuda.synchronize()
        assert torch.equal(found[0], first[0]) and torch.equal(found[1], first[1])
    assert not any(each.arrived.any() for each in prepared)
