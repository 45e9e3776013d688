"""Bags of rows on a GPU: pooled, and their offsets looked at; see bags.cu."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..format import ceil_div
from .parameters import Address, Int32, Int64, Parameters
from .runner import Launch, Runner
from .source import bags_variant

THREADS, LONG_THREADS, CHECK_THREADS = 256, 64, 1024  # of a block
BLOCKS, LONG_BLOCKS = 8, 7  # of a multiprocessor
SLICE_VALUES = 32  # of a bag, for a warp of `pool_long_bags`
#: `pool_long_bags` has 128 rows of float32 under way where a thread of `pool_bags` has 8, and fewer
#: bags at once. So it takes bags of more ids than this on average, where the bags have few values.
MOST_SHORT_IDS, FEW_VALUES = 24, 1 << 16
#: Whatever their values, it takes bags of more ids than this.
MOST_IDS = 256
NO_PADDING = -(1 << 63)
#: Dtypes of rows that `BagKernels.pool` takes.
POOLED_DTYPES = (torch.float32, torch.float64)


@dataclass(init=False)
class PoolBags(Parameters):
    """Parameters of `pool_bags`.

    Rows of `width` vectors of float32 or float64, int32 or int64 ids and offsets, of which there
    are `entries`; `mode` is 0 for the sum, 1 for the mean, 2 for the largest values.
    """

    kernel = "pool_bags"

    matrix: Address
    n_rows: Int64
    width: Int32
    index: Address
    index_bytes: Int32
    n: Int64
    padding: Int64
    offsets: Address
    offset_bytes: Int32
    entries: Int64
    last_is_end: Int32
    mode: Int32
    out: Address
    mailbox: Address


@dataclass(init=False)
class PoolLongBags(PoolBags):
    """Parameters of `pool_long_bags`, which are those of `pool_bags`."""

    kernel = "pool_long_bags"


@dataclass(init=False)
class SoundOffsets(Parameters):
    """Parameters of `sound_offsets`: int32 or int64 offsets, an int64 output, `n` ids."""

    kernel = "sound_offsets"

    offsets: Address
    offset_bytes: Int32
    entries: Int64
    n: Int64
    last_is_end: Int32
    out: Address
    mailbox: Address


class BagKernels:
    """The kernels of bags.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._pools: dict[tuple[int, int, bool], Launch] = {}

    def pool(
        self,
        matrix: torch.Tensor,
        index: torch.Tensor,
        offsets: torch.Tensor,
        mode: int,
        *,
        padding: int | None = None,
        include_last: bool = False,
        by_warps: bool | None = None,
    ) -> torch.Tensor:
        """Return what ``torch.embedding_bag`` does, bit for bit, with no weights and no gradient.

        Parameters
        ----------
        matrix : torch.Tensor
            ``[R, D]`` of one of POOLED_DTYPES, contiguous, on the device.
        index : torch.Tensor
            int32 or int64 ``[n]`` on the device, contiguous: rows of `matrix`. Those out of range
            count for nothing, and the mailbox has the error.
        offsets : torch.Tensor
            int32 or int64 ``[B]`` on the device, contiguous. Bags of offsets that are not sound are
            zeros, and the mailbox has the error.
        mode : int
            0 for the sum, 1 for the mean, 2 for the largest values.
        padding : int, optional
            The row that counts for nothing.
        include_last : bool
            Whether the last offset is the end of the last bag.
        by_warps : bool, optional
            Whether `pool_long_bags` is used; with None, as the ids of a bag say.

        Returns
        -------
        torch.Tensor
            ``[B, D]``, or ``[B - 1, D]`` with `include_last`.
        """
        entries, (_, dim) = offsets.shape[0], matrix.shape
        out = torch.empty(entries - include_last, dim, dtype=matrix.dtype, device=matrix.device)
        if by_warps is None:
            most = MOST_SHORT_IDS if out.numel() < FEW_VALUES else MOST_IDS
            by_warps = index.shape[0] > most * out.shape[0] > 0
        size, to, address = matrix.element_size(), out.data_ptr(), matrix.data_ptr()
        vector = 16 // size if (address | to | dim * size) % 16 == 0 else 1
        if not by_warps and out.numel() < vector * THREADS * self._runner.multiprocessors:
            vector = 1  # more threads, each of which has few values
        pool = self._pools.get((size, vector, by_warps))
        if pool is None:
            pool = self._runner.bind(
                bags_variant(size, vector),
                PoolLongBags if by_warps else PoolBags,
                LONG_THREADS if by_warps else THREADS,
                mailbox=self._runner.mailbox,
            )
            self._pools[size, vector, by_warps] = pool
        width = dim // vector
        if by_warps:
            wanted = ceil_div(out.shape[0] * ceil_div(dim, SLICE_VALUES), LONG_THREADS // 32)
            room = LONG_BLOCKS * self._runner.multiprocessors
        else:
            wanted = ceil_div(out.shape[0] * width, THREADS)
            room = BLOCKS * self._runner.multiprocessors
        # One bag at least, so that an end that is not the number of ids is reported.
        blocks = max(1, min(wanted, room))
        pool(
            blocks,
            address,
            matrix.shape[0],
            width,
            index.data_ptr(),
            index.element_size(),
            index.shape[0],
            NO_PADDING if padding is None else padding,
            offsets.data_ptr(),
            offsets.element_size(),
            entries,
            include_last,
            mode,
            to,
        )
        return out

    def sound_offsets(
        self, offsets: torch.Tensor, n_ids: int, *, include_last: bool = False
    ) -> torch.Tensor:
        """Return offsets that kernels of torch can take; bad ones are reported in the mailbox.

        Parameters
        ----------
        offsets : torch.Tensor
            int32 or int64 ``[B]`` on the device, contiguous.
        n_ids : int
            Ids of all bags.
        include_last : bool
            Whether the last offset is the end of the last bag.

        Returns
        -------
        torch.Tensor
            int64 ``[B]``: a copy, or where one offset is bad zeros, with `n_ids` as the end.
        """
        out = torch.empty_like(offsets, dtype=torch.int64)
        if out.shape[0]:
            size = offsets.element_size()
            self._check(
                1, offsets.data_ptr(), size, out.shape[0], n_ids, include_last, out.data_ptr()
            )
        return out

    @cached_property
    def _check(self) -> Launch:
        return self._runner.bind(
            bags_variant(4, 1), SoundOffsets, CHECK_THREADS, mailbox=self._runner.mailbox
        )
