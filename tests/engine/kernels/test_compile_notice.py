"""A first use that compiles says so: once, on a terminal, when it takes long."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
import textwrap
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from bitslab.engine.kernels import compile_notice
from bitslab.engine.kernels.compile_notice import CompileNotice
from bitslab.engine.kernels.cpu import compiling

LINE = "bitslab: compiling kernels for a test: some seconds, and kept for the next process"
KERNEL = """
    import numba

    @numba.njit
    def inner(x):
        return x + 1

    @numba.njit(cache=True)
    def kernel(x):
        return inner(x) + 1
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def every_compilation_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BITSLAB_QUIET", raising=False)
    monkeypatch.setattr(compile_notice, "AFTER_S", 0.0)


def until_said(stderr: io.StringIO) -> str:
    """Return what is written, as soon as it is a line."""
    end = time.monotonic() + 10
    while not stderr.getvalue().endswith("\n") and time.monotonic() < end:
        time.sleep(0.01)
    return stderr.getvalue()


def test_one_line_is_written_once() -> None:
    notice = CompileNotice("kernels for a test")
    with redirect_stderr(Terminal()) as stderr:
        for _ in range(3):
            with notice.watching():
                said = until_said(stderr)
    assert said.startswith(LINE) and said.count("\n") == 1 and "BITSLAB_QUIET=1" in said


def test_short_compilations_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_notice, "AFTER_S", 0.1)
    notice = CompileNotice("kernels for a test")
    with redirect_stderr(Terminal()) as stderr:
        for _ in range(100):
            with notice.watching():
                time.sleep(0.005)
    assert stderr.getvalue().startswith(LINE)


@pytest.mark.parametrize("way", ["no terminal", "BITSLAB_QUIET", "quick", "loaded"])
def test_nothing_is_written(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load_s = 0.0
    stderr = io.StringIO() if way == "no terminal" else Terminal()
    if way == "BITSLAB_QUIET":
        monkeypatch.setenv("BITSLAB_QUIET", "1")
    elif way == "quick":
        monkeypatch.setattr(compile_notice, "AFTER_S", 3600.0)
    elif way == "loaded":
        load_s = 3600.0
    notice = CompileNotice("kernels for a test", load_s)
    with redirect_stderr(stderr):
        for _ in range(3):
            with notice.watching():
                time.sleep(0.02)
    assert not stderr.getvalue()


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "none"])
def test_a_process_without_stderr_compiles(closed: bool) -> None:
    stderr = Terminal() if closed else None
    if stderr is not None:
        stderr.close()
    with redirect_stderr(stderr), CompileNotice("kernels for a test").watching():
        time.sleep(0.02)


def test_numba_says_so_when_it_compiles_and_not_when_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_kernel.py").write_text(textwrap.dedent(KERNEL))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)

    def said() -> str:
        monkeypatch.setattr(compiling, "notice", CompileNotice("kernels for a test"))
        spec: Any = importlib.util.spec_from_file_location("a_kernel", tmp_path / "a_kernel.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "a_kernel", module)
        spec.loader.exec_module(module)
        with redirect_stderr(Terminal()) as stderr:
            assert compiling.call(module.kernel, 1) == 3
        return stderr.getvalue()

    compiled = said()
    assert compiled.startswith(LINE) and compiled.count("\n") == 1
    assert not said(), "loaded, not compiled"


ON_A_GPU = """
    import io, sys, torch, bitslab
    from bitslab.engine.kernels import compile_notice, cuda

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    compile_notice.AFTER_S = 0.0
    cuda.notice = compile_notice.CompileNotice("kernels for a test")
    sys.stderr = Terminal()
    bitslab.compress(torch.randn(300, 64, device="cuda"), "ibp")
    print(sys.stderr.getvalue(), end="")
"""


@pytest.mark.gpu
def test_nvrtc_says_so_when_it_compiles(tmp_path: Path) -> None:
    environment = {**os.environ, "CUPY_CACHE_DIR": str(tmp_path), "BITSLAB_QUIET": ""}
    code = textwrap.dedent(ON_A_GPU)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(LINE) and done.stdout.count("\n") == 1
