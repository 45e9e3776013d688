"""The all-to-all with torch's arguments."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..engine.codecs import check_tensor_argument
from ..engine.codecs.base import share_memory
from ..errors import ArgumentError, ArgumentTypeError
from ..tracing import not_traced
from .agreement import TableSizes
from .bounds import ErrorBound, checked_bound, value_of
from .caller import Caller, checked_codec
from .checks import (
    check_backend,
    check_dtype,
    checked_group,
    cut_rows,
    refuse_capture,
    repeats_of,
    row_of,
    rows_of,
    sizes_of,
)
from .device_repeats import DeferredRepeats, FoundRepeats, RowsById
from .faults import ContentError
from .groups import PerGroup
from .helpers import helper_of
from .layout import Kept, Layout, Rows
from .work import ExchangeWork, OfThread


@not_traced
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: str = "auto",
    error_bound: float | ErrorBound | None = None,
    row_shape: Sequence[int] | None = None,
    row_ids: torch.Tensor | None = None,
) -> Any:
    """Split a tensor, send the parts to the ranks of a group, and join what they sent.

    As `torch.distributed.all_to_all_single`, with smaller messages: rows that repeat within a part
    cross once, and the others in fewer bits. Every rank calls it with the same row shape and dtype;
    bounds may differ. Rows that a rank sends to itself are copied. Tensors on a GPU are coded there
    and cross by NCCL. It may be put in the place of `torch.distributed.all_to_all_single`.

    Parameters
    ----------
    output, input : torch.Tensor
        Dense, contiguous output; both on the CPU, where the group has gloo, or on a GPU, where it
        has NCCL; of one dtype.
    output_split_sizes, input_split_sizes : sequence of int, optional
        Sizes along the first dimension for each rank; equal ones when left out.
    group : ProcessGroup, optional
        All ranks when left out.
    async_op : bool
        Whether to return at once. Asynchronous exchanges of a group run in the order of the calls,
        in a thread with a communicator of its own, which all ranks of the group make in their first
        such call: where one rank's is asynchronous, all ranks' are. Neither tensor is to be used
        until `wait` returned.
    codec : str
        ``"auto"``: equation 2 of the paper. In the ninth call and then in each 64th one of a kind
        the ranks of a group compare what compressing took with what torch's own collective would
        take on this link, measured, and go on with what is faster; each chooses among references,
        Huffman codes, fixed fields and raw rows by measured sizes and rates. On a GPU these calls
        exchange their rows both ways several times, and what a whole exchange takes decides; where
        that changes nothing, later decisions are up to 16 times as far apart. A kind are calls with
        rows of one dtype and of sizes between the same two powers of two; where these come in a
        cycle of up to eight that differ in size, bound or ids (rows, then gradients, say), each
        place in it is decided for itself, from the 16th, 64th, 256th or 1,024th call on.
        ``"compressed"``: compressed on any link, in few bytes. ``"raw"``: torch's own collective,
        which takes no bound; all ranks say so, or none.
    error_bound : float or ErrorBound, optional
        How far an element may be from the one that was sent, a number as a share of the largest
        less the least finite value of the part for each rank; every bit is kept when left out. Of a
        schedule the value of its first iteration.
    row_shape : sequence of int, optional
        Of a tensor of one dimension: elements of a row, by which it is cut; 1 when left out. Of
        others a row is what stands at one index of the first dimension.
    row_ids : torch.Tensor, optional
        Integers ``[N]`` on the CPU or where `input` is, one a row of it: rows of one id are the
        same row of a table, and cross once for each rank without being searched for. On a GPU they
        are found there; the host waits for them in calls that decide.

    Returns
    -------
    ExchangeWork or None
        With `async_op` a `Work` as torch returns it, with ``wait()``, ``get_future()`` and
        ``result()``; torch's own with ``codec="raw"``.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When an argument is not as above, before anything is sent.
    ExchangeError
        When a rank fails or ranks disagree; nothing is written to `output`. A rank that fails
        before it could send, for want of memory say, is named with the cause on all others. Ranks
        that agreed with all others raise in their next call, in which all raise.
    CorruptedDataError
        When a message is damaged; nothing is written to `output`. On a GPU damage in a body is
        reported by a later call, and its rows are not written.

    References
    ----------
    Sections III-D and III-E of the SC'24 paper on the all-to-all of recommenders.
    """
    bound = checked_bound(error_bound)
    if bound is not None:
        bound.at(0)  # a schedule of the caller's may give no bound
    checked_codec(codec)
    if codec == "raw" and bound is not None:
        raise ArgumentError("error_bound: given with codec='raw', which keeps every bit")
    group = checked_group(group)
    check_tensor_argument("output", output)
    check_tensor_argument("input", input)
    refuse_capture(input)
    if codec == "raw":
        return distributed_c10d.all_to_all_single(
            output,
            input,
            None if output_split_sizes is None else list(output_split_sizes),
            None if input_split_sizes is None else list(input_split_sizes),
            group,
            async_op,
        )
    if output.device != input.device:
        raise ArgumentTypeError(f"output: on {output.device}, input is on {input.device}")
    if output.dtype != input.dtype:
        raise ArgumentTypeError(f"output: dtype {output.dtype}, input has {input.dtype}")
    if not output.is_contiguous():
        raise ArgumentError("output: not contiguous")
    if output.is_conj() or output.is_neg():
        raise ArgumentError("output: a conjugate or negative view, expected its own memory")
    if share_memory(output, input):
        raise ArgumentError("output: shares memory with input")
    kept = _kept_of(group, codec)
    caller = kept.caller
    row, send_rows, receive_rows, kind, layout = _sizes_of(
        kept, group, output, input, output_split_sizes, input_split_sizes, bound, row_shape
    )
    sent, target = rows_of(input, row), rows_of(output, row)
    on_device = caller.coded_on_device(input.device)
    # By what a call differs from others on this rank.
    own = (
        (sent.nbytes + target.nbytes).bit_length() // 2,
        None if bound is None else (bound.kind, bound.value),
        row_ids is not None,
    )
    # An asynchronous exchange on the CPU has another caller, which is not asked here.
    needed = (async_op and not on_device) or caller.looks_at_rows_of(group, kind)
    repeats, deferred = None, None
    failed: Exception | None = None
    try:
        repeats = repeats_of("", sent, send_rows, row_ids, needed=needed and not on_device)
        if on_device and needed and row_ids is not None:
            by_id = RowsById("", sent, send_rows, row_ids.long())
            deferred = DeferredRepeats(FoundRepeats([by_id]), 0)
    except ContentError as error:
        failed = error  # as below
    except (ArgumentError, ArgumentTypeError):
        raise
    except Exception as error:
        failed = error  # raised where the other ranks come to know of it

    def rows_to(into: torch.Tensor, of: Caller) -> Rows:
        if failed is not None:
            raise failed
        value, relative = 0.0, False
        if bound is not None and (on_device or of.looks_at_rows()):
            value, relative = value_of(bound, 0)
        return Rows(
            sent, into, send_rows, receive_rows, value, relative, repeats=repeats, deferred=deferred
        )

    if on_device:
        choice = caller.begin_call(group, input.device, kind, own, bounded=bound is not None)
        try:
            rows = rows_to(target, caller)  # what is damaged is not written there
        except Exception as error:
            caller.fail_call(group, input.device, 0, error)
            raise
        if not async_op:
            caller.exchange(group, [rows], [choice], layout)
            return None
        begun = caller.start(group, [rows], [choice], layout, async_op=True)
        return ExchangeWork(output, begun)

    def run(over: dist.ProcessGroup, caller: Caller) -> None:
        choice = caller.begin_call(over, input.device, kind, own, bounded=bound is not None)
        try:
            # What comes compressed may be damaged: the output is written once all of it is sound.
            into = target if caller.is_plain() else torch.empty_like(target)
            rows = rows_to(into, caller)
        except Exception as error:
            caller.fail_call(over, input.device, 0, error)
            raise
        caller.exchange(over, [rows], [choice], layout)
        if into is not target:
            target.copy_(into)

    if not async_op:
        run(group, caller)
        return None
    helper = helper_of(group)
    task = helper.submit(run, helper.group, function_caller(helper.group, codec))
    return ExchangeWork(output, OfThread(task))


class _Sizes(NamedTuple):
    """What sizes and dtype of a call say.

    Parameters
    ----------
    row : int
        Elements of a row.
    send_rows, receive_rows : list of int
        Rows for each rank and of each.
    kind : hashable
        What all ranks have alike. Rows may have another size in every call: kinds of each size
        would never have enough calls to decide.
    layout : Layout
        Of the rows.
    """

    row: int
    send_rows: list[int]
    receive_rows: list[int]
    kind: Hashable
    layout: Layout


class _OfGroup(NamedTuple):
    """What the function keeps of its calls over a communicator, by one codec."""

    caller: Caller
    sizes: Kept[_Sizes]


_kept: PerGroup[str, _OfGroup] = PerGroup()


def _kept_of(group: dist.ProcessGroup, codec: str) -> _OfGroup:
    of_group = _kept.of(group)
    if codec not in of_group:
        of_group[codec] = _OfGroup(Caller(codec=codec, lasting=False), Kept())
    return of_group[codec]


def function_caller(group: dist.ProcessGroup, codec: str) -> Caller:
    """Return what exchanges for the function over a communicator."""
    return _kept_of(group, codec).caller


def _sizes_of(
    kept: _OfGroup,
    group: dist.ProcessGroup,
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    bound: ErrorBound | None,
    row_shape: Sequence[int] | None,
) -> _Sizes:
    """Return what sizes and dtype of a call say, or refuse them; kept where they were the same."""
    sent = sizes_of("input_split_sizes", input_split_sizes)
    received = sizes_of("output_split_sizes", output_split_sizes)
    copied = kept.caller.copied_rank(group)
    given = input.shape, output.shape, sent, received, None if row_shape is None else str(row_shape)
    key = given, input.dtype, input.device.type, bound is None, copied
    found = kept.sizes.get(key)
    if found is None:
        check_dtype(input.dtype, bound)
        check_backend(group, input.device)
        row = row_of(input, row_shape)
        if row_of(output, row_shape) != row:
            raise ArgumentError(
                f"output: rows of {list(output.shape[1:])}, of input {row} elements"
            )
        _, send_rows = cut_rows("input", input, row, sent, group)
        _, receive_rows = cut_rows("output", output, row, received, group)
        table = TableSizes("", input.dtype, row, tuple(send_rows), tuple(receive_rows))
        layout = Layout([table], group.rank(), group.size(), copied)
        kind = str(input.dtype), row.bit_length()
        found = kept.sizes.keep(key, _Sizes(row, send_rows, receive_rows, kind, layout))
    return found
