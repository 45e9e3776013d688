"""DGL: graphs whose feature columns are packed in host memory, for stock DGL 1.1.3.

`compress_features` compresses columns of a graph, `feature_stats` returns sizes and traffic,
`decompress_features` undoes it. Importing this package adds one method to DGL, undone by `detach`:
``graph.get_node_storage("feat").compress()``.

`compile_relational` compiles RelGraphConv, HGTConv and TypedLinear of a model, `restore_relational`
undoes it, `relational_calls` counts. The classes are here too.
"""

from bitslab.errors import load_optional

load_optional("dgl", extra="dgl", purpose="bitslab.integrations.dgl")

from bitslab.integrations.dgl.column import (  # noqa: E402 (after the check that dgl is installed)
    CompressedColumn,
    attach,
    detach,
)
from bitslab.integrations.dgl.compress import (  # noqa: E402
    compress_features,
    decompress_features,
    feature_stats,
    raw_columns,
)
from bitslab.integrations.dgl.relational import (  # noqa: E402
    HGTConv,
    RelGraphConv,
    TypedLinear,
    compile_relational,
    relational_calls,
    restore_relational,
)
from bitslab.tables import FeaturesReport  # noqa: E402

attach()

__all__ = [
    "CompressedColumn",
    "FeaturesReport",
    "HGTConv",
    "RelGraphConv",
    "TypedLinear",
    "attach",
    "compile_relational",
    "compress_features",
    "decompress_features",
    "detach",
    "feature_stats",
    "raw_columns",
    "relational_calls",
    "restore_relational",
]
