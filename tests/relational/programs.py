"""Programs of the tests, with the shapes of their inputs."""

from __future__ import annotations

import torch

import bitslab.relational as rel


@rel.program
def rgcn(g, x, weight, root, norm):
    messages = norm * rel.typed_linear(g.src(x), weight, g.edge_type)
    return rel.sum_to_dst(messages) + g.dst(x) @ root


@rel.program
def rgcn_mean(g, x, y, weight, root, bias):
    messages = g.inverse_counts * rel.typed_linear(g.src(x), weight)
    return rel.sum_to_dst(messages) + g.dst(y) @ root + rel.shared(bias)


@rel.program
def blocks(g, x, weight):
    return rel.flatten(rel.sum_to_dst(rel.typed_linear(rel.split(g.src(x), 2), weight)))


@rel.program
def rgat(g, x, y, weight, q, k, bias):
    message = rel.typed_linear(g.src(x), weight)
    query = rel.typed_linear(g.dst(y), weight) @ q
    attention = rel.softmax_by_dst(rel.leaky_relu(query + message @ k, 0.2))
    out = rel.sum_to_dst(rel.split(attention, 2) * rel.split(message, 2))
    return rel.flatten(out) + rel.shared(bias), attention


@rel.program
def one_head(g, x, weight, q):
    message = rel.typed_linear(g.src(x), weight)
    attention = rel.softmax_by_dst(rel.typed_linear(g.src(x), weight) @ q)
    return rel.sum_to_dst(attention * message)


@rel.program
def hgt(g, k, q, v, keys, values, prior):
    key = rel.typed_linear(rel.split(g.src(k), 2), keys)
    score = rel.dot(key, rel.split(g.dst(q), 2)) * g.relation(prior)
    message = rel.typed_linear(rel.split(g.src(v), 2), values)
    return rel.flatten(rel.sum_to_dst(rel.softmax_by_dst(score / 1.5) * message))


@rel.program
def arithmetic(g, x, y, e, c):
    a = 1.5 - rel.exp(g.src(x) * 0.1) / (2.0 + g.dst(y) * g.dst(y)) + e - rel.shared(c)
    summed = rel.sum_to_dst(a * g.src(x) * e)
    return g.dst(summed) - 0.5, -a


@rel.program
def edge_features(g, x, e, weight, types):
    message = rel.typed_linear(e, weight) + g.relation(types)
    return rel.sum_to_dst(message * g.src(x)), rel.dot(g.src(x), g.dst(x))


def inputs_of(name, graph, dtype=torch.float64, seed=0):
    """Draw the inputs of a program: 4 features in, 6 out, two heads where it has heads."""
    s, d, e, r = graph.num_src, graph.num_dst, graph.num_edges, graph.num_relations
    shapes = {
        "rgcn": {"x": (s, 4), "weight": (r, 4, 6), "root": (4, 6), "norm": (e,)},
        "rgcn_mean": {"x": (s, 4), "y": (d, 3), "weight": (r, 4, 6), "root": (3, 6), "bias": (6,)},
        "blocks": {"x": (s, 4), "weight": (r, 2, 2, 3)},
        "rgat": {
            "x": (s, 4), "y": (d, 4), "weight": (r, 4, 6), "q": (6, 2), "k": (6, 2), "bias": (6,)
        },
        "one_head": {"x": (s, 4), "weight": (r, 4, 6), "q": (6, 1)},
        "hgt": {
            "k": (s, 4), "q": (d, 4), "v": (s, 4), "keys": (r, 2, 2, 2), "values": (r, 2, 2, 3),
            "prior": (r, 2, 1),
        },
        "arithmetic": {"x": (s, 4), "y": (d, 4), "e": (e, 1), "c": (4,)},
        "edge_features": {"x": (s, 6), "e": (e, 4), "weight": (r, 4, 6), "types": (r, 6)},
    }[name]  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    return {k: torch.randn(shape, generator=draw, dtype=dtype) for k, shape in shapes.items()}


PROGRAMS = {p.__name__: p for p in (
    rgcn, rgcn_mean, blocks, rgat, one_head, hgt, arithmetic, edge_features
)}  # fmt: skip
#: What runs with sources and destinations of one number only.
SAME_NODES = {"rgcn", "edge_features"}
