"""What the tests of PyG's compiled layers share: graphs, pairs of layers, comparisons."""

from __future__ import annotations

import torch
import torch_geometric.nn as gnn

from bitslab.integrations import pyg
from bitslab.integrations.pyg import relational_calls

NODES, EDGES, TYPES = 40, 300, 5


def graph(src=NODES, dst=NODES, edges=EDGES, types=TYPES, seed=0):
    draw = torch.Generator().manual_seed(seed)
    ends = [torch.randint(max(n, 1), (edges,), generator=draw) for n in (src, dst)]
    return torch.stack(ends), torch.randint(types, (edges,), generator=draw)


def both(name, *args, **kwargs):
    """Return PyG's layer and ours, made with the same seed."""
    layers = []
    for module in (gnn, pyg):
        torch.manual_seed(3)
        layers.append(getattr(module, name)(*args, **kwargs))
    plain, ours = layers
    assert isinstance(ours, type(plain)) and repr(ours) == repr(plain)
    for a, b in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        # PyG leaves the memory of RGATConv's l2 as it comes.
        assert a[0] == b[0] and (a[0] == "l2" or torch.equal(a[1], b[1]))
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def close(a, b, within=1e-5):
    assert a.dtype == b.dtype and a.shape == b.shape
    if b.numel():
        assert (a - b).abs().max() <= within * max(1.0, b.abs().max().item())


def tensors_of(out):
    if isinstance(out, torch.Tensor):
        return [out]
    parts = out.values() if isinstance(out, dict) else out
    return [t for part in parts for t in tensors_of(part) if t.is_floating_point()]


def compare(plain, ours, features, *args, reason="", **kwargs):
    """Compare outputs and gradients, and that ours ran compiled, or why it did not."""
    results = []
    for layer in (plain, ours):
        leaves = {k: x.clone().requires_grad_() for k, x in features.items()}
        torch.manual_seed(5)
        x = leaves if len(leaves) > 2 else tuple(leaves.values())
        outs = tensors_of(layer(x[0] if len(x) == 1 else x, *args, **kwargs))
        draw = torch.Generator().manual_seed(6)
        loss = sum((o * torch.randn(o.shape, generator=draw)).sum() for o in outs)
        layer.zero_grad()
        loss.backward()
        grads = [x.grad for x in leaves.values()] + [p.grad for p in layer.parameters()]
        results.append((outs, grads))
    for a, b in zip(results[1][0], results[0][0], strict=True):
        close(a, b)
    for a, b in zip(results[1][1], results[0][1], strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            close(a, b)
    assert relational_calls(ours) == {"": {reason: 1}}


NODE_TYPES = ["paper", "author", "field"]
EDGE_TYPES = [
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("paper", "has", "field"),
]
METADATA = (NODE_TYPES, EDGE_TYPES)


def hetero():
    sizes = {"paper": 30, "author": 20, "field": 7}
    x = {t: torch.randn(n, 8 + 4 * (t == "field")) for t, n in sizes.items()}
    edges = {t: graph(sizes[t[0]], sizes[t[2]], 80, seed=i)[0] for i, t in enumerate(EDGE_TYPES)}
    return x, edges
