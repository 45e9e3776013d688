"""Measuring and packing rows on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..format import PAD_WORDS, RowLayout, ceil_div
from .parameters import Address, Int32, Int64, Parameters
from .runner import Launch, Runner
from .source import Variant, short_lanes
from .tiles import NARROW_ROW_BYTES, THREADS, WARPS, aligned_to, has_byte_field, word_field

STAGE_BYTES = 6 << 10  # packed row that a warp puts together in shared memory
BLOCKS = 8  # of a multiprocessor


@dataclass(init=False)
class PackedWords(Parameters):
    """Parameters of `packed_words`.

    Rows of `chunks` chunks, the tensors of a `RowLayout`; unsigned `lengths` of `length_bytes`
    each. `row_clusters`, uint8, may be None.
    """

    kernel = "packed_words"

    rows: Address
    n_rows: Int64
    chunks: Int32
    row_words: Int32
    clusters: Int32
    tables: Address
    starts: Address
    lengths: Address
    length_bytes: Int32
    row_clusters: Address


@dataclass(init=False)
class PackedWordsOfShortRows(PackedWords):
    """Parameters of `packed_words_of_short_rows`, where a warp measures several rows at once."""

    kernel = "packed_words_of_short_rows"


@dataclass(init=False)
class EncodeRows(Parameters):
    """Parameters of `encode_rows`: as of `PackedWords`, int64 bases, int32 words.

    A warp puts a packed row together in `stage_words` of shared memory, or where it belongs when
    these are 0.
    """

    kernel = "encode_rows"

    rows: Address
    n_rows: Int64
    chunks: Int32
    row_words: Int32
    row_bytes: Int32
    clusters: Int32
    tables: Address
    starts: Address
    lengths: Address
    length_bytes: Int32
    row_clusters: Address
    bases: Address
    words: Address
    stage_words: Int32


@dataclass(init=False)
class EncodeShortRows(EncodeRows):
    """Parameters of `encode_short_rows`, where `short_lanes` take a row and have its stage."""

    kernel = "encode_short_rows"


class EncodeKernels:
    """The kernels of encode.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._most_blocks = BLOCKS * runner.multiprocessors
        self._launches: dict[tuple[Variant, type[Parameters], int], Launch] = {}

    def packed_words(
        self, rows: torch.Tensor, layout: RowLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Measure packed rows; see `kernels.cpu.packed_words`."""
        f, n = layout.format, rows.shape[0]
        lengths = torch.empty(n, dtype=f.length_dtype, device=rows.device)
        row_clusters = torch.empty(
            n if f.clusters > 1 else 0, dtype=torch.uint8, device=rows.device
        )
        if n:
            rows = aligned_to(rows, f.chunk_bytes)
            each, rows_of_block = PackedWords, WARPS
            variant = _variant(layout)
            if lanes := _short_lanes(variant, rows, 16):
                each, rows_of_block = PackedWordsOfShortRows, THREADS // lanes
            self._launch(variant, each, 0)(
                min(ceil_div(n, rows_of_block), self._most_blocks),
                rows.data_ptr(),
                n,
                f.chunks,
                f.row_words,
                f.clusters,
                layout.tables.data_ptr(),
                layout.starts.data_ptr(),
                lengths.data_ptr(),
                lengths.element_size(),
                row_clusters.data_ptr() if f.clusters > 1 else 0,
            )
        return lengths, row_clusters

    def encode_rows(
        self,
        rows: torch.Tensor,
        layout: RowLayout,
        lengths: torch.Tensor,
        row_clusters: torch.Tensor,
        bases: torch.Tensor,
        n_words: int,
    ) -> torch.Tensor:
        """Pack rows; see `kernels.cpu.encode_rows`."""
        f, n = layout.format, rows.shape[0]
        # A packed row is shorter than a raw one, and the last read-modify-write may touch the word
        # behind it.
        stage_words = f.row_words + 1 if 4 * f.row_words < STAGE_BYTES else 0
        words = torch.empty(n_words + PAD_WORDS, dtype=torch.int32, device=rows.device)
        # Rows that are put together in shared memory are stored whole.
        (words[n_words:] if stage_words else words).zero_()
        if n:
            rows = aligned_to(rows, f.chunk_bytes)
            each, rows_of_block = EncodeRows, WARPS
            variant = _variant(layout)
            # Four chunks of a byte field, or 16 bytes, are loaded at once.
            load_bytes = 4 * f.chunk_bytes if variant.byte_field else 16
            if lanes := _short_lanes(variant, rows, load_bytes):
                each, rows_of_block = EncodeShortRows, THREADS // lanes
            self._launch(variant, each, max(16, 4 * stage_words * rows_of_block))(
                min(ceil_div(n, rows_of_block), self._most_blocks),
                rows.data_ptr(),
                n,
                f.chunks,
                f.row_words,
                f.row_bytes,
                f.clusters,
                layout.tables.data_ptr(),
                layout.starts.data_ptr(),
                lengths.data_ptr(),
                lengths.element_size(),
                row_clusters.data_ptr() if f.clusters > 1 else 0,
                bases.data_ptr(),
                words.data_ptr(),
                stage_words,
            )
        return words

    def _launch(self, variant: Variant, parameters: type[Parameters], shared_bytes: int) -> Launch:
        key = (variant, parameters, shared_bytes)
        found = self._launches.get(key)
        if found is None:
            found = self._runner.bind(variant, parameters, THREADS, shared_bytes)
            self._launches[key] = found
        return found


def _variant(layout: RowLayout) -> Variant:
    f = layout.format
    one = f.clusters == 1
    byte_field = one and has_byte_field(layout)
    words = one and not f.grouped and not byte_field and word_field(layout)
    how = f.chunk_bytes, f.code_bits, f.grouped, f.uniform
    return Variant("encode", *how, byte_field=byte_field, words=words)


def _short_lanes(variant: Variant, rows: torch.Tensor, load_bytes: int) -> int:
    """Return the lanes that take a row where a warp takes several at once, or 0."""
    row_bytes = rows.shape[1]
    aligned = row_bytes % load_bytes == 0 and rows.data_ptr() % load_bytes == 0
    return short_lanes(variant) if aligned and row_bytes <= NARROW_ROW_BYTES else 0
