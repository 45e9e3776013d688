"""Runs the kernels' own text on the CPU, behind the host code that launches them on a GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from bitslab.engine.kernels.cuda import CudaKernels
from bitslab.engine.kernels.cuda.parameters import Kind, Parameters, Value, kinds_of, split
from bitslab.engine.kernels.cuda.runner import MAILBOX_WORDS, Launch
from bitslab.engine.kernels.cuda.source import AnyVariant, kernels_of, source_text
from tests.simt.module import ModuleSpec, SimtModule

_modules: dict[AnyVariant, SimtModule] = {}

_NUMBERS = {"int": np.int32, "u32": np.uint32, "i64": np.int64}


class SimtRunner:
    """A `Runner` whose device is the CPU; each start runs a kernel to its end.

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

    def bind(
        self,
        variant: AnyVariant,
        parameters: type[Parameters],
        threads: int | tuple[int, int, int],
        shared_bytes: int = 0,
        /,
        **fixed: Value,
    ) -> Launch:
        """Return a kernel that is ready to be started."""
        kinds, kernel = kinds_of(parameters), parameters.kernel
        changing, _ = split(parameters, fixed)

        def launch(
            blocks: int | tuple[int, int, int], *values: int, stream: int | None = None
        ) -> None:
            given = {**fixed, **dict(zip(changing, values, strict=True))}
            grid = blocks if isinstance(blocks, tuple) else (blocks,)
            self.launched.append((variant, kernel))
            self.grids.append(grid)
            if variant not in _modules:
                _modules[variant] = SimtModule(*module_spec(variant))
            loads = _modules[variant].launch(
                kernel,
                grid,
                threads,
                [_argument(kind, given[name]) for name, kind in kinds.items()],
                shared_bytes=shared_bytes,
                seed=self.seed,
                traced=self.traced,
            )
            if loads is not None:
                self.loads.append(loads)
            self.ended(kernel)

        return launch

    def ended(self, kernel: str) -> None:
        """Do nothing: a test's device may change memory behind a kernel."""


def _argument(kind: Kind, value: Value) -> object:
    """Return what `SimtModule.launch` takes for a value."""
    if value is None or isinstance(value, torch.Tensor):
        return value
    return ctypes.c_void_p(value) if kind.c_type == "*" else _NUMBERS[kind.c_type](value)


def module_spec(variant: AnyVariant) -> ModuleSpec:
    """Return what to compile for a variant."""
    return ModuleSpec(source_text(variant.file), variant.defines(), kernels_of(variant))


def simt_kernels(seed: int = 0) -> tuple[CudaKernels, SimtRunner]:
    """Return the CUDA backend on the CPU, and its runner."""
    runner = SimtRunner(seed)
    return CudaKernels(runner), runner
