"""Building tables: kinds of input, codecs, bounded memory, and failures half-way."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import bitslab
from bitslab import ArgumentError, ArgumentTypeError, BitslabError, CompressedTable, InvariantCodec
from bitslab.engine.memory import host, page_locking
from bitslab.tables import build
from tests.forked import run_forked
from tests.helpers import packable, random_bits, same_bits
from tests.tables.kinds import KINDS, make, weights
from tests.tables.support import open_files

# Inputs


def test_inputs_that_are_not_plain_are_packed_as_they_show():
    x = weights(400, 40)
    z = torch.complex(x, -x)
    doubles = random_bits(torch.float8_e5m2, (400, 80))[:, ::2]
    for t in (
        x.T,
        x[::3, 5:],
        x[:, :1].expand(400, 7),
        x.clone().requires_grad_(),
        torch.nn.Parameter(x),
        z.conj(),
        z.conj().imag,
        doubles,
        random_bits(torch.uint16, (40, 400)).T,
        random_bits(torch.bool, (40, 400)).T,
    ):
        for kind in KINDS:
            assert same_bits(make(t, kind)[:], t.detach())


def test_a_sample_of_what_is_not_contiguous_copies_the_sample_only(monkeypatch):
    monkeypatch.setattr(build, "SAMPLE_BYTES", 4096)
    z = torch.complex(weights(500, 16), weights(500, 16, seed=1))
    for t in (z.conj(), z.conj().imag, random_bits(torch.float8_e4m3fn, (16, 500)).T):
        sample = build.sample_rows(t, seed=1)
        wanted = max(build.MIN_SAMPLE_ROWS, 4096 // t[:1].nbytes)
        assert sample.shape == (wanted, 16)
        rows = {
            row.resolve_neg().resolve_conj().contiguous().view(torch.uint8).numpy().tobytes()
            for row in t
        }
        assert all(
            row.resolve_neg().resolve_conj().contiguous().view(torch.uint8).numpy().tobytes()
            in rows
            for row in sample
        )


@pytest.mark.parametrize("offset_bytes", [0, 128, 1], ids=["aligned", "header", "odd"])
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_memory_mapped_arrays_are_read_and_left_alone(tmp_path, mode, offset_bytes):
    x = weights(3000, 33)
    path = tmp_path / "rows"
    path.write_bytes(b"\0" * offset_bytes + x.numpy().tobytes())
    content = path.read_bytes()
    array = np.memmap(path, np.float32, mode, offset=offset_bytes, shape=(3000, 33))
    for kind in KINDS:
        assert same_bits(make(array, kind)[:], x)
    assert path.read_bytes() == content


def test_arrays_of_other_byte_order_and_strides_are_read_as_numbers():
    x = weights(100, 8).numpy()
    for array in (x.astype(">f4"), np.asfortranarray(x), x[::-1], x[:, ::2]):
        expected = torch.from_numpy(np.ascontiguousarray(array, np.float32))
        assert same_bits(make(array, "compact")[:], expected)


def sizes_of_batches(kind: str, n: int) -> Iterator[int]:
    if kind == "one-row":
        return iter([1] * n)
    generator = np.random.default_rng(0)
    return iter(generator.choice([0, 1, 5, 31, 32, 33, 64, 500], n).tolist())


@pytest.mark.drawn(6)
@pytest.mark.parametrize("sizes", ["one-row", "uneven"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reused", [False, True], ids=["fresh", "one-buffer"])
def test_batches_of_any_size_make_the_same_table(kind, sizes, reused, monkeypatch):
    monkeypatch.setattr(build, "BATCH_BYTES", 16 << 10)  # so that several are packed
    x = weights(3000, 25)
    whole = make(x, kind)
    buffer = torch.empty(500, 25)

    def batches() -> Iterator[torch.Tensor]:
        begin = 0
        for size in sizes_of_batches(sizes, 3000):
            batch = x[begin : begin + size]
            begin += len(batch)
            if reused:
                buffer[: len(batch)] = batch
                batch = buffer[: len(batch)]
            yield batch
            if begin == 3000:
                return

    layout, _ = KINDS[kind]
    table = CompressedTable.from_tensor(batches(), layout, whole.codec, progress=False)
    assert same_bits(table[:], x)
    for name, t in whole._parts.tensors.items():
        assert torch.equal(t, table._parts.tensors[name]), name
    assert table._parts.facts == whole._parts.facts


def test_batches_may_be_arrays_and_lists():
    x = weights(100, 8)
    assert same_bits(CompressedTable.from_tensor([x[:50].numpy(), x[50:]])[:], x)
    empty = CompressedTable.from_tensor([x[:0], x[:0]])
    assert empty.shape == (0, 8) and empty.dtype == torch.float32
    assert CompressedTable.from_tensor([x[:3, :0], x[:2, :0]]).shape == (5, 0)


@pytest.mark.parametrize(
    ("t", "error", "says"),
    [
        (torch.tensor(1.0), ArgumentError, "t: has no dimension"),
        (np.float32(1), ArgumentTypeError, "t: expected a tensor, an array or an iterable"),
        (np.array(1.0), ArgumentError, "t: has no dimension"),
        (5, ArgumentTypeError, "t: expected a tensor, an array or an iterable of them, got int"),
        ([], ArgumentError, "t: has no batches"),
        ([1, 2], ArgumentTypeError, "expected a torch.Tensor, got int"),
        ([torch.tensor(1.0)], ArgumentError, "a batch has no dimension"),
        ([weights(2, 3), weights(2, 4)], ArgumentError, "differ in dtype or in the shape"),
        (np.array(["a"]), ArgumentTypeError, "torch has no dtype like numpy's <U1"),
        (torch.zeros(2, 2).to_sparse(), ArgumentTypeError, "expected a dense tensor"),
        (torch.zeros(2, 2, device="meta"), ArgumentTypeError, "on meta"),
    ],
    ids=[
        "0-d",
        "number",
        "0-d-array",
        "int",
        "none",
        "ints",
        "0-d-batch",
        "shapes",
        "text",
        "sparse",
        "meta",
    ],
)
def test_what_is_no_table_is_refused(t, error, says):
    with pytest.raises(error, match=says):
        CompressedTable.from_tensor(t)


def test_a_batch_that_differs_later_is_refused_and_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(build, "SAMPLE_BYTES", 1024)
    gc.collect()
    before = open_files()
    good = weights(500, 16)
    for bad, says in (
        (good.double(), "dtype torch.float64"),
        (good[:, :15], r"shape \[500, 15\]"),
        (torch.tensor(1.0), r"shape \[\]"),
        ("text", "got str"),
    ):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=says):
            CompressedTable.from_tensor(iter([good, good, bad]))  # type: ignore[arg-type]
    gc.collect()
    assert not open_files() - before


# Codecs and options


def test_a_codec_may_be_given():
    x = weights()
    codec = InvariantCodec.fit(x[:100])
    table = CompressedTable.from_tensor(x, codec=codec)
    assert table.codec is codec and same_bits(table[:], x)
    published: dict[str, Any] = {
        "chunk_bytes": 4,
        "code_bits": 1,
        "grouped": False,
        "uniform": False,
    }
    assert CompressedTable.from_tensor(x, codec="ibp", **published).codec.describe() == (
        "ibp 4B k1 positional"
    )
    assert CompressedTable.from_tensor(x[:0], codec=codec).shape == (0, 64)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (
            {"layout": "sideways"},
            ArgumentError,
            "layout: 'sideways', accepted are compact, inplace",
        ),
        ({"codec": "nonsense"}, ArgumentError, "nonsense"),
        ({"codec": 7}, ArgumentTypeError, "codec: expected a name or a codec, got int"),
        ({"codec": "ibp", "chunk_bytes": 3}, ArgumentError, "chunk_bytes: 3"),
        ({"codec": "raw", "chunk_bytes": 4}, ArgumentTypeError, "raw: takes no options"),
        (
            {"codec": InvariantCodec.fit(weights(9, 8))},
            ArgumentError,
            r"codec: fitted for rows \[8\]",
        ),
        (
            {"codec": InvariantCodec.fit(weights().double())},
            ArgumentError,
            "codec: fitted for rows .* torch.float64",
        ),
        (
            {"codec": InvariantCodec.fit(weights()), "chunk_bytes": 4},
            ArgumentTypeError,
            r"options: \['chunk_bytes'\] are for fitting",
        ),
    ],
    ids=["layout", "name", "type", "option", "raw-option", "shape", "dtype", "fitted-option"],
)
def test_options_that_do_not_fit_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        CompressedTable.from_tensor(weights(), **options)


def test_the_same_seed_makes_the_same_table():
    x = torch.cat([weights(40_000, 64), weights(40_000, 64, seed=2) * 1e9])
    tables = [CompressedTable.from_tensor(x, codec="ibp", seed=3) for _ in range(2)]
    assert tables[0].codec == tables[1].codec


# Progress and failures


def test_progress_counts_rows_up_to_all(monkeypatch):
    monkeypatch.setattr(build, "BATCH_BYTES", 64 << 10)
    calls: list[Any] = []
    x = weights(2000, 64)
    CompressedTable.from_tensor(x, codec="ibp", progress=lambda *p: calls.append(p))
    assert len(calls) == 8 and calls[-1] == (2000, 2000) and calls == sorted(calls)
    calls.clear()
    CompressedTable.from_tensor(x.split(999), codec="ibp", progress=lambda *p: calls.append(p))
    assert calls[-1] == (2000, None)


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fails", ["iterator", "progress", "memory", "available", "mapping"])
def test_what_fails_half_way_leaves_nothing_behind(kind, fails, monkeypatch):
    monkeypatch.setattr(build, "BATCH_BYTES", 64 << 10)
    monkeypatch.setattr(build, "SAMPLE_BYTES", 64 << 10)
    x = weights(4000, 64)
    make(x, kind)
    gc.collect()
    before = open_files()
    options: dict[str, Any] = {}

    def batches() -> Iterator[torch.Tensor]:
        for number, batch in enumerate(x.split(500)):
            if number == 5 and fails == "iterator":
                raise Stop
            yield batch

    expected: type[BaseException] = Stop
    if fails == "progress":

        def progress(done, total):
            if done > 1000:
                raise Stop

        options["progress"] = progress
    else:
        options["progress"] = False
    if fails == "memory":
        calls = iter(range(100))

        def no_memory(self, data, pack=build.PartsBuilder._pack):
            if next(calls) == 3:
                raise MemoryError
            pack(self, data)

        monkeypatch.setattr(build.PartsBuilder, "_pack", no_memory)
        expected = MemoryError
    elif fails == "available":
        left = iter([1 << 40] * 4)
        monkeypatch.setattr("bitslab.engine.memory.host.available_bytes", lambda: next(left, 0))
        expected = BitslabError
    elif fails == "mapping":

        class NoRoom(page_locking.MappedMemory):
            def __new__(cls, *args):
                raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(host, "MappedMemory", NoRoom)
        expected = BitslabError
    layout, codec = KINDS[kind]
    with pytest.raises(expected):
        CompressedTable.from_tensor(batches(), layout, codec, **options)
    gc.collect()
    assert not open_files() - before


# Memory

MEASURED = """
import ctypes, gc, json, sys, threading, time
from pathlib import Path
import numpy as np, torch
from bitslab import CompressedTable, InvariantCodec
from bitslab.tables import build
from tests.tables.kinds import KINDS

build.BATCH_BYTES = 4 << 20
build.SAMPLE_BYTES = 1 << 20
rows, columns = 52_000, 256
torch.set_num_threads(2)

def batches():
    generator = torch.Generator().manual_seed(1)
    for begin in range(0, rows, 2000):
        yield torch.randn(2000, columns, generator=generator).mul_(0.02)

def mapped():
    with open(sys.argv[1], "wb") as file:
        for batch in batches():
            file.write(batch.numpy().tobytes())
    return np.memmap(sys.argv[1], np.float32, "r", shape=(rows, columns))

def resident():
    # Not the pages of mapped files, which the system takes back when it likes.
    lines = dict(l.split(":") for l in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[k].split()[0]) << 10 for k in ("RssAnon", "RssShmem"))

def extra(t, layout, codec):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, peak, stop = resident(), 0, threading.Event()

    def watch():
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, resident())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with CompressedTable.from_tensor(t, layout, codec, progress=False):
        stop.set()
        watcher.join()
    return peak - before

found = {}
for kind, (layout, codec) in KINDS.items():
    few = iter(next(batches())[:500].split(100))
    CompressedTable.from_tensor(few, layout, codec).close()  # compiles
    for source in (mapped, batches):
        # The least of up to four: what malloc keeps of freed memory comes on top, by chance.
        name = f"{kind} {source.__name__}"
        for _ in range(4):
            found[name] = min(extra(source(), layout, codec), found.get(name, rows * columns * 4))
            if found[name] < 6.5 * build.BATCH_BYTES:
                break
print(json.dumps({"extra": found, "raw": rows * columns * 4, "batch": build.BATCH_BYTES}))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_extra_memory_while_a_table_is_made_is_a_few_batches(tmp_path):
    ran = run_forked(["-c", MEASURED, str(tmp_path / "rows")])
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    # The packed rows are in a memory file, which counts only where it is mapped and touched.
    assert found["raw"] > 12 * found["batch"]
    for name, extra in found["extra"].items():
        assert extra < 7 * found["batch"], (name, found)


def test_short_rows_are_packed_in_batches_that_count_their_metadata():
    assert build.rows_per_batch(1) == build.rows_per_batch(64) == (32 << 20) // 64
    assert build.rows_per_batch(1 << 20) == 32 and build.rows_per_batch(1 << 27) == 32
    x = packable(torch.uint8, (100_000,))
    assert same_bits(make(x, "compact")[:], x)
    assert bitslab.CompressedTable.from_tensor(x).nbytes <= x.nbytes * 4 + 16
