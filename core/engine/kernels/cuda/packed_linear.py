"""Few rows of input times packed weights on a GPU; see packed_linear.cu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..format import PAD_WORDS, RowLayout, RowStorage, ceil_div
from ..packed_products import LINEAR_SHAPES, LinearShape, PackedLinear
from .parameters import Address, Int32, Int64, Parameters
from .runner import Launch, Runner
from .source import packed_linear_variant
from .tiles import WORDS_ALIGN_BYTES, aligned_to

#: Of a row's exceptions, what a block holds at the most. Those behind are read where they are.
MAX_EXCEPTION_BYTES = 1 << 10
#: Of a multiprocessor's shared memory what blocks cannot have: static arrays, the driver's part.
RESERVED_BYTES = 4 << 10


@dataclass(init=False)
class MultiplyPacked(Parameters):
    """Parameters of `multiply_packed`.

    The tensors of a `RowStorage` and the table of a `RowLayout`; bfloat16 `x` ``[x_rows, K]``,
    `out` ``[x_rows, N]`` and `bias` ``[N]``, which may be None; strides count elements.
    """

    kernel = "multiply_packed"

    words: Address
    n_words: Int64
    bases: Address
    lengths: Address
    length_bytes: Int32
    table: Address
    n_rows: Int64
    row_words: Int32
    groups: Int32
    exception_words: Int32
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
            The weight, row by row, on the GPU; copied where its words do not lie at 16 bytes.
        layout : RowLayout
            What `is_multiplied_packed` accepts.
        facts : mapping of str to int
            ``max_row_words``: the longest row of `storage`.

        Returns
        -------
        PackedLinear
        """
        words = aligned_to(storage.words, WORDS_ALIGN_BYTES)
        f, n_rows = layout.format, storage.lengths.shape[0]
        groups = f.chunks // 32
        exception_words = staged_words(max(0, facts["max_row_words"] - 11 * groups))
        launches: list[tuple[int, int, Launch]] = []
        for shape in LINEAR_SHAPES:
            warps = self._warps(shape, exception_words)
            launch = self._runner.bind(
                packed_linear_variant(shape),
                MultiplyPacked,
                32 * warps,
                shared_bytes(shape, exception_words, warps),
                words=words,
                n_words=words.numel() - PAD_WORDS,
                bases=storage.bases,
                lengths=storage.lengths,
                length_bytes=storage.lengths.element_size(),
                table=layout.tables,
                n_rows=n_rows,
                row_words=f.row_words,
                groups=groups,
                exception_words=exception_words,
                mailbox=self._runner.mailbox,
            )
            launches.append((shape.x_rows, ceil_div(n_rows, shape.rows), launch))

        def multiply(x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
            x_rows = x.shape[0]
            if not x_rows or not n_rows:
                return
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

    def _warps(self, shape: LinearShape, exception_words: int) -> int:
        """Return the warps of a block: such that most of them run at once on a multiprocessor."""
        most = self._runner.shared_bytes_per_multiprocessor

        def at_once(warps: int) -> int:
            block = shared_bytes(shape, exception_words, warps) + RESERVED_BYTES
            return warps * min(most // block, shape.max_warps * shape.blocks // warps)

        return max((warps for warps in (8, 4, 2) if warps <= shape.max_warps), key=at_once)


def staged_words(exception_words: int) -> int:
    """Return the words of shared memory for exceptions of a row that has so many words of them.

    They begin anywhere in 16 bytes and are read two words at a time. The number of pieces of 16
    bytes is odd, so that rows lie at different banks.
    """
    needed_bytes = min(4 * (exception_words + 5), MAX_EXCEPTION_BYTES)
    return 4 * (ceil_div(needed_bytes, 16) | 1)


def shared_bytes(shape: LinearShape, exception_words: int, warps: int) -> int:
    """Return the dynamic shared memory of a block: two stages a warp, and exceptions."""
    return 4 * (2 * warps * shape.stage_words + shape.rows * exception_words)
