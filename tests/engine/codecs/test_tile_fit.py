"""Plans of tiles: what a fit chooses and expects, and scales fitted to an error of attention."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bitslab.engine.codecs.huffman import check_lengths
from bitslab.engine.codecs.quantized import (
    NO_CODE,
    TileFit,
    TilePlan,
    dequantise,
    fit,
    fit_error,
    fit_tiles,
    measured_fit,
    prompt_attention,
    quantise,
    query_weights,
    steps_and_centers,
)
from bitslab.engine.kernels.cpu.tiles import decode_tiles, encode_tiles, measure_tiles
from bitslab.engine.kernels.tile_format import MAX_CLASSES, MAX_CODE, ZERO_SYMBOL, Granularity
from bitslab.errors import ArgumentError
from tests.gpu import counted_waits

#: Of each granularity whether tokens are paired, and a middle scale.
SETTINGS = {
    Granularity.CHANNEL: (False, 0.5),
    Granularity.TOKEN_LEVEL: (True, 0.7),
    Granularity.BLOCK_RANGE: (False, 0.05),
    Granularity.CHANNEL_RANGE: (False, 0.15),
    Granularity.TOKEN_RANGE: (True, 0.1),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TILE = 32


def sample(
    batch: int = 1,
    heads: int = 2,
    tokens: int = 256,
    dim: int = 48,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> torch.Tensor:
    """Return values whose channels have means and spreads of their own."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(torch.randn(heads, 1, dim, generator=generator))
    mean = 3 * torch.randn(heads, 1, dim, generator=generator)
    return (mean + spread * torch.randn(batch, heads, tokens, dim, generator=generator)).to(dtype)


def fitted(values: torch.Tensor, granularity: Granularity, **options: Any) -> TilePlan:
    pairs, scale = SETTINGS[granularity]
    given = {"tile_tokens": TILE, "token_pairs": pairs, "scale": scale, **options}
    return fit_tiles(values, granularity=granularity, **given)


def coded(values: torch.Tensor, plan: TilePlan) -> tuple[torch.Tensor, int]:
    """Return what kernels decode to, and the words of all coded tiles."""
    tables, fmt = plan.tables(), plan.format
    batch, heads, tokens, dim = values.shape
    shape = batch, heads, tokens // fmt.tokens, fmt.tokens * dim
    rows = values.reshape(shape).transpose(1, 2).contiguous().flatten(0, 2).view(torch.uint8)
    lengths = measure_tiles(rows, tables)
    long = lengths.long() & 0xFFFF
    words_of = torch.where(long == 0, fmt.row_bytes // 4, long)
    at = torch.cat((torch.zeros(1, dtype=torch.int64), words_of.cumsum(0)))
    bases = torch.cat((at[:-1][::32], at[-1:]))
    words = encode_tiles(rows, tables, lengths, bases, int(at[-1]))
    out = torch.empty_like(rows)
    assert decode_tiles(words, at[:-1], long, torch.arange(len(long)), tables, out) == -1
    decoded = out.view(values.dtype).view(batch, shape[2], heads, shape[3]).transpose(1, 2)
    return decoded.reshape(values.shape), int(words_of.sum())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", SETTINGS, ids=lambda g: g.name)
def test_kernels_deliver_what_quantise_says(granularity: Granularity, dtype: torch.dtype) -> None:
    values = sample(batch=2, dtype=dtype)
    plan = fitted(values, granularity)
    tables = plan.tables()
    codes = quantise(values, tables)
    decoded = dequantise(codes, *steps_and_centers(values, tables), dtype)
    found, _ = coded(values, plan)
    exact = found == values
    assert torch.equal(found[~exact], decoded[~exact])
    other = (found != decoded).float().mean()  # exceptions
    assert other < 2e-3
    assert codes.abs().amax() <= NO_CODE


@pytest.mark.parametrize("coder", ["huffman", "fixed"])
@pytest.mark.parametrize("granularity", SETTINGS, ids=lambda g: g.name)
def test_bits_are_as_expected(granularity: Granularity, coder: str) -> None:
    values = sample(tokens=1024, dim=64)
    pairs, scale = SETTINGS[granularity]
    fit = measured_fit(
        values,
        tile_tokens=64,
        granularity=granularity,
        token_pairs=pairs,
        scale=scale,
        coder=coder,
    )
    _, words = coded(values, fit.plan)
    places = 18 * values.numel() // fit.plan.format.values
    assert fit.bits_per_value == pytest.approx((32 * words + places) / values.numel(), rel=0.02)


@pytest.mark.parametrize("coder", ["huffman", "fixed"])
@pytest.mark.parametrize("granularity", SETTINGS, ids=lambda g: g.name)
def test_plans_are_whole(granularity: Granularity, coder: str) -> None:
    plan = fitted(sample(heads=6, dim=80), granularity, coder=coder, code_bits=9)
    assert (np.sort(plan.order, axis=1) == np.arange(80)).all()
    assert plan.block_class.shape == (6, 5)
    classes = len(plan.radius)
    assert classes <= MAX_CLASSES
    assert set(plan.block_class.ravel().tolist()) == set(range(classes))
    for radius, lengths in zip(plan.radius.tolist(), plan.lengths, strict=True):
        check_lengths(lengths, 9)
        zeros = 2 * radius * (radius + 1) if radius else ZERO_SYMBOL
        assert lengths[zeros]
        assert not lengths[(2 * radius + 1) ** 2 if radius else 2 * ZERO_SYMBOL :].any()
        if coder == "fixed":
            assert len(set(lengths[lengths > 0].tolist())) == 1
    again = fitted(sample(heads=6, dim=80), granularity, coder=coder, code_bits=9)
    for name, value in vars(plan).items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(value, getattr(again, name)), name


def test_tables_are_the_same_wherever_they_lie() -> None:
    for granularity in SETTINGS:
        tables = fitted(sample(), granularity).tables()
        moved = tables.to(torch.device("cpu"))
        assert moved.longest_codes == tables.longest_codes == tuple(tables.class_bits.tolist())
        assert (moved.format, moved.heads, moved.scale) == (
            tables.format,
            tables.heads,
            tables.scale,
        )
        for one, other in zip(moved.tensors, tables.tensors, strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype
            assert one.is_contiguous() and not one.storage_offset() % 4


def test_classes_of_few_values_are_coded_in_pairs() -> None:
    values = torch.randn(1, 1, 2048, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[..., :16] *= 20
    plan = fitted(values, Granularity.CHANNEL, weights=torch.ones(1, 32), scale=2.0)
    # The wide block comes first, and is coded one by one.
    assert sorted(plan.order[0, :16].tolist()) == list(range(16))
    wide, narrow = plan.radius[plan.block_class[0]]
    assert wide == 0
    assert 1 <= narrow <= 3
    alone = values[..., 16:].repeat(1, 1, 1, 2)
    plan = fitted(alone, Granularity.CHANNEL, scale=3.0, tile_tokens=256)
    assert 32 * coded(alone, plan)[1] < 0.9 * alone.numel()  # a code takes a bit or more by itself


def test_codes_are_short_and_in_pairs_where_that_costs_little() -> None:
    values = torch.randn(1, 1, 2048, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[..., :16] *= 6
    values[..., 16:32] *= 2.2

    def fit(**options: Any) -> TileFit:
        options = {"weights": torch.ones(1, 64), "scale": 1.5, "code_bits": 10, **options}
        options = {"granularity": Granularity.CHANNEL, "token_pairs": False, **options}
        return measured_fit(values, tile_tokens=TILE, **options)

    plan = fit().plan
    radius, longest = (x[plan.block_class[0]] for x in (plan.radius, plan.lengths.max(axis=1)))
    assert radius[0] == 0 and (radius[1:] > 0).all()  # too wide for pairs
    assert longest[0] == 8  # a limit of 8 is enough for single codes
    assert longest[1] > 8  # not for pairs of codes as wide as these
    assert (longest[2:] <= 8).all()
    short = fit(code_bits=8)
    assert (short.plan.lengths.max(axis=1) <= 8).all()
    assert fit().bits_per_value <= short.bits_per_value


def test_fixed_fields_are_as_narrow_as_their_codes() -> None:
    values = torch.randn(1, 1, 1024, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[..., :16] *= 16
    plan = fitted(values, Granularity.CHANNEL, weights=torch.ones(1, 32), coder="fixed")
    widths = plan.lengths.max(axis=1)[plan.block_class[0]]
    assert widths.tolist() == [8, 4]


def test_steps_are_inverse_to_weights() -> None:
    values = sample(dim=32)
    weights = torch.linspace(0.5, 4, 64).view(2, 32)
    weights[0, 3] = 0
    plan = fitted(values, Granularity.CHANNEL, weights=weights, scale=1.5)
    order = torch.from_numpy(plan.order.astype(np.int64))
    steps = torch.empty(2, 32).scatter_(1, order, torch.from_numpy(plan.steps))
    least = 0.02 * weights.square().mean(dim=1, keepdim=True).sqrt()
    torch.testing.assert_close(steps, 1.5 / torch.maximum(weights, least))
    centers = torch.empty(2, 32).scatter_(1, order, torch.from_numpy(plan.centers))
    torch.testing.assert_close(centers, values.float().mean(dim=(0, 2)), atol=1e-5, rtol=1e-5)


def test_query_weights_are_rms_over_heads_that_share_keys() -> None:
    queries = torch.randn(2, 6, 5, 16)
    weights = query_weights(queries, 2)
    expected = queries[:, 3:].square().mean(dim=(0, 1, 2)).sqrt()
    torch.testing.assert_close(weights[1], expected)
    torch.testing.assert_close(query_weights(queries, 2, scaling=0.5)[1], 2 * expected)
    with pytest.raises(ArgumentError, match=r"queries: \[2, 6, 5, 16\], expected \[B, a multiple"):
        query_weights(queries, 4)


def test_means_that_move_on_remain_codable() -> None:
    values = sample(tokens=512, dim=32, dtype=torch.float32)
    values[:, :, :, 5] += torch.linspace(0, 25, 512)
    plan = fitted(values[:, :, :256], Granularity.CHANNEL, weights=torch.ones(2, 32), scale=0.5)
    later = values[:, :, 256:384]
    tables = plan.tables()
    expected = dequantise(quantise(later, tables), *steps_and_centers(later, tables), torch.float32)
    exceptions = (coded(later, plan)[0] != expected)[..., 5].float().mean()
    assert exceptions < 0.1


@pytest.mark.parametrize("granularity", SETTINGS, ids=lambda g: g.name)
def test_values_that_are_not_finite_do_not_spoil_a_plan(granularity: Granularity) -> None:
    values = sample(dtype=torch.float16)
    values[0, 0, 5, 7] = float("nan")
    values[0, 1, 40, 3] = float("inf")
    values[:, :, :, 9] = 2.0
    plan = fitted(values, granularity)
    found, _ = coded(values, plan)
    assert found[0, 0, 5, 7].isnan()
    assert found[0, 1, 40, 3] == float("inf")
    finite = values.isfinite()
    far = (found - values)[finite].abs().float()
    assert far.mean() < 0.3 * values[finite].float().std()
    assert np.isfinite(plan.steps).all()
    assert np.isfinite(plan.centers).all()


@pytest.mark.parametrize("fill", [0.0, 3.0, float("nan")])
@pytest.mark.parametrize("granularity", SETTINGS, ids=lambda g: g.name)
def test_samples_of_one_value(granularity: Granularity, fill: float) -> None:
    values = torch.full((1, 1, 64, 32), fill, dtype=torch.bfloat16)
    found, _ = coded(values, fitted(values, granularity))
    torch.testing.assert_close(found, values, equal_nan=True, rtol=0.4, atol=0)


def test_short_samples() -> None:
    values = sample(tokens=20)
    assert fitted(values, Granularity.CHANNEL).format.tokens == TILE
    with pytest.raises(ArgumentError, match="sample: 20 tokens, accepted are 32 or more"):
        fitted(values, Granularity.BLOCK_RANGE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coder": "ans"}, "coder: 'ans', accepted are 'huffman', 'fixed'"),
        ({"scale": 0}, "scale: 0"),
        ({"scale": float("inf")}, "scale: inf"),
        ({"rows_per_head": 0}, "rows_per_head: 0"),
        ({"weights": torch.ones(2, 3)}, r"weights: \[2, 3\], expected \[2, 48\]"),
        ({"tile_tokens": 24}, "tokens: 24"),
        ({"code_bits": 11}, "code_bits: 11"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        fitted(sample(), Granularity.CHANNEL, **options)


def test_samples_that_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"sample: \[256, 48\], expected \[B, H, T, 48\]"):
        fitted(sample()[0, 0], Granularity.CHANNEL)
    with pytest.raises(ArgumentError, match="weights: given"):
        fitted(sample(), Granularity.TOKEN_LEVEL, weights=torch.ones(2, 48))
    with pytest.raises(ArgumentError, match="values: 1 heads, expected 2"):
        quantise(sample(heads=1), fitted(sample(), Granularity.CHANNEL).tables())


def prompt(tokens: int = 512, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys, values and queries, four query heads for two of keys."""
    keys, values = sample(batch, tokens=tokens, seed=1), sample(batch, tokens=tokens, seed=2)
    queries = torch.randn(batch, 4, 100, 48, generator=torch.Generator().manual_seed(3))
    return keys, values, queries.bfloat16()


def outputs(
    keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    """Return causal attention of the last queries, float64."""
    k, v = (t.double().repeat_interleave(2, dim=1) for t in (keys, values))
    logits = queries.double() @ k.transpose(2, 3) / keys.shape[3] ** 0.5
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    count, tokens = logits.shape[2:]
    hidden = torch.ones(count, tokens, dtype=torch.bool).triu(tokens - count + 1)
    output: torch.Tensor = logits.masked_fill(hidden, -torch.inf).softmax(dim=3) @ v
    return output


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_measured_error_is_that_of_attention(softcap: float | None) -> None:
    keys, values, queries = prompt()
    fit = fit_error(keys, values, queries, error=0.05, tile_tokens=TILE, window=28, softcap=softcap)
    assert fit is not None
    assert 0.03 < fit.measured.error <= 0.05
    k, v = keys.clone(), values.clone()
    for kept, plan in ((k, fit.keys), (v, fit.values)):
        kept[:, :, 4:484] = coded(kept[:, :, 4:484], plan)[0]
    last = queries[:, :, -64:]
    plain = outputs(keys, values, last, softcap)
    error = (outputs(k, v, last, softcap) - plain).norm() / plain.norm()
    assert fit.measured.error == pytest.approx(float(error), rel=0.02)
    assert fit.keys.scale == fit.measured.key_scale
    assert fit.values.scale == fit.measured.value_scale


def test_larger_errors_take_fewer_bits() -> None:
    found = [fit_error(*prompt(), error=e, tile_tokens=TILE) for e in (0.02, 0.06, 0.2)]
    bits = [f.measured.key_bits + f.measured.value_bits for f in found if f is not None]
    assert len(bits) == 3
    assert bits == sorted(bits, reverse=True)


def test_no_scale_is_good_enough() -> None:
    assert fit_error(*prompt(), error=1e-6, tile_tokens=TILE) is None


def test_scales_that_are_given() -> None:
    both = fit_error(*prompt(), error=1e-6, key_scale=1, value_scale=0.5, tile_tokens=TILE)
    assert both is not None
    assert (both.keys.scale, both.values.scale) == (1, 0.5)
    assert both.measured.error > 1e-6
    one = fit_error(*prompt(), error=0.1, value_scale=0.5, tile_tokens=TILE)
    assert one is not None
    assert one.values.scale == 0.5
    assert one.measured.error <= 0.1
    assert fit_error(*prompt(), error=0.01, value_scale=2.0, tile_tokens=TILE) is None


@pytest.mark.parametrize(
    "granularity",
    [Granularity.BLOCK_RANGE, Granularity.CHANNEL_RANGE, Granularity.TOKEN_RANGE],
    ids=lambda g: g.name,
)
def test_ranges_are_fitted_too(granularity: Granularity) -> None:
    fit = fit_error(
        *prompt(),
        error=0.1,
        tile_tokens=TILE,
        key_granularity=granularity,
        value_granularity=Granularity.TOKEN_RANGE,
    )
    assert fit is not None
    assert fit.keys.format.granularity is granularity
    assert fit.measured.error <= 0.1


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that torch's functions have made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and _storage(t) not in before | self._known:
                self._add(t.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()

        def freed() -> None:
            self._known.discard(key)
            self.now -= nbytes

        self._known.add(key)
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, freed)


def _storage(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata)


@pytest.mark.parametrize("granularity", [Granularity.CHANNEL, Granularity.CHANNEL_RANGE])
def test_memory_of_a_fit_is_bounded(
    granularity: Granularity, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A thirty-second of the bytes, for a thirty-second of the values and of 64 query heads.
    monkeypatch.setattr(prompt_attention, "_FIT_BYTES", prompt_attention._FIT_BYTES >> 5)
    monkeypatch.setattr(prompt_attention, "_VALUES", prompt_attention._VALUES >> 5)
    keys, values, _ = prompt(tokens=3000, batch=2)
    queries = torch.randn(2, 2, 64, 48).bfloat16()
    with LiveBytes() as found:
        fit = fit_error(keys, values, queries, error=0.1, key_granularity=granularity)
    assert fit is not None
    assert 4 << 20 < found.most <= (256 << 20) >> 5


def test_long_prompts_are_drawn_from_and_padding_is_not_seen() -> None:
    keys, values, queries = prompt(tokens=5000, batch=2)
    first = torch.tensor([0, 3000])
    options: dict[str, Any] = {"error": 0.1, "tile_tokens": TILE, "first_valid": first}
    fit = fit_error(keys, values, queries, **options)
    keys[1, :, :3000] = -keys[1, :, :3000]
    values[1, :, :3000] = 100 * values[1, :, :3000]
    other = fit_error(keys, values, queries, **options, key_scale=1.0, value_scale=1.0)
    assert fit is not None
    assert fit.measured.error <= 0.1
    assert other is not None
    assert other.measured.error < 1  # errors of padding are a hundred times as large


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"error": 0}, "error: 0, accepted are numbers above 0"),
        ({"key_scale": -1}, "key_scale: -1"),
        ({"value_scale": float("nan")}, "value_scale: nan"),
        ({"values": torch.zeros(1, 2, 512, 32).bfloat16()}, r"values: .* \[1, 2, 512, 32\]"),
        ({"queries": torch.zeros(1, 3, 5, 48)}, r"queries: \[1, 3, 5, 48\]"),
        ({"queries": torch.zeros(1, 4, 0, 48)}, r"queries: \[1, 4, 0, 48\]"),
        ({"window": 500}, "keys: 512 tokens, accepted are 4 sinks, a window of 500, and 16"),
        ({"keys": torch.zeros(0, 2, 512, 48)}, r"keys: \[0, 2, 512, 48\]"),
    ],
)
def test_what_a_fit_to_an_error_refuses(changed: dict[str, Any], message: str) -> None:
    keys, values, queries = prompt()
    given = {"keys": keys, "values": values, "queries": queries, "error": 0.1, **changed}
    with pytest.raises(ArgumentError, match=message):
        fit_error(**given)


def test_codes_are_short_where_streams_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes ask for fewer bits that no code takes."""
    values = sample(tokens=1024, dim=64, seed=3)
    found = [coded(values, fitted(values, each, tile_tokens=64))[1] for each in SETTINGS]
    monkeypatch.setattr(fit, "shorten_codes", lambda classes, *_, **__: classes)
    longer = [coded(values, fitted(values, each, tile_tokens=64))[1] for each in SETTINGS]
    assert all(0.97 * most < n_words <= most for n_words, most in zip(found, longer, strict=True))
    assert sum(found) < 0.998 * sum(longer)


def test_no_code_is_beyond_all_codes() -> None:
    values = torch.full((1, 1, 32, 32), 1e30)
    values[0, 0, 3] = float("inf")
    plan = fitted(sample(heads=1, dim=32, dtype=torch.float32), Granularity.CHANNEL)
    assert (quantise(values, plan.tables()) == NO_CODE).all()
    assert NO_CODE > MAX_CODE


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", SETTINGS, ids=lambda g: g.name)
def test_samples_on_a_gpu(granularity: Granularity) -> None:
    values = sample(batch=2, tokens=512, dim=80)
    pairs, scale = SETTINGS[granularity]
    fits = [
        measured_fit(
            given, tile_tokens=TILE, granularity=granularity, token_pairs=pairs, scale=scale
        )
        for given in (values, values.cuda())
    ]
    tables = fits[0].plan.tables()
    codes = quantise(values.cuda(), tables.to(torch.device("cuda")))
    assert torch.equal(codes.cpu(), quantise(values, tables))
    assert fits[1].bits_per_value == pytest.approx(fits[0].bits_per_value, rel=1e-3)
    keys, others, queries = (t.cuda() for t in prompt())
    fit = fit_error(keys, others, queries, error=0.1, tile_tokens=TILE)
    assert fit is not None
    assert fit.measured.error <= 0.1


@pytest.mark.gpu
def test_a_fit_on_a_gpu_waits_once() -> None:
    keys, values, queries = (t.cuda() for t in prompt())
    fit_error(keys, values, queries, error=0.1, tile_tokens=TILE)  # tables of levels go up
    for error in (0.04, 0.1):
        with counted_waits() as waits:
            fit = fit_error(keys, values, queries, error=error, tile_tokens=TILE)
        assert fit is not None and 0.96 * error <= fit.measured.error <= error
        assert len(waits) == 1, waits
    with counted_waits() as waits:
        fit_error(keys, values, queries, error=0.1, key_scale=0.5, value_scale=0.5)
    assert len(waits) == 1, waits


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "groups"), [(8, 4), (32, 1)], ids=str)
def test_memory_of_a_fit_on_a_gpu_is_bounded(heads: int, groups: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(heads: int, tokens: int) -> torch.Tensor:
        made = torch.randn(1, heads, tokens, 128, device="cuda", generator=generator)
        return made.bfloat16()

    keys, values, queries = normal(heads, 8192), normal(heads, 8192), normal(heads * groups, 64)
    for measured in (False, True):  # the first one allocates what libraries keep
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fit = fit_error(keys, values, queries, error=0.05)
        assert fit is not None and 0.03 < fit.measured.error <= 0.05
        taken = torch.cuda.max_memory_allocated() - before
        assert not measured or 32 << 20 < taken <= 256 << 20
