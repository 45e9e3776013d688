"""Whole tensors of rows of which equal ones are kept once: of every bit, or within a bound."""

from .codec import BoundedVectorCodec, VectorLzCodec
from .decoding import decode_body
from .encoding import encode_body, finite_range
from .streams import packed_fields, unpacked_fields

__all__ = [
    "BoundedVectorCodec",
    "VectorLzCodec",
    "decode_body",
    "encode_body",
    "finite_range",
    "packed_fields",
    "unpacked_fields",
]
