"""Which variants of the kernels of packed rows are compiled and run here.

Compiling one takes g++ one to two seconds. tests/engine/cuda/test_nvrtc.py compiles all of them,
and tests/test_gpu.py runs them on a GPU; here those run that hold every pair of settings.
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
    """Return the variants of a file that run on the CPU, by those that `first` says run anyway.

    All of them with ``BITSLAB_FULL=1``.
    """
    variants = [v for v in all_variants() if isinstance(v, Variant) and v.file == file]
    if pairwise.FULL:
        return variants
    anyway = [variants.index(variant) for variant in first]
    settings = [dict(zip("123456", settings_of(v), strict=True)) for v in variants]
    return [variants[i] for i in pairwise.cover(settings, pairwise.seed, anyway)]
