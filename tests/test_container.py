"""The file form: round trips, and refusal of damaged and foreign files."""

from __future__ import annotations

import functools
import json
import os
import stat
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import bitslab
from bitslab import container
from bitslab.compressed import read_file
from bitslab.engine.codecs import registry
from bitslab.engine.files.new_file import replacing
from tests.forked import run_forked
from tests.helpers import DTYPES, dtype_id, packable, random_bits, same_bits

Edit = Callable[[dict[str, Any]], None]


def small() -> dict[str, torch.Tensor]:
    """Make tensors that give a file with packed rows, raw rows and rows kept as bytes."""
    return {
        "packed": packable(torch.bfloat16, (60, 32)),
        "raw": random_bits(torch.int16, (7,)),
        "odd": random_bits(torch.complex128, (2,)),
    }


@functools.cache
def small_file() -> bytes:
    cts = {name: bitslab.compress(t) for name, t in small().items()}
    assert [ct.codec.name for ct in cts.values()] == ["ibp", "raw", "raw"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        bitslab.save_file(cts, path, {"format": "pt"})
        return path.read_bytes()


def write_small(path: Path) -> dict[str, torch.Tensor]:
    path.write_bytes(small_file())
    return small()


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Split a safetensors file into its header and its data."""
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def file_of(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def rewrite(path: Path, edit: Edit) -> None:
    """Change what bitslab wrote about a file, with the checksum made good."""
    header, data = header_of(path.read_bytes())
    entries = header["__metadata__"]
    content = json.loads(entries[container.ENTRY])
    edit(content)
    entries[container.ENTRY] = json.dumps(content)
    del entries[container.CHECKSUM_ENTRY]
    entries[container.CHECKSUM_ENTRY] = container._checksum_of(entries)
    path.write_bytes(file_of(header, data))


# What is written comes back


@pytest.mark.parametrize("codec", ["auto", "ibp", "raw"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_every_dtype_and_shape_comes_back(dtype: torch.dtype, codec: str, tmp_path: Path) -> None:
    tensors = {
        str(shape): make(dtype, shape)
        for make in (packable, random_bits)
        for shape in ((), (5,), (1003,), (0, 4), (5, 0, 3), (1, 9), (40, 67), (2, 3, 5, 16))
    }
    path = tmp_path / "all.safetensors"
    bitslab.save_file({k: bitslab.compress(t, codec) for k, t in tensors.items()}, path)
    loaded = bitslab.load_file(path)
    assert list(loaded) == list(tensors)
    for name, t in tensors.items():
        assert loaded[name].shape == t.shape
        assert same_bits(loaded[name].decompress(), t)


def test_one_tensor_is_saved_and_loaded(tmp_path: Path) -> None:
    t = packable(torch.float32, (200, 64))
    ct = bitslab.compress(t)
    ct.save(tmp_path / "one.safetensors")
    loaded = bitslab.load(tmp_path / "one.safetensors")
    assert loaded.codec == ct.codec
    assert loaded.nbytes == ct.nbytes
    assert repr(loaded) == repr(ct)
    assert same_bits(loaded.decompress(), t)
    assert same_bits(loaded[[5, -1]], t[[5, -1]])
    bitslab.load(str(tmp_path / "one.safetensors"))  # a str will do


def test_clusters_come_back(tmp_path: Path) -> None:
    t = torch.cat([torch.rand(300, 64) * 1e-9, torch.rand(300, 64) * 1e9]).to(torch.bfloat16)
    ct = bitslab.compress(t, "ibp", clusters=4, code_bits=1, uniform=True)
    assert isinstance(ct.codec, bitslab.InvariantCodec) and ct.codec.clusters > 1
    ct.save(tmp_path / "x.safetensors")
    assert same_bits(bitslab.load(tmp_path / "x.safetensors").decompress(), t)


def test_long_configuration_is_kept_outside_the_header(tmp_path: Path) -> None:
    t = packable(torch.float32, (50, 4000))
    ct = bitslab.compress(t, "ibp", uniform=False)
    ct.save(tmp_path / "x.safetensors")
    header, _ = header_of((tmp_path / "x.safetensors").read_bytes())
    assert "tensor.config" in header
    assert len(json.dumps(header["__metadata__"])) < container.LONG_CONFIG_BYTES
    loaded = bitslab.load(tmp_path / "x.safetensors")
    assert loaded.codec == ct.codec
    assert same_bits(loaded.decompress(), t)


def test_file_is_safetensors_and_keeps_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_small(path)
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {
            "packed.words", "packed.bases", "packed.lengths", "raw.rows", "odd.rows"
        }  # fmt: skip
        assert file.metadata()["format"] == "pt"
        content = json.loads(file.metadata()["bitslab"])
    assert content["version"] == container.ROWS_VERSION
    record = content["tensors"]["packed"]
    assert record["shape"] == [60, 32]
    assert record["codec"] == "ibp"
    assert record["n_rows"] == 60
    assert record["parts"]["words"].keys() == {"dtype", "shape", "crc32"}
    assert read_file(path).metadata == {"format": "pt"}


def test_raw_tensors_are_plain_entries(tmp_path: Path) -> None:
    t = random_bits(torch.int32, (20, 30))
    bitslab.save_file({"x": bitslab.compress(t)}, tmp_path / "x.safetensors")
    assert same_bits(safetensors.torch.load_file(tmp_path / "x.safetensors")["x.rows"], t)


def test_no_tensors_are_a_file_too(tmp_path: Path) -> None:
    bitslab.save_file({}, tmp_path / "x.safetensors")
    assert bitslab.load_file(tmp_path / "x.safetensors") == {}


def test_tensors_that_share_memory_are_saved_each(tmp_path: Path) -> None:
    t = packable(torch.float32, (50, 64))
    ct = bitslab.compress(t)
    bitslab.save_file({"a": ct, "b": ct}, tmp_path / "x.safetensors")
    loaded = bitslab.load_file(tmp_path / "x.safetensors")
    assert all(same_bits(loaded[name].decompress(), t) for name in "ab")


@pytest.mark.parametrize("name", ["", "a.b.c", "ünïcode \n \"'\\", "packed.words", "__metadata__"])
def test_any_name_comes_back(name: str, tmp_path: Path) -> None:
    t = packable(torch.float32, (50, 64))
    cts = {name: bitslab.compress(t), "packed": bitslab.compress(t)}
    bitslab.save_file(cts, tmp_path / "x.safetensors")
    loaded = bitslab.load_file(tmp_path / "x.safetensors")
    assert list(loaded) == [name, "packed"]
    assert same_bits(loaded[name].decompress(), t)


def test_loaded_rows_are_mapped_not_copied(tmp_path: Path) -> None:
    t = packable(torch.float32, (2000, 256))
    path = tmp_path / "x.safetensors"
    bitslab.compress(t).save(path)
    loaded = bitslab.load(path)
    assert isinstance(loaded, bitslab.CompressedTensor)
    words = loaded.packed.parts["words"]
    maps = Path("/proc/self/maps").read_text().splitlines()
    inside = [
        line.split()[-1]
        for line in maps
        for low, high in [[int(x, 16) for x in line.split()[0].split("-")]]
        if low <= words.data_ptr() < high
    ]
    assert inside == [str(path)]


def test_loaded_file_can_be_saved_over_itself(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = write_small(path)
    loaded = bitslab.load_file(path)
    bitslab.save_file(loaded, path)
    for name, t in tensors.items():
        assert same_bits(loaded[name].decompress(), t)
        assert same_bits(bitslab.load_file(path)[name].decompress(), t)


# Arguments


def test_load_wants_one_tensor(tmp_path: Path) -> None:
    write_small(tmp_path / "x.safetensors")
    with pytest.raises(bitslab.ArgumentError, match="holds 3 tensors; load_file"):
        bitslab.load(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({3: bitslab.compress(torch.ones(3))}, None, "the name 3 is no str"),
        ({"a": torch.ones(3)}, None, "'a' is a Tensor, expected a CompressedTensor"),
        ({}, {"bitslab": "x"}, "'bitslab' is taken"),
        ({}, {"bitslab_crc32": "x"}, "'bitslab_crc32' is taken"),
        ({}, {"a": 3}, "keys and values must be str"),
        ({}, {3: "a"}, "keys and values must be str"),
    ],
    ids=["name", "tensor", "reserved", "reserved-crc32", "metadata-value", "metadata-key"],
)
def test_what_cannot_be_saved_is_refused(
    tensors: Any, metadata: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises((bitslab.ArgumentError, bitslab.ArgumentTypeError), match=message):
        bitslab.save_file(tensors, tmp_path / "x.safetensors", metadata)
    assert list(tmp_path.iterdir()) == []


def test_parts_with_dots_are_refused(tmp_path: Path) -> None:
    t = torch.ones(3, 4)
    packed = bitslab.PackedRows(3, {"a.b": t})
    ct = bitslab.CompressedTensor(bitslab.RawCodec((4,), t.dtype), packed, t.shape)
    with pytest.raises(bitslab.ArgumentError, match="a part's name has no dot"):
        ct.save(tmp_path / "x.safetensors")


def test_header_longer_than_readers_accept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(bitslab.ArgumentError, match="header would have"):
        bitslab.save_file({}, tmp_path / "x.safetensors", {"a": "x" * 100_000_000})
    assert list(tmp_path.iterdir()) == []


# Writing is atomic


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), replacing(path) as temporary:
        temporary.write_bytes(b"new")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """A limit on the size of files simulates the full disk."""
    code = (
        "import resource, signal, sys, torch, bitslab\n"
        "ct = bitslab.compress(torch.randn(1000, 64))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "try:\n    ct.save(sys.argv[1])\n"
        "except OSError as error:\n    print('OSError', error)\n"
    )
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    done = run_forked(["-c", code, path])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("OSError") and "cannot be written" in done.stdout
    assert str(path) in done.stdout and "ulimit -f" in done.stdout
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"


def test_readers_see_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    cts = [bitslab.compress(torch.full((2000, 64), float(i))) for i in range(2)]
    cts[0].save(path)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for ct in cts:
                ct.save(path)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(50):
            assert bitslab.load(path).decompress().unique().numel() == 1
    finally:
        stop.set()
        writer.join()


def test_mode_of_a_new_file_is_that_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    bitslab.save_file({}, tmp_path / "x.safetensors")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_mode_of_an_old_file_is_kept_and_a_link_is_followed(tmp_path: Path) -> None:
    path, link = tmp_path / "x.safetensors", tmp_path / "link.safetensors"
    path.touch()
    path.chmod(0o640)
    link.symlink_to(path)
    bitslab.save_file({}, link)
    assert link.is_symlink()
    assert bitslab.load_file(path) == {}
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("path", ["missing/x.safetensors", "."], ids=["no-folder", "a-folder"])
def test_path_that_cannot_be_written_is_an_oserror(path: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing|directory"):
        bitslab.save_file({}, tmp_path / path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["missing.safetensors", "."], ids=["no-file", "a-folder"])
def test_path_that_cannot_be_read_is_an_oserror(path: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file|Is a directory") as caught:
        bitslab.load(tmp_path / path)
    assert str(tmp_path) in str(caught.value)


# Damage


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF], ids=hex)
def test_altered_byte_is_refused_or_changes_nothing(flip: int, tmp_path: Path) -> None:
    """Every byte of the header, and every seventh of the data."""
    path = tmp_path / "x.safetensors"
    tensors = write_small(path)
    data = path.read_bytes()
    header_bytes = 8 + struct.unpack("<Q", data[:8])[0]
    refused = 0
    for position in [*range(header_bytes), *range(header_bytes, len(data), 7)]:
        damaged = bytearray(data)
        damaged[position] ^= flip
        path.write_bytes(damaged)
        try:
            file = read_file(path)
        except bitslab.CorruptedDataError as error:
            assert str(path) in str(error)
            refused += 1
            continue
        assert position < header_bytes, f"byte {position} of the data was altered unnoticed"
        assert file.metadata == {"format": "pt"}
        assert list(file.tensors) == list(tensors)
        for name, t in tensors.items():
            assert same_bits(file.tensors[name].decompress(), t), f"byte {position}"
    assert refused > 0.95 * header_bytes


def test_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_small(path)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(bitslab.CorruptedDataError, match="truncated"):
            bitslab.load_file(path)


def test_appended_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_small(path)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(bitslab.CorruptedDataError):
        bitslab.load_file(path)


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x93NUMPY" + bytes(100), b"PK\3\4" + bytes(100)], ids=repr
)
def test_file_that_is_no_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(bitslab.CorruptedDataError, match=r"x\.safetensors: no safetensors file"):
        bitslab.load(tmp_path / "x.safetensors")
    assert not container.is_compressed(tmp_path / "x.safetensors")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}], ids=["none", "other"])
def test_foreign_safetensors_file_is_refused(metadata: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.ones(3)}, path, metadata)
    with pytest.raises(bitslab.CorruptedDataError, match=r"x\.safetensors: not written by bitslab"):
        bitslab.load(path)
    assert not container.is_compressed(path)


def test_newer_version_is_refused_by_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_small(path)
    rewrite(path, lambda content: content.update(version=7))
    with pytest.raises(bitslab.CorruptedDataError, match="version 7, .* reads up to version 2"):
        bitslab.load_file(path)


def packed_record(content: dict[str, Any]) -> dict[str, Any]:
    return content["tensors"]["packed"]  # type: ignore[no-any-return]


def put(*path: Any) -> Edit:
    """Return an edit of the record of a tensor: keys, then the value; None removes."""

    def edit(content: dict[str, Any]) -> None:
        *keys, last, value = path
        node = packed_record(content)
        for key in keys:
            node = node[key]
        if value is None:
            del node[last]
        else:
            node[last] = value

    return edit


CRAFTED: dict[str, tuple[Edit, str]] = {
    "no-version": (lambda c: c.pop("version"), "version is None"),
    "version-text": (lambda c: c.update(version="1"), "version is '1'"),
    "version-0": (lambda c: c.update(version=0), "lists no tensors"),
    "version-true": (lambda c: c.update(version=True), "version is True"),
    "no-tensors": (lambda c: c.pop("tensors"), "lists no tensors"),
    "record-list": (lambda c: c["tensors"].update(packed=[]), "expected an object"),
    "fewer-tensors": (lambda c: c["tensors"].pop("packed"), "belong to no tensor"),
    "more-tensors": (
        lambda c: c["tensors"].update(more=packed_record(c)),
        "tensor 'more': part '.*' is missing",
    ),
    "no-parts": (put("parts", None), "parts is None"),
    "part-list": (put("parts", "words", []), "expected an object"),
    "part-gone": (put("parts", "words", None), "has parts .*words"),
    "part-more": (put("parts", "more", {}), "'more' is missing"),
    "part-dtype": (put("parts", "words", "dtype", "int64"), "part 'words' is"),
    "part-dtype-unknown": (put("parts", "words", "dtype", "int12"), "'int12' is not a dtype"),
    "part-dtype-function": (put("parts", "words", "dtype", "load"), "'load' is not a dtype"),
    "part-shape": (put("parts", "words", "shape", [1]), "part 'words' is"),
    "part-shape-negative": (put("parts", "words", "shape", [-1]), "expected non-negative"),
    "part-shape-huge": (put("parts", "words", "shape", [1 << 62, 4]), "too large"),
    "part-crc": (put("parts", "words", "crc32", 0), "does not match its checksum"),
    "part-crc-text": (put("parts", "words", "crc32", "0"), "crc32 is '0'"),
    "unknown-codec": (put("codec", "zip"), "'zip' is not known; known are csr, ibp, ibp-blob"),
    "codec-number": (put("codec", 3), "codec is 3, expected str"),
    "other-codec": (put("codec", "raw"), "tensor 'packed'"),
    "unknown-dtype": (put("dtype", "float3"), "'float3' is not a dtype"),
    "other-dtype": (put("dtype", "float16"), "dtype is torch.float16, its codec's torch.bfloat16"),
    "config-gone": (put("config", None), "config is None"),
    "config-empty": (put("config", {}), "row_shape is None"),
    "config-dtype": (put("config", "dtype", "float32"), "do not fit the profile"),
    "config-rows": (put("config", "row_shape", [16]), "do not fit the profile"),
    "config-rows-text": (put("config", "row_shape", "32"), "row_shape is '32'"),
    "config-profile": (put("config", "profile", "masks", "AAAA"), "masks has 3 bytes"),
    "config-profile-list": (put("config", "profile", []), "tensor 'packed'"),
    "config-profile-text": (put("config", "profile", "x"), "profile is 'x'"),
    "raw-config-empty": (
        lambda c: c["tensors"]["raw"].update(config={}),
        "row_shape is None",
    ),
    "raw-config-rows": (
        lambda c: c["tensors"]["raw"]["config"].update(row_shape=["a", "b"]),
        "row_shape is",
    ),
    "raw-config-rows-negative": (
        lambda c: c["tensors"]["raw"]["config"].update(row_shape=[-1, -1]),
        "row_shape is",
    ),
    "n-rows": (put("n_rows", 59), "expected"),
    "n-rows-negative": (put("n_rows", -1), "n_rows is -1"),
    "n-rows-huge": (put("n_rows", 1 << 70), "expected"),
    "row-elements": (put("row_elements", 16), "row_elements is 16"),
    "shape-rows": (put("shape", [59, 32]), "makes 59 rows"),
    "shape-columns": (put("shape", [60, 31]), "do not fit a tensor of shape"),
    "shape-other": (put("shape", [30, 2, 32, 2]), "there are 60"),
    "shape-text": (put("shape", "60"), "shape is '60'"),
    "shape-float": (put("shape", [60.0, 32]), "expected non-negative integers"),
    "shape-huge": (put("shape", [1 << 62, 32]), "too large"),
}


@pytest.mark.parametrize(("edit", "message"), CRAFTED.values(), ids=CRAFTED.keys())
def test_crafted_description_is_refused(edit: Edit, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_small(path)
    rewrite(path, edit)
    with pytest.raises(bitslab.CorruptedDataError, match=message) as caught:
        bitslab.load_file(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_description_that_is_no_json_is_refused(tmp_path: Path) -> None:
    entries = {container.ENTRY: "{" * 100_000}
    entries[container.CHECKSUM_ENTRY] = container._checksum_of(entries)
    safetensors.torch.save_file({}, tmp_path / "x.safetensors", entries)
    with pytest.raises(bitslab.CorruptedDataError, match="is not JSON"):
        bitslab.load_file(tmp_path / "x.safetensors")


def test_codec_of_a_package_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = dict(registry._classes)
    monkeypatch.setattr(registry, "_classes", classes)
    bitslab.register_codec(type("Gone", (bitslab.RawCodec,), {"name": "gone"}))
    path = tmp_path / "x.safetensors"
    bitslab.compress(torch.ones(3, 4), "gone").save(path)
    assert bitslab.load(path).codec.name == "gone"
    del classes["gone"]
    with pytest.raises(bitslab.CorruptedDataError, match="'gone' is not known; known are"):
        bitslab.load(path)


def test_entries_in_another_order_are_read(tmp_path: Path) -> None:
    """Another writer may put parts where wide elements are not aligned."""
    path = tmp_path / "x.safetensors"
    t = random_bits(torch.float64, (40,))
    bitslab.save_file({"x": bitslab.compress(t, "raw")}, path)
    header, data = header_of(path.read_bytes())
    header["x.rows"]["data_offsets"] = [0, len(data)]
    for pad in range(8):
        text = json.dumps(header).encode() + b" " * pad
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        try:
            loaded = bitslab.load(path)
        except bitslab.CorruptedDataError:
            continue  # a safetensors that insists on alignment
        assert same_bits(loaded.decompress(), t)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_random_damage_is_refused_or_changes_nothing(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "x.safetensors"
    tensors = write_small(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        stop = data.draw(st.integers(start, min(len(content), start + 40)))
        content[start:stop] = data.draw(st.binary(max_size=40))
    path.write_bytes(content)
    try:
        loaded = bitslab.load_file(path)
    except bitslab.CorruptedDataError as error:
        assert str(path) in str(error)
        return
    for name, t in tensors.items():
        assert same_bits(loaded[name].decompress(), t)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_random_description_is_refused_or_changes_nothing(
    tmp_path: Path, data: st.DataObject
) -> None:
    """Any value at one position of the description, with the checksum made good."""
    path = tmp_path / "x.safetensors"
    tensors = write_small(path)

    def edit(content: dict[str, Any]) -> None:
        node: Any = content
        while True:
            key = data.draw(st.sampled_from(sorted(node)))
            if not isinstance(node[key], dict) or not node[key] or data.draw(st.booleans()):
                node[key] = data.draw(JSON)
                return
            node = node[key]

    rewrite(path, edit)
    try:
        loaded = bitslab.load_file(path)
    except bitslab.CorruptedDataError as error:
        assert str(path) in str(error)
        return
    for name, t in tensors.items():
        assert same_bits(loaded[name].decompress(), t)


def test_file_without_read_permission_is_an_oserror(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_small(path)
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads everything; then it must simply work
        assert len(bitslab.load_file(path)) == 3
    else:
        with pytest.raises(PermissionError):
            bitslab.load_file(path)
