"""Rates of decoding: measured once, kept on disk, whatever becomes of the file."""

from __future__ import annotations

import json

import pytest
import torch

from bitslab import ArgumentError, InvariantCodec, RawCodec
from bitslab.engine.advisor import cache as cache_module
from bitslab.engine.advisor import decode_bytes_per_s
from bitslab.engine.advisor import decoding as decoding_module
from tests.forked import run_forked_together

ROWS = (torch.randn(300, 64, generator=torch.Generator().manual_seed(0)) / 8).bfloat16()
CODEC = InvariantCodec.fit(ROWS)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BITSLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(decoding_module, "_known", {})
    return tmp_path / "cache"


@pytest.fixture
def measurements(monkeypatch):
    """Count the measurements."""
    real, calls = decoding_module._measure, []

    def counted(codec, device, sample):
        calls.append(codec.describe())
        return real(codec, device, sample)

    monkeypatch.setattr(decoding_module, "_measure", counted)
    return calls


def forget():
    decoding_module._known.clear()


def only_file(folder):
    (path,) = folder.iterdir()
    return path


def test_measured_once_and_kept_for_the_next_process(folder, measurements):
    assert decode_bytes_per_s(CODEC, "cpu") is None
    rate = decode_bytes_per_s(CODEC, "cpu", ROWS)
    assert rate is not None and 1e6 < rate < 1e13
    forget()  # as in another process
    assert decode_bytes_per_s(CODEC, "cpu") == rate
    assert decode_bytes_per_s(CODEC, torch.device("cpu"), ROWS) == rate
    assert len(measurements) == 1
    kept = json.loads(only_file(folder).read_text())
    assert kept["bytes_per_s"] == rate
    assert CODEC.describe() in kept["key"] and "128 B" in kept["key"]


def test_another_plan_row_size_or_version_is_another_figure(folder, measurements, monkeypatch):
    wide = torch.cat([ROWS, ROWS], 1)
    decode_bytes_per_s(CODEC, "cpu", ROWS)
    decode_bytes_per_s(InvariantCodec.fit(wide), "cpu", wide)
    decode_bytes_per_s(RawCodec((64,), torch.bfloat16), "cpu", ROWS)
    monkeypatch.setattr(decoding_module, "__version__", "0.0.0")
    decode_bytes_per_s(CODEC, "cpu", ROWS)
    assert len(measurements) == 4
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 4096,
        b"null",
        b"[]",
        b'{"bytes_per_s": 1e9}',
        b'{"key": "another", "bytes_per_s": 1e9}',
        "wrong-rate",
        "not-a-number",
        "cut",
    ],
)
def test_a_damaged_file_is_measured_again(folder, measurements, damaged):
    rate = decode_bytes_per_s(CODEC, "cpu", ROWS)
    path = only_file(folder)
    whole = path.read_bytes()
    by_name = {
        "wrong-rate": whole.replace(str(rate).encode(), b"-1.0"),
        "not-a-number": whole.replace(str(rate).encode(), b"NaN"),
        "cut": whole[:-1],
    }
    path.write_bytes(by_name[damaged] if isinstance(damaged, str) else damaged)
    assert path.read_bytes() != whole
    forget()
    assert decode_bytes_per_s(CODEC, "cpu") is None
    again = decode_bytes_per_s(CODEC, "cpu", ROWS)
    assert len(measurements) == 2
    assert json.loads(only_file(folder).read_text())["bytes_per_s"] == again


@pytest.mark.parametrize("place", ["a-file", "below-a-file", "a-folder-in-its-place"])
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch, measurements, place):
    file = tmp_path / "file"
    file.touch()
    where = {"a-file": file, "below-a-file": file / "x", "a-folder-in-its-place": tmp_path / "d"}
    monkeypatch.setenv("BITSLAB_CACHE", str(where[place]))
    target = None
    if place == "a-folder-in-its-place":
        key = decoding_module._key(CODEC, torch.device("cpu"))
        target = cache_module.cache_file("decode", key)
        assert target is not None
        (target / "full").mkdir(parents=True)
    rate = decode_bytes_per_s(CODEC, "cpu", ROWS)
    assert decode_bytes_per_s(CODEC, "cpu") == rate, "this process remembers all the same"
    assert len(measurements) == 1
    if target is not None:  # and nothing half-written beside it
        assert [path.name for path in (tmp_path / "d").iterdir()] == [target.name]


def test_processes_at_once(folder):
    code = """
import torch
from bitslab import RawCodec
from bitslab.engine.advisor import decode_bytes_per_s
for columns in range(1, 13):
    codec = RawCodec((columns,), torch.float32)
    assert decode_bytes_per_s(codec, "cpu", torch.ones(9, columns)) > 0
"""
    for done in run_forked_together([["-c", code]] * 2, timeout_s=120):
        assert done.returncode == 0, done.stderr
    assert len(list(folder.iterdir())) == 12
    for path in folder.iterdir():
        assert json.loads(path.read_text())["bytes_per_s"] > 0
    codec = RawCodec((12,), torch.float32)
    assert decode_bytes_per_s(codec, "cpu") is not None


def test_the_folder(tmp_path, monkeypatch):
    assert cache_module.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("BITSLAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_module.cache_folder() == tmp_path / "xdg" / "bitslab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_module.cache_folder() == tmp_path / ".cache" / "bitslab"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG rules say to ignore it
    assert cache_module.cache_folder() == tmp_path / ".cache" / "bitslab"


def test_no_home_no_cache(monkeypatch, measurements):
    monkeypatch.delenv("BITSLAB_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert cache_module.cache_folder() is None
    assert decode_bytes_per_s(CODEC, "cpu", ROWS) == decode_bytes_per_s(CODEC, "cpu")
    assert len(measurements) == 1


def test_a_sample_without_rows():
    with pytest.raises(ArgumentError, match=r"sample: shape \[0, 64\], expected rows with bytes"):
        decode_bytes_per_s(CODEC, "cpu", ROWS[:0])
