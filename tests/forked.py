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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

#: What most commands import, kernels for the CPU among it.
IMPORTS = ("torch", "bitslab", "tests.loaded_kernels")


def run_forked(
    arguments: Sequence[str | Path],
    *,
    imports: Sequence[str] = IMPORTS,
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
    imports: Sequence[str] = IMPORTS,
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
        statuses = _parent_of(tuple(imports)).ask(requests)
        assert statuses, f"a process that has imported {', '.join(imports)} has ended"
        return [
            subprocess.CompletedProcess(
                request["arguments"],
                status,
                *(Path(path).read_text() for path in request["files"][1:]),
            )
            for request, status in zip(requests, json.loads(statuses), strict=True)
        ]


@dataclass(frozen=True)
class _Parent:
    """A process that has imported modules, and forks; it ends with this one.

    Parameters
    ----------
    requests, answers : IO[str]
        Where it reads and writes a line each time.
    """

    requests: IO[str]
    answers: IO[str]

    def ask(self, request: Any) -> str:
        """Send a request and return the answer, "" if the process has ended."""
        self.requests.write(json.dumps(request) + "\n")
        self.requests.flush()
        return self.answers.readline()

    def end(self) -> None:
        """Let it end: there are no more requests."""
        self.requests.close()
        self.answers.close()


@functools.cache
def _parent_of(imports: tuple[str, ...]) -> _Parent:
    """Start a process that imports and then forks."""
    if set(IMPORTS[:2]) < set(imports) and imports != IMPORTS:
        # A fork of the one that has imported most of it.
        with tempfile.TemporaryDirectory() as folder:
            paths = [os.path.join(folder, name) for name in ("requests", "answers")]
            for path in paths:
                os.mkfifo(path)
            request = {"imports": imports, "env": dict(os.environ), "pipes": paths}
            _parent_of(IMPORTS).ask(request)
            parent = _Parent(open(paths[0], "w"), open(paths[1]))
            atexit.register(parent.end)
            return parent
    process = subprocess.Popen(
        [sys.executable, __file__, *imports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    assert process.stdin is not None and process.stdout is not None
    return _Parent(process.stdin, process.stdout)


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
        asked = json.loads(line)
        if isinstance(asked, dict):  # to fork one that imports more
            if os.fork() == 0:
                for number, path in enumerate(asked["pipes"]):
                    file = os.open(path, os.O_WRONLY if number else os.O_RDONLY)
                    os.dup2(file, number)
                    os.close(file)
                sys.stdin = open(0, closefd=False)
                os.environ.clear()
                os.environ.update(asked["env"])
                return _next_request(asked["imports"])
            print("forked", flush=True)
            continue
        children = []
        request: dict[str, Any]
        for request in asked:
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
