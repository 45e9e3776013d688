"""Output dists of TorchRec's shardings whose messages are compressed.

Each takes the place of one that a sharding has made, and returns what that one would: an awaitable
of the looked-up rows of all ranks for the batch of this one. The exchange begins with the call, and
ends in ``wait()``; that of gradients begins where autograd comes to what was waited for, and ends
where it comes to what was sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.comm_ops import get_gradient_division, get_use_sync_collectives
from torchrec.distributed.dist_data import PooledEmbeddingsAwaitable, SequenceEmbeddingsAwaitable
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bitslab.distributed import AdaptiveBound, CompressedAllToAll, ErrorBound, Table
from bitslab.errors import ArgumentError
from bitslab.integrations.torchrec.row_ids import (
    Column,
    SeenFeatures,
    bag_ids,
    numbers_on,
    value_ids,
)

#: What a table's rows may differ by, as `CompressedAllToAll` has it.
Bound = float | ErrorBound | AdaptiveBound | str | None


@dataclass(frozen=True)
class Message:
    """Columns of a table, or of tables, as wide as each other.

    Parameters
    ----------
    table : Table
        Their name, width, dtype and bound in the exchange.
    places : list of list of int
        For each rank, which of its columns these are.
    """

    table: Table
    places: list[list[int]]


def messages_of(
    columns: Sequence[Sequence[Column]], bound_of: Callable[[str], Bound]
) -> list[Message]:
    """Return what a sharding sends, in the same order on all ranks: each table by itself.

    Shards of a table that are not as wide are distinguished by their width.
    """
    found: dict[tuple[str, int, torch.dtype], list[list[int]]] = {}
    for rank, mine in enumerate(columns):
        for place, column in enumerate(mine):
            key = (column.table, column.dim, column.dtype)
            found.setdefault(key, [[] for _ in columns])[rank].append(place)
    several = Counter(name for name, _, _ in found)
    return [
        Message(
            Table(f"{name}:{dim}" if several[name] > 1 else name, dim, dtype, bound_of(name)),
            places,
        )
        for (name, dim, dtype), places in found.items()
    ]


class RowsInFlight(Awaitable[torch.Tensor]):  # type: ignore[misc]
    """Rows of other ranks under way.

    Parameters
    ----------
    waited : callable
        Waits for them, on torch's current stream of a GPU, and returns them.
    """

    def __init__(self, waited: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._waited = waited

    def _wait_impl(self) -> torch.Tensor:
        return self._waited()


class CompressedDist(torch.nn.Module):
    """What the output dists have in common.

    Parameters
    ----------
    plain : torch.nn.Module
        TorchRec's own, whose place it takes.
    group : ProcessGroup
        The ranks.
    columns : sequence of sequence of Column
        Of each rank.
    messages : list of Message
        What is sent.
    backward, codec, error_feedback
        As for `CompressedAllToAll`. With error feedback ids of rows cross with them: the rank that
        sends gradients back keeps by these what they lose.
    row_ids : bool
        Whether gradients of copies of a row go back as their sum.
    """

    def __init__(
        self,
        plain: torch.nn.Module,
        group: dist.ProcessGroup,
        columns: Sequence[Sequence[Column]],
        messages: list[Message],
        *,
        backward: str | float | ErrorBound,
        codec: str,
        error_feedback: int,
        row_ids: bool,
    ) -> None:
        super().__init__()
        # In a tuple: what it replaces is no part of the model.
        self._replaced = (plain,)
        self.messages = messages
        tables = [message.table for message in messages]
        self.row_ids, self.ids_cross = row_ids, error_feedback > 0
        if self.ids_cross:
            tables += [Table(_ids_name(table.name), 1, torch.int64) for table in tables]
        self.exchange = CompressedAllToAll(
            group, tables, backward=backward, error_feedback=error_feedback, codec=codec
        )
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.columns, self.mine = columns, columns[self.rank]
        self.features = SeenFeatures()
        self._hook: RemovableHandle | None = None

    @property
    def plain(self) -> torch.nn.Module:
        """What it takes the place of."""
        return self._replaced[0]

    def watch(self, lookup: torch.nn.Module) -> None:
        """Learn from now on what a lookup is called with."""
        self._hook = lookup.register_forward_hook(self.features.note)

    def unwatch(self) -> None:
        """Undo `watch`."""
        if self._hook is not None:
            self._hook.remove()

    def seen_by(self, rows: torch.Tensor) -> KeyedJaggedTensor | None:
        """Return the features of looked-up rows, None where they are not known or not needed."""
        features = self.features.take(rows)
        return features if self.exchange.looks_at_ids(rows.device) else None

    def entering(self, rows: torch.Tensor) -> torch.Tensor:
        """Return looked-up rows as they enter an exchange, or refuse the way they came.

        On every rank they require a gradient where gradients are enabled: all take part in the
        exchange back, those too whose own tables are frozen or who have none.
        """
        if torch.compiler.is_compiling():
            raise ArgumentError(
                "compress_communication: the model is compiled, and a graph knows no sizes of "
                "compressed messages; compile the dense part alone, or call restore_communication"
            )
        if get_use_sync_collectives():
            raise ArgumentError(
                "compress_communication: TorchRec's synchronous collectives are on, which a "
                "compressed exchange cannot replace; call set_use_sync_collectives(False), or "
                "restore_communication"
            )
        if not self.mine:
            others = (column.dtype for columns in self.columns for column in columns)
            rows = rows.to(next(others, rows.dtype))
        if torch.is_grad_enabled() and not rows.requires_grad:
            rows = rows.detach().requires_grad_()
        divided: torch.Tensor = _Divided.apply(rows, self.ranks)  # type: ignore[no-untyped-call]
        return divided

    def exchanged(
        self,
        pieces: Sequence[Sequence[torch.Tensor]],
        sizes: Sequence[Sequence[int]],
        expected: Sequence[Sequence[int]],
        ids: Sequence[Sequence[torch.Tensor]] | None,
        like: torch.Tensor,
    ) -> Callable[[], dict[tuple[int, int], torch.Tensor]]:
        """Begin to exchange pieces ``[rows, dim]``; return what waits for those that come.

        Parameters
        ----------
        pieces, sizes, ids
            By rank and column of this rank: rows for it, how many, and their ids, or None.
        expected : sequence of sequence of int
            By rank and its column, how many rows come.
        like : torch.Tensor
            Where rows are.

        Returns
        -------
        callable
            Returns pieces by rank and its column.
        """
        inputs, row_ids, send, receive, received = {}, {}, {}, {}, {}
        with self.exchange.preparing(like.device):
            for message in self.messages:
                name, mine = message.table.name, message.places[self.rank]
                if mine:
                    inputs[name] = torch.cat([part[place] for part in pieces for place in mine])
                else:
                    # It requires a gradient as rows do: this rank takes part in the exchange back.
                    inputs[name] = torch.empty(
                        (0, message.table.row_elements),
                        dtype=message.table.dtype,
                        device=like.device,
                        requires_grad=torch.is_grad_enabled(),
                    )
                if ids is not None and mine:
                    row_ids[name] = torch.cat([part[place] for part in ids for place in mine])
                received[name] = [
                    [expected[rank][place] for place in places]
                    for rank, places in enumerate(message.places)
                ]
                receive[name] = [sum(part) for part in received[name]]
                send[name] = [sum(part[place] for place in mine) for part in sizes]
        begun = self.begun(inputs, receive, send, row_ids)

        def waited() -> dict[tuple[int, int], torch.Tensor]:
            came = begun()
            found: dict[tuple[int, int], torch.Tensor] = {}
            for message in self.messages:
                name = message.table.name
                found |= self.arranged(message, came[name], received[name])
            return found

        return waited

    def begun(
        self,
        inputs: dict[str, torch.Tensor],
        receive: dict[str, list[int]],
        send: dict[str, list[int]],
        row_ids: dict[str, torch.Tensor],
    ) -> Callable[[], dict[str, torch.Tensor]]:
        """Begin an exchange of tables, and of their ids where these cross; return what waits."""
        names, device = list(inputs), next(iter(inputs.values())).device
        # Whether ids of rows are still to be known, for the exchange back.
        unknown = self.ids_cross and torch.is_grad_enabled()
        # While torch's own collective brings gradients back they lose nothing.
        with_ids = unknown and self.exchange.feeds_back(device)
        if with_ids:
            with self.exchange.preparing(device):
                for name in names:
                    rows, ids = inputs[name], row_ids.get(name)
                    if ids is None:  # not known: nothing is kept of these rows
                        ids = torch.full((len(rows),), -1, device=device)
                    inputs[_ids_name(name)] = ids[:, None]
                    receive[_ids_name(name)], send[_ids_name(name)] = receive[name], send[name]
        given = row_ids if self.row_ids else None
        under_way = self.exchange.begin_tables(inputs, receive, send, row_ids=given)

        def waited() -> dict[str, torch.Tensor]:
            nonlocal unknown
            came = under_way.wait()
            if unknown and with_ids:
                under_way.know_ids(
                    {name: self._apart(came[_ids_name(name)], receive[name]) for name in names}
                )
            elif unknown:
                under_way.know_no_ids()
            # What waits again may be on another stream than what gradients are sent on.
            unknown = False
            return came

        return waited

    def _apart(self, ids: torch.Tensor, received: Sequence[int]) -> torch.Tensor:
        """Return ids ``[M, 1]`` that came as those of this rank: ranks number their own rows."""
        ids = ids.flatten()
        ranks, rows = numbers_on([range(self.ranks), received], ids.device)
        sources = torch.repeat_interleave(ranks, rows, output_size=len(ids))
        return torch.where(ids >= 0, ids * self.ranks + sources, -1)

    def arranged(
        self, message: Message, found: torch.Tensor, received: Sequence[Sequence[int]]
    ) -> dict[tuple[int, int], torch.Tensor]:
        """Return rows ``[N, dim]`` that came of all ranks as pieces, by rank and its column."""
        keys = [(rank, place) for rank, part in enumerate(message.places) for place in part]
        cut = torch.split(found, [n for part in received for n in part])
        return dict(zip(keys, cut, strict=True))


class _PooledDist(CompressedDist, ABC):
    """Of bags: pieces ``[bags, dim]``, one for each rank and each column of this rank."""

    def forward(self, local_embs: torch.Tensor, sharding_ctx: Any = None) -> Any:
        """Return an awaitable of ``[B, D]``, or ``[elements]`` where batches differ by feature.

        Parameters
        ----------
        local_embs : torch.Tensor
            ``[B of all ranks, D of this rank]``; where batches differ by feature ``[elements]``,
            rank after rank, feature after feature.
        sharding_ctx : EmbeddingShardingContext, optional
            The batches; those of all ranks are equal when left out.
        """
        by_feature = sharding_ctx is not None and sharding_ctx.variable_batch_per_feature
        dims = [column.dim for column in self.mine]
        with self.exchange.preparing(local_embs.device):
            features = self.seen_by(local_embs)
            rows = self.entering(local_embs)
            if by_feature:
                sizes = sharding_ctx.batch_size_per_rank_per_feature or [[]] * self.ranks
                shapes = [list(zip(part, dims, strict=True)) for part in sizes]
                cut = iter(torch.split(rows, [n * dim for part in shapes for n, dim in part]))
                pieces = [[next(cut).view(shape) for shape in part] for part in shapes]
                expected = self.expected(sizes, sharding_ctx.batch_size_per_feature_pre_a2a)
            else:
                batches = batches_of(sharding_ctx, len(rows), self.ranks)
                sizes = [[n] * len(dims) for n in batches]
                blocks = torch.split(rows, batches)
                pieces = [list(torch.split(block, dims, 1)) for block in blocks]
                expected = [[batches[self.rank]] * len(columns) for columns in self.columns]
            ids = None if features is None else _cut_ids(bag_ids(features, self.mine), sizes)
        waited = self.exchanged(pieces, sizes, expected, ids, rows)

        def joined() -> torch.Tensor:
            found = waited()
            parts = [found[key] for key in sorted(found)]
            if by_feature:
                return torch.cat([part.flatten() for part in parts])
            return torch.cat(parts, 1)

        awaitable = PooledEmbeddingsAwaitable(RowsInFlight(joined))
        if by_feature:
            return awaitable
        # Column-wise shards are put in order by one.
        awaitable.callbacks.extend(getattr(self.plain, "_callbacks", None) or [])
        return awaitable

    @abstractmethod
    def expected(
        self, sizes: Sequence[Sequence[int]], before: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        """Return the bags of this rank in each column of each rank; batches differ by feature."""


class CompressedAllToAllDist(_PooledDist):
    """Table-wise and column-wise bags: each rank's columns for this rank's batch."""

    def expected(
        self, sizes: Sequence[Sequence[int]], before: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        """Return the bags of this rank in each column of each rank."""
        bags = iter(before)
        return [[next(bags) for _ in columns] for columns in self.columns]


class CompressedReduceScatterDist(_PooledDist):
    """Row-wise bags: what each rank's rows add, exchanged and then summed here."""

    def expected(
        self, sizes: Sequence[Sequence[int]], before: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        """Return the bags of this rank in each column, which every rank has."""
        return [sizes[self.rank]] * self.ranks

    def arranged(
        self, message: Message, found: torch.Tensor, received: Sequence[Sequence[int]]
    ) -> dict[tuple[int, int], torch.Tensor]:
        """Return the sums over ranks."""
        # Autocast would have the sum of 16 bits in float32.
        by_rank = found.view(self.ranks, -1, message.table.row_elements)
        total = by_rank.sum(0, dtype=found.dtype)
        keys = [(0, place) for place in message.places[0]]
        return dict(zip(keys, torch.split(total, list(received[0])), strict=True))


class CompressedSequenceDist(CompressedDist):
    """Rows without pooling, table-wise, column-wise and row-wise.

    A message for each table where they have bounds, and else one for all: lengths of features are
    read on the host for the former.
    """

    def forward(self, local_embs: torch.Tensor, sharding_ctx: Any) -> Any:
        """Return an awaitable of ``[values of this rank, D]``.

        Parameters
        ----------
        local_embs : torch.Tensor
            ``[values of all ranks, D]``, feature after feature, rank after rank.
        sharding_ctx : SequenceShardingContext
            Lengths and splits of the exchange of the features.
        """
        lengths = sharding_ctx.lengths_after_input_dist
        with self.exchange.preparing(local_embs.device):
            features = self.seen_by(local_embs)
            batches = batches_of(sharding_ctx, lengths.shape[-1], self.ranks)
            order = _by_rank(lengths, batches, len(local_embs))
            rows = self.entering(local_embs).index_select(0, order)
            ids = None if features is None else value_ids(features, self.mine)[order]
        if self.is_joint:
            (name,) = (message.table.name for message in self.messages)
            begun = self.begun(
                {name: rows},
                {name: sharding_ctx.input_splits},
                {name: sharding_ctx.output_splits},
                {} if ids is None else {name: ids},
            )

            def joined() -> torch.Tensor:
                return begun()[name]

        else:
            with self.exchange.preparing(local_embs.device):
                sizes = _values_by_rank(lengths, batches)
                expected = self._expected(sharding_ctx)
                cut = _cut_by_rank(rows, sizes)
                of_ids = None if ids is None else _cut_by_rank(ids, sizes)
            waited = self.exchanged(cut, sizes, expected, of_ids, rows)

            def joined() -> torch.Tensor:
                by_column = waited()
                return torch.cat([by_column[key] for key in sorted(by_column)])

        return SequenceEmbeddingsAwaitable(
            RowsInFlight(joined), sharding_ctx.unbucketize_permute_tensor, local_embs.shape[1]
        )

    @property
    def is_joint(self) -> bool:
        """Whether one message has the rows of all tables."""
        return len(self.messages) == 1

    def _expected(self, sharding_ctx: Any) -> list[list[int]]:
        """Return the values of each rank's columns that come."""
        before = sharding_ctx.features_before_input_dist
        counts = before.length_per_key()
        unbucketize = sharding_ctx.unbucketize_permute_tensor
        if unbucketize is None:
            of_columns = iter(counts)
            return [[next(of_columns) for _ in columns] for columns in self.columns]
        # Row-wise: where a value lies among those of all ranks says which one looks it up.
        ends = torch.cumsum(torch.tensor(sharding_ctx.input_splits), 0).to(unbucketize.device)
        ranks = torch.bucketize(unbucketize, ends, right=True)
        features = len(counts)
        of_feature = torch.repeat_interleave(
            torch.arange(features, device=ranks.device),
            torch.tensor(counts, device=ranks.device),
            output_size=len(ranks),
        )
        found = torch.bincount(ranks * features + of_feature, minlength=self.ranks * features)
        by_rank: list[list[int]] = found.view(self.ranks, features).tolist()
        return by_rank


def _ids_name(table: str) -> str:
    return f"{table}:ids"


class _Divided(torch.autograd.Function):
    """The same rows; their gradients by the number of ranks, as TorchRec has it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        return gradient / ctx.ranks if get_gradient_division() else gradient, None


def batches_of(sharding_ctx: Any, total: int, ranks: int) -> list[int]:
    """Return the bags of each rank in the joint batch, equal ones where it is not said."""
    said = None if sharding_ctx is None else sharding_ctx.batch_size_per_rank
    return list(said) if said else [total // ranks] * ranks


def _cut_ids(ids: torch.Tensor, sizes: Sequence[Sequence[int]]) -> list[list[torch.Tensor]]:
    """Return ids, feature after feature and rank after rank, by rank and feature."""
    cut = iter(torch.split(ids, [n for part in zip(*sizes, strict=True) for n in part]))
    by_feature = [[next(cut) for _ in sizes] for _ in sizes[0]]
    return [[part[rank] for part in by_feature] for rank in range(len(sizes))]


def _values_by_rank(lengths: torch.Tensor, batches: Sequence[int]) -> list[list[int]]:
    """Return the values of each rank in each feature, of lengths as for `_by_rank`."""
    parts = torch.split(lengths.long(), list(batches), 1)
    found: list[list[int]] = torch.stack([part.sum(1) for part in parts]).tolist()
    return found


def _cut_by_rank(
    values: torch.Tensor, sizes: Sequence[Sequence[int]]
) -> list[tuple[torch.Tensor, ...]]:
    """Return values, rank after rank and feature after feature, by rank and feature."""
    of_ranks = torch.split(values, [sum(part) for part in sizes])
    return [
        torch.split(t, list(part)) if part else () for t, part in zip(of_ranks, sizes, strict=True)
    ]


def _by_rank(lengths: torch.Tensor, batches: Sequence[int], values: int) -> torch.Tensor:
    """Return where values lie that are to go rank after rank.

    Parameters
    ----------
    lengths : torch.Tensor
        ``[features, bags of all ranks]``: of values, feature after feature.
    batches : sequence of int
        Bags of each rank.
    values : int
        In all.

    Returns
    -------
    torch.Tensor
        int64 ``[values]``, rank after rank, feature after feature.
    """
    lengths = lengths.long()
    ends = torch.cumsum(lengths.flatten(), 0).view(lengths.shape)
    begin, count = (
        torch.cat([part.flatten() for part in torch.split(t, list(batches), 1)])
        for t in (ends - lengths, lengths)
    )
    before = torch.cumsum(count, 0) - count
    steps = torch.repeat_interleave(begin - before, count, output_size=values)
    return steps + torch.arange(len(steps), device=steps.device)
