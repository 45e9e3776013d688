"""What `bitslab inspect` computes, prints and draws."""

from .measure import Link, TensorReport, Total, as_json, inspect_tensor, total
from .plot import save_plot
from .table import build_table

__all__ = [
    "Link",
    "TensorReport",
    "Total",
    "as_json",
    "build_table",
    "inspect_tensor",
    "save_plot",
    "total",
]
