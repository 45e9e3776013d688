"""The figures, the table and the picture of `bitslab inspect`."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import bitslab
from bitslab.report import (
    Link,
    TensorReport,
    as_json,
    build_table,
    inspect_tensor,
    save_plot,
    total,
)
from bitslab.report.measure import bit_shares
from bitslab.report.plot import float_regions
from tests.forked import run_forked
from tests.helpers import DTYPES, dtype_id, packable, random_bits

PNG = b"\x89PNG\r\n\x1a\n"


def printed(reports: list[TensorReport], link: Link | None = None) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(build_table(reports, link))
    return out.getvalue()


# Figures


def test_report_says_what_compress_did() -> None:
    t = packable(torch.bfloat16, (500, 64))
    ct = bitslab.compress(t)
    report = inspect_tensor("w", t)
    assert report.name == "w"
    assert report.shape == (500, 64)
    assert report.dtype == "bfloat16"
    assert report.plan == ct.codec.describe()
    assert report.raw_bytes == ct.raw_nbytes
    assert report.packed_bytes == ct.nbytes
    assert report.ratio == ct.ratio
    assert report.saved_mb == pytest.approx((ct.raw_nbytes - ct.nbytes) / 1e6)


def test_compressed_tensor_is_reported_as_it_is() -> None:
    t = packable(torch.bfloat16, (500, 64))
    ct = bitslab.compress(t, "ibp", code_bits=1)
    report = inspect_tensor("w", ct, "raw")
    assert report.plan == ct.codec.describe()
    assert report.packed_bytes == ct.nbytes
    assert report.equal_bits == inspect_tensor("w", t).equal_bits


def test_options_and_codec_are_passed_on() -> None:
    t = packable(torch.bfloat16, (500, 64))
    assert inspect_tensor("w", t, "raw").plan == "raw"
    assert inspect_tensor("w", t, "ibp", code_bits=1, chunk_bytes=2).plan.startswith("ibp 2B k1")


def test_bits_are_counted_from_the_least_significant() -> None:
    t = torch.tensor([[1, 2], [1, 6], [1, 2], [1, 2]], dtype=torch.int16).repeat(8, 16)
    share, equal = bit_shares(t)
    # Bit 0 is set in every other number, bit 1 in the others, bit 2 in one of eight.
    assert equal == pytest.approx((0.5, 0.5, 0.875) + (1.0,) * 13)
    # By position 0 and 1 are invariant; bit 2 of every other position agrees in 75 % of the rows.
    assert share == pytest.approx(1 - 0.5 / 16)


@pytest.mark.parametrize(("ones", "expected"), [(79, 0.0), (80, 1.0), (20, 1.0), (21, 0.0)])
def test_invariant_means_at_least_80_percent_of_the_rows(ones: int, expected: float) -> None:
    t = torch.zeros(100, 64, dtype=torch.uint8)
    t[:ones] = 255
    assert bit_shares(t)[0] == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_every_dtype_has_a_share_for_each_bit(dtype: torch.dtype) -> None:
    t = random_bits(dtype, (300, 32))
    report = inspect_tensor("x", t)
    bits = 8 * dtype.itemsize // (2 if dtype.is_complex else 1)
    assert len(report.equal_bits) == bits
    assert all(0.5 <= share <= 1 for share in report.equal_bits)
    numbers = t.view(torch.uint8).numpy().reshape(-1, bits // 8)
    expected = np.unpackbits(numbers, axis=1, bitorder="little").mean(axis=0)
    assert report.equal_bits == pytest.approx(np.maximum(expected, 1 - expected))


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (5, 0), (1003,), (9, 2, 3)], ids=str)
def test_every_shape_has_a_report(shape: tuple[int, ...]) -> None:
    report = inspect_tensor("x", torch.ones(shape))
    assert report.ratio >= 1
    assert math.isfinite(report.speedup)
    assert bool(report.equal_bits) == (torch.Size(shape).numel() > 0)


@pytest.mark.parametrize(
    ("raw", "packed", "link", "expected"),
    [
        (1000, 500, Link(50, 1500), 2.0),
        (1000, 10, Link(50, 1500), 30.0),
        (1000, 500, Link(50, 75), 1.5),
        (1000, 500, Link(50, 25), 0.5),
        (0, 0, Link(50, 1500), 1.0),
    ],
    ids=["link-bound", "decode-bound", "slow-decode", "slower-than-raw", "empty"],
)
def test_speedup_is_bounded_by_link_and_decoding(
    raw: int, packed: int, link: Link, expected: float
) -> None:
    assert link.speedup(raw, packed, decoded=True) == pytest.approx(expected)


def test_raw_tensor_is_not_decoded() -> None:
    link = Link(50, 10)
    assert link.speedup(1000, 1000, decoded=False) == 1.0
    assert inspect_tensor("x", random_bits(torch.int32, (50, 64)), link=link).speedup == 1.0


@pytest.mark.parametrize("rate", [0, -1, math.inf, math.nan])
@pytest.mark.parametrize("name", ["link_gbps", "decode_gbps"])
def test_rates_are_positive(name: str, rate: float) -> None:
    with pytest.raises(bitslab.ArgumentError, match=name):
        Link(**{name: rate})


def test_total_adds_up() -> None:
    link = Link(50, 1500)
    one = inspect_tensor("a", packable(torch.bfloat16, (500, 64)), link=link)
    two = inspect_tensor("b", random_bits(torch.int32, (50, 64)), link=link)
    sums = total([one, two], link)
    assert sums.tensors == 2
    assert sums.raw_bytes == one.raw_bytes + two.raw_bytes
    assert sums.packed_bytes == one.packed_bytes + two.packed_bytes
    assert sums.ratio == pytest.approx(sums.raw_bytes / sums.packed_bytes)
    assert sums.saved_mb == pytest.approx(one.saved_mb + two.saved_mb)
    assert two.speedup == 1 < sums.speedup < one.speedup
    assert total([]).ratio == total([]).speedup == 1


# JSON


def test_json_has_the_documented_keys() -> None:
    reports = [inspect_tensor("a", packable(torch.bfloat16, (500, 64)))]
    content = json.loads(json.dumps(as_json(reports, Link(25, 1000))))
    assert content.keys() == {"link_gbps", "decode_gbps", "invariant_at", "tensors", "total"}
    assert (content["link_gbps"], content["decode_gbps"]) == (25, 1000)
    assert content["invariant_at"] == 0.8
    (entry,) = content["tensors"]
    assert entry.keys() == {
        "name", "shape", "dtype", "plan", "raw_bytes", "packed_bytes", "ratio", "saved_mb",
        "invariant_share", "speedup", "equal_bits",
    }  # fmt: skip
    assert entry["shape"] == [500, 64]
    assert content["total"].keys() == {
        "tensors", "raw_bytes", "packed_bytes", "ratio", "saved_mb", "invariant_share", "speedup",
    }  # fmt: skip


# Table


def test_table_has_a_line_for_each_tensor_and_a_total() -> None:
    reports = [
        inspect_tensor("first", packable(torch.bfloat16, (500, 64))),
        inspect_tensor("second", torch.tensor(3.0)),
    ]
    text = printed(reports, Link(25, 1000))
    first = next(line for line in text.splitlines() if "first" in line)
    for figure in ("500 x 64", "bfloat16", reports[0].plan, f"{reports[0].ratio:.2f}x"):
        assert figure in first
    assert "0-d" in next(line for line in text.splitlines() if "second" in line)
    assert "total of 2" in text
    assert "invariant at 80%" in text


def test_caption_says_both_rates() -> None:
    text = " ".join(printed([inspect_tensor("x", torch.ones(3))], Link(12.5, 800)).split())
    assert "12.5 GB/s link" in text
    assert "decoding at 800 GB/s" in text


def test_names_are_no_markup() -> None:
    assert "a[bold]b" in printed([inspect_tensor("a[bold]b", torch.ones(3))])


# Plot


@pytest.mark.drawn(4)
@pytest.mark.parametrize("count", [1, 8, 9, 100], ids=["line", "lines", "heat-map", "large"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.complex64], ids=dtype_id)
def test_plot_is_an_image(dtype: torch.dtype, count: int) -> None:
    report = inspect_tensor("x", packable(dtype, (30, 32)))
    reports = [replace(report, name=f"layer.{i}.{'weight' * 12}") for i in range(count)]
    image = io.BytesIO()
    save_plot(reports, image)
    assert image.getvalue().startswith(PNG)


def svg_text(reports: list[TensorReport]) -> str:
    image = io.BytesIO()
    save_plot(reports, image, "svg")
    return image.getvalue().decode()


def test_plot_names_axes_tensors_and_regions() -> None:
    text = svg_text([inspect_tensor("weight", packable(torch.bfloat16, (30, 32)))])
    for word in (
        "share of equal bits", "bit position (0 = least significant)", "weight", "sign",
        "exponent", "mantissa", "bfloat16: 1 tensor",
    ):  # fmt: skip
        assert f"<!-- {word} -->" in text


def test_integers_have_no_regions() -> None:
    text = svg_text([inspect_tensor("ids", packable(torch.int32, (30, 32)))])
    assert "exponent" not in text


def test_each_dtype_has_a_panel() -> None:
    reports = [
        inspect_tensor("a", packable(torch.float16, (30, 32))),
        inspect_tensor("b", packable(torch.int8, (30, 32))),
        inspect_tensor("empty", torch.ones(0, 3)),
    ]
    text = svg_text(reports)
    assert "float16: 1 tensor" in text and "int8: 1 tensor" in text
    assert "float32" not in text


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", [("sign", 31, 32), ("exponent", 23, 31), ("mantissa", 0, 23)]),
        ("bfloat16", [("sign", 15, 16), ("exponent", 7, 15), ("mantissa", 0, 7)]),
        ("float8_e5m2", [("sign", 7, 8), ("exponent", 2, 7), ("mantissa", 0, 2)]),
        ("complex64", [("sign", 31, 32), ("exponent", 23, 31), ("mantissa", 0, 23)]),
        ("int32", []),
        ("bool", []),
    ],
    ids=str,
)
def test_regions_of_floating_point_numbers(dtype: str, expected: Any) -> None:
    assert float_regions(dtype) == expected


@pytest.mark.parametrize("shapes", [[], [(0, 3)]], ids=["none", "empty"])
def test_nothing_to_draw_is_refused(shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(bitslab.ArgumentError, match="nothing to draw"):
        save_plot([inspect_tensor("x", torch.ones(shape)) for shape in shapes], io.BytesIO())


def test_plot_leaves_matplotlib_as_it_was() -> None:
    code = (
        "import io, sys, torch, bitslab, matplotlib\n"
        "from bitslab.report import inspect_tensor, save_plot\n"
        # Without the backend: to look that up imports pyplot.
        "state = lambda: {k: matplotlib.rcParams[k] for k in matplotlib.rcParams"
        " if k != 'backend'}\n"
        "before = state()\n"
        "save_plot([inspect_tensor('x', torch.ones(30, 32))], io.BytesIO())\n"
        "assert 'matplotlib.pyplot' not in sys.modules, 'pyplot chooses a backend for everyone'\n"
        "assert state() == before\n"
    )
    done = run_forked(["-c", code])
    assert done.returncode == 0, done.stderr
