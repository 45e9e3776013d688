"""What the documentation shows: examples in docstrings and in README.md run as they stand."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

import bitslab
from tests.forked import run_forked

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
FRAMEWORKS = ("transformers", "dgl", "torch_geometric", "torchrec")
FOLDERS = {"bitslab": "core", "bitslab.integrations": "integrations"}

MODULES = sorted(
    ".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts]).removesuffix(
        ".__init__"
    )
    for package, folder in FOLDERS.items()
    for path in (ROOT / folder).rglob("*.py")
    if ">>>" in path.read_text()
)

# A block that imports is whole; the others go on from something of the reader's.
SNIPPETS = [
    code for code in re.findall(r"^```python\n(.*?)^```", README, re.M | re.S) if "import" in code
]


def test_public_classes_have_examples() -> None:
    shown = {
        "bitslab.tables.slabs",
        "bitslab.tables.table",
        "bitslab.tensors.unified",
        "bitslab.compressed",
        "bitslab.engine.transfer.ring",
    }
    assert shown <= set(MODULES)


def raise_missing(printed: str) -> None:
    """Raise what an example failed of where a package is not installed."""
    found = re.search(r"No module named '([\w.]+)'", printed)
    if found:
        raise ModuleNotFoundError(printed, name=found[1])


@pytest.mark.parametrize("name", MODULES)
def test_docstring(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    module = importlib.import_module(name)
    outcome = doctest.testmod(module, globs={"bitslab": bitslab, "torch": torch})
    assert outcome.attempted
    printed = capsys.readouterr().out
    raise_missing(printed)
    assert not outcome.failed, printed


@pytest.mark.parametrize("code", SNIPPETS, ids=range(len(SNIPPETS)))
def test_readme_snippet(code: str, tmp_path: Path) -> None:
    # What shows one framework begins in one process that has imported it.
    used = [name for name in FRAMEWORKS if re.search(rf"^(import|from) {name}\b", code, re.M)]
    done = run_forked(
        ["-W", "error::UserWarning:bitslab", "-c", code],
        imports=["torch", "bitslab", *used[:1]],
        cwd=tmp_path,
    )
    raise_missing(done.stderr)
    assert done.returncode == 0, done.stderr


def test_readme_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_readme_commands_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"[$`] ?make ([a-z-]+)", README))
    assert "test" in named
    assert named <= targets
    scripts = re.findall(r"python ((?:examples|benchmarks)/\w+\.py)", README)
    assert scripts
    assert not [script for script in scripts if not (ROOT / script).is_file()]
