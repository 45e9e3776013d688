"""KVCompCache.captured_steps on a GPU: CUDA graphs of decode steps, and compiled models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from bitslab.errors import ArgumentError, BitslabError, CorruptedDataError
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


def captured(decoding: Decoding, steps: Any, **options: Any) -> tuple[Any, torch.Tensor]:
    """Return a step, and its logits ``[B, 1, vocabulary]``, which it writes.

    It goes from each token to the next by itself: `decoding.ids` and `decoding.at` are what it
    reads and writes.
    """
    with steps.capture(**options) as step:
        logits = decoding.forward()[:, -1:]
        decoding.ids.copy_(logits.argmax(-1))
        decoding.at.add_(1)
    return step, logits


def take(decoding: Decoding, logits: torch.Tensor) -> None:
    """Keep logits of a step that has gone on by itself."""
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
            step, logits = captured(stepped, steps)
            assert steps.tokens == warm  # a capture runs nothing
            while steps.tokens < n:
                if steps.tokens == 4:  # between replays
                    stepped.take(stepped.forward())
                    continue
                step.replay()
                take(stepped, logits)
            assert stepped.cache.get_seq_length() == plain.cache.get_seq_length()
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


@pytest.mark.parametrize("coder", ["huffman", "lossless"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_of_short_dtypes_and_longer_contexts(dtype: torch.dtype, coder: str) -> None:
    """Tokens of the forward passes are given to both: one that differs would change all others."""
    model = stepped_model("llama", "cuda", dtype)
    plain, stepped = pair(model, batch=2, length=148, coder=coder)
    plain.eager(28)
    wanted = plain.tokens()
    with stepped.steps(28) as steps:
        for i in range(28):
            if i == 1:
                with steps.capture() as step:
                    logits = stepped.forward()
            if i:
                step.replay()
            else:
                logits = stepped.forward()
            stepped.take(logits)
            stepped.ids.copy_(wanted[i][:, None])
    found, expected = stepped.all_logits().float(), plain.all_logits().float()
    assert (found - expected).norm() < 0.05 * expected.norm()
    ours, theirs = stepped.cache.layers[0], plain.cache.layers[0]  # K and V of tokens alone
    if coder == "lossless":
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        assert set(stepped.cache.stats()["lossless"].values()) == {"coder 'lossless'"}
    assert stepped.cache.stats()["packed_passes"] == 2 * 28


def test_several_steps_of_a_block() -> None:
    """Which share the memory of one of them, as torch's graphs do that are replayed in turn."""
    plain, stepped = pair(stepped_model("llama", "cuda"), batch=2)
    plain.eager(9)
    with stepped.steps(9) as steps:
        stepped.take(stepped.forward())
        pool = torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()
        both = [
            captured(stepped, steps, pool=pool),
            captured(stepped, steps, pool=pool, stream=side, capture_error_mode="thread_local"),
        ]
        while steps.left:
            for step, logits in both:
                step.replay()
                take(stepped, logits)
    assert_alike(stepped, plain)


def test_replays_on_a_stream_of_their_own() -> None:
    """What comes behind them on another stream finds their tokens there."""
    plain, stepped = pair(stepped_model("llama", "cuda"))
    plain.eager(20)
    side = torch.cuda.Stream()
    with stepped.steps(20) as steps:
        stepped.take(stepped.forward())
        step, logits = captured(stepped, steps)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)  # the block ends before they have run
            while steps.left:
                step.replay()
                take(stepped, logits)
    kept = [(layer.keys, layer.values) for layer in stepped.cache.layers]  # the cache waits
    for layer, both in zip(plain.cache.layers, kept, strict=True):
        for one, other in zip((layer.keys, layer.values), both, strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-3)
    torch.cuda.current_stream().wait_stream(side)  # for `ids` and `at`
    for each in (plain, stepped):
        each.eager(8)
    assert_alike(stepped, plain)


def test_a_block_on_another_stream_than_the_prompt_waits_for_it() -> None:
    plain, stepped = pair(stepped_model("llama", "cuda"), batch=2)
    plain.eager(6)
    wanted = plain.tokens()
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    stepped.eager(1)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        stepped.ids = wanted[0][:, None].clone()
        stepped.at = torch.full_like(stepped.ids, PROMPT + 1)
        with stepped.steps(5) as steps:
            step, logits = captured(stepped, steps)
            while steps.left:
                step.replay()
                take(stepped, logits)
    torch.cuda.current_stream().wait_stream(side)
    assert_alike(stepped, plain)


def test_steps_end_with_their_block() -> None:
    """And write to nothing that lies where their tokens were."""
    model = stepped_model("llama", "cuda")
    plain, stepped = pair(model)
    plain.eager(4)
    with stepped.steps(4) as steps:
        step, logits = captured(stepped, steps)
        while steps.left:
            step.replay()
            take(stepped, logits)
        with pytest.raises(BitslabError, match="no room is left of"):
            step.replay()
        tails = [h.unpacked.tail.memory for x in stepped.cache.layers for h in x.histories]
        shapes = [tail.shape for tail in tails]
        del tails
    assert_alike(stepped, plain)
    last = logits.clone()
    stepped.cache.reset()
    canaries = [torch.full(shape, 7.0, device="cuda") for shape in shapes for _ in range(3)]
    other = Decoding(model)
    with other.steps(4):
        for _ in range(3):
            with pytest.raises(BitslabError, match="has been left"):
                step.replay()
    torch.cuda.synchronize()
    assert all((canary == 7).all() for canary in canaries)
    assert torch.equal(logits, last)  # what a step has written remains


def test_damaged_tiles_are_reported_by_replays_and_the_end_of_the_block() -> None:
    stepped = Decoding(stepped_model("llama", "cuda"))
    with (
        pytest.raises(CorruptedDataError, match="of an earlier decode"),
        stepped.steps(9) as steps,
    ):
        step, _ = captured(stepped, steps)
        step.replay()
        words = steps._layers[0].steps._reads._words[0]  # of K
        generator = torch.Generator().manual_seed(1)
        damage = torch.randint(-(1 << 31), 1 << 31, words.shape, generator=generator)
        words.copy_(damage.to(torch.int32))
        step.replay()
        torch.cuda.synchronize()
        with pytest.raises(CorruptedDataError, match="of an earlier decode"):
            step.replay()
        assert steps.tokens == 2
        step.replay()
        torch.cuda.synchronize()
    with pytest.raises(BitslabError, match="has been left"):
        step.replay()


def test_replays_wait_for_nothing(
    no_waiting: Callable[..., AbstractContextManager[None]],
) -> None:
    stepped = Decoding(stepped_model("llama", "cuda"))
    with stepped.steps(20) as steps:
        stepped.take(stepped.forward())
        step, _ = captured(stepped, steps)
        step.replay()
        with no_waiting():
            for _ in range(10):
                step.replay()
    assert stepped.cache.get_seq_length() == PROMPT + 12


def test_a_capture_outside_of_a_block_is_refused_as_ever() -> None:
    stepped, plain = pair(stepped_model("llama", "cuda"), batch=2)
    with (
        pytest.raises(BitslabError, match=r"Capture steps by steps.capture\(\) within KVComp"),
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


def test_captures_of_what_cannot_be_replayed_are_discarded() -> None:
    stepped, plain = pair(stepped_model("llama", "cuda"), batch=2, padding=3)
    model, cache = stepped.model, stepped.cache
    with pytest.raises(ArgumentError, match="attention_mask: None"), cache.captured_steps(4):
        pass
    plain.eager(4)
    with torch.no_grad(), stepped.steps(4) as steps:
        stepped.take(stepped.forward())
        with pytest.raises(BitslabError, match="position_ids"), steps.capture() as step:
            model(stepped.ids, past_key_values=cache)
        with pytest.raises(BitslabError, match="has not ended, or by an error"):
            step.replay()
        with pytest.raises(BitslabError, match="2 forward passes were captured"), steps.capture():
            stepped.forward()
            stepped.forward()
        with (
            pytest.raises(BitslabError, match=r"other means than steps.capture\(\)"),
            torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
        ):
            stepped.forward()
        with pytest.raises(BitslabError, match="replay.*within a capture"):
            step, logits = captured(stepped, steps)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                stepped.at.add_(0)
                step.replay()
        assert steps.tokens == 1
        while steps.left:
            step.replay()
            take(stepped, logits)
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
                captured(stepped, steps)
            with pytest.raises(RuntimeError, match="injected"):
                stepped.forward()
        step, logits = captured(stepped, steps)
        while steps.left:
            step.replay()
            take(stepped, logits)
    assert_alike(stepped, plain)


@pytest.mark.parametrize("change", ["crop", "beams", "copy"])
def test_the_cache_goes_on_behind_a_block(change: str) -> None:
    model = stepped_model("llama", "cuda")
    both = pair(model, batch=3)
    both[0].eager(20)
    with both[1].steps(BLOCK) as steps:
        step, logits = captured(both[1], steps)
        for _ in range(20):
            step.replay()
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
