"""Files that the command packs piece by piece: the same bytes however it is done."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import bitslab
from bitslab import cli, container
from bitslab.container import StreamedFile
from bitslab.engine.codecs import InvariantCodec, PackedRows, PlanCache
from bitslab.engine.codecs.invariant import plan_cache, planner
from bitslab.engine.progress import Progress
from bitslab.errors import BitslabError
from bitslab.report import pack_file, tensor_rows
from bitslab.report.workers import Workers
from tests.helpers import packable, random_bits, same_bits

CPU = torch.device("cpu")


def run(*arguments: str | Path) -> int:
    return cli.main([str(a) for a in arguments])


def weights(rows: int, columns: int, scale: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * scale).bfloat16()


def some_tensors() -> dict[str, torch.Tensor]:
    """Make tensors that are packed, kept raw, narrow, short and empty."""
    return {
        "packed": weights(700, 256, 0.02),
        "alike": weights(900, 256, 0.05, 1),
        "float32": packable(torch.float32, (333, 130)),
        "narrow": packable(torch.float32, (5003, 3)),
        "bytes": packable(torch.int8, (400, 77)),
        "random": random_bits(torch.float32, (300, 64)),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
        "short": torch.arange(5),
    }


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the tensors of these tests into many pieces."""
    monkeypatch.setattr(tensor_rows, "PIECE_BYTES", 40_000)
    monkeypatch.setattr(pack_file, "PIECE_BYTES", 40_000)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    safetensors.torch.save_file(some_tensors(), path, {"format": "pt"})
    return path


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("options", [(), ("--clusters", "4"), ("--codec", "ibp")], ids=str)
def test_bytes_depend_neither_on_threads_nor_on_pieces(
    options: tuple[str, ...], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    options = (*options, "--device", "cpu")
    for threads, piece_bytes in ((1, 16 << 20), (1, 40_000), (5, 40_000), (3, 9_000)):
        for module in (tensor_rows, pack_file):
            monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "get_num_threads", lambda n=threads: n)
            assert run("compress", source, tmp_path / "x.bitslab", "--force", *options) == 0
            out = tmp_path / "out.safetensors"
            assert run("decompress", tmp_path / "x.bitslab", out, "--force", "--verify") == 0
        written.append((tmp_path / "x.bitslab").read_bytes())
        for name, t in safetensors.torch.load_file(out).items():
            assert same_bits(t, some_tensors()[name]), name
    assert len(set(written)) == 1


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("codec", ["auto", "raw"])
def test_parts_are_those_of_compress(codec: str, source: Path, tmp_path: Path) -> None:
    assert run("compress", source, tmp_path / "x.bitslab", "--codec", codec, "--verify") == 0
    found = bitslab.load_file(tmp_path / "x.bitslab")
    assert list(found) == sorted(some_tensors())
    options: dict[str, Any] = {"plans": PlanCache()} if codec == "auto" else {}
    for name, t in sorted(some_tensors().items()):
        expected = bitslab.compress(t, codec, **options)
        loaded = found[name]
        assert isinstance(expected, bitslab.CompressedTensor)
        assert isinstance(loaded, bitslab.CompressedTensor)
        assert found[name].codec == expected.codec and found[name].shape == expected.shape
        assert loaded.packed.parts.keys() == expected.packed.parts.keys()
        for part, data in expected.packed.parts.items():
            assert same_bits(loaded.packed.parts[part], data), (name, part)


def test_tensors_that_are_not_row_major_are_restored(tmp_path: Path) -> None:
    tensors = {
        "transposed": weights(300, 90, 0.02).T,
        "strided": weights(300, 90, 0.02)[::2, ::3],
        "expanded": weights(1, 90, 0.02).expand(50, -1),
    }
    torch.save(tensors, tmp_path / "in.pt")
    assert run("compress", tmp_path / "in.pt", tmp_path / "x.bitslab", "--verify") == 0
    assert run("decompress", tmp_path / "x.bitslab", tmp_path / "out.pt", "--verify") == 0
    back = torch.load(tmp_path / "out.pt")
    assert all(same_bits(back[name], t) for name, t in tensors.items())


def test_progress_ends_where_all_is_done(tmp_path: Path, small_pieces: None) -> None:
    tensors = some_tensors()
    total = pack_file.PASSES * sum(t.nbytes for t in tensors.values())
    for codec in ("auto", "raw"):
        reported: list[int] = []
        with Workers(CPU, 2) as workers:
            with Progress("x", total, functools.partial(note, reported)) as progress:
                named = lambda name: contextlib.nullcontext()  # noqa: E731
                packer = pack_file.FilePacker(tensors, codec, {}, workers, named, progress)
                packer.measure()
                (tmp_path / "x").touch()
                packer.write(tmp_path / "x", None)
        assert reported == sorted(reported) and reported[-1] == total and len(reported) > 20


def note(reported: list[int], done: int, total: int | None) -> None:
    reported.append(done)


# Plans


def chosen(tensors: list[torch.Tensor], threads: int = 2) -> tuple[list[Any], int]:
    """Return the codecs, and how many candidates were searched in full."""
    searches = 0
    search = planner.candidates

    def counted(*arguments: Any) -> Any:
        nonlocal searches
        searches += 1
        return search(*arguments)

    named = {f"{i:02}": t for i, t in enumerate(tensors)}
    total = pack_file.PASSES * sum(t.nbytes for t in tensors)
    with pytest.MonkeyPatch.context() as patched, Workers(CPU, threads) as workers:
        patched.setattr(plan_cache, "candidates", counted)
        with Progress("x", total, functools.partial(note, [])) as progress:
            naming = lambda name: contextlib.nullcontext()  # noqa: E731
            packer = pack_file.FilePacker(named, "ibp", {}, workers, naming, progress)
            packer.measure()
    return [packer.outlines[name].codec for name in named], searches


def packed_bytes(codec: Any, t: torch.Tensor) -> int:
    return int(codec.packed_bytes(t).sum())


def test_tensors_that_differ_in_scale_share_a_plan() -> None:
    tensors = [weights(3000, 256, scale, i) for i, scale in enumerate((0.01, 0.4, 7.0))]
    codecs, searches = chosen(tensors)
    assert searches == 1
    for t, codec in zip(tensors, codecs, strict=True):
        assert packed_bytes(codec, t) <= 1.003 * packed_bytes(InvariantCodec.fit(t), t)


def test_tensor_of_another_kind_is_planned_by_itself() -> None:
    """Its exponents pack as the other's do; but its low bits are all 0."""
    one = torch.randn(2000, 256, generator=torch.Generator().manual_seed(0))
    other = weights(2000, 256, 1.0, 1).float()
    tensors = [one, other, 3 * one, 9 * one, weights(2000, 256, 2.0, 2).float()]
    codecs, searches = chosen(tensors)
    assert searches == 2  # one of each kind
    assert packed_bytes(codecs[0], other) > 1.5 * packed_bytes(codecs[1], other)
    for t, codec in zip(tensors, codecs, strict=True):
        assert packed_bytes(codec, t) <= 1.003 * packed_bytes(InvariantCodec.fit(t), t)


def test_plans_do_not_depend_on_the_number_of_threads() -> None:
    tensors = [weights(2100, 256, 0.02 * i + 0.01, i) for i in range(4)]
    tensors += [weights(2100, 256, 0.3, 9) * (torch.rand(2100, 256) < 0.2) for _ in range(2)]
    one, searches = chosen(tensors, 1)
    several, _ = chosen(tensors, 6)
    assert one == several and searches == 3  # the sparse ones come at once


# What goes wrong


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_error_in_a_thread_names_the_output_and_leaves_nothing(
    command: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert run("compress", source, tmp_path / "x.bitslab") == 0
    capsys.readouterr()
    before = sorted(tmp_path.iterdir())
    calls = []
    pwritev = os.pwritev

    def failing(*arguments: Any) -> int:
        calls.append(threading.current_thread().name)
        if len(calls) > 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(*arguments)

    monkeypatch.setattr(os, "pwritev", failing)
    given = source if command == "compress" else tmp_path / "x.bitslab"
    out = tmp_path / "out.safetensors"
    assert run(command, given, out) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "No space left on device; free some space" in line and f"'{out}'" in line
    assert sorted(tmp_path.iterdir()) == before
    assert "bitslab-files" in calls
    assert not [t for t in threading.enumerate() if t.name == "bitslab-files"]


def test_unknown_device_is_refused(source: Path, tmp_path: Path, capsys: Any) -> None:
    for device, message in (("tpu", "names no device"), ("cuda:99", "torch sees")):
        assert run("compress", source, tmp_path / "x.bitslab", "--device", device) == 2
        said = capsys.readouterr().err
        assert "--device: " in said and message in said
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_file_of_pieces_must_be_whole(tmp_path: Path) -> None:
    t = weights(64, 64, 0.02)
    packed = PackedRows(64, {"rows": torch.empty(64, 64, dtype=t.dtype, device="meta")})
    outline = pack_file.Outline(bitslab.RawCodec((64,), t.dtype), packed, t.shape)
    path = tmp_path / "x.bitslab"
    path.touch()
    data = t.view(torch.uint8).view(-1)
    for pieces, message in (
        (((0, 4096),), "4096 of 8192 bytes are written"),
        (((0, 4096), (2048, 8192)), "byte 2048 follows byte 4096"),
    ):
        file = StreamedFile(path, {"a": outline})
        for begin, end in pieces:
            file.write("a", "rows", begin, data[begin:end])
        with pytest.raises(BitslabError, match=message):
            file.finish()
        file.close()
    file = StreamedFile(path, {"a": outline}, {"note": "x"})
    for begin in (6144, 0, 2048, 4096):
        file.write("a", "rows", begin, data[begin : begin + 2048])
    file.finish()
    assert same_bits(bitslab.load(path).decompress(), t)
    assert container.read_tensors(path, bitslab.CompressedTensor)[1] == {"note": "x"}


def test_workers_wait_for_what_is_under_way_and_drop_the_rest() -> None:
    begun: list[int] = []
    ended: list[int] = []
    second, gate = threading.Event(), threading.Event()

    def work(i: int) -> int:
        begun.append(i)
        if i == 0:
            assert second.wait(10)
            raise BitslabError("first")
        second.set()
        gate.wait(10)
        ended.append(i)
        return i

    with Workers(CPU, 2) as workers:
        threading.Timer(0.1, gate.set).start()
        with pytest.raises(BitslabError, match="first"):
            workers.map(work, range(1000))
        assert sorted([0, *ended]) == sorted(begun) and 1 in ended and len(begun) < 1000
        assert workers.map(lambda i: i * i, range(5)) == [0, 1, 4, 9, 16]
