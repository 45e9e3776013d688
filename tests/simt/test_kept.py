"""Forms that keep some units of a tensor: the kernels write and read what their twins do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cuda import CudaKernels
from bitslab.engine.kernels.cuda.kept import RowPlacer
from bitslab.engine.kernels.cuda.runner import BLOB_ERROR
from bitslab.engine.kernels.kept_format import COLUMN_BYTES, COUNT_BYTES, ROW_UNITS, KeptLayout
from bitslab.engine.kernels.zfp_format import zfp_layout
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner, simt_kernels

FILL = 0xA5
PLACE_BYTES = {"csr": COLUMN_BYTES, "rle": COUNT_BYTES}


def units_of(kind: str, n: int, unit: int, seed: int) -> torch.Tensor:
    """Return the bytes of n units: a part zeros and a part runs, or hardly any, or none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 256, (n, unit), generator=generator, dtype=torch.uint8)
    if kind == "some":
        x[torch.rand(n, generator=generator) < 0.6] = 0
        x[n // 3 : n // 2] = x[: n // 2 - n // 3].clone() // 255
    elif kind == "few":
        x[:] = 0
        x[::1000] = 3
    elif kind == "zeros":
        x[:] = 0
    return x.view(-1)


def run_both(
    form: str, kernels: CudaKernels, given: Any, x: torch.Tensor, layout: KeptLayout
) -> torch.Tensor:
    """Encode and decode with the kernels and their twins; return the bytes that are used."""
    most = layout.max_bytes
    by_twin = torch.full((most,), FILL, dtype=torch.uint8)
    getattr(cpu, f"encode_{form}")(x, *given, by_twin)
    used = int(by_twin[:8].view(torch.int64))
    # Behind the end is a forbidden page, but for what makes its beginning a multiple of 16.
    room = guarded(torch.full((-(-most // 16) * 16,), FILL, dtype=torch.uint8))
    found = room[:most]
    getattr(kernels, f"encode_{form}")(x, *given, found)
    assert torch.equal(found[:used], by_twin[:used])
    assert (room[most:] == FILL).all()
    data = guarded(torch.cat([found[:used], torch.zeros(-used % 16, dtype=torch.uint8)]))[:used]
    decoded = []
    for backend in (cpu, kernels):
        out = guarded(torch.full_like(x, FILL))
        assert getattr(backend, f"decode_{form}")(data, *given, out)
        decoded.append(out)
    assert torch.equal(*decoded)
    if form != "zfp":
        assert torch.equal(decoded[0], x)
    return data


@pytest.mark.drawn(8)
@pytest.mark.parametrize(("form", "unit"), [("csr", 4), ("csr", 1), ("rle", 8), ("rle", 2)])
@pytest.mark.parametrize("kind", ["some", "few", "zeros", "dense"])
def test_units_are_kept_like_their_twins_keep_them(form, unit, kind):
    kernels, runner = simt_kernels(seed=3)
    for n in (1, 37, ROW_UNITS, 2 * ROW_UNITS + 333):
        x = guarded(units_of(kind, n, unit, n))
        layout = KeptLayout(n, unit, PLACE_BYTES[form])
        data = run_both(form, kernels, (unit,), x, layout)
        if n > 2 * ROW_UNITS and (kind, unit) != ("some", 1):
            assert (len(data) == layout.raw_bytes) == (kind == "dense")
    assert not runner.mailbox.any()


def test_elements_of_16_bytes_are_two_units():
    kernels, _ = simt_kernels()
    x = guarded(units_of("some", 2 * 501, 8, 1))
    run_both("rle", kernels, (16,), x, KeptLayout(501, 16, COUNT_BYTES))


def test_a_tensor_of_nothing_is_a_header():
    kernels, _ = simt_kernels()
    empty = torch.empty(0, dtype=torch.uint8)
    for form, given, layout in (
        ("csr", (4,), KeptLayout(0, 4, COLUMN_BYTES)),
        ("rle", (8,), KeptLayout(0, 8, COUNT_BYTES)),
        ("zfp", (torch.float32, 32), zfp_layout(0, torch.float32, 32)),
    ):
        assert len(run_both(form, kernels, given, empty, layout)) == 32


def test_many_rows_are_placed_by_one_block():
    placer = RowPlacer(SimtRunner())
    n = ROW_UNITS * (1024 * 8 + 3)
    x = torch.zeros(n, dtype=torch.uint8)
    x[::3001] = 1
    layout = KeptLayout(n, 1, COLUMN_BYTES)
    by_twin = torch.zeros(layout.max_bytes, dtype=torch.uint8)
    cpu.encode_csr(x, 1, by_twin)
    used = int(by_twin[:8].view(torch.int64))
    starts = by_twin[layout.starts_at : layout.values_at].view(torch.int64)
    found = torch.full((layout.values_at + 9000,), FILL, dtype=torch.uint8)
    counts = found[layout.starts_at : layout.values_at].view(torch.int64)
    counts[: layout.rows] = starts[: layout.rows + 1].diff()
    placer.place(layout, 16, True, found)
    assert torch.equal(found[: layout.values_at], by_twin[: layout.values_at])
    assert int(found[:8].view(torch.int64)) == used


def values_of(dtype: torch.dtype, n: int, bad: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    t = torch.randn(n, generator=generator) * torch.exp2(
        torch.randint(-20, 15, (n,), generator=generator)
    )
    t[n // 2 :] *= torch.rand(n - n // 2, generator=generator) < 0.3
    t = t.to(dtype)
    if bad == "few":
        t[n // 3], t[n - 1] = float("nan"), float("-inf")
    elif bad == "many":
        t[::2] = float("inf")
    return t


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_streams_are_those_of_the_twin(dtype):
    kernels, runner = simt_kernels(seed=5)
    cases = (
        (1, 20, "none"),
        (2, 33, "few"),
        (127, 128, "few"),
        (131, 47, "none"),
        (ROW_UNITS + 130, 21, "few"),
        (ROW_UNITS + 258, 60, "many"),
        (2 * ROW_UNITS + 3, 33, "none"),
    )
    for n, bits, bad in cases:
        x = guarded(values_of(dtype, n, bad).view(torch.uint8))
        run_both("zfp", kernels, (dtype, bits), x, zfp_layout(n, dtype, bits))
    tiny = torch.rand(64).double().mul(2.0**-1060).to(dtype)  # 0, but in float64
    tiny[:20] = torch.finfo(dtype).smallest_normal / 8 * torch.arange(20)
    tiny[20:40] = torch.finfo(dtype).max
    run_both("zfp", kernels, (dtype, 61), tiny.view(torch.uint8), zfp_layout(64, dtype, 61))
    assert not runner.mailbox.any()


# Addresses, budgets, damage


@pytest.mark.parametrize("form", ["csr", "rle", "zfp"])
def test_tensors_at_any_address(form):
    kernels, _ = simt_kernels()
    given = (torch.bfloat16, 30) if form == "zfp" else (2,) if form == "rle" else (4,)
    unit = 4 if form == "csr" else 2
    n = ROW_UNITS + 77
    memory = torch.zeros(unit * (n + 8), dtype=torch.uint8)
    first = unit + (-memory.data_ptr()) % 16
    x = memory[first : first + unit * n]
    x[:] = values_of(torch.bfloat16, unit * n // 2, "few").view(torch.uint8)
    layout = zfp_layout(n, *given) if form == "zfp" else KeptLayout(n, unit, PLACE_BYTES[form])
    expected = torch.zeros(layout.max_bytes, dtype=torch.uint8)
    getattr(cpu, f"encode_{form}")(x, *given, expected)
    found = torch.zeros(layout.max_bytes, dtype=torch.uint8)
    getattr(kernels, f"encode_{form}")(x, *given, found, 1)
    used = int(expected[:8].view(torch.int64))
    assert torch.equal(found[:used], expected[:used])
    aligned = torch.empty_like(x)
    assert getattr(cpu, f"decode_{form}")(found, *given, aligned)
    memory[:] = FILL
    getattr(kernels, f"decode_{form}")(found, *given, x, 1)
    assert torch.equal(x, aligned)
    assert (memory[:first] == FILL).all() and (memory[first + unit * n :] == FILL).all()


def test_a_budget_says_how_many_blocks_run():
    for budget, blocks in ((None, 16), (1, 8), (9, 16)):
        kernels, runner = simt_kernels()
        n = 20 * ROW_UNITS
        out = torch.zeros(n + 64, dtype=torch.uint8)
        kernels.encode_csr(torch.zeros(n, dtype=torch.uint8), 1, out, budget)
        kernels.decode_csr(out, 1, torch.ones(n, dtype=torch.uint8), budget)
        assert [grid[0] for grid in runner.grids] == [blocks, 1, blocks, blocks]


def decoded(kernels: Callable[..., Any], data: torch.Tensor, given: Any, n: int) -> torch.Tensor:
    out = guarded(torch.full((n,), FILL, dtype=torch.uint8))
    kernels(data, *given, out)
    return out


@pytest.mark.parametrize("form", ["csr", "rle", "zfp"])
def test_damage_is_reported_or_contained_in_the_tensor(form):
    kernels, runner = simt_kernels()
    n = 40
    given = (torch.float32, 24) if form == "zfp" else (4,) if form == "csr" else (8,)
    bytes_ = n * (8 if form == "rle" else 4)
    if form == "zfp":
        x = values_of(torch.float32, n, "few").view(torch.uint8)
    else:
        x = units_of("some", n, bytes_ // n, 2)
    layout = (
        zfp_layout(n, *given) if form == "zfp" else KeptLayout(n, bytes_ // n, PLACE_BYTES[form])
    )
    data = torch.zeros(layout.max_bytes, dtype=torch.uint8)
    getattr(cpu, f"encode_{form}")(x, *given, data)
    used = int(data[:8].view(torch.int64))
    data = guarded(torch.cat([data[:used], torch.zeros(-used % 16, dtype=torch.uint8)]))
    view = data[:used]
    decode, twin = getattr(kernels, f"decode_{form}"), getattr(cpu, f"decode_{form}")
    right = decoded(decode, view, given, bytes_)
    assert not runner.mailbox.any()
    reported = 0
    stream = range(32, layout.before_bytes) if form == "zfp" else range(0)
    for place in range(0, used):
        if place in stream and place % 7:
            continue  # whatever a stream holds, it is read as one
        for bit in (0, 3, 7):
            data[place] ^= 1 << bit
            runner.mailbox.zero_()
            found = decoded(decode, view, given, bytes_)
            error = int(runner.mailbox[0])
            assert error in (0, BLOB_ERROR)
            reported += error > 0
            expected = torch.full((bytes_,), FILL, dtype=torch.uint8)
            assert twin(view, *given, expected) == (error == 0), (place, bit)
            if error == 0:
                assert torch.equal(found, expected)
            if place < 32:
                assert error or torch.equal(found, right), place
            data[place] ^= 1 << bit
    assert reported > 50
    for short in (0, 16, 24):
        runner.mailbox.zero_()
        decode(data[: used - 1 - short], *given, guarded(torch.zeros(bytes_, dtype=torch.uint8)))
        assert int(runner.mailbox[0]) == BLOB_ERROR and int(runner.mailbox[1]) == -1
