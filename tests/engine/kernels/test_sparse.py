"""Counting zeros on the CPU, against torch."""

from __future__ import annotations

import pytest
import torch

from bitslab.engine.codecs import count_zeros
from bitslab.errors import ArgumentTypeError
from tests.helpers import bits_of

DTYPES = (torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128)


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor whose elements, by half, are zero."""
    n = torch.Size(shape).numel() * dtype.itemsize
    unit = min(8, dtype.itemsize)
    kept = torch.rand(n // unit) < 0.5
    units = torch.randint(1, 256, (n // unit, unit), dtype=torch.uint8) * kept[:, None]
    return units.view(-1).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5, 41)], ids=str)
def test_zeros_are_counted(dtype, shape):
    t = drawn(dtype, *shape)
    units = bits_of(t).view(torch.uint8).reshape(-1, min(8, dtype.itemsize))
    count = count_zeros(t)
    assert count.dtype == torch.int64 and count.shape == ()
    assert int(count) == int((units == 0).all(1).sum())


def test_zeros_with_a_sign_and_subnormals_are_not_counted():
    assert int(count_zeros(torch.tensor([0.0, -0.0, 1e-45, float("nan")]))) == 1


def test_zeros_are_counted_whatever_the_strides():
    t = drawn(torch.float32, 4, 6, 8)
    expected = int((t == 0).sum())
    for other in (t.permute(2, 0, 1), t.transpose(0, 2)):
        assert int(count_zeros(other)) == expected
    assert int(count_zeros(t[:, ::2])) == int((t[:, ::2] == 0).sum())
    assert int(count_zeros(t[:1].expand(3, 6, 8))) == 3 * int((t[:1] == 0).sum())
    assert int(count_zeros(t[1:, :, 3:4])) == int((t[1:, :, 3:4] == 0).sum())


def test_what_is_no_dense_tensor_is_refused():
    with pytest.raises(ArgumentTypeError, match="t: expected a torch.Tensor"):
        count_zeros([0])  # type: ignore[arg-type]
