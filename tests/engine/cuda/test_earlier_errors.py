"""Errors that earlier calls met on a GPU are raised by the next call, unless it asks for none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bitslab.engine.kernels import cuda
from bitslab.errors import IndexRangeError


def test_kernels_are_given_with_or_without_the_error_of_an_earlier_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raise_pending() -> None:
        raise IndexRangeError("indices: an earlier decode")

    runner = SimpleNamespace(kernels=object(), raise_pending=raise_pending)
    monkeypatch.setitem(cuda._runners, 7, runner)
    device = torch.device("cuda", 7)
    assert cuda.kernels_on(device, raise_errors=False) is runner.kernels
    with pytest.raises(IndexRangeError, match="an earlier decode"):
        cuda.kernels_on(device)
