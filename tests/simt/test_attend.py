"""Attention over coded tiles: the kernels against the twin, which computes in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bitslab.engine.codecs.huffman import code_lengths
from bitslab.engine.codecs.quantized.plan import TilePlan, symbols_of
from bitslab.engine.kernels import attend_tables
from bitslab.engine.kernels.cpu.attend import attend as twin
from bitslab.engine.kernels.cuda import attend
from bitslab.engine.kernels.cuda.attend import AttendKernels
from bitslab.engine.kernels.cuda.prepared_attention import _NO_RUN, Run
from bitslab.engine.kernels.cuda.runner import DAMAGED_ERROR, INDEX_ERROR
from bitslab.engine.kernels.cuda.source import source_text
from bitslab.engine.kernels.spans import OWN_RUN, OwnTokens
from bitslab.engine.kernels.tile_format import (
    LEVEL_ZERO,
    MAX_SYMBOLS,
    SHORT_BITS,
    Granularity,
    TileFormat,
)
from bitslab.errors import ArgumentError, CorruptedDataError
from tests.helpers import dtype_id
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner
from tests.tile_spans import span_of, stored, tiles_of


def drawn(batch, heads, group, n, dim, tokens, seed=0):
    """Return queries, keys and values of channels that are spread differently."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    spread = torch.rand(dim, generator=generator) * 3 + 0.1
    keys = normal(batch, heads, tokens, dim) * spread + normal(dim)
    values = normal(batch, heads, tokens, dim) * (torch.rand(dim, generator=generator) + 0.3)
    return normal(batch, heads * group, n, dim), keys, values


def guarded_span(span):
    """Return a span whose words touch memory that nobody may read."""
    k, v = (replace(t, words=guarded_words(t.words)) for t in (span.k, span.v))
    return replace(span, k=k, v=v)


def guarded_words(words):
    """Return words that begin on 16 bytes, as kernels ask for."""
    return guarded(torch.nn.functional.pad(words, (0, -words.numel() % 4)))


by_shape = pytest.mark.parametrize(
    ("batch", "heads", "group", "n", "dim", "tokens"),
    [
        (1, 1, 1, 1, 64, 128),
        (2, 2, 3, 1, 80, 64),
        (1, 2, 2, 3, 96, 130),
        (1, 1, 8, 1, 128, 70),
        (1, 1, 3, 5, 32, 64),
        (1, 1, 16, 1, 256, 16),
        (1, 1, 5, 7, 16, 100),  # three launches of queries
    ],
    ids=str,
)


@pytest.fixture(params=["staged", "plain"])
def way(request, monkeypatch):
    """Serve short contexts by warps in pairs, of which one decodes V, or as longer ones."""
    if request.param == "plain":
        monkeypatch.setattr(attend, "STAGES", ())


def relative_error(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def both(query, spans, raw=(), seed=0, **options):
    """Return what the kernels return and what the twin does, in float64."""
    runner = SimtRunner(seed)
    spans = [guarded_span(span) for span in spans]
    found = AttendKernels(runner).attend(query, spans, raw, **options)
    assert not runner.mailbox.any()
    expected = twin(
        query.double().to(query.dtype), spans, raw, computed_in=torch.float64, **options
    )
    assert found.shape == expected.shape and found.dtype == query.dtype
    return found, expected


@pytest.mark.drawn(4)
@pytest.mark.usefixtures("way")
@by_shape
def test_attention_is_that_of_the_twin(batch, heads, group, n, dim, tokens):
    first, last = 5, 37
    query, keys, values = drawn(batch, heads, group, n, dim, first + tokens + last)
    end = first + tokens
    span = span_of(keys[:, :, first:end], values[:, :, first:end], first_token=first)
    raw = [
        (0, keys[:, :, :first], values[:, :, :first]),
        (end, keys[:, :, end:], values[:, :, end:]),
    ]
    found, expected = both(query, [span], raw, length=end + last, scaling=0.5 * dim**-0.5)
    assert relative_error(found, expected) < 2e-6


@pytest.mark.drawn(2)
@pytest.mark.pairwise(dtype=lambda dtype: ())
@pytest.mark.parametrize(("group", "n"), [(4, 1), (5, 1), (8, 1), (2, 4), (11, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_short_dtypes_lose_their_last_rounding_alone(dtype, group, n):
    query, keys, values = (x.to(dtype) for x in drawn(1, 1, group, n, 64, 150))
    keys[0, 0, 9, 3], values[0, 0, 70, 5] = 3e4, -3e4  # exceptions
    options: dict[str, Any] = {"length": 150, "scaling": 0.05}
    runner = SimtRunner(1)
    raw = [(130, keys[:, :, 130:], values[:, :, 130:])]
    span = span_of(keys[:, :, :130], values[:, :, :130])
    found = AttendKernels(runner).attend(query, [guarded_span(span)], raw, **options)
    assert found.dtype == dtype and not runner.mailbox.any()
    wide = span_of(keys[:, :, :130].float(), values[:, :, :130].float())
    wide_raw = [(at, k.float(), v.float()) for at, k, v in raw]
    expected = twin(query.float(), [wide], wide_raw, computed_in=torch.float64, **options)
    # More than four rows stand in one half each, which is what float16 is rounded to at the end.
    assert relative_error(found, expected) < (2e-3 if dtype == torch.bfloat16 else 6e-4)


@pytest.mark.drawn(2)
@pytest.mark.pairwise(coder=lambda coder: ())
@pytest.mark.parametrize("tile_tokens", [16, 32, 128])
@pytest.mark.parametrize("coder", ["huffman", "fixed"])
def test_tiles_of_other_sizes_and_coders(tile_tokens, coder):
    query, keys, values = drawn(1, 2, 1, 1, 32, 140)
    span = span_of(keys, values, tile_tokens=tile_tokens, coder=coder, code_bits=8)
    found, expected = both(query, [span], length=140, scaling=0.1, seed=2)
    assert relative_error(found, expected) < 2e-6


def test_scores_are_capped_and_sinks_take_weight():
    query, keys, values = drawn(2, 2, 2, 2, 32, 90)
    span = span_of(keys[:, :, :64], values[:, :, :64])
    raw = [(64, keys[:, :, 64:], values[:, :, 64:])]
    sinks = torch.tensor([0.5, -3.0, 4.0, 40.0])
    options: dict[str, Any] = {"length": 90, "scaling": 1.5, "softcap": 7.0}
    plain, _ = both(query, [span], raw, **options)
    found, expected = both(query, [span], raw, sinks=sinks, **options)
    assert relative_error(found, expected) < 1e-5
    assert relative_error(found, plain) > 0.1


def test_padding_is_not_seen_whatever_it_holds():
    query, keys, values = drawn(3, 1, 2, 2, 32, 160)
    keys[:, :, :40], values[:, :, :40] = torch.nan, torch.inf
    span = span_of(keys[:, :, 20:148], values[:, :, 20:148], first_token=20)
    raw = [
        (0, keys[:, :, :20], values[:, :, :20]),
        (148, keys[:, :, 148:], values[:, :, 148:]),
    ]
    first_valid = torch.tensor([40, 100, 155], dtype=torch.int32)
    found, expected = both(query, [span], raw, length=160, scaling=0.2, first_valid=first_valid)
    assert relative_error(found, expected) < 2e-6


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("counted", [4, 20])
def test_own_tokens_count_in_the_place_of_those_at_their_positions(counted):
    query, keys, values = drawn(4, 2, 2, 2, 32, 170)
    begins, end = [0, 3, 40, 150], 148  # of the last one only the window has tokens
    own_keys, own_values = (torch.zeros(4, 2, counted, 32) for _ in range(2))
    plain_keys, plain_values = keys.clone(), values.clone()
    for b, begin in enumerate(begins):
        there = slice(begin, min(begin + counted, end))
        n = max(0, there.stop - begin)
        own_keys[b, :, :n], own_values[b, :, :n] = keys[b, :, there], values[b, :, there]
        own_keys[b, :, n:], own_values[b, :, n:] = torch.nan, torch.inf
        # What stands there else is not read: neither coded nor as it is.
        plain_keys[b, :, there], plain_values[b, :, there] = 9.0, -9.0
    span = span_of(plain_keys[:, :, 4:148], plain_values[:, :, 4:148], first_token=4)
    raw = [
        (0, plain_keys[:, :, :4], plain_values[:, :, :4]),
        (end, plain_keys[:, :, end:], plain_values[:, :, end:]),
    ]
    positions = torch.tensor(begins, dtype=torch.int32)
    own = OwnTokens(positions, own_keys, own_values, end)
    options: dict[str, Any] = {"length": 170, "scaling": 0.2}
    for first_valid in (None, positions, positions + 1):
        options["first_valid"] = first_valid
        found, expected = both(query, [span], raw, own=own, **options)
        assert relative_error(found, expected) < 2e-6
        # Of tokens that are not coded: what attention to all of them as they came gives.
        parts = [(0, plain_keys, plain_values)]
        found, _ = both(query, [], parts, own=own, **options)
        expected = twin(query, [], [(0, keys, values)], computed_in=torch.float64, **options)
        assert relative_error(found, expected) < 2e-6


def test_rows_that_see_nothing_are_zeros():
    query, keys, values = drawn(2, 1, 1, 1, 16, 32)
    span = span_of(keys, values, tile_tokens=16)
    first_valid = torch.tensor([32, 0], dtype=torch.int32)
    found, expected = both(query, [span], length=32, scaling=1.0, first_valid=first_valid)
    assert not found[0].any() and not expected[0].any()
    assert relative_error(found, expected) < 2e-6


def test_large_and_small_scores_keep_their_digits():
    query, keys, values = drawn(1, 1, 4, 1, 64, 128)
    query[:, 0] *= 40
    query[:, 1] *= 1e-6
    query[:, 2] = 0
    values[:, :, 70:] *= 1e-3  # steps of other levels
    span = span_of(keys, values)
    found, expected = both(query, [span], length=128, scaling=0.125)
    for head in range(4):
        assert relative_error(found[:, :, head], expected[:, :, head]) < 2e-5


@pytest.mark.usefixtures("way")
def test_exceptions_count_with_all_their_bits():
    query, keys, values = drawn(1, 2, 2, 1, 48, 128)
    span = span_of(keys, values)  # that knows of no outliers
    generator = torch.Generator().manual_seed(5)
    for x, tables in ((keys, span.k_tables), (values, span.v_tables)):
        at = torch.rand(x.shape, generator=generator) < 0.01
        x[at] = x[at] * 300 + 77.7
        table = stored(tiles_of(x, 64), tables)
        assert ((table.words[:1] >> 16) > 3).all()
        changed: dict[str, Any] = {"k" if x is keys else "v": table}
        span = replace(span, **changed)
    found, expected = both(query, [span], length=128, scaling=0.002)
    assert relative_error(found, expected) < 2e-6


def test_what_is_no_number_remains_none():
    query, keys, values = drawn(1, 1, 1, 1, 16, 64)
    values[0, 0, 5, 3], values[0, 0, 6, 4], values[0, 0, 60, 4] = torch.nan, torch.inf, -torch.inf
    span = span_of(keys, values)
    found, expected = both(query, [span], length=64, scaling=0.1)
    assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().sum() == 2
    good = ~expected.isnan()
    assert relative_error(found[good], expected[good]) < 2e-6


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("which", ["k", "v", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_tiles_that_are_kept_raw_are_read_as_they_are(which, dtype):
    query, keys, values = (x.to(dtype) for x in drawn(1, 1, 2, 1, 32, 192))
    for x in (keys,) * (which != "v") + (values,) * (which != "k"):
        noise = torch.randint(0, 1 << 15, x[:, :, 64:128].shape).to(torch.float32)
        x[:, :, 64:128] = (noise * 1e-3 - 16).to(dtype)
    span = span_of(keys[:, :, :64], values[:, :, :64], k_scale=0.05, v_scale=0.05)
    k, v = stored(tiles_of(keys, 64), span.k_tables), stored(tiles_of(values, 64), span.v_tables)
    if which != "v":
        assert k.lengths is not None and k.lengths[1] == 0
    ids = torch.arange(3, dtype=torch.int32)
    span = replace(span, k=k, v=v, k_ids=ids, v_ids=ids, tokens=180)
    found, expected = both(query, [span], length=180, scaling=0.02)
    assert relative_error(found, expected) < (2e-6 if dtype == torch.float32 else 4e-3)


def lengths_of(radius, reach, bits):
    """Return lengths of codes, of some bits at the most: of singles or pairs up to `reach`."""
    near = np.abs(np.arange(-radius, radius + 1) if radius else np.arange(-128, 128)) <= reach
    coded = np.flatnonzero(np.outer(near, near) if radius else near)
    counts = np.zeros(symbols_of(radius), np.int64)
    counts[coded] = 1 + (1 << 20 >> (np.arange(len(coded)) % 20))
    lengths = np.zeros(MAX_SYMBOLS, np.uint8)
    lengths[: len(counts)] = code_lengths(counts, bits)
    assert lengths.max() == bits
    return lengths


@pytest.mark.usefixtures("way")
def test_classes_of_any_radius_and_bits_are_decoded():
    kinds = [(15, 15, 10), (11, 7, 8), (8, 8, 9), (1, 1, 4), (0, 127, 8), (0, 99, 10), (2, 2, 8)]
    generator = torch.Generator().manual_seed(0)
    span = span_of(*torch.randn(2, 1, 1, 128, 176, generator=generator))
    for name, chosen in (("k", kinds[1:]), ("v", kinds[::-1])):
        by_head = int(name == "k")
        # Each class once in an order of its own, then some between others.
        block_class = [*range(len(chosen)), 2, 0, 3, 1, 4][:11]
        order = torch.randperm(176, generator=generator)
        reach = torch.tensor([min(chosen[c][1], 15) for c in block_class]).repeat_interleave(16)
        # Steps are 1 or near it, and some codes too large for their class.
        x = torch.randn(1, 1, 128, 176, generator=generator)
        x[..., order] *= reach / 2.5
        plan = TilePlan(
            format=TileFormat(
                64,
                176,
                torch.float32,
                Granularity.CHANNEL if by_head else Granularity.TOKEN_LEVEL,
                token_pairs=not by_head,
            ),
            heads=1,
            rows_per_head=1,
            scale=float(1 / x.square().mean().sqrt()),
            order=order.numpy().astype(np.uint8)[None],
            block_class=np.array([block_class], np.uint8),
            radius=np.array([radius for radius, _, _ in chosen], np.uint8),
            lengths=np.stack([lengths_of(*kind) for kind in chosen]),
            steps=np.full((by_head, 176 * by_head), 1.0, np.float32),
            centers=np.full((by_head, 176 * by_head), 0.7, np.float32),
        )
        tables = plan.tables()
        table = stored(tiles_of(x, 64), tables)
        assert table.lengths is not None and table.lengths.all()  # none is kept raw
        changed: dict[str, Any] = {name: table, f"{name}_tables": tables}
        span = replace(span, **changed)
    query = torch.randn(1, 1, 1, 176, generator=generator)
    found, expected = both(query, [span], length=128, scaling=0.01)
    assert relative_error(found, expected) < 2e-6


@pytest.mark.usefixtures("way")
def test_several_spans_and_runs_make_one_softmax():
    query, keys, values = drawn(2, 2, 1, 2, 32, 330)
    ends = [0, 3, 99, 163, 200, 290, 330]
    parts = [(a, keys[:, :, a:b], values[:, :, a:b]) for a, b in zip(ends, ends[1:], strict=False)]
    spans = [
        span_of(k, v, first_token=a, k_scale=scale)
        for (a, k, v), scale in zip((parts[1], parts[2], parts[4]), (1.0, 0.4, 2.0), strict=True)
    ]
    raw = [parts[0], parts[3], parts[5], (330, keys[:, :, :0], values[:, :, :0])]
    options: dict[str, Any] = {"length": 330, "scaling": 0.15}
    found, expected = both(query, spans, raw, **options)
    assert relative_error(found, expected) < 2e-6
    alone, of_twin = both(query, [], parts, **options)
    assert relative_error(alone, of_twin) < 2e-6


def test_raw_tokens_of_any_strides_are_read():
    query, keys, values = (x.to(torch.bfloat16) for x in drawn(2, 2, 2, 1, 32, 21))
    expected = twin(query, [], [(0, keys, values)], length=21, scaling=0.2)
    for cut in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.nn.functional.pad(x, (1, 2))[..., 1:-2],
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    ):
        found = AttendKernels(SimtRunner()).attend(
            cut(query), [], [(0, cut(keys), values)], length=21, scaling=0.2
        )
        assert relative_error(found, expected) < 4e-3


def test_an_sm_budget_and_many_heads_change_the_cut_alone():
    query, keys, values = drawn(2, 6, 1, 1, 16, 256)
    span = span_of(keys, values, tile_tokens=16)
    runner = SimtRunner()
    kernels = AttendKernels(runner)
    options: dict[str, Any] = {"length": 256, "scaling": 0.3}
    whole = kernels.attend(query, [span], **options)
    budget = kernels.attend(query, [span], sm_budget=1, **options)
    assert relative_error(budget, whole) < 1e-5
    assert runner.grids[0][0] % 12 == 0


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("part", ["k", "v"])
def test_damaged_tiles_are_reported_and_nothing_outside_is_read(part):
    query, keys, values = drawn(1, 2, 1, 1, 32, 192)
    span = span_of(keys, values)
    table = getattr(span, part)
    generator = np.random.default_rng(0)
    reported = 0
    for trial in range(24):
        words = table.words.clone()
        at = int(generator.integers(words.numel() - 4))
        words[at] = int(generator.integers(-(1 << 31), 1 << 31)) if trial else -1
        damaged = replace(span, **{part: replace(table, words=words)})
        runner = SimtRunner(trial)
        AttendKernels(runner).attend(query, [guarded_span(damaged)], length=192, scaling=0.1)
        kind, row = runner.mailbox.tolist()[:2]
        found = kind == DAMAGED_ERROR
        assert kind in (0, DAMAGED_ERROR) and 0 <= row < 6
        reported += found
        try:
            twin(query, [damaged], length=192, scaling=0.1)
        except CorruptedDataError as error:
            assert found and f"row {row} is damaged" in str(error)
        else:
            assert not found
    assert reported > 12


def test_headers_lengths_and_ids_that_cannot_be_are_reported():
    query, keys, values = drawn(1, 1, 1, 1, 16, 128)
    span = span_of(keys, values)
    for header in (0, -1, 0x7FFF, 0x7FFF0000):
        words = span.k.words.clone()
        words[0] = header
        runner = SimtRunner()
        damaged = guarded_span(replace(span, k=replace(span.k, words=words)))
        AttendKernels(runner).attend(query, [damaged], length=128, scaling=0.1)
        assert runner.mailbox.tolist()[:2] == [DAMAGED_ERROR, 0]
    short = replace(span, k=replace(span.k, words=guarded_words(span.k.words[:-40])))
    runner = SimtRunner()
    AttendKernels(runner).attend(query, [short], length=128, scaling=0.1)
    assert runner.mailbox.tolist()[:2] == [DAMAGED_ERROR, 1]
    for bad in (-1, 2, 1 << 30):
        ids = span.v_ids.clone()
        ids[1] = bad
        runner = SimtRunner()
        AttendKernels(runner).attend(query, [replace(span, v_ids=ids)], length=128, scaling=0.1)
        assert runner.mailbox.tolist() == [INDEX_ERROR, -1, bad, 2]


def test_short_contexts_are_served_by_warps_in_pairs():
    class H200(SimtRunner):
        multiprocessors, shared_bytes_per_multiprocessor = 132, 228 << 10

    query, keys, values = drawn(1, 1, 4, 1, 128, 64)
    span = span_of(keys.bfloat16(), values.bfloat16())
    kernels = AttendKernels(H200())
    prepared = kernels.prepare(query.bfloat16(), [span], length=64, scaling=1.0)
    [cut] = prepared._chunks[0].cuts
    [(variant, shapes)] = [(key[0], each) for key, each in kernels._shapes.items() if key[2]]
    plain, *staged = shapes
    assert plain.stages == 0 and plain.warps * plain.blocks == 32
    assert [shape.stages for shape in staged] == [4, 8, 10]

    def stages_of(launch):
        [shape] = [shape for (_, shape), bound in kernels._launches.items() if bound is launch]
        return shape.stages

    def chosen(pairs, items, sm_budget=None):
        launch, splits = kernels._how(pairs, items, variant, shapes, sm_budget)
        return stages_of(launch), splits

    # 8 heads: 2k, 8k, and 8k with first and last tokens in sixteens; then more than that.
    assert [chosen(8, n) for n in (32, 128, 141)] == [(4, 16), (8, 16), (10, 16)]
    assert chosen(8, 512)[0] == chosen(64, 128)[0] == chosen(200, 2)[0] == 0
    assert chosen(8, 32, sm_budget=64) == (4, 8)
    launch, splits = cut.how(_NO_RUN, _NO_RUN)
    assert stages_of(launch) == 4 and splits == 1


def test_a_prepared_call_leaves_what_it_counts_as_it_was():
    query, keys, values = drawn(2, 2, 3, 2, 32, 300)
    span = span_of(keys[:, :, :256], values[:, :, :256], tile_tokens=16)
    raw = [(256, keys[:, :, 256:], values[:, :, 256:])]
    runner = SimtRunner(5)
    runner.multiprocessors = 16
    kernels = AttendKernels(runner)
    prepared = kernels.prepare(query, [span], raw, length=300, scaling=0.2)
    runs = [Run.of(*each)[0] for each in raw]
    found = [prepared(query, runs, 300) for _ in range(3)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert not prepared.arrived.any()
    assert {kernel for _, kernel in runner.launched} == {"attend_tiles"}
    assert len(runner.launched) == 3 and runner.grids[0][0] > 4  # splits of each head
    expected = twin(query, [span], raw, computed_in=torch.float64, length=300, scaling=0.2)
    assert relative_error(found[0], expected) < 2e-6


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("own", [False, True], ids=["", "own"])
@pytest.mark.parametrize("runs", [1, 2, 3, 4])
def test_tokens_that_are_missing_yet_are_not_seen(runs, own):
    """As replays of one launch see more and more of them: what is not there is not read."""
    query, keys, values = drawn(2, 2, 3, 2, 32, 200)
    span = span_of(keys[:, :, :128], values[:, :, :128])
    cuts = [128, 133, 140, 151, 200][-runs - 1 :]
    cuts[0] = 128
    short_by = torch.zeros(1, dtype=torch.int32)
    runner = SimtRunner(2)
    kernels = AttendKernels(runner)
    first_valid = torch.tensor([0, 130], dtype=torch.int32)
    options: dict[str, Any] = {"scaling": 0.2, "first_valid": first_valid}
    if own:
        _, own_keys, own_values = drawn(2, 2, 3, 2, 32, 5, seed=1)
        options["own"] = OwnTokens(first_valid, own_keys, own_values, 134)
    grids = set()
    for missing in (48, 40, 17, 16, 0, -3):
        there = 200 - max(0, missing)
        held = [t.clone() for t in (keys, values)]
        for t in held:
            t[:, :, there:] = torch.nan
        raw = [(a, *(t[:, :, a:b] for t in held)) for a, b in zip(cuts, cuts[1:], strict=False)]
        short_by.fill_(missing)
        runner.grids.clear()
        found = kernels.attend(query, [span], raw, length=200, short_by=short_by, **options)
        grids.add(tuple(runner.grids))
        of_twin = twin(query, [span], raw, length=200, short_by=short_by, **options)
        whole = [(128, keys[:, :, 128:there], values[:, :, 128:there])]
        expected = twin(query, [span], whole, computed_in=torch.float64, length=there, **options)
        assert relative_error(found, expected) < 2e-6
        assert relative_error(of_twin, expected) < 2e-6
    assert len(grids) == 1  # of all replays


def test_constants_are_those_of_the_format():
    text = source_text("attend")
    assert f"#define LEVEL_ZERO {LEVEL_ZERO} " in text
    assert f"#define SHORT_BITS {SHORT_BITS} " in text
    assert f"#define OWN_RUN {OWN_RUN} " in text
    for name in ("SHORT_PAIRS", "LONG_PAIRS", "SHORT_SINGLES", "LONG_SINGLES", "WIDE_PAIRS"):
        assert f"{name} = {getattr(attend_tables, name)}" in text


def own_zeros(batch, heads):
    """Return own tokens of zeros, of another batch or other heads."""
    keys, values = torch.zeros(2, 1, heads, 4, 32)
    return OwnTokens(torch.zeros(batch, dtype=torch.int32), keys, values, 9)


REFUSED: dict[str, dict[str, Any]] = {
    "query: 5 heads, accepted are 1 to 16 for each of 2": {"query": torch.zeros(1, 5, 1, 32)},
    "query: 34 heads": {"query": torch.zeros(1, 34, 1, 32)},
    r"query: \[1, 2, 32\], accepted is": {"query": torch.zeros(1, 2, 32)},
    "k: torch.float32 of dim 32, the query is torch.float16 of dim 32": {
        "query": torch.zeros(1, 2, 1, 32, dtype=torch.float16)
    },
    "length: 1 tokens, 3 of which": {"query": torch.zeros(1, 2, 3, 32), "length": 1},
    r"sinks: \[3\], accepted are \[2\]": {"sinks": torch.zeros(3)},
    "first_valid: torch.int64": {"first_valid": torch.zeros(1, dtype=torch.int64)},
    r"raw: values at 3: torch.float32 \[1, 2, 4, 32\]": {
        "raw": [(3, torch.zeros(1, 2, 5, 32), torch.zeros(1, 2, 4, 32))]
    },
    "own: positions: torch.int32 .2., accepted are torch.int32 .1.": {
        "own": own_zeros(batch=2, heads=2)
    },
    r"raw: keys at -1: torch.float32 \[1, 3, 4, 32\]": {"own": own_zeros(batch=1, heads=3)},
    "both are empty": {"spans": []},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_together_is_refused(message):
    query, keys, values = drawn(1, 2, 1, 1, 32, 64)
    options: dict[str, Any] = {
        "query": query,
        "spans": [span_of(keys, values)],
        "length": 64,
        "scaling": 1.0,
    }
    options |= {"query": query, **REFUSED[message]}
    for serve in (AttendKernels(SimtRunner()).attend, twin):
        with pytest.raises(ArgumentError, match=message):
            serve(**options)


def test_spans_that_are_of_no_use_are_refused():
    query, keys, values = drawn(1, 2, 1, 1, 32, 64)
    span = span_of(keys, values)
    refused: dict[str, dict[str, Any]] = {
        "k: TOKEN_LEVEL, token_pairs=True": {"k_tables": span.v_tables},
        "v: CHANNEL, token_pairs=False": {"v_tables": span.k_tables},
        "k: a table in place": {"k": replace(span.k, lengths=None)},
        "v_ids: torch.int64, 2 of them": {"v_ids": span.v_ids.long()},
        "v_ids: torch.int32, 1 of them": {"v_ids": span.v_ids[:1]},
        "k: tables of 5 heads": {"k_tables": replace(span.k_tables, heads=5)},
    }
    for message, wrong in refused.items():
        with pytest.raises(ArgumentError, match=message):
            AttendKernels(SimtRunner()).attend(
                query, [replace(span, **wrong)], length=64, scaling=1.0
            )
