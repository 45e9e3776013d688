"""Unpacking the rows of a whole tensor on a GPU; see unpack.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..blob_format import HEADER_BYTES, VALUE_BYTES_AT, PackedLayout
from ..format import BLOCK_ROWS, PAD_WORDS, RowLayout, ceil_div
from .decode import DecodeKernels, kernel_of_run
from .parameters import Address, Int32, Int64, Parameters
from .runner import Launch, Runner
from .source import UNPACK, widest_vector
from .tiles import THREADS as ROW_THREADS
from .tiles import WORDS_ALIGN_BYTES, Grid, decode_variant, run_shape, tile_arguments

THREADS = 256
#: Bound launches that are kept, one for each codec and size of a tensor.
MOST_BOUND = 1024


@dataclass(init=False)
class UnpackRest(Parameters):
    """Parameters of `unpack_rest`: the buffer, the parts of a `PackedLayout`, the header's numbers.

    `counted` is 0 or 1; `tail` is where the tail's bytes go.
    """

    kernel = "unpack_rest"

    data: Address
    data_bytes: Int64
    n_rows: Int64
    row_bytes: Int32
    tail_bytes: Int32
    counted: Int32
    elements: Int64
    element_bytes: Int32
    form: Int32
    bases_at: Int64
    tail_at: Int64
    words_at: Int64
    tail: Address
    mailbox: Address


class _BoundRows:
    """The kernel that unpacks all rows of a tensor of one size: only the buffers change.

    Parameters
    ----------
    runner : Runner
        Of the device.
    layout : RowLayout
        On it.
    parts : PackedLayout
        Of the buffers; at least one row.
    address : int
        Where the rows go, or another address that is a multiple of as much.
    counted : bool
        As for `pack_blob`.
    """

    def __init__(
        self, runner: Runner, layout: RowLayout, parts: PackedLayout, address: int, counted: bool
    ) -> None:
        f = layout.format
        shape = run_shape(f, _facts(f.row_words))
        variant = replace(decode_variant("decode", layout, address), counted=counted)
        grid = Grid(runner, variant, shape)
        self.layout = layout  # whose id stands for it, as that of `parts` does
        self._parts, self._counted = parts, counted
        self._tiles = ceil_div(parts.n_rows, shape.tile_rows) + 1
        self._grid = grid
        self._launch = runner.bind(
            variant,
            kernel_of_run(variant, f, shape),
            ROW_THREADS,
            grid.shared_bytes,
            length_bytes=parts.length_bytes,
            row_begin=0,
            n=parts.n_rows,
            row_clusters=None,
            **tile_arguments(layout, parts.n_rows, shape),
            longest_words=f.row_words,
            mailbox=runner.mailbox,
        )

    def __call__(self, data: int, data_bytes: int, out: int, sm_budget: int | None) -> None:
        """Unpack a buffer at an address to another one."""
        parts = self._parts
        self._launch(
            min(self._tiles, self._grid.blocks(sm_budget)),
            data + parts.words_at,
            (data_bytes - parts.words_at) // 4 - PAD_WORDS,
            data + parts.bases_at,
            data + parts.lengths_at,
            data + VALUE_BYTES_AT if self._counted else 0,
            out,
        )


class UnpackKernels:
    """The kernel of unpack.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    decode : DecodeKernels
        Unpacks the rows.
    """

    def __init__(self, runner: Runner, decode: DecodeKernels) -> None:
        self._runner = runner
        self._decode = decode
        #: By id of parts, bytes of a row, header, and whether rows are counted: with the parts, so
        #: that no others get their number.
        self._rest: dict[
            tuple[int, int, tuple[int, int, int], bool], tuple[PackedLayout, Launch]
        ] = {}
        self._rows: dict[tuple[int, int, int, bool], _BoundRows] = {}

    def unpack_blob(
        self,
        data: torch.Tensor,
        layout: RowLayout,
        parts: PackedLayout,
        out: torch.Tensor,
        header: tuple[int, int, int],
        sm_budget: int | None = None,
        *,
        counted: bool = False,
    ) -> None:
        """Unpack the rows of a tensor; see `kernels.packed_blob`. Damage is in the mailbox."""
        f = layout.format
        key = id(parts), f.row_bytes, header, counted
        kept = self._rest.get(key)
        rest = self._bind_rest(f.row_bytes, parts, header, counted) if kept is None else kept[1]
        row_bytes = parts.n_rows * f.row_bytes
        source, nbytes, address = data.data_ptr(), data.shape[0], out.data_ptr()
        rest(1, source, nbytes, address + row_bytes)
        if not parts.n_rows:
            return
        if address % f.chunk_bytes or source % WORDS_ALIGN_BYTES:
            rows = out[:row_bytes].view(parts.n_rows, f.row_bytes)
            value_bytes = data[VALUE_BYTES_AT:HEADER_BYTES] if counted else None
            storage = parts.storage(data, f.length_dtype)
            self._decode.decode_rows(
                storage,
                layout,
                None,
                0,
                rows,
                _facts(f.row_words),
                sm_budget,
                value_bytes=value_bytes,
            )
            return
        bound = self._bound_rows(layout, parts, address, counted)
        bound(source, nbytes, address, sm_budget)

    def _bind_rest(
        self, row_bytes: int, parts: PackedLayout, header: tuple[int, int, int], counted: bool
    ) -> Launch:
        """Return the kernel for buffers of one size: only addresses change from start to start."""
        elements, element_bytes, form = header
        launch = self._runner.bind(
            UNPACK,
            UnpackRest,
            THREADS,
            n_rows=parts.n_rows,
            row_bytes=row_bytes,
            tail_bytes=parts.tail_bytes,
            counted=int(counted),
            elements=elements,
            element_bytes=element_bytes,
            form=form,
            bases_at=parts.bases_at,
            tail_at=parts.tail_at,
            words_at=parts.words_at,
            mailbox=self._runner.mailbox,
        )
        if len(self._rest) >= MOST_BOUND:
            self._rest.clear()
        self._rest[id(parts), row_bytes, header, counted] = parts, launch
        return launch

    def _bound_rows(
        self, layout: RowLayout, parts: PackedLayout, address: int, counted: bool
    ) -> _BoundRows:
        """Return the launch for a size, bound once."""
        f = layout.format
        offset = address % (widest_vector(f.chunk_bytes, f.uniform) * f.chunk_bytes)
        key = id(layout), id(parts), offset, counted
        found = self._rows.get(key)
        if found is None:
            if len(self._rows) >= MOST_BOUND:
                self._rows.clear()
            found = _BoundRows(self._runner, layout, parts, address, counted)
            self._rows[key] = found
        return found


def _facts(row_words: int) -> dict[str, int]:
    """Return the facts of rows of which only the most words that one may have are known."""
    return {"max_row_words": row_words, "max_block_words": BLOCK_ROWS * row_words}
