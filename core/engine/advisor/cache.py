"""Measured figures of a machine, kept between processes.

Each is a small JSON file of its own in the cache folder: ``$BITSLAB_CACHE``, else
``$XDG_CACHE_HOME/bitslab``, else ``~/.cache/bitslab``. Processes never write to one file at once
(each renames a new one into place), and a file that is damaged or cannot be written is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..files.new_file import replacing

CACHE_VARIABLE = "BITSLAB_CACHE"
MOST_BYTES = 1 << 20  # of a file; larger ones are not ours


def cache_folder() -> Path | None:
    """Return the folder of what is kept between processes; None when there is no home."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own)
    for base in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(base):  # XDG: others are to be ignored
            return Path(base) / "bitslab"
    return None


def cache_file(kind: str, key: str) -> Path | None:
    """Return where the figures of a key are kept; `kind` begins the name of the file."""
    folder = cache_folder()
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    return None if folder is None else folder / f"{kind}-{name}.json"


def read_cached(kind: str, key: str) -> Mapping[str, Any] | None:
    """Return the figures that were written for a key; None where there is no sound file."""
    path = cache_file(kind, key)
    try:
        with open(path or os.devnull, "rb") as file:
            found = json.loads(file.read(MOST_BYTES))
        return found if found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_cached(kind: str, key: str, figures: Mapping[str, Any]) -> None:
    """Keep JSON-able figures for a key, as far as that is possible."""
    path = cache_file(kind, key)
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({"key": key, **figures}))


def machine_name(device: torch.device) -> str:
    """Return what figures of a device are kept by: the folder may be shared by several machines."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.node()} {platform.machine()} {torch.get_num_threads()} threads"
