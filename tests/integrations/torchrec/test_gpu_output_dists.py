"""What output dists make of rows that came, on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchrec", reason="torchrec is not installed")

from bitslab.distributed import Table
from bitslab.integrations.torchrec.output_dists import CompressedReduceScatterDist, Message

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_over_ranks_have_the_dtype_of_rows_under_autocast(dtype: torch.dtype) -> None:
    dist = object.__new__(CompressedReduceScatterDist)
    dist.__dict__["ranks"] = 2
    message = Message(Table("t", 4, dtype), [[0], [0]])
    came = torch.randn(6, 4, device="cuda").to(dtype)
    expected = dist.arranged(message, came, [[3], [3]])
    with torch.autocast("cuda", dtype=dtype):
        found = dist.arranged(message, came, [[3], [3]])
    assert found.keys() == expected.keys()
    for key, t in found.items():
        assert t.dtype is dtype and torch.equal(t, expected[key])
