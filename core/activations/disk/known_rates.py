"""What a folder's device carries, as it was measured before: figures are kept by machine."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Iterator

import torch

from ...engine.advisor.cache import machine_name, read_cached, write_cached
from ...errors import ArgumentError
from .file_choice import measure_and_choose
from .kvikio_file import why_unusable
from .rates import DiskRates
from .tensor_file import DiskError

CACHE_KIND = "disk"
_VERSION = 2


def disk_rates(folder: str | os.PathLike[str], *, again: bool = False) -> DiskRates:
    """Return what a folder's device carries: as it was measured before, or measured now.

    Figures are kept where the advisor keeps its own, by machine and file system, and whether
    kvikio's file can be tried.

    Parameters
    ----------
    folder : str or os.PathLike
        A folder that can be written to.
    again : bool
        Measure in any case.

    Raises
    ------
    DiskError
        When the folder cannot be written to, or has no space for a few requests.
    """
    try:
        device = os.stat(folder).st_dev
    except OSError as error:
        raise DiskError(f"disk: {os.fspath(folder)}: {error.strerror}") from error
    system = f"{os.major(device)}:{os.minor(device)}"
    key = f"{_VERSION} {machine_name(torch.device('cpu'))} {system} {why_unusable() or 'kvikio'}"
    known = None if again else _known(key)
    if known is not None:
        return known
    with _alone(folder):  # ranks that begin together would measure what is left by the others
        known = None if again else _known(key)
        if known is not None:
            return known
        rates = measure_and_choose(folder)
        write_cached(CACHE_KIND, key, {"rates": dataclasses.asdict(rates)})
        return rates


def _known(key: str) -> DiskRates | None:
    """Return what was measured before; None where that is of another version, or damaged."""
    found = read_cached(CACHE_KIND, key)
    try:
        return None if found is None else DiskRates.from_json(found["rates"])
    except (ArgumentError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _alone(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Wait until no other process measures in a folder, where its file system has locks."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # measuring says what is wrong with it
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
