"""What swapping a tensor costs the host in calls of Python functions, up to the driver's own.

Times on a GPU are in `benchmarks/activation_hooks.py`. A call takes 0.1 to 0.3 us.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from bitslab.engine.codecs import (
    ChainCodec,
    FlatCodec,
    InvariantBlobCodec,
    ZvcCodec,
    chain,
    packed_blob,
    zvc,
)
from bitslab.engine.kernels.cuda.frames import BoundKernel
from bitslab.engine.kernels.cuda.kernels import CudaKernels
from bitslab.engine.kernels.cuda.parameters import Parameters, Value

CPU = torch.device("cpu")
ELEMENTS = 5000


class IdleRunner:
    """A `Runner` whose kernels are bound as those of a GPU, and counted where they would start."""

    multiprocessors, shared_bytes_per_multiprocessor = 132, 100 << 10

    def __init__(self) -> None:
        self.mailbox = torch.zeros(4, dtype=torch.int64)
        self.bound = self.started = 0

    def bind(
        self,
        variant: Any,
        parameters: type[Parameters],
        threads: Any,
        shared_bytes: int = 0,
        /,
        **fixed: Value,
    ) -> BoundKernel:
        self.bound += 1
        return BoundKernel(self._start, 0, parameters, threads, shared_bytes, fixed)

    def _start(self, *arguments: Any) -> None:
        self.started += 1


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> IdleRunner:
    """Give the codecs, on tensors of the CPU, the kernels of a GPU."""
    made = IdleRunner()
    kernels = CudaKernels(made)
    for module in (zvc, chain, packed_blob):
        monkeypatch.setattr(module, "kernels_for", lambda device: kernels)
    for module in (chain, packed_blob):
        monkeypatch.setattr(module, "pack_blob", kernels.pack_blob)
        monkeypatch.setattr(module, "unpack_blob", kernels.unpack_blob)
    return made


def calls_of(work: Callable[..., Any], *arguments: Any) -> int:
    """Return how many functions of bitslab a call takes."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        name = str(frame.f_globals.get("__name__"))
        calls += event == "call" and name.startswith("bitslab.")

    sys.setprofile(count)
    try:
        work(*arguments)
    finally:
        sys.setprofile(None)
    return calls


#: By codec: launches, and most calls, of encoding and of decoding. With one of each a tensor is
#: seen as bytes, which zvc and zvc+ibp need on the CPU alone.
MOST = {"zvc": (1, 6, 1, 5), "ibp-blob": (1, 7, 2, 12), "zvc+ibp": (2, 12, 3, 16)}


@pytest.mark.parametrize("name", MOST)
def test_kernels_are_bound_to_a_size_once(name: str, runner: IdleRunner) -> None:
    t = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1)).relu()
    codec = {
        "zvc": ZvcCodec(),
        "ibp-blob": packed(t),
        "zvc+ibp": ChainCodec(packed(t)),
    }[name]
    swap: FlatCodec = codec.for_flat(ELEMENTS, t.dtype, CPU)
    data = torch.zeros(swap.max_bytes, dtype=torch.uint8)
    swap.encode(t, data)
    swap.decode(data)
    bound, started = runner.bound, runner.started
    encodes = calls_of(swap.encode, t, data)
    launches = runner.started - started
    decodes = calls_of(swap.decode, data)
    found = launches, encodes, runner.started - started - launches, decodes
    assert runner.bound == bound
    assert found[::2] == MOST[name][::2]
    assert found[1] <= MOST[name][1] and found[3] <= MOST[name][3], found


def packed(t: torch.Tensor) -> InvariantBlobCodec:
    """Fit a codec to a tensor; this is done by the kernels of the CPU."""
    return InvariantBlobCodec.fit(t)
