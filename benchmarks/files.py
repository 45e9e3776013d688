"""Measure `bitslab compress` and `decompress` of a safetensors file, beside ZipNN and a copy.

python benchmarks/files.py                              # 512 MB of bfloat16, on a GPU if there
python benchmarks/files.py --device cpu --mb 256
python benchmarks/files.py --file model.safetensors     # of a file that is there

The commands run in this process, so that Python's start is not in it; what the first call in a
process has to load or compile is in the column "first". Every repetition has a file of its own,
which lies in the page cache, and every result is compared with its input byte for byte. All writers
sync what they wrote, which the disk under --folder limits: "plain copy" shows by how much, and
/dev/shm has no such limit; "plain write from memory" is what threads write that do nothing else, to
one file, whose lock they share. ZipNN gets each tensor in memory and writes what it returns, for
the first --peer-mb of the file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from timing import add_output, print_tables

from bitslab import cli
from bitslab.engine.files.new_file import NewFile
from bitslab.engine.files.positioned import write_at
from bitslab.report.workers import MOST_THREADS_OF_GPU

COPY_BYTES = 8 << 20


def make_file(path: Path, mb: int, dtype: torch.dtype, seed: int) -> None:
    """Write weights as those of a language model: matrices of three shapes, and norms."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    left = mb * 1_000_000 // dtype.itemsize
    layer = 0
    while left > 0:
        for name, shape in (("q", (4096, 4096)), ("up", (11008, 4096)), ("down", (4096, 11008))):
            rows = min(shape[0], max(1, left // shape[1]))
            if left > 0:
                scale = 0.012 * (1 + int(torch.randint(0, 5, (), generator=generator)) / 2)
                x = torch.randn((rows, shape[1]), generator=generator).mul_(scale)
                tensors[f"layers.{layer}.{name}.weight"] = x.to(dtype)
                left -= x.numel()
        tensors[f"layers.{layer}.norm.weight"] = torch.ones(4096).to(dtype)
        layer += 1
    save_file(tensors, path, {"format": "pt"})


def command(*arguments: str | Path) -> None:
    """Run the command in this process; stop where it fails."""
    with contextlib.redirect_stdout(io.StringIO()):
        status = cli.main([str(a) for a in arguments])
    if status:
        raise SystemExit(f"bitslab {' '.join(map(str, arguments))}: exit status {status}")


def seconds(work: Callable[..., object], *arguments: Any) -> float:
    """Return the time that some work takes."""
    begin = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - begin


def copy(source: Path, target: Path) -> None:
    """Copy a file as the command writes one."""
    with open(source, "rb") as reader, NewFile(target) as new, open(new.temporary, "wb") as writer:
        while piece := reader.read(COPY_BYTES):
            writer.write(piece)


def write_by_threads(data: torch.Tensor, target: Path) -> None:
    """Write bytes in memory to a file as `bitslab decompress` does, by as many threads."""
    with NewFile(target) as new:
        fd = os.open(new.temporary, os.O_RDWR)
        try:
            os.ftruncate(fd, data.numel())
            with ThreadPoolExecutor(MOST_THREADS_OF_GPU) as pool:
                begins = range(0, data.numel(), COPY_BYTES)
                parts = ((begin, data[begin : begin + COPY_BYTES]) for begin in begins)
                list(pool.map(lambda part: write_at(fd, *part), parts))
        finally:
            os.close(fd)


def check(source: Path, restored: Path) -> None:
    """Stop unless two files have the same tensors."""
    one, other = load_file(source), load_file(restored)
    if one.keys() != other.keys() or any(
        not torch.equal(t.flatten().view(torch.uint8), other[name].flatten().view(torch.uint8))
        for name, t in one.items()
    ):
        raise SystemExit(f"{restored}: is not what was compressed")


def measure_zipnn(source: Path, folder: Path, peer_bytes: int) -> dict[str, Any] | None:
    """Return the rates of ZipNN on the first tensors of a file; None where it is not installed."""
    try:
        import zipnn
    except ImportError:
        print("ZipNN: left out, zipnn is not installed", file=sys.stderr)
        return None
    tensors, raw_bytes = [], 0
    for t in load_file(source).values():
        rows = max(1, (peer_bytes - raw_bytes) // max(1, t[0].nbytes))
        if raw_bytes < peer_bytes and t.dim() > 1:
            tensors.append(t[:rows])
            raw_bytes += tensors[-1].nbytes
    coder = zipnn.ZipNN(input_format="torch", threads=torch.get_num_threads())
    packed: list[bytes] = []

    def write(path: Path, pieces: list[Any]) -> None:
        with NewFile(path) as new, open(new.temporary, "wb") as file:
            for piece in pieces:
                file.write(piece)

    def pack() -> None:
        # It reorders the bits of its input in place, so it gets a copy.
        packed[:] = [coder.compress(t.clone()) for t in tensors]
        write(folder / "zipnn", packed)

    def unpack() -> None:
        restored[:] = [coder.decompress(data) for data in packed]
        write(folder / "zipnn", [t.view(torch.uint8).numpy().data for t in restored])

    restored: list[torch.Tensor] = []
    first = raw_bytes / seconds(pack) / 1e6
    later = raw_bytes / seconds(pack) / 1e6
    unpack()
    rate = raw_bytes / seconds(unpack) / 1e6
    for t, back in zip(tensors, restored, strict=True):
        if not torch.equal(back.flatten().view(torch.uint8), t.flatten().view(torch.uint8)):
            raise SystemExit("ZipNN: is not what was compressed")
    return {
        "what": "ZipNN",
        "file MB": raw_bytes / 1e6,
        "ratio": raw_bytes / sum(len(data) for data in packed),
        "compress MB/s, first": first,
        "compress MB/s": later,
        "decompress MB/s": rate,
    }


def main() -> int:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=512, help="bytes of a file in megabytes")
    parser.add_argument("--dtype", default="bfloat16", help="of the tensors")
    parser.add_argument("--file", type=Path, help="a safetensors file to take instead")
    parser.add_argument("--device", default="auto", help="as for the command")
    parser.add_argument("--folder", type=Path, help="where the files lie; a temporary folder")
    parser.add_argument("--repetitions", type=int, default=3, help="runs after the first")
    parser.add_argument("--peer-mb", type=int, default=128, help="what ZipNN gets")
    add_output(parser)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    packing, unpacking, copying, writing, ratios = [], [], [], [], []
    peer: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        packed, restored = folder / "packed.bitslab", folder / "restored.safetensors"
        options = ("--device", arguments.device, "--force")
        for i in range(arguments.repetitions + 1):
            source = arguments.file or folder / "in.safetensors"
            if arguments.file is None:
                make_file(source, arguments.mb, dtype, i)
            source.read_bytes()  # into the page cache
            nbytes = source.stat().st_size
            os.sync()
            packing.append(nbytes / seconds(command, "compress", source, packed, *options))
            unpacking.append(nbytes / seconds(command, "decompress", packed, restored, *options))
            check(source, restored)
            ratios.append(nbytes / packed.stat().st_size)
            copying.append(nbytes / seconds(copy, source, restored))
            data = torch.from_numpy(np.fromfile(source, np.uint8))
            writing.append(nbytes / seconds(write_by_threads, data, restored))
            del data
            if i == arguments.repetitions:
                peer = measure_zipnn(source, folder, arguments.peer_mb * 1_000_000)
    ours = {
        "what": f"bitslab, {arguments.device}, {torch.get_num_threads()} threads",
        "file MB": nbytes / 1e6,
        "ratio": statistics.median(ratios),
        "compress MB/s, first": packing[0] / 1e6,
        "compress MB/s": statistics.median(packing[1:]) / 1e6,
        "decompress MB/s, first": unpacking[0] / 1e6,
        "decompress MB/s": statistics.median(unpacking[1:]) / 1e6,
    }
    plain = {
        "what": "plain copy",
        "file MB": nbytes / 1e6,
        "compress MB/s, first": copying[0] / 1e6,
        "compress MB/s": statistics.median(copying[1:]) / 1e6,
    }
    written = {
        "what": "plain write from memory",
        "file MB": nbytes / 1e6,
        "decompress MB/s, first": writing[0] / 1e6,
        "decompress MB/s": statistics.median(writing[1:]) / 1e6,
    }
    rows = [ours, plain, written, *([] if peer is None else [peer])]
    print_tables({f"Files of {arguments.dtype}": rows}, arguments.json, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
