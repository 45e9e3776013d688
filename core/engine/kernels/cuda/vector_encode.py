"""Rows to bodies in which equal ones are kept once, on a GPU; see vector_encode.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..format import ceil_div
from ..vector_chunks import (
    FRAMED,
    MOST_ENCODED,
    RANGE_PARTS,
    VectorOptions,
    counts,
    described,
    encode_scratch,
    uploaded_chunks,
)
from ..vector_format import PIECE_CODES
from .parameters import Address, Int32, Int64, Parameters
from .runner import Launch, Runner
from .source import vector_variant
from .vector_decode import grid_of

THREADS, ROW_THREADS = 256, 512  # of a block, and of one that numbers rows
WARPS = THREADS // 32
THREAD_NUMBERS = 8  # that a thread takes at least, where there are enough


@dataclass(init=False)
class BeginChunks(Parameters):
    """Parameters of `begin_chunks`: as of `open_bodies`."""

    kernel = "begin_chunks"

    chunks: Address
    count: Int32
    described: Address
    data: Int64
    data_bytes: Int64
    values: Int64
    rows: Int64
    row: Int64
    flags: Int64
    form: Int64
    bound: Int64
    state: Int64
    tables: Int64
    row_starts: Int64
    references: Int64
    ranks: Int64
    places: Int64
    symbols: Int64
    slots: Int64


@dataclass(init=False)
class QuantiseRows(Parameters):
    """Parameters of `quantise_rows`."""

    kernel = "quantise_rows"

    chunks: Address
    count: Int32


@dataclass(init=False)
class FindRows(Parameters):
    """Parameters of `find_rows`."""

    kernel = "find_rows"

    chunks: Address
    count: Int32


@dataclass(init=False)
class NumberRows(Parameters):
    """Parameters of `number_rows`."""

    kernel = "number_rows"

    chunks: Address
    count: Int32


@dataclass(init=False)
class CountCodes(Parameters):
    """Parameters of `count_codes`."""

    kernel = "count_codes"

    chunks: Address
    count: Int32


@dataclass(init=False)
class MeasurePieces(Parameters):
    """Parameters of `measure_pieces`."""

    kernel = "measure_pieces"

    chunks: Address
    count: Int32


@dataclass(init=False)
class PlaceBodies(Parameters):
    """Parameters of `place_bodies`: int64 ``[count + 1]`` offsets and ``[count]`` sizes."""

    kernel = "place_bodies"

    chunks: Address
    count: Int32
    offsets: Address
    sizes: Address


@dataclass(init=False)
class WriteBodies(Parameters):
    """Parameters of `write_bodies`: without `out`, each goes to the buffer of its chunk."""

    kernel = "write_bodies"

    chunks: Address
    count: Int32
    out: Address
    offsets: Address


_BY_PARTS = (QuantiseRows, FindRows, CountCodes, MeasurePieces, WriteBodies)


class VectorEncodeKernels:
    """The kernels of vector_encode.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launches: dict[tuple[int, int], list[Launch]] = {}

    def encode_vectors(
        self,
        values: Sequence[torch.Tensor],
        options: Sequence[VectorOptions],
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode any number of tensors to one buffer by eight kernels, without waiting.

        Parameters
        ----------
        values : sequence of torch.Tensor
            ``[N, ...]`` on the device, contiguous, of one dtype, each of fewer than 2**28 numbers.
        options : sequence of VectorOptions
            Of each.
        out : torch.Tensor
            uint8 on the device, at a multiple of 16, of `vector_chunks.send_bytes` or more.
        sm_budget : int, optional
            No more blocks are started than this many multiprocessors hold.

        Returns
        -------
        offsets : torch.Tensor
            int64 ``[tensors + 1]`` on the device: where each body begins, a multiple of 16, and
            the bytes of `out` that are used.
        sizes : torch.Tensor
            int64 ``[tensors]`` on the device: bytes of each body.

        Raises
        ------
        ArgumentError
            When there are no tensors, or too many, or one is too large.
        ArgumentTypeError
            When they are not of one dtype.
        """
        device = out.device
        offsets = torch.empty(len(values) + 1, dtype=torch.int64, device=device)
        sizes = torch.empty(len(values), dtype=torch.int64, device=device)
        self._encode(values, options, [out] * len(values), None, (out, offsets, sizes), sm_budget)
        return offsets, sizes

    def encode_vector(
        self,
        t: torch.Tensor,
        options: VectorOptions,
        form: int,
        data: torch.Tensor,
        sm_budget: int | None = None,
    ) -> None:
        """Encode a tensor to a buffer with a header, by seven kernels, without waiting.

        Parameters
        ----------
        t, options, sm_budget
            As for `encode_vectors`.
        form : int
            What the header has at byte 16.
        data : torch.Tensor
            uint8 on the device, at a multiple of 16, of `HEADER_BYTES` and `raw_body_bytes`.
        """
        self._encode([t], [options], [data], form, None, sm_budget)

    def _encode(
        self,
        values: Sequence[torch.Tensor],
        options: Sequence[VectorOptions],
        data: Sequence[torch.Tensor],
        form: int | None,
        to: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
        sm_budget: int | None,
    ) -> None:
        rows, numbers = counts(values, MOST_ENCODED)
        framed = FRAMED if form is not None else 0
        flags = np.array([each.flags | framed for each in options], np.int64)
        bounds = [each.bound for each in options]
        scratch_bytes = encode_scratch(rows, numbers, flags)
        forms = [form or 0] * len(values)
        chunks = described(data, values, flags.tolist(), forms, bounds, scratch_bytes)
        device, only, count = values[0].device, len(values) == 1, len(values)
        scratch = torch.empty(chunks.scratch_bytes + 256, dtype=torch.uint8, device=device)
        addressed = chunks.at(scratch[256:])
        # A copy from the host would be no part of a captured graph that outlives its memory.
        table = scratch if only else uploaded_chunks(addressed, device)
        at = table.data_ptr()
        begins, quantises, finds, counts_codes, measures, writes, number, places = self._bound(
            chunks.width, chunks.kind
        )
        most, most_rows = int(numbers.max()), int(rows.max())

        def grid(parts: int) -> tuple[int, int, int]:
            return grid_of(self._runner, parts, count, sm_budget)

        by_numbers = grid(ceil_div(most, THREADS * THREAD_NUMBERS))
        by_pieces = grid(ceil_div(ceil_div(most, PIECE_CODES), WARPS))
        begins(
            (min(by_numbers[0], RANGE_PARTS), *by_numbers[1:]),
            0 if only else at,
            count,
            at,
            *addressed[0].tolist(),
        )
        if any(each.bound > 0 for each in options):
            quantises(by_numbers, at, count)
        if any(each.references for each in options):
            finds(grid(ceil_div(most_rows, WARPS)), at, count)
        number(grid_of(self._runner, count, 1, sm_budget)[0], at, count)
        counts_codes(by_numbers, at, count)
        measures(by_pieces, at, count)
        if to is None:
            writes(by_pieces, at, count, 0, 0)
            return
        out, offsets, sizes = (each.data_ptr() for each in to)
        places(1, at, count, offsets, sizes)
        writes(by_pieces, at, count, out, offsets)

    def _bound(self, width: int, kind: int) -> list[Launch]:
        found = self._launches.get((width, kind))
        if found is None:
            variant, bind = vector_variant("vector_encode", width, kind), self._runner.bind
            found = [
                bind(variant, BeginChunks, THREADS),
                *(bind(variant, each, THREADS) for each in _BY_PARTS),
                bind(variant, NumberRows, ROW_THREADS),
                bind(variant, PlaceBodies, THREADS),
            ]
            self._launches[width, kind] = found
        return found
