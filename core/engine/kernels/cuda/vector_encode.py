"""Rows to bodies in which equal ones are kept once, on a GPU; see vector_encode.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..format import ceil_div
from ..vector_chunks import (
    ONLY_BYTES,
    RANGE_PARTS,
    VectorOptions,
    VectorPlan,
    VectorPlans,
    uploaded_chunks,
)
from ..vector_format import PIECE_CODES
from .chunk_parameters import DescribesChunks, OfChunks
from .parameters import Address
from .runner import Launch, Runner
from .source import vector_variant
from .vector_decode import grid_of

THREADS, ROW_THREADS = 256, 512  # of a block, and of one that numbers rows
WARPS = THREADS // 32
THREAD_NUMBERS = 8  # that a thread takes at least, where there are enough


@dataclass(init=False)
class BeginChunks(DescribesChunks):
    """Parameters of `begin_chunks`: as of `open_bodies`."""

    kernel = "begin_chunks"


@dataclass(init=False)
class QuantiseRows(OfChunks):
    """Parameters of `quantise_rows`."""

    kernel = "quantise_rows"


@dataclass(init=False)
class FindRows(OfChunks):
    """Parameters of `find_rows`."""

    kernel = "find_rows"


@dataclass(init=False)
class NumberRows(OfChunks):
    """Parameters of `number_rows`."""

    kernel = "number_rows"


@dataclass(init=False)
class CountCodes(OfChunks):
    """Parameters of `count_codes`."""

    kernel = "count_codes"


@dataclass(init=False)
class MeasurePieces(OfChunks):
    """Parameters of `measure_pieces`."""

    kernel = "measure_pieces"


@dataclass(init=False)
class PlaceBodies(OfChunks):
    """Parameters of `place_bodies`: int64 ``[count + 1]`` offsets and ``[count]`` sizes."""

    kernel = "place_bodies"

    offsets: Address
    sizes: Address


@dataclass(init=False)
class WriteBodies(OfChunks):
    """Parameters of `write_bodies`: without `out`, each goes to the buffer of its chunk."""

    kernel = "write_bodies"

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
        self._plans = VectorPlans()
        self._launches: dict[tuple[int, int], list[Launch]] = {}

    def encode_vectors(
        self,
        values: Sequence[torch.Tensor],
        options: Sequence[VectorOptions] | VectorPlan,
        out: torch.Tensor,
        sm_budget: int | None = None,
        numbers: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode any number of tensors to one buffer by eight kernels, without waiting.

        Parameters
        ----------
        values : sequence of torch.Tensor
            ``[N, ...]`` on the device, contiguous, of one dtype, each of fewer than 2**30 numbers.
        options : sequence of VectorOptions, or VectorPlan
            Of each; or what `VectorPlan.encoding` returns of them, where calls repeat: the host
            takes several times as long to make it as to start the kernels.
        out : torch.Tensor
            uint8 on the device, at a multiple of 16, of `vector_chunks.send_bytes` or more.
        sm_budget : int, optional
            No more blocks are started than this many multiprocessors hold.
        numbers : torch.Tensor, optional
            int64 ``[2 * tensors + 1]`` on the device, of which offsets and sizes are parts, so that
            one copy brings both to the host.

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
            When there are no tensors, or too many, or one is too large, or other than planned.
        ArgumentTypeError
            When they are not of one dtype.
        """
        count = len(values)
        if numbers is None:
            numbers = torch.empty(2 * count + 1, dtype=torch.int64, device=out.device)
        offsets, sizes = numbers.split_with_sizes([count + 1, count])
        if not isinstance(options, VectorPlan):
            options = self._plans.encoding(values, options)
        self._encode(values, options, [out] * len(values), (out, offsets, sizes), sm_budget)
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
        plan = VectorPlan.encoding([t.shape], t.dtype, [options], form)
        self._encode([t], plan, [data], None, sm_budget)

    def _encode(
        self,
        values: Sequence[torch.Tensor],
        plan: VectorPlan,
        data: Sequence[torch.Tensor],
        to: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
        sm_budget: int | None,
    ) -> None:
        device, count = values[0].device, len(plan)
        # The chunk of a call that has one is no copy from the host, which would be no part of a
        # captured graph that outlives its memory.
        scratch = torch.empty(plan.scratch_bytes + ONLY_BYTES, dtype=torch.uint8, device=device)
        addressed, only = plan.addressed(data, values, scratch[ONLY_BYTES:]), count == 1
        table = scratch if only else uploaded_chunks(addressed, device)
        at = table.data_ptr()
        begins, quantises, finds, counts_codes, measures, writes, number, places = self._bound(
            plan.width, plan.kind
        )

        def grid(parts: int) -> tuple[int, int, int]:
            return grid_of(self._runner, parts, count, sm_budget)

        by_numbers = grid(ceil_div(plan.most_numbers, THREADS * THREAD_NUMBERS))
        by_pieces = grid(ceil_div(plan.most_numbers, PIECE_CODES * WARPS))
        begins(
            (min(by_numbers[0], RANGE_PARTS), *by_numbers[1:]),
            0 if only else at,
            count,
            at,
            *addressed[0].tolist(),
        )
        if plan.bounded:
            quantises(by_numbers, at, count)
        if plan.refers:
            finds(grid(ceil_div(plan.most_rows, WARPS)), at, count)
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
