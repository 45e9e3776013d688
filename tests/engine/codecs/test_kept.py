"""Sizes of what csr and rle write, and what a reader of kept_format.py finds in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitslab.engine.codecs import CsrCodec, RleCodec
from bitslab.engine.kernels.kept_format import RAW, ROW_UNITS, RUN_UNITS
from tests.helpers import same_bits


def parts_of(
    data: torch.Tensor, rows: int, unit: int, place: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read a buffer by the words of its description alone."""
    raw = data.numpy()
    kept = int(raw[24:32].view(np.int64)[0])
    values_at = 32 + -(-8 * (rows + 1) // 16) * 16
    places_at = values_at + -(-kept * unit // 16) * 16
    assert len(raw) == places_at + kept * place
    starts = raw[32 : 32 + 8 * (rows + 1)].view(np.int64)
    assert not raw[32 + 8 * (rows + 1) : values_at].any()
    assert not raw[values_at + kept * unit : places_at].any()
    values = raw[values_at : values_at + kept * unit].view(f"<u{unit}")
    return starts, values, raw[places_at:].view(f"<u{place}")


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 4), (torch.bfloat16, 2)], ids=str)
def test_sparse_rows_are_what_they_say(dtype, unit):
    n = 2 * ROW_UNITS + 501
    t = torch.randn(n).relu().to(dtype)
    t[torch.rand(n) < 0.3] = 0
    t[5] = -0.0
    starts, values, columns = parts_of(CsrCodec().encode(t).trimmed().data, 3, unit, 2)
    x = t.view(getattr(torch, f"int{8 * unit}")).numpy().view(f"u{unit}")
    kept = np.flatnonzero(x)
    assert (values == x[kept]).all() and (columns == kept % ROW_UNITS).all()
    assert starts.tolist() == [int((kept < r * ROW_UNITS).sum()) for r in range(4)]


def test_runs_are_what_they_say():
    t = torch.randint(3, (40,)).repeat_interleave(torch.randint(1, 700, (40,))).short()
    rows = -(-len(t) // ROW_UNITS)
    starts, values, counts = parts_of(RleCodec().encode(t).trimmed().data, rows, 2, 1)
    x = t.numpy().view(np.uint16)
    heads = np.flatnonzero((np.diff(x, prepend=x[0] + 1) != 0) | (np.arange(len(x)) % 256 == 0))
    assert RUN_UNITS == 256
    assert (values == x[heads]).all()
    assert (counts.astype(int) + 1 == np.diff(heads, append=len(x))).all()
    assert starts.tolist() == [int((heads < r * ROW_UNITS).sum()) for r in range(rows + 1)]


def ratio(codec: CsrCodec | RleCodec, t: torch.Tensor) -> float:
    blob = codec.encode(t)
    assert same_bits(codec.decode(blob), t)
    return blob.raw_nbytes / blob.nbytes


def test_sizes_with_all_that_belongs_to_them():
    n = 1 << 18
    half = torch.where(torch.arange(n) % 2 == 0, torch.rand(n) + 1, torch.zeros(n))
    assert 1.33 < ratio(CsrCodec(), half) < 4 / 3
    tenth = torch.where(torch.arange(n) % 10 == 0, torch.rand(n) + 1, torch.zeros(n))
    assert 6.6 < ratio(CsrCodec(), tenth) < 20 / 3
    assert 3.9 < ratio(RleCodec(), tenth) < 4  # two runs of five bytes for ten elements
    assert 180 < ratio(RleCodec(), torch.full((n,), 2.5)) < 205  # runs of 256
    assert ratio(CsrCodec(), torch.zeros(n)) == n / 8  # a header
    assert ratio(CsrCodec(), torch.rand(n) + 1) == 4 * n / (4 * n + 32)  # raw


def test_what_would_not_shrink_is_raw():
    t = torch.rand(5000) + 1
    for codec in (CsrCodec(), RleCodec()):
        blob = codec.encode(t)
        assert blob.data[24:32].view(torch.int64).tolist() == [RAW]
        assert blob.nbytes == 32 + t.nbytes == codec.max_encoded_bytes(t.shape, t.dtype)
