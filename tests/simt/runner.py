"""Runs the kernels' own text on the CPU, behind the host code that launches them on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bitslab.engine.kernels.cuda.launch import CudaKernels
from bitslab.engine.kernels.cuda.runner import MAILBOX_WORDS, Prepared
from bitslab.engine.kernels.cuda.source import AnyVariant, kernels_of, source_text
from tests.simt.module import ModuleSpec, SimtModule

_modules: dict[AnyVariant, SimtModule] = {}


class SimtRunner:
    """A `Runner` whose device is the CPU.

    Parameters
    ----------
    seed : int
        0 runs lanes in order, another seed in a random order.
    traced : bool
        Whether to keep the loads of rows that kernels make, launch by launch, in `loads`.
    """

    multiprocessors = 2
    shared_bytes_per_multiprocessor = 100 << 10

    def __init__(self, seed: int = 0, traced: bool = False) -> None:
        self.seed = seed
        self.traced = traced
        self.loads: list[np.ndarray[Any, Any]] = []
        self.mailbox = torch.zeros(MAILBOX_WORDS, dtype=torch.int64)
        self.launched: list[tuple[AnyVariant, str]] = []
        self.grids: list[tuple[int, ...]] = []

    def launch(
        self,
        variant: AnyVariant,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_bytes: int = 0,
    ) -> None:
        """Run a kernel to its end."""
        self.launched.append((variant, kernel))
        self.grids.append(grid)
        if variant not in _modules:
            _modules[variant] = SimtModule(*module_spec(variant))
        loads = _modules[variant].launch(
            kernel,
            grid,
            block,
            args,
            shared_bytes=shared_bytes,
            seed=self.seed,
            traced=self.traced,
        )
        if loads is not None:
            self.loads.append(loads)

    def prepare(
        self,
        variant: AnyVariant,
        kernel: str,
        threads: int,
        args: Sequence[Any],
        changing: Sequence[int],
        shared_bytes: int = 0,
    ) -> Prepared:
        """Return a kernel ready for launches that differ in few arguments."""

        def launch(blocks: int, *values: int) -> None:
            now = list(args)
            for place, value in zip(changing, values, strict=True):
                kind = type(args[place])
                now[place] = ctypes.c_void_p(value) if args[place] is None else kind(value)
            self.launch(variant, kernel, (blocks,), (threads,), now, shared_bytes)

        return launch


def module_spec(variant: AnyVariant) -> ModuleSpec:
    """Return what to compile for a variant."""
    return ModuleSpec(source_text(variant.file), variant.defines(), kernels_of(variant))


def simt_kernels(seed: int = 0) -> tuple[CudaKernels, SimtRunner]:
    """Return the CUDA backend on the CPU, and its runner."""
    runner = SimtRunner(seed)
    return CudaKernels(runner), runner
