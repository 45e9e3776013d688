"""Folders of the disk tier: which are accepted, and what is warned of."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

from ...errors import ArgumentError, ArgumentTypeError
from .posix_file import file_system

Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def checked_folders(folders: Folders) -> tuple[str, ...]:
    """Return folders as a tuple of paths, or refuse them."""
    some = [folders] if isinstance(folders, str | os.PathLike) else folders
    if not isinstance(some, Sequence) or not all(isinstance(f, str | os.PathLike) for f in some):
        raise ArgumentTypeError(f"disk: expected a folder or several, got {folders!r}")
    if not some:
        raise ArgumentError("disk: expected one folder or more, got none")
    paths = tuple(os.fspath(folder) for folder in some)
    if "" in paths:
        raise ArgumentError(
            "disk: '' names no folder, expected the path of one; '.' is the current one"
        )
    return paths


def warn_of_kind(folders: tuple[str, ...]) -> None:
    """Warn of folders that are in memory or on another machine."""
    for folder in folders:
        system = file_system(folder)
        if system.in_memory or system.network:
            what = "memory, so that nothing is saved" if system.in_memory else "on another machine"
            warnings.warn(
                f"disk: {folder} is {what} ({system.kind}); give a folder on an SSD", stacklevel=4
            )
