"""Embedding tables that train: all rows packed on the host, the hot ones on the device.

`CachedRows` is one table: `lookup` returns what `torch.nn.functional.embedding_bag` takes, and an
optimizer gets its `parameter`. `RowsModule` is the base of modules that own one. The modules that
people use are in `bitslab.integrations.embedding` and `bitslab.integrations.torchrec`.
"""

from .eviction import EvictionStrategy
from .module import RowsModule
from .rows import CachedRows

__all__ = ["CachedRows", "EvictionStrategy", "RowsModule"]
