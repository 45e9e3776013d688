"""TorchRec collections whose tables lie packed in host memory, unsharded and sharded.

- `CompressedEmbeddingBagCollection`, `CompressedEmbeddingCollection`: TorchRec's collections with
  packed tables; one lookup serves all features.
- `compress_tables`: one line puts them in the place of the unsharded collections of a model;
  `restore_tables` undoes it.
- `CompressedEmbeddingBagCollectionSharder`, `CompressedEmbeddingCollectionSharder` and
  `packed_plan`: what DistributedModelParallel needs to divide packed tables between ranks.
- `compress_communication`: one line makes what sharded collections send to other ranks smaller;
  `restore_communication` undoes it.

Importing this package imports torchrec.
"""

from __future__ import annotations

from bitslab.errors import load_optional

load_optional("torchrec", extra="torchrec", purpose="bitslab.integrations.torchrec")

from bitslab.integrations.torchrec.collection import (  # noqa: E402
    CompressedEmbeddingBagCollection,
    CompressedEmbeddingCollection,
)
from bitslab.integrations.torchrec.communication import (  # noqa: E402
    CommunicationReport,
    compress_communication,
    restore_communication,
)
from bitslab.integrations.torchrec.compress import (  # noqa: E402
    CollectionsReport,
    compress_tables,
    restore_tables,
)
from bitslab.integrations.torchrec.plan import packed_plan  # noqa: E402
from bitslab.integrations.torchrec.sharding import (  # noqa: E402
    CompressedEmbeddingBagCollectionSharder,
    CompressedEmbeddingCollectionSharder,
)

__all__ = [
    "CompressedEmbeddingBagCollection",
    "CompressedEmbeddingBagCollectionSharder",
    "CompressedEmbeddingCollection",
    "CompressedEmbeddingCollectionSharder",
    "CollectionsReport",
    "CommunicationReport",
    "compress_communication",
    "compress_tables",
    "packed_plan",
    "restore_communication",
    "restore_tables",
]
