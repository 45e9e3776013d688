"""Copies of a table's metadata on GPUs; words and overflow rows are read from host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..engine.codecs import RowKernels
from ..engine.kernels.format import TableStorage
from .rows import HostRows


class DeviceCopies:
    """Copies on GPUs of the metadata that locates rows, made at the first use on each GPU."""

    def __init__(self) -> None:
        self._storages: dict[torch.device, TableStorage] = {}
        self._kernels: dict[torch.device, RowKernels] = {}
        self._raw_rows: torch.Tensor | None = None

    @property
    def devices(self) -> list[torch.device]:
        """GPUs that hold a copy."""
        return list(self._storages)

    def get(self, device: torch.device, rows: HostRows) -> tuple[TableStorage, RowKernels]:
        """Return a table as a GPU reads it, words in host memory, metadata there, and kernels."""
        kernels, storage = self._kernels.get(device), self._storages.get(device)
        if kernels is not None and storage is not None:
            return storage, kernels
        kernels = kernels or rows.parts.codec.kernels(device)
        host = rows.storage()

        def on_gpu(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else t.to(device, copy=True)

        storage = replace(
            host,
            bases=on_gpu(host.bases),
            lengths=on_gpu(host.lengths),
            row_clusters=on_gpu(host.row_clusters),
            flags=on_gpu(host.flags),
            moved=on_gpu(host.moved),
        )
        _synchronize(device)  # other streams may use these at once
        self._kernels[device], self._storages[device] = kernels, storage
        return storage, kernels

    def raw_rows(self, rows: HostRows) -> torch.Tensor:
        """Return the rows of a raw table as uint8 ``[N, row_bytes]``, a view made once."""
        if self._raw_rows is None:
            self._raw_rows = rows.parts.raw_rows()
        return self._raw_rows

    def refresh(self, rows: HostRows, changed: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Copy changed entries of the metadata to the GPUs, and wait for the copies.

        Parameters
        ----------
        rows : HostRows
            The rows, after the update.
        changed : mapping of str to numpy.ndarray
            Changed entries by tensor, as `HostRows.update` returns them.
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
                    fresh[name] = source.to(device, copy=True)
                else:
                    picked = torch.from_numpy(entries)
                    target[picked.to(device)] = source[picked].to(device)
            self._storages[device] = replace(there, **fresh)
            _synchronize(device)

    def keep_only(self, device: torch.device) -> None:
        """Free the copies on other GPUs."""
        if len(self._storages) > 1:
            self._storages = {device: self._storages[device]}

    def clear(self) -> None:
        """Free the copies of the metadata."""
        self._storages.clear()
        self._raw_rows = None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
