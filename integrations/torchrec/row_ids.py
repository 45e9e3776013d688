"""Which rows of an exchange are one row of a table: ids from the features that were looked up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

#: The id of a bag without ids: zeros whatever the table, and no row takes its gradient.
_EMPTY = -1


@dataclass(frozen=True)
class Column:
    """A feature of a table on a rank: some columns of what that rank looks up.

    Parameters
    ----------
    table : str
        Name of the table.
    number : int
        Of the table's shard among those of the rank.
    dim : int
        Its columns.
    by_id : bool
        Whether a bag of exactly one id is the row of the table, bit for bit.
    dtype : torch.dtype
        Of the rows that are looked up.
    """

    table: str
    number: int
    dim: int
    by_id: bool
    dtype: torch.dtype


def columns_of(sharding: Any) -> list[list[Column]]:
    """Return the columns of each rank of a sharding, in the order in which lookups give them."""
    per_rank = []
    for groups in sharding._grouped_embedding_configs_per_rank:
        columns: list[Column] = []
        tables = [(group, table) for group in groups for table in group.embedding_tables]
        for number, (group, table) in enumerate(tables):
            given = (group.fused_params or {}).get("output_dtype")
            column = Column(
                table=table.name,
                number=number,
                dim=table.local_cols,
                # Weights and processors change rows; ids of virtual tables may take all bits.
                by_id=not (
                    group.is_weighted or group.has_feature_processor or table.use_virtual_table
                ),
                dtype=torch.float32 if given is None else given.as_dtype(),
            )
            columns += [column] * table.num_features()
        per_rank.append(columns)
    return per_rank


class SeenFeatures:
    """The features that a lookup was last called with, until the output dist asks for them."""

    def __init__(self) -> None:
        self._seen: tuple[KeyedJaggedTensor, int, int] | None = None

    def note(self, lookup: torch.nn.Module, arguments: Any, output: torch.Tensor) -> None:
        """Keep what a lookup was called with: a forward hook of it."""
        self._seen = arguments[0], output.data_ptr(), output.numel()

    def take(self, rows: torch.Tensor) -> KeyedJaggedTensor | None:
        """Return the features that rows were looked up by, None where that is not known."""
        seen, self._seen = self._seen, None
        if seen is None or seen[1:] != (rows.data_ptr(), rows.numel()):
            return None
        return seen[0]


def bag_ids(features: KeyedJaggedTensor, columns: Sequence[Column]) -> torch.Tensor:
    """Return an id for each bag, feature after feature: equal ones only for equal rows.

    Parameters
    ----------
    features : KeyedJaggedTensor
        What a rank looks up: a key for each column.
    columns : sequence of Column
        Of that rank.

    Returns
    -------
    torch.Tensor
        int64 ``[bags]``. Bags of one id have that of the row of the table, empty ones share an id,
        and others have one of their own.
    """
    lengths, values = features.lengths(), features.values()
    bags, by_id, numbers = numbers_on(
        [features.stride_per_key(), *_of_columns(columns)], lengths.device
    )
    of_bag = _spread(by_id, bags, len(lengths)) > 0
    if len(values):
        first = values[features.offsets()[:-1].long().clamp(max=len(values) - 1)]
    else:
        first = torch.zeros_like(lengths)
    ids = _ids(first, of_bag & (lengths == 1), _spread(numbers, bags, len(lengths)), columns)
    return torch.where(of_bag & (lengths == 0), _EMPTY, ids)


def value_ids(features: KeyedJaggedTensor, columns: Sequence[Column]) -> torch.Tensor:
    """Return an id int64 ``[values]`` for each value, feature after feature, as `bag_ids`."""
    values, lengths = features.values(), features.lengths()
    # The values of each feature, where they are: on a GPU the host does not know how many.
    bags = torch.split(lengths, features.stride_per_key())
    counts = torch.stack([part.sum() for part in bags]) if bags else lengths[:0]
    by_id, numbers = numbers_on(_of_columns(columns), lengths.device)
    of_value = _spread(by_id, counts, len(values)) > 0
    return _ids(values, of_value, _spread(numbers, counts, len(values)), columns)


def _of_columns(columns: Sequence[Column]) -> tuple[list[int], list[int]]:
    """Return of each column whether ids are rows of its table, and the number of its shard."""
    return [int(column.by_id) for column in columns], [column.number for column in columns]


def _ids(
    values: torch.Tensor, by_id: torch.Tensor, numbers: torch.Tensor, columns: Sequence[Column]
) -> torch.Tensor:
    """Return ids that tell tables apart; what is no row of a table has one of its own."""
    shards = 1 + max((column.number for column in columns), default=0)
    own = _EMPTY - 1 - torch.arange(len(values), device=values.device)
    return torch.where(by_id & (values >= 0), values.long() * shards + numbers, own)


def _spread(what: torch.Tensor, counts: torch.Tensor, total: int) -> torch.Tensor:
    """Return a value of each column as often as the column has items, `total` in all."""
    return torch.repeat_interleave(what, counts, output_size=total)


def numbers_on(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return rows of as many numbers each as int64 on a device.

    By one copy from page-locked memory, for which no host waits: batches may differ in each step.
    """
    t = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return t if device.type == "cpu" else t.pin_memory().to(device, non_blocking=True)
