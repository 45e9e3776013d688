"""Whole tensors by `compress`: round trips, files, the command, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import bitslab
from bitslab import cli
from bitslab.engine.codecs import BlobCodec, ZvcCodec
from tests.helpers import same_bits

LOSSLESS = ["csr", "ibp-blob", "lz4", "rle", "vlz", "zvc", "zvc+ibp"]


def activation() -> torch.Tensor:
    return torch.randn(40, 70, generator=torch.Generator().manual_seed(1)).relu()


@pytest.mark.parametrize("codec", LOSSLESS)
def test_every_codec_comes_back_from_a_file(codec: str, tmp_path: Path) -> None:
    t = activation()
    cb = bitslab.compress(t, codec)
    assert isinstance(cb, bitslab.CompressedBlob) and cb.codec.name == codec
    assert (cb.shape, cb.dtype, cb.raw_nbytes, len(cb)) == (t.shape, t.dtype, t.nbytes, 40)
    assert cb.nbytes == cb.blob.nbytes + cb.codec.profile_bytes
    assert cb.ratio == t.nbytes / cb.nbytes
    assert same_bits(bitslab.decompress(cb), t)
    out = torch.empty(70, 40).t()
    assert cb.to("cpu").decompress(out) is out and same_bits(out, t)
    cb.save(tmp_path / "x.bitslab")
    loaded = bitslab.load(tmp_path / "x.bitslab")
    assert loaded.codec == cb.codec and loaded.nbytes == cb.nbytes
    assert same_bits(loaded.decompress(), t)
    with pytest.raises(bitslab.ArgumentTypeError, match="index: codec .*whole tensors"):
        loaded[0]


def test_lossy_ones_are_taken_by_name_with_their_options(tmp_path: Path) -> None:
    t = activation()
    cb = bitslab.compress(t, "zfp", block_bits=32)
    assert isinstance(cb.codec, BlobCodec) and 3.5 < cb.ratio <= 4
    cb.save(tmp_path / "x.bitslab")
    decoded = bitslab.load(tmp_path / "x.bitslab").decompress()
    assert same_bits(decoded, cb.decompress())
    assert bool(((decoded - t).abs() <= cb.codec.bounds(t)).all())


def test_files_of_rows_alone_keep_their_version(tmp_path: Path) -> None:
    t = activation()
    rows, whole = bitslab.compress(t), bitslab.compress(t, ZvcCodec())
    alone: dict[str, Any] = {"a": rows}
    for tensors, version in ((alone, 1), (alone | {"b": whole}, 2)):
        bitslab.save_file(tensors, tmp_path / "x.bitslab")
        with safe_open(tmp_path / "x.bitslab", framework="pt") as file:
            assert json.loads(file.metadata()["bitslab"])["version"] == version
    found = bitslab.load_file(tmp_path / "x.bitslab")
    assert all(same_bits(ct.decompress(), t) for ct in found.values())


@pytest.mark.parametrize("shape", [(), (0, 3)])
def test_odd_shapes(shape: tuple[int, ...], tmp_path: Path) -> None:
    t = torch.ones(shape)
    cb = bitslab.compress(t, "zvc")
    cb.save(tmp_path / "x.bitslab")
    assert same_bits(bitslab.load(tmp_path / "x.bitslab").decompress(), t)
    assert bool(cb)
    if not shape:
        with pytest.raises(bitslab.ArgumentTypeError, match="0-d"):
            len(cb)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.bitslab"
    bitslab.compress(activation(), "zvc").save(path)
    sound = path.read_bytes()
    for place in (len(sound) - 1, len(sound) // 2):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 4]) + sound[place + 1 :])
        with pytest.raises(bitslab.CorruptedDataError, match="checksum"):
            bitslab.load(path)
    path.write_bytes(sound[:-1])
    with pytest.raises(bitslab.CorruptedDataError):
        bitslab.load(path)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    t = activation()
    bad: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (ZvcCodec(), {"clusters": 2}, bitslab.ArgumentTypeError, "options: .'clusters'"),
        (ZvcCodec, {}, bitslab.ArgumentTypeError, "codec: expected a name or a codec"),
        ("zvc", {"clusters": 2}, TypeError, "clusters"),
    ]
    for codec, options, error, message in bad:
        with pytest.raises(error, match=message):
            bitslab.compress(t, codec, **options)
    fitted = bitslab.compress(t, "ibp-blob")
    with pytest.raises(bitslab.ArgumentTypeError, match="float64 is not one that codec"):
        bitslab.compress(t.double(), fitted.codec)
    fitted.save(tmp_path / "x.bitslab")
    with pytest.raises(bitslab.ArgumentError, match="packs whole tensors, a table needs"):
        bitslab.CompressedTable.from_file(tmp_path / "x.bitslab")


def test_the_command_packs_inspects_and_restores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, packed, back = (str(tmp_path / n) for n in ("a.safetensors", "a.bitslab", "b.npz"))
    t = activation()
    safetensors.torch.save_file({"t": t, "empty": t[:0]}, plain)
    assert cli.main(["compress", plain, packed, "--codec", "zvc+ibp", "--verify"]) == 0
    capsys.readouterr()
    assert cli.main(["inspect", packed, "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)["tensors"]
    assert {r["plan"].split()[0] for r in reports} == {"zvc+ibp"}
    assert cli.main(["decompress", packed, back, "--verify"]) == 0
    capsys.readouterr()
    assert cli.main(["compress", plain, packed, "--force", "--codec", "zfp", "--verify"]) == 2
    assert "zfp' is lossy" in capsys.readouterr().err
