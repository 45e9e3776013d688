"""Tables in TorchRec's collections: its own, and the compressed one."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch

from .clicks import Batch
from .tables import Memory, Tables, Traffic, Weights, codecs_of, memory_of, traffic_of

#: The logger in torch that warns of a renamed function, which TorchRec uses.
TRACING = "torch.fx._symbolic_trace"


def missing_torchrec() -> str | None:
    """Return why TorchRec cannot be used; None when it can."""
    logging.getLogger(TRACING).addFilter(_about_errors)
    try:
        with warnings.catch_warnings():
            # TorchRec 1.8 and FBGEMM raise warnings about torch at import.
            warnings.simplefilter("ignore")
            import torchrec  # noqa: F401
    except Exception as error:  # a library that does not fit the torch at hand raises anything
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _about_errors(record: logging.LogRecord) -> bool:
    # By a filter, because torch sets the levels of its loggers again when more of it is imported.
    return record.levelno >= logging.ERROR


class CollectionTables(Tables):
    """TorchRec's EmbeddingBagCollection, as it is: all tables on the device."""

    def make(self, weights: Weights) -> torch.nn.Module:
        from torchrec import EmbeddingBagCollection

        with torch.device("meta"):
            collection: torch.nn.Module = EmbeddingBagCollection(tables=self.configs())
        collection.to_empty(device=self.device)
        with torch.no_grad():
            for name, rows in self.table_rows.items():
                collection.get_parameter(f"embedding_bags.{name}.weight").copy_(weights(name, rows))
        return collection

    def configs(self) -> list[Any]:
        """Return what TorchRec wants to know of each table."""
        from torchrec import EmbeddingBagConfig, PoolingType
        from torchrec.types import DataType

        data_types = {
            torch.float32: DataType.FP32,
            torch.float16: DataType.FP16,
            torch.bfloat16: DataType.BF16,
        }
        return [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=self.width,
                feature_names=[name],
                pooling=PoolingType.SUM,
                data_type=data_types[self.options.dtype],
            )
            for name, rows in self.table_rows.items()
        ]

    def look_up(self, batch: Batch) -> torch.Tensor:
        pooled = self.module(self.keyed(batch)).values()
        return torch.unflatten(pooled, 1, (len(self.names), self.width))

    def keyed(self, batch: Batch) -> Any:
        """Return the ids of a batch as TorchRec has them, feature after feature."""
        from torchrec import KeyedJaggedTensor

        lengths = [
            offsets.diff(append=offsets.new_tensor([len(ids)])) for ids, offsets in batch.bags
        ]
        return KeyedJaggedTensor(
            keys=self.names,
            values=torch.cat([ids for ids, _ in batch.bags]),
            lengths=torch.cat(lengths),
        )


class CompressedTables(CollectionTables):
    """A CompressedEmbeddingBagCollection: packed in host memory, hot rows on the device."""

    def make(self, weights: Weights) -> torch.nn.Module:
        from bitslab.embedding import EvictionStrategy
        from bitslab.integrations.torchrec import CompressedEmbeddingBagCollection

        options = self.options
        return CompressedEmbeddingBagCollection(
            tables=self.configs(),
            device=self.device,
            weights={name: weights(name, rows) for name, rows in self.table_rows.items()},
            cache_ratio=options.cache_ratio,
            codec=options.codec,
            layout=options.layout,
            evict=EvictionStrategy[options.evict],
        )

    def prefetch(self, batch: Batch) -> None:
        self.collection.prefetch(self.keyed(batch))

    @property
    def collection(self) -> Any:
        return self.module

    def stats(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.collection.stats()["groups"]
        return groups

    def traffic(self) -> Traffic:
        return traffic_of(self.stats())

    def memory(self) -> Memory:
        return memory_of(self.stats())

    @property
    def codecs(self) -> list[str]:
        return codecs_of(self.stats())

    def close(self) -> None:
        self.collection.close()
