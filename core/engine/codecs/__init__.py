"""The codecs, one file or folder each, and the contract that they share."""

from ..kernels.host_rows import HostRowKernels
from ..kernels.row_kernels import RowKernels
from .base import PackedRows, RowCodec, check_tensor_argument, elements, rows_as_bytes
from .blob import Blob, BlobCodec, FlatCodec, check_decode_arguments, check_encode_arguments
from .chain import ChainCodec
from .csr import CsrCodec
from .invariant import InvariantCodec, PlanCache
from .lz4 import Lz4Codec
from .packed_blob import InvariantBlobCodec
from .quantized import TileCodec
from .raw import RawCodec
from .registry import (
    blob_codec_class,
    codec_class,
    codec_names,
    get_codec,
    register_codec,
    row_codec_class,
)
from .rle import RleCodec
from .sparsity import count_zeros
from .vectors import BoundedVectorCodec, VectorLzCodec
from .words import WordRowCodec
from .zfp import ZfpCodec
from .zvc import ZvcCodec

__all__ = [
    "Blob",
    "BlobCodec",
    "BoundedVectorCodec",
    "ChainCodec",
    "CsrCodec",
    "FlatCodec",
    "HostRowKernels",
    "InvariantBlobCodec",
    "InvariantCodec",
    "Lz4Codec",
    "PackedRows",
    "PlanCache",
    "RawCodec",
    "RleCodec",
    "RowCodec",
    "RowKernels",
    "TileCodec",
    "VectorLzCodec",
    "WordRowCodec",
    "ZfpCodec",
    "ZvcCodec",
    "blob_codec_class",
    "check_decode_arguments",
    "check_encode_arguments",
    "check_tensor_argument",
    "codec_class",
    "codec_names",
    "count_zeros",
    "elements",
    "get_codec",
    "register_codec",
    "row_codec_class",
    "rows_as_bytes",
]
