"""The data sets that pykeen's package holds as text, read without pykeen and what it imports."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
#: What unpacks the files, for messages: pykeen itself depends on far more.
COMMANDS = (
    "pip download --no-deps pykeen && "
    "unzip pykeen-*.whl 'pykeen/datasets/*/*.txt' -d \"$BITSLAB_DATA\""
)


def folders() -> Iterator[Path]:
    """Yield where data sets are looked for: $BITSLAB_DATA or ../shared/data, then packages."""
    data = Path(os.environ.get("BITSLAB_DATA", ROOT.parent / "shared" / "data"))
    yield data / "pykeen" / "datasets"
    spec = importlib.util.find_spec("pykeen")
    for package in (spec and spec.submodule_search_locations) or ():
        yield Path(package) / "datasets"


def find_triples(name: str) -> Path | None:
    """Return the file of training triples of a data set such as kinships, umls or nations."""
    if not name.isidentifier():  # a part of a path
        return None
    paths = (folder / name / "train.txt" for folder in folders())
    return next((path for path in paths if path.is_file()), None)


def read_triples(path: Path) -> torch.Tensor:
    """Return triples as int64 ``[E, 3]``: head, relation and tail by their place among the names.

    Raises
    ------
    ValueError
        For a file without triples, one with a line that is not three fields between tabs, and one
        that cannot be read or is not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}; accepted is text in UTF-8") from error
    lines = []
    for number, line in enumerate(text.split("\n"), 1):  # names may hold other ends of lines
        if not line:
            continue
        fields = line.split("\t")
        if len(fields) != 3:
            raise ValueError(
                f"{path}, line {number}: {len(fields)} fields; accepted are three, head, "
                "relation and tail, with tabs between them"
            )
        lines.append(fields)
    if not lines:
        raise ValueError(f"{path} is empty; accepted are triples, one a line")
    entities = {e: i for i, e in enumerate(sorted({x for h, _, t in lines for x in (h, t)}))}
    relations = {r: i for i, r in enumerate(sorted({r for _, r, _ in lines}))}
    found = [(entities[h], relations[r], entities[t]) for h, r, t in lines]
    return torch.tensor(found, dtype=torch.int64)


def with_inverse(
    triples: torch.Tensor, relations: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return edges ``[2, 2 E]`` and their types: each triple, then each the other way round."""
    src, kinds, dst = triples.t()
    if relations is None:
        relations = int(kinds.max()) + 1
    index = torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])
    return index, torch.cat([kinds, kinds + relations])
