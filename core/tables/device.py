"""What GPUs keep of a table: all but its words and the rows that have moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..engine.kernels.format import RowLayout, TableStorage
from .rows import HostRows


class DeviceCopies:
    """Copies on GPUs of what finds rows among a table's words, made at the first use there."""

    def __init__(self) -> None:
        self._storages: dict[torch.device, TableStorage] = {}
        self._layouts: dict[torch.device, RowLayout] = {}
        self._raw_rows: torch.Tensor | None = None

    @property
    def devices(self) -> list[torch.device]:
        """GPUs that hold a copy."""
        return list(self._storages)

    def get(self, device: torch.device, rows: HostRows) -> tuple[TableStorage, RowLayout]:
        """Return a table as a GPU's kernels read it: words in host memory, the rest there."""
        layout, storage = self._layouts.get(device), self._storages.get(device)
        if layout is not None and storage is not None:
            return storage, layout
        layout = layout or rows.layout.to(device)
        host = rows.storage()

        def there(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else t.to(device)

        storage = replace(
            host,
            bases=there(host.bases),
            lengths=there(host.lengths),
            row_clusters=there(host.row_clusters),
            flags=there(host.flags),
            moved=there(host.moved),
        )
        # Other streams may use these at once.
        torch.cuda.current_stream(device).synchronize()
        self._layouts[device], self._storages[device] = layout, storage
        return storage, layout

    def raw_rows(self, rows: HostRows) -> torch.Tensor:
        """Return the rows of a raw table as uint8 ``[N, row_bytes]``, a view that is kept."""
        if self._raw_rows is None:
            self._raw_rows = rows.parts.raw_rows()
        return self._raw_rows

    def refresh(self, rows: HostRows, changed: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Bring entries of the metadata that have changed to the GPUs, and wait for them.

        Parameters
        ----------
        rows : HostRows
            The rows, changed.
        changed : mapping of str to numpy.ndarray
            What `HostRows.update` returned.
        """
        host = rows.storage()
        for device, there in self._storages.items():
            fresh: dict[str, Any] = {
                "max_words": host.max_words,
                "max_packed_words": host.max_packed_words,
                "overflow": host.overflow,
            }
            for name, entries in changed.items():
                source, target = getattr(host, name), getattr(there, name)
                if target is None:
                    fresh[name] = source.to(device)
                else:
                    picked = torch.from_numpy(entries)
                    target[picked.to(device)] = source[picked].to(device)
            self._storages[device] = replace(there, **fresh)
            torch.cuda.current_stream(device).synchronize()

    def clear(self) -> None:
        """Let the copies of the metadata go."""
        self._storages.clear()
        self._raw_rows = None
