"""Which variants of the kernels of packed rows are compiled and run here.

Compiling one takes g++ about a second, and so it does NVRTC: here, and in
tests/engine/cuda/test_nvrtc.py, go those that hold every pair of settings. tests/test_gpu.py runs
all of them on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from bitslab.engine.kernels.cuda.source import Variant, all_variants
from tests import pairwise


def settings_of(variant: Variant) -> tuple[int, ...]:
    """Return what a variant is compiled with, setting by setting."""
    return (
        variant.chunk_bytes,
        variant.code_bits,
        variant.grouped,
        variant.uniform,
        variant.vector > 1,
        variant.byte_field,
    )


def variants_run(file: str, first: Sequence[Variant] = ()) -> list[Variant]:
    """Return variants of a file that hold every pair of settings, with those of `first`.

    All of them with ``BITSLAB_FULL=1``.
    """
    # Those of which the device counts the rows run as part of a chain of codecs (test_pack.py).
    variants = [
        v for v in all_variants() if isinstance(v, Variant) and v.file == file and not v.counted
    ]
    if pairwise.FULL:
        return variants
    anyway = [variants.index(variant) for variant in first]
    settings = [dict(zip("123456", settings_of(v), strict=True)) for v in variants]
    return [variants[i] for i in pairwise.cover(settings, pairwise.seed, anyway)]
