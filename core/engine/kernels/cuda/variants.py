"""Every variant of the kernels that the library can ask for, as tests compile and run them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from ..blob_format import ZVC_UNIT_BYTES
from ..format import CHUNK_BYTES, CODE_BITS
from ..packed_products import LINEAR_SHAPES
from ..tile_format import TILE_FORMATS
from ..typed_products import PRODUCT_DEFINES, schedules_of
from ..vector_chunks import VECTOR_KERNELS, VECTOR_NUMBERS
from ..zfp_format import FLOAT_KINDS
from .source import (
    APPEND,
    ATTEND_ROWS,
    BAG_VALUE_BYTES,
    BLOB_COPY,
    BYTE_FIELDS,
    COPY_PIECES,
    EXCHANGE,
    IDS,
    KEPT,
    LZ4,
    MAP,
    MIN_SHORT_VECTOR,
    PLAN,
    SLOTS,
    UNPACK,
    VALUE_KINDS,
    WORD_CHUNKS,
    AnyVariant,
    Variant,
    attend_variant,
    bags_variant,
    copy_variant,
    kept_variant,
    packed_linear_variant,
    quantized_variant,
    segment_sums_variant,
    typed_gemm_variant,
    vector_variant,
    widest_vector,
    zeros_variant,
    zfp_variant,
    zvc_variant,
)
from .survey import SURVEY


def all_variants() -> Iterator[AnyVariant]:
    """Yield every variant that the library can ask for; of tiles and attention some."""
    yield IDS
    yield MAP
    yield SLOTS
    yield EXCHANGE
    yield BLOB_COPY
    yield APPEND
    yield UNPACK
    yield LZ4
    yield PLAN
    yield KEPT
    yield SURVEY
    yield from map(zfp_variant, FLOAT_KINDS.values())
    yield from map(quantized_variant, TILE_FORMATS)
    yield from map(zvc_variant, ZVC_UNIT_BYTES)
    yield from (vector_variant(f, w, k) for f in VECTOR_KERNELS for w, k in VECTOR_NUMBERS)
    for size in BAG_VALUE_BYTES:
        yield from (bags_variant(size, vector) for vector in (1, 16 // size))
    # Attention knows tiles of any number of groups of 16 tokens up to 16: here the usual one, the
    # smallest and the largest, which for more rows spills its products.
    for groups, rows, dtype in (
        *((4, rows, torch.bfloat16) for rows in ATTEND_ROWS),
        *((4, 1, dtype) for dtype in VALUE_KINDS if dtype != torch.bfloat16),
        (1, 1, torch.bfloat16),
        (16, 1, torch.bfloat16),
    ):
        yield attend_variant(groups, rows, dtype)
    for groups, rows, dtype in (
        *((4, rows, torch.bfloat16) for rows in ATTEND_ROWS),
        (4, 1, torch.float16),
        (1, 2, torch.float16),
        (16, 1, torch.bfloat16),
    ):
        yield attend_variant(groups, rows, dtype, lossless=True)
    yield from (typed_gemm_variant(w, i) for w in PRODUCT_DEFINES for i in schedules_of(w, False))
    yield from map(packed_linear_variant, LINEAR_SHAPES)
    yield from (segment_sums_variant(size, v) for size in (4, 8) for v in (1, 16 // size))
    for unit, pieces in COPY_PIECES.items():
        yield from (copy_variant(unit, piece) for piece in pieces)
    for width in CHUNK_BYTES:
        yield Variant("count", width)
        yield zeros_variant(width)
        yield from (kept_variant(file, width) for file in ("csr", "rle"))
    for width, bits, grouped, uniform in product(
        CHUNK_BYTES, CODE_BITS, (False, True), (False, True)
    ):
        yield Variant("encode", width, bits, grouped, uniform)
        yield Variant("rewrite", width, bits, grouped, uniform)
        if uniform:
            yield Variant("pack", width, bits, grouped, uniform)
        for vector in (1, widest_vector(width, uniform)):
            yield Variant("decode", width, bits, grouped, uniform, vector)
            if uniform:  # as all rows of whole tensors
                yield Variant("decode", width, bits, grouped, uniform, vector, counted=True)
            yield Variant("gather", width, bits, grouped, uniform, vector)
            if vector >= MIN_SHORT_VECTOR:
                yield Variant("join", width, bits, grouped, uniform, vector)
        if uniform and width in WORD_CHUNKS:
            by_words = Variant(
                "decode", width, bits, grouped, True, widest_vector(width, True), words=True
            )
            yield from (by_words, replace(by_words, counted=True))
            yield from (replace(by_words, file=file) for file in ("gather", "join"))
            if not grouped:
                yield Variant("encode", width, bits, uniform=True, words=True)
        if width in PRODUCT_DEFINES:
            widest = widest_vector(width, uniform)
            yield Variant("typed_gemm", width, bits, grouped, uniform, widest)
    for width, grouped in product(BYTE_FIELDS, (False, True)):
        yield Variant("encode", width, 3, grouped, True, byte_field=True)
        yield Variant("rewrite", width, 3, grouped, True, byte_field=True)
        yield Variant("pack", width, 3, grouped, True, byte_field=True)
        widest = widest_vector(width, True)
        for file in ("decode", "gather", "join", "typed_gemm"):
            yield Variant(file, width, 3, grouped, True, widest, True)
        for i in schedules_of(width, True)[1:]:
            yield Variant("typed_gemm", width, 3, grouped, True, widest, True, schedule=i)
        yield Variant("decode", width, 3, grouped, True, widest, True, counted=True)
