"""What `import bitslab` loads and does, and rules of imports; pyproject.toml has contracts."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"bitslab": "core", "bitslab.integrations": "integrations"}
KERNELS = "bitslab.engine.kernels"

# Of `import bitslab`, in place of its time, which others on the machine change: with half as much
# again as today it takes 0.4 s of a processor. benchmarks/first_call.py prints the time.
MOST_SOURCE_BYTES = 3_000_000
MOST_CALLS = 220_000

# Loaded on first use, never by `import bitslab`.
LAZY = [
    "accelerate",
    "cuda",
    "cupy",
    "dgl",
    "fbgemm_gpu",
    "lz4",
    "matplotlib",
    "numba",
    "pandas",
    "rich",
    "safetensors",
    "scipy",
    "torch_geometric",
    "torchrec",
    "transformers",
]
# Parts of bitslab that are loaded on first use too.
LAZY_PARTS = ["cli", "distributed", "embedding", "integrations", "kvcache", "offload"]
LAZY_PARTS += ["relational", "report"]
FRAMEWORKS = {
    "accelerate",
    "dgl",
    "diffusers",
    "fbgemm_gpu",
    "jax",
    "lightning",
    "peft",
    "sentence_transformers",
    "tensorflow",
    "torch_geometric",
    "torch_sparse",
    "torchrec",
    "transformers",
    "vllm",
}


@dataclass(frozen=True)
class Import:
    """One imported name: its absolute dotted name, and how it was written."""

    name: str
    line: int
    relative: bool


def modules(package: str) -> list[str]:
    """Return the names of all modules of a package, from its folder in the checkout."""
    folder = ROOT / FOLDERS[package]
    names = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        names.append(".".join([package, *parts]).removesuffix(".__init__"))
    return names


def source(module: str) -> Path:
    package = max((p for p in FOLDERS if f"{module}.".startswith(f"{p}.")), key=len)
    base = (ROOT / FOLDERS[package]).joinpath(*module.removeprefix(package).split(".")[1:])
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def resolve(name: str, module: str, is_package: bool) -> str:
    """Return the absolute name of a relative import in a module."""
    rest = name.lstrip(".")
    level = len(name) - len(rest)
    if not level:
        return name
    parts = module.split(".")
    parents = parts[: len(parts) - level + (1 if is_package else 0)]
    return ".".join([*parents, rest] if rest else parents)


def imports_in(text: str, module: str, is_package: bool) -> Iterator[Import]:
    """Find every import in a module, nested ones too, by its absolute name.

    `from a import b` gives `a.b`, whatever b is; `import_module` counts where its argument is
    written out.
    """
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    yield Import(alias.name, node.lineno, relative=False)
            case ast.ImportFrom(module=base, names=aliases, level=level):
                base = resolve("." * level + (base or ""), module, is_package)
                for alias in aliases:
                    yield Import(f"{base}.{alias.name}", node.lineno, relative=level > 0)
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
                called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
                if called in {"import_module", "__import__", "load_optional"}:
                    absolute = resolve(name, module, is_package)
                    yield Import(absolute, node.lineno, relative=name.startswith("."))
            case _:
                pass


@functools.cache
def imports(module: str) -> list[Import]:
    path = source(module)
    return list(imports_in(path.read_text(), module, path.name == "__init__.py"))


def is_under(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def found_in(package: str, wrong: Callable[[Import], bool]) -> list[str]:
    """Return place and name of each import in a package that is wrong."""
    names = modules(package)
    assert package in names
    return [
        f"{source(module).relative_to(ROOT)}:{found.line}: {found.name}"
        for module in names
        for found in imports(module)
        if wrong(found)
    ]


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300
    )


def measured(code: str, cwd: Path) -> Any:
    """Run code in a fresh interpreter; return the JSON that it prints last."""
    done = python(code, cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Report what a fresh `import bitslab` loads beyond torch and numpy, and what it touches."""
    return measured(  # type: ignore[no-any-return]
        "import json, sys, threading, warnings\n"
        "import numpy, torch\n"
        "state = lambda: [len(warnings.filters), torch.get_num_threads(),"
        " str(torch.get_default_dtype()), torch.is_grad_enabled(), threading.active_count()]\n"
        "before, state_before = set(sys.modules), state()\n"
        "import bitslab\n"
        "names = sorted(set(sys.modules) - before)\n"
        "files = {name: getattr(sys.modules[name], '__file__', None) for name in names}\n"
        "sources = {name: file for name, file in files.items() if file}\n"
        "print(json.dumps({'modules': names, 'sources': sources, 'file': bitslab.__file__,"
        " 'cuda': torch.cuda.is_initialized(), 'state': [state_before, state()]}))",
        tmp_path_factory.mktemp("elsewhere"),
    )


def test_this_checkout_is_under_test(loaded: dict[str, Any]) -> None:
    assert Path(loaded["file"]).resolve() == ROOT / "core" / "__init__.py"


@pytest.mark.parametrize("first", ["bitslab", "torch"])
def test_import_waits_for_torch(first: str, tmp_path: Path) -> None:
    """A bitslab imported before torch loads on first use; then torch.load knows our tensors too."""
    second = "torch" if first == "bitslab" else "bitslab"
    found = measured(
        f"import json, sys, {first}\n"
        "early = 'torch' in sys.modules\n"
        f"import {second}\n"
        "import bitslab\n"
        "names = bitslab.__all__\n"
        "there = [name for name in names if name in vars(bitslab)]\n"
        "listed = set(names) <= set(dir(bitslab))\n"
        "missing = [name for name in names if not hasattr(bitslab, name)]\n"
        "modules = [m.__name__ for m in (bitslab.tables, bitslab.engine.codecs, bitslab.hotness)]\n"
        "known = torch.serialization.get_safe_globals()\n"
        "safe = any('bitslab' in getattr(f, '__module__', '') for f in known)\n"
        "wrong = [name for name in ('nothing', '_nothing') if hasattr(bitslab, name)]\n"
        "every = len(there) == len(names)\n"
        "print(json.dumps([early, every, listed, missing, modules, safe, wrong]))",
        tmp_path,
    )
    modules = ["bitslab.tables", "bitslab.engine.codecs", "bitslab.tables.hotness"]
    eager = first == "torch"
    assert found == [eager, eager, True, [], modules, True, []]


@pytest.mark.parametrize("name", LAZY)
def test_import_leaves_out(loaded: dict[str, Any], name: str) -> None:
    assert not [module for module in loaded["modules"] if is_under(module, name)]


def test_import_touches_nothing(loaded: dict[str, Any]) -> None:
    assert not loaded["cuda"], "import bitslab initialises CUDA"
    before, after = loaded["state"]
    assert before == after


def test_import_loads_itself_and_the_standard_library_alone(loaded: dict[str, Any]) -> None:
    known = {"bitslab", "numpy", "torch", *sys.stdlib_module_names}
    # On first use of a part that bitslab imports torch 2.8 looks for NVIDIA's libraries.
    known |= {"nvidia"} if metadata.version("torch").startswith("2.8.") else set()
    assert not [name for name in loaded["sources"] if name.split(".")[0] not in known]


@pytest.mark.parametrize("part", LAZY_PARTS)
def test_import_leaves_out_part(loaded: dict[str, Any], part: str) -> None:
    assert source(f"bitslab.{part}").exists()
    assert not [name for name in loaded["modules"] if is_under(name, f"bitslab.{part}")]


def test_import_reads_little(loaded: dict[str, Any]) -> None:
    sizes = {name: Path(file).stat().st_size for name, file in loaded["sources"].items()}
    assert sum(sizes.values()) < MOST_SOURCE_BYTES, sorted(sizes, key=sizes.__getitem__)[-10:]


def test_import_computes_little(tmp_path: Path) -> None:
    """Calls are counted, those of dataclasses and of the import system included."""
    calls = measured(
        "import sys, numpy, torch\n"
        "events = []\n"
        "sys.setprofile(lambda frame, event, arg: events.append(event))\n"
        "import bitslab\n"
        "sys.setprofile(None)\n"
        "print(sum(event in ('call', 'c_call') for event in events))",
        tmp_path,
    )
    assert 1000 < calls < MOST_CALLS


@pytest.mark.parametrize("package", FOLDERS)
def test_folder_is_no_import_name(package: str) -> None:
    done = python(f"import {FOLDERS[package]}", ROOT)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError:"), done.stderr
    assert f"import {package}" in last, "the error does not say what to write instead"


def test_integrations_can_be_imported(tmp_path: Path) -> None:
    done = python("import bitslab.integrations", tmp_path)
    assert done.returncode == 0, done.stderr


def test_core_imports_no_framework_but_torch() -> None:
    wrong = found_in("bitslab", lambda found: found.name.split(".")[0] in FRAMEWORKS)
    assert not wrong, "\n".join(["core/ imports no framework but torch:", *wrong])


def test_core_imports_itself_relatively() -> None:
    names = ("bitslab", *FOLDERS.values())
    wrong = found_in(
        "bitslab", lambda found: not found.relative and found.name.split(".")[0] in names
    )
    assert not wrong, "\n".join(["inside core/, import bitslab by relative imports:", *wrong])


def test_integrations_import_absolutely() -> None:
    wrong = found_in(
        "bitslab.integrations",
        lambda found: found.relative or found.name.split(".")[0] in FOLDERS.values(),
    )
    assert not wrong, "\n".join(["integrations import by absolute `bitslab.` names:", *wrong])


def test_no_part_loads_the_compiler_of_torch(tmp_path: Path) -> None:
    """Which takes as long to import as torch does."""
    parts = [f"bitslab.{part}" for part in LAZY_PARTS if part not in ("cli", "integrations")]
    loaded = "print('torch._dynamo' in __import__('sys').modules)"
    done = python(f"import torch, {', '.join(parts)}; {loaded}", tmp_path)
    assert done.stdout == "False\n", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "is_package", "text", "expected"),
    [
        (
            "bitslab.engine.codecs.raw",
            False,
            "from .base import RowCodec",
            "bitslab.engine.codecs.base.RowCodec",
        ),
        ("bitslab.engine.codecs.raw", False, "from . import base", "bitslab.engine.codecs.base"),
        ("bitslab.engine.codecs", True, "from . import base", "bitslab.engine.codecs.base"),
        ("bitslab.engine.codecs", True, "from .. import row_map", "bitslab.engine.row_map"),
        ("bitslab.engine.codecs.raw", False, "from .. import row_map", "bitslab.engine.row_map"),
        ("bitslab.tables.parts", False, "from ..compressed import T", "bitslab.compressed.T"),
        ("bitslab.engine.kernels", True, "import_module('.cpu', __package__)", KERNELS + ".cpu"),
        ("bitslab.compressed", False, "def f():\n    import dgl.nn", "dgl.nn"),
        ("bitslab.compressed", False, "load_optional('rich.table', extra=None)", "rich.table"),
        ("bitslab.compressed", False, "importlib.import_module('dgl')", "dgl"),
    ],
)
def test_finder_of_imports(module: str, is_package: bool, text: str, expected: str) -> None:
    (found,) = imports_in(text, module, is_package)
    assert found.name == expected
