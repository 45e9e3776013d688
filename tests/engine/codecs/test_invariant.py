"""Invariant bit packing: what options mean, what plans cost, what the packed bytes say."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import bitslab
from bitslab import InvariantCodec
from bitslab.engine.codecs.invariant import Profile
from bitslab.engine.codecs.invariant.sample import SAMPLE_BYTES
from bitslab.engine.kernels.cuda.source import Variant
from bitslab.engine.kernels.format import RowFormat
from tests.engine.codecs import model
from tests.engine.codecs.sizes import PUBLISHED, stored_bytes
from tests.engine.kernels.cases import make_case
from tests.helpers import bits_of, dtype_id, packable, random_bits, same_bits

WIDTHS = [1, 2, 4, 8]


@pytest.fixture(autouse=True)
def torch_draws_the_same() -> None:
    torch.manual_seed(0)


def format_of(codec: InvariantCodec) -> Any:
    return codec.profile.format


def chunks_of(rows: torch.Tensor, width: int) -> np.ndarray:
    return bits_of(rows).numpy().reshape(len(rows), -1).view(f"<u{width}")


# Options are obeyed


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("chunk_bytes", width) for width in WIDTHS),
        *(("code_bits", bits) for bits in (1, 2, 3)),
        *product(("grouped", "uniform"), (False, True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8], ids=dtype_id)
def test_option_is_obeyed_whatever_it_costs(dtype: torch.dtype, option: str, value: Any) -> None:
    for rows in (packable(dtype, (60, 48)), random_bits(dtype, (60, 48))):
        codec = InvariantCodec.fit(rows, **{option: value})
        assert getattr(format_of(codec), option) == value
        assert same_bits(codec.decode(codec.encode(rows)), rows)


@pytest.mark.pairwise
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("code_bits", [1, 2, 3])
@pytest.mark.parametrize("grouped", [False, True], ids=["plain", "grouped"])
@pytest.mark.parametrize("uniform", [False, True], ids=["positional", "uniform"])
def test_options_are_obeyed_together(
    width: int, code_bits: int, grouped: bool, uniform: bool
) -> None:
    rows = packable(torch.float32, (60, 48))
    codec = InvariantCodec.fit(
        rows, chunk_bytes=width, code_bits=code_bits, grouped=grouped, uniform=uniform
    )
    fmt = format_of(codec)
    assert (fmt.chunk_bytes, fmt.code_bits, fmt.grouped, fmt.uniform) == (
        width,
        code_bits,
        grouped,
        uniform,
    )
    assert codec.profile.masks.shape == (1, 1 if uniform else 192 // width)
    assert codec.profile.values.shape == (*codec.profile.masks.shape, 2**code_bits - 1)
    assert same_bits(codec.decode(codec.encode(rows)), rows)


@pytest.mark.pairwise
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("threshold", [0.5, 0.6, 0.75, 0.9, 1, 1.0], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=dtype_id)
def test_threshold_gives_the_masks_of_its_definition(
    dtype: torch.dtype, threshold: float, width: int
) -> None:
    rows = packable(dtype, (40, 32))  # 40 rows: shares of 0.6, 0.75 and 0.9 occur exactly
    chunks = chunks_of(rows, width)
    shares = model.bit_shares(chunks)
    codec = InvariantCodec.fit(rows, chunk_bytes=width, uniform=False, threshold=threshold)
    expected = model.threshold_masks(shares, threshold, chunks.dtype)
    assert np.array_equal(codec.profile.masks[0], expected)
    together = shares.mean(0, keepdims=True)
    codec = InvariantCodec.fit(rows, chunk_bytes=width, uniform=True, threshold=threshold)
    expected = model.threshold_masks(together, threshold, chunks.dtype)
    assert np.array_equal(codec.profile.masks[0], expected)


def column_with_shares(shares: list[int], n: int) -> torch.Tensor:
    """``[n, 1]`` bytes whose bit b is set in the first ``shares[b]`` rows."""
    rows = np.zeros((n, 1), np.uint8)
    for bit, count in enumerate(shares):
        rows[:count] |= 1 << bit
    return torch.from_numpy(rows)


@pytest.mark.parametrize(
    ("threshold", "mask"),
    [
        (0.5, 0b11111111),
        (0.55, 0b11111110),
        (0.6, 0b11111100),
        (0.8, 0b11110000),
        (0.85, 0b11000000),
        (0.95, 0b11000000),
        (1.0, 0b11000000),
    ],
    ids=str,
)
def test_share_equal_to_the_threshold_is_invariant(threshold: float, mask: int) -> None:
    # Of 20 rows the most agree in this many: 10, 11, 12, 12, 16, 16, 20, 20.
    rows = column_with_shares([10, 11, 12, 8, 16, 4, 20, 0], 20)
    codec = InvariantCodec.fit(rows, chunk_bytes=1, threshold=threshold)
    assert int(codec.profile.masks[0, 0]) == mask


def test_threshold_of_one_half_masks_every_bit_and_one_only_the_unanimous() -> None:
    rows = random_bits(torch.uint8, (500, 40))
    rows[:, ::4] = 0x5A
    half = InvariantCodec.fit(rows, chunk_bytes=4, uniform=False, threshold=0.5)
    assert (half.profile.masks == 0xFFFFFFFF).all()
    one = InvariantCodec.fit(rows, chunk_bytes=4, uniform=False, threshold=1.0)
    assert (one.profile.masks == 0xFF).all()
    assert (one.profile.values == 0x5A).all()


def test_values_are_the_most_frequent_masked_chunks() -> None:
    numbers = [7] * 30 + [3] * 20 + [9] * 15 + [1] * 10 + [2] * 4 + [4] * 3 + [5] * 2 + [6]
    rows = torch.tensor(numbers, dtype=torch.uint8)[:, None].repeat(1, 40)
    codec = InvariantCodec.fit(rows, chunk_bytes=1, code_bits=3, threshold=0.5)
    assert (codec.profile.values == [7, 3, 9, 1, 2, 4, 5]).all()


# Options are refused


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"chunk_bytes": 4}, bitslab.ArgumentError, "chunk_bytes: 4 does not divide 18-byte rows"),
        ({"chunk_bytes": 8}, bitslab.ArgumentError, "chunk_bytes: 8 does not divide 18-byte rows"),
        ({"chunk_bytes": 3}, bitslab.ArgumentError, "chunk_bytes: 3, accepted are 1, 2, 4, 8"),
        ({"chunk_bytes": 0}, bitslab.ArgumentError, "chunk_bytes: 0, accepted are 1, 2, 4, 8"),
        ({"chunk_bytes": 16}, bitslab.ArgumentError, "chunk_bytes: 16, accepted are 1, 2, 4, 8"),
        ({"chunk_bytes": "4"}, bitslab.BitslabError, "chunk_bytes: '4', accepted are 1, 2, 4, 8"),
        ({"chunk_bytes": None}, bitslab.BitslabError, "chunk_bytes: None, accepted are 1, 2, 4"),
        ({"chunk_bytes": 2.0}, bitslab.BitslabError, "chunk_bytes: 2.0, accepted are 1, 2, 4, 8"),
        ({"chunk_bytes": True}, bitslab.BitslabError, "chunk_bytes: True, accepted are 1, 2, 4"),
        ({"code_bits": 0}, bitslab.ArgumentError, "code_bits: 0, accepted are 1, 2, 3"),
        ({"code_bits": 4}, bitslab.ArgumentError, "code_bits: 4, accepted are 1, 2, 3"),
        ({"code_bits": "1"}, bitslab.BitslabError, "code_bits: '1', accepted are 1, 2, 3"),
        ({"code_bits": 1.0}, bitslab.BitslabError, "code_bits: 1.0, accepted are 1, 2, 3"),
        ({"code_bits": True}, bitslab.BitslabError, "code_bits: True, accepted are 1, 2, 3"),
        ({"grouped": 1}, bitslab.ArgumentTypeError, "grouped: 1, accepted are True, False"),
        ({"grouped": None}, bitslab.ArgumentTypeError, "grouped: None, accepted are True, False"),
        ({"uniform": 0}, bitslab.ArgumentTypeError, "uniform: 0, accepted are True, False"),
        ({"uniform": "yes"}, bitslab.ArgumentTypeError, "uniform: 'yes', accepted are True"),
        ({"threshold": float("nan")}, bitslab.ArgumentError, "threshold: nan, accepted are 0.5"),
        ({"threshold": 0.4}, bitslab.ArgumentError, "threshold: 0.4, accepted are 0.5 to 1"),
        ({"threshold": 1.1}, bitslab.ArgumentError, "threshold: 1.1, accepted are 0.5 to 1"),
        ({"threshold": float("inf")}, bitslab.ArgumentError, "threshold: inf, accepted are 0.5"),
        ({"threshold": True}, bitslab.ArgumentTypeError, "threshold: True, accepted are 0.5 to 1"),
        ({"threshold": "1"}, bitslab.ArgumentTypeError, "threshold: '1', accepted are 0.5 to 1"),
        ({"clusters": 0}, bitslab.ArgumentError, "clusters: 0, accepted are 1 to 256"),
        ({"clusters": 257}, bitslab.ArgumentError, "clusters: 257, accepted are 1 to 256"),
        ({"clusters": 1.5}, bitslab.ArgumentTypeError, "clusters: expected an int, got 1.5"),
        ({"clusters": True}, bitslab.ArgumentTypeError, "clusters: expected an int, got True"),
        ({"seed": -1}, bitslab.ArgumentError, "seed: -1, accepted are 0"),
        ({"seed": 0.5}, bitslab.ArgumentTypeError, "seed: expected an int, got 0.5"),
        ({"n_rows": "9"}, bitslab.BitslabError, "n_rows: "),
        ({"n_rows": -3}, bitslab.BitslabError, "n_rows: "),
        ({"n_rows": 1.5}, bitslab.BitslabError, "n_rows: "),
    ],
    ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else "",
)
def test_wrong_option_is_refused(
    options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        InvariantCodec.fit(packable(torch.uint8, (20, 18)), **options)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("sample", "error", "says"),
    [
        (torch.empty(0, 8), bitslab.ArgumentError, r"sample: shape \[0, 8\]; needs at least one"),
        (torch.empty(5, 0), bitslab.ArgumentError, r"sample: shape \[5, 0\]; needs at least one"),
        (torch.empty(5, 3, 0), bitslab.ArgumentError, r"sample: shape \[5, 3, 0\]; needs"),
        (torch.tensor(1.0), bitslab.ArgumentError, r"sample: shape \[\]; needs at least one"),
        (np.ones((5, 8)), bitslab.ArgumentTypeError, "sample: expected a torch.Tensor, got ndarr"),
        ([1.0, 2.0], bitslab.ArgumentTypeError, "sample: expected a torch.Tensor, got list"),
        (torch.ones(5, 8).to_sparse(), bitslab.ArgumentTypeError, "sample: .*sparse"),
        (torch.empty(5, 8, device="meta"), bitslab.ArgumentTypeError, "sample: .*meta"),
    ],
    ids=["no-rows", "0-byte-rows", "0-byte-rows-3-d", "0-d", "numpy", "list", "sparse", "meta"],
)
def test_wrong_sample_is_refused(sample: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        InvariantCodec.fit(sample)


# Sizes of the published algorithm


def resembling(width: int, n: int, chunks: int, seed: int) -> np.ndarray:
    """Chunks with bits that agree in very different shares of the rows."""
    rng = np.random.default_rng(seed)
    bits = rng.random((n, chunks, 8 * width)) < rng.beta(0.25, 0.25, (chunks, 8 * width))
    return np.packbits(bits.reshape(n, -1), axis=1, bitorder="little").view(f"<u{width}")


CASES = [(w, n, c) for w in WIDTHS for n, c in ((5, 3), (48, 32), (37, 65))]


@pytest.mark.drawn(18)
@pytest.mark.parametrize(("width", "n", "chunks"), CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_published_options_give_the_published_sizes(
    width: int, n: int, chunks: int, seed: int
) -> None:
    data = resembling(width, n, chunks, seed)
    rows = torch.from_numpy(data.view(np.uint8))
    raw_words = -(-rows.shape[1] // 4)
    raw_bytes = rows.shape[1]
    shares = model.bit_shares(data)

    def stored(words: np.ndarray) -> np.ndarray:
        return np.where(words < raw_words, 4 * words, raw_bytes)

    totals, paper = {}, {}
    for threshold in model.THRESHOLDS:
        masks = model.threshold_masks(shares, threshold, data.dtype)
        values = model.frequent_values(data, masks)
        words = model.row_words(data, masks, values[:, None], 1, False)
        totals[threshold] = int(np.minimum(words, raw_words).sum())
        bitval = model.majority_values(shares, masks)
        paper[threshold] = int(model.packed_bits(data, masks, bitval).sum())
        # The planner, given the threshold, finds just these masks, values and sizes.
        codec = InvariantCodec.fit(rows, chunk_bytes=width, threshold=threshold, **PUBLISHED)
        assert np.array_equal(codec.profile.masks[0], masks)
        assert np.array_equal(codec.profile.values[0, :, 0], values)
        assert codec.packed_bytes(rows).tolist() == stored(words).tolist()
        # Bits as the paper counts them; each of the three parts ends on a word.
        bits = model.packed_bits(data, masks, values)
        assert (words * 32 >= bits).all() and (words * 32 - bits <= 3 * 31).all()
        # The paper's Bitval is one choice of values; the most frequent ones match no fewer chunks.
        assert bits.sum() <= paper[threshold]
    # Left to choose, it sweeps the thresholds.
    codec = InvariantCodec.fit(rows, chunk_bytes=width, **PUBLISHED)
    f, p = format_of(codec), codec.profile
    assert (f.chunk_bytes, f.code_bits, f.grouped, f.uniform) == (width, 1, False, False)
    words = model.row_words(data, p.masks[0], p.values[0], 1, False)
    assert codec.packed_bytes(rows).tolist() == stored(words).tolist()
    assert int(np.minimum(words, raw_words).sum()) == min(totals.values())


@pytest.mark.pairwise
@pytest.mark.parametrize("code_bits", [1, 2, 3])
@pytest.mark.parametrize("grouped", [False, True], ids=["plain", "grouped"])
@pytest.mark.parametrize("uniform", [False, True], ids=["positional", "uniform"])
@pytest.mark.parametrize("width", WIDTHS)
def test_sizes_are_those_of_the_format(
    width: int, uniform: bool, grouped: bool, code_bits: int
) -> None:
    data = resembling(width, 50, 70, seed=9)
    data[:20] = data[0]
    rows = torch.from_numpy(data.view(np.uint8))
    codec = InvariantCodec.fit(
        rows, chunk_bytes=width, code_bits=code_bits, grouped=grouped, uniform=uniform
    )
    p = codec.profile
    words = model.row_words(data, p.masks[0], p.values[0], code_bits, grouped)
    raw_words = -(-rows.shape[1] // 4)
    expected = np.where(words < raw_words, 4 * words, rows.shape[1])
    assert codec.packed_bytes(rows).tolist() == expected.tolist()


# The packed layout, read by a reader that knows only its description


@pytest.mark.pairwise
@pytest.mark.parametrize("code_bits", [1, 2, 3])
@pytest.mark.parametrize("grouped", [False, True], ids=["plain", "grouped"])
@pytest.mark.parametrize("uniform", [False, True], ids=["positional", "uniform"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("clusters", [1, 3], ids=["one-profile", "three-clusters"])
def test_packed_rows_are_as_the_format_says(
    clusters: int, width: int, uniform: bool, grouped: bool, code_bits: int
) -> None:
    packed_rows = 0
    for seed, chunks in enumerate((3, 32, 71)):
        case = make_case(
            Variant("decode", width, code_bits, grouped, uniform),
            clusters=clusters,
            n_rows=34,
            row_bytes=chunks * width,
            seed=seed,
        )
        codec = case.codec
        packed = codec.encode(case.rows)
        found = model.read_rows(codec.to_config(), packed.parts)
        assert b"".join(found) == bits_of(case.rows).numpy().tobytes()
        packed_rows += int((packed.parts["lengths"] != 0).sum())
    assert packed_rows > 20  # the test would be empty with raw rows alone


def test_masks_of_all_bits_and_of_none_are_read_too() -> None:
    for width, full in product(WIDTHS, (False, True)):
        dtype = np.dtype(f"<u{width}")
        fmt = RowFormat(40 * width, width, 2, True, True)
        mask = np.array([[np.iinfo(dtype).max if full else 0]], dtype)
        values = np.arange(3, dtype=dtype).reshape(1, 1, 3) & mask[..., None]
        codec = InvariantCodec(Profile(fmt, mask, values), (40 * width,), torch.uint8)
        chunks = np.random.default_rng(0).integers(0, 4, (9, 40)).astype(dtype)
        chunks[:3] = 0
        rows = torch.from_numpy(chunks.view(np.uint8))
        packed = codec.encode(rows)
        found = model.read_rows(codec.to_config(), packed.parts)
        assert b"".join(found) == rows.numpy().tobytes()
        assert same_bits(codec.decode(packed), rows)


# Clusters


def two_populations(n: int = 600, columns: int = 64) -> torch.Tensor:
    small, large = torch.rand(n // 2, columns) * 1e-9, torch.rand(n // 2, columns) * 1e9
    rows = torch.stack([small, large], 1).reshape(n, columns)
    return rows.to(torch.bfloat16)


def test_clusters_pay_on_rows_of_two_populations() -> None:
    rows = two_populations()
    for options in ({"code_bits": 1, "uniform": True}, {**PUBLISHED}):
        one = InvariantCodec.fit(rows, **options)
        two = InvariantCodec.fit(rows, clusters=2, **options)
        assert (one.clusters, two.clusters) == (1, 2)
        assert stored_bytes(two, rows) < 0.95 * stored_bytes(one, rows)
        assert same_bits(two.decode(two.encode(rows)), rows)


def test_cluster_ids_are_stored_and_used() -> None:
    rows = two_populations()
    codec = InvariantCodec.fit(rows, clusters=2, code_bits=1, uniform=True)
    packed = codec.encode(rows)
    ids = packed.parts["row_clusters"]
    assert (ids.dtype, ids.shape) == (torch.uint8, (600,))
    assert len(ids[::2].unique()) == len(ids[1::2].unique()) == 1
    assert ids[0] != ids[1]
    exchanged = dict(packed.parts, row_clusters=1 - ids)
    try:
        decoded = codec.decode(codec.adopt(600, exchanged))
    except bitslab.CorruptedDataError:
        pass  # the other cluster's codes ask for another length
    else:
        assert not same_bits(decoded, rows)
    assert codec.encode(rows).nbytes == int(codec.packed_bytes(rows).sum()) + (
        codec.row_metadata_bytes(600)
    )


@pytest.mark.parametrize("grouped", [False, True], ids=["plain", "grouped"])
@pytest.mark.parametrize("uniform", [False, True], ids=["positional", "uniform"])
def test_every_row_takes_the_cluster_that_packs_it_best(grouped: bool, uniform: bool) -> None:
    case = make_case(Variant("decode", 2, 2, grouped, uniform), clusters=3, n_rows=200)
    fmt, p = case.layout.format, case.profile
    chunks = case.rows.numpy().view("<u2")
    words = np.stack(
        [model.row_words(chunks, p.masks[c], p.values[c], 2, grouped) for c in range(3)]
    )
    packed = case.codec.encode(case.rows)
    lengths = model.unsigned(packed.parts["lengths"])
    best = words.min(0)
    assert lengths.tolist() == np.where(best < fmt.row_words, best, 0).tolist()
    shrunk = best < fmt.row_words
    chosen = packed.parts["row_clusters"].numpy()
    assert (chosen[shrunk] == words.argmin(0)[shrunk]).all()
    assert len(set(chosen[shrunk])) == 3


@pytest.mark.parametrize("clusters", [2, 4, 256])
@pytest.mark.parametrize(
    "rows",
    [packable(torch.bfloat16, (400, 32)), random_bits(torch.uint8, (300, 40)), torch.ones(50, 8)],
    ids=["one-population", "random", "constant"],
)
def test_clusters_that_do_not_pay_are_declined(rows: torch.Tensor, clusters: int) -> None:
    codec = InvariantCodec.fit(rows, clusters=clusters)
    assert codec == InvariantCodec.fit(rows)
    assert codec.clusters == 1
    assert "row_clusters" not in codec.encode(rows).parts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=dtype_id)
@pytest.mark.parametrize("clusters", [2, 5, 16])
def test_clusters_never_cost_more_than_one_profile(dtype: torch.dtype, clusters: int) -> None:
    for seed in range(3):
        scale = 10.0 ** torch.randint(-6, 6, (300, 1))
        rows = (torch.rand(300, 48) * scale).to(dtype)
        one = InvariantCodec.fit(rows, **PUBLISHED)
        many = InvariantCodec.fit(rows, clusters=clusters, seed=seed, **PUBLISHED)
        assert many.clusters <= clusters
        assert stored_bytes(many, rows) <= stored_bytes(one, rows)


# Samples


@pytest.mark.parametrize("clusters", [1, 4])
def test_one_seed_gives_one_codec(clusters: int) -> None:
    rows = torch.cat([two_populations(30_000), packable(torch.bfloat16, (4000, 64))])
    assert rows.nbytes > SAMPLE_BYTES  # so that rows are drawn
    codecs = []
    for torch_seed in (1, 2):
        torch.manual_seed(torch_seed)
        np.random.seed(torch_seed)
        codecs.append(InvariantCodec.fit(rows, seed=7, clusters=clusters, **PUBLISHED))
    assert codecs[0] == codecs[1]
    assert torch.equal(codecs[0].packed_bytes(rows), codecs[1].packed_bytes(rows))


def test_fitting_leaves_the_generators_alone() -> None:
    rows = two_populations(34_000)
    torch_state = torch.get_rng_state()
    numpy_state: Any = np.random.get_state()
    InvariantCodec.fit(rows, clusters=3)
    assert torch.equal(torch.get_rng_state(), torch_state)
    after: Any = np.random.get_state()
    assert (after[1] == numpy_state[1]).all() and after[2:] == numpy_state[2:]


VIEWS = {
    "transposed": lambda t: t.T,
    "every-other-row": lambda t: t[::2],
    "columns": lambda t: t[:, 3:35],
    "expanded": lambda t: t[:1].expand(40, -1),
    "permuted": lambda t: t.view(60, 8, 12).permute(0, 2, 1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=dtype_id)
def test_sample_need_not_be_contiguous(dtype: torch.dtype, view: Any) -> None:
    base = packable(dtype, (60, 96))
    sample = view(base)
    assert not sample.is_contiguous()
    copied = sample.clone(memory_format=torch.contiguous_format)
    codec = InvariantCodec.fit(sample)
    assert codec == InvariantCodec.fit(copied)
    assert codec.row_shape == tuple(sample.shape[1:])
    assert same_bits(codec.decode(codec.encode(sample)), copied)


def test_profile_of_other_rows_is_refused() -> None:
    codec = InvariantCodec.fit(packable(torch.float32, (20, 32)))
    with pytest.raises(bitslab.ArgumentError, match="profile: made for rows of 128 bytes"):
        InvariantCodec(codec.profile, (31,), torch.float32)


def test_rows_longer_than_the_format_allows_are_refused() -> None:
    too_long = torch.zeros(1, dtype=torch.uint8).expand(1, (1 << 27) + 1)
    with pytest.raises(bitslab.ArgumentError, match="sample: rows of 134217729 bytes"):
        InvariantCodec.fit(too_long)


@pytest.mark.parametrize("damage", ["value", "mask", "truncated", "width"])
def test_damaged_profile_is_refused(damage: str) -> None:
    rows = packable(torch.float32, (20, 32))
    config = InvariantCodec.fit(rows, chunk_bytes=4, threshold=1.0).to_config()
    profile = dict(config["profile"])
    masks, values = profile["masks"], profile["values"]
    profile |= {
        "value": {"values": "/" * (len(values) - values.count("=")) + "=" * values.count("=")},
        "mask": {"masks": "not base64!"},
        "truncated": {"masks": masks[: len(masks) // 8 * 4]},
        "width": {"chunk_bytes": 3},
    }[damage]
    with pytest.raises(bitslab.CorruptedDataError, match="profile"):
        InvariantCodec.from_config({**config, "profile": profile})
