"""Contents of the wheel: every package, every kernel, the version, the command, and no more."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import bitslab

if sys.version_info >= (3, 11):
    import tomllib
else:  # a dependency of pytest
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"bitslab": "core", "bitslab.integrations": "integrations"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

#: Where setuptools finds modules of an earlier build, and of one that was interrupted.
LEFTOVERS = (
    "build/lib/bitslab/deleted.py",
    f"build/bdist.{sysconfig.get_platform()}/wheel/bitslab/interrupted.py",
)

# One build for all of these tests: they run on one worker.
pytestmark = pytest.mark.xdist_group("wheel")


def installed_names(pattern: str) -> dict[str, str]:
    """Map each source file that matches to its path in the wheel."""
    return {
        path.relative_to(ROOT).as_posix(): "/".join(
            [*package.split("."), *path.relative_to(ROOT / folder).parts]
        )
        for package, folder in FOLDERS.items()
        for path in sorted((ROOT / folder).rglob(pattern))
        if "__pycache__" not in path.parts
    }


def package_folders() -> dict[str, str]:
    """Map each folder that has an __init__.py to its import name."""
    return {
        source.removesuffix("/__init__.py"): name.removesuffix("/__init__.py").replace("/", ".")
        for source, name in installed_names("__init__.py").items()
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Build the wheel from a copy of the sources, with leftovers of a build; return its members."""
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in LEFTOVERS:
        (source / name).parent.mkdir(parents=True)
        (source / name).write_text("")
    for folder in (*FOLDERS.values(), "tests"):
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(target), str(source)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = target.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: dict[str, bytes], name: str) -> str:
    (member,) = (member for member in wheel if member.endswith(f".dist-info/{name}"))
    return wheel[member].decode()


def test_folders_hold_packages() -> None:
    assert {"core", "integrations"} <= package_folders().keys()


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {source.rpartition("/")[0] for source in installed_names("*.py")}
    assert folders == package_folders().keys(), "a folder with modules has no __init__.py"


def test_packages_list_is_complete() -> None:
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(package_folders().values())


@pytest.mark.parametrize("name", package_folders().values(), ids=str)
def test_package_is_in_the_wheel(wheel: dict[str, bytes], name: str) -> None:
    assert f"{name.replace('.', '/')}/__init__.py" in wheel


@pytest.mark.parametrize("pattern", ["*.py", "*.cu", "*.cuh", "py.typed"])
def test_sources_are_in_the_wheel(wheel: dict[str, bytes], pattern: str) -> None:
    names = installed_names(pattern)
    assert names, f"no {pattern} under core/ or integrations/"
    missing = {source: name for source, name in names.items() if name not in wheel}
    assert not missing, f"not in the wheel: {sorted(missing)}"


def test_wheel_is_typed(wheel: dict[str, bytes]) -> None:
    assert "bitslab/py.typed" in wheel


def test_wheel_holds_nothing_else(wheel: dict[str, bytes]) -> None:
    patterns = ("*.py", "*.cu", "*.cuh", "py.typed")
    expected = {name for pattern in patterns for name in installed_names(pattern).values()}
    others = {name for name in wheel if ".dist-info/" not in name} - expected
    assert not others


@pytest.mark.parametrize("name", ["deleted", "interrupted"])
def test_modules_of_earlier_builds_are_not_in_the_wheel(wheel: dict[str, bytes], name: str) -> None:
    assert not [member for member in wheel if name in member]


def test_tests_are_not_in_the_wheel(wheel: dict[str, bytes]) -> None:
    tops = {name.split("/")[0] for name in wheel if ".dist-info/" not in name}
    assert tops == {"bitslab"}
    assert not any("tests" in name.split("/") for name in wheel)


def test_version_is_written_once(wheel: dict[str, bytes]) -> None:
    assert f"\nVersion: {bitslab.__version__}\n" in metadata(wheel, "METADATA")
    assert PROJECT["project"]["version"] == bitslab.__version__


def test_licence_is_in_the_wheel(wheel: dict[str, bytes]) -> None:
    assert "\nLicense-Expression: Apache-2.0\n" in metadata(wheel, "METADATA")
    assert "Apache License" in metadata(wheel, "licenses/LICENSE")


def test_console_script_is_in_the_wheel(wheel: dict[str, bytes]) -> None:
    assert "bitslab = bitslab.cli:main" in metadata(wheel, "entry_points.txt").splitlines()


def test_console_script_can_be_loaded() -> None:
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="bitslab")
    assert callable(script.load())


def test_extra_all_holds_every_extra_but_cuda() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(everything.removeprefix("bitslab[").removesuffix("]").split(","))
    of_a_gpu = {f"{kind}cuda{major}" for kind in ("", "lz4-", "gds-") for major in (12, 13)}
    assert named == extras.keys() - {"all", *of_a_gpu}


@pytest.mark.parametrize("requirement", PROJECT["project"]["dependencies"], ids=str)
def test_lower_bounds_are_what_is_tested(requirement: str) -> None:
    name, bound = requirement.split(">=")
    pins = dict(
        re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints-lowest.txt").read_text(), re.M)
    )
    assert f"{pins[name]}.0".startswith(f"{bound}.0")


def test_the_lowest_python_is_what_is_tested() -> None:
    lowest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert f"LOWEST_PYTHON ?= python{lowest}\n" in (ROOT / "Makefile").read_text()


#: Of builtins and the standard library, newer than the lowest Python.
NEWER = {
    "add_note", "assert_never", "batched", "cbrt", "exp2", "file_digest", "override", "tomllib",
    "ExceptionGroup", "Self", "StrEnum", "TaskGroup", "UTC",
}  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS.values())
def test_the_package_is_written_for_the_lowest_python(folder: str) -> None:
    used = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 10))):
            if isinstance(node, ast.Attribute):
                names = {node.attr}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = {each.name for each in node.names} | {node.module or ""}
            elif isinstance(node, ast.Import):
                names = {each.name for each in node.names}
            else:
                continue
            used += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(names & NEWER)]
    # It is where notes are added, by a way of its own where exceptions have none.
    assert used == ["core/errors.py: add_note"] * (folder == "core")
