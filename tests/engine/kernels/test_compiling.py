"""Processes that compile at the same time, into one new cache, do not spoil it for each other."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import weakref
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cpu import jit
from bitslab.engine.kernels.cpu.jit import LockedCache
from tests.forked import run_forked_together

#: Each of two processes compiles what the other has compiled, or is compiling, for other widths.
CODE = """
import sys, torch
from bitslab.engine.kernels import cpu
rows = (torch.arange(300 * 64) % 251).to(torch.uint8).view(300, 64)

def count(width):
    counts = cpu.count_bits(rows, width)
    ones = sum(int((rows >> bit & 1).sum()) for bit in range(8))
    assert int(counts.sum()) == ones

def copy(width):
    out = torch.zeros(9, 64, dtype=torch.uint8)
    cpu.copy_rows(rows, 64, torch.arange(9).to({2: torch.int32, 4: torch.int64}[width]), out)
    assert torch.equal(out, rows[:9])

def move(width):
    words, counts = rows.view(-1).view(torch.int32), torch.ones(9)
    out = torch.zeros(9, dtype=torch.int32)
    at = torch.arange(9)
    cpu.move_rows(words, at, counts.to({2: torch.int32, 4: torch.int64}[width]), out, at)
    assert torch.equal(out, words[:9])

width = int(sys.argv[1])
for kernel in (count, copy, move) if width == 2 else (move, copy, count):
    kernel(width)
print("numba.typed.typeddict" in sys.modules)  # of what Numba loads before it compiles
"""


def _twice(x: int) -> int:
    return 2 * x


def _last_doubled(x: int) -> int:
    """Return 2 x, by an option of Numba's that it types by errors."""
    order = np.argsort(np.arange(x + 1), kind="mergesort")
    return 2 * int(order[x])


class Held:
    """What a frame holds."""


def first_call(kernel: Any) -> weakref.ref[Held]:
    """Call a kernel that is not compiled yet; return what this frame held."""
    held = Held()
    assert kernel(21) == 42
    return weakref.ref(held)


def test_compiling_keeps_nothing_of_who_called() -> None:
    """Numba's tracebacks hold frames in cycles, which whoever calls would wait to be rid of."""
    gc.collect()
    gc.disable()
    try:
        assert first_call(numba.njit(_last_doubled))() is not None
        assert first_call(jit.njit(cache=False)(_last_doubled))() is None
    finally:
        gc.enable()


def test_a_kernel_is_compiled_within_another() -> None:
    inner = jit.njit(cache=False)(_twice)

    def outer(x: int) -> int:
        found: int = inner(x)
        return found + 1

    compiled: Any = numba.njit(outer)
    assert compiled(3) == 7


@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
def test_the_collector_is_left_as_it_was(on: bool) -> None:
    def unknown(x: Any) -> Any:
        return x.no_such_name

    try:
        (gc.enable if on else gc.disable)()
        assert jit.njit(cache=False)(_twice)(21) == 42
        assert gc.isenabled() == on
        with pytest.raises(numba.TypingError):
            jit.njit(cache=False)(unknown)(1.0)
        assert gc.isenabled() == on
    finally:
        gc.enable()


def test_the_collector_is_off_until_the_last_thread_has_compiled() -> None:
    collector = jit._Collector()
    collector.off("one")
    collector.off("other")
    collector.on("one")
    assert not gc.isenabled()
    collector.on("other")
    assert gc.isenabled()


def test_an_error_of_compiling_is_numbas_own() -> None:
    def unknown(x: Any) -> Any:
        return x.no_such_name

    with pytest.raises(numba.TypingError, match="no_such_name"):
        jit.njit(cache=False)(unknown)(1.0)


def test_processes_share_a_new_cache(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for compiles in (True, False):  # into the new cache, then out of it
        for done in run_forked_together(
            [["-c", CODE, width] for width in "24"],
            imports=("torch", "bitslab"),  # Numba has not read its environment
            env=environment,
        ):
            assert done.returncode == 0, done.stderr
            assert done.stdout == f"{compiles}\n"
        assert list(tmp_path.rglob("*.nbc"))


def test_every_kernel_has_a_cache_that_processes_share() -> None:
    names = [module.name for module in pkgutil.iter_modules(cpu.__path__)]
    kernels: dict[str, Any] = {
        f"{name}.{key}": value
        for name in names
        for key, value in vars(importlib.import_module(f"{cpu.__name__}.{name}")).items()
        if isinstance(value, Dispatcher)
    }
    assert len(kernels) > 150
    assert not [key for key, kernel in kernels.items() if type(kernel._cache) is not LockedCache]


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "as-numba-does"])
def test_compiled_code_is_loaded_with_and_without_numbas_own_method(
    alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version of Numba without what loads code alone still loads it."""
    assert jit._loads_alone  # of the version that is installed
    monkeypatch.setattr(jit, "_loads_alone", alone)
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))
    kernel = jit.njit(cache=True)(_twice)
    assert kernel(21) == 42
    (signature,) = kernel.signatures
    found = jit.LockedCache(_twice).load_overload(signature, kernel.targetctx)
    assert found.entry_point(21) == 42
