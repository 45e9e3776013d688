"""The codecs, one file or folder each, and the contract that they share."""

from ..kernels.host_rows import HostRowKernels
from ..kernels.row_kernels import RowKernels
from .base import PackedRows, RowCodec, check_tensor_argument, elements, rows_as_bytes
from .invariant import InvariantCodec, PlanCache
from .quantized import TileCodec
from .raw import RawCodec
from .registry import codec_class, codec_names, get_codec, register_codec
from .sparsity import count_zeros
from .words import WordRowCodec

__all__ = [
    "HostRowKernels",
    "InvariantCodec",
    "PackedRows",
    "PlanCache",
    "RawCodec",
    "RowCodec",
    "RowKernels",
    "TileCodec",
    "WordRowCodec",
    "check_tensor_argument",
    "codec_class",
    "codec_names",
    "count_zeros",
    "elements",
    "get_codec",
    "register_codec",
    "rows_as_bytes",
]
