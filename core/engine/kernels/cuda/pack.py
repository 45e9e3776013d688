"""Packing the rows of a whole tensor on a GPU; see pack.cu."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..blob_format import VALUE_BYTES_AT, PackedLayout
from ..format import BLOCK_ROWS, CODE_BITS, RowLayout, ceil_div
from .driver import zero_words
from .parameters import Address, Int32, Int64, Parameters
from .runner import Launch, Runner
from .source import PACK_BLOCKS, Variant
from .tiles import THREADS, WARPS, aligned_to, has_byte_field

#: Launches that are kept, one for each codec and size of a tensor.
MOST_BOUND = 1024


@dataclass(init=False)
class PackBlob(Parameters):
    """Parameters of `pack_blob`: rows of a `RowLayout`, the parts of a `PackedLayout`.

    `value_bytes`, uint64, may be None. `states`, int64 ``[blocks + 1]``, are 0 at the start.
    """

    kernel = "pack_blob"

    rows: Address
    n_rows: Int64
    chunks: Int32
    row_words: Int32
    row_bytes: Int32
    tail_bytes: Int32
    value_bytes: Address
    tables: Address
    starts: Address
    warp_words: Int32
    elements: Int64
    element_bytes: Int32
    form: Int32
    lengths_at: Int64
    length_bytes: Int32
    bases_at: Int64
    tail_at: Int64
    words_at: Int64
    data: Address
    states: Address


class PackKernels:
    """The kernel of pack.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        #: By id of layout and parts, and header: with both, so that no others get their numbers.
        self._launches: dict[
            tuple[int, int, tuple[int, int, int]], tuple[RowLayout, PackedLayout, Launch]
        ] = {}

    def pack_blob(
        self,
        x: torch.Tensor,
        layout: RowLayout,
        parts: PackedLayout,
        data: torch.Tensor,
        header: tuple[int, int, int],
        sm_budget: int | None = None,
        *,
        counted: bool = False,
    ) -> None:
        """Pack the rows of a tensor; see `kernels.packed_blob`."""
        found = self._launches.get((id(layout), id(parts), header))
        launch = self._bind(layout, parts, header) if found is None else found[2]
        if (x_at := x.data_ptr()) % layout.format.chunk_bytes:
            x = aligned_to(x, layout.format.chunk_bytes)
            x_at = x.data_ptr()
        states = zero_words(parts.blocks + 1, x.device)
        address = data.data_ptr()
        launch(
            self._blocks(parts, sm_budget),
            x_at,
            address + VALUE_BYTES_AT if counted else 0,
            address,
            states.data_ptr(),
        )

    def _bind(self, layout: RowLayout, parts: PackedLayout, header: tuple[int, int, int]) -> Launch:
        """Return the kernel for tensors of one size: only addresses change from start to start."""
        f, words = layout.format, warp_words(layout)
        variant = Variant(
            "pack",
            f.chunk_bytes,
            f.code_bits,
            f.grouped,
            True,
            byte_field=has_byte_field(layout),
        )
        elements, element_bytes, form = header
        launch = self._runner.bind(
            variant,
            PackBlob,
            THREADS,
            4 * words * WARPS,
            n_rows=parts.n_rows,
            chunks=f.chunks,
            row_words=f.row_words,
            row_bytes=f.row_bytes,
            tail_bytes=parts.tail_bytes,
            tables=layout.tables,
            starts=layout.starts,
            warp_words=words,
            elements=elements,
            element_bytes=element_bytes,
            form=form,
            lengths_at=parts.lengths_at,
            length_bytes=parts.length_bytes,
            bases_at=parts.bases_at,
            tail_at=parts.tail_at,
            words_at=parts.words_at,
        )
        if len(self._launches) >= MOST_BOUND:
            self._launches.clear()
        self._launches[id(layout), id(parts), header] = layout, parts, launch
        return launch

    def _blocks(self, parts: PackedLayout, sm_budget: int | None) -> int:
        """Return the blocks of a launch: one for each of the layout, or as many as may run."""
        if sm_budget is None:
            return parts.blocks or 1
        processors = max(1, min(sm_budget, self._runner.multiprocessors))
        return max(1, min(parts.blocks, processors * PACK_BLOCKS))


def warp_words(layout: RowLayout) -> int:
    """Return the words of shared memory that a warp packs its rows in.

    Those of its rows when they are raw; and what a row of which every chunk is an exception has
    more than a raw one: its codes, a bit for each group of them, what the parts are rounded up by.
    """
    f = layout.format
    groups = ceil_div(f.chunks, 32)
    more = groups * max(CODE_BITS) + ceil_div(groups, 32) + 2
    return BLOCK_ROWS // WARPS * f.row_words + more
