"""Typed products over packed rows on a GPU: rebuilt as they are multiplied, or gathered before.

Both ways give the same bits. Rows that cross the link are always rebuilt in the product, which the
link limits. Of rows that mostly lie in the GPU's memory the fastest way is measured once for each
kind of product, by `engine.advisor.fastest_way`: the schedules of the kernel that rebuilds them,
and gathering them first. That takes more bytes, as raw rows are written and read again, but two
simple kernels may take less time than one that does both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..engine.advisor import fastest_way, measured_rows
from ..engine.kernels.typed_products import SCHEDULES, PackedRows
from .kernel_steps import takes
from .product_ways import can_measure

if TYPE_CHECKING:
    from ..engine.kernels.cuda import CudaKernels

#: Bytes that gathered rows may take for the time of a product.
MAX_GATHERED_BYTES = 256 << 20

#: Entries of a cache's map for each row of the table; it has 2 to 4 for each that is cached.
LEAST_ENTRIES = 2

#: Multiplies rows, read by an index or as they are, and by a schedule where it has several.
Multiply = Callable[..., None]
#: The way that gathers rows first.
GATHERED = "gathered"


class PackedProducts:
    """Runs typed products over packed inputs on one GPU.

    Threads may share it.

    Parameters
    ----------
    device : torch.device
        The GPU.
    kernels : CudaKernels
        Its kernels.
    """

    def __init__(self, device: torch.device, kernels: CudaKernels) -> None:
        self._device, self._kernels = device, kernels
        #: Number of a schedule, None where rows are gathered first.
        self._ways: dict[tuple[str, int], int | None] = {}

    def run(
        self,
        x: Any,
        n: int,
        depth: int,
        index: torch.Tensor | None,
        what: str,
        multiply: Multiply,
        scheduled: bool = False,
    ) -> bool:
        """Multiply packed rows; return False, with nothing done, where kernels do not take them.

        Parameters
        ----------
        x : CompressedTable or CompressedFeature or SlabCache
            ``[N, depth]``.
        n : int
            How many rows are read.
        depth : int
            Elements of a row.
        index : torch.Tensor or None
            int64 ``[n]`` on the GPU: the rows that are read; None: the first.
        what : str
            Names products of these rows that take the same time.
        multiply : callable
            Starts the kernels of the product on packed or raw rows.
        scheduled : bool
            Whether it takes the number of a schedule too.
        """
        found = self._rebuilt(x, n, depth, index, what, multiply, scheduled)
        if isinstance(found, bool):
            return found
        name, schedules = found

        def gathered() -> None:
            ids = torch.arange(n, device=self._device) if index is None else index
            multiply(x.gather(ids), None)

        def rebuilt(*schedule: int) -> None:
            with x.read_by_products(self._device) as source:
                multiply(source, index, *schedule)

        numbers = {SCHEDULES[number].name: number for number in schedules}
        ways: dict[str, Callable[[], None]] = {
            way: functools.partial(rebuilt, *([number] if scheduled else []))
            for way, number in numbers.items()
        }
        ways[GATHERED] = gathered
        key = name, measured_rows(n)
        try:
            if key not in self._ways:
                fastest = fastest_way(tuple(ways), name, n, self._device, lambda _: ways)
                self._ways[key] = numbers.get(fastest)
            if self._ways[key] is None:
                gathered()
                return True
        except torch.OutOfMemoryError:  # no room to measure, or for raw rows
            self._ways[key] = 0
        return self._rebuilt(x, n, depth, index, what, multiply, scheduled) is True

    def _rebuilt(
        self,
        x: Any,
        n: int,
        depth: int,
        index: torch.Tensor | None,
        what: str,
        multiply: Multiply,
        scheduled: bool,
    ) -> bool | tuple[str, list[int]]:
        """Multiply rows as they are rebuilt, if they are to be; return whether kernels take them.

        Where gathering them first is fastest, or nothing was measured, nothing is done: returns
        the name of products that take the same time, and the schedules that take these rows.
        """
        with x.read_by_products(self._device) as source:
            if source is None or not takes(self._kernels, self._device, source, depth):
                return False
            name = f"typed {what}, {_described(source)}"
            key = name, measured_rows(n)
            known = key in self._ways
            number = self._ways.get(key)
            if number is not None or not self._may_gather(source, n, depth, known):
                multiply(source, index, *([number or 0] if scheduled else []))
                return True
            last = len(SCHEDULES) if scheduled else 1
            takes_row = self._kernels.typed.takes
            return name, [i for i in range(last) if takes_row(source, depth, i)]

    def _may_gather(
        self, source: PackedRows | torch.Tensor, n: int, depth: int, known: bool
    ) -> bool:
        """Return whether most rows lie in the GPU's memory, and there may be room for raw ones."""
        if isinstance(source, torch.Tensor) or source.cache is None:
            return False
        if not known and self._device.type == "cuda" and not can_measure(self._device):
            return False
        near = len(source.cache.entries) >= LEAST_ENTRIES * source.table.n_rows
        return near and 0 < n * depth * source.dtype.itemsize <= MAX_GATHERED_BYTES


def _described(source: PackedRows | torch.Tensor) -> str:
    """Return what tells packed rows that are read in other times."""
    if isinstance(source, torch.Tensor):
        return "raw"
    f = source.layout.format
    held = 0 if source.cache is None else len(source.cache.entries)
    share = (source.table.n_rows // max(held, 1)).bit_length()
    return (
        f"{source.dtype} {f.row_bytes} B, {f.chunk_bytes} B k{f.code_bits} in {source.max_words} "
        f"words, 1/{1 << share} cached"
    )
