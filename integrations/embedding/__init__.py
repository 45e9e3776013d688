"""Embedding tables of PyTorch models, packed in host memory, with the hot rows on the device.

`CachedEmbeddingBag` and `CachedEmbedding` stand for `torch.nn.EmbeddingBag` and
`torch.nn.Embedding`, in training and inference; `compress_embeddings` puts them into a model and
`restore_embeddings` takes them out. `save_state` and `load_state` write and read the state of such
a model in bounded memory.
"""

from bitslab.embedding import EvictionStrategy, TablesReport, load_state, save_state
from bitslab.integrations.embedding.bag import CachedEmbeddingBag
from bitslab.integrations.embedding.compress import compress_embeddings, restore_embeddings
from bitslab.integrations.embedding.single import CachedEmbedding

__all__ = [
    "CachedEmbedding",
    "CachedEmbeddingBag",
    "EvictionStrategy",
    "TablesReport",
    "compress_embeddings",
    "load_state",
    "restore_embeddings",
    "save_state",
]
