"""Shards of packed tables as TorchRec's checkpoints hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torchrec.distributed.types import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
)

from bitslab.integrations.torchrec.tables import TableSet


class ShardLayout:
    """How the rows of one table are divided between ranks.

    Parameters
    ----------
    shards : sequence of ShardMetadata
        The shards of the plan.
    n_rows, row_dim : int
        Shape of the whole table.
    group : torch.distributed.ProcessGroup
        The ranks.
    """

    def __init__(
        self,
        shards: Sequence[ShardMetadata],
        n_rows: int,
        row_dim: int,
        group: dist.ProcessGroup,
    ) -> None:
        self.n_rows, self.row_dim = n_rows, row_dim
        self._shards = list(shards)
        self._group = group
        self._rank = dist.get_rank()

    @property
    def mine(self) -> ShardMetadata | None:
        """The shard of this rank, or None."""
        found = [s for s in self._shards if self._rank_of(s) == self._rank]
        return found[0] if found else None

    @staticmethod
    def _rank_of(shard: ShardMetadata) -> int:
        placement: Any = shard.placement
        rank: int = placement.rank()
        return rank

    def sharded(
        self, rows: torch.Tensor | None, dtype: torch.dtype, *, row_wise: bool = False
    ) -> ShardedTensor:
        """Return a sharded tensor in host memory, of this rank's rows ``[n, D]`` and the others'.

        Parameters
        ----------
        rows : torch.Tensor or None
            This rank's, on the CPU; None where it has no shard.
        dtype : torch.dtype
            Dtype of the rows.
        row_wise : bool
            Whether there is but one value a row, ``[n]``.
        """
        dims = 1 if row_wise else 2
        shards = [
            ShardMetadata(
                shard_offsets=list(s.shard_offsets[:dims]),
                shard_sizes=list(s.shard_sizes[:dims]),
                placement=f"rank:{self._rank_of(s)}/cpu",
            )
            for s in self._shards
        ]
        local = [
            Shard(rows, shard)
            for shard in shards
            if rows is not None and self._rank_of(shard) == self._rank
        ]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            local,
            ShardedTensorMetadata(
                shards_metadata=shards,
                size=torch.Size((self.n_rows, self.row_dim)[:dims]),
                tensor_properties=TensorProperties(dtype=dtype),
            ),
            process_group=self._group,
        )

    def rows_in(self, value: object) -> torch.Tensor:
        """Return this rank's rows of a whole or sharded tensor.

        Raises
        ------
        ValueError
            When it has another shape, or is sharded in another way.
        """
        mine = self.mine
        assert mine is not None
        sizes, offsets = list(mine.shard_sizes), list(mine.shard_offsets)
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                metadata = shard.metadata
                if metadata.shard_offsets == offsets and metadata.shard_sizes == sizes:
                    rows: torch.Tensor = shard.tensor
                    return rows
            found = [
                (s.metadata.shard_offsets, s.metadata.shard_sizes) for s in value.local_shards()
            ]
            raise ValueError(
                f"is sharded otherwise: this rank's offsets and sizes are {found}, the module's "
                f"{(offsets, sizes)}"
            )
        if not isinstance(value, torch.Tensor) or hasattr(value, "to_local"):
            raise ValueError(f"is a {type(value).__name__}, expected a tensor or a ShardedTensor")
        if tuple(value.shape) != (self.n_rows, self.row_dim):
            raise ValueError(
                f"size mismatch: {list(value.shape)} in the state dict, "
                f"{[self.n_rows, self.row_dim]} in the module"
            )
        return value[offsets[0] : offsets[0] + sizes[0]]


class TableShard(torch.nn.Module):
    """One table of a sharded collection.

    Its state dict holds a ShardedTensor of the whole table. Its parameter, where it has one, holds
    the resident rows of all tables that are packed together with this one on this rank.

    Parameters
    ----------
    layout : ShardLayout
        How the table is divided.
    dtype : torch.dtype
        Its dtype.
    tables : TableSet or None
        The tables of this rank's kernel, None where this rank has no shard.
    number : int
        The table among them.
    """

    def __init__(
        self, layout: ShardLayout, dtype: torch.dtype, tables: TableSet | None, number: int
    ) -> None:
        super().__init__()
        self._layout = layout
        self._dtype = dtype
        self._number = number
        self._owner = (tables,)  # in a tuple, so that it does not become a submodule
        self._follow()

    @property
    def tables(self) -> TableSet | None:
        """The tables of this rank's kernel, None where this rank has no shard."""
        return self._owner[0]

    def _follow(self) -> None:
        """Show the parameter of the kernel, if this is the first of its tables."""
        parameter = None if self.tables is None else self.tables.parameter_of(self._number)
        if parameter is not None:
            self._parameters["weight"] = parameter

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        if self.tables is not None and "weight" in self._parameters:
            self.tables._apply(fn, recurse)
            self._follow()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        rows = None if self.tables is None else self.tables.decoded(self._number)
        destination[prefix + "weight"] = self._layout.sharded(rows, self._dtype)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        if strict:
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k != key]
        if key not in state_dict:
            if strict:
                missing_keys.append(key)
        elif self.tables is not None:
            try:
                rows = self._layout.rows_in(state_dict[key])
            except ValueError as error:
                error_msgs.append(f"{key}: {error}")
                return
            self.tables.load(self._number, rows)
