"""PyG: compressed features in `Data` and `HeteroData`, or in a `FeatureStore`.

- `compress_features`: one line after the dataset is loaded; loaders and models need no change.
  `feature_stats` returns sizes and traffic, `decompress_features` undoes it.
- `CompressedFeatureStore`: a PyG feature store that holds compressed tensors.
- `FetchFeatures`: a transform that gathers the rows of a batch on the training device, where a GPU
  decodes them.
- `compile_relational`: one line that compiles RGCNConv, RGATConv and HGTConv of a model;
  `restore_relational` undoes it, `relational_calls` counts. The classes are here too.
- ``pytest -p bitslab.integrations.pyg.testing --bitslab-compress-features``: any test run with
  every float tensor of every graph compressed.

Importing this package imports torch_geometric.
"""

from __future__ import annotations

from bitslab.errors import load_optional

load_optional("torch_geometric", extra="pyg", purpose="bitslab.integrations.pyg")

from bitslab.integrations.pyg.compress import (  # noqa: E402
    compress_features,
    decompress_features,
    feature_stats,
    raw_columns,
)
from bitslab.integrations.pyg.relational import (  # noqa: E402
    FastRGCNConv,
    HGTConv,
    RGATConv,
    RGCNConv,
    compile_relational,
    relational_calls,
    restore_relational,
)
from bitslab.integrations.pyg.store import CompressedFeatureStore  # noqa: E402
from bitslab.integrations.pyg.transform import FetchFeatures  # noqa: E402
from bitslab.tables import FeaturesReport  # noqa: E402

__all__ = [
    "CompressedFeatureStore",
    "FastRGCNConv",
    "FeaturesReport",
    "FetchFeatures",
    "HGTConv",
    "RGATConv",
    "RGCNConv",
    "compile_relational",
    "compress_features",
    "decompress_features",
    "feature_stats",
    "raw_columns",
    "relational_calls",
    "restore_relational",
]
