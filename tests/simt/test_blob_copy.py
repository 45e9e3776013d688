"""The copy of the used bytes of an encoded tensor: the kernel and its twin."""

from __future__ import annotations

import pytest
import torch

from bitslab.engine.kernels.cpu.blob_copy import copy_blob as twin
from bitslab.engine.kernels.cuda.blob_copy import BlobCopyKernels
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner


@pytest.mark.parametrize(
    ("used", "source_bytes", "target_bytes"),
    [
        (32, 48, 64),
        (47, 48, 48),
        (70_001, 80_000, 70_016),
        (70_001, 80_000, 69_008),
        (-1, 48, 48),
        (1 << 62, 64, 48),
        (0, 0, 48),
    ],
    ids=["header", "odd", "rounds", "no-room", "negative", "huge", "empty"],
)
@pytest.mark.parametrize("first_byte", [0, 16, 32_768, 70_000])
def test_used_bytes_are_copied_and_no_more(used, source_bytes, target_bytes, first_byte):
    source = torch.randint(256, (source_bytes,), dtype=torch.uint8)
    if source_bytes:
        source[:8].view(torch.int64)[0] = used
    target, expected = (torch.full((target_bytes,), 7, dtype=torch.uint8) for _ in range(2))
    source, target = guarded(source), guarded(target)
    twin(source, expected, first_byte)
    BlobCopyKernels(SimtRunner(0)).copy_blob(source, target, first_byte)
    assert torch.equal(target, expected)
    n = min(used if used > 0 else 1 << 62, source_bytes, target_bytes)
    assert torch.equal(expected[first_byte:n], source[first_byte:n])
    assert (expected[:first_byte] == 7).all() and (expected[n:] == 7).all()
