"""Documentation: examples and commands run, links and figures lead somewhere."""

from __future__ import annotations

import argparse
import doctest
import importlib
import json
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bitslab
from bitslab.cli import build_parser
from docs import make_api, make_pictures
from tests.forked import run_forked

if sys.version_info >= (3, 11):
    import tomllib
else:  # which pytest depends on
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"bitslab": "core", "bitslab.integrations": "integrations"}
SHIPPED = ("core", "integrations", "tests", "docs", "examples", "benchmarks")
README_WORDS = 1300

#: Pages that people write, and those that a script makes, by their path from the root.
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
}
API_PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in sorted(make_api.FOLDER.glob("*.md"))
}
README = PAGES["README.md"]

MODULES = sorted(
    ".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts]).removesuffix(
        ".__init__"
    )
    for package, folder in FOLDERS.items()
    for path in (ROOT / folder).rglob("*.py")
    if ">>>" in path.read_text()
)

# Docstrings


def test_public_classes_have_examples() -> None:
    shown = {
        "bitslab.tables.slabs",
        "bitslab.tables.table",
        "bitslab.tensors.unified_tensor",
        "bitslab.compressed",
        "bitslab.engine.transfer.ring",
    }
    assert shown <= set(MODULES)


def raise_missing(printed: str) -> None:
    """Raise the error of an example that failed because a package is not installed."""
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


def test_api_reference_is_what_the_docstrings_say() -> None:
    made = {f"docs/api/{name}": text for name, text in make_api.pages().items()}
    stale = [name for name in {*made, *API_PAGES} if made.get(name) != API_PAGES.get(name)]
    assert not stale, f"run `make docs` (or python docs/make_api.py): {sorted(stale)}"


# Examples

#: Modules by whose import an example belongs to a framework, which shares one interpreter.
FRAMEWORKS = {
    "dgl": "dgl",
    "torch_geometric": "pyg",
    "torchrec": "torchrec",
    "transformers": "transformers",
    "accelerate": "transformers",
}

#: What most of them import: the compiler comes with every optimizer and framework.
IMPORTED = ("torch", "torch._dynamo", "bitslab", "tests.loaded_kernels")

RUNNER = """
import json, os, pathlib, sys, traceback
import pytest
from tests.quick_measuring import measure_quickly
measure_quickly(pytest.MonkeyPatch(), pathlib.Path("cache").absolute())  # codecs of activations
failed = False
for example in json.loads(sys.stdin.read()):
    os.makedirs(example["folder"])
    os.chdir(example["folder"])
    names = {"__name__": "__main__"}
    try:
        for line, code in example["blocks"]:
            exec(compile("\\n" * line + code, example["page"], "exec"), names)
    except BaseException:
        traceback.print_exc()
        failed = True
sys.exit(failed)
"""

#: What `bitslab ...` on the page of the command reads.
MODEL = """
import torch
from safetensors.torch import save_file
save_file({"layer.weight": torch.randn(64, 64).bfloat16()}, "model.safetensors")
"""


def prose(text: str) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def inline_code(text: str) -> list[str]:
    """Return what stands between single backticks in running text."""
    return re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(text))


def blocks(text: str, language: str) -> Iterator[tuple[int, str]]:
    """Yield the code blocks of a language, each with the line above it, counted from 1."""
    for found in re.finditer(rf"^```{language}\n(.*?)^```", text, re.M | re.S):
        yield text.count("\n", 0, found.start(1)), found[1]


def framework_of(code: str) -> str:
    """Return which framework an example needs: the last one of `FRAMEWORKS` that it imports."""
    found = re.findall(r"^(?:import|from) (\w+)", code, re.M)
    needed = [FRAMEWORKS[name] for name in found if name in FRAMEWORKS]
    return needed[0] if needed else "torch"


def examples() -> dict[str, list[dict[str, Any]]]:
    """Return the examples of all pages by framework.

    Blocks of a page go on from those above them; in README each block is whole.
    """
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for page, text in PAGES.items():
        python = list(blocks(text, "python"))
        if page == "docs/command.md":
            commands = [words for words in typed_commands(text) if words[0] == "bitslab"]
            run = "from bitslab.cli import main\n" + "".join(
                f"assert main({words[1:]!r}) == 0\n" for words in commands
            )
            python = [(0, MODEL + run)]
        parts = [[block] for block in python] if page == "README.md" else [python]
        for part in parts:
            if part:
                framework = framework_of("".join(code for _, code in part))
                found[framework].append({"page": page, "blocks": part})
    return found


def test_every_framework_has_examples() -> None:
    found = examples()
    assert set(found) == {"torch", *FRAMEWORKS.values()}
    assert {example["page"] for group in found.values() for example in group} >= {
        "README.md",
        "docs/accelerate.md",
        "docs/command.md",
        "docs/compress.md",
        "docs/dgl.md",
        "docs/distributed.md",
        "docs/embeddings.md",
        "docs/extending.md",
        "docs/pyg.md",
        "docs/tables.md",
        "docs/torchrec.md",
        "docs/transformers.md",
    }


@pytest.mark.parametrize("framework", ["torch", *dict.fromkeys(FRAMEWORKS.values())])
def test_examples_run(framework: str, tmp_path: Path) -> None:
    todo = [
        {**example, "folder": str(tmp_path / str(i))}
        for i, example in enumerate(examples()[framework])
    ]
    done = run_forked(
        ["-W", "error::UserWarning:bitslab", "-c", RUNNER],
        imports=IMPORTED,
        input=json.dumps(todo),
        cwd=tmp_path,
    )
    raise_missing(done.stderr)
    assert done.returncode == 0, done.stderr


# Commands

MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROGRAMS = ("bitslab", "make", "pip", "pytest", "python", "torchrun")

HELP = """
import contextlib, io, json, runpy, sys
helps = {}
for script in json.loads(sys.stdin.read()):
    folder = script.rpartition("/")[0]
    sys.path.insert(0, folder)
    sys.argv = [script, "--help"]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as stopped:
        assert not stopped.code, script
    sys.path.remove(folder)
    helps[script] = printed.getvalue()
print(json.dumps(helps))
"""


def typed_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in the console blocks of a page."""
    for _, block in blocks(text, "console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                yield shlex.split(line[2:], comments=True)


def commands_of(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a page, those in running text too."""
    yield from typed_commands(text)
    for code in inline_code(text):
        if code.partition(" ")[0] in PROGRAMS and " " in code:
            yield shlex.split(code)


COMMANDS = [(page, words) for page, text in PAGES.items() for words in commands_of(text)]


def script_of(words: list[str]) -> str | None:
    """Return the script that a command runs."""
    if "-m" in words:
        return None
    return next((word for word in words if word.endswith(".py") and word[:1] != "-"), None)


def wrong_options(words: list[str], text: str) -> list[str]:
    """Return the options, and the values among few choices, that a script's help does not know."""
    wrong = []
    choices: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text):
                wrong.append(word)
            listed = re.search(rf"{re.escape(name)} {{([^}}]*)}}", text)
            choices = re.sub(r"\s", "", listed[1]).split(",") if listed else []
            wrong += [word] if value and choices and value not in choices else []
        elif choices and word not in choices:
            wrong.append(word)
    return wrong


def wrong_of(words: list[str], helps: dict[str, str]) -> list[str]:
    """Return what of a command is not there: targets, files, extras, options."""
    program, *rest = words
    if program in ("python", "torchrun"):
        if rest[:2] == ["-m", "pytest"]:
            return [word for word in rest[2:] if "/" in word and not (ROOT / word).exists()]
        script = script_of(rest)
        if script not in helps:
            return [f"no script {script}"]
        return wrong_options(rest[rest.index(script) + 1 :], helps[script])
    if program == "make":
        targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
        variables = set(re.findall(r"^([A-Z_]+) (?:\?|:)?=", MAKEFILE, re.M))
        named = [word.partition("=") for word in rest]
        wrong = [
            name for name, equals, _ in named if name not in (variables if equals else targets)
        ]
        for name, _, value in named:
            if name in ("BENCH", "DEMO"):
                folder = {"BENCH": "benchmarks", "DEMO": "examples"}[name]
                wrong += [n for n in value.split() if not (ROOT / folder / f"{n}.py").is_file()]
        return wrong
    if program == "pip":
        extras = set(PROJECT["optional-dependencies"])
        pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
        wrong = []
        for word in rest[1:]:
            found = re.fullmatch(r"(?:\.|bitslab)(?:\[([\w,]+)\])?", word)
            if found:
                wrong += [
                    extra for extra in (found[1] or "").split(",") if extra not in {*extras, ""}
                ]
            elif not word.startswith("-") and word not in {*pinned, "constraints.txt"}:
                wrong.append(word)
        return wrong
    if program == "pytest":
        path = make_api.path_of(rest[rest.index("-p") + 1])
        text = path.read_text() if path else ""
        return [word for word in rest if word.startswith("--") and f'"{word}"' not in text]
    if program == "bitslab":
        (known,) = (
            action.choices
            for action in build_parser()._actions
            if isinstance(action, argparse._SubParsersAction)
        )
        if rest[0] not in known:
            return rest[:1]
        return wrong_options(rest[1:], known[rest[0]].format_help())
    return [f"{program}: this test cannot check it yet"]


def test_commands_name_what_is_there(tmp_path: Path) -> None:
    scripts = sorted({script for _, words in COMMANDS if (script := script_of(words))})
    assert not [script for script in scripts if not (ROOT / script).is_file()]
    with_options = [script for script in scripts if not script.startswith("docs/make_api")]
    done = run_forked(
        ["-c", HELP],
        imports=IMPORTED,
        input=json.dumps([str(ROOT / script) for script in with_options]),
        cwd=tmp_path,
    )
    raise_missing(done.stderr)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    helps = {script: printed.get(str(ROOT / script), "") for script in scripts}
    wrong = [
        (page, " ".join(words), found)
        for page, words in COMMANDS
        if (found := wrong_of(words, helps))
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("python benchmarks/codec.py --only ratio", []),
        ("python benchmarks/codec.py --only rate", ["rate"]),
        ("python benchmarks/codec.py --sonly ratio", ["--sonly"]),
        ("python benchmarks/codecs.py", ["no script benchmarks/codecs.py"]),
        ("torchrun --nproc-per-node=2 benchmarks/codec.py --only cpu", []),
        ("make test SEED=7", []),
        ("make tests SED=7 BENCH=gathers", ["tests", "SED", "gathers"]),
        ("pip install '.[dgl,cuda13]'", []),
        ("pip install 'bitslab[dlg]' treoch", ["dlg", "treoch"]),
        ("pytest -p bitslab.integrations.dgl.testing --bitslab-compress-features", []),
        ("pytest -p bitslab.integrations.dgl.tests --bitslab-compress", ["--bitslab-compress"]),
        ("bitslab inspects", ["inspects"]),
        ("bitslab inspect FILE --plots bits.png", ["--plots"]),
    ],
)
def test_wrong_commands_are_found(command: str, wrong: list[str]) -> None:
    helps = {"benchmarks/codec.py": "[--only {ratio,cpu,gpu}]\n  --only {ratio,cpu,\n gpu}"}
    assert wrong_of(shlex.split(command), helps) == wrong


def test_commands_are_shown() -> None:
    shown = {" ".join(words[:2]) for _, words in COMMANDS}
    assert shown >= {"make test", "make demo", "bitslab inspect", "bitslab compress"}
    scripts = {script_of(words) for _, words in COMMANDS}
    assert scripts >= {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    assert scripts >= {f"benchmarks/{name}.py" for name in ("codec", "gather", "gnn", "llm")}


# Links, paths, names


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", prose(text), re.M)
    }


def test_links_lead_somewhere() -> None:
    every = {**PAGES, **API_PAGES}
    wrong = []
    for page, text in every.items():
        links = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", prose(text))
        for link in (a or b for a, b in links):
            if re.match(r"\w+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (ROOT / page).parent.joinpath(name).resolve() if name else ROOT / page
            found = target.exists()
            if found and anchor:
                found = anchor in anchors(target.read_text())
            if not found:
                wrong.append((page, link))
    assert not wrong
    assert {"docs/README.md", "CONTRIBUTING.md"} <= set(re.findall(r"\]\(([^)#]+)\)", README))


def test_every_page_is_in_the_index() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)\)", PAGES["docs/README.md"]))
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    assert linked >= pages - {"README.md"}


def test_paths_are_there() -> None:
    names = {
        path.name for folder in SHIPPED for path in (ROOT / folder).rglob("*") if path.is_file()
    }
    wrong = []
    for page, text in PAGES.items():
        for code in inline_code(text):
            if re.search(r"NAME|DATE|<|\s|\*", code):
                continue
            if code.startswith(tuple(f"{folder}/" for folder in SHIPPED)):
                if not (ROOT / code).exists():
                    wrong.append((page, code))
            elif re.fullmatch(r"[\w/]+\.(py|cu|cuh)", code) and Path(code).name not in names:
                wrong.append((page, code))
    assert not wrong


def is_known(name: str) -> bool:
    """Return whether a dotted name is a module of the project, or one that a module has."""
    if make_api.path_of(name):
        return True
    module, _, attribute = name.rpartition(".")
    if not module:
        return False
    try:
        if make_api.path_of(module):
            make_api.find(module, attribute)
            return True
        # A module under another name, as bitslab.hotness, or a method.
        owner, _, inner = module.rpartition(".")
        found = make_api.find(owner, inner)
        if found.node is None:
            make_api.find(found.module, attribute)
            return True
        return any(getattr(n, "name", "") == attribute for n in getattr(found.node, "body", []))
    except LookupError:
        return False


def test_names_are_known() -> None:
    wrong = []
    for page, text in PAGES.items():
        for code in inline_code(text):
            for name in re.findall(r"(?<![\w./\[-])bitslab(?:\.[A-Za-z_]\w*)+", code):
                # bitslab.codecs is the entry point group.
                if name not in ("bitslab.codecs",) and ".NAME" not in name and not is_known(name):
                    wrong.append((page, name))
    assert not wrong


def test_unknown_names_are_found() -> None:
    assert is_known("bitslab.hotness.by_scores")
    assert is_known("bitslab.CompressedTable")
    assert is_known("bitslab.integrations.dgl.distributed.compress_pulls")
    assert not is_known("bitslab.nothing")
    assert not is_known("bitslab.offload.nothing")


# README


def test_readme_is_short() -> None:
    words = len(README.split())
    assert words <= README_WORDS, f"{words} words; what is more belongs into docs/"


def test_figures_of_readme_stand_in_the_results() -> None:
    section = README.partition("## Measured")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 6
    for row in rows:
        _, _, figure, source, _ = (cell.strip() for cell in row.split("|"))
        assert re.search(r"`python benchmarks/\w+\.py", source)
        (file,) = re.findall(r"\]\((benchmarks/results/[^)]+)\)", source)
        text = (ROOT / file).read_text()
        numbers = re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", figure)
        assert numbers
        missing = [
            n for n in numbers if not re.search(rf"(?<![\d.]){re.escape(n)}(?![\d.]\d)", text)
        ]
        assert not missing, f"{file} has no {missing}"


def test_figures_of_quantised_caches_stand_in_the_results() -> None:
    section = README.partition("## K and V within an error")[2].partition("\n## ")[0]
    (file,) = re.findall(r"\]\((benchmarks/results/[^)]+)\)", section)
    text = (ROOT / file).read_text()
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 9
    for row in rows:
        _, _, *shown = (cell.strip() for cell in row.strip("|").split("|"))
        numbers = re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", " ".join(shown).replace("2 bits", ""))
        missing = [
            n for n in numbers if not re.search(rf"(?<![\d.]){re.escape(n)}(?![\d.]\d)", text)
        ]
        assert numbers and not missing, f"{file} has no {missing}"


@pytest.mark.parametrize(
    "heading",
    ["Install", "Which part is for my problem", "Examples", "Measured", "When not to use it"],
)
def test_readme_has(heading: str) -> None:
    assert f"\n## {heading}\n" in README


# Pictures


@pytest.mark.parametrize("theme", make_pictures.THEMES)
@pytest.mark.parametrize("name", ["overview", *make_pictures.CHARTS])
def test_picture_shows_what_the_results_say(name: str, theme: str) -> None:
    text = make_pictures.path_of(name, theme).read_text()
    found = re.search(r"<dc:description>(.*?)</dc:description>", text, re.S)
    assert found
    shown = found[1].replace("&amp;", "&").replace("&gt;", ">").replace("&lt;", "<")
    assert shown == make_pictures.descriptions()[name], "run `make docs`"
    assert "<dc:date>" not in text


def test_overview_has_every_package() -> None:
    def packages(folder: str) -> set[str]:
        return {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}

    rings = {ring: set(parts) for ring, parts in make_pictures.RINGS.items()}
    assert rings == {
        "engine": packages("core/engine"),
        "systems": packages("core") - {"engine", "report"},
        "integrations": packages("integrations"),
    }


def test_every_picture_is_drawn_and_shown() -> None:
    drawn = {
        make_pictures.path_of(name, theme)
        for name in ("overview", *make_pictures.CHARTS)
        for theme in make_pictures.THEMES
    }
    assert set(make_pictures.FOLDER.iterdir()) == drawn
    shown = {
        name for text in PAGES.values() for name in re.findall(r"pictures/([\w-]+\.svg)", text)
    }
    assert shown == {path.name for path in drawn}


def test_pictures_are_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(make_pictures, "FOLDER", tmp_path)
    made = []
    for _ in range(2):
        for name, theme, figure in make_pictures.pictures(["weights"]):
            make_pictures.save(name, theme, figure)
        made.append({path.name: path.read_bytes() for path in tmp_path.iterdir()})
    assert made[0] == made[1]
    assert set(made[0]) == {"weights.svg", "weights-dark.svg"}
