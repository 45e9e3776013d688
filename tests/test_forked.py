"""Forks of a process with imports behave as Python processes that are started alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import forked

run = partial(forked.run_forked, imports=("json",))
started = partial(subprocess.run, capture_output=True, text=True)

CODES = {
    "ends": "print('out'); import sys; print('err', file=sys.stderr)",
    "exits": "raise SystemExit(7)",
    "exits-with-words": "import sys; sys.exit('a word')",
    "is-killed": f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})",
    "has-arguments": "import sys; print(sys.argv, __name__, sys.stdin.read(), sys.path[0])",
    "exits-at-exit": "import atexit; atexit.register(print, 'last'); print('first')",
    "pickles": "import pickle\nclass C: pass\nassert type(pickle.loads(pickle.dumps(C()))) is C",
}


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_a_fork_does_what_a_process_does(code: str) -> None:
    alone = started([sys.executable, "-c", code, "a", "b"], stdin=subprocess.DEVNULL)
    done = run(["-c", code, "a", "b"])
    assert (done.returncode, done.stdout) == (alone.returncode, alone.stdout)
    assert done.stderr == alone.stderr


def test_several_run_at_once(tmp_path: Path) -> None:
    # Each waits for the other's file.
    code = (
        "import pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)\n"
        "print(sys.argv[1]); sys.exit(sys.argv[1] == 'b')"
    )
    done = forked.run_forked_together(
        [["-c", code, *names] for names in ("ab", "ba")], imports=("json",), cwd=tmp_path
    )
    assert [(each.returncode, each.stdout) for each in done] == [(0, "a\n"), (1, "b\n")]


def test_an_error_is_shown_with_its_place() -> None:
    done = run(["-c", "def f():\n    1 / 0\nf()"])
    assert done.returncode == 1
    assert 'File "<string>", line 2, in f' in done.stderr and "ZeroDivisionError" in done.stderr


def test_a_script_and_a_module_find_their_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("import sys; print(__name__, sys.argv[1:])")
    (tmp_path / "script.py").write_text("import sys, neighbour; print(__name__, sys.argv)")
    for arguments, options in (
        ([str(tmp_path / "script.py"), "x"], {}),
        (["-m", "neighbour", "x", "y"], {"cwd": tmp_path}),
    ):
        given: Any = options
        alone = started([sys.executable, *arguments], **given)
        done = run(arguments, **given)
        assert alone.returncode == done.returncode == 0, done.stderr
        assert done.stdout == alone.stdout


def test_nothing_of_one_fork_reaches_the_next(tmp_path: Path) -> None:
    code = "import sys, os, json\njson.seen = os.environ['SEEN'] = 'x'\nsys.path.append('x')\n"
    assert run(["-c", code], cwd=tmp_path).returncode == 0
    code = "import os, sys, json\nassert not hasattr(json, 'seen') and 'x' not in sys.path\n"
    code += "print(os.getcwd(), os.environ.get('SEEN'), os.environ['OTHER'], 'json' in sys.modules)"
    done = run(["-c", code], cwd=tmp_path, env={**os.environ, "OTHER": "1"})
    assert done.stdout == f"{tmp_path} None 1 True\n"


def test_one_that_imports_more_is_a_fork_of_the_one_with_torch(tmp_path: Path) -> None:
    code = "import os, sys; print('xml.dom' in sys.modules, os.getppid(), os.environ.get('SEEN'))"
    more = partial(forked.run_forked, imports=("torch", "bitslab", "xml.dom"))
    first, second = (more(["-c", code], env={**os.environ, "SEEN": str(n)}) for n in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    (_, parent, _), (_, again, _) = (each.stdout.split() for each in (first, second))
    assert (first.stdout, second.stdout) == (f"True {parent} 0\n", f"True {parent} 1\n")
    plain = forked.run_forked(["-c", code])
    assert plain.stdout.split()[0] == "False" and plain.stdout.split()[1] not in (parent, again)
    assert more(["-c", "import sys; sys.exit(3)"]).returncode == 3


def test_warnings_become_errors_where_asked() -> None:
    code = "import warnings\nwarnings.warn_explicit('w', UserWarning, 'f', 1, module={!r})"
    option = ["-W", "error::UserWarning:bitslab"]
    assert run([*option, "-c", code.format("bitslab")]).returncode == 1
    assert run([*option, "-c", code.format("other")]).returncode == 0


def test_what_takes_too_long_is_ended() -> None:
    done = run(["-c", "import time; time.sleep(60)"], timeout_s=1)
    assert done.returncode == -signal.SIGALRM
