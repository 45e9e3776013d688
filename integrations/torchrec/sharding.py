"""Sharders whose embedding kernel is a packed table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torchrec.distributed.embedding import (
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import data_type_to_dtype
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bitslab.embedding import EvictionStrategy
from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.integrations.torchrec.kernel import PackedKernel, as_fused_params, make_kernel
from bitslab.integrations.torchrec.shards import ShardLayout, TableShard
from bitslab.integrations.torchrec.tables import TableOptions
from bitslab.tables import Layout

KERNEL = EmbeddingComputeKernel.CUSTOMIZED_KERNEL
SHARDINGS = (ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value)


@dataclasses.dataclass
class PackedParameterSharding(ParameterSharding):  # type: ignore[misc]
    """How one table is sharded and packed.

    Parameters
    ----------
    options : dict
        What `as_fused_params` returns.
    """

    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def get_additional_fused_params(self) -> dict[str, Any]:
        """Return the kernel's parameters; TorchRec calls it."""
        return dict(self.options)


# Lookups: TorchRec's, with our kernel where the plan asks for it.


class _PooledLookup(GroupedPooledEmbeddingsLookup):  # type: ignore[misc]
    def __init__(self, weights: Mapping[str, torch.Tensor], **kwargs: Any) -> None:
        self._weights = weights  # for the kernels, which the next line makes
        super().__init__(**kwargs)
        del self._weights

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: Any,
        pg: Any,
        sharding_type: ShardingType | None,
        env: Any,
    ) -> Any:
        if config.compute_kernel is not KERNEL:
            return super()._create_embedding_kernel(config, device, pg, sharding_type, env)
        return make_kernel(
            config, device, pg, self._weights, pooled=True, sharding_type=sharding_type
        )

    def prefetch(self, sparse_features: KeyedJaggedTensor, forward_stream: Any = None) -> None:
        super().prefetch(sparse_features, forward_stream)
        _prefetch(self, sparse_features)


class _SequenceLookup(GroupedEmbeddingsLookup):  # type: ignore[misc]
    def __init__(self, weights: Mapping[str, torch.Tensor], **kwargs: Any) -> None:
        self._weights = weights
        super().__init__(**kwargs)
        del self._weights

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, pg: Any, device: Any, env: Any = None
    ) -> Any:
        if config.compute_kernel is not KERNEL:
            return super()._create_embedding_kernel(config, pg, device, env)
        return make_kernel(config, device, pg, self._weights, pooled=False)

    def prefetch(self, sparse_features: KeyedJaggedTensor, forward_stream: Any = None) -> None:
        super().prefetch(sparse_features, forward_stream)
        _prefetch(self, sparse_features)


def _prefetch(lookup: Any, features: KeyedJaggedTensor) -> None:
    parts = features.split(lookup._feature_splits)
    for kernel, part in zip(lookup._emb_modules, parts, strict=True):
        if isinstance(kernel, PackedKernel):
            kernel.prefetch(part)


# Shardings: TorchRec's, with those lookups.


class _WithWeights:
    """What is there of the unsharded tables when kernels are made."""

    def __init__(self, sharding_infos: Any, *args: Any, **kwargs: Any) -> None:
        self._unsharded = {info.embedding_config.name: info.param for info in sharding_infos}
        super().__init__(sharding_infos, *args, **kwargs)  # type: ignore[call-arg]

    def _lookup_arguments(self: Any, device: Any) -> dict[str, Any]:
        weights, self._unsharded = self._unsharded, {}
        return {
            "weights": weights,
            "grouped_configs": self._grouped_embedding_configs,
            "pg": self._pg,
            "device": self._device if device is None else device,
            "env": self._env,
        }


class _TwPooled(_WithWeights, TwPooledEmbeddingSharding):  # type: ignore[misc]
    def create_lookup(
        self, device: Any = None, fused_params: Any = None, feature_processor: Any = None
    ) -> Any:
        return _PooledLookup(feature_processor=feature_processor, **self._lookup_arguments(device))


class _RwPooled(_WithWeights, RwPooledEmbeddingSharding):  # type: ignore[misc]
    def create_lookup(
        self, device: Any = None, fused_params: Any = None, feature_processor: Any = None
    ) -> Any:
        return _PooledLookup(
            feature_processor=feature_processor,
            sharding_type=ShardingType.ROW_WISE,
            **self._lookup_arguments(device),
        )


class _TwSequence(_WithWeights, TwSequenceEmbeddingSharding):  # type: ignore[misc]
    def create_lookup(
        self, device: Any = None, fused_params: Any = None, feature_processor: Any = None
    ) -> Any:
        return _SequenceLookup(**self._lookup_arguments(device))


class _RwSequence(_WithWeights, RwSequenceEmbeddingSharding):  # type: ignore[misc]
    def create_lookup(
        self, device: Any = None, fused_params: Any = None, feature_processor: Any = None
    ) -> Any:
        return _SequenceLookup(**self._lookup_arguments(device))


# Sharded modules


class _PackedTables:
    """What sharded modules of both kinds do about packed tables."""

    _key: str
    _configs_name: str

    def _initialize_torch_state(self: Any, skip_registering: bool = False) -> None:
        super()._initialize_torch_state(skip_registering)  # type: ignore[misc]
        if self._env.output_dtensor:
            raise ArgumentError("env: output_dtensor is not supported with packed tables")
        where: dict[str, tuple[PackedKernel, int]] = {}
        for lookup in self._lookups:
            for kernel in getattr(lookup, "_emb_modules", ()):
                if isinstance(kernel, PackedKernel):
                    kernel.tables.key = self._key
                    where |= {s.name: (kernel, i) for i, s in enumerate(kernel.tables.specs)}
        holder = getattr(self, self._key)
        for config in self._packed_configs():
            kernel, number = where.get(config.name, (None, 0))
            shards = self.module_sharding_plan[config.name].sharding_spec.shards
            holder[config.name] = TableShard(
                ShardLayout(
                    shards, config.num_embeddings, config.embedding_dim, self._env.process_group
                ),
                data_type_to_dtype(config.data_type),
                None if kernel is None else kernel.tables,
                number,
            )

    def _packed_configs(self: Any) -> list[Any]:
        plan = self.module_sharding_plan
        configs = getattr(self, self._configs_name)
        return [c for c in configs if plan[c.name].compute_kernel == KERNEL.value]

    def reset_parameters(self: Any) -> None:
        """Reset tables, but for packed ones: those hold the weights of the unsharded module."""
        configs = getattr(self, self._configs_name)
        packed = self._packed_configs()
        setattr(self, self._configs_name, [c for c in configs if c not in packed])
        try:
            super().reset_parameters()  # type: ignore[misc]
        finally:
            setattr(self, self._configs_name, configs)

    def train(self: Any, mode: bool = True) -> Any:
        """Set whether lookups make rows resident; see `torch.nn.Module.train`."""
        super().train(mode)  # type: ignore[misc]
        for lookup in self._lookups:
            lookup.train(mode)
        return self

    def stats(self: Any) -> dict[str, Any]:
        """Return what this rank's packed tables take and moved, by table."""
        found: dict[str, Any] = {}
        for lookup in self._lookups:
            for kernel in getattr(lookup, "_emb_modules", ()):
                if isinstance(kernel, PackedKernel):
                    found |= kernel.tables.stats()["tables"]
        return found


class ShardedCompressedEmbeddingBagCollection(_PackedTables, ShardedEmbeddingBagCollection):  # type: ignore[misc]
    """TorchRec's sharded EmbeddingBagCollection, with tables packed where the plan asks for it."""

    _key = "embedding_bags"
    _configs_name = "_embedding_bag_configs"

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: Any,
        env: Any,
        device: Any = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: Any = None,
    ) -> Any:
        """Return TorchRec's sharding, with our kernel if the plan asks for it."""
        kind = sharding_infos[0].param_sharding.sharding_type
        made = {"table_wise": _TwPooled, "row_wise": _RwPooled}.get(kind)
        if made is None:
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        return made(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)


class ShardedCompressedEmbeddingCollection(_PackedTables, ShardedEmbeddingCollection):  # type: ignore[misc]
    """TorchRec's sharded EmbeddingCollection, with tables packed where the plan asks for it."""

    _key = "embeddings"
    _configs_name = "_embedding_configs"

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: Any,
        env: Any,
        device: Any = None,
        qcomm_codecs_registry: Any = None,
    ) -> Any:
        """Return TorchRec's sharding, with our kernel if the plan asks for it."""
        made = {"table_wise": _TwSequence, "row_wise": _RwSequence}.get(sharding_type)
        if made is None:
            return super().create_embedding_sharding(
                sharding_type, sharding_infos, env, device, qcomm_codecs_registry
            )
        return made(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)


# Sharders


class PackedSharder:
    """What sharders of both kinds do about packed tables.

    Parameters
    ----------
    fused_params, qcomm_codecs_registry
        As for TorchRec's sharders.
    cache_ratio, min_rows, codec, layout, cache, evict
        As for `CompressedEmbeddingBagCollection`; the codec by name.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
        *,
        cache_ratio: float = 0.01,
        min_rows: int = 0,
        codec: str = "auto",
        layout: Layout = "compact",
        cache: Literal["rows", "packed"] = "rows",
        evict: EvictionStrategy = EvictionStrategy.LFU,
        **kwargs: Any,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry, **kwargs)  # type: ignore[call-arg]
        if not isinstance(codec, str):
            raise ArgumentTypeError(
                f"codec: expected the name of a codec, got {type(codec).__name__}"
            )
        self.options = TableOptions(
            cache_ratio=cache_ratio,
            cache=cache,
            evict=evict,
            codec=codec,
            layout=layout,
            min_rows=min_rows,
        )

    def _with_options(
        self, params: Mapping[str, ParameterSharding]
    ) -> dict[str, ParameterSharding]:
        """Return a plan in which every packed table knows how it is packed."""
        found = {}
        for name, sharding in params.items():
            if sharding.compute_kernel == KERNEL.value:
                if sharding.sharding_type not in SHARDINGS:
                    raise ArgumentError(
                        f"plan: table {name!r} is packed and {sharding.sharding_type}; accepted "
                        f"are {' and '.join(SHARDINGS)}"
                    )
                values = {f.name: getattr(sharding, f.name) for f in dataclasses.fields(sharding)}
                values.setdefault("options", as_fused_params(self.options))
                sharding = PackedParameterSharding(**values)
            found[name] = sharding
        return found


class CompressedEmbeddingBagCollectionSharder(PackedSharder, EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Shards EmbeddingBagCollection modules, with tables packed where the plan asks for it.

    Give it to TorchRec's DistributedModelParallel together with a plan from `packed_plan`,
    table-wise or row-wise. Each rank packs its shards; the weights of the unsharded module are
    kept.

    With an optimizer in `fused_params`, or by TorchRec's `apply_optimizer_in_backward`, gradients
    are applied in backward as FBGEMM's kernels do: EXACT_SGD, EXACT_ADAGRAD and
    EXACT_ROWWISE_ADAGRAD. Without, the resident rows are among the model's parameters, and any
    optimizer that `bitslab.embedding.CachedRows` accepts moves them.

    Parameters
    ----------
    fused_params, qcomm_codecs_registry
        As for TorchRec's EmbeddingBagCollectionSharder.
    cache_ratio, min_rows, codec, layout, cache, evict
        As for `CompressedEmbeddingBagCollection`; the codec by name.

    Notes
    -----
    Table-wise, outputs and training are those of the unsharded collection, bit for bit on a CPU.
    Row-wise, ranks add parts of bags, so that the last bits may differ. Row-wise tables that have a
    feature in common should pool alike: TorchRec 1.8.0 takes one divisor for the feature in all of
    them, with its own kernels too.

    Features of different batch sizes are refused, and so are weighted tables that are not float32.
    """

    def shard(
        self, module: Any, params: Any, env: Any, device: Any = None, module_fqn: Any = None
    ) -> ShardedCompressedEmbeddingBagCollection:
        """Return the sharded module."""
        return ShardedCompressedEmbeddingBagCollection(
            module,
            self._with_options(params),
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )

    @property
    def sharded_module_type(self) -> type[ShardedCompressedEmbeddingBagCollection]:
        """What `shard` returns."""
        return ShardedCompressedEmbeddingBagCollection


class CompressedEmbeddingCollectionSharder(PackedSharder, EmbeddingCollectionSharder):  # type: ignore[misc]
    """Shards EmbeddingCollection modules, with tables packed where the plan asks for it.

    As `CompressedEmbeddingBagCollectionSharder`; it takes TorchRec's ``use_index_dedup`` too.
    """

    def shard(
        self, module: Any, params: Any, env: Any, device: Any = None, module_fqn: Any = None
    ) -> ShardedCompressedEmbeddingCollection:
        """Return the sharded module."""
        return ShardedCompressedEmbeddingCollection(
            module,
            self._with_options(params),
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            use_index_dedup=self._use_index_dedup,
            module_fqn=module_fqn,
        )

    @property
    def sharded_module_type(self) -> type[ShardedCompressedEmbeddingCollection]:
        """What `shard` returns."""
        return ShardedCompressedEmbeddingCollection
