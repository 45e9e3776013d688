"""The map from ids to locations on a GPU: filled and read; see map.cuh for its layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..format import BUCKET_ENTRIES, NOT_CACHED, ceil_div
from .parameters import Address, Int32, Int64, Parameters, UInt32
from .runner import Launch, Runner
from .source import MAP

THREADS = 256  # of a block
LANES = BUCKET_ENTRIES  # that take an id
BLOCKS = 8  # of a multiprocessor


@dataclass(init=False)
class InsertIds(Parameters):
    """Parameters of `insert_ids`: int64 entries and locations, int32 or int64 ids.

    The buckets are one more than `bucket_mask`; `failed` is int64.
    """

    kernel = "insert_ids"

    entries: Address
    bucket_mask: UInt32
    ids: Address
    id_bytes: Int32
    locations: Address
    n: Int64
    failed: Address


@dataclass(init=False)
class FindIds(Parameters):
    """Parameters of `find_ids`: as of `InsertIds`."""

    kernel = "find_ids"

    entries: Address
    bucket_mask: UInt32
    ids: Address
    id_bytes: Int32
    n: Int64
    locations: Address


class MapKernels:
    """The kernels of map.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def insert(
        self, entries: torch.Tensor, ids: torch.Tensor, locations: torch.Tensor
    ) -> torch.Tensor:
        """Put ids and their locations into a map; see `kernels.cpu.map_insert`.

        Parameters
        ----------
        entries : torch.Tensor
            int64 ``[buckets * BUCKET_ENTRIES, 2]`` on the device, at a multiple of 16 bytes;
            `buckets` is a power of two up to 2**32, or 0.
        ids : torch.Tensor
            int32 or int64 ``[n]`` on the device. An id that is there gets the new location; of an
            id given twice either location is kept.
        locations : torch.Tensor
            int64 ``[n]`` on the device.

        Returns
        -------
        torch.Tensor
            int64 ``[1]`` on the device: how many ids found no free entry or were negative.
        """
        n = ids.shape[0]
        if n == 0 or entries.shape[0] == 0:
            return torch.full((1,), n, dtype=torch.int64, device=entries.device)
        failed = torch.zeros(1, dtype=torch.int64, device=entries.device)
        self._insert(
            self._blocks(n),
            entries.data_ptr(),
            _bucket_mask(entries),
            ids.data_ptr(),
            ids.element_size(),
            locations.data_ptr(),
            n,
            failed.data_ptr(),
        )
        return failed

    def find(
        self, entries: torch.Tensor, ids: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Look up ids in a map; see `kernels.cpu.map_find`.

        Parameters
        ----------
        entries, ids
            As in `insert`; a negative id is not found.
        out : torch.Tensor, optional
            int64 ``[n]`` on the device; a new tensor when left out.

        Returns
        -------
        torch.Tensor
            `out`: the location of each id, NOT_CACHED where there is none.
        """
        n = ids.shape[0]
        if out is None:
            out = torch.empty(n, dtype=torch.int64, device=entries.device)
        if entries.shape[0] == 0:
            out.fill_(NOT_CACHED)
        elif n:
            self._find(
                self._blocks(n),
                entries.data_ptr(),
                _bucket_mask(entries),
                ids.data_ptr(),
                ids.element_size(),
                n,
                out.data_ptr(),
            )
        return out

    @cached_property
    def _insert(self) -> Launch:
        return self._runner.bind(MAP, InsertIds, THREADS)

    @cached_property
    def _find(self) -> Launch:
        return self._runner.bind(MAP, FindIds, THREADS)

    def _blocks(self, n: int) -> int:
        return min(ceil_div(n, THREADS // LANES), BLOCKS * self._runner.multiprocessors)


def _bucket_mask(entries: torch.Tensor) -> int:
    return entries.shape[0] // BUCKET_ENTRIES - 1
