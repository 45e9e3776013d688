"""The words of the field: home-made words of earlier versions are not used again.

A word counts wherever it stands: in prose, or as a part of an identifier, which is split at
underscores and capital letters. Words that have a use of their own in English or in the field
(`slot`, `place`, `pending`, ...) cannot be looked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: Each word, and the word of the field to use instead.
WORDS = {
    "guest": "miss buffer",
    "guests": "miss buffer",
    "stay": "in-flight miss range; of things that are left: kept, left, remain",
    "stays": "in-flight miss range; of things that are left: is kept, is left, remains",
    "told": "reported, raised; a mailbox of miss counts",
    "tally": "counters",
    "residents": "slot table",
    "turnstile": "enter callback",
    "mend": "repair",
    "torn": "inconsistent",
    "era": "codec epoch, segment",
    "take notes": "sync_from_device",
    "let go": "drain, retire, release",
}

#: Folders and files that are looked at; results of benchmarks and the CHANGELOG keep their words.
LOOKED_AT = [
    "CONTRIBUTING.md",
    "Makefile",
    "README.md",
    "benchmarks",
    "core",
    "docs",
    "examples",
    "integrations",
    "pyproject.toml",
    "tests",
]
#: Below these: what was measured, and the words themselves.
LEFT_OUT = ("benchmarks/results", "tests/durations.md", "tests/test_words.py")

SUFFIXES = {".cu", ".cuh", ".md", ".py"}
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def split(line: str) -> str:
    """Return the words of a line and of its identifiers in lower case, one blank between two."""
    return " ".join(part.lower() for part in _PARTS.findall(line))


def found_in(line: str) -> list[str]:
    words = f" {split(line)} "
    return [word for word in WORDS if f" {word} " in words]


def files(entry: str) -> Iterator[Path]:
    path = ROOT / entry
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        left_out = str(file.relative_to(ROOT)).startswith(LEFT_OUT)
        if not left_out and (file == path or file.suffix in SUFFIXES):
            yield file


@pytest.mark.parametrize("entry", LOOKED_AT)
def test_home_made_words_are_gone(entry: str) -> None:
    looked_at, hits = 0, []
    for file in files(entry):
        looked_at += 1
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            hits += [
                f"{file.relative_to(ROOT)}:{number}: {word!r} ({WORDS[word]}): {line.strip()}"
                for word in found_in(line)
            ]
    assert looked_at, f"{entry}: no files"
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("class GuestRoom:", ["guest"]),
        ("self._take_notes(rows)", ["take notes"]),
        ("def let_go(self):", ["let go"]),
        ("MOST_STAYS = 3", ["stays"]),
        ("# An id out of range is told later.", ["told"]),
        ("turnstile: Turnstile", ["turnstile"]),
        ("recommended storage, staged; Notes of an operation", []),
    ],
    ids=["class", "identifier", "two-words", "constant", "prose", "both", "others"],
)
def test_words_are_found_in_prose_and_identifiers(line: str, words: list[str]) -> None:
    assert found_in(line) == words
