"""Bitslab: tensors that are cheaper to move."""

from __future__ import annotations

if __name__ != "bitslab":
    raise ImportError("import bitslab, not its folder: this package is installed as 'bitslab'")

__version__ = "0.1.0"

from .codecs import InvariantCodec, PackedRows, RawCodec, RowCodec
from .container import load, load_file, save_file
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    BitslabError,
    CorruptedDataError,
    DecodedCopyWarning,
    IndexRangeError,
    MissingExtraError,
)
from .kernels.cuda import raise_pending_errors
from .memory import hotness
from .memory.feature import CompressedFeature
from .memory.slabs import SlabCache
from .memory.table import CompressedTable
from .memory.unified import UnifiedTensor, unified
from .registry import codec_names, get_codec, register_codec
from .tensor import CompressedTensor, compress, decompress
from .transfer.ring import PrefetchRing

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BitslabError",
    "CompressedFeature",
    "CompressedTable",
    "CompressedTensor",
    "CorruptedDataError",
    "DecodedCopyWarning",
    "IndexRangeError",
    "InvariantCodec",
    "MissingExtraError",
    "PackedRows",
    "PrefetchRing",
    "RawCodec",
    "RowCodec",
    "SlabCache",
    "UnifiedTensor",
    "__version__",
    "codec_names",
    "compress",
    "decompress",
    "get_codec",
    "hotness",
    "load",
    "load_file",
    "raise_pending_errors",
    "register_codec",
    "save_file",
    "unified",
]
