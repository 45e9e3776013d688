"""The all-to-all with gradients, both ways compressed."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..engine.codecs import check_tensor_argument
from ..engine.codecs.base import check_indices_argument, rows_as_bytes
from ..errors import ArgumentError, ArgumentTypeError, CorruptedDataError
from .bounds import ErrorBound, checked_bound
from .collective import check_dtype, checked_group, cut_rows, exchange_rows, row_of
from .exchange import Counters, ExchangeError
from .messages import Array, Repeats

_STATE = {"version", "iteration"}


class CompressedAllToAll:
    """An all-to-all of rows that autograd knows: gradients go back compressed, of every bit.

    Tensors on the CPU cross by gloo. Those on a GPU are given to torch's own collective, there and
    back, and counted in `stats` as ``plain_calls``.

    Parameters
    ----------
    group : ProcessGroup, optional
        All ranks when left out.
    error_bound : float or ErrorBound, optional
        Of what is sent forward, as for `all_to_all_single`. The gradient passes as if nothing had
        been rounded. Its schedule counts calls with gradients enabled.

    Notes
    -----
    One thread at a time: a second one is refused. After an exchange that failed, every call raises:
    ranks may have come apart.

    Examples
    --------
    >>> from bitslab.distributed import CompressedAllToAll, ErrorBound, stepwise
    >>> bound = ErrorBound(0.02, schedule=stepwise(1000))
    >>> exchange = CompressedAllToAll(error_bound=bound)
    >>> exchange.state_dict()["iteration"]
    0
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        error_bound: float | ErrorBound | None = None,
    ) -> None:
        self.group = group
        self.error_bound = checked_bound(error_bound)
        self.iteration = 0
        self._forward, self._backward = Counters(), Counters()
        self._failed: str | None = None
        self._entered = threading.Lock()

    def __call__(
        self,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        row_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what the ranks sent to this one.

        Parameters
        ----------
        input : torch.Tensor
            ``[N, ...]``: rows for each rank, rank after rank.
        output_split_sizes, input_split_sizes : sequence of int, optional
            Rows of and for each rank; equal ones when left out.
        row_ids : torch.Tensor, optional
            Integers ``[N]`` on the CPU: rows of one id are the same row of a table, looked up more
            than once. Each crosses once for each rank, and the gradient that comes back for it is
            the sum of those of its copies, given to the first one; the others get 0. What reaches
            the row of the table is the same but for the order of additions. Rows that are only
            equal, or made equal by a bound, are not summed.

        Returns
        -------
        torch.Tensor
            ``[M, ...]``, of the dtype of `input`.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            When an argument is not as above, before anything is sent.
        ExchangeError
            When a rank fails or ranks disagree, and in every later call.
        """
        group = checked_group(self.group)
        check_tensor_argument("input", input)
        if input.dim() < 1:
            raise ArgumentError("input: 0 dimensions, expected [N, ...]")
        rows = input.shape[0]
        if input_split_sizes is None and rows % group.size():
            raise ArgumentError(f"input: {rows} rows for {group.size()} ranks")
        equal = [rows // group.size()] * group.size()
        received = equal if output_split_sizes is None else list(map(int, output_split_sizes))
        given = equal if input_split_sizes is None else list(map(int, input_split_sizes))
        if min(received, default=0) < 0 or len(received) != group.size():
            raise ArgumentError(
                f"output_split_sizes: {received}, expected a size from 0 for each of "
                f"{group.size()} ranks"
            )
        repeats = None
        if input.device.type == "cpu":
            check_dtype(input.dtype, self.error_bound)
            _, given = cut_rows("input", input.detach(), row_of(input, None), given, group)
            repeats = _repeats(input.detach(), given, row_ids)
        found: torch.Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
            input, self, group, received, given, repeats
        )
        if torch.is_grad_enabled():
            self.iteration += 1
        return found

    def stats(self) -> dict[str, dict[str, int | float]]:
        """Return what crossed and the seconds of each stage, ``"forward"`` and ``"backward"``."""
        return {
            "forward": dataclasses.asdict(self._forward),
            "backward": dataclasses.asdict(self._backward),
        }

    def state_dict(self) -> dict[str, int]:
        """Return the iteration, by which a resumed run goes on with the same bounds."""
        return {"version": 1, "iteration": self.iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken.

        Raises
        ------
        CorruptedDataError
            When the state is of another version or damaged.
        """
        known = isinstance(state, Mapping) and set(state) == _STATE and state["version"] == 1
        iteration = state["iteration"] if known else None
        if not isinstance(iteration, int) or isinstance(iteration, bool) or iteration < 0:
            raise CorruptedDataError(f"state: {state!r:.80}, expected version 1 and an iteration")
        self.iteration = iteration

    def exchange(
        self,
        rows: torch.Tensor,
        group: dist.ProcessGroup,
        receive_rows: Sequence[int],
        send_rows: Sequence[int],
        *,
        backward: bool,
        repeats: Sequence[Repeats | None] | None = None,
    ) -> tuple[torch.Tensor, list[Array | None]]:
        """Exchange rows ``[N, row]`` one way; return what came, and which rows repeat in it."""
        counters = self._backward if backward else self._forward
        if self._failed is not None:
            raise ExchangeError(f"an earlier exchange failed: {self._failed}")
        if not self._entered.acquire(blocking=False):
            raise ArgumentError("CompressedAllToAll: another thread is in a call of this object")
        try:
            out = torch.empty(
                (sum(receive_rows), rows.shape[1]), dtype=rows.dtype, device=rows.device
            )
            if rows.device.type != "cpu":
                dist.all_to_all_single(out, rows, list(receive_rows), list(send_rows), group)
                counters.plain_calls += 1
                return out, [None] * len(receive_rows)
            places = exchange_rows(
                out,
                rows,
                receive_rows,
                send_rows,
                group,
                None if backward else self.error_bound,
                iteration=self.iteration,
                repeats=repeats,
                counters=counters,
            )
            return out, places
        except (ExchangeError, CorruptedDataError) as error:
            self._failed = str(error)
            raise
        finally:
            self._entered.release()


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks; their gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        owner: CompressedAllToAll,
        group: dist.ProcessGroup,
        receive_rows: list[int],
        send_rows: list[int],
        repeats: list[Repeats | None] | None,
    ) -> torch.Tensor:
        """Exchange, and keep which rows repeat."""
        rows = input.detach().contiguous().view(input.shape[0], row_of(input, None))
        out, places = owner.exchange(
            rows, group, receive_rows, send_rows, backward=False, repeats=repeats
        )
        ctx.call = owner, group, receive_rows, send_rows, repeats, places
        return out.view(sum(receive_rows), *input.shape[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Send gradients back, those of copies of a row as their sum."""
        owner, group, receive_rows, send_rows, repeats, places = ctx.call
        (gradient,) = gradients
        rows = gradient.contiguous().view(sum(receive_rows), row_of(gradient, None))
        parts = [
            part if of is None else _summed(part, of)
            for part, of in zip(torch.split(rows, receive_rows), places, strict=True)
        ]
        back = list(send_rows)
        for rank, repeated in enumerate(repeats or []):
            if repeated is not None and rank != dist.get_rank(group):
                back[rank] = len(repeated.first)
        found, _ = owner.exchange(
            torch.cat(parts), group, back, list(map(len, parts)), backward=True
        )
        if back == send_rows:
            return found.view(sum(send_rows), *gradient.shape[1:]), *[None] * 5
        result = torch.zeros((sum(send_rows), rows.shape[1]), dtype=found.dtype)
        pieces = zip(
            torch.split(result, send_rows),
            torch.split(found, back),
            repeats,
            range(len(back)),
            strict=True,
        )
        for to, part, repeated, rank in pieces:
            if repeated is None or rank == dist.get_rank(group):
                to.copy_(part)
            else:
                to[torch.from_numpy(repeated.first)] = part
        return result.view(sum(send_rows), *gradient.shape[1:]), *[None] * 5


def _summed(rows: torch.Tensor, places: Array) -> torch.Tensor:
    """Return the sums of rows ``[n, row]`` that are copies of one; 16 bits are added as 32."""
    wide = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
    sums = torch.zeros((int(places.max()) + 1, rows.shape[1]), dtype=wide)
    return sums.index_add_(0, torch.from_numpy(places), rows.to(wide)).to(rows.dtype)


def _repeats(
    input: torch.Tensor, send_rows: Sequence[int], row_ids: torch.Tensor | None
) -> list[Repeats | None] | None:
    """Return for each rank which of its rows share an id."""
    if row_ids is None:
        return None
    ids = check_indices_argument(row_ids, "row_ids")
    if ids.device.type != "cpu":
        raise ArgumentTypeError(f"row_ids: on {ids.device}, expected cpu, where input is")
    if len(ids) != input.shape[0]:
        raise ArgumentError(f"row_ids: {len(ids)} ids, input has {input.shape[0]} rows")
    found = [Repeats.of(part) if len(part) else None for part in torch.split(ids, list(send_rows))]
    for part, repeated in zip(torch.split(input, list(send_rows)), found, strict=True):
        if repeated is None or not part[0].numel():
            continue
        bits = rows_as_bytes(part.reshape(len(part), -1), part[0].numel() * part.element_size())
        sent = bits[torch.from_numpy(repeated.first)][torch.from_numpy(repeated.places)]
        if not torch.equal(sent, bits):
            raise ArgumentError("row_ids: rows of one id differ")
    return found
