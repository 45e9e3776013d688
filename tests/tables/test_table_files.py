"""Tables in files: contents, memory-mapped tables, damage, crashes and full disks."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading

import pytest
import torch

import bitslab
from bitslab import ArgumentError, BitslabError, CompressedTable, CorruptedDataError
from bitslab.engine.codecs.base import PackedRows
from bitslab.tables import build
from tests.helpers import DTYPES, packable, random_bits, same_bits
from tests.tables.kinds import KINDS, even_rows, make, weights

LAYOUTS = ("compact", "inplace")


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("into", LAYOUTS)
def test_a_table_comes_back_in_either_layout(kind, into, tmp_path):
    for number, dtype in enumerate(DTYPES):
        for shape in ((50, 9), (40,), (3, 2, 5), (0, 4), (4, 0)):
            x = packable(dtype, shape)
            path = tmp_path / f"{number}-{len(shape)}-{shape[0]}"
            table = make(x, kind)
            table.save(path)
            assert same_bits(bitslab.load(path).decompress(), x)
            with CompressedTable.from_file(path, into) as back:
                assert same_bits(back[:], x)
                assert back.codec == table.codec
                assert back.layout == into and back.shape == x.shape


@pytest.mark.parametrize("kind", KINDS)
def test_updated_rows_are_saved_and_the_table_goes_on(kind, tmp_path):
    x = even_rows(300, 40)
    table = make(x, kind)
    ids = torch.arange(0, 300, 3)
    x[ids] = even_rows(100, 40, seed=1)
    table.update(ids, x[ids])
    moved = table.stats()["moved_rows"]
    table.save(tmp_path / "t")
    assert table.stats()["moved_rows"] == moved and (moved > 0) == (kind == "compact")
    assert same_bits(table[:], x)
    assert same_bits(CompressedTable.from_file(tmp_path / "t")[:], x)


def test_a_compact_file_remains_mapped_after_it_is_unlinked(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("with a GPU the rows are read into page-locked memory")
    path = tmp_path / "t"
    x = weights()
    make(x, "compact").save(path)
    table = CompressedTable.from_file(path)
    with open("/proc/self/maps") as maps:
        assert str(path) in maps.read()
    for refused in (lambda: table.update(torch.tensor([0]), x[:1]), table.handle):
        with pytest.raises(BitslabError, match="memory-mapped"):
            refused()
    table.compact()  # nothing to do
    make(weights(seed=5), "compact").save(path)  # another table takes its name
    assert same_bits(table[:], x)
    path.unlink()
    assert same_bits(table[:], x)
    table.save(path)
    assert same_bits(CompressedTable.from_file(path)[:], x)
    table.close()
    with open("/proc/self/maps") as maps:
        assert f"{path} (deleted)" not in maps.read()


def test_a_mapped_table_is_pickled_as_its_file(tmp_path, monkeypatch):
    x = weights()
    make(x, "compact").save(tmp_path / "t")
    monkeypatch.chdir(tmp_path)
    table = CompressedTable.from_file("t", pin=False)
    text = pickle.dumps(table)
    assert len(text) < 1000
    monkeypatch.chdir("/")
    assert same_bits(pickle.loads(text)[:], x)
    table.save(tmp_path / "t")  # the same table once more
    assert same_bits(pickle.loads(text)[:], x)
    make(weights(seed=5), "compact").save(tmp_path / "t")
    with pytest.raises(BitslabError, match="holds another table than when it was opened"):
        pickle.loads(text)


def test_files_that_hold_no_table_are_refused(tmp_path):
    path = tmp_path / "t"
    with pytest.raises(FileNotFoundError):
        CompressedTable.from_file(path)
    path.write_bytes(b"no safetensors")
    with pytest.raises(CorruptedDataError, match="no safetensors file"):
        CompressedTable.from_file(path)
    for t in (torch.tensor(3.0), torch.zeros(10, 3, 400), torch.zeros(4, 700_000)):
        bitslab.compress(t).save(path)
        with pytest.raises(ArgumentError, match="one row for each item"):
            CompressedTable.from_file(path)
    two = {"a": bitslab.compress(torch.zeros(3, 99)), "b": bitslab.compress(torch.zeros(3, 99))}
    bitslab.save_file(two, path)
    with pytest.raises(ArgumentError, match="holds 2 tensors"):
        CompressedTable.from_file(path)
    with pytest.raises(ArgumentError, match="layout: 'both'"):
        CompressedTable.from_file(path, "both")  # type: ignore[arg-type]


def test_rows_of_a_codec_that_no_kernel_gathers_are_refused(tmp_path, monkeypatch):
    ct = bitslab.compress(weights())
    other = bitslab.CompressedTensor(ct.codec, ct.packed, ct.shape)
    other.codec = _NoKernel(ct.codec)  # type: ignore[assignment]
    monkeypatch.setattr("bitslab.tables.files.load", lambda path: other)
    with pytest.raises(ArgumentError, match="codec 'unknown-codec' of .* accept 'auto', 'ibp'"):
        CompressedTable.from_file(tmp_path / "t")


class _NoKernel:
    name = "unknown-codec"

    def __init__(self, codec):
        self.row_shape, self.dtype = codec.row_shape, codec.dtype


def test_a_damaged_or_truncated_file_is_refused(tmp_path):
    path = tmp_path / "t"
    make(weights(), "compact").save(path)
    whole = path.read_bytes()
    for cut in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CorruptedDataError):
            CompressedTable.from_file(path)
    for at in (len(whole) // 2, len(whole) - 1, 200):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :])
        with pytest.raises(CorruptedDataError):
            CompressedTable.from_file(path)


def test_a_row_that_is_damaged_in_memory_is_reported():
    x = weights()
    for kind in ("compact", "in-place"):
        table = make(x, kind, code_bits=3, uniform=True)
        table._parts.tensors["words"].fill_(0)  # codes of 0: more exceptions than words
        with pytest.raises(CorruptedDataError, match="table: row 5 is damaged"):
            table.gather(torch.tensor([5, 6]))


# Crashes and full disks


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_leaves_the_old_file_whole(kind, tmp_path):
    resource = pytest.importorskip("resource")
    path = tmp_path / "t"
    x = weights(2000)
    make(x, kind).save(path)
    old = path.read_bytes()
    table = make(weights(6000, seed=1), kind)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A table in place is packed anew in memory, in a file too for the system.
    expected = BitslabError if kind == "in-place" else OSError
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(expected):
            table.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_bytes() == old and os.listdir(tmp_path) == ["t"]
    table.save(path)
    assert len(CompressedTable.from_file(path)) == 6000


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_in_the_middle_of_save_leaves_the_old_file_whole(error, tmp_path, monkeypatch):
    path = tmp_path / "t"
    make(weights(), "compact").save(path)
    old = path.read_bytes()
    table = make(weights(seed=1), "in-place")

    def fail(self, data):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(build.PartsBuilder, "_pack", fail)
        with pytest.raises(error):
            table.save(path)
    assert path.read_bytes() == old and os.listdir(tmp_path) == ["t"]
    table.update(torch.tensor([1]), weights(1))  # no lock is held
    table.save(path)


KILLED = """
import os, sys, torch
from bitslab import CompressedTable
from bitslab import container
table = CompressedTable.from_tensor(torch.randn(3000, 64) * 0.02, progress=False)
write = container.write_safetensors
def half(path, *content):
    write(path, *content)
    os.truncate(path, os.path.getsize(path) // 2)
    print("half", flush=True)
    while True: pass
container.write_safetensors = half
table.save(sys.argv[1])
"""


def test_a_process_that_is_killed_in_save_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "t"
    x = weights()
    make(x, "compact").save(path)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "half\n"
        process.kill()
    assert same_bits(CompressedTable.from_file(path, "inplace")[:], x)
    assert len(os.listdir(tmp_path)) == 2
    make(weights(seed=2), "compact").save(path)
    assert same_bits(CompressedTable.from_file(path)[:], weights(seed=2))
    assert os.listdir(tmp_path) == ["t"]  # what the killed process had begun is gone


def test_readers_go_on_and_updates_wait_while_a_table_is_saved(tmp_path, monkeypatch):
    x = weights()
    table = make(x, "compact")
    inside, go_on = threading.Event(), threading.Event()

    def slow(self, path):
        inside.set()
        assert go_on.wait(30)

    monkeypatch.setattr(bitslab.CompressedTensor, "save", slow)
    saving = threading.Thread(target=table.save, args=(tmp_path / "t",))
    saving.start()
    assert inside.wait(30)
    updating = threading.Thread(target=table.update, args=(torch.tensor([0]), x[1:2]))
    updating.start()
    for _ in range(20):
        assert same_bits(table[0], x[0])
    assert updating.is_alive()
    go_on.set()
    saving.join()
    updating.join()
    assert same_bits(table[0], x[1])


def test_packed_rows_of_a_table_are_those_of_its_codec():
    x = torch.cat([weights(99), random_bits(torch.float32, (2, 64))])
    table = make(x, "compact")
    packed = table._parts.as_packed()
    assert isinstance(packed, PackedRows)
    assert same_bits(table.codec.decode(packed), x)
    expected = table.codec.encode(x)
    for name, part in expected.parts.items():
        assert torch.equal(part, packed.parts[name]), name
