"""bfloat16 beside float64: ours is no further from it than DGL's own layer is.

DGL's kernels take no float16 on a CPU; its TypedLinear has none.
"""

from __future__ import annotations

import pytest
import torch

from bitslab.integrations.dgl import relational_calls
from tests.integrations.dgl.test_relational import NODE_TYPES, NODES, TYPES, both, drawn
from tests.relational.precision import compare_errors

BF16, FP16 = torch.bfloat16, torch.float16
LAYERS = [
    ("RelGraphConv", (8, 12, TYPES), {}, BF16),
    ("RelGraphConv", (8, 12, TYPES), {"regularizer": "basis", "num_bases": 3}, BF16),
    ("RelGraphConv", (8, 12, TYPES), {"regularizer": "bdd", "num_bases": 2}, BF16),
    ("HGTConv", (8, 4, 2, NODE_TYPES, TYPES), {"dropout": 0.0}, BF16),
    ("TypedLinear", (8, 12, TYPES), {}, BF16),
    ("TypedLinear", (8, 12, TYPES), {}, FP16),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "dtype"), LAYERS, ids=str)
def test_errors_are_at_most_those_of_dgl(name, args, kwargs, dtype):
    graph, types, kinds = drawn()
    plain, ours = both(name, *args, **kwargs)
    more = {
        "RelGraphConv": lambda layer, x: layer(graph, x, types),
        "HGTConv": lambda layer, x: layer(graph, x, kinds, types),
        "TypedLinear": lambda layer, x: layer(x, types[:NODES]),
    }[name]

    def call(layer, x):
        out = more(layer, x["x"])
        assert set(relational_calls(layer).get("", {"": 1})) == {""}
        return [out]

    compare_errors(plain, ours, {"x": torch.randn(NODES, 8)}, call, dtype)
