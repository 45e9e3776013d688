"""What the scripts of test_processes.py and test_offload_processes.py share, in their processes."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bitslab.activations.disk import DiskRates

RATES = DiskRates(1 << 20, 2, 2, 1e9, 1e9, 1e9, 1e9, direct=True)
#: Ways to end, with the signal, if it is one.
ENDS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "interrupt": signal.SIGINT,
    "exception": None,
    "exit": None,
}
#: Of these no process learns.
UNNOTICED = ("kill", "term")
#: Of a child that should have ended otherwise.
TOO_LATE = 77


def files(folder: str | os.PathLike[str]) -> list[str]:
    """Return the files in a folder that this process has open, named or not."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the one that listed them
            continue
    return [link for link in links if link.startswith(os.path.realpath(folder) + "/")]


@contextmanager
def in_use(folder: str) -> Iterator[None]:
    """Refuse to remove the name of a file in a folder, as file systems do while it is in use."""
    unlink = os.unlink

    def busy(path: Any, *more: Any, **options: Any) -> None:
        if Path(path).parent == Path(folder):
            raise OSError(16, "is in use")
        unlink(path, *more, **options)

    os.unlink = busy
    try:
        yield
    finally:
        os.unlink = unlink


def _ended_within(pid: int, seconds: float) -> int | None:
    """Return the status of a child that ends in time, else None."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.005)
    return None


def ended(begin: Callable[[], Callable[[], object]]) -> Iterator[str]:
    """End a forked child in each of the ENDS; yield its name once the child has ended.

    Parameters
    ----------
    begin : callable
        What the child does first. It returns what the child does again and again until a signal
        comes.
    """
    for end, number in ENDS.items():
        ready, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready)
            sys.stderr = open(os.devnull, "w")
            signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored
            work = begin()
            os.write(write, b"1")
            if end == "exception":
                raise RuntimeError("in the middle of a step")
            if end == "exit":
                sys.exit(0)
            until = time.monotonic() + 60
            while time.monotonic() < until:
                work()
            os._exit(TOO_LATE)
        os.close(write)
        assert os.read(ready, 1) == b"1", end
        os.close(ready)
        status = None
        while number is not None and status is None:
            time.sleep(0.05)  # in the middle of the work
            # Again, as somebody at a keyboard would: Python ignores an exception, and so an
            # interruption, that is raised while an object is freed.
            os.kill(pid, number)
            status = _ended_within(pid, 5.0)
        if status is None:
            _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) or end not in UNNOTICED, (end, status)
        assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) != TOO_LATE, end
        yield end


def check_in_child(check: Callable[[], None]) -> None:
    """Run a check in a forked child that ends at once, with no cleaning up; fail as it does."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            check()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
