"""Which file each folder of the tier has, and what is said of it, when it is given up too."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .file_choice import open_measured
from .posix_file import file_system
from .rates import DiskRates
from .stripe import Stripe
from .tensor_file import FileKind, OpenFile, TensorFile


class FolderFiles:
    """Opens the file of a folder, and keeps what is known of it.

    Parameters
    ----------
    folders : sequence of str
        The folders.
    rates : sequence of DiskRates
        Of each.
    open_file : callable, optional
        Makes the file; the one that the rates are of when left out, or the system's.
    """

    def __init__(
        self, folders: Sequence[str], rates: Sequence[DiskRates], open_file: OpenFile | None
    ) -> None:
        self._rates = list(zip(folders, rates, strict=True))
        self._open_file = open_file
        self._kinds: dict[str, tuple[FileKind, bool]] = {}
        self._reasons: dict[str, str] = {}

    def open(self, folder: str) -> TensorFile:
        """Make the file in a folder.

        Raises
        ------
        DiskError
            When the folder cannot be written to.
        """
        if self._open_file is not None:
            file = self._open_file(folder)
        else:
            file, self._reasons[folder] = open_measured(folder, dict(self._rates)[folder])
        self._kinds[folder] = (file.kind, file.direct)
        return file

    def rows(
        self, stripes: Sequence[Stripe], errors: Mapping[str, BaseException]
    ) -> list[dict[str, Any]]:
        """Return what `DiskTier.stats` says of each folder."""
        for stripe in stripes:  # a file may have ceased to bypass the page cache
            self._kinds[stripe.file.path] = (stripe.file.kind, stripe.file.direct)
        rows = []
        for folder, rates in self._rates:
            system = file_system(folder)
            kind, direct = self._kinds.get(folder, ("posix", False))
            rows.append(
                {
                    "path": folder,
                    "file_system": system.kind,
                    "in_memory": system.in_memory,
                    "network": system.network,
                    "direct": direct,
                    "file": kind,
                    "file_reason": self._reasons.get(folder, ""),
                    "measured": [dataclasses.asdict(each) for each in rates.files],
                    "error": str(errors[folder]) if folder in errors else None,
                }
            )
        return rows
