"""Typed products over packed rows on a GPU: rebuilt as they are multiplied, or gathered before.

Both ways give the same bits. Rows that cross the link are always rebuilt in the product, which the
link limits. Of rows that mostly lie in the GPU's memory the faster way is measured once for each
kind of product, by `engine.advisor.fused_times`: writing raw rows and reading them again takes more
bytes, but two simple kernels may take less time than one that does both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..engine.advisor import fused_times, measured_rows
from ..engine.kernels.typed_products import PackedRows
from .kernel_steps import takes

if TYPE_CHECKING:
    from ..engine.kernels.cuda import CudaKernels

#: Bytes that gathered rows may take for the time of a product.
MAX_GATHERED_BYTES = 256 << 20

#: Entries of a cache's map for each row of the table; it has 2 to 4 for each that is cached.
LEAST_ENTRIES = 2

#: Multiplies rows, read by an index or as they are.
Multiply = Callable[[Any, torch.Tensor | None], None]


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
        self._gathers_first: dict[tuple[str, int], bool] = {}

    def run(
        self, x: Any, n: int, depth: int, index: torch.Tensor | None, what: str, multiply: Multiply
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
            What tells products of these rows with other times.
        multiply : callable
            Starts the kernels of the product on packed or raw rows.
        """
        name = self._rebuilt(x, n, depth, index, what, multiply)
        if isinstance(name, bool):
            return name

        def gathered() -> None:
            ids = torch.arange(n, device=self._device) if index is None else index
            multiply(x.gather(ids), None)

        def rebuilt() -> None:
            with x.read_by_products(self._device) as source:
                multiply(source, index)

        key = name, measured_rows(n)
        try:
            if key not in self._gathers_first:
                times = fused_times(name, n, self._device, lambda _: (rebuilt, gathered))
                self._gathers_first[key] = times.decoded_s < times.fused_s
            if self._gathers_first[key]:
                gathered()
                return True
        except torch.OutOfMemoryError:  # no room to measure, or for raw rows
            self._gathers_first[key] = False
        return self._rebuilt(x, n, depth, index, what, multiply) is True

    def _rebuilt(
        self, x: Any, n: int, depth: int, index: torch.Tensor | None, what: str, multiply: Multiply
    ) -> bool | str:
        """Multiply rows as they are rebuilt, if they are to be; return whether kernels take them.

        Where gathering them first is faster, or was not measured, nothing is done: returns what
        tells products of other times.
        """
        with x.read_by_products(self._device) as source:
            if source is None or not takes(self._kernels, self._device, source, depth):
                return False
            name = f"typed {what}, {_described(source)}"
            first = self._gathers_first.get((name, measured_rows(n)))
            if first is False or not self._may_gather(source, n, depth, known=first is not None):
                multiply(source, index)
                return True
        return name

    def _may_gather(
        self, source: PackedRows | torch.Tensor, n: int, depth: int, known: bool
    ) -> bool:
        """Return whether most rows lie in the GPU's memory, and there may be room for raw ones."""
        if isinstance(source, torch.Tensor) or source.cache is None:
            return False
        if not known and self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # nothing can be measured
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
