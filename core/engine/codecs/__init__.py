"""The codecs, one file or folder each, and the contract that they share."""

from .base import PackedRows, RowCodec, check_tensor_argument, elements
from .invariant import InvariantCodec
from .raw import RawCodec
from .registry import codec_names, get_codec, register_codec

__all__ = [
    "InvariantCodec",
    "PackedRows",
    "RawCodec",
    "RowCodec",
    "check_tensor_argument",
    "codec_names",
    "elements",
    "get_codec",
    "register_codec",
]
