"""Training whose saved tensors go through the disk tier: the same gradients, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bitslab.activations.disk import DiskError, DiskRates, DiskTier, Ticket
from tests.activations.disk.waiting import used_bytes_become

pytestmark = pytest.mark.usefixtures("one_thread")

RATES = DiskRates(64 << 10, 2, 2, 1e9, 1e9, 1e9, 1e9, direct=True)
Packed = torch.Tensor | tuple[Ticket, torch.Size, torch.dtype]


def make() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(8, 32, 64)


def hooks(tier: DiskTier) -> Any:
    """Return hooks that store what is saved; what the tier does not take remains as it is."""

    def pack(t: torch.Tensor) -> Packed:
        if t.numel() < 1024 or isinstance(t, nn.Parameter):
            return t
        data = t.detach().contiguous().view(-1).view(torch.uint8)
        ticket = tier.store(tier.host_buffer(data.shape[0]).copy_(data))
        # The output of its own operator, kept as it is, would be a cycle that nothing frees.
        return t.detach() if ticket is None else (ticket, t.shape, t.dtype)

    def unpack(packed: Packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        ticket, shape, dtype = packed
        return tier.fetch(ticket).result(60).view(dtype).view(shape)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def gradients(model: nn.Module, loss: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), **options))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("disk_bytes", [None, 1 << 20], ids=["all", "what-fits"])
@pytest.mark.parametrize("drained", [True, False], ids=["from-disk", "as-it-comes"])
def test_gradients_are_the_same(disk_bytes: int | None, drained: bool, tmp_path: Path) -> None:
    model, x = make()
    right = gradients(model, model(x).square().sum())
    with DiskTier(tmp_path, rates=RATES, verify=True, disk_bytes=disk_bytes) as tier:
        for _ in range(3):
            with hooks(tier):
                loss = model(x).square().sum()
            if drained:
                assert tier.drain(60)
            first = gradients(model, loss, retain_graph=True)
            second = gradients(model, loss)
            for a, b, c in zip(right, first, second, strict=True):
                assert torch.equal(a, b) and torch.equal(a, c)
            del loss
        with hooks(tier):
            dropped = model(x)
        del dropped
        assert tier.drain(60)
        assert used_bytes_become(tier, 0)
        found = tier.stats()
        assert found["failed_bytes"] == 0
        assert (found["refused_bytes"]["full"] > 0) == (disk_bytes is not None)
        if drained:
            assert found["read_bytes"] > found["written_bytes"] > 0


def test_read_that_fails_raises_before_there_are_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = make()
    with DiskTier(tmp_path, rates=RATES) as tier:
        with hooks(tier):
            loss = model(x).square().sum()
        assert tier.drain(60)

        def fail(*arguments: object) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("os.preadv", fail)
        with pytest.raises(DiskError, match=f"{tmp_path}.*cannot be read: Input/output error"):
            loss.backward()
        assert all(p.grad is None for p in model.parameters())
        monkeypatch.undo()
        # The next step goes on without the tier.
        with hooks(tier):
            loss = model(x).square().sum()
        assert tier.stats()["refused_bytes"]["failed"] > 0
        right = gradients(model, model(x).square().sum())
        for a, b in zip(right, gradients(model, loss), strict=True):
            assert torch.equal(a, b)
