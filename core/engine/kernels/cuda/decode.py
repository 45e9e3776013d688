"""Decoding rows in order on a GPU, at once or by a launch of which all is known ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from ....errors import ArgumentError
from ..format import PAD_WORDS, RowFormat, RowLayout, RowStorage, TableStorage, ceil_div
from .gather import GatherKernels
from .ids import CHECKED_BY_ALL, IdKernels
from .parameters import Address, Int32, Int64, Parameters, Value, in_order
from .runner import Launch, Runner, do_nothing
from .source import MIN_SHORT_VECTOR, Variant
from .tiles import (
    THREADS,
    WAVES,
    WORDS_ALIGN_BYTES,
    Grid,
    TileShape,
    aligned_to,
    decode_variant,
    run_shape,
    takes_eight_lanes,
    tile_arguments,
)


@dataclass(init=False)
class DecodeRows(Parameters):
    """Parameters of `decode_rows`.

    The tensors of a `RowStorage` and a `RowLayout`, rows `row_begin` to ``row_begin + n`` of
    `n_rows`, the tiles of a `TileShape`. `row_clusters` may be None, and so may `value_bytes`,
    uint64: only rows that hold so many bytes are decoded.
    """

    kernel = "decode_rows"

    words: Address
    n_words: Int64
    bases: Address
    lengths: Address
    length_bytes: Int32
    row_begin: Int64
    n: Int64
    row_clusters: Address
    tables: Address
    starts: Address
    n_rows: Int64
    chunks: Int32
    row_words: Int32
    row_bytes: Int32
    clusters: Int32
    tile_rows: Int32
    stride_words: Int32
    stage_words: Int32
    longest_words: Int32
    value_bytes: Address
    out: Address
    mailbox: Address


@dataclass(init=False)
class DecodeLongRows(DecodeRows):
    """Parameters of `decode_long_rows`, whose rows fit no stage."""

    kernel = "decode_long_rows"


@dataclass(init=False)
class DecodeShortRows(DecodeRows):
    """Parameters of `decode_short_rows`, where eight lanes take a row."""

    kernel = "decode_short_rows"


def kernel_of_run(variant: Variant, f: RowFormat, shape: TileShape) -> type[DecodeRows]:
    """Return the kernel that decodes rows in order."""
    if not shape.stage_words:
        return DecodeLongRows
    return DecodeShortRows if takes_eight_lanes(variant, f, shape) else DecodeRows


class DecodeKernels:
    """The kernels of decode.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    ids : IdKernels
        Checks rows that are chosen by id.
    gather : GatherKernels
        Decodes them.
    """

    def __init__(self, runner: Runner, ids: IdKernels, gather: GatherKernels) -> None:
        self._runner = runner
        self._ids = ids
        self._gather = gather
        #: With shared bytes.
        self._launches: dict[tuple[Variant, type[DecodeRows], int], Launch] = {}

    def decode_rows(
        self,
        storage: RowStorage,
        layout: RowLayout,
        ids: torch.Tensor | None,
        row_begin: int,
        out: torch.Tensor,
        facts: Mapping[str, int],
        sm_budget: int | None = None,
        *,
        value_bytes: torch.Tensor | None = None,
    ) -> int:
        """Decode rows without waiting for the GPU; see `kernels.cpu.decode_rows`.

        Parameters
        ----------
        storage, layout, ids, row_begin, out
            As on the CPU. The words may lie in page-locked host memory: then they are read over
            the link by the kernel.
        facts : mapping of str to int
            ``max_row_words`` and ``max_block_words``: the longest row, and 32 rows, of `storage`.
        sm_budget : int, optional
            Multiprocessors that the kernel may use; all when left out.
        value_bytes : torch.Tensor, optional
            Eight bytes on the GPU, a uint64: only rows that hold so many bytes are decoded. Not
            with `ids`.

        Returns
        -------
        int
            -1. Bad ids leave `out` untouched and, like damaged rows, are reported in the mailbox.
        """
        if ids is not None:
            table = TableStorage(
                n_rows=storage.lengths.shape[0],
                words=storage.words,
                bases=storage.bases,
                lengths=aligned_to(storage.lengths, 16),
                row_clusters=storage.row_clusters if layout.format.clusters > 1 else None,
                max_words=facts["max_row_words"],
            )
            n_rows, first_bad = table.n_rows, None
            if ids.shape[0] > CHECKED_BY_ALL:
                first_bad = torch.empty(1, dtype=torch.int64, device=ids.device)
                self._ids.check(ids, n_rows, first_bad)
            return self._gather.gather_rows(
                table, layout, ids, out, first_bad=first_bad, lowest=-n_rows, sm_budget=sm_budget
            )
        n = out.shape[0]
        if n == 0:
            return -1
        f = layout.format
        if out.data_ptr() % f.chunk_bytes:  # the kernel stores whole chunks
            aligned = torch.empty_like(out)
            self.decode_rows(
                storage, layout, None, row_begin, aligned, facts, sm_budget, value_bytes=value_bytes
            )
            out.copy_(aligned)
            return -1
        run = _Run(self._runner, storage, layout, row_begin, out, facts, value_bytes)
        key = (run.variant, run.parameters, run.grid.shared_bytes)
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = run.bind()
        launch(run.blocks(sm_budget), *in_order(run.parameters, run.values))
        return -1

    def prepare_decode(
        self,
        storage: RowStorage,
        layout: RowLayout,
        out: torch.Tensor,
        facts: Mapping[str, int],
        sm_budget: int | None = None,
    ) -> Callable[[], None]:
        """Return what decodes all rows of a storage, as they are then, on torch's current stream.

        Raises
        ------
        ArgumentError
            When `out` or the words lie where the kernel cannot store or load: a copy made now would
            hold what the words are now.
        """
        chunk_bytes = layout.format.chunk_bytes
        if out.data_ptr() % chunk_bytes:
            raise ArgumentError(f"out: starts at no multiple of {chunk_bytes} bytes")
        if storage.words.data_ptr() % WORDS_ALIGN_BYTES:
            raise ArgumentError(f"storage: words start at no multiple of {WORDS_ALIGN_BYTES} bytes")
        if not out.shape[0]:
            return do_nothing
        run = _Run(self._runner, storage, layout, 0, out, facts)
        return partial(run.bind(**run.values), run.blocks(sm_budget))


class _Run:
    """The kernel, grid and parameters that decode rows in order.

    Parameters
    ----------
    runner : Runner
        Of the device.
    storage, layout, row_begin, out, facts, value_bytes
        As for `DecodeKernels.decode_rows`; at least one row, and `out` starts at a multiple of the
        chunk.
    """

    def __init__(
        self,
        runner: Runner,
        storage: RowStorage,
        layout: RowLayout,
        row_begin: int,
        out: torch.Tensor,
        facts: Mapping[str, int],
        value_bytes: torch.Tensor | None = None,
    ) -> None:
        f, n = layout.format, out.shape[0]
        variant = decode_variant("decode", layout, out.data_ptr())
        self.variant = variant if value_bytes is None else replace(variant, counted=True)
        wide = variant.vector >= MIN_SHORT_VECTOR
        at_once = runner.multiprocessors * variant.blocks * WAVES
        shape = run_shape(f, facts, n // at_once if wide else 0)
        self._runner = runner
        self._tiles = ceil_div(n, shape.tile_rows) + 1
        self.parameters = kernel_of_run(self.variant, f, shape)
        self.grid = Grid(runner, self.variant, shape)
        self.values: dict[str, Value] = {
            "words": aligned_to(storage.words, WORDS_ALIGN_BYTES),
            "n_words": storage.words.shape[0] - PAD_WORDS,
            "bases": storage.bases,
            "lengths": storage.lengths,
            "length_bytes": storage.lengths.element_size(),
            "row_begin": row_begin,
            "n": n,
            "row_clusters": storage.row_clusters if layout.format.clusters > 1 else None,
            **tile_arguments(layout, storage.lengths.shape[0], shape),
            "longest_words": facts["max_row_words"],
            "value_bytes": value_bytes,
            "out": out,
            "mailbox": runner.mailbox,
        }

    def bind(self, **fixed: Value) -> Launch:
        """Return the kernel, ready to be started."""
        shared_bytes = self.grid.shared_bytes
        return self._runner.bind(self.variant, self.parameters, THREADS, shared_bytes, **fixed)

    def blocks(self, sm_budget: int | None) -> int:
        """Return as many blocks as fit the device, or `sm_budget` of it, at once."""
        return min(self._tiles, self.grid.blocks(sm_budget))
