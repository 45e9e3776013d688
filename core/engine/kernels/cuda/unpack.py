"""Unpacking the rows of a whole tensor on a GPU; see unpack.cu."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..blob_format import HEADER_BYTES, VALUE_BYTES_AT, PackedLayout
from ..format import BLOCK_ROWS, RowLayout
from .decode import DecodeKernels
from .parameters import Address, Int32, Int64, Parameters
from .runner import Launch, Runner
from .source import UNPACK

THREADS = 256


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
        self._rest: Launch | None = None

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
        if self._rest is None:
            self._rest = self._runner.bind(UNPACK, UnpackRest, THREADS)
        row_bytes = parts.n_rows * f.row_bytes
        self._rest(
            1,
            data.data_ptr(),
            data.shape[0],
            parts.n_rows,
            f.row_bytes,
            parts.tail_bytes,
            int(counted),
            *header,
            parts.bases_at,
            parts.tail_at,
            parts.words_at,
            out.data_ptr() + row_bytes,
            self._runner.mailbox.data_ptr(),
        )
        storage = parts.storage(data, f.length_dtype)
        rows = out[:row_bytes].view(parts.n_rows, f.row_bytes)
        facts = {"max_row_words": f.row_words, "max_block_words": BLOCK_ROWS * f.row_words}
        value_bytes = data[VALUE_BYTES_AT:HEADER_BYTES] if counted else None
        self._decode.decode_rows(
            storage, layout, None, 0, rows, facts, sm_budget, value_bytes=value_bytes
        )
