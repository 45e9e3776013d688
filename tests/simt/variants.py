"""Which variants of the kernels of packed rows are compiled and run here.

Compiling one takes g++ about a second, and so it does NVRTC: tests/engine/cuda/test_nvrtc.py
compiles some that hold every pair of settings, and a fifth of these, other ones with each seed, run
here. tests/test_gpu.py runs all of them on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from bitslab.engine.kernels.cuda.source import Variant
from bitslab.engine.kernels.cuda.variants import all_variants
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
        variant.words,
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
    return [variants[i] for i in pairwise.cover(_cases_of(variants), pairwise.seed, anyway)]


def variants_drawn(file: str, first: Sequence[Variant] = ()) -> list[Variant]:
    """Return a fifth of `variants_run`, chosen by the seed, and those of `first`.

    They hold as many settings as so few can; all of them
    with ``BITSLAB_FULL=1``.
    """
    variants = variants_run(file, first)
    if pairwise.FULL:
        return variants
    drawn = pairwise.draw(_cases_of(variants), -(-len(variants) // 5), pairwise.seed)
    chosen = {*drawn, *(variants.index(variant) for variant in first)}
    return [variants[i] for i in sorted(chosen)]


def _cases_of(variants: Sequence[Variant]) -> list[pairwise.Case]:
    return [dict(zip("1234567", settings_of(variant), strict=True)) for variant in variants]
