"""Coded tiles: the bytes, damage, and what the codec is given."""

from __future__ import annotations

import base64
import copy
import json
import math
import pickle
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bitslab
from bitslab.engine.codecs import TileCodec
from bitslab.engine.codecs.huffman import code_lengths
from bitslab.engine.codecs.quantized import TilePlan
from bitslab.engine.codecs.quantized.plan import symbols_of
from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.format import (
    PAD_WORDS,
    CacheStorage,
    RowStorage,
    TableStorage,
    bases_of_rows,
    unsigned_lengths,
    words_of_rows,
)
from bitslab.engine.kernels.tile_format import MAX_SYMBOLS, Granularity, TileFormat
from bitslab.engine.transfer import across
from bitslab.kvcache import HistoryReader, PackedHistory
from tests.engine.codecs import tile_model
from tests.helpers import same_bits

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BY_CHANNEL = Granularity.CHANNEL


def code_of(rng: np.random.Generator, radius: int, fmt: TileFormat) -> np.ndarray:
    """Draw lengths of a code; some symbols have none."""
    symbols = symbols_of(radius)
    counts = np.zeros(MAX_SYMBOLS, np.int64)
    counts[:symbols] = rng.geometric(0.02, symbols) ** 3
    zero = radius * (2 * radius + 2) if radius else fmt.escape_symbol
    counts[0] *= bool(radius)  # singles have no code -128
    missing = rng.random(symbols) < rng.choice([0, 0.3])
    counts[:symbols][missing] = 0
    most = 1 << fmt.code_bits
    counts[:symbols][np.argsort(-counts[:symbols])[most - 1 :]] = 0
    counts[zero] = max(1, counts[zero])
    return code_lengths(counts, fmt.code_bits)


def any_plan(seed: int, fmt: TileFormat, *, heads: int, rows_per_head: int) -> TilePlan:
    """Return a plan that nothing was learnt for."""
    rng = np.random.default_rng(seed)
    classes = int(rng.integers(1, 9))
    radius = rng.choice([0] if fmt.lossless else [0, 1, 2, 5, 15], classes)
    steps: dict[str, np.ndarray] = {}
    if fmt.granularity is BY_CHANNEL:
        shape = (heads, fmt.dim)
        steps["steps"] = (2.0 ** rng.uniform(-4, 1, shape)).astype(np.float32)
        steps["centers"] = rng.normal(0, 1, shape).astype(np.float32)
    scale = float(rng.uniform(0.3, 2))
    return TilePlan(
        format=fmt,
        heads=heads,
        rows_per_head=rows_per_head,
        scale=scale if fmt.granularity is Granularity.TOKEN_LEVEL else scale / 16,
        order=np.stack([rng.permutation(fmt.dim) for _ in range(heads)]).astype(np.uint8),
        block_class=rng.integers(0, classes, (heads, fmt.blocks)).astype(np.uint8),
        radius=radius.astype(np.uint8),
        lengths=np.stack([code_of(rng, int(r), fmt) for r in radius]),
        **steps,
    )


def any_rows(seed: int, n: int, fmt: TileFormat) -> torch.Tensor:
    """Return tiles of several kinds: spread, equal, with holes, of any bits."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1, (n, fmt.tokens, fmt.dim)) * 2.0 ** rng.integers(-3, 3, fmt.dim)
    rows = torch.from_numpy(x).to(fmt.dtype)
    for row in rows:
        kind = int(rng.integers(0, 6))
        flat = row.view(-1)
        some = torch.from_numpy(rng.random(fmt.values) < rng.choice([0.001, 0.03]))
        if kind == 0:
            flat[some] = torch.tensor(rng.choice([np.nan, np.inf, -np.inf, -0.0])).to(fmt.dtype)
        elif kind == 1:
            bits = torch.from_numpy(rng.integers(0, 256, row.nbytes, dtype=np.uint8))
            flat[some] = bits.view(fmt.dtype)[some]
        elif kind == 2:
            flat.fill_(float(rng.normal(0, 3)))
        elif kind == 3:
            flat.mul_(float(2.0 ** rng.integers(-30, 12)))
    return rows


def formats_of(granularity: list[Granularity], dtypes: list[torch.dtype]) -> Any:
    return st.builds(
        TileFormat,
        tokens=st.sampled_from([16, 32]),
        dim=st.sampled_from([16, 48]),
        dtype=st.sampled_from(dtypes),
        granularity=st.sampled_from(granularity),
        token_pairs=st.booleans(),
        code_bits=st.sampled_from([5, 8, 10]),
    )


lossless_formats = formats_of([Granularity.LOSSLESS], DTYPES[:2])
formats = formats_of([g for g in Granularity if g is not Granularity.LOSSLESS], DTYPES)
formats = st.one_of(formats, lossless_formats)


def tiles_of(packed: bitslab.PackedRows, row_words: int) -> list[list[int]]:
    """Return the words of each row."""
    sizes = words_of_rows(packed.parts["lengths"], row_words)
    words = packed.parts["words"].numpy().view(np.uint32).tolist()
    ends = sizes.cumsum(0).tolist()
    assert not any(words[ends[-1] :]) and len(words) == ends[-1] + PAD_WORDS
    return [words[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=True)]


@settings(max_examples=60)
@given(formats, st.integers(0, 1 << 30), st.integers(1, 3), st.integers(1, 2))
def test_words_are_those_of_the_specification(
    fmt: TileFormat, seed: int, heads: int, rows_per_head: int
) -> None:
    codec = TileCodec(any_plan(seed, fmt, heads=heads, rows_per_head=rows_per_head))
    rows = any_rows(seed, 5, fmt)
    packed = codec.encode(rows)
    model = tile_model.Model(json.loads(json.dumps(codec.to_config())))
    decoded = codec.decode(packed)
    lengths = packed.parts["lengths"].tolist()
    for r, words in enumerate(tiles_of(packed, fmt.row_bytes // 4)):
        expected = model.encode(rows[r], r)
        if expected is None:
            assert lengths[r] == 0
            assert same_bits(decoded[r], rows[r])
        else:
            assert words == expected
            assert (model.decode(words, r) == model.raw(decoded[r])).all()
    finite = rows.isfinite()
    far = (decoded.double() - rows.double()).abs()
    assert bool((far[finite] <= codec.bounds(rows)[finite]).all())
    assert same_bits(decoded[~finite], rows[~finite])


def test_conversions_of_float16_and_bfloat16_are_those_of_torch() -> None:
    from bitslab.engine.kernels.cpu import floats as conversions
    from bitslab.engine.kernels.cpu.compiling import call

    every = np.arange(1 << 16, dtype=np.uint16)
    numbers = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    edges = (every.astype(np.uint32)[:, None] << 13) + np.array([0, 1, 0xFFF, 0x1000, 0x1001])
    floats = np.concatenate([numbers, edges.ravel().astype(np.uint32)]).view(np.float32)
    floats = floats[~np.isnan(floats)]
    for kind, dtype in ((0, torch.bfloat16), (1, torch.float16)):
        x = np.empty(1 << 16, np.float32)
        call(conversions.load_values, every, kind, x)
        expected = torch.from_numpy(every.view(np.int16)).view(dtype).float().numpy()
        same = x.view(np.uint32) == expected.view(np.uint32)
        assert bool((same | np.isnan(expected)).all()) and bool(np.isnan(x[~same]).all())
        values, bits = floats.copy(), np.empty(len(floats), np.uint16)
        call(conversions.round_values, values, kind, bits)
        rounded = torch.from_numpy(floats).to(dtype)
        assert bool((bits == rounded.view(torch.int16).numpy().view(np.uint16)).all())
        assert bool((values == rounded.float().numpy()).all())


# Damage


def small(dtype: torch.dtype = torch.bfloat16, kind: str = "token_level") -> tuple[Any, Any]:
    """Return a codec and rows, one with exceptions, one raw."""
    generator = torch.Generator().manual_seed(1)
    scale = {"channel": 1.5, "token_level": 1.2}.get(kind, 0.2)
    sample = torch.randn(40, 16, 16, generator=generator).to(dtype)
    codec = TileCodec.fit(sample, granularity=kind, scale=scale, heads=2)
    rows = torch.randn(3, 16, 16, generator=generator).to(dtype)
    rows[1, 3, 2:5] = float("nan")
    bits = np.random.default_rng(1).integers(0, 256, rows[2].nbytes, dtype=np.uint8)
    rows[2] = torch.from_numpy(bits).view(dtype).view(16, 16)
    return codec, rows


class Decoder:
    """Decodes one tile whose words may be anything, between guards that nothing may change."""

    GUARD: ClassVar[int] = 64

    def __init__(self, codec: TileCodec, row: int) -> None:
        self.tables, self.row = codec.tables(), row
        self.row_bytes = codec.row_bytes
        self.memory = torch.empty(2 * self.GUARD + self.row_bytes, dtype=torch.uint8)
        self.out = self.memory[self.GUARD : -self.GUARD].view(1, -1)

    def __call__(self, words: np.ndarray, length: int | None = None) -> bool:
        """Return whether the tile is sound."""
        self.memory.fill_(0xA5)
        held = torch.from_numpy(words.view(np.int32).copy())
        bad = cpu.decode_tiles(
            held,
            torch.tensor([0]),
            torch.tensor([len(words) if length is None else length]),
            torch.tensor([self.row]),
            self.tables,
            self.out,
        )
        guards = torch.cat([self.memory[: self.GUARD], self.memory[-self.GUARD :]])
        assert bool((guards == 0xA5).all())
        assert bad in (-1, 0)
        return bad < 0


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        pytest.param(dtype, g.name.lower(), id=f"{dtype}-{g.name.lower()}")
        for dtype in DTYPES
        for g in Granularity
        if (dtype, g) != (torch.float32, Granularity.LOSSLESS)  # there are none
    ],
)
def test_every_flipped_bit_is_found_or_harmless(dtype: torch.dtype, kind: str) -> None:
    codec, rows = small(dtype, kind)
    packed = codec.encode(rows)
    model = tile_model.Model(codec.to_config())
    for r in (0, 1):
        assert packed.parts["lengths"][r] > 0
        words = np.array(tiles_of(packed, codec.row_bytes // 4)[r], np.uint32)
        decode = Decoder(codec, r)
        assert decode(words)
        sound = 0
        for bit in range(32 * len(words)):
            damaged = words.copy()
            damaged[bit // 32] ^= np.uint32(1 << bit % 32)
            found = decode(damaged)
            sound += found
            if bit % 37 == 0 or bit < 64:
                try:
                    expected = model.decode(damaged.tolist(), r)
                except tile_model.Damaged:
                    assert not found
                else:
                    values = decode.out.view(dtype).view(-1)
                    same = (
                        torch.from_numpy(model.raw(values) == expected) | values.isnan()
                    )  # what a damaged step makes NaN has no certain bits
                    assert found and bool(same.all())
        assert 0 < sound < 32 * len(words)


@settings(max_examples=150)
@given(st.integers(0, 1 << 30), formats)
def test_any_words_are_decoded_or_found_damaged(seed: int, fmt: TileFormat) -> None:
    rng = np.random.default_rng(seed)
    codec = TileCodec(any_plan(seed, fmt, heads=1, rows_per_head=1))
    words = rng.integers(0, 1 << 32, int(rng.integers(1, fmt.row_bytes // 4)), dtype=np.uint32)
    if seed % 2:  # a header that might be true
        words[0] = int(rng.integers(0, len(words))) | int(rng.integers(0, 4)) << 16
    if seed % 3 == 0:
        words[1 + fmt.parameter_words :] = rng.choice([0, 0xFFFFFFFF])
    found = Decoder(codec, 0)(words)
    try:
        tile_model.Model(codec.to_config()).decode(words.tolist(), 0)
    except tile_model.Damaged:
        assert not found
    else:
        assert found


def test_streams_that_end_early_and_lengths_that_lie_are_found() -> None:
    codec, rows = small()
    packed = codec.encode(rows)
    words = np.array(tiles_of(packed, codec.row_bytes // 4)[1], np.uint32)
    decode = Decoder(codec, 1)
    for length in range(1, len(words)):
        assert not decode(words, length)
        assert not decode(words[:length])
    longer = np.concatenate([words, np.zeros(9, np.uint32)])
    assert decode(longer), "a row may be shorter than its length says"
    for length in (-1, -(1 << 62), len(words) + 1, 1 << 40, 1 << 62):
        assert not decode(words, length)
    units = int(words[0]) & 0xFFFF
    for header in (units - 1, units + 1, 0, 0xFFFF):
        lying = words.copy()
        lying[0] = header | (int(words[0]) & 0xFFFF0000)
        assert not decode(np.concatenate([lying, np.zeros(1 << 15, np.uint32)]))
    at = cpu.decode_tiles
    for first in (-1, len(words), 1 << 62, -(1 << 62)):
        out = torch.zeros(1, codec.row_bytes, dtype=torch.uint8)
        one = torch.from_numpy(words.view(np.int32))
        place, size = torch.tensor([first]), torch.tensor([len(words)])
        assert at(one, place, size, torch.tensor([1]), codec.tables(), out) == 0
        assert at(one, place, torch.tensor([0]), torch.tensor([1]), codec.tables(), out) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_exceptions_out_of_range_or_order_are_found(dtype: torch.dtype) -> None:
    codec, rows = small(dtype)
    words = np.array(tiles_of(codec.encode(rows), codec.row_bytes // 4)[1], np.uint32)
    decode = Decoder(codec, 1)
    size = 2 if dtype == torch.float32 else 1
    count = int(words[0]) >> 16
    assert count >= 3
    places = len(words) - size * np.arange(count, 0, -1)
    low = 0xFFFFFFFF if size == 2 else 0xFFFF
    for k, position in ((count - 1, 256), (count - 1, low), (1, int(words[places[0]]) & low)):
        damaged = words.copy()
        damaged[places[k]] = (int(words[places[k]]) & ~low) | position
        assert not decode(damaged), (k, position)


def test_damaged_rows_are_named() -> None:
    codec, rows = small()
    packed = codec.encode(torch.cat([rows] * 20))
    kernels = codec.kernels(CPU)
    at, _, _ = kernels.locate(table_of(packed), torch.tensor([40]))
    packed.parts["words"][at[0]] = -1
    out = torch.full((60, 16, 16), 7.0, dtype=rows.dtype)
    for ids in (None, torch.tensor([3, 40, 5]), torch.tensor([-20])):
        part = out if ids is None else out[: len(ids)]
        with pytest.raises(bitslab.CorruptedDataError, match="row 40 is damaged"):
            codec.decode(packed, ids, part)
    assert bool((out == 7).all())
    with pytest.raises(bitslab.CorruptedDataError, match="row 40 is damaged"):
        codec.adopt(60, packed.parts)
    assert (
        kernels.gather(
            table_of(packed), torch.tensor([1, 40]), torch.empty(2, 512, dtype=torch.uint8)
        )
        == 40
    )


# Plans


def test_damaged_plans_are_refused() -> None:
    codec, _ = small(kind="channel")
    config = codec.to_config()

    def array(key: str, dtype: Any, change: Any) -> dict[str, Any]:
        values = np.frombuffer(base64.b64decode(config[key]), dtype).copy()
        change(values)
        return {**config, key: base64.b64encode(values.tobytes()).decode()}

    def put(at: int, value: float) -> Any:
        return lambda values: values.__setitem__(at, value)

    def lengths(change: Any) -> dict[str, Any]:
        text = np.frombuffer(base64.b64decode(config["lengths"][0]), np.uint8).copy()
        change(text)
        return {
            **config,
            "lengths": [base64.b64encode(text.tobytes()).decode(), *config["lengths"][1:]],
        }

    reach = config["radius"][0]
    zero = reach * (2 * reach + 2) if reach else 128
    damaged: list[tuple[str, dict[str, Any]]] = [
        ("permutation", array("order", np.uint8, put(0, config["dim"] - 1))),
        ("permutation", array("order", np.uint8, put(3, 255))),
        ("class", array("block_class", np.uint8, put(0, 200))),
        ("steps", array("steps", "<f4", put(5, 0))),
        ("steps", array("steps", "<f4", put(5, -1))),
        ("steps", array("steps", "<f4", put(5, np.nan))),
        ("steps", array("steps", "<f4", put(5, np.inf))),
        ("centers", array("centers", "<f4", put(1, np.nan))),
        ("zeros have no code", lengths(put(zero, 0))),
        ("0 to 11", lengths(put(zero, 11))),
        ("no prefix code", lengths(lambda values: values.fill(1))),
        ("radius", {**config, "radius": [16, *config["radius"][1:]]}),
        ("radius", {**config, "radius": [*config["radius"], 1]}),
        ("base64", {**config, "order": "!"}),
        ("bytes", {**config, "order": config["order"][4:]}),
        ("steps has 128 bytes, expected 192", {**config, "heads": 3}),
        ("heads", {**config, "heads": 1 << 40}),
        ("tokens", {**config, "tokens": 24}),
        ("dim", {**config, "dim": 8}),
        ("dtype", {**config, "dtype": "float64"}),
        ("granularity", {**config, "granularity": "column"}),
        ("row_shape", {**config, "row_shape": [16, 32]}),
        ("scale", {**config, "scale": float("nan")}),
        ("code_bits", {**config, "code_bits": 12}),
    ]
    for says, one in damaged:
        with pytest.raises(bitslab.CorruptedDataError, match=says):
            TileCodec.from_config(one)


def test_symbol_of_minus_128_is_refused() -> None:
    fmt = TileFormat(16, 16, torch.float16, Granularity.TOKEN_LEVEL, token_pairs=False)
    plan = any_plan(1, fmt, heads=1, rows_per_head=1)
    lengths = np.zeros((1, MAX_SYMBOLS), np.uint8)
    lengths[0, [0, 128]] = 1
    changed = {**vars(plan), "radius": np.zeros(1, np.uint8), "lengths": lengths}
    changed["block_class"] = np.zeros_like(plan.block_class)
    with pytest.raises(bitslab.ArgumentError, match="plan: class 0: code lengths of symbols"):
        TileCodec(TilePlan(**changed))


def test_bad_options_are_refused() -> None:
    x = torch.randn(6, 16, 32)
    bad: list[tuple[Any, dict[str, Any], str]] = [
        (x, {"granularity": "column"}, "granularity: 'column', accepted are 'channel'"),
        (x, {"scale": 0.0}, "scale: 0.0"),
        (x, {"scale": float("inf")}, "scale: inf"),
        (x, {"heads": 4}, r"sample: \[6, 16, 32\], expected \[N, tokens, dim\] .* multiple of 4"),
        (x, {"heads": 0}, "heads: 0"),
        (x, {"code_bits": 11}, "code_bits: 11"),
        (x, {"coder": "tans"}, "coder: 'tans'"),
        (x[:0], {}, "sample: "),
        (x[0], {}, "sample: "),
        (x[:, :15], {}, "tokens: 15"),
        (x[:, :, :30], {}, "dim: 30"),
        (x.double(), {}, "dtype: torch.float64"),
        (x, {"weights": torch.ones(1, 32)}, "weights: given"),
    ]
    for sample, options, says in bad:
        with pytest.raises(bitslab.ArgumentError, match=says):
            TileCodec.fit(sample, **options)
    codec = TileCodec.fit(x)
    with pytest.raises(bitslab.ArgumentError, match=r"row_shape: \[32, 16\], accepted are"):
        TileCodec(codec.plan, (32, 16))
    with pytest.raises(bitslab.ArgumentError, match="sample: "):
        bitslab.compress(x, "tiles")  # rows of the last dimension are no tiles


# Kernels


def table_of(packed: bitslab.PackedRows) -> TableStorage:
    parts = packed.parts
    return TableStorage(packed.n_rows, parts["words"], parts["bases"], parts["lengths"])


def test_kernels_refuse_what_tiles_do_not_serve() -> None:
    codec, rows = small()
    packed = codec.encode(rows)
    kernels = codec.kernels(CPU)
    out = torch.empty(1, codec.row_bytes, dtype=torch.uint8)
    ids, words = torch.tensor([0]), packed.parts["words"]
    flags = torch.zeros(1, dtype=torch.int32)
    parts = packed.parts
    shared = TableStorage(3, words, parts["bases"], parts["lengths"], items_per_row=2)
    for table, says in (
        (TableStorage(3, words, flags=flags), "in place"),
        (TableStorage(3, words), "raw"),
        (shared, "2 items share a row"),
    ):
        with pytest.raises(bitslab.ArgumentError, match=says):
            kernels.gather(table, ids, out)
        with pytest.raises(bitslab.ArgumentError, match=says):
            kernels.locate(table, ids)
    nothing = torch.empty(0, 2, dtype=torch.int64)
    cache = CacheStorage(nothing, (), torch.zeros(8, dtype=torch.int64))
    with pytest.raises(bitslab.ArgumentError, match="cache: given"):
        kernels.gather(table_of(packed), ids, out, cache=cache)
    with pytest.raises(bitslab.ArgumentTypeError, match="device: meta"):
        codec.kernels(torch.device("meta"))


def test_kernels_gather_by_id_and_count() -> None:
    codec, rows = small()
    rows = torch.cat([rows, rows.flip(0)] * 12)
    packed = codec.encode(rows)
    decoded = codec.decode(packed)
    kernels = pickle.loads(pickle.dumps(codec.kernels(CPU)))
    ids = torch.tensor([0, 71, -1, 34, 34, 2])
    counters = torch.zeros(18, dtype=torch.int64)
    for dtype in (torch.int64, torch.int32):
        out = torch.empty(6, codec.row_bytes, dtype=torch.uint8)
        assert kernels.gather(table_of(packed), ids.to(dtype), out, counters=counters) == -1
        assert same_bits(out.view(rows.dtype).view(6, 16, 16), decoded[ids])
        kernels.prepare_gather(table_of(packed), ids.to(dtype), out)()
    lengths = words_of_rows(packed.parts["lengths"], kernels.row_words)[ids % 72]
    assert counters.view(2, 9)[:, 8].tolist() == [12, 2 * int(lengths.sum())]
    assert not counters.view(2, 9)[:, :8].any()
    untouched = torch.full((6, codec.row_bytes), 3, dtype=torch.uint8)
    kernels.gather(table_of(packed), ids, untouched, first_bad=torch.tensor([2]))
    assert bool((untouched == 3).all())


def test_encoding_finds_lengths_of_other_rows() -> None:
    codec, rows = small()
    kernels = codec.kernels(CPU)
    data = rows.view(3, -1).view(torch.uint8)
    lengths, clusters = kernels.measure(data)
    assert clusters.numel() == 0 and lengths.dtype == kernels.length_dtype
    lengths[0] += 1
    bases, _ = bases_of_rows(words_of_rows(lengths, kernels.row_words))
    with pytest.raises(bitslab.ArgumentError, match="lengths: .* tile 0 has another length"):
        kernels.encode(data, lengths, clusters, bases, int(bases[-1]))


def test_heads_are_known_by_the_numbers_of_rows() -> None:
    x = torch.randn(2, 3, 64, 32) * torch.tensor([0.1, 1.0, 30.0])[:, None, None]
    rows = x.view(2, 3, 2, 32, 32).reshape(12, 32, 32).bfloat16()
    codec = TileCodec.fit(rows, granularity="channel", scale=0.5, heads=3, rows_per_head=2)
    packed = codec.encode(rows)
    assert int(unsigned_lengths(packed.parts["lengths"]).max()) < 512 // 2
    assert bool((codec.bounds(rows)[2] > 3 * codec.bounds(rows)[0]).all())
    decoded = codec.decode(packed)
    assert same_bits(codec.decode(packed, torch.tensor([7, 2])), decoded[[7, 2]])
    kernels = codec.kernels(CPU)
    assert kernels.row_period == 6
    assert codec.encode_pieces([rows.view(12, -1).view(torch.uint8)]).n_rows == 12
    many = rows.repeat(16, 1, 1).view(192, -1).view(torch.uint8)
    whole = codec.encode_pieces(iter([many[:96], many[96:]]))
    assert same_bits(whole.parts["words"], codec.encode(rows.repeat(16, 1, 1)).parts["words"])
    with pytest.raises(bitslab.ArgumentError, match="accepted are multiples of 6"):
        codec.encode_pieces(iter([many[:32], many[32:]]))


@pytest.mark.parametrize("period", [1, 3, 6, 32, 40])
@pytest.mark.parametrize(("begin", "end"), [(0, 1000), (31, 33), (500, 999), (999, 1000)])
def test_pieces_begin_at_rows_of_the_first_head(
    period: int, begin: int, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(across, "PIECE_BYTES", 4 * 1300)
    lengths = torch.randint(1, 20, (1000,), generator=torch.Generator().manual_seed(1))
    bases, _ = bases_of_rows(lengths)
    nothing = torch.empty(0, dtype=torch.int32)
    unit = math.lcm(32, period)
    pieces = list(across._pieces(RowStorage(nothing, bases, nothing, nothing), begin, end, unit))
    assert [first for first, _ in pieces] == [begin, *(last for _, last in pieces[:-1])]
    assert pieces[-1][1] == end
    assert all(first % unit == 0 for first, _ in pieces[1:])
    if unit < 200 and end - begin > 500:
        assert len(pieces) > 2


# A history


class TilePlans:
    """Fits a codec of tiles for a history, one for all heads."""

    def __init__(self, dim: int, **options: Any) -> None:
        self.dim, self.options = dim, options

    def fit(self, kind: str, sample: torch.Tensor, *, search_all: bool = False) -> TileCodec:
        tiles = sample.view(sample.shape[0], -1, self.dim)
        one = TileCodec.fit(tiles, **self.options)
        return TileCodec(one.plan, tuple(sample.shape[1:]))


@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
def test_a_history_holds_tiles(offload: bool) -> None:
    dim, block = 16, 16
    tokens = torch.randn(2, 3, 300, dim, generator=torch.Generator().manual_seed(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bitslab.kvcache.packing.ROW_BYTES", block * dim * 4)
        reader = HistoryReader(CPU, offload=offload, sm_budget=None)
        plans: Any = TilePlans(dim, granularity="token_level", scale=0.5)
        history = PackedHistory(reader.new_words(), plans, "k", window=8, block_tokens=block)
        for part in tokens.split([200, 40, 60], dim=2):
            history.append(part)
        assert [type(s.codec) for s in history.segments] == [TileCodec]
        codec = history.segments[0].codec
        assert codec is not None
        packed = history.packed_tokens
        assert packed >= 250
        decoded = history.decode()
        assert same_bits(decoded[:, :, packed:], tokens[:, :, packed:])
        rows = tokens[:, :, :packed].reshape(2, 3, -1, block * dim).flatten(0, 2)
        bounds = codec.bounds(rows).view(2, 3, packed, dim)
        far = (decoded - tokens).abs()[:, :, :packed]
        assert bool((far <= bounds).all()) and bool(far.any())
        assert same_bits(copy.deepcopy(history).decode(), decoded)
        assert same_bits(pickle.loads(pickle.dumps(history)).decode(), decoded)
        history.reorder(torch.tensor([1, 1]))
        assert same_bits(history.decode(), decoded[[1, 1]])
