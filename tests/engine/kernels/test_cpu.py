"""The Numba twins: any rows come back, damage is reported, and nothing runs over a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bitslab
from bitslab.engine.codecs.invariant import Profile
from bitslab.engine.codecs.invariant.layout import build_layout
from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cuda.source import Variant
from bitslab.engine.kernels.format import BLOCK_ROWS, PAD_WORDS, RowFormat, RowStorage
from tests.engine.codecs import model
from tests.engine.kernels.cases import Case, make_case, pack_on_cpu
from tests.forked import run_forked
from tests.simt.module import guarded

ROOT = Path(__file__).resolve().parents[3]
WIDTHS = (1, 2, 4, 8)
BATCH = 250  # damaged tables that one subprocess reads

# Any rows come back


@st.composite
def formats(draw: st.DrawFn) -> RowFormat:
    row_bytes = draw(st.integers(1, 400))
    width = draw(st.sampled_from([w for w in WIDTHS if row_bytes % w == 0]))
    return RowFormat(
        row_bytes,
        width,
        draw(st.integers(1, 3)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([1, 1, 2, 5])),
    )


def draw_chunks(rng: np.random.Generator, fmt: RowFormat, *shape: int) -> np.ndarray:
    size = int(np.prod(shape)) * fmt.chunk_bytes
    raw = rng.integers(0, 256, size, dtype=np.uint8)
    return raw.view(f"<u{fmt.chunk_bytes}").reshape(shape)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any profile, with rows that match it from not at all to entirely."""
    fmt = draw(formats())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (fmt.clusters, fmt.positions)
    masks = draw_chunks(rng, fmt, *shape)
    kind = draw(st.sampled_from(["any", "dense", "run", "all", "none", "mixed"]))
    everything = masks.dtype.type(np.iinfo(masks.dtype).max)
    if kind == "dense":
        masks |= draw_chunks(rng, fmt, *shape)
    elif kind == "run":
        low, high = sorted(rng.integers(0, 8 * fmt.chunk_bytes + 1, 2).tolist())
        masks[:] = masks.dtype.type((1 << high) - (1 << low))
    elif kind == "all":
        masks[:] = everything
    elif kind == "none":
        masks[:] = 0
    elif kind == "mixed":
        masks = np.where(rng.random(shape) < 0.5, everything, 0).astype(masks.dtype)
    values = draw_chunks(rng, fmt, *shape, fmt.values) & masks[..., None]
    if draw(st.booleans()):
        values[..., 1:] = values[..., :1]  # places left over repeat the first value
    n = draw(st.integers(0, 70))
    noise = draw_chunks(rng, fmt, n, fmt.chunks)
    cluster = rng.integers(0, fmt.clusters, n)
    code = rng.integers(0, draw(st.sampled_from([1, fmt.values])), (n, fmt.chunks))
    full = np.broadcast_to(values[cluster], (n, fmt.chunks, fmt.values))
    value = np.take_along_axis(full, code[..., None], 2)[..., 0]
    hit = rng.random((n, fmt.chunks)) < draw(st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
    chunks = np.where(hit, (noise & ~masks[cluster]) | value, noise).astype(masks.dtype)
    if draw(st.booleans()):
        chunks = chunks * 0 if draw(st.booleans()) else ~(chunks * 0)
    rows = torch.from_numpy(np.ascontiguousarray(chunks).view(np.uint8).reshape(n, fmt.row_bytes))
    return Case(build_layout(fmt, masks, values), Profile(fmt, masks, values), rows)


@given(case=cases(), seed=st.integers(0, 999))
def test_any_rows_with_any_profile_come_back(case: Case, seed: int) -> None:
    codec, rows = case.codec, case.rows
    n = len(rows)
    packed = codec.encode(rows)
    assert torch.equal(codec.decode(packed), rows)
    if n:
        rng = np.random.default_rng(seed)
        ids = torch.from_numpy(rng.integers(-n, n, 20))
        assert torch.equal(codec.decode(packed, ids), rows[ids])
        start, stop = sorted(rng.integers(0, n + 1, 2).tolist())
        assert torch.equal(codec.decode(packed, start=start, stop=stop), rows[start:stop])
    adopted = codec.adopt(n, packed.parts)
    assert adopted.facts == packed.facts


@given(case=cases())
def test_sizes_are_those_of_the_format_and_below_raw_or_the_row_is_raw(case: Case) -> None:
    codec, rows, fmt, p = case.codec, case.rows, case.layout.format, case.profile
    chunks = rows.numpy().view(f"<u{fmt.chunk_bytes}").reshape(len(rows), fmt.chunks)
    by_cluster = [
        model.row_words(chunks, p.masks[c], p.values[c], fmt.code_bits, fmt.grouped)
        for c in range(fmt.clusters)
    ]
    need = np.min(by_cluster, axis=0)
    packed = codec.encode(rows)
    lengths = model.unsigned(packed.parts["lengths"]).astype(np.int64)
    assert (lengths < fmt.row_words).all()
    assert lengths.tolist() == np.where(need < fmt.row_words, need, 0).tolist()
    stored = np.where(lengths == 0, fmt.row_words, lengths)
    assert len(packed.parts["words"]) == stored.sum() + PAD_WORDS
    starts = np.concatenate([[0], np.cumsum(stored)])
    assert packed.parts["bases"].tolist() == [*starts[:-1:BLOCK_ROWS], starts[-1]]
    expected = np.where(lengths == 0, fmt.row_bytes, 4 * lengths)
    assert codec.packed_bytes(rows).tolist() == expected.tolist()
    if fmt.clusters > 1:
        chosen = packed.parts["row_clusters"].numpy()
        assert (chosen[lengths > 0] == np.argmin(by_cluster, axis=0)[lengths > 0]).all()


@given(case=cases())
def test_nothing_is_read_or_written_beside_the_buffers(case: Case) -> None:
    """A page that may not be touched lies behind every buffer, then before it."""
    case.rows = case.rows[:9]
    if not len(case.rows):
        return
    for side in ("end", "start"):
        rows = guarded(case.rows, side=side)
        sound, _ = pack_on_cpu(replace(case, rows=rows))
        storage = RowStorage(
            guarded(sound.words, side=side),
            guarded(sound.bases, side=side),
            guarded(sound.lengths, side=side),
            guarded(sound.row_clusters, side=side) if len(sound.row_clusters) else
            sound.row_clusters,
        )  # fmt: skip
        out = guarded(torch.zeros_like(case.rows), side=side)
        assert cpu.decode_rows(storage, case.layout, None, 0, out) == -1
        assert torch.equal(out, case.rows)


def test_long_rows_come_back() -> None:
    """Rows whose lengths need more than a byte, and more than the sign bit of two bytes."""
    for row_bytes, dtype in ((1024, torch.uint8), (1028, torch.int16), (200_000, torch.int16)):
        case = make_case(Variant("decode", 4), n_rows=5, row_bytes=row_bytes)
        case.rows[0] = torch.from_numpy(case.profile.values[0, :, 0].view(np.uint8).copy())
        packed = case.codec.encode(case.rows)
        assert packed.parts["lengths"].dtype == dtype
        assert torch.equal(case.codec.decode(packed), case.rows)
        assert torch.equal(case.codec.decode(case.codec.adopt(5, packed.parts)), case.rows)


def test_lengths_of_both_halves_of_their_dtype_come_back() -> None:
    rng = np.random.default_rng(0)
    row_bytes = 4 * 65_000
    fmt = RowFormat(row_bytes, 4, 1, False, True)
    masks = np.array([[0xFF000000]], np.uint32)
    values = np.zeros((1, 1, 1), np.uint32)
    rows = rng.integers(0, 1 << 24, (3, 65_000), dtype=np.uint32)
    rows[1, : 65_000 * 3 // 4] |= 1 << 31  # one row of exceptions, still below raw
    raw = torch.from_numpy(rows.view(np.uint8))
    codec = bitslab.InvariantCodec(Profile(fmt, masks, values), (row_bytes,), torch.uint8)
    packed = codec.encode(raw)
    lengths = packed.parts["lengths"]
    assert lengths.dtype == torch.int16 and (lengths < 0).all()  # unsigned, whatever torch says
    assert torch.equal(codec.decode(codec.adopt(3, packed.parts)), raw)
    assert torch.equal(codec.decode(packed, torch.tensor([2, 0])), raw[[2, 0]])


# Counting and threads


@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(0, 70),
    row_bytes=st.integers(1, 200),
    width=st.sampled_from(WIDTHS),
)
def test_bits_are_counted_like_numpy_does(seed: int, n: int, row_bytes: int, width: int) -> None:
    row_bytes *= width
    rows = np.random.default_rng(seed).integers(0, 256, (n, row_bytes), dtype=np.uint8)
    expected = np.unpackbits(rows, axis=1, bitorder="little").sum(0, dtype=np.int64)
    counts = cpu.count_bits(torch.from_numpy(rows), width)
    assert (counts.dtype, counts.shape) == (torch.int64, (row_bytes // width, 8 * width))
    assert counts.flatten().tolist() == expected.tolist()


@pytest.fixture
def thread_count() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def large_case(variant: Variant, clusters: int) -> Case:
    """Return 15,000 rows, 5.9 MiB of them: work for five threads."""
    case = make_case(variant, clusters=clusters, n_rows=1000, row_bytes=416)
    return replace(case, rows=case.rows.repeat(15, 1))


@pytest.mark.drawn(4)
@pytest.mark.usefixtures("thread_count")
@pytest.mark.parametrize("clusters", [1, 3], ids=["one-profile", "three-clusters"])
@pytest.mark.parametrize("width", WIDTHS)
def test_results_do_not_depend_on_the_number_of_threads(width: int, clusters: int) -> None:
    variant = Variant("decode", width, 2, grouped=True)
    case = large_case(variant, clusters)
    ids = torch.from_numpy(np.random.default_rng(0).integers(-15_000, 15_000, 15_000))
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        packed = case.codec.encode(case.rows)
        assert torch.equal(case.codec.decode(packed), case.rows)
        assert torch.equal(case.codec.decode(packed, ids), case.rows[ids])
        results.append(
            [
                cpu.count_bits(case.rows, width),
                case.codec.packed_bytes(case.rows),
                *packed.parts.values(),
            ]
        )
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.usefixtures("thread_count")
@pytest.mark.parametrize("row", [0, 7000, 14_999])
def test_damage_is_reported_whichever_thread_finds_it(row: int) -> None:
    case = large_case(Variant("decode", 4), 1)
    packed = case.codec.encode(case.rows)
    lengths = packed.parts["lengths"].clone()
    lengths[row] = 103 if int(lengths[row]) != 103 else 102
    damaged = bitslab.PackedRows(15_000, {**packed.parts, "lengths": lengths}, packed.facts)
    found = set()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        out = torch.full_like(case.rows, 7)
        with pytest.raises(bitslab.CorruptedDataError, match=r"row \d+ is damaged") as caught:
            case.codec.decode(damaged, out=out)
        assert (out == 7).all()
        found.add(str(caught.value))
    assert len(found) == 1


# Damage

EXTREMES = [-(2**63), -(2**62), -1, 0, 1, 2**31, 2**32, 2**61, 2**62, 2**63 - 1]


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, str, int, int]:
    part = draw(st.sampled_from(["words", "bases", "lengths", "row_clusters"]))
    kind = draw(st.sampled_from(["bit", "byte", "entry", "truncated"]))
    return part, kind, draw(st.integers(0, 2**40)), draw(st.integers(0, 2**20))


def damage(
    parts: dict[str, torch.Tensor], part: str, kind: str, where: int, what: int
) -> dict[str, torch.Tensor]:
    """Flip a bit, set a byte or an entry, or cut off the end of a part."""
    if part not in parts or not parts[part].numel():
        part = "words"
    if not parts[part].numel():
        return parts  # an earlier hit cut everything off
    t = parts[part].clone()
    if kind == "truncated" and part == "words":
        t = t[: where % len(t)].clone()
    elif kind == "entry" and part == "bases":
        row_words = what % 200  # close to the ends of the range an end of a row may overflow
        t[where % len(t)] = max(-(2**63), EXTREMES[what % len(EXTREMES)] - row_words)
    else:
        data = t.view(torch.uint8)
        at = where % len(data)
        data[at] = what % 256 if kind == "byte" else int(data[at]) ^ 1 << what % 8
    return {**parts, part: t}


@cache
def small_case(variant: int, clusters: int) -> Case:
    width, k = WIDTHS[variant % 4], 1 + variant // 4 % 3
    chosen = Variant("decode", width, k, bool(variant & 1), bool(variant & 2))
    return make_case(chosen, clusters=clusters, n_rows=40, row_bytes=44 * width, seed=variant)


@cache
def sound_rows(variant: int, clusters: int) -> bitslab.PackedRows:
    case = small_case(variant, clusters)
    return case.codec.encode(case.rows)


Key = tuple[int, int]
KEYS: list[Key] = [(variant, clusters) for variant in range(24) for clusters in (1, 3)]


def read_damaged(key: Key, parts: dict[str, torch.Tensor]) -> tuple[bool, bool]:
    """Adopt and decode damaged parts; return whether each was refused."""
    codec, n = small_case(*key).codec, len(small_case(*key).rows)
    refused_to_adopt = False
    try:
        adopted = codec.adopt(n, parts)
    except bitslab.CorruptedDataError:
        refused_to_adopt = True
    else:
        codec.decode(adopted)
        codec.decode(adopted, torch.tensor([n - 1, 0]))
    packed = bitslab.PackedRows(n, parts, sound_rows(*key).facts)
    refused = False
    for ids in (None, torch.arange(-n, n), torch.tensor([n - 1])):
        out = torch.full((n if ids is None else len(ids), codec.row_bytes), 7, dtype=torch.uint8)
        try:
            codec.decode(packed, ids, out)
        except (bitslab.CorruptedDataError, bitslab.ArgumentError):
            refused = True
            assert (out == 7).all(), "a refused decode wrote to out"
    return refused_to_adopt, refused


@given(key=st.sampled_from(KEYS), hits=st.lists(damages(), min_size=1, max_size=4))
def test_damaged_parts_are_refused_or_decoded(
    key: Key, hits: list[tuple[str, str, int, int]]
) -> None:
    parts = dict(sound_rows(*key).parts)
    for hit in hits:
        parts = damage(parts, *hit)
    read_damaged(key, parts)


@given(
    key=st.sampled_from(KEYS),
    part=st.sampled_from(["bases", "lengths"]),
    where=st.integers(0, 2**20),
    bit=st.integers(0, 7),
)
def test_damaged_offsets_and_lengths_are_never_adopted(
    key: Key, part: str, where: int, bit: int
) -> None:
    parts = damage(dict(sound_rows(*key).parts), part, "bit", where, bit)
    with pytest.raises(bitslab.CorruptedDataError):
        small_case(*key).codec.adopt(len(small_case(*key).rows), parts)


@given(key=st.sampled_from(KEYS), cut=st.integers(1, 2**20))
def test_truncated_words_are_never_adopted_nor_decoded(key: Key, cut: int) -> None:
    sound = sound_rows(*key)
    words = sound.parts["words"]
    parts = {**sound.parts, "words": words[: len(words) - 1 - cut % len(words)].clone()}
    assert read_damaged(key, parts) == (True, True)


def raw_table() -> tuple[bitslab.InvariantCodec, bitslab.PackedRows]:
    """Rows that remain raw, so that no code of theirs can show that they are misplaced."""
    rows = torch.randint(0, 256, (64, 256), dtype=torch.uint8)
    codec = bitslab.InvariantCodec.fit(rows, chunk_bytes=4)
    packed = codec.encode(rows)
    assert not packed.parts["lengths"].any()
    return codec, packed


@pytest.mark.parametrize("back", [0, 1, 4, 40, 63])
def test_base_whose_row_would_end_beyond_64_bits_is_refused(back: int) -> None:
    codec, packed = raw_table()
    bases = packed.parts["bases"].clone()
    bases[0] = 2**63 - 1 - back
    damaged = bitslab.PackedRows(64, {**packed.parts, "bases": bases}, packed.facts)
    for ids in (None, torch.tensor([0])):
        with pytest.raises(bitslab.CorruptedDataError):
            codec.decode(damaged, ids)


@pytest.mark.parametrize("base", [0, 1, 2], ids=["first", "second", "end"])
def test_a_file_whose_bases_do_not_follow_its_lengths_is_refused(base: int, tmp_path: Path) -> None:
    codec, packed = raw_table()
    bases = packed.parts["bases"].clone()
    found = bases.numpy().tobytes()
    bitslab.CompressedTensor(codec, packed, torch.Size([64, 256])).save(tmp_path / "x.bitslab")
    data = (tmp_path / "x.bitslab").read_bytes()
    assert data.count(found) == 1
    bases[base] += 4
    (tmp_path / "x.bitslab").write_bytes(data.replace(found, bases.numpy().tobytes()))
    with pytest.raises(bitslab.CorruptedDataError):
        bitslab.load(tmp_path / "x.bitslab").decompress()
    damaged = bitslab.PackedRows(64, {**packed.parts, "bases": bases}, packed.facts)
    with pytest.raises(bitslab.CorruptedDataError, match="row (0|32) is damaged"):
        codec.decode(damaged)


@pytest.mark.parametrize("base", [-(2**63), -64, -1, 2**32, 2**62, 2**63 - 65])
def test_base_outside_the_words_is_refused(base: int) -> None:
    codec, packed = raw_table()
    bases = packed.parts["bases"].clone()
    bases[1] = base
    damaged = bitslab.PackedRows(64, {**packed.parts, "bases": bases}, packed.facts)
    first = torch.arange(32)
    assert torch.equal(codec.decode(damaged, first), codec.decode(packed, first))
    for kwargs in ({}, {"start": 32}, {"stop": 32}, {"indices": torch.tensor([32])}):
        with pytest.raises(bitslab.CorruptedDataError):
            codec.decode(damaged, **kwargs)


Edit = Callable[[torch.Tensor], Any]
EDITS: dict[str, Edit] = {
    "shorter": lambda t: t[:-1],
    "empty": lambda t: t[:0],
    "2-d": lambda t: t[:, None],
    "0-d": lambda t: t[0],
    "float": lambda t: t.float(),
    "other-width": lambda t: t.to(torch.int32 if t.element_size() == 8 else torch.int64),
    "none": lambda t: None,
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("part", ["words", "bases", "lengths", "row_clusters"])
def test_part_of_another_size_or_dtype_is_refused(part: str, edit: Edit) -> None:
    key = (8, 3)
    codec, n = small_case(*key).codec, len(small_case(*key).rows)
    parts = {**sound_rows(*key).parts, part: edit(sound_rows(*key).parts[part])}
    out = torch.full((n, codec.row_bytes), 7, dtype=torch.uint8)
    for ids in (None, torch.arange(n)):
        with pytest.raises(bitslab.BitslabError):
            codec.decode(bitslab.PackedRows(n, parts, sound_rows(*key).facts), ids, out)
    assert (out == 7).all()


@pytest.mark.parametrize("cluster", [3, 4, 255])
def test_cluster_that_is_not_there_is_refused(cluster: int) -> None:
    for key in ((0, 3), (9, 3), (18, 3)):
        lengths = sound_rows(*key).parts["lengths"]
        row_clusters = sound_rows(*key).parts["row_clusters"].clone()
        row_clusters[int(lengths.nonzero()[-1])] = cluster
        parts = {**sound_rows(*key).parts, "row_clusters": row_clusters}
        assert read_damaged(key, parts) == (True, True)


def test_packed_rows_of_another_profile_are_refused_or_decoded() -> None:
    for key, other in product(KEYS, KEYS):
        same_shape = small_case(*key).rows.shape == small_case(*other).rows.shape
        if same_shape and key[1] == other[1]:
            read_damaged(key, dict(sound_rows(*other).parts))


def read_damaged_in_guarded_memory(seed: int, count: int) -> None:
    """Read damaged parts beside pages that may not be touched; run in a process of its own."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        key = KEYS[rng.integers(len(KEYS))]
        parts = dict(sound_rows(*key).parts)
        for _ in range(rng.integers(1, 4)):
            part = str(rng.choice(list(parts)))
            kind = str(rng.choice(["bit", "byte", "entry", "truncated"]))
            parts = damage(parts, part, kind, int(rng.integers(2**40)), int(rng.integers(2**20)))
        side: Literal["end", "start"] = "end" if rng.random() < 0.5 else "start"
        parts = {
            name: guarded(part, side=side) if part.numel() else part for name, part in parts.items()
        }
        read_damaged(key, parts)
    print("read", count)


@pytest.mark.parametrize("seed", [0, 1])
def test_damaged_parts_never_crash_the_process(seed: int) -> None:
    code = (
        "from tests.engine.kernels.test_cpu import read_damaged_in_guarded_memory as read; "
        f"read({seed}, {BATCH})"
    )
    result = run_forked(["-c", code], cwd=ROOT, timeout_s=120)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout == f"read {BATCH}\n"


SHORT_CLUSTERS = """
from tests.engine.kernels.test_cpu import guarded, small_case, sound_rows
import bitslab
case, sound = small_case(8, 3), sound_rows(8, 3)
short = guarded(sound.parts["row_clusters"][:0].clone()), guarded(sound.parts["row_clusters"][:1])
for row_clusters in short:
    parts = {**sound.parts, "row_clusters": row_clusters}
    try:
        case.codec.decode(bitslab.PackedRows(len(case.rows), parts, sound.facts))
    except bitslab.BitslabError:
        print("refused")
"""


def test_too_few_row_clusters_are_not_read_beyond_their_end() -> None:
    result = run_forked(["-c", SHORT_CLUSTERS], cwd=ROOT, timeout_s=120)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split() == ["refused", "refused"]
