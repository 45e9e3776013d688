"""What the command accepts, defaults to and says; known without torch, for its help."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .errors import ArgumentError, ArgumentTypeError

SAFETENSORS = (".safetensors", ".bitslab")
TORCH = (".pt", ".pth", ".bin")
READABLE = (*SAFETENSORS, ".npy", ".npz", *TORCH)
WRITABLE = (".safetensors", ".npy", ".npz", *TORCH)
PLOT_EXTENSIONS = (".png", ".svg", ".pdf")

#: What the copy engine of an H200 moves over PCIe 5 x16.
LINK_GBPS = 55.0
#: What a GPU decodes, in bytes of output.
DECODE_GBPS = 1500.0


def check_path(path: object) -> None:
    """Refuse what is no path, by its name."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise ArgumentTypeError(f"path: expected str or os.PathLike, got {path!r:.60}")


def checked_extension(path: str | os.PathLike[str], accepted: tuple[str, ...]) -> str:
    """Return the extension of a path in lower case, or refuse it."""
    extension = Path(path).suffix.lower()
    if extension not in accepted:
        raise ArgumentError(
            f"{os.fspath(path)}: extension {extension!r}, accepted are {', '.join(accepted)}"
        )
    return extension


def note(message: str) -> None:
    """Say something on stderr, where it does not mix with results."""
    print(f"bitslab: {message}", file=sys.stderr)
