"""Programs computed edge by edge with torch's autograd: no plan, no pairs, no fusion."""

from __future__ import annotations

import torch

from bitslab.relational import Program, RelationalGraph


def random_graph(seed, src, dst, edges, relations):
    draw = torch.Generator().manual_seed(seed)
    ends = [torch.randint(max(n, 1), (edges,), generator=draw) for n in (src, dst)]
    kinds = torch.randint(max(relations, 1), (edges,), generator=draw)
    return RelationalGraph(torch.stack(ends), kinds, (src, dst), relations)


def evaluate(program: Program, graph: RelationalGraph, inputs: dict[str, torch.Tensor]):
    """Return the outputs of a program; every value has a row for each edge until it is summed."""
    src, dst, kind = graph.edge_index[0], graph.edge_index[1], graph.edge_type
    found: dict[int, torch.Tensor] = {}
    nodewise: dict[int, torch.Tensor] = {}

    def aligned(args, values):
        rank = max(v.ndim - bool(a.deps) for a, v in zip(args, values, strict=True))
        return [
            v if not a.deps else v.reshape(len(v), *(1,) * (rank + 1 - v.ndim), *v.shape[1:])
            for a, v in zip(args, values, strict=True)
        ]

    def by_dst(function, *rows):
        parts = []
        for node in range(graph.num_dst):
            parts.append(function(*(r[dst == node] for r in rows)))
        return torch.stack(parts) if parts else rows[0].sum(0)[None][:0]

    def value_of(v, nodes=False):
        """Return rows by edge, or by destination."""
        memo = nodewise if nodes else found
        if id(v) not in memo:
            memo[id(v)] = compute(v, nodes)
        return memo[id(v)]

    def compute(v, nodes):
        if v.op == "place":
            x = inputs[v.args[0].attrs[0]]
            (letter,) = v.deps
            if letter in "pq":
                assert graph.node_types is not None
                of_nodes = graph.node_types.of_nodes(src.device)
                return x[of_nodes if nodes else of_nodes[src if letter == "p" else dst]]
            if nodes:
                return x
            return {"s": lambda: x[src], "d": lambda: x[dst], "r": lambda: x[kind], "e": lambda: x}[
                letter
            ]()
        if v.op == "shared":
            return inputs[v.args[0].attrs[0]]
        if v.op == "inverse_counts":
            same = (dst[:, None] == dst) & (kind[:, None] == kind)
            return 1 / same.sum(1).to(next(iter(inputs.values())).dtype)
        if v.op == "sum_to_dst":
            total = by_dst(lambda rows: rows.sum(0), value_of(v.args[0]))
            return total if nodes else total[dst]
        args = [value_of(a, nodes) for a in v.args]
        match v.op:
            case "typed_linear":
                return torch.einsum("...k,...kn->...n", *args)
            case "linear":
                return args[0] @ args[1]
            case "t":
                return args[0].transpose(-1, -2)
            case "dot":
                return torch.mul(*aligned(v.args, args)).sum(-1, keepdim=True)
            case "split":
                return args[0].reshape(len(args[0]), v.attrs[0], args[0].shape[1] // v.attrs[0])
            case "flatten":
                return args[0].flatten(1)
            case "softmax":
                out = args[0] * 0
                for node in dst.unique():
                    out = out + torch.where(
                        (dst == node).reshape(-1, *(1,) * (out.ndim - 1)),
                        args[0].sub(args[0][dst == node].amax(0)).exp()
                        / args[0][dst == node].sub(args[0][dst == node].amax(0)).exp().sum(0),
                        0,
                    )
                return out
            case "leaky_relu":
                return torch.nn.functional.leaky_relu(args[0], v.attrs[0])
            case "exp":
                return args[0].exp()
            case "add" | "sub" | "mul" | "div":
                return getattr(torch, v.op)(*aligned(v.args, args))
            case op:
                return getattr(torch, op.removesuffix("_number"))(args[0], v.attrs[0])

    return tuple(value_of(o, o.deps == {"d"}) for o in program.outputs)
