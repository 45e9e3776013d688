"""KVCompCache.captured_steps on a GPU: CUDA graphs of decode steps, and compiled models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from bitslab.errors import BitslabError
from tests.integrations.transformers.models import prompt_of
from tests.integrations.transformers.steps import (
    BLOCK,
    PROMPT,
    Decoding,
    pack,
    pair,
    stepped_model,
)

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU


def captured(decoding: Decoding, steps: int = 1) -> tuple[Any, torch.Tensor]:
    """Return a graph of steps, and their logits ``[B, steps, vocabulary]``, which it writes.

    The graph goes from each token to the next by itself: `decoding.ids` and `decoding.at` are what
    it reads and writes.
    """
    graph = torch.cuda.CUDAGraph()
    found = []
    with torch.cuda.graph(graph):
        for _ in range(steps):
            logits = decoding.forward()[:, -1:]
            decoding.ids.copy_(logits.argmax(-1))
            decoding.at.add_(1)
            found.append(logits)
        out = torch.cat(found, dim=1)
    return graph, out


def take(decoding: Decoding, logits: torch.Tensor) -> None:
    """Keep logits of a graph that has gone on by itself."""
    for each in logits.clone().unbind(1):
        decoding.logits.append(each)
        decoding.mask = torch.nn.functional.pad(decoding.mask, (0, 1), value=1)


def assert_alike(ours: Decoding, theirs: Decoding, within: float = 1e-3) -> None:
    assert torch.equal(ours.tokens(), theirs.tokens())
    found, expected = ours.all_logits(), theirs.all_logits()
    assert (found - expected).norm() < within * expected.norm()


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "at-once"])
@pytest.mark.parametrize(("batch", "padding"), [(1, 0), (3, 0), (3, 41)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "phi3"])
def test_tokens_are_those_of_forward_passes(
    name: str, batch: int, padding: int, warm: bool
) -> None:
    """Of one and two query heads a K/V head, with blocks packed between several captures.

    Forward passes begin with a copy of the cache as it is before each block of steps: last bits
    that differ may quantise a value in another way, which is no error.
    """
    stepped = Decoding(stepped_model(name, "cuda"), batch, padding)
    for room, n in ((BLOCK, BLOCK), (BLOCK, BLOCK), (BLOCK, BLOCK), (9, 5)):
        stepped.logits.clear()
        plain = stepped.copied()
        plain.eager(n)
        with stepped.steps(room) as steps:
            if warm:
                stepped.take(stepped.forward())
            graph, logits = captured(stepped)
            assert steps.tokens == warm  # a capture runs nothing
            while steps.tokens < n:
                if steps.tokens == 4:  # between replays
                    stepped.take(stepped.forward())
                    continue
                steps.replay(graph)
                take(stepped, logits)
            assert stepped.cache.get_seq_length() == plain.cache.get_seq_length()
        del graph
        assert_alike(stepped, plain)
        for each in (stepped, plain):
            pack(each.cache)
        for ours, theirs in zip(stepped.cache.layers, plain.cache.layers, strict=True):
            assert ours.packed_tokens == theirs.packed_tokens
            for one, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                assert (one - other).norm() < 0.01 * other.norm()
    stats = stepped.cache.stats()
    assert stats["packed_tokens"] == 4 * BLOCK
    assert not stats["dense_passes"] and stats["packed_passes"] == 2 * (3 * BLOCK + 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_of_short_dtypes_and_longer_contexts(dtype: torch.dtype) -> None:
    """Tokens of the forward passes are given to both: one that differs would change all others."""
    model = stepped_model("llama", "cuda", dtype)
    plain, stepped = pair(model, batch=2, length=148)
    plain.eager(28)
    wanted = plain.tokens()
    with stepped.steps(28) as steps:
        graph = torch.cuda.CUDAGraph()
        for i in range(28):
            if i == 1:
                with torch.cuda.graph(graph):
                    logits = stepped.forward()
            if i:
                steps.replay(graph)
            else:
                logits = stepped.forward()
            stepped.take(logits)
            stepped.ids.copy_(wanted[i][:, None])
    found, expected = stepped.all_logits().float(), plain.all_logits().float()
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_graphs_of_several_steps_and_replays_by_other_means() -> None:
    model = stepped_model("llama", "cuda")
    plain, stepped = pair(model, batch=2)
    plain.eager(13)
    with stepped.steps(16) as steps:
        stepped.take(stepped.forward())
        graph, logits = captured(stepped, steps=3)
        for _ in range(2):
            steps.replay(graph, 3)
            take(stepped, logits)
        for _ in range(2):
            graph.replay()
            take(stepped, logits)
        assert stepped.cache.get_seq_length() == PROMPT + 7
        steps.replayed(6)
        assert stepped.cache.get_seq_length() == PROMPT + 13
        with pytest.raises(BitslabError, match="4 more tokens, room is left for 3 of the 16"):
            steps.replay(graph, 4)
    assert_alike(stepped, plain)


def test_replays_on_a_stream_of_their_own() -> None:
    """What comes behind them on another stream finds their tokens there."""
    plain, stepped = pair(stepped_model("llama", "cuda"))
    plain.eager(20)
    side = torch.cuda.Stream()
    with stepped.steps(20) as steps:
        stepped.take(stepped.forward())
        graph, logits = captured(stepped)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            while steps.left:
                steps.replay(graph)
                take(stepped, logits)
    kept = [(layer.keys, layer.values) for layer in stepped.cache.layers]  # the cache waits
    for layer, both in zip(plain.cache.layers, kept, strict=True):
        for one, other in zip((layer.keys, layer.values), both, strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-3)
    torch.cuda.current_stream().wait_stream(side)  # for `ids` and `at`
    for each in (plain, stepped):
        each.eager(8)
    assert_alike(stepped, plain)


def test_no_token_is_put_outside_of_the_room() -> None:
    """Neither by replays that the cache hears of too late, nor by those behind the block."""
    model = stepped_model("llama", "cuda")
    plain, stepped = pair(model)
    plain.eager(4)
    with stepped.steps(4) as steps:
        graph, logits = captured(stepped)
        for _ in range(3):
            steps.replay(graph)
            take(stepped, logits)
        tails = [h.unpacked.tail.memory for x in stepped.cache.layers for h in x.histories]
        ids, at, before = stepped.ids.clone(), stepped.at.clone(), [t.clone() for t in tails]
        for _ in range(40):
            graph.replay()
        for tail, then in zip(tails, before, strict=True):
            same = tail.view(torch.int32) == then.view(torch.int32)  # what is not there may be NaN
            same = same.all(-1).all(0).all(0)  # of each token
            assert int((~same).sum()) == 1
        with pytest.raises(BitslabError, match=r"replayed\(\): 40 more tokens, room is left for 1"):
            steps.replayed(40)
        stepped.ids.copy_(ids)
        stepped.at.copy_(at)
        steps.replay(graph)
        take(stepped, logits)
        with pytest.raises(BitslabError, match="room is left for 0"):
            steps.replay(graph)
    assert_alike(stepped, plain)
    kept = [(layer.keys, layer.values) for layer in stepped.cache.layers]
    for _ in range(3):
        graph.replay()
    for layer, (keys, values) in zip(stepped.cache.layers, kept, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    with pytest.raises(BitslabError, match="has been left"):
        steps.replay(graph)


def test_replays_wait_for_nothing(
    no_waiting: Callable[..., AbstractContextManager[None]],
) -> None:
    stepped = Decoding(stepped_model("llama", "cuda"))
    with stepped.steps(20) as steps:
        stepped.take(stepped.forward())
        graph, _ = captured(stepped)
        steps.replay(graph)
        with no_waiting():
            for _ in range(10):
                steps.replay(graph)
    assert stepped.cache.get_seq_length() == PROMPT + 12


def test_a_capture_outside_of_a_block_is_refused_as_ever() -> None:
    stepped, plain = pair(stepped_model("llama", "cuda"), batch=2)
    with (
        pytest.raises(BitslabError, match=r"Capture steps within KVCompCache.captured_steps\(\)"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
    ):
        stepped.at.add_(0)  # torch warns of graphs that hold nothing
        stepped.forward()
    with (
        pytest.raises(BitslabError, match="within a capture; it is to be entered before"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
    ):
        stepped.at.add_(0)
        with stepped.cache.captured_steps(4):
            pass
    for each in (stepped, plain):
        each.eager(3)
    assert_alike(stepped, plain)


def test_a_step_that_fails_within_a_capture_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = stepped_model("llama", "cuda")
    stepped, plain = pair(model)
    plain.eager(6)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("injected")

    with stepped.steps(6) as steps:
        stepped.take(stepped.forward())
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[0].mlp, "forward", fails)
            with pytest.raises(RuntimeError, match="injected"):
                captured(stepped)
            with pytest.raises(RuntimeError, match="injected"):
                stepped.forward()
        graph, logits = captured(stepped)
        while steps.left:
            steps.replay(graph)
            take(stepped, logits)
    assert_alike(stepped, plain)


@pytest.mark.parametrize("change", ["crop", "beams", "copy"])
def test_the_cache_goes_on_behind_a_block(change: str) -> None:
    model = stepped_model("llama", "cuda")
    both = pair(model, batch=3)
    both[0].eager(20)
    with both[1].steps(BLOCK) as steps:
        graph, logits = captured(both[1])
        for _ in range(20):
            steps.replay(graph)
            take(both[1], logits)
    found = []
    more = prompt_of(batch=3, length=70, seed=3).cuda()
    for each in both:
        if change == "crop":
            each.cache.crop(-30)
        elif change == "beams":
            each.cache.reorder_cache(torch.tensor([2, 0, 0]).cuda())
        else:
            each.cache = copy.deepcopy(each.cache)
        with torch.no_grad():
            found.append(model(more, past_key_values=each.cache).logits)
    assert (found[0] - found[1]).norm() < 1e-3 * found[0].norm()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_compiled_models_capture_what_stands_between_updates() -> None:
    """With ``mode="reduce-overhead"`` torch captures those parts; the cache runs between them."""
    pytest.importorskip("triton")
    model = stepped_model("llama", "cuda")
    plain, stepped = pair(model, batch=2)
    n = BLOCK - 1  # last bits that differ may quantise a value of a block in another way
    plain.eager(n)
    stepped.model = torch.compile(model, mode="reduce-overhead")
    with torch._dynamo.config.patch(recompile_limit=64):
        for _ in range(n):
            torch.compiler.cudagraph_mark_step_begin()
            stepped.take(stepped.forward().clone())
    assert_alike(stepped, plain)
    stats = stepped.cache.stats()
    assert stats["packed_passes"] == 2 * n and not stats["dense_passes"]
    with torch._dynamo.config.patch(recompile_limit=64):
        for _ in range(4):  # in which a block is packed
            torch.compiler.cudagraph_mark_step_begin()
            stepped.take(stepped.forward().clone())
    pack(stepped.cache)
    assert stepped.cache.stats()["packed_tokens"] == 2 * BLOCK
    assert stepped.all_logits().isfinite().all()
