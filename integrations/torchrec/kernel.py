"""The embedding kernels that sharded collections look packed tables up with."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import PoolingType, data_type_to_dtype
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bitslab.embedding import EvictionStrategy
from bitslab.errors import ArgumentError
from bitslab.integrations.torchrec.features import checked_features
from bitslab.integrations.torchrec.fused import KernelOptimizer, wants_fused
from bitslab.integrations.torchrec.shards import ShardLayout
from bitslab.integrations.torchrec.sources import FilledSource, RowsSource, Source
from bitslab.integrations.torchrec.tables import TableOptions, TableSet, TableSpec

#: What TorchRec's fused parameters call an option of `TableOptions`.
PREFIX = "bitslab_"
Weights = Mapping[str, torch.Tensor]


def as_fused_params(options: TableOptions) -> dict[str, Any]:
    """Return options as TorchRec hands them to kernels: plain values by name."""
    values = {**vars(options), "evict": options.evict.name}
    return {f"{PREFIX}{name}": value for name, value in values.items()}


def options_from(fused_params: Mapping[str, Any]) -> TableOptions:
    """Return the options that `as_fused_params` wrote."""
    found = {
        name.removeprefix(PREFIX): value
        for name, value in fused_params.items()
        if name.startswith(PREFIX)
    }
    if "evict" in found:
        found["evict"] = EvictionStrategy[found["evict"]]
    return TableOptions(**found)


class PackedKernel(BaseEmbedding):  # type: ignore[misc]
    """A rank's shards of tables, packed.

    Parameters
    ----------
    config : GroupedEmbeddingConfig
        TorchRec's description of the shards.
    device : torch.device or None
        Where lookups happen.
    group : torch.distributed.ProcessGroup
        The ranks.
    weights : mapping of str to torch.Tensor
        The whole tables, by name; those on the meta device are filled by their `init_fn`.
    pooled : bool
        Whether rows are pooled.
    sharding_type : ShardingType or None
        How tables are divided.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        group: dist.ProcessGroup,
        weights: Weights,
        *,
        pooled: bool,
        sharding_type: ShardingType | None = None,
    ) -> None:
        super().__init__()
        self._config = config
        self._pooled = pooled
        self._group = group
        fused_params = config.fused_params or {}
        dtype = data_type_to_dtype(config.data_type)
        if config.is_weighted and dtype is not torch.float32:
            raise ArgumentError(f"is_weighted: needs float32 tables, these are {dtype}")
        pooling = "sum"
        if config.pooling is PoolingType.MEAN and sharding_type is not ShardingType.ROW_WISE:
            # Parts of bags are summed; the module divides them once they are together.
            pooling = "mean"
        specs, sources = [], {}
        for table in config.embedding_tables:
            specs.append(
                TableSpec(
                    table.name,
                    table.local_rows,
                    table.local_cols,
                    dtype,
                    tuple(table.feature_names),
                    pooling,
                )
            )
            sources[table.name] = _source_of(table, weights.get(table.name), dtype)
        self.tables = TableSet(specs, sources, options_from(fused_params), device, "embedding_bags")
        output = fused_params.get("output_dtype", SparseType.FP32)
        self._output_dtype: torch.dtype = output.as_dtype()

    @property
    def config(self) -> GroupedEmbeddingConfig:
        """TorchRec's description of the shards."""
        return self._config

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Look rows up.

        Parameters
        ----------
        features : KeyedJaggedTensor
            A key for each feature of the tables, in their order.

        Returns
        -------
        torch.Tensor
            ``[B, sum of D]`` pooled, or ``[n, D]``.
        """
        if features.variable_stride_per_key():
            raise ArgumentError("features: have another batch size each, which is not supported")
        weights = features.weights_or_none()
        weighted = weights is not None and weights.is_floating_point()
        features = checked_features(features, weighted=False)
        positions = range(len(self.tables.uses))
        if self._pooled:
            out = self.tables.pooled(features, positions, weighted=weighted)
            return torch.cat(out, 1).to(self._output_dtype)
        return torch.cat(self.tables.sequences(features, positions)).to(self._output_dtype)

    def prefetch(self, features: KeyedJaggedTensor) -> None:
        """Start to fetch the rows of a later lookup."""
        self.tables.prefetch_at(features, range(len(self.tables.uses)))

    def layout_of(self, number: int) -> ShardLayout:
        """Return how a table is divided."""
        table = self._config.embedding_tables[number]
        shards = table.global_metadata.shards_metadata
        return ShardLayout(shards, table.num_embeddings, table.embedding_dim, self._group)

    def state_dict(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return nothing: state dicts of the sharded module ask each table."""
        return {} if destination is None else destination

    def named_parameters_by_table(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield nothing: the sharded module yields the parameters with their tables."""
        yield from ()

    def flush(self) -> None:
        """Pack every row that may have changed back into host memory."""
        self.tables.flush()

    def purge(self) -> None:
        """Do nothing: loading rows updates the resident ones."""


class FusedPackedKernel(PackedKernel, FusedOptimizerModule):  # type: ignore[misc]
    """The same, with an optimizer that it applies in backward."""

    def __init__(self, config: GroupedEmbeddingConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for group in self.tables.groups:
            # By this TorchRec's users see that no other optimizer may have it.
            group.rows.parameter._in_backward_optimizers = []  # type: ignore[attr-defined]
        self._optimizer = KernelOptimizer(self.tables, config.fused_params or {}, self._as_shard)

    def _as_shard(self, number: int, rows: torch.Tensor) -> Any:
        return self.layout_of(number).sharded(rows.cpu(), rows.dtype, row_wise=rows.dim() == 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Look rows up; their gradient is applied when backward ends."""
        out = super().forward(features)
        if out.requires_grad:
            out.register_hook(self._optimizer.step_after_backward)  # type: ignore[no-untyped-call]
        return out

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer."""
        return self._optimizer


def make_kernel(config: GroupedEmbeddingConfig, *args: Any, **kwargs: Any) -> PackedKernel:
    """Return a kernel, with an optimizer of its own if the fused parameters name one."""
    kind = FusedPackedKernel if wants_fused(config.fused_params or {}) else PackedKernel
    return kind(config, *args, **kwargs)


def _source_of(
    table: ShardedEmbeddingTable, weight: torch.Tensor | None, dtype: torch.dtype
) -> Source:
    """Return the source of a shard's rows."""
    offset = table.local_metadata.shard_offsets[0]
    if weight is not None and not weight.is_meta:
        return RowsSource(weight.detach()[offset : offset + table.local_rows])
    low, high = table.get_weight_init_min(), table.get_weight_init_max()
    fill = functools.partial(torch.nn.init.uniform_, a=low, b=high)
    return FilledSource(table.local_rows, table.local_cols, dtype, fill)
