"""Tokens of layers joined on a GPU: the same bits, one launch a layer, and no waiting."""

from __future__ import annotations

import pytest
import torch

from bitslab.kvcache import CodecPlans, HistoryReader, PackedHistory, TokenJoin
from tests.gpu import kernels_of

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

LAYERS, PROMPT, STEPS = 3, 600, 100


class Layers:
    """Layers that grow by a token each, as a model decodes."""

    def __init__(self, offload: bool, dtype: torch.dtype, dim: int, batch: int = 2) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.reader = HistoryReader(device, offload=offload, sm_budget=64)
        self.histories = [self.opened() for _ in range(LAYERS)]
        self.joins = [TokenJoin(self.reader, both) for both in self.histories]
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (LAYERS, 2, batch, 4, PROMPT + 3 * STEPS, dim)
        self.tokens = torch.randn(shape, generator=generator, device="cuda").to(dtype)
        self.length = 0
        self.grow(PROMPT)
        self.reader.finish_packing()

    def opened(self) -> list[PackedHistory]:
        plans = CodecPlans()
        return [
            PackedHistory(self.reader.new_words(), plans, kind, window=16, block_tokens=32)
            for kind in "kv"
        ]

    def grow(self, n: int) -> list[torch.Tensor]:
        """Append the next tokens; return K and V of all layers."""
        found: list[torch.Tensor] = []
        begin, self.length = self.length, self.length + n
        for layer, (join, both) in enumerate(zip(self.joins, self.histories, strict=True)):
            new = [each[:, :, begin : self.length] for each in self.tokens[layer]]
            joined = join.join(*new)
            memory = (None, None) if joined is None else joined[1]
            for history, each, there in zip(both, new, memory, strict=True):
                history.append(each, memory=there)
            if joined is not None:
                found += joined[0]
            for following in (1, 2):
                ahead = self.histories[(layer + following) % LAYERS]
                self.reader.prefetch_words(ahead, decoded=False, early=following > 1)
        return found

    def check(self, found: list[torch.Tensor], length: int) -> None:
        assert len(found) == 2 * LAYERS
        for one, expected in zip(found, self.tokens.flatten(0, 1), strict=True):
            assert torch.equal(one, expected[:, :, :length])


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [(torch.bfloat16, 128), (torch.bfloat16, 64), (torch.float32, 128), (torch.float16, 80)],
    ids=str,
)
def test_joined_tokens_are_those_that_were_appended(
    offload: bool, dtype: torch.dtype, dim: int, no_waiting
) -> None:
    """Those of all steps are kept: no later step may write to them."""
    layers = Layers(offload, dtype, dim)
    for _ in range(40):  # over a block, of which one is in flight
        layers.grow(1)
    packed = layers.histories[0][0].packed_tokens
    kept = []
    with no_waiting():
        for _ in range(STEPS):
            kept.append((layers.grow(1), layers.length))
    assert layers.histories[0][0].packed_tokens > packed
    for found, length in kept:
        layers.check(found, length)
    layers.check(layers.grow(77), layers.length)  # at once


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_a_layer_takes_one_launch(offload: bool, profiled) -> None:
    layers = Layers(offload, torch.bfloat16, 128)
    for _ in range(3):
        layers.grow(1)
    packed = [history.packed.revision for both in layers.histories for history in both]
    kernels = kernels_of(profiled(lambda: layers.grow(1)))
    assert packed == [history.packed.revision for both in layers.histories for history in both]
    assert kernels == ["join_rows"] * LAYERS


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_changes_between_steps(offload: bool) -> None:
    layers = Layers(offload, torch.bfloat16, 128)
    layers.check(layers.grow(3), layers.length)
    for removed in (2, 150):  # of the tail, and packed tokens
        layers.length -= removed
        for both in layers.histories:
            for history in both:
                history.crop(layers.length)
        layers.check(layers.grow(1), layers.length)
    index = torch.tensor([1, 1, 0], device="cuda")
    for both in layers.histories:
        for history in both:
            history.reorder(index)
    layers.tokens = layers.tokens[:, :, index]
    for _ in range(40):
        layers.check(layers.grow(1), layers.length)


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_streams_change_between_steps(offload: bool, no_waiting) -> None:
    """No stream is made to wait for another here; memory is used again as soon as it is freed."""
    layers = Layers(offload, torch.bfloat16, 128)
    torch.cuda.synchronize()
    others = [torch.cuda.Stream(), torch.cuda.Stream()]
    default = torch.cuda.current_stream()
    kept = []
    with no_waiting():
        for step in range(STEPS):
            with torch.cuda.stream([default, others[0], others[0], others[1]][step % 4]):
                kept.append((layers.grow(1), layers.length))
                # As large as tails and tables that are freed.
                for n in (1 << 12, 1 << 16, 1 << 20):
                    torch.full((n,), 0xA5, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for found, length in kept:
        layers.check(found, length)


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_a_step_waits_for_that_of_another_stream(offload: bool, held_stream) -> None:
    layers = Layers(offload, torch.bfloat16, 128)
    layers.grow(1)
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    with held_stream(other):
        with torch.cuda.stream(other):
            first, length = layers.grow(1), layers.length
        second = layers.grow(1)
        assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    layers.check(first, length)
    layers.check(second, layers.length)
