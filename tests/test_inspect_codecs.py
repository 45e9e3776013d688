"""`bitslab inspect --codecs`: what every codec of whole tensors makes of a tensor."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import bitslab
from bitslab.cli import main
from bitslab.errors import MissingExtraError
from bitslab.report import CodecInspector, Link, codec_rows
from tests.quick_measuring import measure_quickly

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    measure_quickly(monkeypatch, tmp_path_factory.getbasetemp() / "inspect-cache")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("inspect") / "saved.pt"
    tensors = {
        "relu": torch.randn(100, 200).relu(),
        "mask [0]": torch.rand(100, 200) > 0.5,
        "none": torch.empty(0, 3),
    }
    torch.save(tensors, path)
    return path


def inspected(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main(["inspect", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_json_has_every_codec_of_each_tensor(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(inspected(capsys, file, "--codecs", "--json", "--link-gbps", "10"))
    assert (content["device"], content["link_gbps"]) == ("cpu", 10)
    relu, mask, none = content["tensors"]
    assert relu["file"] == str(file) and relu["raw_bytes"] == 80_000 and relu["dtype"] == "float32"
    assert 0.4 < relu["zeros"] < 0.6 and relu["cross_ms"] == pytest.approx(0.008)
    rows = {row["codec"]: row for row in relu["codecs"]}
    every = {"csr", "ibp-blob", "lz4", "rle", "vlz", "vlzq", "zfp", "zvc", "zvc+ibp"}
    # One whose package is missing is left out.
    assert set(rows) == (every if find_spec("lz4") else every - {"lz4"})
    ratios = [row["ratio"] for row in relu["codecs"]]
    assert ratios == sorted(ratios, reverse=True)
    zvc = rows["zvc"]
    blob = bitslab.compress(torch.load(file)["relu"], "zvc")
    assert zvc["packed_bytes"] == blob.nbytes and zvc["ratio"] == pytest.approx(blob.ratio)
    assert zvc["lossless"] and not rows["zfp"]["lossless"] and rows["zfp"]["plan"] == "zfp 32"
    assert all(row["encode_ms"] > 0 and row["decode_ms"] > 0 for row in relu["codecs"])
    assert zvc["outside"] == "" and zvc["cross_ms"] == pytest.approx(blob.nbytes / 1e7)
    # Of bools neither their size nor their share was measured.
    assert "elements of 1 B (2)" in {r["codec"]: r for r in mask["codecs"]}["zvc"]["outside"]
    assert "zfp" not in {row["codec"] for row in mask["codecs"]}
    assert all(row["encode_ms"] is None and row["ratio"] == 1 for row in none["codecs"])


def test_the_table(
    file: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table = inspected(capsys, file, "--codecs")
    for text in ("mask [0]", "100 x 200", "zvc+ibp", "zfp 32, lossy", "ms on cpu", "at 55 GB/s"):
        assert text in table
    assert main(["compress", str(file), str(tmp_path / "saved.bitslab")]) == 0
    capsys.readouterr()
    assert inspected(capsys, tmp_path / "saved.bitslab", "--codecs") == table


def test_a_codec_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*args: Any, **more: Any) -> Any:
        raise MissingExtraError("on purpose")

    monkeypatch.setattr("bitslab.engine.codecs.lz4.Lz4Codec.encode", encode)
    inspector = CodecInspector(torch.device("cpu"), Link())
    report = inspector.inspect("t", torch.ones(64, 64))
    assert {row.codec for row in report.codecs} >= {"zvc", "csr"}
    assert "lz4" not in {row.codec for row in report.codecs}


def test_codecs_of_rows_are_not_tried() -> None:
    assert {cls.name for cls in codec_rows.blob_codecs()} & {"ibp", "raw", "tiles"} == set()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--codec", "zvc"], "--codec"),
        (["--clusters", "4"], "--clusters"),
        (["--plot", "x.png"], "--plot"),
    ],
)
def test_what_it_cannot_go_with(
    file: Path, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(file), "--codecs", *arguments]) == 2
    assert f"--codecs: tries every codec; leave out {named}" in capsys.readouterr().err
