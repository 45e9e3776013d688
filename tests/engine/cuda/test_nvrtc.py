"""The variants of the CUDA kernels compile, without a GPU or a driver.

For one architecture some of each file, which the seed of hypothesis draws among the fastest ones
and those that hold every pair of its settings; for the others one of each file; all for all with
``BITSLAB_FULL=1``. Of those that are not the fastest, the seed draws which are optimised as on a
user's machine. tests/test_gpu.py compiles and runs all of them on a GPU.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import re
import tempfile
from collections.abc import Hashable
from itertools import product
from pathlib import Path

import pytest
from cuda.bindings import nvrtc

from bitslab.engine.kernels.cuda.source import (
    AnyVariant,
    Variant,
    kernels_of,
    source_text,
    typed_gemm_variant,
)
from bitslab.engine.kernels.cuda.variants import all_variants
from bitslab.engine.kernels.typed_products import PRODUCT_DEFINES
from tests import pairwise
from tests.simt.variants import settings_of, variants_run

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
FULLY_OPTIMISED = "sm_90"
VARIANTS = list(all_variants())
KERNELS = Path(__file__).resolve().parents[3] / "core" / "engine" / "kernels" / "cuda"


def fastest(variant: AnyVariant) -> bool:
    """Return whether a variant keeps all its values in registers."""
    if isinstance(variant, Variant) and (variant.counted or variant.schedule):
        return False
    if variant.file == "typed_gemm" and not isinstance(variant, Variant):
        # The others run where they were measured as faster than the usual schedule, and are on an
        # H200 with the 52 bytes that rows of float32 spill for four blocks of a multiprocessor.
        return variant in map(typed_gemm_variant, PRODUCT_DEFINES)
    return (
        not isinstance(variant, Variant)
        or (variant.byte_field and not variant.grouped)
        or (variant.words and not variant.grouped and variant.file != "gather")
        # A spill in these takes a tenth of their speed.
        or (variant.file == "decode" and not variant.grouped and variant.chunk_bytes in (2, 4))
    )


def may_spill(variant: AnyVariant) -> bool:
    """Return whether optimising a variant can show a spill that another does not.

    Codes of fewer bits run the code of those of three, with fewer values to hold; those of one bit
    are compiled in full where they are used most, in the published plan.
    """
    return (
        not isinstance(variant, Variant)
        or variant.code_bits == 3
        or (variant.code_bits == 1 and variant.chunk_bytes == 4)
    )


def for_fully_optimised() -> list[AnyVariant]:
    compiled: list[AnyVariant] = [v for v in VARIANTS if not isinstance(v, Variant)]
    packed = [v for v in VARIANTS if isinstance(v, Variant)]
    for file in dict.fromkeys(v.file for v in packed):
        first = [v for v in packed if v.file == file and may_spill(v) and fastest(v)]
        compiled += variants_run(file, first)
    return compiled


def settings_by_name(variant: AnyVariant) -> dict[str, Hashable]:
    """Return what a variant is compiled with."""
    if isinstance(variant, Variant):
        return {"file": variant.file, **dict(zip("1234567", settings_of(variant), strict=True))}
    return {"file": variant.file, **dict(variant.settings)}


#: Of each file one in so many of these is compiled in a run.
COMPILED_ONE_IN = 3


def compiled_in_this_run() -> list[AnyVariant]:
    """Return some variants of each file, which hold as many of its settings as so few can."""
    compiled = for_fully_optimised()
    if pairwise.FULL:
        return compiled
    drawn = []
    for file in dict.fromkeys(v.file for v in compiled):
        of_file = [v for v in compiled if v.file == file]
        count = -(-len(of_file) // COMPILED_ONE_IN)
        chosen = pairwise.draw([settings_by_name(v) for v in of_file], count, pairwise.seed)
        drawn += [of_file[i] for i in chosen]
    return drawn


COMPILED = compiled_in_this_run()

#: Of the packed rows' kernels that may keep some values in memory, one in so many is optimised.
ONE_IN = 4


def optimised() -> list[AnyVariant]:
    """Return the variants to compile with full optimisation, as on a user's machine.

    The fast compile takes a third of the time and refuses the same mistakes. The fastest are always
    optimised, as is what knows no format. Of tiles and attention one is, which the seed draws; of
    typed products and the other kernels of packed rows a quarter.
    """
    candidates = [v for v in COMPILED if may_spill(v)]
    if pairwise.FULL:
        return candidates
    rng = random.Random(f"optimised {pairwise.seed}")
    chosen = [v for v in candidates if always_optimised(v)]
    for file in dict.fromkeys(v.file for v in candidates):
        others = [v for v in candidates if v.file == file and not always_optimised(v)]
        if others and isinstance(others[0], Variant):
            chosen += rng.sample(others, -(-len(others) // ONE_IN))
        elif others:
            chosen.append(rng.choice(others))
    return chosen


def always_optimised(variant: AnyVariant) -> bool:
    return fastest(variant) and variant.file not in ("attend", "quantized", "typed_gemm")


def for_other_architectures() -> list[tuple[AnyVariant, str]]:
    others = [name for name in ARCHITECTURES if name != FULLY_OPTIMISED]
    cases = list(product(VARIANTS, others))
    if pairwise.FULL:
        return cases
    # A setting and an architecture do not interact: no kernel looks at which it is compiled for.
    files: list[dict[str, Hashable]] = [{"file": v.file, "in": name} for v, name in cases]
    return [cases[i] for i in pairwise.cover(files, pairwise.seed, alone=files[0])]


#: What was compiled before, by the text with all that it includes, the options and the compiler's
#: version. What failed is compiled again.
CACHE = Path(__file__).resolve().parents[3] / "build" / "nvrtc"


def compile_variant(variant: AnyVariant, architecture: str, *extra: str) -> tuple[bytes, str]:
    """Return machine code, or PTX for a virtual architecture, and the compiler's log."""
    options = [
        *extra,
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        "--ptxas-options=-v",
        *(f"-D{name}={value}" for name, value in variant.defines().items()),
    ]
    source = source_text(variant.file)
    parts = (f"{variant.file}.cu", source, *options, *map(str, nvrtc.nvrtcVersion()))
    file = CACHE / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    if file.exists():
        found: tuple[bytes, str] = pickle.loads(file.read_bytes())
        return found
    compiled = compile_text(variant.file, source, architecture, options)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=CACHE, delete=False) as whole:
        whole.write(pickle.dumps(compiled))
    os.replace(whole.name, file)
    return compiled


def compile_text(
    name: str, source: str, architecture: str, options: list[str]
) -> tuple[bytes, str]:
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    try:
        (error,) = nvrtc.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        # Written to: one of a single byte would be Python's own, of everybody.
        log = bytes(size + 1)
        nvrtc.nvrtcGetProgramLog(program, log)
        text = log.decode(errors="replace")
        assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, text
        virtual = architecture.startswith("compute")
        get_size = nvrtc.nvrtcGetPTXSize if virtual else nvrtc.nvrtcGetCUBINSize
        get_code = nvrtc.nvrtcGetPTX if virtual else nvrtc.nvrtcGetCUBIN
        _, size = get_size(program)
        code = bytes(size + 1)
        get_code(program, code)
        return code[:size], text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.file == "bags"], ids=lambda v: v.name)
def test_sums_of_rows_keep_subnormals(variant):
    code, _ = compile_variant(variant, "compute_90", "-ftz=true")  # as cupy compiles
    text = code.decode()
    assert "pool_bags" in text and ".ftz" not in text


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "variant", [v for v in VARIANTS if v.file == "quantized"][:3], ids=lambda v: v.name
)
def test_values_of_tiles_are_rounded_by_themselves_and_keep_subnormals(variant):
    code, _ = compile_variant(variant, "compute_90", "-ftz=true")  # as cupy compiles
    operations = re.findall(
        r"^\s+((?:add|sub|mul|fma|rcp|div)\S*f32 .*);", code.decode(), re.MULTILINE
    )
    assert any(each.startswith("mul.rn.f32") for each in operations)
    # Exact but for these two: from a byte of a code to a float.
    others = [each for each in operations if ".ftz" in each or each.startswith("fma")]
    assert others and all("0fCB000080" in each for each in others)


def assert_compiles(variant: AnyVariant, architecture: str, *extra: str) -> str:
    """Return the compiler's log."""
    code, log = compile_variant(variant, architecture, *extra)
    assert "warning" not in log and "error" not in log, log
    for kernel in kernels_of(variant):
        assert kernel.encode() in code
    return log


OPTIMISED = optimised()


@pytest.mark.parametrize("variant", COMPILED, ids=lambda v: v.name)
def test_variants_compile(variant):
    extra = () if variant in OPTIMISED else ("-Ofc=max",)
    log = assert_compiles(variant, FULLY_OPTIMISED, *extra)
    if variant in OPTIMISED:
        spilled_bytes = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
        # Functions that are not inlined are listed beside the kernels.
        assert len(spilled_bytes) >= len(kernels_of(variant)), log
        # A few registers may wait in memory between tiles; the fastest kernels, and those that
        # unpack nothing, keep all.
        limit = 0 if fastest(variant) else 256 if variant.file == "gather" else 128
        if variant.file == "attend":
            limit = 512  # what a tile needs once; twice the warps at once are worth it
        assert max(spilled_bytes) <= limit, log


@pytest.mark.parametrize(
    ("variant", "architecture"),
    for_other_architectures(),
    ids=lambda given: given if isinstance(given, str) else given.name,
)
def test_variants_compile_for_other_architectures(variant, architecture):
    assert_compiles(variant, architecture, "-Ofc=max")


def test_no_kernel_looks_at_its_architecture():
    # Or a setting could compile for one architecture and not for another.
    files = [path for path in KERNELS.rglob("*") if path.suffix in (".cu", ".cuh")]
    assert files
    assert not [path.name for path in files if "__CUDA_ARCH" in path.read_text()]


def test_variants_have_names_of_their_own():
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(names)
