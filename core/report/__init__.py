"""What `bitslab inspect` computes, prints and draws."""

from .codec_rows import CodecInspector, CodecReport, CodecRow, codecs_json, codecs_table
from .measure import Link, TensorReport, Total, as_json, inspect_tensor, total
from .plot import save_plot
from .table import build_table

__all__ = [
    "CodecInspector",
    "CodecReport",
    "CodecRow",
    "Link",
    "TensorReport",
    "Total",
    "as_json",
    "build_table",
    "codecs_json",
    "codecs_table",
    "inspect_tensor",
    "save_plot",
    "total",
]
