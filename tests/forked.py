"""Python processes that begin with packages imported: forks of one that has imported them.

Starting Python with torch takes two seconds, with a framework five to ten. What tests look at is
seldom the start, so that commands, scripts and examples run in forks of a process that was started
once for all tests of a worker. Each has arguments, environment, working folder, modules and exit
status of its own, as one that was started alone.
"""

from __future__ import annotations

import atexit
import builtins
import faulthandler
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run_forked(
    arguments: Sequence[str | Path],
    *,
    imports: Sequence[str] = ("torch", "bitslab"),
    cwd: str | Path | None = None,
    input: str = "",
    env: Mapping[str, str] | None = None,
    timeout_s: int = 300,
) -> subprocess.CompletedProcess[str]:
    """Run Python and return what it printed and its exit status, as `subprocess.run` does.

    Parameters
    ----------
    arguments : sequence of str or Path
        What would follow ``python``: any ``-W``, then ``-c``, ``-m`` or a script, and what they
        are given.
    imports : sequence of str
        Modules that have been imported when it begins.
    cwd, input, env
        As for `subprocess.run`. Of the environment, what packages read when they are imported is
        that of the first call with these imports.
    timeout_s : int
        Seconds until it is ended by SIGALRM.
    """
    (done,) = run_forked_together(
        [arguments], imports=imports, cwd=cwd, input=input, env=env, timeout_s=timeout_s
    )
    return done


def run_forked_together(
    commands: Sequence[Sequence[str | Path]],
    *,
    imports: Sequence[str] = ("torch", "bitslab"),
    cwd: str | Path | None = None,
    input: str = "",
    env: Mapping[str, str] | None = None,
    timeout_s: int = 300,
) -> list[subprocess.CompletedProcess[str]]:
    """Run Python several times at once, as `run_forked` does once.

    Parameters
    ----------
    commands : sequence of sequence of str or Path
        The arguments of each.
    imports, cwd, input, env, timeout_s
        As for `run_forked`, of each.
    """
    with tempfile.TemporaryDirectory() as folder:
        requests: list[dict[str, Any]] = []
        for i, arguments in enumerate(commands):
            files = [Path(folder, f"{name}{i}") for name in ("in", "out", "err")]
            files[0].write_text(input)
            request = {
                "arguments": [str(argument) for argument in arguments],
                "cwd": str(cwd or os.getcwd()),
                "env": dict(os.environ if env is None else env),
                "timeout_s": timeout_s,
                "files": [str(path) for path in files],
            }
            requests.append(request)
        parent = _parent_of(tuple(imports))
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write(json.dumps(requests) + "\n")
        parent.stdin.flush()
        statuses = parent.stdout.readline()
        assert statuses, f"a process that has imported {', '.join(imports)} has ended"
        return [
            subprocess.CompletedProcess(
                request["arguments"],
                status,
                *(Path(path).read_text() for path in request["files"][1:]),
            )
            for request, status in zip(requests, json.loads(statuses), strict=True)
        ]


@functools.cache
def _parent_of(imports: tuple[str, ...]) -> subprocess.Popen[str]:
    """Start a process that imports and then forks; it ends with this one."""
    parent = subprocess.Popen(
        [sys.executable, __file__, *imports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(parent.communicate)
    return parent


def _next_request(imports: Sequence[str]) -> dict[str, Any] | None:
    """Import, then return a request in each fork that is to do it, and None in the end."""
    # Where tests are, for what they alone import; children have it where they ask for it.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    for name in imports:
        __import__(name)
    del sys.path[0]
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        children = []
        request: dict[str, Any]
        for request in json.loads(line):
            child = os.fork()
            if child == 0:
                return request
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        print(json.dumps([os.waitstatus_to_exitcode(status) for status in statuses]), flush=True)
    return None


def _become(request: dict[str, Any]) -> None:
    """Be the process that a request asks for, up to its exit."""
    signal.alarm(request["timeout_s"])
    for number, path in enumerate(request["files"]):
        file = os.open(path, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY, 0o600)
        os.dup2(file, number)
        os.close(file)
    faulthandler.enable()
    sys.stdin = open(0, closefd=False)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    kind, *rest = request["arguments"]
    while kind == "-W":
        action, _, category, module = rest[0].split(":")
        warnings.filterwarnings(action, "", getattr(builtins, category), rf"{module}\Z")
        kind, *rest = rest[1:]
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv = rest
        sys.path.insert(0, request["cwd"])
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    del sys.path[0]  # this folder
    if (_request := _next_request(sys.argv[1:])) is not None:
        _become(_request)
