"""Training on a CPU whose activations leave memory: peak, CPU seconds and the same gradients.

Each way runs in processes of its own, in turns, with inputs that are fresh in each step and the
same for all. The peak is the process's largest resident memory (VmHWM) over what it had before its
first whole step, when parameters, gradients and torch's own buffers were there. glibc keeps memory
that was freed for what comes next; with MALLOC_MMAP_THRESHOLD_ set it gives that of tensors back at
once, for which every way pays with page faults.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import activations_turns
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bitslab

Rows = list[dict[str, Any]]
LAYERS, HIDDEN, HEADS = 8, 512, 8
#: Of the attempts at a step, in one process; the first two warm up.
STEPS, WARM_STEPS = 6, 2
#: The environments that all ways are measured in.
ALLOCATORS: dict[str, dict[str, str]] = {
    "glibc as it comes": {},
    "freed memory given back (MALLOC_MMAP_THRESHOLD_=131072)": {"MALLOC_MMAP_THRESHOLD_": "131072"},
}
IN_FLIGHT_BYTES = 16 << 20


class Layers(nn.Module):
    """Transformer layers, each of which may be a checkpoint."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                HIDDEN, HEADS, 4 * HIDDEN, 0.1, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def saved_to_files(folder: str) -> Any:
    """Return hooks that write each saved tensor to a file by torch.save, as torch's tutorial does.

    https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html
    """

    class File:
        def __init__(self, t: torch.Tensor) -> None:
            self.path = Path(folder, uuid.uuid4().hex)
            torch.save(t, self.path)

        def __del__(self) -> None:
            self.path.unlink(missing_ok=True)

    def pack(t: torch.Tensor) -> Any:
        return File(t) if t.nbytes >= 256 << 10 and not isinstance(t, nn.Parameter) else t

    def unpack(packed: Any) -> torch.Tensor:
        t: torch.Tensor = torch.load(packed.path) if isinstance(packed, File) else packed
        return t

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def attach(model: nn.Module, way: str, folder: str) -> bitslab.ActivationOffload | None:
    if way == "bitslab host":
        return bitslab.offload_activations(model, policy="raw")
    if way == "bitslab disk":
        return bitslab.offload_activations(
            model, policy="raw", disk=folder, in_flight_bytes=IN_FLIGHT_BYTES
        )
    if way == "bitslab disk, packed":
        return bitslab.offload_activations(
            model,
            policy="static",
            codecs="zvc+ibp",
            disk=folder,
            in_flight_bytes=IN_FLIGHT_BYTES,
        )
    return None


CONTEXTS: dict[str, Callable[[str], Any]] = {
    "save_on_cpu": lambda folder: torch.autograd.graph.save_on_cpu(),
    "torch.save hooks": saved_to_files,
}
WAYS = (
    "plain",
    "checkpoint each layer",
    "save_on_cpu",
    "torch.save hooks",
    "bitslab host",
    "bitslab disk",
    "bitslab disk, packed",
)


def memory(field: str) -> int:
    """Return a field of Linux's own account of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def run_way(way: str, folder: str, batch: int, tokens: int, seed: int) -> dict[str, Any]:
    """Train in one way, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Layers(way.startswith("checkpoint"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model(torch.randn(1, 8, HIDDEN)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    offload = attach(model, way, folder)
    context = CONTEXTS.get(way, lambda folder: contextlib.nullcontext())
    before = memory("VmRSS")
    cpu, wall = [], []
    for i in range(STEPS):
        torch.manual_seed(100 * seed + i)
        x = torch.randn(batch, tokens, HIDDEN)
        begin, began = time.process_time(), time.perf_counter()
        with context(folder):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        del loss
        if i < STEPS - 1:
            optimizer.zero_grad(set_to_none=False)
        if i >= WARM_STEPS:
            cpu.append(time.process_time() - begin)
            wall.append(time.perf_counter() - began)
    peak = memory("VmHWM") - before
    digest = hashlib.sha256()
    for p in model.parameters():
        assert p.grad is not None
        digest.update(p.grad.numpy().tobytes())
        digest.update(p.detach().numpy().tobytes())
    found: dict[str, Any] = {"peak": peak, "cpu": cpu, "wall": wall, "digest": digest.hexdigest()}
    if offload is not None:
        found["stats"] = offload.stats()
        offload.close()
    return found


def measure(
    way: str, arguments: argparse.Namespace, folder: str, seed: int, env: dict[str, str]
) -> dict[str, Any]:
    """Train in one way, in a process of its own."""
    command = [
        sys.executable,
        __file__,
        way,
        folder,
        str(arguments.cpu_batch),
        str(arguments.cpu_tokens),
    ]
    done = subprocess.run(
        [*command, str(seed)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{way}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def row_of(way: str, runs: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row of the table: the best CPU seconds of all turns, and the median peak."""

    def least(some: list[dict[str, Any]], what: str) -> float:
        return float(min(min(run[what]) for run in some))

    def peak(some: list[dict[str, Any]]) -> float:
        return float(statistics.median(run["peak"] for run in some))

    stats = runs[0].get("stats", {})
    steps = STEPS * 1e6
    return {
        "way": way,
        "peak MB": peak(runs) / 1e6,
        "lower": f"{1 - peak(runs) / peak(plain):.0%}",
        "CPU s a step": least(runs, "cpu"),
        "x plain": least(runs, "cpu") / least(plain, "cpu"),
        "s a step": least(runs, "wall"),
        "moved MB a step": stats.get("moved_out_bytes", 0) / steps,
        "to the disk": stats.get("disk_written_bytes", 0) / steps,
        "gradients": "equal"
        if all(a["digest"] == b["digest"] for a, b in zip(runs, plain, strict=True))
        else "OTHER",
    }


def cpu(arguments: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Rows]:
    """Return a table for each allocator, and that of planned steps beside plain ones."""
    tables: dict[str, Rows] = {}
    ways = list(dict.fromkeys((WAYS[0], *arguments.cpu_ways)))
    with tempfile.TemporaryDirectory(dir=arguments.folder or os.getcwd()) as folder:
        for name, env in ALLOCATORS.items():
            runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
            for turn in range(arguments.repetitions):
                for way in ways:
                    progress(f"cpu: {name}, turn {turn + 1}: {way}")
                    runs[way].append(measure(way, arguments, folder, turn, env))
            title = (
                f"{LAYERS} transformer layers of {HIDDEN}, float32, {arguments.cpu_batch} x "
                f"{arguments.cpu_tokens} tokens, one thread: {name}"
            )
            tables[title] = [row_of(way, found, runs["plain"]) for way, found in runs.items()]
        if arguments.turns:
            make = lambda: Layers(False)  # noqa: E731
            tables |= activations_turns.table(arguments, make, HIDDEN, folder, progress)
    return tables


if __name__ == "__main__":
    way, folder, *numbers = sys.argv[1:]
    print(json.dumps(run_way(way, folder, *map(int, numbers))))
