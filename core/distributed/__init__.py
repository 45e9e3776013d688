"""Collectives whose messages are compressed, of every bit or within an error bound.

`all_to_all_single` takes the place of torch's. `CompressedAllToAll` is the same with gradients, a
bound that changes over the iterations, and sums of gradients by row. Tensors on the CPU cross by
gloo, those on a GPU by NCCL.
"""

from .autograd import CompressedAllToAll
from .bounds import (
    AdaptiveBound,
    ErrorBound,
    bound_classes,
    constant,
    drop,
    homogenisation_index,
    linear,
    logarithmic,
    stepwise,
)
from .collective import all_to_all_single
from .faults import ExchangeError
from .function import TablesInFlight
from .plan import Table
from .work import ExchangeWork

__all__ = [
    "AdaptiveBound",
    "CompressedAllToAll",
    "ErrorBound",
    "ExchangeError",
    "ExchangeWork",
    "Table",
    "TablesInFlight",
    "all_to_all_single",
    "bound_classes",
    "constant",
    "drop",
    "homogenisation_index",
    "linear",
    "logarithmic",
    "stepwise",
]
