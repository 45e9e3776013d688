"""`verify` tells of an engine that is broken on purpose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bitslab
from bitslab.activations import VerifyError, crossing, stalls
from bitslab.activations.copies import StoredCopy
from bitslab.activations.forms import SavedForm
from bitslab.activations.host_room import HostRoom
from bitslab.activations.verify import checksum
from bitslab.engine.tensor_bits import as_integers

Options = dict[str, Any]


def train(policy: str = "raw", steps: int = 1, **options: Any) -> bitslab.ActivationOffload:
    """Return what has verified steps of a model with several sites."""
    torch.manual_seed(4)
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(64, 64), nn.Tanh())))
    given: Options = {"min_bytes": 64, "in_flight_bytes": 0, "verify": True, **options}
    offload = bitslab.offload_activations(model, policy=policy, **given)
    try:
        for _ in range(steps):
            model(torch.randn(32, 64)).sum().backward()
    finally:
        offload.detach()
    return offload


def test_what_is_right_passes() -> None:
    assert train(steps=2).stats()["verified_tensors"] >= 6
    assert train("static", codecs="zvc").stats()["verified_tensors"] >= 3
    assert train(verify=False).stats()["verified_tensors"] == 0


@pytest.mark.parametrize("every", [1, 2], ids=["originals", "checksums"])
def test_views_of_negated_parts_are_compared(every: int) -> None:
    x = torch.randn(64, 8, requires_grad=True)
    with bitslab.ActivationOffload(policy="raw", min_bytes=64, verify=every) as offload:
        for _ in range(2):
            t = torch._neg_view(x * 2)  # as of the imaginary part of a conjugate
            assert t.is_neg()
            (t * t).sum().backward()
    assert offload.stats()["verified_tensors"] > 0


@pytest.mark.parametrize("every", [1, 5])
def test_a_swapped_offset(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    real = SavedForm.tensor_of

    def tensor_of(form: SavedForm, flat: torch.Tensor, *where: Any) -> torch.Tensor:
        return real(form, flat.roll(1), *where)

    monkeypatch.setattr(SavedForm, "tensor_of", tensor_of)
    with pytest.raises(VerifyError, match=r"saved at '\d:0', output of TanhBackward0, moved raw"):
        train(verify=every)


def test_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is coming back is read before it is there."""

    def fill(*args: Any) -> None:
        """Come never."""

    def wait(*args: Any) -> None:
        """Wait for nothing."""

    monkeypatch.setattr(crossing, "fill_on_host", fill)
    monkeypatch.setattr(stalls.Stalls, "wait", wait)
    # in_flight_bytes=0 waits for the copy by that, too: the copies themselves are sound.
    real = torch.empty

    def dirty(*args: Any, **more: Any) -> torch.Tensor:
        made: torch.Tensor = real(*args, **more)
        return made.fill_(7)

    monkeypatch.setattr(torch, "empty", dirty)
    with pytest.raises(VerifyError, match="came back with other bits"):
        train()


def test_an_old_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies are given the same host memory."""
    memory = torch.empty(1 << 20, dtype=torch.uint8)

    def cut(room: Any, nbytes: int, events: Any) -> torch.Tensor:
        return memory[:nbytes]

    monkeypatch.setattr(HostRoom, "cut", cut)
    with pytest.raises(VerifyError, match="came back with other bits"):
        train()


def test_a_copy_of_another_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage is taken for one that was copied before: an address that comes again."""
    from bitslab.activations.identity import CopyTable

    seen: list[StoredCopy] = []
    real = CopyTable.add

    def add(table: Any, storage: Any, copy: Any) -> None:
        seen.append(copy)
        real(table, storage, copy)

    def find(table: Any, storage: Any, root: Any, version: int, span: Any) -> Any:
        return seen[0] if seen else None

    monkeypatch.setattr(CopyTable, "add", add)
    monkeypatch.setattr(CopyTable, "find", find)
    with pytest.raises(VerifyError, match="came back with other bits"):
        train()


def test_a_change_that_torch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    offload = bitslab.ActivationOffload(policy="raw", min_bytes=1, verify=True)
    x = torch.randn(64, 64, requires_grad=True)
    with offload:
        h = x * 2
        y = h.sin()
        offload._hooks.executor(h.device)._release(0)  # the copy is complete
        h.data.zero_()
        z = h.cos()
    with pytest.raises(VerifyError):
        (y + z).sum().backward()
    offload.detach()


def test_a_lossy_codec_is_not_compared() -> None:
    # The input, which needs no gradient and may be anything, crosses as it is.
    assert train("static", codecs=[], lossy="zfp").stats()["verified_tensors"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_checksums_see_each_bit_and_place(dtype: torch.dtype) -> None:
    t = (torch.randn(500, generator=torch.Generator().manual_seed(2)) * 9).relu().to(dtype)
    first = checksum(t)
    assert torch.equal(first, checksum(t.clone()))
    swapped = t.clone()
    at = int((t != t[0]).nonzero()[0])
    swapped[0], swapped[at] = t[at].clone(), t[0].clone()
    assert not torch.equal(first, checksum(swapped))
    one = as_integers(t.clone())
    one[77] ^= 1
    assert not torch.equal(first, checksum(one.view(dtype) if dtype != torch.bool else one))
