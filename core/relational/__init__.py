"""Relational graphs: a small compiler for layers whose edges have types.

A message of such a layer often depends on the source and the relation of its edge alone, and most
edges share these. A program says what is computed for an edge; the compiler computes each value
once for each thing that it depends on, for each relation multiplies before or after summing,
whichever costs less on this graph, and generates the backward pass.

.. code-block:: python

    import bitslab.relational as rel

    @rel.program
    def rgcn(g, x, weight, root, norm):
        messages = norm * rel.typed_linear(g.src(x), weight, g.edge_type)
        return rel.sum_to_dst(messages) + g.dst(x) @ root

    layer = rgcn.compile()
    out = layer(rel.RelationalGraph(edge_index, edge_type, n, r), x, weight, root, norm)

Packed rows (`bitslab.CompressedTable`, `CompressedFeature`, `SlabCache`) may stand in the place of
x: they are decoded as they are multiplied, on a CPU block by block.

After chapter 3 of the thesis that describes Hector (ASPLOS'24): inter-operator level, compact
materialization, linear operator reordering, GEMM and traversal templates.
"""

from .graph import RelationalGraph
from .kept_by_tensors import KeptByTensors
from .layer_report import (
    LayerReport,
    calls_of,
    check_no_packed,
    count_call,
    forget_calls,
    or_own_code,
    overridden,
)
from .layers import (
    ADDED_OF_NODES,
    BIASED_OF_NODES,
    HGT,
    OF_NODES,
    TYPED_MEAN,
    TYPED_SUM,
    WEIGHTED_SUM,
    blend,
    first_rows,
    hgt_of_features,
    projects_in_program,
    rgat,
    rows_of,
)
from .node_types import NodeTypes
from .operator import run_on_edges, run_on_nodes
from .passes import Passes
from .plan_memory import PlanMemoryError
from .program import CompiledProgram, Program, program
from .trace import (
    ProgramError,
    dot,
    exp,
    flatten,
    leaky_relu,
    shared,
    softmax_by_dst,
    split,
    sum_to_dst,
    typed_linear,
)

__all__ = [
    "ADDED_OF_NODES",
    "BIASED_OF_NODES",
    "HGT",
    "OF_NODES",
    "TYPED_MEAN",
    "TYPED_SUM",
    "WEIGHTED_SUM",
    "CompiledProgram",
    "KeptByTensors",
    "LayerReport",
    "NodeTypes",
    "Passes",
    "PlanMemoryError",
    "Program",
    "ProgramError",
    "RelationalGraph",
    "blend",
    "calls_of",
    "check_no_packed",
    "count_call",
    "dot",
    "exp",
    "first_rows",
    "flatten",
    "forget_calls",
    "hgt_of_features",
    "leaky_relu",
    "or_own_code",
    "overridden",
    "program",
    "projects_in_program",
    "rgat",
    "rows_of",
    "run_on_edges",
    "run_on_nodes",
    "shared",
    "softmax_by_dst",
    "split",
    "sum_to_dst",
    "typed_linear",
]
