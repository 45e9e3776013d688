"""What a packed model has taken goes with the last reference to it, with no garbage collection."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bitslab.offload import deferred_state_dict, find_offloaded, offload_weights, restore_weights
from tests.offload.models import Blocks, generated, logits, tiny_llama


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def generate(model: Any) -> None:
    generated(model, max_new_tokens=2)


def read_weights(model: Any) -> None:
    deferred_state_dict(model)
    copy.copy(model.state_dict())
    list(model.parameters())


def fail(model: Any) -> None:
    with pytest.raises(IndexError):
        logits(model, torch.full((1, 1), 10**6))


@pytest.mark.drawn(8)
@pytest.mark.pairwise
@pytest.mark.parametrize("use", [logits, generate, read_weights, fail, restore_weights])
@pytest.mark.parametrize("kept", ["in-memory", "packed", "in-a-file"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_packed_weights_go_with_their_model(use, kept, tied, tmp_path):
    options = {"in-a-file": {"disk": tmp_path / "weights"}, "packed": {"keep": "packed"}}
    with no_collection():
        model = tiny_llama(tied=tied, layers=2)
        offload_weights(model, execution_device="cpu", min_bytes=0, **options.get(kept, {}))
        attached = find_offloaded(model)
        parts = (model, attached, attached.weights, attached.stream, model.model.layers[0])
        gone = [weakref.ref(part) for part in parts]
        del attached, parts
        use(model)
        del model
        assert [part() for part in gone] == [None] * len(gone)


def test_packed_weights_go_with_a_model_that_was_trained_through():
    with no_collection():
        model = Blocks(count=2)
        offload_weights(model, execution_device="cpu", min_bytes=0)
        gone = weakref.ref(find_offloaded(model).weights)
        x = torch.randn(2, 64, requires_grad=True)
        model(x).sum().backward()
        del model
        assert gone() is None and x.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("keep", [None, "packed", 0.5], ids=str)
def test_memory_of_a_gpu_goes_with_the_model(keep):
    torch.zeros(1, device="cuda")
    with no_collection():
        model = Blocks(256, count=4)
        offload_weights(model, execution_device="cuda", min_bytes=0, keep=keep)
        x = torch.randn(2, 256, device="cuda")
        with torch.no_grad():
            for _ in range(3):
                model(x)
        gone = weakref.ref(find_offloaded(model).weights)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        del model
        assert gone() is None
        assert torch.cuda.memory_allocated() < before
