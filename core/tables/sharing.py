"""Handles by which unrelated processes map the memory of a table, and checksums of files."""

from __future__ import annotations

import json
import os
from typing import Any

from ..container import CHECKSUM_ENTRY
from ..engine.files.new_file import PathLike
from ..engine.memory.host import HostBuffer
from ..errors import ArgumentError
from .parts import TableParts

HANDLE_VERSION = 2


def handle_of(parts: TableParts) -> str:
    """Return a text from which `parts_of_handle` maps the same memory in another process."""
    state = parts.describe()
    state["version"] = HANDLE_VERSION
    state["buffers"] = {name: buffer.handle() for name, buffer in parts.buffers.items()}
    return json.dumps(state)


def parts_of_handle(handle: str) -> TableParts:
    """Map the memory of another process.

    Raises
    ------
    ArgumentError
        When the handle is not valid, or the process that gave it is gone.
    """
    try:
        state: dict[str, Any] = json.loads(handle)
        version, named = state["version"], dict(state["buffers"])
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise ArgumentError(f"handle: {handle!r:.60} is not from CompressedTable.handle") from error
    if version != HANDLE_VERSION:
        raise ArgumentError(
            f"handle: version {version}, this bitslab reads {HANDLE_VERSION}; all processes "
            "need the same bitslab"
        )
    buffers: dict[str, HostBuffer] = {}
    try:
        for name, text in named.items():
            buffers[name] = HostBuffer.attach(text)
        try:
            return TableParts.from_description(state, buffers)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise ArgumentError(f"handle: describes no table: {error!r}") from error
    except BaseException:
        for buffer in buffers.values():
            buffer.close()
        raise


def checksum_of_file(path: PathLike) -> str:
    """Return the checksum of a file's header, which holds the checksums of all tensors."""
    from safetensors import safe_open

    with safe_open(os.fspath(path), framework="pt") as file:
        return str((file.metadata() or {}).get(CHECKSUM_ENTRY, ""))
