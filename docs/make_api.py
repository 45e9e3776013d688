"""Write the API reference from the docstrings: ``python docs/make_api.py``.

One page for each package whose face (``__all__`` of its ``__init__.py``) people import from. The
sources are parsed, not imported: no framework is needed, and the pages do not depend on versions.
tests/test_docs.py fails while a page differs from the docstrings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "api"
FOLDERS = {"bitslab.integrations": ROOT / "integrations", "bitslab": ROOT / "core"}

#: Faces in core that people use by name, and those for people who write codecs and integrations.
SYSTEMS = (
    "tables",
    "tensors",
    "embedding",
    "offload",
    "kvcache",
    "activations",
    "activations.disk",
    "distributed",
    "relational",
)
ENGINE = ("codecs", "memory", "transfer", "advisor", "advisor.planning", "files", "kernels")
#: numpydoc's sections whose entries are ``name : type`` with an indented text.
LISTS = ("Parameters", "Attributes", "Returns", "Raises", "Yields", "Warns", "Other Parameters")


#: A rule of a table.
RULE = re.compile(r"=+(?: +=+)+")


@dataclass(frozen=True)
class Found:
    """Where a name is defined."""

    module: str
    name: str
    node: ast.stmt | None  # None for a module

    @property
    def docstring(self) -> str:
        """Its docstring, or ''."""
        node = parsed(self.module) if self.node is None else self.node
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Module):
            return ast.get_docstring(node) or ""
        return _comment_above(self.module, node)


def path_of(module: str) -> Path | None:
    """Return the file of a module of the project, if there is one."""
    for package, folder in FOLDERS.items():
        if f"{module}.".startswith(f"{package}."):
            base = folder.joinpath(*module.removeprefix(package).split(".")[1:])
            path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
            return path if path.is_file() else None
    return None


@cache
def parsed(module: str) -> ast.Module:
    """Parse a module of the project."""
    path = path_of(module)
    if path is None:
        raise LookupError(f"no module {module}")
    return ast.parse(path.read_text())


def _comment_above(module: str, node: ast.AST) -> str:
    """Return the ``#:`` lines above a statement."""
    path = path_of(module)
    lines = path.read_text().splitlines() if path else []
    above = []
    for line in reversed(lines[: getattr(node, "lineno", 1) - 1]):
        if not line.startswith("#:"):
            break
        above.append(line[2:].strip())
    return "\n".join(reversed(above))


def names_of(module: str) -> list[str]:
    """Return ``__all__`` of a package."""
    for node in parsed(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value), key=lambda name: (name.lower(), name))
    return []


def find(module: str, name: str) -> Found:
    """Find where a name that a module has is defined, through the imports that lead there.

    Raises
    ------
    LookupError
        When the module neither defines nor imports it from the project.
    """
    for node in parsed(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return Found(module, name, node)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                return Found(module, name, node)
    for inner in ast.walk(parsed(module)):
        if isinstance(inner, ast.ImportFrom):
            for alias in inner.names:
                if (alias.asname or alias.name) == name:
                    origin = _absolute(inner, module)
                    if path_of(f"{origin}.{alias.name}"):
                        return Found(f"{origin}.{alias.name}", alias.name, None)
                    return find(origin, alias.name)
    raise LookupError(f"{module} has no {name}")


def _absolute(node: ast.ImportFrom, module: str) -> str:
    path = path_of(module)
    parts = module.split(".")
    if path is None or path.name != "__init__.py":
        parts = parts[:-1]
    if not node.level:
        return node.module or ""
    kept = parts[: len(parts) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


# Text


def as_markdown(docstring: str) -> str:
    """Return a numpydoc docstring as Markdown."""
    parts: list[str] = []
    lines = docstring.splitlines()
    i, section = 0, ""
    while i < len(lines):
        line = lines[i]
        if i + 1 < len(lines) and line.strip() and set(lines[i + 1].strip()) == {"-"}:
            section = line.strip()
            parts += ["", f"**{section}**", ""]
            i += 2
            continue
        if RULE.fullmatch(line):  # a table of reStructuredText, up to its last rule
            end = i + 1
            while end + 1 < len(lines) and (
                not RULE.fullmatch(lines[end]) or (end < len(lines) - 1 and lines[end + 1].strip())
            ):
                end += 1
            parts += ["", "```text", *lines[i : end + 1], "```", ""]
            i = end + 1
            continue
        block = [line]
        while i + 1 < len(lines) and (lines[i + 1].startswith(" ") or not lines[i + 1].strip()):
            if not lines[i + 1].strip() and not _indented_after(lines, i + 1):
                break
            i += 1
            block.append(lines[i])
        i += 1
        if line.startswith(">>>"):
            while i < len(lines) and lines[i].strip():
                block.append(lines[i])
                i += 1
            parts += ["", "```pycon", *block, "```", ""]
        elif section in LISTS and line.strip():
            text = " ".join(row.strip() for row in block[1:] if row.strip())
            name, colon, kind = line.partition(" : ")
            head = f"`{name}`" + (f" ({kind})" if colon else "")
            parts.append(f"- {_plain(head)}" + (f": {_plain(text)}" if text else ""))
        else:
            parts += [_plain(row) for row in block]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(parts))
    return text.strip()


def _indented_after(lines: list[str], i: int) -> bool:
    rest = next((line for line in lines[i:] if line.strip()), "")
    return rest.startswith(" ")


def _plain(line: str) -> str:
    return line.replace("``", "`")


def signature(node: ast.FunctionDef, name: str, *, method: bool) -> str:
    """Return a call of a function as it is declared."""
    arguments = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(arguments, ast.FunctionDef)
    static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
    if method and not static:
        listed = arguments.args.posonlyargs or arguments.args.args
        del listed[0]
    makes = node.name == "__init__"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and not makes else ""
    call = f"{name}({ast.unparse(arguments.args)})"
    if len(call + returns) <= 96:
        return call + returns
    inner = _split(ast.unparse(arguments.args))
    return f"{name}(\n" + "".join(f"    {part},\n" for part in inner) + f"){returns}"


def _split(text: str) -> list[str]:
    """Cut a list of arguments at its outer commas."""
    parts, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        depth += c in "([{"
        depth -= c in ")]}"
        if c == "," and not depth:
            parts.append(text[begin:i].strip())
            begin = i + 1
    return [*parts, text[begin:].strip()]


def _methods(found: Found, seen: set[str]) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yield public methods, those of bases that nobody imports included, each with its module."""
    assert isinstance(found.node, ast.ClassDef)
    for node in found.node.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            decorators = {ast.unparse(d) for d in node.decorator_list}
            setter = any(d.endswith((".setter", ".deleter")) for d in decorators)
            if node.name not in seen and not setter and "overload" not in decorators:
                seen.add(node.name)
                if ast.get_docstring(node):
                    yield node, found.module
    for base in found.node.bases:
        if isinstance(base, ast.Name):
            try:
                parent = find(found.module, base.id)
            except LookupError:  # of torch or of the language
                continue
            if isinstance(parent.node, ast.ClassDef):
                yield from _methods(parent, seen)


def entry(package: str, name: str) -> str:
    """Return what the reference says of one name."""
    found = find(package, name)
    parts = [f"## {name}", ""]
    node = found.node
    if node is None:
        parts += [f"Module `{found.module}`.", "", as_markdown(found.docstring), ""]
        for function in parsed(found.module).body:
            if isinstance(function, ast.FunctionDef) and not function.name.startswith("_"):
                parts += _function(function, f"{name}.{function.name}", method=False)
    elif isinstance(node, ast.FunctionDef):
        parts += _function(node, name, method=False)[2:]
    elif isinstance(node, ast.ClassDef):
        init = next(
            (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None
        )
        if init is not None:
            parts += ["```python", signature(init, name, method=True), "```", ""]
        bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases)
        if bases:
            parts += [f"Bases: {bases}", ""]
        parts += [as_markdown(found.docstring), ""]
        for method, _ in _methods(found, set()):
            parts += _function(method, f"{name}.{method.name}", method=True)
    else:
        assert isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        parts += ["```python", f"{name} = {ast.unparse(node.value)}", "```", ""]
        parts += [as_markdown(found.docstring), ""]
    return "\n".join(parts)


def _function(node: ast.FunctionDef, name: str, *, method: bool) -> list[str]:
    decorators = {ast.unparse(d) for d in node.decorator_list}
    text = [as_markdown(ast.get_docstring(node) or ""), ""]
    if decorators & {"property", "cached_property", "functools.cached_property"}:
        kind = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return [f"### {name}", "", "```python", f"{name}{kind}", "```", "", *text]
    return [f"### {name}", "", "```python", signature(node, name, method=method), "```", "", *text]


def packages() -> dict[str, list[str]]:
    """Return the packages that have a page, by the heading they stand under."""
    plugins = sorted(path.parent.name for path in (ROOT / "integrations").glob("*/__init__.py"))
    return {
        "The package": ["bitslab"],
        "Plug-ins": [f"bitslab.integrations.{name}" for name in plugins],
        "Systems, for those who write integrations": [f"bitslab.{name}" for name in SYSTEMS],
        "Engine, for those who write codecs and systems": [
            f"bitslab.engine.{name}" for name in ENGINE if names_of(f"bitslab.engine.{name}")
        ],
    }


def page(package: str) -> str:
    """Return the page of a package."""
    text = as_markdown(Found(package, package, None).docstring)
    parts = [f"# {package}", "", text, ""]
    parts += [entry(package, name) for name in names_of(package) if name != "__version__"]
    whole = "\n".join(parts)
    return re.sub(r"\n{3,}", "\n\n", whole).rstrip() + "\n"


def pages() -> dict[str, str]:
    """Return the text of every page, by its file name."""
    made = {}
    index = [
        "# API reference",
        "",
        "Made from the docstrings by `python docs/make_api.py`; a test fails while one is stale.",
        "",
    ]
    for heading, names in packages().items():
        index += [f"## {heading}", ""]
        for name in names:
            first = Found(name, name, None).docstring.splitlines()[0]
            index.append(f"- [`{name}`]({name}.md): {_plain(first)}")
            made[f"{name}.md"] = page(name)
        index.append("")
    made["README.md"] = "\n".join(index).rstrip() + "\n"
    return made


def main() -> None:
    """Write all pages, and remove those of packages that are gone."""
    FOLDER.mkdir(exist_ok=True)
    made = pages()
    for old in FOLDER.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text)
    print(f"{len(made)} pages in {FOLDER.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
