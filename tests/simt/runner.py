"""Runs the kernels' own text on the CPU, behind the host code that launches them on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bitslab.kernels.cuda.launch import MAILBOX_WORDS, CudaKernels
from bitslab.kernels.cuda.source import KERNELS, Variant, source_text
from tests.simt.module import ModuleSpec, SimtModule

_modules: dict[Variant, SimtModule] = {}


class SimtRunner:
    """A `Runner` whose device is the CPU.

    Parameters
    ----------
    seed : int
        0 runs lanes in order, another seed in a random order.
    """

    multiprocessors = 2
    shared_bytes_per_multiprocessor = 100 << 10

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.mailbox = torch.zeros(MAILBOX_WORDS, dtype=torch.int64)
        self.launched: list[tuple[Variant, str]] = []

    def launch(
        self,
        variant: Variant,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_bytes: int = 0,
    ) -> None:
        """Run a kernel to its end."""
        self.launched.append((variant, kernel))
        if variant not in _modules:
            _modules[variant] = SimtModule(*module_spec(variant))
        _modules[variant].launch(
            kernel, grid, block, args, shared_bytes=shared_bytes, seed=self.seed
        )


def module_spec(variant: Variant) -> ModuleSpec:
    """Return what to compile for a variant."""
    return ModuleSpec(source_text(variant.file), variant.defines(), KERNELS[variant.file])


def simt_kernels(seed: int = 0) -> tuple[CudaKernels, SimtRunner]:
    """Return the CUDA backend on the CPU, and its runner."""
    runner = SimtRunner(seed)
    return CudaKernels(runner), runner
