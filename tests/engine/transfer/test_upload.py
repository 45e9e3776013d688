"""Rows brought to a GPU piece by piece: their bytes, and what waits for what."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitslab import InvariantCodec
from bitslab.engine.transfer import RowUploader, upload
from bitslab.engine.transfer.lanes import wait_on_host
from bitslab.errors import ArgumentError
from tests.streams import recorded

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    monkeypatch.setattr(upload, "COPY_BYTES", 32 * 64)


def rows_of(n: int, row_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(256, (n, row_bytes), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 100, 640, 1000])
@pytest.mark.parametrize("row_bytes", [64, 1000])
def test_pieces_are_all_rows_in_order(n, row_bytes, monkeypatch):
    monkeypatch.setattr(upload, "PIECE_BYTES", 64 * 64)
    rows = rows_of(n, row_bytes)
    with recorded(monkeypatch):
        uploader = RowUploader(CPU)
        for _ in range(2):  # the second time in buffers that are there
            pieces = [piece.clone() for piece in uploader.pieces(rows)]
            assert torch.equal(torch.cat(pieces), rows)
            assert all(piece.shape[0] % 32 == 0 for piece in pieces[:-1])
            assert max(piece.numel() for piece in pieces) <= max(64 * 64, 32 * row_bytes)


def test_a_piece_crosses_while_the_one_before_is_used(monkeypatch):
    monkeypatch.setattr(upload, "PIECE_BYTES", 32 * 64)
    with recorded(monkeypatch) as record:
        uploader = RowUploader(CPU)
        for _ in uploader.pieces(rows_of(32 * 6, 64)):
            record.work("uses")
        steps = record.take()
    copies = [step for step in steps if step[0] == "stream0" and "keeps" not in step[1]]
    expected = []
    for n in range(6):
        if n >= upload.RING:  # the piece that was in this buffer on the GPU is used
            expected.append(("stream0", f"after current:{n - upload.RING + 1}"))
        expected.append(("stream0", "copies 2048"))
    assert copies == expected
    uses = [step for step in steps if step[0] == "current" and "keeps" not in step[1]]
    assert uses == [
        step
        for n in range(6)
        for step in [("current", f"after stream0:{n + 1}"), ("current", "uses")]
    ]
    # The host fills a page-locked buffer again when it has crossed, and waits for nothing else.
    waits = [what for who, what in steps if who == "host"]
    assert waits == [f"after stream0:{n + 1}" for n in range(6 - upload.STAGED)]
    order = [what for who, what in steps if what == "uses" or (who, what) in expected]
    order = [what for what in order if not what.startswith("after")]
    for n in range(6):  # when a piece is used, the next one is on its way
        use = [k for k, what in enumerate(order) if what == "uses"][n]
        assert order[:use].count("copies 2048") == min(6, n + upload.RING)


@pytest.mark.parametrize("nbytes", [1, 2048, 2049, 10 * 2048, 100_001])
def test_bytes_are_copied_through_few_page_locked_buffers(nbytes, monkeypatch):
    source = rows_of(1, nbytes)[0]
    with recorded(monkeypatch) as record:
        uploader = RowUploader(CPU)
        record.work("makes the target")
        made: Any = record.current.record_event()
        target = torch.zeros_like(source)
        crossed: Any = uploader.copy(source, target, made)
        assert torch.equal(target, source)
        steps = record.take()
    copies = -(-nbytes // 2048)
    sizes = [2048] * (copies - 1) + [nbytes - 2048 * (copies - 1)]
    assert [step for step in steps if step[0] == "stream0"] == [
        ("stream0", "after current:1"),
        ("stream0", f"keeps {nbytes}"),
        *(("stream0", f"copies {size}") for size in sizes),
    ]
    # The host waits for nothing but the copy that left a buffer.
    waits = [what for who, what in steps if who == "host"]
    assert waits == [f"after stream0:{n + 1}" for n in range(copies - upload.STAGED)]
    assert crossed.recorded == ("stream0", copies)


def test_a_piece_of_several_copies_is_used_behind_all_of_them(monkeypatch):
    monkeypatch.setattr(upload, "PIECE_BYTES", 5 * 32 * 64)
    rows = rows_of(32 * 12, 64)
    with recorded(monkeypatch) as record:
        uploader = RowUploader(CPU)
        record.take()
        found = []
        for piece in uploader.pieces(rows):
            record.work("uses")
            found.append(piece.clone())
        steps = record.take()
    assert torch.equal(torch.cat(found), rows)
    assert [step[1] for step in steps if step[0] == "current" and "keeps" not in step[1]] == [
        *("after stream0:5", "uses", "after stream0:10", "uses", "after stream0:12", "uses")
    ]


def test_rows_after_an_error_of_who_uses_them(monkeypatch):
    monkeypatch.setattr(upload, "PIECE_BYTES", 32 * 64)
    rows = rows_of(500, 64)
    with recorded(monkeypatch):
        uploader = RowUploader(CPU)
        pieces = uploader.pieces(rows)
        with pytest.raises(RuntimeError, match="here"):
            for n, _ in enumerate(pieces):
                if n == 3:
                    raise RuntimeError("here")
        pieces.close()
        assert torch.equal(torch.cat([piece.clone() for piece in uploader.pieces(rows)]), rows)


@pytest.mark.parametrize("clusters", [1, 4])
@pytest.mark.parametrize("n", [1, 32, 50, 1000])
def test_pieces_are_packed_as_all_rows_at_once(clusters, n):
    rows = (torch.randn(n, 96) * torch.logspace(-2, 2, n)[:, None]).bfloat16()
    codec = InvariantCodec.fit(rows, clusters=clusters)
    expected, data = codec.encode(rows), rows.view(torch.uint8)
    for step in (32, 64, 1024):
        packed = codec.encode_pieces(data[at : at + step] for at in range(0, n, step))
        assert packed.n_rows == n and packed.facts == expected.facts
        assert list(packed.parts) == list(expected.parts)
        for name, part in expected.parts.items():
            assert packed.parts[name].dtype == part.dtype
            assert torch.equal(packed.parts[name], part), name


def test_pieces_that_cut_a_block_are_refused():
    rows = torch.randn(100, 96).bfloat16()
    codec, data = InvariantCodec.fit(rows), rows.view(torch.uint8)
    with pytest.raises(ArgumentError, match="pieces: 31 rows in piece 1 of several"):
        codec.encode_pieces([data[:32], data[32:63], data[63:]])
    with pytest.raises(ArgumentError, match="pieces: there are none"):
        codec.encode_pieces([])


@pytest.mark.gpu
def test_bytes_reach_memory_that_is_made_late():
    device = torch.device("cuda", 0)
    uploader, source = RowUploader(device), rows_of(30, 100_000).reshape(-1)
    for copy_bytes in (1 << 20, 77_777):
        upload.COPY_BYTES = copy_bytes  # the fixture restores it
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(20_000_000)
            target = torch.zeros(source.shape, dtype=torch.uint8, device=device)
            made = torch.cuda.current_stream().record_event()
        wait_on_host(uploader.copy(source, target, made))
        assert torch.equal(target.cpu(), source)


@pytest.mark.gpu
@pytest.mark.parametrize("slow", ["nobody", "user", "copies"])
def test_rows_reach_a_gpu_whoever_is_slow(slow, monkeypatch):
    monkeypatch.setattr(upload, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(upload, "COPY_BYTES", 300_000)
    rows = rows_of(20_000, 1000)
    uploader = RowUploader(torch.device("cuda", 0))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            pieces = []
            for piece in uploader.pieces(rows):
                if slow == "copies":
                    with uploader._copies.on():
                        torch.cuda._sleep(5_000_000)
                if slow == "user":
                    torch.cuda._sleep(5_000_000)
                pieces.append(piece.clone())
            side.synchronize()
            assert torch.equal(torch.cat(pieces).cpu(), rows)
