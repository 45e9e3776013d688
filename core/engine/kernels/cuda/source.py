"""The text of the CUDA kernels and the variants that they are compiled in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from ....dtypes import EXPONENT_FIELDS
from ..blob_format import (
    ALIGN_BYTES,
    HEADER_BYTES,
    VALUE_BYTES_AT,
    ZVC_BLOCK_BYTES,
    ZVC_FORM,
    ZVC_ONES,
    zvc_blocks,
    zvc_threads,
)
from ..candidates import (
    AGREED,
    CHUNKS,
    COLUMNS,
    COUNTED,
    DIFFERING,
    FIELD,
    FIRST,
    STRIDE,
    SUMS,
    TABLE,
    UNIFORM,
    VALUES,
    WIDTH,
)
from ..format import (
    BUCKET_ENTRIES,
    LINE_BYTES,
    MAX_SLABS,
    NO_ID,
    NO_ROW,
    NO_SLOT,
    NOT_CACHED,
    OFFSET_SHIFT,
    PACKED_BIT,
    PAD_WORDS,
    SLAB_SHIFT,
    RowFormat,
)
from ..kept_format import (
    COLUMN_BYTES,
    COUNT_BYTES,
    CSR_FORM,
    LZ4_BLOCK_BYTES,
    LZ4_FORM,
    RAW,
    RLE_FORM,
    ROW_UNITS,
    RUN_UNITS,
    ZFP_FORM,
)
from ..packed_products import LinearShape
from ..rewriting import DONE, FREE, FREED, LAUNCHES, REWRITTEN, TAKEN, USED
from ..tile_format import (
    ESCAPE_SYMBOL,
    FIELD_AT,
    FIELD_BIAS,
    LEVELS,
    MAX_CODE,
    MAX_SYMBOLS,
    SHORT_BITS,
    TILE_DTYPES,
    ZERO_SYMBOL,
    TileFormat,
)
from ..typed_products import product_settings
from ..vector_chunks import VECTOR_KERNELS, vector_settings
from ..zfp_format import LEAST_EXPONENT, MOST_BLOCK_BITS, PLANE_BITS, FloatKind

_FOLDER = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)

_KERNELS: dict[str, tuple[str, ...]] = {
    "count": ("count_bits",),
    "encode": ("packed_words", "encode_rows", "packed_words_of_short_rows", "encode_short_rows"),
    "rewrite": ("rewrite_rows",),
    "pack": ("pack_blob",),
    "unpack": ("unpack_rest",),
    "decode": ("decode_rows", "decode_long_rows", "decode_short_rows"),
    "gather": ("gather_rows", "gather_long_rows", "gather_short_rows"),
    "join": ("join_rows",),
    "copy": ("copy_rows",),
    "ids": ("check_ids", "reset_order", "count_ids", "order_ids", "rows_of_keys"),
    "map": ("insert_ids", "find_ids"),
    "slots": ("keep_slots", "claim_slots", "count_slots", "choose_slots", "give_slots"),
    "exchange": ("exchange_rows",),
    "blob_copy": ("copy_blob",),
    "bags": ("pool_bags", "pool_long_bags", "sound_offsets"),
    "attend": ("attend_tiles",),
    "append": ("append_token",),
    "plan": (
        "agreed_masks",
        "frequent_by_position",
        "count_values",
        "top_values",
        "sizes_by_option",
    ),
    "zvc": ("encode_zvc", "decode_zvc"),
    "quantized": ("measure_tiles", "encode_tiles", "pack_tiles", "move_tiles", "decode_tiles"),
    "zeros": ("count_zeros",),
    "kept": ("place_rows",),
    "csr": ("count_csr", "pack_csr", "decode_csr"),
    "rle": ("count_rle", "pack_rle", "decode_rle"),
    "lz4": ("place_parts", "move_parts", "find_parts", "check_parts", "finish_parts"),
    "zfp": ("encode_zfp", "pack_zfp", "decode_zfp"),
    "typed_gemm": ("multiply_rows", "multiply_gradient"),
    "packed_linear": ("multiply_packed", "index_exceptions"),
    "segment_sums": (
        "sum_segments",
        "dot_entries",
        "softmax_segments",
        "softmax_segments_gradient",
    ),
    "survey": ("survey_edges",),
    **VECTOR_KERNELS,
}

#: Lanes that pack a short row: eight take four chunks each, a group of codes; four take 16 bytes.
BYTE_FIELD_LANES, WORD_LANES = 8, 4
#: Fewest chunks a lane with which eight lanes can take a row.
MIN_SHORT_VECTOR = 4
#: Most short rows of a tile in order, when eight lanes take a row.
MAX_TILE_ROWS = 128
#: What kernels know of cached rows.
CACHE_DEFINES = {
    "MAX_SLABS": MAX_SLABS,
    "SLAB_SHIFT": SLAB_SHIFT,
    "OFFSET_SHIFT": OFFSET_SHIFT,
    "PACKED_BIT": PACKED_BIT,
    "BUCKET_ENTRIES": BUCKET_ENTRIES,
    "NO_ID": NO_ID,
    "NOT_CACHED": NOT_CACHED,
}
#: What kernels know of places in an overflow area.
REWRITE_DEFINES = {
    "USED": USED,
    "FREE": FREE,
    "TAKEN": TAKEN,
    "FREED": FREED,
    "DONE": DONE,
    "LAUNCHES": LAUNCHES,
    "REWRITTEN": REWRITTEN,
}
#: What kernels know of candidates of a plan.
PLAN_DEFINES = {
    "WIDTH": WIDTH,
    "UNIFORM": UNIFORM,
    "AGREED": AGREED,
    "FIELD": FIELD,
    "FIRST": FIRST,
    "CHUNKS": CHUNKS,
    "COUNTED": COUNTED,
    "STRIDE": STRIDE,
    "TABLE": TABLE,
    "COLUMNS": COLUMNS,
    "VALUES": VALUES,
    "SUMS": SUMS,
    "DIFFERING": DIFFERING,
}
#: Bins that ids are ordered by before a gather from a large table.
ORDER_BINS = 8192
#: Bins that slots are sorted into by the worth of their rows, to find those that leave.
LEAVING_BINS = 2048
#: Bytes that a lane of the copy of raw rows loads at once, and those that it can store at once.
COPY_PIECES = {4: (1, 2, 4), 16: (1, 2, 4, 8, 16)}

#: What kernels know of tensors of which some units are kept.
KEPT_DEFINES: dict[str, int | str] = {
    "HEADER_BYTES": HEADER_BYTES,
    "ALIGN_BYTES": ALIGN_BYTES,
    "ROW_UNITS": ROW_UNITS,
    "RUN_UNITS": RUN_UNITS,
    "RAW": f"({RAW})",
    "COLUMN_BYTES": COLUMN_BYTES,
    "COUNT_BYTES": COUNT_BYTES,
    "CSR_FORM": CSR_FORM,
    "RLE_FORM": RLE_FORM,
    "ZFP_FORM": ZFP_FORM,
}
#: Kernels of whole tensors, which are compiled for each size or kind of element.
NAMED_BY_SETTINGS = {"copy", "bags", "attend", "quantized", "zvc", "typed_gemm", "segment_sums"}
NAMED_BY_SETTINGS |= {"packed_linear", *VECTOR_KERNELS}
UNIT_FILES = ("zeros", "csr", "rle", "zfp")

#: Bytes of the values of rows that are pooled in bags.
BAG_VALUE_BYTES = (4, 8)

#: Groups of four query rows that attention knows.
ATTEND_ROWS = (1, 2, 4)
#: Threads of a multiprocessor whose registers have room for that many products of a tile.
ATTEND_THREADS = ((4, 1024), (8, 768), (16, 384), (64, 256))
#: The same where a row takes half as many.
ATTEND_HALF_THREADS = ((8, 1024), (16, 512), (64, 256))
#: How kernels of attention know dtypes.
VALUE_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
#: Lowest bit of the one-byte exponent fields that have kernels of their own, by chunk_bytes.
BYTE_FIELDS = {
    2: EXPONENT_FIELDS[torch.bfloat16][0],
    4: EXPONENT_FIELDS[torch.float32][0],
}

#: Widths of the chunks of which decoders rebuild whole words at once.
WORD_CHUNKS = (1, 2)

#: What kernels of coded tiles are compiled for.
TILE_SETTINGS = ("KIND", "TOKENS", "DIM", "GRANULARITY", "TOKEN_PAIRS", "LOOKUP_BITS")
#: Warps of a block of the encoders at the most: what registers have room for.
MAX_ENCODE_WARPS = 20
#: Warps of a block of the kernel that moves coded tiles together.
MOVE_WARPS = 8
TILE_DEFINES: dict[str, int | str] = {
    "MOVE_WARPS": MOVE_WARPS,
    "PAD_WORDS": PAD_WORDS,
    "ENCODE_WARPS": MAX_ENCODE_WARPS,
    "ESCAPE_SYMBOL": ESCAPE_SYMBOL,
    "FIELD_AT": FIELD_AT,
    "FIELD_BIAS": FIELD_BIAS,
    "MAX_CODE": MAX_CODE,
    "MAX_SYMBOLS": MAX_SYMBOLS,
    "SHORT_BITS": SHORT_BITS,
    "ZERO_SYMBOL": ZERO_SYMBOL,
    "STEP_LEVELS": LEVELS,
    "NO_ROW": f"({NO_ROW + 1}ll-1)",
}
#: Blocks that pack the rows of a tensor for which a multiprocessor has registers.
PACK_BLOCKS = 4


@cache
def source_text(name: str) -> str:
    """Return ``name``.cu with its headers inlined.

    Inlining makes the text the whole key of the compiler's disk cache, which does not look into
    headers; the #line directives keep the compiler's messages true.
    """
    text = (_FOLDER / f"{name}.cu").read_text()

    def inline(match: re.Match[str]) -> str:
        header = match.group(1)
        line = text.count("\n", 0, match.end()) + 2
        body = (_FOLDER / header).read_text()
        return f'#line 1 "{header}"\n{body}\n#line {line} "{name}.cu"'

    return f'#line 1 "{name}.cu"\n' + _INCLUDE.sub(inline, text)


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel file.

    Parameters
    ----------
    file : str
        ``"count"``, ``"encode"``, ``"rewrite"``, ``"pack"``, ``"decode"``, ``"gather"``,
        ``"join"`` or ``"typed_gemm"``, whose chunks are the values that it multiplies.
    chunk_bytes, code_bits, grouped, uniform
        As in RowFormat; counting knows only chunk_bytes.
    vector : int
        Chunks that a lane of the decoder stores at once, 1 where rows are not aligned for more.
    byte_field : bool
        Whether the mask is the one-byte exponent field of `BYTE_FIELDS`.
    counted : bool
        Whether a decoder reads on the device how many rows there are.
    words : bool
        Whether the mask is applied to whole words of chunks (`tiles.word_field`).
    schedule : int
        Of typed products.
    """

    file: str
    chunk_bytes: int
    code_bits: int = 1
    grouped: bool = False
    uniform: bool = False
    vector: int = 1
    byte_field: bool = False
    counted: bool = False
    words: bool = False
    schedule: int = 0

    def defines(self) -> dict[str, str | int]:
        """Return the preprocessor's definitions."""
        f = RowFormat(
            self.chunk_bytes, self.chunk_bytes, self.code_bits, self.grouped, self.uniform
        )
        defines: dict[str, str | int] = {"CHUNK_BYTES": f.chunk_bytes, "LEVELS": f.levels}
        if self.file == "count":
            return defines
        defines |= {
            "CODE_BITS": f.code_bits,
            "GROUPED": int(f.grouped),
            "UNIFORM": int(f.uniform),
            "KEEP_SECTION": f.keep_section,
            "MASK_SECTION": f.mask_section,
            "SECTIONS": f.sections,
        }
        defines["FIELD_LOW"] = BYTE_FIELDS[self.chunk_bytes] if self.byte_field else -1
        if self.file == "encode":
            # Those that take 16 bytes a lane at once need few registers.
            fast = self.words or (self.byte_field and not self.grouped)
            lanes = short_lanes(self)
            settings = {"WORDS": self.words, "MIN_BLOCKS": 5 if fast else 4, "SHORT_LANES": lanes}
            return defines | {name: int(value) for name, value in settings.items()}
        if self.file == "rewrite":
            return defines | REWRITE_DEFINES
        if self.file == "pack":
            return defines | {"PAD_WORDS": PAD_WORDS, "MIN_BLOCKS": PACK_BLOCKS}
        first_codes = sum(1 << self.code_bits * v for v in range(self.vector))
        wide = self.vector > 1
        if self.file in ("gather", "join"):
            defines |= CACHE_DEFINES
        elif self.file == "typed_gemm":
            defines |= CACHE_DEFINES | product_settings(self.chunk_bytes, self.schedule)
            defines |= {"PACKED": 1, "GRADIENT_BLOCKS": 2 if self.byte_field else 1}
        else:
            defines |= {"COUNTED": int(self.counted), "MAX_TILE_ROWS": MAX_TILE_ROWS}
        return defines | {
            "WORDS": int(self.words),
            "VECTOR": self.vector,
            "FIRST_CODES": f"{first_codes}ull",
            "ROWS": 2 if wide and not self.uniform else 1,
            "MIN_BLOCKS": self.blocks,
        }

    @property
    def blocks(self) -> int:
        """Blocks of a decoder that the registers of a multiprocessor have room for."""
        # Positional masks live in registers over the rows of a warp, as do many or long chunks.
        wide = self.vector > 1
        crowded = not self.words and wide and (not self.uniform or self.chunk_bytes in (1, 8))
        return 3 if crowded else 4

    @property
    def name(self) -> str:
        """Readable name, for tests and logs."""
        if self.file == "count":
            return f"count-{self.chunk_bytes}B"
        words = [self.file, f"{self.chunk_bytes}B", f"k{self.code_bits}"]
        words.append("uniform" if self.uniform else "positional")
        words += ["grouped"] if self.grouped else []
        words += [f"v{self.vector}"] if self.file in ("decode", "gather", "join") else []
        words += ["bytes"] if self.byte_field else []
        words += [word for word in ("words", "counted") if getattr(self, word)]
        words += [f"schedule{self.schedule}"] if self.schedule else []
        return "-".join(words)


@dataclass(frozen=True)
class PlainVariant:
    """One compilation of a kernel file that knows nothing of packed rows.

    Parameters
    ----------
    file : str
        ``"copy"``, ``"ids"``, ``"map"``, ``"slots"``, ``"bags"``, ``"plan"``, ``"attend"``,
        ``"quantized"`` or ``"zvc"``.
    settings : tuple of (str, int)
        The preprocessor's definitions.
    """

    file: str
    settings: tuple[tuple[str, int | str], ...] = ()

    def defines(self) -> dict[str, str | int]:
        """Return the preprocessor's definitions, those of bits.cuh among them."""
        return {"CHUNK_BYTES": 4, "LEVELS": 5, "CODE_BITS": 1, **dict(self.settings)}

    @property
    def name(self) -> str:
        """Readable name, for tests and logs."""
        if self.file in UNIT_FILES:
            return f"{self.file}-" + "-".join(f"{k.lower()}{v}" for k, v in self.settings[:1])
        if self.file not in NAMED_BY_SETTINGS:
            return self.file
        most = {"quantized": len(TILE_SETTINGS), "zvc": 1, "typed_gemm": 3, "packed_linear": 1}
        most |= dict.fromkeys(VECTOR_KERNELS, 2)
        named = self.settings[: most.get(self.file)]
        return "-".join([self.file, *(f"{k.lower()}{v}" for k, v in named)])


AnyVariant = Variant | PlainVariant

#: The one compilation of what is done with ids before a gather.
IDS = PlainVariant("ids", (("BINS", ORDER_BINS),))
#: The one compilation of the map from ids to locations.
MAP = PlainVariant("map", tuple(CACHE_DEFINES.items()))
#: The one compilation of the search for the slots of a batch.
SLOTS = PlainVariant(
    "slots", (("NO_SLOT", NO_SLOT), ("NO_ROW", f"({NO_ROW + 1}ll-1)"), ("BINS", LEAVING_BINS))
)
#: The one compilation of what moves rows between a cache and the host.
EXCHANGE = PlainVariant("exchange")
#: The one compilation of what comes between counting and packing units that are kept.
KEPT = PlainVariant("kept", tuple(KEPT_DEFINES.items()))
#: The one compilation of what puts new tokens behind others.
APPEND = PlainVariant("append")
#: The one compilation of what moves encoded tensors over a link.
BLOB_COPY = PlainVariant("blob_copy")
#: The one compilation of what is checked of packed rows of a whole tensor beside the rows.
UNPACK = PlainVariant("unpack", (("PAD_WORDS", PAD_WORDS), ("VALUE_BYTES_AT", VALUE_BYTES_AT)))
#: The one compilation of what stands around LZ4's blocks.
LZ4 = PlainVariant(
    "lz4",
    (
        ("HEADER_BYTES", HEADER_BYTES),
        ("ALIGN_BYTES", ALIGN_BYTES),
        ("PART_BYTES", LZ4_BLOCK_BYTES),
        ("LZ4_FORM", LZ4_FORM),
    ),
)
#: The one compilation of what a planner counts.
PLAN = PlainVariant("plan", tuple(PLAN_DEFINES.items()))


def zeros_variant(unit_bytes: int) -> PlainVariant:
    """Return the counting of zeros among elements of so many bytes."""
    return PlainVariant("zeros", (("CHUNK_BYTES", unit_bytes),))


def kept_variant(file: str, unit_bytes: int) -> PlainVariant:
    """Return the kernels of ``"csr"`` or ``"rle"`` for units of so many bytes."""
    return PlainVariant(file, (("CHUNK_BYTES", unit_bytes), *KEPT_DEFINES.items()))


def zfp_variant(kind: FloatKind) -> PlainVariant:
    """Return the kernels of zfp's blocks for values of a kind."""
    settings = (
        ("KIND", kind.number),
        ("CHUNK_BYTES", (1 + kind.exponent_bits + kind.fraction_bits) // 8),
        ("FRACTION_BITS", kind.fraction_bits),
        ("EXPONENT_BITS", kind.exponent_bits),
        ("INT_BITS", kind.integer_bits),
        ("HEAD_BITS", kind.head_bits),
        ("PLANE_BITS", PLANE_BITS),
        ("MOST_BLOCK_BITS", MOST_BLOCK_BITS),
        ("LEAST_EXPONENT", f"({LEAST_EXPONENT})"),
    )
    return PlainVariant("zfp", (*settings, *KEPT_DEFINES.items()))


def copy_variant(unit_bytes: int, piece_bytes: int) -> PlainVariant:
    """Return the copy of raw rows that loads `unit_bytes` and stores `piece_bytes` at once."""
    settings = (("UNIT_BYTES", unit_bytes), ("PIECE_BYTES", piece_bytes))
    return PlainVariant("copy", (*settings, ("LINE_BYTES", LINE_BYTES), ("SHIFT", 1)))


def bags_variant(value_bytes: int, vector: int) -> PlainVariant:
    """Return the pooling of bags that takes `vector` floats of `value_bytes` at once."""
    return PlainVariant("bags", (("VALUE_BYTES", value_bytes), ("VECTOR", vector)))


def segment_sums_variant(real_bytes: int, vector: int) -> PlainVariant:
    """Return the sums over entries that load `vector` floats of `real_bytes` at once."""
    return PlainVariant("segment_sums", (("REAL_BYTES", real_bytes), ("VECTOR", vector)))


@cache
def typed_gemm_variant(value_bytes: int, schedule: int = 0) -> PlainVariant:
    """Return the typed products of raw rows, of values of so many bytes."""
    settings = product_settings(value_bytes, schedule) | CACHE_DEFINES
    return PlainVariant("typed_gemm", tuple(settings.items()))


def packed_linear_variant(shape: LinearShape) -> PlainVariant:
    """Return the product with packed weights for some rows of input."""
    return PlainVariant("packed_linear", shape.settings())


def tile_stride(dim: int) -> int:
    """Return the bytes from a token to the next among the codes of a tile in shared memory.

    An odd number of 16 bytes, so that the eight tokens that a warp writes to at once begin in
    banks of their own, four apart; powers of two as they are: their pieces of 16 bytes are swapped.
    """
    even = dim // 16 % 2 == 0
    return dim + 16 if even and dim & (dim - 1) else dim


def decode_stage_bytes(fmt: TileFormat) -> int:
    """Return the shared memory that the decoder has for the values of a tile."""
    return fmt.tokens * tile_stride(fmt.dim) * (2 if fmt.lossless else 1)


def max_decode_warps(fmt: TileFormat) -> int:
    """Return the most warps of a block of the decoder: more have fewer registers each.

    Of large tiles, shared memory has no room for more.
    """
    stage = decode_stage_bytes(fmt)
    return 24 if stage <= 7 << 10 else 20 if stage <= 8 << 10 else 16


def quantized_variant(fmt: TileFormat) -> PlainVariant:
    """Return the kernels of coded tiles of a format."""
    sizes = (
        TILE_DTYPES.index(fmt.dtype),
        fmt.tokens,
        fmt.dim,
        int(fmt.granularity),
        int(fmt.token_pairs),
        fmt.code_bits,
    )
    return PlainVariant(
        "quantized",
        (
            *zip(TILE_SETTINGS, sizes, strict=True),
            ("STRIDE", tile_stride(fmt.dim)),
            ("DECODE_WARPS", max_decode_warps(fmt)),
            ("PARAMETER_WORDS", fmt.parameter_words),
            *TILE_DEFINES.items(),
        ),
    )


def attend_variant(
    groups: int, row_groups: int, dtype: torch.dtype, *, lossless: bool = False
) -> PlainVariant:
    """Return the attention over tiles of `groups` times 16 tokens for four times `row_groups` rows.

    Products of a tile stand in registers: the more there are, the fewer warps run at once. Rows of
    16-bit values stand in one half each where that saves products: see attend_rows.cuh. Weights of
    lossless bfloat16 values are then rounded to bfloat16, by 2 ** -9 at the most, which is the
    largest error of their attention.
    """
    in_two_halves = row_groups == 1 or dtype == torch.float32
    sets = row_groups if in_two_halves else row_groups // 2
    limits = ATTEND_THREADS if in_two_halves else ATTEND_HALF_THREADS
    threads = next(most for limit, most in limits if groups * row_groups <= limit)
    settings = (
        ("GROUPS", groups),
        ("NT", row_groups),
        ("SETS", sets),
        ("VALUE_KIND", VALUE_KINDS[dtype]),
        ("LOSSLESS", int(lossless)),
        ("MAX_THREADS", threads),
    )
    return PlainVariant("attend", settings)


def zvc_variant(unit_bytes: int) -> PlainVariant:
    """Return zero-value compression of elements of so many bytes."""
    return PlainVariant(
        "zvc",
        (
            ("CHUNK_BYTES", unit_bytes),
            ("BLOCK_BYTES", ZVC_BLOCK_BYTES),
            ("HEADER_BYTES", HEADER_BYTES),
            ("ALIGN_BYTES", ALIGN_BYTES),
            ("VALUE_BYTES_AT", VALUE_BYTES_AT),
            ("ONES", f"{ZVC_ONES}u"),
            ("ZVC_FORM", ZVC_FORM),
            ("THREADS", zvc_threads(unit_bytes)),
            ("ENCODE_BLOCKS", zvc_blocks(unit_bytes)),
            ("DECODE_BLOCKS", zvc_blocks(unit_bytes, decodes=True)),
        ),
    )


def vector_variant(file: str, width: int, kind: int) -> PlainVariant:
    """Return kernels of rows of which equal ones are kept once; see `vector_settings`."""
    return PlainVariant(file, vector_settings(width, kind))


def widest_vector(chunk_bytes: int, uniform: bool) -> int:
    """Return the most chunks that a lane of the decoder takes: 16 bytes of them.

    With positional masks at most four, whose masks and steps fit in registers.
    """
    return 16 // chunk_bytes if uniform else min(4, 16 // chunk_bytes)


def short_lanes(variant: Variant) -> int:
    """Return the lanes that pack a short row, of which a warp then packs several; 0: only all."""
    if variant.grouped or not (variant.byte_field or variant.words):
        return 0
    return BYTE_FIELD_LANES if variant.byte_field else WORD_LANES


def kernels_of(variant: AnyVariant) -> tuple[str, ...]:
    """Return the kernels of a compilation."""
    names = _KERNELS[variant.file]
    if not isinstance(variant, Variant):
        return names
    if variant.file == "encode":
        return names if short_lanes(variant) else names[:-2]
    # Eight lanes of fewer chunks are no whole group of codes.
    narrow = variant.file in ("decode", "gather") and variant.vector < MIN_SHORT_VECTOR
    return names[:-1] if narrow else names
