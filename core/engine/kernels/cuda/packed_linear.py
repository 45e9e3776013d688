"""Few rows of input times packed weights on a GPU; see packed_linear.cu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..format import PAD_WORDS, RowLayout, RowStorage, ceil_div
from ..packed_products import CHUNK_COLUMNS, LINEAR_SHAPES, LinearShape, PackedLinear
from .parameters import Address, Int32, Int64, Parameters, Value
from .runner import Launch, Runner
from .source import packed_linear_variant
from .stream import current_stream, stream_pointer

#: The most bytes of x that a block copies to shared memory; more are read where they are.
MAX_STAGED_BYTES = 32 << 10
#: Of a block's part of shared memory what it cannot have: static arrays, the driver's part.
RESERVED_BYTES = 5 << 10
#: The share of blocks that are to have a part of a weight, on the average over its time.
BUSY = 0.9


@dataclass(init=False)
class IndexExceptions(Parameters):
    """Parameters of `index_exceptions`: the tensors of a `RowStorage`, and the index."""

    kernel = "index_exceptions"

    words: Address
    n_words: Int64
    bases: Address
    lengths: Address
    length_bytes: Int32
    n_rows: Int64
    row_words: Int32
    groups: Int32
    mailbox: Address
    index: Address


@dataclass(init=False)
class MultiplyPacked(Parameters):
    """Parameters of `multiply_packed`.

    The tensors of a `RowStorage`, its index and the table of a `RowLayout`; bfloat16 `x`
    ``[x_rows, K]``, `out` ``[x_rows, N]`` and `bias` ``[N]``, which may be None; strides count
    elements. `tasks` are sets of rows of the weight that a block takes at once, whose columns
    ``2 ** split_bits`` warps share.
    """

    kernel = "multiply_packed"

    words: Address
    n_words: Int64
    index: Address
    lengths: Address
    length_bytes: Int32
    table: Address
    n_rows: Int64
    row_words: Int32
    groups: Int32
    tasks: Int32
    split_bits: Int32
    x_staged: Int32
    mailbox: Address
    x: Address
    x_rows: Int32
    x_stride: Int64
    bias: Address
    out: Address
    out_stride: Int64


class PackedLinearKernels:
    """The kernel of packed_linear.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def prepare_linear(
        self, storage: RowStorage, layout: RowLayout, facts: Mapping[str, int]
    ) -> PackedLinear:
        """Return the product with a packed weight; see `cpu.packed_linear.prepare_linear`.

        Parameters
        ----------
        storage : RowStorage
            The weight, row by row, on the GPU.
        layout : RowLayout
            What `is_multiplied_packed` accepts.
        facts : mapping of str to int
            Not needed here.

        Returns
        -------
        PackedLinear
        """
        words = storage.words
        f, n_rows = layout.format, storage.lengths.shape[0]
        groups, row_bytes = f.chunks // 32, f.row_bytes
        weight: dict[str, Value] = {
            "words": words,
            "n_words": words.numel() - PAD_WORDS,
            "lengths": storage.lengths,
            "length_bytes": storage.lengths.element_size(),
            "n_rows": n_rows,
            "row_words": f.row_words,
            "groups": groups,
            "mailbox": self._runner.mailbox,
        }
        chunks = ceil_div(f.chunks, CHUNK_COLUMNS)
        index = torch.empty(n_rows, chunks, dtype=torch.int32, device=words.device)
        if n_rows:
            shape = LINEAR_SHAPES[0]
            self._runner.bind(
                packed_linear_variant(shape), IndexExceptions, 32 * shape.warps,
                **weight, bases=storage.bases, index=index,
            )(ceil_div(n_rows, shape.warps))  # fmt: skip
        launches: list[tuple[int, int, Launch]] = []
        for shape in LINEAR_SHAPES:
            splits = self._splits(shape, n_rows, chunks)
            tasks = ceil_div(n_rows, shape.rows * shape.warps // splits)
            staged_bytes = self._staged_bytes(shape, row_bytes)
            launch = self._runner.bind(
                packed_linear_variant(shape),
                MultiplyPacked,
                32 * shape.warps,
                shape.shared_bytes + staged_bytes,
                **weight,
                index=index,
                table=layout.tables,
                tasks=tasks,
                split_bits=splits.bit_length() - 1,
                x_staged=int(staged_bytes > 0),
            )
            blocks = min(tasks, shape.blocks * self._runner.multiprocessors)
            launches.append((shape.x_rows, blocks, launch))

        streams = set[int]()  # by which the index is read

        def multiply(x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
            x_rows = x.shape[0]
            if not x_rows or not n_rows:
                return
            if index.is_cuda and (stream := stream_pointer(index.device)) not in streams:
                streams.add(stream)
                index.record_stream(current_stream(index.device))
            if x.data_ptr() % 16 or x.stride(0) % 8 or x.stride(1) != 1:
                x = x.clone(memory_format=torch.contiguous_format)
            bias_at = 0 if bias is None else bias.data_ptr()
            for limit, blocks, launch in launches:
                if x_rows <= limit:
                    launch(
                        blocks, x.data_ptr(), x_rows, x.stride(0), bias_at,
                        out.data_ptr(), out.stride(0),
                    )  # fmt: skip
                    return
            raise AssertionError(f"{x_rows} rows of input")

        return multiply

    def _staged_bytes(self, shape: LinearShape, row_bytes: int) -> int:
        """Return the bytes of x that a block copies: all, or none where there is no room."""
        staged_bytes = shape.x_rows * row_bytes
        there = self._runner.shared_bytes_per_multiprocessor // shape.blocks - RESERVED_BYTES
        most = min(MAX_STAGED_BYTES, there - shape.shared_bytes)
        return staged_bytes if staged_bytes <= most else 0

    def _splits(self, shape: LinearShape, n_rows: int, chunks: int) -> int:
        """Return how many warps share a row's columns: such that few blocks wait for the last."""
        at_once = shape.blocks * self._runner.multiprocessors
        found, most_busy = 1, 0.0
        splits = 1
        while splits <= min(chunks, shape.warps) and most_busy < BUSY:
            tasks = ceil_div(n_rows, shape.rows * shape.warps // splits)
            busy = tasks / (at_once * max(1, ceil_div(tasks, at_once)))
            if busy > most_busy:
                found, most_busy = splits, busy
            splits *= 2
        return found
