"""Files that the command packs and unpacks on a GPU: the same bytes as on the CPU."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import bitslab
from bitslab import cli
from bitslab.engine.transfer import StreamLane
from bitslab.report import pack_file, tensor_rows, unpack_file
from tests.helpers import packable, random_bits, same_bits

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool,
)  # fmt: skip


def run(*arguments: str | Path) -> int:
    return cli.main([str(a) for a in arguments])


def every_kind() -> dict[str, torch.Tensor]:
    """Make tensors of many dtypes and shapes, of several pieces each."""
    tensors = {f"wide.{dtype}": packable(dtype, (900, 256)) for dtype in DTYPES}
    tensors |= {f"odd.{dtype}": packable(dtype, (301, 131)) for dtype in DTYPES}
    tensors |= {f"random.{dtype}": random_bits(dtype, (5000,)) for dtype in DTYPES}
    tensors |= {
        "narrow": packable(torch.float32, (50_003, 3)),
        "long-rows": packable(torch.bfloat16, (40, 30_000)),
        "sparse": torch.where(torch.rand(900, 700) < 0.01, torch.rand(900, 700), 0),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
    }
    for i, scale in enumerate((0.01, 0.02, 0.3)):
        tensors[f"layer.{i}"] = (torch.randn(2000, 512) * scale).bfloat16()
    return tensors


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut small tensors into many pieces, and have all of them on the GPU."""
    monkeypatch.setattr(tensor_rows, "PIECE_BYTES", 100_000)
    monkeypatch.setattr(pack_file, "PIECE_BYTES", 100_000)
    monkeypatch.setattr(pack_file, "LEAST_DEVICE_BYTES", 0)
    monkeypatch.setattr(unpack_file, "LEAST_DEVICE_BYTES", 0)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Record the streams that are made."""
    made: list[torch.device] = []
    init = StreamLane.__init__

    def counted(self: StreamLane, device: torch.device) -> None:
        made.append(device)
        init(self, device)

    monkeypatch.setattr(StreamLane, "__init__", counted)
    return made


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "in.safetensors"
    torch.manual_seed(0)
    safetensors.torch.save_file(every_kind(), path, {"format": "pt"})
    yield path
    bitslab.raise_pending_errors()


@pytest.mark.parametrize(
    "options", [(), ("--clusters", "4"), ("--codec", "ibp"), ("--codec", "raw")], ids=str
)
def test_gpu_and_cpu_write_and_read_the_same_bytes(
    options: tuple[str, ...], source: Path, tmp_path: Path, links: list[torch.device]
) -> None:
    for device in ("cpu", "cuda"):
        packed = tmp_path / f"{device}.bitslab"
        assert run("compress", source, packed, "--device", device, "--verify", *options) == 0
        assert bool(links) == (device == "cuda" and "raw" not in options)
    assert (tmp_path / "cpu.bitslab").read_bytes() == (tmp_path / "cuda.bitslab").read_bytes()
    for device in ("cpu", "cuda", "cuda:0", "auto"):
        out = tmp_path / f"{device}.safetensors"
        assert run("decompress", packed, out, "--device", device, "--verify") == 0
    written = {(tmp_path / f"{d}.safetensors").read_bytes() for d in ("cpu", "cuda", "cuda:0")}
    assert len(written) == 1
    original = safetensors.torch.load_file(source)
    for name, t in safetensors.torch.load_file(out).items():
        assert same_bits(t, original[name]), name


def test_auto_takes_the_gpu(source: Path, tmp_path: Path, links: list[torch.device]) -> None:
    assert run("compress", source, tmp_path / "x.bitslab") == 0
    assert links
    links.clear()
    assert run("decompress", tmp_path / "x.bitslab", tmp_path / "x.pt") == 0
    assert links


@pytest.mark.parametrize("extension", ["pt", "npz"])
def test_other_formats_come_from_the_gpu(extension: str, tmp_path: Path) -> None:
    known = {name: t for name, t in every_kind().items() if t.dtype in (torch.float32, torch.int32)}
    arrays: dict[str, Any] = {name: t.numpy() for name, t in known.items()}
    np.savez(tmp_path / "in.npz", **arrays)
    packed, out = tmp_path / "x.bitslab", tmp_path / f"out.{extension}"
    assert run("compress", tmp_path / "in.npz", packed, "--device", "cuda", "--verify") == 0
    assert run("decompress", packed, out, "--device", "cuda", "--verify") == 0
    with np.load(tmp_path / "in.npz") as original:
        assert sorted(original.files) == sorted(known)
    assert sorted(bitslab.load_file(packed)) == sorted(known)


def test_pieces_of_full_size_are_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command does it, with several pieces under way in each thread."""
    for module in (tensor_rows, pack_file):
        monkeypatch.setattr(module, "PIECE_BYTES", 16 << 20)
    tensors = {str(i): (torch.randn(12_000, 4096) * 0.02).bfloat16() for i in range(3)}
    safetensors.torch.save_file(tensors, tmp_path / "in.safetensors")
    for device in ("cuda", "cpu"):
        packed = tmp_path / f"{device}.bitslab"
        assert run("compress", tmp_path / "in.safetensors", packed, "--device", device) == 0
    assert (tmp_path / "cpu.bitslab").read_bytes() == (tmp_path / "cuda.bitslab").read_bytes()
    out = tmp_path / "out.safetensors"
    assert run("decompress", packed, out, "--device", "cuda") == 0
    for name, t in safetensors.torch.load_file(out).items():
        assert torch.equal(t.view(torch.int16), tensors[name].view(torch.int16))


def test_codec_without_kernels_for_gpus_packs_on_the_cpu(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: list[torch.device]
) -> None:
    monkeypatch.setattr(bitslab.InvariantCodec, "device_types", ("cpu",))
    assert run("compress", source, tmp_path / "x.bitslab", "--device", "cuda", "--verify") == 0
    assert not links


def test_damaged_file_exits_with_1(source: Path, tmp_path: Path, capsys: Any) -> None:
    packed = tmp_path / "x.bitslab"
    assert run("compress", source, packed) == 0
    data = bytearray(packed.read_bytes())
    data[-20] ^= 1
    packed.write_bytes(data)
    capsys.readouterr()
    assert run("decompress", packed, tmp_path / "out.pt", "--device", "cuda") == 1
    assert "checksum" in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("place", [0.0, 0.5, 0.999], ids=str)
def test_damage_is_found_while_other_rows_are_unpacked(
    place: float, tmp_path: Path, capsys: Any
) -> None:
    """The error is that of `load_file`, whatever the GPU finds first; none is left behind."""
    packed, out = tmp_path / "x.bitslab", tmp_path / "out.safetensors"
    tensors = {f"layer.{i}": packable(torch.bfloat16, (4000, 512)) for i in range(3)}
    bitslab.save_file({name: bitslab.compress(t) for name, t in tensors.items()}, packed)
    data = bytearray(packed.read_bytes())
    first = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:first])
    begin, end = header["layer.1.words"]["data_offsets"]
    assert end - begin > 2 << 20
    data[first + begin + int(place * (end - begin))] ^= 0x55
    packed.write_bytes(data)
    with pytest.raises(bitslab.CorruptedDataError) as expected:
        bitslab.load_file(packed)
    capsys.readouterr()
    assert run("decompress", packed, out, "--device", "cuda") == 1
    assert capsys.readouterr().err == f"bitslab: error: {expected.value}\n"
    assert not out.exists()
    bitslab.raise_pending_errors()


def test_full_disk_is_reported_and_the_gpu_is_usable(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    calls = []
    pwritev = os.pwritev

    def failing(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) > 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", failing)
        assert run("compress", source, tmp_path / "x.bitslab", "--device", "cuda") == 2
    assert "No space left" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
    torch.cuda.synchronize()
    assert run("compress", source, tmp_path / "x.bitslab", "--device", "cuda", "--verify") == 0
