"""What a call of the collective is given: refused, or as rows for each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..dtypes import dense, dtype_name
from ..engine.codecs.base import check_indices_argument, rows_as_bytes
from ..engine.kernels.vector_format import KINDS
from ..errors import ArgumentError, ArgumentTypeError
from .messages import Repeats
from .wire import DTYPES, MOST_BYTES, MOST_ELEMENTS, MOST_ROWS


def refuse_capture(t: torch.Tensor) -> None:
    """Refuse a call inside CUDA-graph capture: sizes differ from step to step."""
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ArgumentError(
            "input: a CUDA graph is being captured, and messages have other sizes at each step"
        )


def repeats_of(
    name: str,
    rows: torch.Tensor,
    send_rows: Sequence[int],
    row_ids: torch.Tensor | None,
    *,
    plain: bool,
) -> list[Repeats | None] | None:
    """Return for each rank which of its rows ``[N, row]`` share an id; waits for a GPU.

    None where torch's own collective delivers the rows, in which all cross.
    """
    if row_ids is None:
        return None
    ids = check_indices_argument(row_ids, "row_ids")
    if ids.device.type != "cpu" and ids.device != rows.device:
        raise ArgumentTypeError(
            f"row_ids: on {ids.device}, expected cpu or {rows.device}, where {name} is"
        )
    if len(ids) != rows.shape[0]:
        raise ArgumentError(f"row_ids: {len(ids)} ids, {name} has {rows.shape[0]} rows")
    if plain:
        return None
    found = [
        Repeats.of(part) if len(part) else None for part in torch.split(ids.cpu(), list(send_rows))
    ]
    sent, at = torch.arange(len(ids)), 0
    for n, repeated in zip(send_rows, found, strict=True):
        if repeated is not None:
            sent[at : at + n] = at + torch.from_numpy(repeated.first[repeated.places])
        at += n
    if any(found) and rows.shape[1]:
        bits = rows_as_bytes(rows, rows.shape[1] * rows.element_size())
        if not torch.equal(bits[sent.to(rows.device)], bits):
            raise ArgumentError("row_ids: rows of one id differ")
    return found


def checked_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a group that this rank is of, all ranks for None, or refuse it."""
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError("group: torch.distributed is not initialised")
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise ArgumentTypeError(f"group: expected a ProcessGroup of this rank, got {found!r:.60}")
    return found


def check_dtype(dtype: torch.dtype, bound: object | None) -> None:
    """Refuse dtypes that do not cross, and bounds for those that have none."""
    if dtype not in DTYPES:
        accepted = ", ".join(map(dtype_name, DTYPES))
        raise ArgumentTypeError(f"input: dtype {dtype}, accepted are {accepted}")
    if bound is not None and dtype not in KINDS:
        raise ArgumentTypeError(
            f"error_bound: input is {dtype}, bounds are for float32, bfloat16 and float16"
        )


def row_of(t: torch.Tensor, row_shape: Sequence[int] | None) -> int:
    """Return the elements of a row."""
    if t.dim() == 0:
        raise ArgumentError("input, output: 0 dimensions, expected one or more")
    own = math.prod(t.shape[1:])
    if row_shape is None:
        return own
    given = math.prod(row_shape)
    if given < 1:
        raise ArgumentError(f"row_shape: {list(row_shape)}, expected sizes from 1")
    if t.dim() > 1 and given != own:
        raise ArgumentError(f"row_shape: {list(row_shape)}, rows are {list(t.shape[1:])}")
    return given


def cut_rows(
    name: str,
    t: torch.Tensor,
    row: int,
    splits: Sequence[int] | None,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, list[int]]:
    """Return a tensor as rows ``[N, row]``, and the rows for each rank of a group."""
    ranks = group.size()
    size, unit = t.shape[0], row if t.dim() == 1 else 1
    if splits is None:
        if size % ranks:
            raise ArgumentError(f"{name}: {size} along the first dimension for {ranks} ranks")
        splits = [size // ranks] * ranks
    what = f"{name}_split_sizes"
    counts = [int(n) for n in splits]
    if len(counts) != ranks:
        raise ArgumentError(f"{what}: {len(counts)} sizes, the group has {ranks} ranks")
    if min(counts) < 0 or sum(counts) != size:
        raise ArgumentError(f"{what}: {counts}, expected sizes from 0 whose sum is {size}")
    if any(n % unit for n in counts):
        raise ArgumentError(f"{what}: {counts}, expected multiples of {unit} elements, a row")
    rows = [n // unit for n in counts]
    # Of a row a message has its elements, or a field of up to four bytes.
    most = min(MOST_ROWS, MOST_BYTES // (row * t.element_size() + 4))
    if max(rows) >= most or row >= MOST_ELEMENTS:
        raise ArgumentError(
            f"{name}: {max(rows)} rows of {row} elements for one rank, expected fewer than {most}"
        )
    return rows_of(t, row), rows


def rows_of(t: torch.Tensor, row: int) -> torch.Tensor:
    """Return a tensor as rows ``[N, row]`` in row-major order, a view where possible."""
    if t.dim() == 2 and t.stride() == (row, 1) and not t.is_conj() and not t.is_neg():
        return t.detach()
    return dense(t).view(t.numel() // row if row else t.shape[0], row)
