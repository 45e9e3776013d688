"""Configs of tables and batches for them, and comparison with TorchRec's own collections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType, PoolingType

#: Values that each feature may have: rows of the smallest of its tables.
VALUES = {"a": 41, "b": 501, "c": 300, "unused": 9}
#: Not the order of the tables, and with a key that no table asks for.
KEYS = ("b", "unused", "a", "c")


def bag_configs(**changed: Any) -> list[EmbeddingBagConfig]:
    """Two row shapes, two poolings, a table with two features and a feature with two tables."""
    return [
        EmbeddingBagConfig(
            name="t1", num_embeddings=501, embedding_dim=8, feature_names=["a", "b"], **changed
        ),
        EmbeddingBagConfig(
            name="t2",
            num_embeddings=300,
            embedding_dim=8,
            feature_names=["c"],
            **{"pooling": PoolingType.MEAN, **changed},
        ),
        EmbeddingBagConfig(
            name="t3", num_embeddings=41, embedding_dim=64, feature_names=["a"], **changed
        ),
    ]


def configs(data_type: DataType = DataType.FP32) -> list[EmbeddingConfig]:
    """The same, without pooling."""
    return [
        EmbeddingConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=64,
            feature_names=features,
            data_type=data_type,
        )
        for name, rows, features in [
            ("t1", 501, ["a", "b"]),
            ("t2", 300, ["c"]),
            ("t3", 41, ["a"]),
        ]
    ]


def batch(
    seed: int = 0,
    bags: int = 13,
    *,
    keys: Sequence[str] = KEYS,
    most: int = 3,
    least: int = 0,
    dtype: torch.dtype = torch.int64,
    weighted: bool = False,
) -> KeyedJaggedTensor:
    """Draw bags of `least` to `most` values for each key."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(least, most + 1, (len(keys) * bags,), generator=generator)
    counts = lengths.view(len(keys), bags).sum(1).tolist()
    values = [
        torch.randint(VALUES[key], (count,), generator=generator)
        for key, count in zip(keys, counts, strict=True)
    ]
    weights = torch.randn(sum(counts), generator=generator) if weighted else None
    return KeyedJaggedTensor(
        list(keys),
        torch.cat(values).to(dtype),
        weights=weights,
        lengths=lengths.int() if dtype is torch.int32 else lengths,
    )


def joined(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Put the bags of several batches behind each other, key by key."""
    keys = parts[0].keys()
    jagged = [part.to_dict() for part in parts]
    lengths = [j[key].lengths() for key in keys for j in jagged]
    values = [j[key].values() for key in keys for j in jagged]
    return KeyedJaggedTensor(list(keys), torch.cat(values), lengths=torch.cat(lengths))


def same_state(a: Any, b: Any) -> bool:
    """Return whether two modules or state dicts hold the same keys in order, and the same bits."""
    a, b = (s.state_dict() if isinstance(s, torch.nn.Module) else s for s in (a, b))
    return list(a) == list(b) and all(
        a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in a
    )
