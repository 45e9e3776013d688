"""Decoding rows in order: what a launch takes, and launches of which all is known ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from ....errors import ArgumentError
from ..format import PAD_WORDS, RowLayout, RowStorage, ceil_div
from .runner import Runner, do_nothing
from .tiles import (
    THREADS,
    WORDS_ALIGN_BYTES,
    Grid,
    aligned_to,
    decode_variant,
    run_shape,
    tile_arguments,
)


class DecodeLaunch:
    """The kernel, grid and arguments that decode rows in order.

    Parameters
    ----------
    runner : Runner
        Of the device.
    storage, layout, row_begin, out, facts
        As for `CudaKernels.decode_rows`; at least one row, and `out` starts at a multiple of the
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
    ) -> None:
        shape = run_shape(layout.format, facts)
        self._runner = runner
        self._variant = decode_variant("decode", layout, out.data_ptr())
        self._kernel = "decode_rows" if shape.stage_words else "decode_long_rows"
        self._tiles = ceil_div(out.shape[0], shape.tile_rows) + 1
        self._grid = Grid(runner, self._variant, shape)
        self._args: list[Any] = [
            aligned_to(storage.words, WORDS_ALIGN_BYTES),
            np.int64(storage.words.shape[0] - PAD_WORDS),
            storage.bases,
            storage.lengths,
            np.int32(storage.lengths.element_size()),
            np.int64(row_begin),
            np.int64(out.shape[0]),
            storage.row_clusters if layout.format.clusters > 1 else None,
            *tile_arguments(layout, storage.lengths.shape[0], shape).values(),
            np.int32(facts["max_row_words"]),
            out,
            runner.mailbox,
        ]

    def start(self, sm_budget: int | None) -> None:
        """Start it on torch's current stream, on `sm_budget` multiprocessors or all."""
        self._runner.launch(
            self._variant,
            self._kernel,
            (self._blocks(sm_budget),),
            (THREADS,),
            self._args,
            shared_bytes=self._grid.shared_bytes,
        )

    def prepared(self, sm_budget: int | None) -> Callable[[], None]:
        """Return what starts it, any number of times."""
        launch = self._runner.prepare(
            self._variant, self._kernel, THREADS, self._args, (), self._grid.shared_bytes
        )
        return partial(launch, self._blocks(sm_budget))

    def _blocks(self, sm_budget: int | None) -> int:
        """Return as many blocks as fit the device, or `sm_budget` of it, at once."""
        return min(self._tiles, self._grid.blocks(sm_budget))


def prepare_decode(
    runner: Runner,
    storage: RowStorage,
    layout: RowLayout,
    out: torch.Tensor,
    facts: Mapping[str, int],
    sm_budget: int | None,
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
    return DecodeLaunch(runner, storage, layout, 0, out, facts).prepared(sm_budget)
