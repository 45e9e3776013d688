"""bfloat16 and float16 beside float64: ours is no further from it than PyG's own layer is."""

from __future__ import annotations

import pytest
import torch

from bitslab.integrations.pyg import relational_calls
from tests.integrations.pyg.relational_layers import (
    METADATA,
    NODES,
    TYPES,
    both,
    graph,
    hetero,
    tensors_of,
)
from tests.relational.precision import compare_errors

LAYERS = [
    ("RGCNConv", {}),
    ("RGCNConv", {"aggr": "add"}),
    ("RGCNConv", {"num_bases": 3}),
    ("FastRGCNConv", {}),
    ("RGATConv", {}),
    ("RGATConv", {"heads": 3, "concat": False}),
    ("HGTConv", {}),
    ("HGTConv", {"heads": 4}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "kwargs"), LAYERS, ids=str)
def test_errors_are_at_most_those_of_pyg(name, kwargs, dtype):
    torch.manual_seed(0)
    if name == "HGTConv":
        x, edges = hetero()
        args = [{t: v.shape[1] for t, v in x.items()}, 8, METADATA]
    else:
        x, edges, args = {"x": torch.randn(NODES, 8)}, graph(), [8, 12, TYPES]
    plain, ours = both(name, *args, **kwargs)

    def call(layer, x):
        out = layer(x, edges) if name == "HGTConv" else layer(x["x"], *edges)
        assert set(relational_calls(layer).get("", {"": 1})) == {""}
        return tensors_of(out)

    compare_errors(plain, ours, x, call, dtype)
