"""The `bitslab` command: files in, files out, what it prints and how it exits."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import bitslab
from bitslab import cli
from bitslab.engine.codecs import registry
from bitslab.report import commands
from tests.forked import run_forked
from tests.helpers import packable, random_bits, same_bits

PNG = b"\x89PNG\r\n\x1a\n"
METADATA = {"format": "pt", "note": 'ünïcode "quoted"\n'}


def every_kind() -> dict[str, torch.Tensor]:
    """Make tensors of every dtype of safetensors, and of every odd shape."""
    dtypes = (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.uint16, torch.uint32, torch.uint64, torch.bool,
    )  # fmt: skip
    tensors = {f"layer.{dtype}": packable(dtype, (50, 32)) for dtype in dtypes}
    tensors |= {f"random.{dtype}": random_bits(dtype, (333,)) for dtype in dtypes}
    for shape in ((), (1,), (0, 3), (5, 0), (2, 3, 4, 5), (1, 9)):
        tensors[f"shape.{shape}"] = packable(torch.float32, shape)
    return tensors


def run(*arguments: str | Path) -> int:
    """Run the command in this process."""
    return cli.main([str(a) for a in arguments])


def spawn(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command as its own process."""
    return run_forked(["-m", "bitslab.cli", *arguments])


@pytest.fixture(autouse=True)
def wide_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    tensors = {"a": packable(torch.bfloat16, (200, 64)), "b": packable(torch.float32, (70,))}
    safetensors.torch.save_file(tensors, path, METADATA)
    return path


@pytest.fixture
def packed(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "model.bitslab"
    assert run("compress", model, path) == 0
    capsys.readouterr()
    return path


@contextlib.contextmanager
def nothing_written(folder: Path) -> Iterator[None]:
    """Check that the files of a folder are unchanged."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    yield
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the text on stderr, which must be one line."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bitslab: error: ")
    return str(line)


# Round trips


@pytest.mark.parametrize("codec", ["auto", "ibp", "raw"])
@pytest.mark.parametrize("metadata", [METADATA, None], ids=["metadata", "no-metadata"])
def test_safetensors_file_is_restored_byte_for_byte(
    tmp_path: Path, metadata: dict[str, str] | None, codec: str
) -> None:
    original, packed, restored = (tmp_path / f"{i}.safetensors" for i in range(3))
    safetensors.torch.save_file(every_kind(), original, metadata)
    assert run("compress", original, packed, "--codec", codec, "--verify") == 0
    assert run("decompress", packed, restored, "--verify") == 0
    loaded = safetensors.torch.load_file(restored)
    for name, t in every_kind().items():
        assert same_bits(loaded[name], t), name
    with safetensors.safe_open(restored, "pt") as file:
        assert file.metadata() == metadata
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0.safetensors", "1.safetensors", "2.safetensors",
    ]  # fmt: skip


def test_real_process_restores_a_file(model: Path, tmp_path: Path) -> None:
    packed, restored = tmp_path / "x.bitslab", tmp_path / "x.safetensors"
    command = [sys.executable, "-m", "bitslab.cli", "compress", str(model), str(packed), "--verify"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 tensors, 0.03 MB -> 0.02 MB (1." in done.stdout and "verified" in done.stdout
    done = spawn("decompress", packed, restored, "--verify")
    assert (done.returncode, done.stderr) == (0, "")
    assert restored.stat().st_size == model.stat().st_size
    before, after = (safetensors.torch.load_file(path) for path in (model, restored))
    assert before.keys() == after.keys()
    assert all(same_bits(after[name], t) for name, t in before.items())


@pytest.mark.parametrize(
    "array",
    [
        np.arange(600, dtype=np.float32).reshape(20, 30),
        np.asfortranarray(np.arange(600, dtype=np.int64).reshape(20, 30)),
        np.array(3.5),
        np.zeros((0, 4), np.uint16),
        np.arange(50) % 3 == 0,
        np.arange(8, dtype=np.complex128),
    ],
    ids=["float32", "fortran", "0-d", "empty", "bool", "complex128"],
)
def test_npy_file_is_restored(array: np.ndarray[Any, Any], tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", array)
    assert run("compress", tmp_path / "in.npy", tmp_path / "x.bitslab", "--verify") == 0
    assert run("decompress", tmp_path / "x.bitslab", tmp_path / "out.npy", "--verify") == 0
    back = np.load(tmp_path / "out.npy")
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()


def test_npy_file_of_another_byte_order_keeps_its_numbers(tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.arange(40, dtype=">f4"))
    assert run("compress", tmp_path / "in.npy", tmp_path / "x.bitslab", "--verify") == 0
    expected = torch.arange(40, dtype=torch.float32)
    assert same_bits(bitslab.load(tmp_path / "x.bitslab").decompress(), expected)


def test_npz_file_is_restored(tmp_path: Path) -> None:
    arrays = {"file": np.arange(90.0), "a.b": np.ones((30, 3), np.int8), "s": np.array(2)}
    with open(tmp_path / "in.npz", "wb") as file:
        safe: dict[str, Any] = {f"{k}_": v for k, v in arrays.items()}  # `file` is savez's own
        np.savez(file, **safe)
    assert run("compress", tmp_path / "in.npz", tmp_path / "x.bitslab") == 0
    assert run("decompress", tmp_path / "x.bitslab", tmp_path / "out.npz", "--verify") == 0
    with np.load(tmp_path / "out.npz") as back:
        assert {k: v.tobytes() for k, v in back.items()} == {
            k: v.tobytes() for k, v in safe.items()
        }


def test_npz_may_have_any_names(tmp_path: Path) -> None:
    cts = {name: bitslab.compress(torch.ones(3)) for name in ("file", "args", "a/b", "ü.npy")}
    bitslab.save_file(cts, tmp_path / "x.bitslab")
    assert run("decompress", tmp_path / "x.bitslab", tmp_path / "out.npz") == 0
    with np.load(tmp_path / "out.npz") as back:
        assert len(back.files) == 4


@pytest.mark.parametrize("extension", ["pt", "pth", "bin"])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_torch_file_gives_dotted_names(extension: str, zipped: bool, tmp_path: Path) -> None:
    w = packable(torch.bfloat16, (50, 32))
    content = {
        "model": {"w": torch.nn.Parameter(w), "layers": [torch.ones(3), {"b": torch.zeros(2)}]},
        "w.transposed": w.T,
    }
    path = tmp_path / f"in.{extension}"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    assert run("compress", path, tmp_path / "x.bitslab", "--verify") == 0
    out = tmp_path / f"out.{extension}"
    assert run("decompress", tmp_path / "x.bitslab", out, "--verify") == 0
    back = torch.load(out, weights_only=True)
    assert list(back) == ["model.w", "model.layers.0", "model.layers.1.b", "w.transposed"]
    assert same_bits(back["model.w"], w)
    assert same_bits(back["w.transposed"], w.T)


def test_bare_tensor_of_a_torch_file_is_called_tensor(tmp_path: Path) -> None:
    torch.save(torch.arange(100), tmp_path / "in.pt")
    assert run("compress", tmp_path / "in.pt", tmp_path / "x.bitslab") == 0
    assert list(bitslab.load_file(tmp_path / "x.bitslab")) == ["tensor"]


def test_what_is_no_tensor_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(9), "epoch": 3, "name": "x"}, tmp_path / "in.pt")
    assert run("compress", tmp_path / "in.pt", tmp_path / "x.bitslab") == 0
    said = capsys.readouterr().err
    assert "left out, because it is no tensor: epoch (int)" in said
    assert "name (str)" in said
    np.savez(tmp_path / "in.npz", a=np.ones(3), text=np.array(["x"]), object=np.array([{}]))
    assert run("compress", tmp_path / "in.npz", tmp_path / "x.bitslab", "--force") == 0
    said = capsys.readouterr().err
    assert "text" in said and "object" in said
    assert list(bitslab.load_file(tmp_path / "x.bitslab")) == ["a"]


def test_metadata_that_cannot_be_written_is_reported(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("decompress", packed, tmp_path / "out.pt") == 0
    assert "no place for the metadata" in capsys.readouterr().err


def test_codec_and_clusters_are_obeyed(model: Path, tmp_path: Path) -> None:
    t = torch.cat([torch.rand(300, 64) * 1e-9, torch.rand(300, 64) * 1e9]).to(torch.bfloat16)
    torch.save(t, tmp_path / "in.pt")
    arguments = ("compress", tmp_path / "in.pt", tmp_path / "x.bitslab")
    assert run(*arguments, "--codec", "raw") == 0
    assert bitslab.load(tmp_path / "x.bitslab").codec.name == "raw"
    assert run(*arguments, "--codec", "ibp", "--clusters", "8", "--force") == 0
    one = bitslab.compress(t)
    assert bitslab.load(tmp_path / "x.bitslab").nbytes <= one.nbytes


# Inspect


def test_inspect_prints_a_table(
    model: Path, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("inspect", model) == 0
    table = capsys.readouterr().out
    for word in ("200 x 64", "bfloat16", "float32", "ibp ", "total of 2", "55 GB/s link", "1500"):
        assert word in table
    assert run("inspect", packed) == 0
    assert capsys.readouterr().out == table, "a compressed file is reported as its original"


def test_inspect_takes_several_files(
    model: Path, packed: Path, tmp_path: Path, capsys: Any
) -> None:
    np.save(tmp_path / "x.npy", np.ones((40, 32)))
    assert run("inspect", model, packed, tmp_path / "x.npy") == 0
    table = capsys.readouterr().out
    assert "model.safetensors: a" in table and "x.npy: tensor" in table
    assert "total of 5" in table


def test_inspect_json_is_for_programs(model: Path) -> None:
    done = spawn("inspect", model, "--json", "--link-gbps", "25", "--decode-gbps", "800")
    assert (done.returncode, done.stderr) == (0, "")
    content = json.loads(done.stdout)
    assert content["link_gbps"] == 25
    assert content["decode_gbps"] == 800
    assert content["total"]["tensors"] == 2
    entry = content["tensors"][0]
    assert entry.keys() == {
        "file", "name", "shape", "dtype", "plan", "raw_bytes", "packed_bytes", "ratio",
        "saved_mb", "invariant_share", "speedup", "equal_bits",
    }  # fmt: skip
    assert entry["file"] == str(model)
    assert entry["raw_bytes"] == 200 * 64 * 2


@pytest.mark.parametrize(
    ("name", "magic"), [("p.png", PNG), ("p.svg", b"<?xml"), ("p.PDF", b"%PDF")]
)
def test_inspect_draws(name: str, magic: bytes, model: Path, tmp_path: Path) -> None:
    assert run("inspect", model, "--plot", tmp_path / name) == 0
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_inspect_obeys_the_codec(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", model, "--codec", "raw", "--json") == 0
    assert {t["plan"] for t in json.loads(capsys.readouterr().out)["tensors"]} == {"raw"}


def test_closed_pipe_is_no_error(model: Path) -> None:
    command = f"{sys.executable} -m bitslab.cli inspect {model} --json | head -c 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")


# Progress


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "no-terminal"])
def test_progress_is_shown_on_a_terminal_only(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "LONG_WORK_BYTES", 1)
    monkeypatch.setenv("TERM", "xterm")
    if terminal:
        ours, theirs = pty.openpty()
        stderr = open(theirs, "w")
    else:
        stderr = open(tmp_path / "stderr", "w+")
    with stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        items = {"a": torch.ones(3), "b": torch.ones(4)}
        assert [name for name, _ in commands._with_progress("working hard", items)] == ["a", "b"]
        stderr.flush()
        if terminal:
            shown = ""
            # A read returns what is there, which may be a part of what was written.
            while "working hard" not in shown and select.select([ours], [], [], 10)[0]:
                shown += os.read(ours, 100_000).decode(errors="replace")
        else:
            stderr.seek(0)
            shown = stderr.read()
    if terminal:
        os.close(ours)
    assert ("working hard" in shown) == terminal


# What goes wrong


class Lossy(bitslab.RawCodec):
    """Forgets a bit."""

    name = "lossy"

    def encode(self, rows: torch.Tensor) -> bitslab.PackedRows:
        packed = super().encode(rows)
        packed.parts["rows"].view(-1).view(torch.uint8)[0] ^= 1
        return packed


def test_verify_finds_a_lost_bit_and_writes_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(registry, "_classes", dict(registry._classes))
    bitslab.register_codec(Lossy)
    arguments = ("compress", model, tmp_path / "x.bitslab", "--codec", "lossy")
    with nothing_written(tmp_path):
        assert run(*arguments, "--verify") == 1
    assert "verification failed: " in one_line(capsys)
    assert run(*arguments) == 0


@pytest.mark.parametrize("command", ["decompress", "inspect"])
def test_damaged_file_exits_with_1(
    command: str, packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray(packed.read_bytes())
    data[-20] ^= 1
    packed.write_bytes(data)
    out = [tmp_path / "out.safetensors"] if command == "decompress" else []
    with nothing_written(tmp_path):
        assert run(command, packed, *out) == 1
    line = one_line(capsys)
    assert str(packed) in line and "checksum" in line


def test_truncated_and_foreign_files_exit_with_1(
    packed: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("decompress", model, tmp_path / "out.pt") == 1
    assert "not written by bitslab" in one_line(capsys)
    packed.write_bytes(packed.read_bytes()[:-1])
    assert run("decompress", packed, tmp_path / "out.pt") == 1
    assert "truncated" in one_line(capsys)


def test_process_that_fails_says_one_line_and_no_traceback(tmp_path: Path) -> None:
    done = spawn("inspect", tmp_path / "missing.safetensors")
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "No such file" in done.stderr and "missing.safetensors" in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"text", "extension '.txt', accepted are .safetensors"),
        ("x", b"text", "extension '', accepted are"),
        ("x.safetensors", b"text", "cannot be read as safetensors"),
        ("x.safetensors", b"", "cannot be read as safetensors"),
        ("x.npy", b"text", "cannot be read as npy"),
        ("x.npy", b"", "cannot be read as npy"),
        ("x.npz", b"text", "cannot be read as npz"),
        ("x.npz", b"PK\3\4", "cannot be read as npz"),
        ("x.pt", b"text", "cannot be read by torch.load"),
        ("x.pt", b"", "cannot be read by torch.load"),
        ("x.bin", b"PK\3\4" + bytes(100), "cannot be read by torch.load"),
    ],
    ids=lambda value: repr(value)[:20],
)
@pytest.mark.parametrize("command", ["inspect", "compress"])
def test_input_that_cannot_be_read_exits_with_2(
    command: str, name: str, content: bytes, message: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / name).write_bytes(content)
    out = [tmp_path / "out.bitslab"] if command == "compress" else []
    with nothing_written(tmp_path):
        assert run(command, tmp_path / name, *out) == 2
    line = one_line(capsys)
    assert message in line and str(tmp_path / name) in line


def test_files_that_hold_code_are_refused(tmp_path: Path, capsys: Any) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(marker),)

    torch.save({"w": Evil()}, tmp_path / "x.pt")
    np.save(tmp_path / "x.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    assert run("inspect", tmp_path / "x.pt") == 2
    assert "holds more than tensors" in one_line(capsys)
    assert run("inspect", tmp_path / "x.npy") == 2
    assert "cannot be read as npy" in one_line(capsys)
    assert not marker.exists()


def test_file_without_tensors_is_refused(tmp_path: Path, capsys: Any) -> None:
    torch.save({}, tmp_path / "x.pt")
    assert run("inspect", tmp_path / "x.pt") == 2
    assert "holds no tensors" in one_line(capsys)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path, capsys: Any) -> None:
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}, tmp_path / "x.pt")
    assert run("inspect", tmp_path / "x.pt") == 2
    assert "two tensors would be called 'a.b'" in one_line(capsys)


def test_sparse_tensor_is_refused_by_name(tmp_path: Path, capsys: Any) -> None:
    torch.save({"dense": torch.ones(3), "thin": torch.eye(3).to_sparse()}, tmp_path / "x.pt")
    assert run("compress", tmp_path / "x.pt", tmp_path / "x.bitslab") == 2
    line = one_line(capsys)
    assert "x.pt: thin: " in line and "only dense tensors" in line


@pytest.mark.parametrize(
    ("dtype", "name", "message"),
    [
        (torch.bfloat16, "out.npy", "numpy has no bfloat16; write .safetensors"),
        (torch.bfloat16, "out.npz", "numpy has no bfloat16; write .safetensors"),
        (torch.float8_e5m2, "out.npz", "numpy has no float8_e5m2; write .safetensors"),
        (torch.complex128, "out.safetensors", "complex128; write .pt"),
        (torch.float32, "out.txt", "extension '.txt', accepted are"),
        (torch.float32, "out.bitslab", "extension '.bitslab', accepted are"),
    ],
    ids=str,
)
def test_output_that_cannot_hold_the_tensor_is_refused(
    dtype: torch.dtype, name: str, message: str, tmp_path: Path, capsys: Any
) -> None:
    bitslab.compress(packable(dtype, (30, 32))).save(tmp_path / "x.safetensors")
    with nothing_written(tmp_path):
        assert run("decompress", tmp_path / "x.safetensors", tmp_path / name) == 2
    line = one_line(capsys)
    assert message in line and name in line


def test_npy_holds_one_tensor(packed: Path, tmp_path: Path, capsys: Any) -> None:
    with nothing_written(tmp_path):
        assert run("decompress", packed, tmp_path / "out.npy") == 2
    assert "npy holds one tensor, there are 2" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compress", "decompress"])
@pytest.mark.parametrize("how", ["same", "dotted", "link", "hard-link"])
def test_input_is_never_overwritten(
    command: str, how: str, model: Path, packed: Path, tmp_path: Path, capsys: Any
) -> None:
    source = tmp_path / "x.safetensors"
    source.write_bytes((model if command == "compress" else packed).read_bytes())
    target = source
    if how == "dotted":
        (tmp_path / "folder").mkdir()
        target = tmp_path / "folder" / ".." / source.name
    elif how == "link":
        target = tmp_path / "link.safetensors"
        target.symlink_to(source)
    elif how == "hard-link":
        target = tmp_path / "link.safetensors"
        target.hardlink_to(source)
    with nothing_written(tmp_path):
        assert run(command, source, target) == 2
    assert "would overwrite the input" in one_line(capsys)


def test_plot_does_not_overwrite_an_input(tmp_path: Path, capsys: Any) -> None:
    np.save(tmp_path / "x.npy", np.ones(30))
    (tmp_path / "x.png").hardlink_to(tmp_path / "x.npy")
    assert run("inspect", tmp_path / "x.npy", "--plot", tmp_path / "x.png") == 2
    assert "would overwrite the input" in one_line(capsys)


def test_compressed_file_is_not_compressed_again(packed: Path, tmp_path: Path, capsys: Any) -> None:
    assert run("compress", packed, tmp_path / "x.bitslab") == 2
    assert "compressed by bitslab already" in one_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--codec", "zip"], "'zip' is not known; known are csr, ibp, ibp-blob"),
        (["--clusters", "4", "--codec", "raw"], "raw: takes no options, got ['clusters']"),
    ],
    ids=["codec", "raw-clusters"],
)
def test_wrong_option_exits_with_2(
    arguments: list[str], message: str, model: Path, tmp_path: Path, capsys: Any
) -> None:
    with nothing_written(tmp_path):
        assert run("compress", model, tmp_path / "x.bitslab", *arguments) == 2
    assert message in one_line(capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["inspect"],
        ["compress", "a.npy"],
        ["inspect", "a.npy", "--link-gbps", "0"],
        ["inspect", "a.npy", "--decode-gbps", "fast"],
        ["compress", "a.npy", "b.bitslab", "--clusters", "many"],
        ["compress", "a.npy", "b.bitslab", "--clusters", "0"],
        ["compress", "a.npy", "b.bitslab", "--clusters", "257"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "usage: bitslab" in said
    assert "--clusters" not in arguments or "argument --clusters: " in said.splitlines()[-1]


def test_failed_write_leaves_the_old_output(model: Path, tmp_path: Path) -> None:
    """A limit on the size of files simulates the full disk."""
    out = tmp_path / "x.bitslab"
    out.write_bytes(b"old")
    code = (
        "import resource, signal, sys\n"
        "from bitslab import cli\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    with nothing_written(tmp_path):
        done = run_forked(["-c", code, "compress", model, out, "--force"])
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("bitslab: error: ") and done.stderr.count("\n") == 1
    assert str(out) in done.stderr and "tmp'" not in done.stderr


def test_truncated_compressed_file_is_damaged_for_every_command(tmp_path: Path) -> None:
    path = tmp_path / "x.bitslab"
    bitslab.save_file({"a": bitslab.compress(torch.randn(64, 64))}, path)
    path.write_bytes(path.read_bytes()[:200])
    commands: list[list[str | Path]] = [
        ["inspect", path],
        ["decompress", path, tmp_path / "y.safetensors"],
    ]
    for arguments in commands:
        done = spawn(*arguments)
        assert done.returncode == 1, done.stderr
        assert "x.bitslab" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("option", [["--codec", "raw"], ["--clusters", "2"]], ids=str)
def test_options_that_a_compressed_file_would_ignore_are_refused(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.bitslab"
    bitslab.save_file({"a": bitslab.compress(torch.randn(64, 64))}, path)
    assert cli.main(["inspect", str(path), *option]) == 2
    assert "compressed already" in capsys.readouterr().err
