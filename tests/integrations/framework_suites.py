"""Run PyG's and DGL's own tests of relational layers, with the layers compiled and without.

git clone --bare https://github.com/pyg-team/pytorch_geometric pyg.git
git clone --bare https://github.com/dmlc/dgl dgl.git
python tests/integrations/framework_suites.py --pyg pyg.git --dgl dgl.git

The tests are read from the tag of the installed version into a temporary folder, and run there by
the plug-ins `bitslab.integrations.pyg.testing` and `bitslab.integrations.dgl.testing`. A line for
each run is printed; the exit status is 1 if one of them failed, no test passed, or no call of a
layer ran compiled where layers are to be.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

OPTION = "--bitslab-compile-relational"
LAYERS_CALLED = """
import importlib, json, os
counts = {}
modules = [importlib.import_module(name) for name in os.environ["BITSLAB_LAYERS"].split()]
for module in modules:
    plain = module.count_call
    def counted(layer, reason, plain=plain):
        key = "compiled" if not reason else "the framework's code"
        counts[key] = counts.get(key, 0) + 1
        plain(layer, reason)
    module.count_call = counted
def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line("layer calls: " + json.dumps(counts))
"""


@dataclass(frozen=True)
class Suite:
    """Tests of a framework.

    Attributes
    ----------
    package : str
        The installed package, whose version names the tag.
    plugin : str
        The pytest plug-in that compiles layers.
    layers : str
        The module of the compiled classes.
    files : tuple of str
        What is read from the repository.
    tests : tuple of str
        What is run.
    chosen : str
        The expression that chooses tests.
    """

    package: str
    plugin: str
    layers: str
    files: tuple[str, ...]
    tests: tuple[str, ...]
    chosen: str = ""


PYG_TESTS = tuple(f"test/nn/conv/test_{name}_conv.py" for name in ("rgcn", "rgat", "hgt"))
SUITES = {
    "pyg": Suite(
        package="torch-geometric",
        plugin="bitslab.integrations.pyg.testing",
        layers="bitslab.integrations.pyg.relational",
        files=PYG_TESTS,
        tests=PYG_TESTS,
    ),
    "dgl": Suite(
        package="dgl",
        plugin="bitslab.integrations.dgl.testing",
        layers="bitslab.integrations.dgl.relational",
        files=("tests/python/pytorch/nn/test_nn.py", "tests/backend", "tests/utils"),
        tests=("tests/python/pytorch/nn/test_nn.py",),
        chosen="test_rgcn or test_hgt or test_typed_linear",
    ),
}


def tag_of(repository: Path, package: str) -> str:
    """Return the tag of the installed version of a package, or the newest one before it."""
    version = importlib.metadata.version(package)
    listed = subprocess.run(
        ["git", "--git-dir", repository, "tag"], check=True, capture_output=True, text=True
    ).stdout.split()
    numbers = {tag: tuple(map(int, re.findall(r"\d+", tag))) for tag in listed}
    wanted = tuple(map(int, re.findall(r"\d+", version)))
    return max((tag for tag in listed if numbers[tag][:3] <= wanted), key=lambda tag: numbers[tag])


def read(repository: Path, tag: str, files: Sequence[str], folder: Path) -> None:
    """Write files of a tag into a folder."""
    archive = subprocess.run(
        ["git", "--git-dir", repository, "archive", tag, *files], check=True, capture_output=True
    ).stdout
    subprocess.run(["tar", "x"], cwd=folder, input=archive, check=True)


def run(suite: Suite, folder: Path, compiled: bool) -> tuple[bool, str]:
    """Run a suite; return whether it passed, and its counts."""
    (folder / "layers_called.py").write_text(LAYERS_CALLED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suite.tests]
    command += ["-k", suite.chosen] if suite.chosen else []
    if compiled:
        command += ["-p", suite.plugin, OPTION, "-p", "layers_called"]
    paths = [str(folder), str(folder / "tests"), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "DGLBACKEND": "pytorch",
        "BITSLAB_LAYERS": suite.layers,
    }
    (folder / "pytest.ini").write_text("[pytest]\n")  # none of a folder above
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    calls = [line for line in lines if line.startswith("layer calls: ")]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    counts = lines[-1] if lines else done.stderr.strip().splitlines()[-1]
    ran = done.returncode == 0 and n_passed(counts) > 0 and (not compiled or n_compiled(calls) > 0)
    return ran, "; ".join([counts.strip("= "), *calls, *failed])


def n_passed(counts: str) -> int:
    """Return how many tests passed, by the last line of pytest."""
    found = re.search(r"(\d+) passed", counts)
    return int(found[1]) if found else 0


def n_compiled(calls: Sequence[str]) -> int:
    """Return how many calls of layers ran compiled, by the lines that count calls."""
    return sum(json.loads(line.partition(": ")[2]).get("compiled", 0) for line in calls)


def main() -> None:
    """Run the suites whose repositories are given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in SUITES:
        parser.add_argument(f"--{name}", type=Path, help="a bare clone, or the .git of one")
    arguments = parser.parse_args()
    given = {name: getattr(arguments, name) for name in SUITES if getattr(arguments, name)}
    if not given:
        parser.error("neither --pyg nor --dgl is given")
    passed = []
    for name, repository in given.items():
        suite = SUITES[name]
        tag = tag_of(repository, suite.package)
        for compiled in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                read(repository, tag, suite.files, Path(folder))
                succeeded, counts = run(suite, Path(folder), compiled)
            passed.append(succeeded)
            how = "compiled" if compiled else "as they are"
            print(f"{name} {tag}, layers {how}: {counts}", flush=True)
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
