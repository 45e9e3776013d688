"""Files of the `bitslab` command: full disks, odd input, interruptions, old files."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import bitslab
from bitslab import cli
from bitslab.engine.files import new_file
from bitslab.engine.kernels.format import RowStorage
from bitslab.engine.kernels.row_kernels import LayoutKernels
from bitslab.report import commands, files
from tests.helpers import same_bits


def run(*arguments: str | Path) -> int:
    return cli.main([str(a) for a in arguments])


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the text on stderr, which must be one line."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bitslab: error: ")
    return str(line)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    path = tmp_path / "in.bitslab"
    bitslab.save_file({"a": bitslab.compress(torch.arange(5000.0))}, path)
    return path


# Disks


@pytest.mark.parametrize("extension", ["pt", "npz", "npy", "safetensors"])
def test_disk_that_takes_no_more_is_reported_in_one_line_that_names_the_output(
    extension: str, packed: Path, tmp_path: Path, capsys: Any
) -> None:
    """A limit on the size of files simulates the full disk."""
    out = tmp_path / f"out.{extension}"
    assert run("decompress", packed, out) == 0  # what is compiled goes to files too
    out.write_bytes(b"old")
    capsys.readouterr()
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
        status = run("decompress", packed, out, "--force")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert status == 2
    line = one_line(capsys)
    assert "cannot be written: File too large" in line and f"'{out}'" in line
    assert out.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2


def test_output_folder_that_cannot_be_written_to_is_reported_before_the_work(
    packed: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def read_only(*arguments: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(arguments[0]))

    monkeypatch.setattr(new_file, "FileIO", read_only)
    monkeypatch.setattr(commands, "read_file", None)  # is not called
    out = tmp_path / "out.pt"
    assert run("decompress", packed, out) == 2
    line = one_line(capsys)
    assert str(out) in line and "tmp'" not in line and "choose a folder" in line


# Input


def npz(path: Path, member: str, header: dict[str, Any], data: bytes) -> None:
    """Write an archive with one array that claims to be what `header` says."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, header)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, file.getvalue() + data)


CLAIM = {"descr": "<f8", "fortran_order": False, "shape": (10**12,)}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (CLAIM, "a: claims 8000000000000 bytes of numbers, 16 are there"),
        (CLAIM | {"shape": (10**30,)}, "a: claims"),
        (CLAIM | {"shape": (-1,)}, "cannot be read as npz"),
        (CLAIM | {"descr": "|O"}, "holds no tensors"),
    ],
    ids=["10^12", "10^30", "negative", "objects"],
)
@pytest.mark.parametrize("command", ["inspect", "compress"])
def test_npz_member_that_claims_what_is_not_there_is_refused(
    command: str, header: dict[str, Any], message: str, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "in.npz"
    npz(path, "a.npy", header, bytes(16))
    out = [tmp_path / "out.bitslab"] if command == "compress" else []
    assert run(command, path, *out) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert message in last and str(path) in last
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("shape", [(10**12,), (10**30,)], ids=["10^12", "10^30"])
def test_npy_file_that_claims_what_is_not_there_is_refused(
    shape: tuple[int, ...], tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "in.npy"
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, CLAIM | {"shape": shape})
    assert run("inspect", path) == 2
    assert "cannot be read as npy" in one_line(capsys)


def test_what_is_no_array_in_an_npz_file_is_left_out(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "in.npz"
    np.savez(path, a=np.ones(30))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("readme.txt", "text")
    assert run("compress", path, tmp_path / "x.bitslab") == 0
    assert "left out, because it is no tensor: readme.txt" in capsys.readouterr().err
    assert list(bitslab.load_file(tmp_path / "x.bitslab")) == ["a"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("8 TB"),
        RuntimeError("DefaultCPUAllocator: no"),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 TB."),
    ],
    ids=["python", "host", "gpu"],
)
def test_memory_that_runs_out_is_reported_in_one_line(
    error: Exception, packed: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(commands, "unpacked_tensors", fail)
    assert run("decompress", packed, tmp_path / "out.pt") == 2
    assert "not enough memory" in one_line(capsys)


@pytest.mark.parametrize("extension", ["pt", "npz", "safetensors"])
@pytest.mark.parametrize("names", [[""], ["", "tensor", "."]], ids=["alone", "among-others"])
def test_tensor_without_a_name_is_restored(
    names: list[str], extension: str, tmp_path: Path, capsys: Any
) -> None:
    tensors = {name: torch.arange(10.0) + i for i, name in enumerate(names)}
    paths = [tmp_path / f"{i}.{extension}" for i in range(2)]
    files.write_tensors(tensors, paths[0], f".{extension}")
    assert run("compress", paths[0], tmp_path / "x.bitslab", "--verify") == 0
    assert run("decompress", tmp_path / "x.bitslab", paths[1], "--verify") == 0
    assert capsys.readouterr().err == ""
    back = files.read_tensors(paths[1]).tensors
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[name], t) for name, t in tensors.items())


def test_keys_without_letters_are_part_of_the_name_of_a_tensor(tmp_path: Path) -> None:
    torch.save({"": {"a": torch.ones(3)}, "a": torch.ones(4)}, tmp_path / "in.pt")
    assert run("compress", tmp_path / "in.pt", tmp_path / "x.bitslab") == 0
    assert sorted(bitslab.load_file(tmp_path / "x.bitslab")) == [".a", "a"]


@pytest.mark.parametrize(
    ("name", "extension", "message"),
    [
        ("__metadata__", "safetensors", "'__metadata__' is taken by safetensors"),
        ("a\0b", "npz", "npz has no place for this name"),
        ("a" * 70_000, "npz", "npz has no place for this name"),
    ],
    ids=["metadata", "nul", "long"],
)
def test_name_that_a_format_cannot_hold_is_refused(
    name: str, extension: str, message: str, tmp_path: Path, capsys: Any
) -> None:
    bitslab.save_file({name: bitslab.compress(torch.ones(3))}, tmp_path / "x.bitslab")
    assert run("decompress", tmp_path / "x.bitslab", tmp_path / f"out.{extension}") == 2
    line = one_line(capsys)
    assert message in line and f"out.{extension}" in line
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"garbage", "cannot be read as safetensors"), (None, "is compressed by bitslab already")],
    ids=["garbage", "compressed"],
)
@pytest.mark.parametrize("name", ["x.bitslab", "x.safetensors"])
def test_compress_detects_compressed_files_by_their_content(
    name: str, content: bytes | None, message: str, packed: Path, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / name
    path.write_bytes(packed.read_bytes() if content is None else content)
    assert run("compress", path, tmp_path / "out.bitslab") == 2
    assert message in one_line(capsys)


def test_plain_file_with_the_extension_of_compressed_ones_is_compressed(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(30)}, tmp_path / "plain.bitslab")
    assert run("compress", tmp_path / "plain.bitslab", tmp_path / "x.bitslab", "--verify") == 0
    assert same_bits(bitslab.load(tmp_path / "x.bitslab").decompress(), torch.ones(30))


def test_garbage_is_not_called_compressed_for_the_sake_of_options(
    tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "x.bitslab").write_bytes(b"garbage")
    assert run("inspect", tmp_path / "x.bitslab", "--codec", "raw") == 1
    assert "no safetensors file" in one_line(capsys)


# Files that exist


@pytest.mark.parametrize("command", ["compress", "decompress", "inspect"])
@pytest.mark.parametrize("dangling", [False, True], ids=["file", "link-to-nothing"])
def test_existing_file_is_replaced_with_force_only(
    command: str, dangling: bool, packed: Path, tmp_path: Path, capsys: Any
) -> None:
    source = packed
    if command == "compress":
        source = tmp_path / "in.npy"
        np.save(source, np.arange(30.0))
    out = tmp_path / {"compress": "o.bitslab", "decompress": "o.npy", "inspect": "o.png"}[command]
    option = ["--plot"] if command == "inspect" else []
    arguments: list[str | Path] = [command, source, *option, out]
    if dangling:
        out.symlink_to(tmp_path / "elsewhere")
    else:
        out.write_bytes(b"old")
        assert run(*arguments) == 2
        line = one_line(capsys)
        assert str(out) in line and "exists already" in line and "--force" in line
        assert out.read_bytes() == b"old"
    assert run(*arguments, *([] if dangling else ["--force"])) == 0
    assert out.read_bytes() != b"old" and out.is_symlink() == dangling


def test_folder_as_output_is_refused(packed: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "out.pt").mkdir()
    assert run("decompress", packed, tmp_path / "out.pt", "--force") == 2
    assert "is a folder" in one_line(capsys)


@pytest.mark.parametrize("option", [[], ["--json"]], ids=["table", "json"])
def test_plot_says_what_it_wrote_outside_the_results(
    option: list[str], packed: Path, tmp_path: Path, capsys: Any
) -> None:
    image = tmp_path / "p.svg"
    assert run("inspect", packed, "--plot", image, *option) == 0
    said = capsys.readouterr()
    assert said.err == f"bitslab: {image}: drawn, 1 tensor\n"
    assert str(image) not in said.out


# Interruptions


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("work", "interrupted; nothing was written"),
        ("write", "interrupted; {out} is what it was before"),
        ("rename", "interrupted; {out} is complete"),
        ("print", "interrupted; {out} is complete"),
    ],
)
def test_interrupted_command_says_what_became_of_the_output(
    where: str, says: str, packed: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    out = tmp_path / "out.pt"
    out.write_bytes(b"old")
    replace = os.replace

    def interrupted(*arguments: Any, **options: Any) -> None:
        if where == "rename":
            replace(*arguments)
        raise KeyboardInterrupt

    target = {
        "work": (commands, "read_file"),
        "write": (commands, "write_tensors"),
        "rename": (os, "replace"),
        "print": (commands, "_say_done"),
    }[where]
    with monkeypatch.context() as patched:
        patched.setattr(*target, interrupted)
        assert run("decompress", packed, out, "--force") == 130
    assert capsys.readouterr().err == f"bitslab: {says.format(out=out)}\n"
    assert (out.read_bytes() == b"old") == ("complete" not in says)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.bitslab", "out.pt"]


# Torch


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["compress", "--help"], ["compress"], ["fly"]],
    ids=" ".join,
)
def test_help_does_not_import_torch(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from bitslab.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'numpy', 'numba', 'rich') if m in sys.modules])\n"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "bitslab" in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


# Damage


@pytest.mark.parametrize("codec", ["ibp", "raw"])
@pytest.mark.parametrize("extension", ["safetensors", "npz"])
@pytest.mark.parametrize("name", ["first", "last"])
def test_bytes_that_are_damaged_are_found_while_others_are_unpacked(
    name: str, extension: str, codec: str, tmp_path: Path, capsys: Any
) -> None:
    """Of long tensors, whose checksums are compared meanwhile: the error is that of `load_file`."""
    path, out = tmp_path / "in.bitslab", tmp_path / f"out.{extension}"
    rows = torch.randn(9000, 128).float()
    tensors = {"first": rows, "short": rows[:3], "last": rows + 1}
    packed = {n: bitslab.compress(t, codec=codec) for n, t in tensors.items()}
    bitslab.save_file(packed, path)
    part = "words" if codec == "ibp" else "rows"
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    begin, end = header[f"{name}.{part}"]["data_offsets"]
    assert end - begin > 3 << 20
    at = 8 + int.from_bytes(data[:8], "little")
    assert run("decompress", path, out) == 0
    out.unlink()
    for where in (begin + 5, (begin + end) // 2, end - 20 if codec == "ibp" else end - 1):
        spoilt = bytearray(data)
        spoilt[at + where] ^= 1
        path.write_bytes(spoilt)
        with pytest.raises(bitslab.CorruptedDataError) as expected:
            bitslab.load_file(path)
        capsys.readouterr()
        assert run("decompress", path, out) == 1
        assert one_line(capsys) == f"bitslab: error: {expected.value}"
        assert f"tensor '{name}': part '{part}' is damaged" in str(expected.value)
        assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("extension", ["safetensors", "npz"])
def test_rows_that_are_damaged_under_a_right_checksum_are_found_as_they_are_unpacked(
    extension: str, device: str, tmp_path: Path, capsys: Any
) -> None:
    path, out = tmp_path / "in.bitslab", tmp_path / f"out.{extension}"
    tensors = {name: torch.randn(9000, 128) for name in ("good", "bad")}
    packed = {name: bitslab.compress(t, codec="ibp") for name, t in tensors.items()}
    words, bases = (packed["bad"].packed.parts[part] for part in ("words", "bases"))
    words[bases[100] : bases[101]] = 0  # more exceptions than there are words for
    bitslab.save_file(packed, path)
    with pytest.raises(bitslab.CorruptedDataError, match="tensor 'bad': packed rows: row 3200 is"):
        bitslab.load_file(path)
    assert run("decompress", path, out, "--device", device) == 1
    message = one_line(capsys)
    assert "damaged" in message
    if device == "cpu":
        assert "tensor 'bad': packed: row 3200 is damaged" in message
    assert sorted(tmp_path.iterdir()) == [path]


def test_rows_are_read_once_where_a_file_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "in.bitslab", tmp_path / "out.safetensors"
    bitslab.save_file({"x": bitslab.compress(torch.randn(900, 128), codec="ibp")}, path)
    checked: list[int] = []
    check = LayoutKernels.check

    def counted(self: LayoutKernels, storage: RowStorage) -> int:
        checked.append(storage.lengths.shape[0])
        return check(self, storage)

    monkeypatch.setattr(LayoutKernels, "check", counted)
    assert run("decompress", path, out) == 0
    assert not checked
    bitslab.load_file(path)
    assert checked == [900]
