"""Coded tiles on a real GPU: the codec and histories; kernels alone run under tests/simt too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bitslab
from bitslab.engine.codecs import TileCodec
from bitslab.engine.codecs.base import rows_as_bytes
from bitslab.engine.codecs.quantized import fit_lossless
from bitslab.engine.kernels.format import MAX_SLABS, TableStorage
from bitslab.kvcache import HistoryReader, PackedHistory
from tests import gpu
from tests.engine.codecs.contract import parts_of
from tests.engine.codecs.lossy_contract import hostile, usual
from tests.engine.codecs.test_tiles import TilePlans
from tests.helpers import dtype_id, same_bits

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

GPU = torch.device("cuda", 0)
OPTIONS: dict[str, dict[str, Any]] = {
    "channel": {"granularity": "channel", "scale": 0.7, "heads": 2, "rows_per_head": 3},
    "token-level": {"granularity": "token_level", "token_pairs": True, "heads": 3},
    "block-range": {"granularity": "block_range", "scale": 0.05},
    "channel-range": {"granularity": "channel_range", "scale": 0.1, "coder": "fixed"},
    "token-range": {"granularity": "token_range", "scale": 0.2, "code_bits": 8},
    "lossless": {"granularity": "lossless", "token_pairs": True, "heads": 2, "code_bits": 8},
}
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
by_dtype = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id
)


def assert_packed_as_on_the_cpu(codec: TileCodec, rows: torch.Tensor) -> None:
    """Compare what one pass on the GPU packs with what the CPU measures and encodes."""
    data = rows_as_bytes(rows, codec.row_bytes).contiguous()
    expected = codec.kernels(torch.device("cpu")).pack_rows(data)
    packed = codec.kernels(GPU).pack_rows(data.to(GPU))
    assert torch.equal(packed.lengths.cpu(), expected.lengths)
    assert torch.equal(packed.bases.cpu(), expected.bases)
    assert torch.equal(packed.words[: len(expected.words)].cpu(), expected.words)


@pytest.mark.parametrize("slots_bytes", [1, 1 << 20, 5 << 20])
@pytest.mark.parametrize("heads", [1, 3])
def test_tiles_are_packed_in_parts(
    slots_bytes: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bitslab.engine.kernels.cuda.quantized.SLOTS_BYTES", slots_bytes)
    rows = usual(torch.bfloat16, (32, 64), n=1500)
    rows[7::50] = torch.randn_like(rows[7::50].float()).mul(1e4).bfloat16()  # kept raw
    codec = TileCodec.fit(rows[:6], granularity="channel", scale=0.7, heads=heads)
    assert_packed_as_on_the_cpu(codec, rows)
    codec = TileCodec.fit(rows[:6], granularity="token_level", token_pairs=True, heads=heads)
    assert_packed_as_on_the_cpu(codec, rows)
    codec = TileCodec.fit(rows[:6], granularity="lossless", heads=heads)
    assert_packed_as_on_the_cpu(codec, rows)
    bitslab.raise_pending_errors()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_lossless_plans_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    sample = usual(dtype, (3, 192, 64), n=2)
    sample[0, 1, 5, 5:9] = float("nan")
    found = [
        fit_lossless(x, tile_tokens=64, token_pairs=True, rows_per_head=2)
        for x in (sample, sample.to(GPU))
    ]
    for name in ("order", "block_class", "radius", "lengths"):
        assert (getattr(found[0], name) == getattr(found[1], name)).all()


def test_packing_does_not_wait_for_the_gpu() -> None:
    rows = usual(torch.bfloat16, (32, 64), n=96).to(GPU)
    codec = TileCodec.fit(rows.cpu())
    kernels = codec.kernels(GPU)
    data = rows_as_bytes(rows, codec.row_bytes)
    expected = kernels.pack_rows(data)
    with gpu.waiting_raises():
        packed = kernels.pack_rows(data)
    n_words = int(expected.bases[-1])
    assert torch.equal(packed.words[:n_words], expected.words[:n_words])


@by_options
@by_dtype
@pytest.mark.parametrize("shape", [(32, 48), (64, 128)], ids=str)
def test_bytes_and_values_are_those_of_the_cpu(
    dtype: torch.dtype, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    if options["granularity"] == "lossless" and dtype == torch.float32:
        dtype = torch.bfloat16  # there are none of float32
    every = hostile(dtype, shape)
    codec = TileCodec.fit(every["usual"], **options)
    for name, rows in every.items():
        expected = codec.encode(rows)
        packed = codec.encode(rows.to(GPU))
        assert parts_of(packed.to("cpu")) == parts_of(expected), name
        decoded = codec.decode(expected)
        assert same_bits(codec.decode(packed).cpu(), decoded), name
        ids = torch.tensor([3, -1, 0, 3])
        assert same_bits(codec.decode(packed, ids.to(GPU)).cpu(), decoded[ids]), name
        assert torch.equal(codec.packed_bytes(rows.to(GPU)).cpu(), codec.packed_bytes(rows))
        assert_packed_as_on_the_cpu(codec, rows)
        finite = rows.isfinite()
        far = (decoded.double() - rows.double()).abs()[finite]
        assert bool((far <= codec.bounds(rows.to(GPU)).cpu()[finite]).all())
    bitslab.raise_pending_errors()


@pytest.mark.parametrize("via", ["copy-engine", "zero-copy"])
def test_heads_are_right_where_rows_cross_in_pieces(
    via: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a piece have their numbers in the whole, modulo those of all heads."""
    monkeypatch.setattr("bitslab.engine.transfer.across.PIECE_BYTES", 1 << 14)
    spread = torch.tensor([0.1, 1.0, 30.0])
    rows = usual(torch.bfloat16, (16, 32), n=900)
    rows *= spread.repeat(300)[:, None, None].bfloat16()
    codec = TileCodec.fit(rows, granularity="channel", scale=0.5, heads=3)
    packed = codec.encode(rows)
    decoded = codec.decode(packed)
    pinned = packed.pin_memory()
    for start, stop in ((0, 900), (100, 899), (31, 33), (97, 98)):
        out = torch.empty(stop - start, 16, 32, dtype=rows.dtype, device=GPU)
        codec.decode(pinned, out=out, start=start, stop=stop, via=via)
        assert same_bits(out.cpu(), decoded[start:stop]), (start, stop)
    bitslab.raise_pending_errors()


def test_gathers_count_and_prepared_ones_decode() -> None:
    rows = usual(torch.bfloat16, (32, 64), n=96)
    codec = TileCodec.fit(rows, heads=3)
    packed = codec.encode(rows.to(GPU))
    decoded = codec.decode(packed).cpu()
    parts = packed.parts
    kernels = codec.kernels(GPU)
    for words in (parts["words"], parts["words"].cpu().pin_memory()):
        table = TableStorage(96, words, parts["bases"], parts["lengths"])
        ids = torch.tensor([5, 95, 0, 5], device=GPU)
        counters = torch.zeros(2 * (MAX_SLABS + 1), dtype=torch.int64, device=GPU)
        for dtype in (torch.int32, torch.int64):
            out = torch.zeros(4, codec.row_bytes, dtype=torch.uint8, device=GPU)
            kernels.gather(table, ids.to(dtype), out, counters=counters, sm_budget=2)
            assert same_bits(out.cpu().view(rows.dtype).view(4, 32, 64), decoded[ids.cpu()])
            again = torch.zeros_like(out)
            kernels.prepare_gather(table, ids.to(dtype), again)()
            assert same_bits(again, out)
        words_read = int(parts["lengths"].cpu().view(torch.uint16).long()[ids.cpu()].sum())
        by_place = counters.cpu().view(2, -1)[:, MAX_SLABS].tolist()
        assert by_place == [8, 2 * words_read]
    bitslab.raise_pending_errors()


def test_damaged_tiles_are_reported() -> None:
    rows = usual(torch.bfloat16, (32, 64), n=96)
    codec = TileCodec.fit(rows)
    packed = codec.encode(rows)
    at, _, _ = codec.kernels(torch.device("cpu")).locate(
        TableStorage(96, packed.parts["words"], packed.parts["bases"], packed.parts["lengths"]),
        torch.tensor([40]),
    )
    packed.parts["words"][at[0]] = -1
    codec.decode(packed.to(GPU))
    with pytest.raises(bitslab.CorruptedDataError, match="40"):
        bitslab.raise_pending_errors()


@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
def test_a_history_on_a_gpu_holds_what_the_cpu_holds(
    offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dim, block = 32, 32
    monkeypatch.setattr("bitslab.kvcache.packing.ROW_BYTES", block * dim * 2)
    tokens = usual(torch.bfloat16, (300, dim), n=6).view(2, 3, 300, dim)
    found = []
    for device in (torch.device("cpu"), GPU):
        reader = HistoryReader(device, offload=offload, sm_budget=None)
        plans: Any = TilePlans(dim, granularity="block_range", scale=0.05)
        history = PackedHistory(
            reader.new_words(), plans, "k", window=8, block_tokens=block, at_once=True
        )
        for part in tokens.to(device).split([200, 40, 60], dim=2):
            history.append(part)
        assert [type(s.codec) for s in history.segments] == [TileCodec]
        found.append(history.decode().cpu())
    assert same_bits(*found)
    bitslab.raise_pending_errors()
