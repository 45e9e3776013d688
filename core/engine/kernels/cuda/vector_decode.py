"""Bodies of rows of which equal ones are kept once, to rows on a GPU; see vector_decode.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..format import ceil_div
from ..vector_chunks import ONLY_BYTES, VectorPlan, VectorPlans, uploaded_chunks
from ..vector_format import PIECE_CODES
from .chunk_parameters import DescribesChunks, OfChunks
from .parameters import Address
from .runner import Launch, Runner
from .source import vector_variant

THREADS = 256  # of a block
STREAM_THREADS, STREAM_PIECES = 128, 32  # of a block that reads streams
#: Blocks of a multiprocessor that are started at the most; each takes several parts then.
BLOCKS = 16
#: Blocks that a multiprocessor has room for.
ROOM = 4


@dataclass(init=False)
class OpenBodies(DescribesChunks):
    """Parameters of `open_bodies`: `count` chunks, or the numbers of the only one.

    Those of the only one are written to `described`.
    """

    kernel = "open_bodies"


@dataclass(init=False)
class ReadStreams(OfChunks):
    """Parameters of `read_streams`."""

    kernel = "read_streams"


@dataclass(init=False)
class FindPlaces(OfChunks):
    """Parameters of `find_places`."""

    kernel = "find_places"


@dataclass(init=False)
class WriteRows(OfChunks):
    """Parameters of `write_rows`; errors go to the mailbox."""

    kernel = "write_rows"

    mailbox: Address


def grid_of(runner: Runner, parts: int, chunks: int, sm_budget: int | None) -> tuple[int, int, int]:
    """Return the blocks for so many parts of so many chunks each."""
    processors = runner.multiprocessors
    if sm_budget is None:
        most = BLOCKS * processors
        return max(1, min(parts, max(1, most // chunks))), chunks, 1
    most = ROOM * max(1, min(sm_budget, processors))
    down = min(chunks, most)
    return max(1, min(parts, most // down)), down, 1


class VectorDecodeKernels:
    """The kernels of vector_decode.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._plans = VectorPlans()
        self._launches: dict[tuple[int, int], list[Launch]] = {}

    def decode_vectors(
        self,
        bodies: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        bounded: Sequence[bool] | VectorPlan,
        form: int | None = None,
        sm_budget: int | None = None,
    ) -> None:
        """Decode any number of bodies by four kernels, without waiting.

        Damage of one is in the mailbox, with its number; nothing is written to its tensor.

        Parameters
        ----------
        bodies : sequence of torch.Tensor
            uint8 on the device, contiguous, at a multiple of 4 bytes: all bytes of a body and no
            more; with a `form`, at a multiple of 16, header and body and any bytes behind them.
        outs : sequence of torch.Tensor
            ``[N, ...]`` contiguous, of one dtype: where the rows go.
        bounded : sequence of bool, or VectorPlan
            Whether codes may stand for values in each; or what `VectorPlan.decoding` returns of
            that, where calls repeat.
        form : int, optional
            What the headers have at byte 16, where there are headers and `bounded` is no plan.
        sm_budget : int, optional
            No more blocks are started than this many multiprocessors hold.

        Raises
        ------
        ArgumentError
            When there are no bodies, or too many, or a tensor is too large, or other than planned.
        ArgumentTypeError
            When the tensors are not of one dtype.
        """
        plan = bounded
        if not isinstance(plan, VectorPlan):
            plan = self._plans.decoding(outs, plan, form)
        device, count = outs[0].device, len(plan)
        # The chunk of a call that has one is no copy from the host, which would be no part of a
        # captured graph that outlives its memory.
        scratch = torch.empty(plan.scratch_bytes + ONLY_BYTES, dtype=torch.uint8, device=device)
        addressed, only = plan.addressed(bodies, outs, scratch[ONLY_BYTES:]), count == 1
        table = scratch if only else uploaded_chunks(addressed, device)
        opens, reads, finds, writes = self._bound(plan.width, plan.kind)
        at = table.data_ptr()
        opens(
            grid_of(self._runner, count, 1, sm_budget)[0],
            0 if only else at,
            count,
            at,
            *addressed[0].tolist(),
        )
        streams = ceil_div(plan.most_numbers, PIECE_CODES), ceil_div(plan.most_rows, PIECE_CODES)
        parts = sum(ceil_div(pieces, STREAM_PIECES) for pieces in streams)
        reads(grid_of(self._runner, parts, count, sm_budget), at, count)
        finds(grid_of(self._runner, ceil_div(plan.most_rows, THREADS), count, sm_budget), at, count)
        parts = ceil_div(plan.most_numbers, THREADS * (2 if plan.width == 8 else 4))
        mailbox = self._runner.mailbox.data_ptr()
        writes(grid_of(self._runner, parts, count, sm_budget), at, count, mailbox)

    def _bound(self, width: int, kind: int) -> list[Launch]:
        found = self._launches.get((width, kind))
        if found is None:
            variant, bind = vector_variant("vector_decode", width, kind), self._runner.bind
            found = [
                bind(variant, OpenBodies, THREADS),
                bind(variant, ReadStreams, STREAM_THREADS),
                bind(variant, FindPlaces, THREADS),
                bind(variant, WriteRows, THREADS),
            ]
            self._launches[width, kind] = found
        return found
