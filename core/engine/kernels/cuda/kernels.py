"""All kernels of one GPU; each part stands in the file with the name of its .cu text.

What runs a kernel is a `Runner`; the tests put one in its place that runs the same text on a CPU.
"""

from __future__ import annotations

from .append import AppendKernels
from .attend import AttendKernels
from .bags import BagKernels
from .blob_copy import BlobCopyKernels
from .copy import CopyKernels
from .count import CountKernels
from .csr import CsrKernels
from .decode import DecodeKernels
from .encode import EncodeKernels
from .exchange import ExchangeKernels
from .gather import GatherKernels
from .ids import IdKernels
from .join import JoinKernels
from .kept import RowPlacer
from .lz4 import Lz4Kernels
from .map import MapKernels
from .pack import PackKernels
from .packed_linear import PackedLinearKernels
from .plan import PlanKernels
from .quantized import TileKernels
from .rewrite import RewriteKernels
from .rle import RleKernels
from .runner import Runner
from .segment_sums import SegmentKernels
from .slots import SlotKernels
from .survey import SurveyKernels
from .typed_gemm import TypedGemmKernels
from .unpack import UnpackKernels
from .vector_decode import VectorDecodeKernels
from .vector_encode import VectorEncodeKernels
from .zeros import ZeroKernels
from .zfp import ZfpKernels
from .zvc import ZvcKernels


class CudaKernels:
    """The kernels of one GPU.

    Functions that codecs need, packed or raw, are here under the names that they have in
    `kernels.cpu`, with the same arguments and the same bytes. The others are reached by the part
    that they belong to.

    Parameters
    ----------
    runner : Runner
        Of the device.

    Attributes
    ----------
    ids : IdKernels
        Checks ids, orders them, and finds rows of tables back to back.
    map : MapKernels
        Maps ids to locations.
    slots : SlotKernels
        Finds slots of a cache.
    exchange : ExchangeKernels
        Moves rows between a cache and the host.
    bags : BagKernels
        Pools bags of rows.
    segments : SegmentKernels
        Sums over the entries of sparse matrices.
    typed : TypedGemmKernels
        Multiplies rows by the weight of their type.
    """

    def __init__(self, runner: Runner) -> None:
        self.ids = IdKernels(runner)
        self.map = MapKernels(runner)
        self.slots = SlotKernels(runner)
        self.exchange = ExchangeKernels(runner)
        self.bags = BagKernels(runner)
        self.segments = SegmentKernels(runner)
        self.typed = TypedGemmKernels(runner)
        self.survey_edges = SurveyKernels(runner).survey_edges
        self.count_bits = CountKernels(runner).count_bits
        self.count_zeros = ZeroKernels(runner).count_zeros
        plan = PlanKernels(runner)
        self.plan_memory = plan.plan_memory
        self.agreed_masks = plan.agreed_masks
        self.frequent_values = plan.frequent_values
        self.sizes_by_option = plan.sizes_by_option
        encode = EncodeKernels(runner)
        self.packed_words = encode.packed_words
        self.encode_rows = encode.encode_rows
        self.rewrite_rows = RewriteKernels(runner).rewrite_rows
        gather = GatherKernels(runner)
        self.gather_rows = gather.gather_rows
        self.prepare_gather = gather.prepare_gather
        self.prepare_join = JoinKernels(runner).prepare
        decode = DecodeKernels(runner, self.ids, gather)
        self.decode_rows = decode.decode_rows
        self.prepare_decode = decode.prepare_decode
        self.pack_blob = PackKernels(runner).pack_blob
        self.unpack_blob = UnpackKernels(runner, decode).unpack_blob
        self.prepare_linear = PackedLinearKernels(runner).prepare_linear
        self.copy_rows = CopyKernels(runner).copy_rows
        self.copy_blob = BlobCopyKernels(runner).copy_blob
        attend = AttendKernels(runner)
        self.attend, self.prepare_attention = attend.attend, attend.prepare
        self.append_token = AppendKernels(runner).append_token
        tiles = TileKernels(runner)
        self.measure_tiles = tiles.measure_tiles
        self.encode_tiles = tiles.encode_tiles
        self.pack_tiles = tiles.pack_tiles
        self.decode_tiles = tiles.decode_tiles
        self.prepare_tiles = tiles.prepare_tiles
        placer = RowPlacer(runner)
        csr = CsrKernels(runner, placer)
        self.encode_csr, self.decode_csr = csr.encode, csr.decode
        rle = RleKernels(runner, placer)
        self.encode_rle, self.decode_rle = rle.encode, rle.decode
        zfp = ZfpKernels(runner, placer)
        self.encode_zfp, self.decode_zfp = zfp.encode_zfp, zfp.decode_zfp
        lz4 = Lz4Kernels(runner)
        self.encode_lz4, self.decode_lz4 = lz4.encode_lz4, lz4.decode_lz4
        vectors = VectorEncodeKernels(runner)
        self.encode_vector, self.encode_vectors = vectors.encode_vector, vectors.encode_vectors
        self.decode_vectors = VectorDecodeKernels(runner).decode_vectors
        zvc = ZvcKernels(runner)
        self.encode_zvc, self.decode_zvc = zvc.encode_zvc, zvc.decode_zvc
