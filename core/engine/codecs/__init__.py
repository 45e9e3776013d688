"""The codecs, one file or folder each, and the contract that they share."""

from .base import PackedRows, RowCodec
from .invariant import InvariantCodec
from .raw import RawCodec

__all__ = ["InvariantCodec", "PackedRows", "RawCodec", "RowCodec"]
