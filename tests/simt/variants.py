"""Which variants of the kernels of packed rows are compiled and run here.

Compiling one takes g++ two to three seconds. tests/engine/cuda/test_nvrtc.py compiles all of them,
and tests/test_gpu.py runs them on a GPU; here those run that hold every pair of settings.
"""

from __future__ import annotations

from collections.abc import Sequence

from bitslab.engine.kernels.cuda.source import Variant, all_variants
from tests import pairwise


def settings_of(variant: Variant) -> dict[str, int]:
    """Return what a variant is compiled with, setting by setting."""
    return {
        "chunk_bytes": variant.chunk_bytes,
        "code_bits": variant.code_bits,
        "grouped": variant.grouped,
        "uniform": variant.uniform,
        "wide": variant.vector > 1,
        "byte_field": variant.byte_field,
    }


def variants_run(file: str, first: Sequence[Variant] = ()) -> list[Variant]:
    """Return the variants of a file that run on the CPU, by those that `first` says run anyway.

    All of them with ``BITSLAB_FULL=1``.
    """
    variants = [v for v in all_variants() if isinstance(v, Variant) and v.file == file]
    if pairwise.FULL:
        return variants
    anyway = [variants.index(variant) for variant in first]
    settings = [settings_of(variant) for variant in variants]
    return [variants[i] for i in pairwise.cover(settings, pairwise.seed, anyway)]
