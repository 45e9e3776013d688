"""Tensors of which some units are kept, on a GPU: what their forms share; see kept.cuh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..kept_format import KeptLayout
from .parameters import Address, Int32, Int64, Parameters
from .runner import Launch, Runner
from .source import KEPT, kept_variant

ROW_THREADS = 256  # of a block, which takes a row at a time
PLACE_THREADS = 1024
BLOCKS = 8  # of a multiprocessor


@dataclass(init=False)
class PlaceRows(Parameters):
    """Parameters of `place_rows`: sizes of a `KeptLayout`, and the buffer."""

    kernel = "place_rows"

    rows: Int64
    elements: Int64
    form: Int32
    element_bytes: Int32
    unit_bytes: Int32
    place_bytes: Int32
    before_bytes: Int64
    starts_at: Int64
    values_at: Int64
    raw_bytes: Int64
    out: Address


class RowPlacer:
    """The kernel of kept.cu on one GPU, and the blocks of those that take rows.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launch: Launch | None = None

    def blocks(self, layout: KeptLayout, sm_budget: int | None) -> int:
        """Return the blocks that take the rows of a tensor."""
        processors = self._runner.multiprocessors
        if sm_budget is not None:
            processors = min(sm_budget, processors)
        return max(1, min(layout.rows, BLOCKS * processors))

    def place(self, layout: KeptLayout, form: int, counted: bool, out: torch.Tensor) -> None:
        """Write the header and where each row's units begin, from the number of each row.

        Parameters
        ----------
        layout : KeptLayout
            Of the tensor.
        form : int
            For the header.
        counted : bool
            Whether the numbers stand where the starts belong; else the rows keep nothing.
        out : torch.Tensor
            The buffer.
        """
        if self._launch is None:
            self._launch = self._runner.bind(KEPT, PlaceRows, PLACE_THREADS)
        self._launch(
            1,
            layout.rows if counted else 0,
            layout.elements,
            form,
            layout.element_bytes,
            layout.unit_bytes,
            layout.place_bytes,
            layout.before_bytes,
            layout.starts_at,
            layout.values_at,
            layout.raw_bytes,
            out.data_ptr(),
        )


class KeptKernels:
    """The kernels of a form that keeps some units, on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    placer : RowPlacer
        Of the device.
    """

    #: File of the kernels, and their parameters.
    file: ClassVar[str]
    counting: ClassVar[type[Parameters]]
    packing: ClassVar[type[Parameters]]
    decoding: ClassVar[type[Parameters]]
    #: Number of the form, and bytes that it takes to place a unit.
    form: ClassVar[int]
    place_bytes: ClassVar[int]

    def __init__(self, runner: Runner, placer: RowPlacer) -> None:
        self._runner = runner
        self._placer = placer
        self._launches: dict[tuple[type[Parameters], int], Launch] = {}

    def encode(
        self,
        x: torch.Tensor,
        element_bytes: int,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> None:
        """Encode a tensor; see `kernels.cpu.encode_csr`."""
        layout = KeptLayout(x.shape[0] // element_bytes, element_bytes, self.place_bytes)
        blocks, starts = self._placer.blocks(layout, sm_budget), out.data_ptr() + layout.starts_at
        if layout.units:
            count = self._launch(self.counting, layout.unit_bytes)
            count(blocks, x.data_ptr(), layout.units, starts)
        self._placer.place(layout, self.form, True, out)
        if layout.units:
            sizes = (layout.units, layout.starts_at, layout.values_at)
            pack = self._launch(self.packing, layout.unit_bytes)
            pack(blocks, x.data_ptr(), *sizes, out.data_ptr())

    def decode(
        self,
        data: torch.Tensor,
        element_bytes: int,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> bool:
        """Decode a tensor; True, since damage is reported in the mailbox."""
        layout = KeptLayout(out.shape[0] // element_bytes, element_bytes, self.place_bytes)
        self._launch(self.decoding, layout.unit_bytes)(
            self._placer.blocks(layout, sm_budget),
            data.data_ptr(),
            data.shape[0],
            layout.elements,
            element_bytes,
            layout.starts_at,
            layout.values_at,
            out.data_ptr(),
            self._runner.mailbox.data_ptr(),
        )
        return True

    def _launch(self, parameters: type[Parameters], unit_bytes: int) -> Launch:
        key = parameters, unit_bytes
        found = self._launches.get(key)
        if found is None:
            variant = kept_variant(self.file, unit_bytes)
            found = self._runner.bind(variant, parameters, ROW_THREADS)
            self._launches[key] = found
        return found
