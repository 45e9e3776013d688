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

#: Folders and files that these words are gone from.
DONE = [
    "core/cli.py",
    "core/compressed.py",
    "core/container.py",
    "core/devices.py",
    "core/dtypes.py",
    "core/embedding",
    "core/engine",
    "core/errors.py",
    "core/kvcache",
    "core/offload",
    "core/options.py",
    "core/report",
    "core/tensors",
    "core/tracing.py",
    "integrations/accelerate",
    "integrations/embedding",
    "integrations/torchrec",
    "integrations/transformers/cache.py",
    "integrations/transformers/cache_layer.py",
    "integrations/transformers/config.py",
    "integrations/transformers/cross_attention.py",
    "integrations/transformers/loading.py",
    "integrations/transformers/placement.py",
    "integrations/transformers/quantizer.py",
    "integrations/transformers/selectors",
    "integrations/transformers/sizes.py",
    "tests/embedding",
    "tests/integrations/embedding",
    "tests/integrations/torchrec",
    "tests/integrations/transformers/test_cache_changes.py",
    "tests/integrations/transformers/test_cache_compiled.py",
    "tests/integrations/transformers/test_cache_encoder_decoder.py",
    "tests/integrations/transformers/test_cache_generate.py",
    "tests/integrations/transformers/test_cache_layers.py",
    "tests/integrations/transformers/test_cache_memory.py",
    "tests/integrations/transformers/test_selectors.py",
    "tests/integrations/transformers/test_selectors_attached.py",
    "tests/kvcache",
]

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
    if path.is_file():
        yield path
    for file in sorted(path.rglob("*")):
        if file.suffix in SUFFIXES:
            yield file


@pytest.mark.parametrize("entry", DONE)
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
