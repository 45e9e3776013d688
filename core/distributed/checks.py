"""What a call of the collective is given: refused, or as rows for each rank."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..dtypes import dense, dtype_name
from ..engine.codecs import check_tensor_argument
from ..engine.codecs.base import check_indices_argument, rows_as_bytes
from ..engine.kernels.vector_format import KINDS
from ..errors import ArgumentError, ArgumentTypeError
from .faults import ContentError
from .messages import Repeats, ids_on
from .wire import DTYPES, MOST_BYTES, MOST_ELEMENTS, MOST_ROWS


def refuse_capture(t: torch.Tensor) -> None:
    """Refuse a call inside CUDA-graph capture: sizes differ from step to step."""
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ArgumentError(
            "input: a CUDA graph is being captured, and messages have other sizes at each step"
        )


def check_backend(group: dist.ProcessGroup, device: torch.device, codec: str = "auto") -> None:
    """Refuse tensors on a device for which a group has another backend than a codec needs."""
    try:
        found = group._get_backend(torch.device(device.type)).name()
    except RuntimeError:
        found = "no backend"
    needed = "gloo" if device.type == "cpu" else "nccl"
    if found != needed and codec != "raw":
        raise ArgumentError(
            f"group: it has {found} for tensors on {device}, expected {needed}, without which only "
            "codec='raw' crosses"
        )


def named(argument: str, table: str) -> str:
    """Return how errors name an argument, of one of several tables with its name."""
    return f"{argument}: {table}" if table else argument


def check_names(tables: Collection[str], **arguments: Any) -> None:
    """Refuse arguments that are no mapping from names of tables."""
    known = set(tables)
    for argument, given in arguments.items():
        if not isinstance(given, Mapping):
            raise ArgumentTypeError(f"{argument}: expected a mapping by table, got {given!r:.60}")
        if not given.keys() <= known:
            unknown = sorted(map(str, set(given) - known))
            raise ArgumentError(f"{argument}: {unknown}, tables are {sorted(tables)}")


def check_rows(
    name: str, t: torch.Tensor, row_elements: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse rows that are not those of a planned table, on a device."""
    check_tensor_argument(f"inputs: {name}", t)
    shape = t.shape
    if len(shape) != 2 or shape[1] != row_elements:
        raise ArgumentError(f"inputs: {name}: {list(shape)}, expected [N, {row_elements}]")
    if t.dtype != dtype:
        raise ArgumentTypeError(f"inputs: {name}: {t.dtype}, planned is {dtype}")
    if t.device != device:
        raise ArgumentTypeError(f"inputs: {name}: on {t.device}, others on {device}")


def sizes_of(argument: str, given: Any, table: str = "") -> tuple[int, ...] | None:
    """Return sizes by rank as integers, None where none are given, or refuse what has none."""
    # An empty list is none, as torch has it.
    return None if given is None else sizes_by_table(argument, {table: given})[table] or None


def sizes_by_table(argument: str, given: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return by table sizes by rank as integers, or refuse what has none."""
    found = {}
    for table, sizes in given.items():
        try:
            found[table] = tuple(map(operator.index, sizes))
        except (TypeError, ValueError):
            raise ArgumentTypeError(
                f"{named(argument, table)}: expected a size for each rank, got {sizes!r:.60}"
            ) from None
    return found


def checked_ids(
    table: str,
    received_ids: torch.Tensor | None,
    rows: int,
    device: torch.device,
    *,
    needed: bool,
) -> torch.Tensor | None:
    """Return the ids of so many rows that come, int64 on the device of these."""
    argument = named("received_ids", table)
    if received_ids is None:
        if needed and rows:
            raise ArgumentError(f"{argument}: None, error_feedback keeps what was lost by id")
        return None
    ids = check_indices_argument(received_ids, argument)
    if len(ids) != rows:
        raise ArgumentError(f"{argument}: {len(ids)} ids, {rows} rows come")
    return ids_on(ids, device)


def device_of_group(group: dist.ProcessGroup) -> torch.device:
    """Return where the rows of a group are whose rank has none.

    Raises
    ------
    ArgumentError
        When the group has backends for both.
    """
    config = str(dist.get_backend_config(group))
    backends = dict(each.split(":") for each in config.split(","))
    on_gpu = backends.get("cuda") == "nccl"
    if on_gpu and "cpu" in backends and backends["cpu"] != "nccl":
        raise ArgumentError(
            f"inputs: none on this rank, and the group has {config}: give device= where tables are "
            "planned"
        )
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def repeats_of(
    table: str,
    rows: torch.Tensor,
    send_rows: Sequence[int],
    row_ids: torch.Tensor | None,
    *,
    needed: bool,
) -> list[Repeats | None] | None:
    """Return for each rank which of its rows ``[N, row]`` share an id, of rows on the CPU.

    None where that is not `needed`: torch's own collective delivers the rows, in which all cross.
    """
    if row_ids is None:
        return None
    argument, name = named("row_ids", table), f"inputs {table}" if table else "input"
    ids = check_indices_argument(row_ids, argument)
    if ids.device.type != "cpu" and ids.device != rows.device:
        raise ArgumentTypeError(
            f"{argument}: on {ids.device}, expected cpu or {rows.device}, where {name} is"
        )
    if len(ids) != rows.shape[0]:
        raise ArgumentError(f"{argument}: {len(ids)} ids, {name} has {rows.shape[0]} rows")
    if not needed:
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
            raise ContentError(f"{argument}: rows of one id differ")
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
    try:
        sizes = list(map(operator.index, row_shape))
    except TypeError:
        raise ArgumentTypeError(
            f"row_shape: expected a sequence of int, got {row_shape!r:.60}"
        ) from None
    if min(sizes, default=1) < 1:
        raise ArgumentError(f"row_shape: {sizes}, expected sizes from 1")
    if t.dim() > 1 and math.prod(sizes) != own:
        raise ArgumentError(f"row_shape: {sizes}, rows are {list(t.shape[1:])}")
    return math.prod(sizes)


def cut_rows(
    name: str,
    t: torch.Tensor,
    row: int,
    splits: Sequence[int] | None,
    group: dist.ProcessGroup,
    table: str = "",
) -> tuple[torch.Tensor, list[int]]:
    """Return a tensor, of a table, as rows ``[N, row]``, and the rows for each rank of a group."""
    ranks = group.size()
    size, unit = t.shape[0], row if t.dim() == 1 else 1
    what = named(f"{name}_split_sizes", table)
    given = sizes_of(f"{name}_split_sizes", splits, table)
    if given is None:
        if size % ranks:
            raise ArgumentError(f"{name}: {size} along the first dimension for {ranks} ranks")
        given = (size // ranks,) * ranks
    counts = list(given)
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
            f"{named(name, table)}: {max(rows)} rows of {row} elements for one rank, expected "
            f"fewer than {most}"
        )
    return rows_of(t, row), rows


def rows_of(t: torch.Tensor, row: int) -> torch.Tensor:
    """Return a tensor as rows ``[N, row]`` in row-major order, a view where possible."""
    if t.stride() == (row, 1) and not t.is_conj() and not t.is_neg():
        return t.detach() if t.requires_grad else t
    return dense(t).view(t.numel() // row if row else t.shape[0], row)
