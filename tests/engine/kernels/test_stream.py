"""`on_stream` makes a stream current and puts back what was, as ``torch.cuda.stream`` does."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

from bitslab.engine.kernels.cuda.stream import on_stream


class Stream:
    """What torch's streams tell of themselves."""

    def __init__(self, stream_id: int, device_index: int) -> None:
        self.stream_id, self.device_index, self.device_type = stream_id, device_index, 1


class Torch:
    """Two GPUs, each with a current stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = 0
        self.current = {0: (10, 0, 1), 1: (20, 1, 1)}
        private: Any = torch._C
        for name, function in (
            ("_cuda_getDevice", lambda: self.device),
            ("_cuda_getCurrentStream", lambda index: self.current[index]),
            ("_cuda_setStream", self.set),
        ):
            monkeypatch.setattr(private, name, function, raising=False)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: Other(self, stream))

    def set(self, *, stream_id: int, device_index: int, device_type: int) -> None:
        self.device = device_index
        self.current[device_index] = stream_id, device_index, device_type

    def state(self) -> tuple[int, dict[int, tuple[int, int, int]]]:
        return self.device, dict(self.current)


class Other:
    """torch.cuda.stream of a stream of another GPU."""

    def __init__(self, gpus: Torch, stream: Stream) -> None:
        self.gpus, self.stream = gpus, stream

    def __enter__(self) -> None:
        self.before = self.gpus.state()
        s = self.stream
        self.gpus.set(stream_id=s.stream_id, device_index=s.device_index, device_type=s.device_type)

    def __exit__(self, *error: object) -> None:
        self.gpus.device, self.gpus.current = self.before


@pytest.mark.parametrize("fails", [False, True], ids=["done", "fails"])
@pytest.mark.parametrize("device", [0, 1], ids=["current-gpu", "other-gpu"])
def test_stream_is_current_inside_only(
    device: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Torch(monkeypatch)
    before = gpus.state()
    with suppress(KeyError), on_stream(Stream(5, device)):  # type: ignore[arg-type]
        assert gpus.device == device
        assert gpus.current[device] == (5, device, 1)
        with on_stream(Stream(6, device)):  # type: ignore[arg-type]
            assert gpus.current[device] == (6, device, 1)
        assert gpus.current[device] == (5, device, 1)
        if fails:
            raise KeyError
    assert gpus.state() == before
