"""KVCompCache.captured_steps: tokens, what is kept of them, and errors; on the CPU.

test_gpu_captured_steps.py captures and replays graphs.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bitslab import ArgumentError, BitslabError, CorruptedDataError
from bitslab.integrations.transformers import captured_steps
from bitslab.kvcache import PackedHistory, token_steps
from tests.integrations.transformers.models import prompt_of
from tests.integrations.transformers.steps import (
    BLOCK,
    PROMPT,
    Decoding,
    Imitation,
    open_block,
    pack,
    pair,
    stepped_model,
)
from tests.simt.runner import simt_kernels

pytestmark = pytest.mark.usefixtures("one_thread")


def compared(name: str, batch: int, padding: int, imitates: Any, **options: Any) -> Any:
    """Compare three blocks of steps with forward passes; return both decodings."""
    model = stepped_model(name)
    plain, stepped = pair(model, batch, padding, **options)
    for room, n in ((BLOCK, BLOCK), (BLOCK, BLOCK), (7, 5)):
        plain.eager(n)
        pack(plain.cache)
        with stepped.steps(room) as steps:
            graph = None if imitates is None else Imitation(steps, stepped.forward, imitates)
            for i in range(n):
                if graph is None or i == 3:  # any mixture of both
                    stepped.take(stepped.forward())
                else:
                    graph.step.replay()
                    stepped.take(graph.logits)
                assert (steps.tokens, steps.left) == (i + 1, room - i - 1)
                assert stepped.cache.get_seq_length() == plain.cache.get_seq_length() - n + i + 1
        pack(stepped.cache)
    assert torch.equal(stepped.tokens(), plain.tokens())
    assert torch.allclose(stepped.all_logits(), plain.all_logits(), rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(stepped.cache.layers, plain.cache.layers, strict=True):
        assert ours.packed_tokens == theirs.packed_tokens == 3 * BLOCK
        assert torch.allclose(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
        assert torch.allclose(ours.values, theirs.values, rtol=1e-4, atol=1e-4)
    return plain, stepped


@pytest.mark.drawn(3)
@pytest.mark.parametrize("how", ["replayed", "run"])
@pytest.mark.parametrize(("batch", "padding"), [(1, 0), (3, 0), (3, 41)], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_tokens_are_those_of_forward_passes(
    name: str, batch: int, padding: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared(name, batch, padding, monkeypatch if how == "replayed" else None)


def test_counts_are_those_of_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, stepped = compared("llama", 2, 0, monkeypatch)
    ours, theirs = stepped.cache.stats(), plain.cache.stats()
    # Room ahead is not the same.
    for name in ("device_bytes", "ratio"):
        ours.pop(name), theirs.pop(name)
    assert ours == theirs
    assert ours["packed_passes"] == 2 * (2 * BLOCK + 5) and not ours["dense_passes"]


def test_lossless_tiles_are_read_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stepped_model("llama", dtype=torch.bfloat16)
    plain, stepped = pair(model, batch=2, coder="lossless")
    plain.eager(6)
    with stepped.steps(8) as steps:
        graph = Imitation(steps, stepped.forward, monkeypatch)
        for wanted in plain.tokens():
            graph.step.replay()
            stepped.take(graph.logits)
            stepped.ids.copy_(wanted[:, None])
    found, expected = stepped.all_logits().float(), plain.all_logits().float()
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert stepped.cache.stats()["packed_passes"] == 2 * 6


@pytest.mark.drawn(2)
@pytest.mark.parametrize("padding", [0, 41])
@pytest.mark.parametrize("captures", [False, True], ids=["run", "captured"])
def test_launches_of_a_gpu_are_the_same_for_each_token(
    captures: bool, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels themselves, on the CPU: of every replay the same grids, and its own token."""
    plain, stepped = pair(stepped_model("llama"), batch=2, padding=padding)
    plain.eager(5)
    kernels, runner = simt_kernels()
    monkeypatch.setattr(token_steps, "_gpu_kernels", lambda device: kernels)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    # Behind padding a sequence's own first tokens are a run more than a launch takes.
    expected = ["append_token", *["attend_tiles"] * (2 if padding else 1)] * 2
    with stepped.steps(20) as steps:
        assert [kernel for _, kernel in runner.launched] == expected  # before any capture
        graph = Imitation(steps, stepped.forward, monkeypatch)
        launched = []
        for _ in range(5):
            runner.launched.clear()
            runner.grids.clear()
            graph.step.replay()
            stepped.take(graph.logits)
            launched.append((list(runner.launched), list(runner.grids)))
    assert all(each == launched[0] for each in launched)
    assert [kernel for _, kernel in launched[0][0]] == expected
    assert torch.equal(stepped.tokens(), plain.tokens())
    assert torch.allclose(stepped.all_logits(), plain.all_logits(), rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(stepped.cache.layers, plain.cache.layers, strict=True):
        assert torch.allclose(ours.keys, theirs.keys, rtol=1e-3, atol=1e-3)
        assert torch.allclose(ours.values, theirs.values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("change", ["crop", "beams", "copy", "pickle", "select", "repeat", "eager"])
def test_the_cache_goes_on_as_if_tokens_had_come_by_forward_passes(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stepped_model("llama")
    both = pair(model, batch=3)
    both[0].eager(20)
    with both[1].steps(32) as steps:
        graph = Imitation(steps, both[1].forward, monkeypatch)
        for _ in range(20):
            graph.step.replay()
            both[1].take(graph.logits)
    for each in both:
        cache = each.cache
        if change == "crop":
            cache.crop(-30)
        elif change == "beams":
            cache.reorder_cache(torch.tensor([2, 0, 0]))
        elif change == "select":
            cache.batch_select_indices(torch.tensor([1]))
        elif change == "repeat":
            cache.batch_repeat_interleave(2)
        elif change == "copy":
            each.cache = copy.deepcopy(cache)
        elif change == "pickle":
            each.cache = pickle.loads(pickle.dumps(cache))
    more = prompt_of(batch=both[0].cache._batch(), length=70, seed=3)
    found = []
    for each in both:
        with torch.no_grad():
            for part in more.split([1] * 66 + [4], dim=1):
                found.append(model(part, past_key_values=each.cache).logits[:, -1])
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)
    lengths = [each.cache.get_seq_length() for each in both]
    assert lengths[0] == lengths[1]


def test_a_copy_within_a_block_is_in_none(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped, plain = pair(stepped_model("llama"))
    plain.eager(5)
    with stepped.steps(8) as steps:
        graph = Imitation(steps, stepped.forward, monkeypatch)
        for _ in range(5):
            graph.step.replay()
            stepped.take(graph.logits)
        for copied in (copy.deepcopy(stepped.cache), pickle.loads(pickle.dumps(stepped.cache))):
            assert copied.get_seq_length() == PROMPT + 5
            with torch.no_grad():
                ours, theirs = (
                    stepped.model(prompt_of(length=9), past_key_values=cache).logits
                    for cache in (copied, copy.deepcopy(plain.cache))
                )
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
        assert steps.left == 3


def test_a_step_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped, plain = pair(stepped_model("llama"))
    plain.eager(4)
    with stepped.steps(4) as steps:
        graph = Imitation(steps, stepped.forward, monkeypatch)
        for _ in range(4):
            graph.step.replay()
            stepped.take(graph.logits)
        for call in (graph.step.replay, stepped.forward):
            with pytest.raises(BitslabError, match=r"no room is left of captured_steps\(4\)"):
                call()
        with pytest.raises(BitslabError, match="no room is left"):
            Imitation(steps, stepped.forward, monkeypatch)
        assert stepped.cache.get_seq_length() == PROMPT + 4
    assert torch.equal(stepped.tokens(), plain.tokens())
    assert torch.allclose(stepped.all_logits(), plain.all_logits(), rtol=1e-4, atol=1e-4)


def test_steps_end_with_their_block(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Decoding(stepped_model("llama"))
    with stepped.steps(8) as steps:
        graphs = [Imitation(steps, stepped.forward, monkeypatch) for _ in range(2)]
        for graph in graphs:
            graph.step.replay()
            assert not graph.resets
        kept = [weakref.ref(layer.steps) for layer in steps._layers.values()]
        count = weakref.ref(steps._count)
        assert copy.deepcopy(graphs[0].step) is None
    with stepped.steps(8):
        for graph in graphs:
            assert graph.resets == 1
            with pytest.raises(BitslabError, match="has been left, and the memory"):
                graph.step.replay()
        with pytest.raises(BitslabError, match="has been left"):
            Imitation(steps, stepped.forward, monkeypatch)
    assert stepped.cache.get_seq_length() == PROMPT + 2
    assert not any(each() for each in kept)
    del steps, graphs, graph
    assert count() is None


def test_captures_that_are_no_single_step_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped, plain = pair(stepped_model("llama"))
    plain.eager(3)
    layer = stepped.cache.layers[1]

    def twice() -> torch.Tensor:
        stepped.forward()
        return stepped.forward()

    def caught() -> torch.Tensor:
        with monkeypatch.context() as patch, contextlib.suppress(RuntimeError):
            fail_at("attention", 0, stepped.model, stepped.cache, patch)
            stepped.forward()
        return torch.empty(0)

    def again() -> torch.Tensor:
        with monkeypatch.context() as patch, contextlib.suppress(RuntimeError):
            fail_at("model", 0, stepped.model, stepped.cache, patch)
            stepped.forward()
        return stepped.forward()

    def in_part() -> torch.Tensor:
        key: torch.Tensor = layer.histories[0].tail[:, :, :1]
        stepped.cache.update(key, key, 0)
        return key

    with stepped.steps(3) as steps:
        stepped.take(stepped.forward())
        for run in (twice, caught, again, in_part, lambda: torch.empty(0)):
            with pytest.raises(BitslabError, match=r"capture\(\): .* were captured"):
                Imitation(steps, run, monkeypatch)
        with monkeypatch.context() as patch, pytest.raises(BitslabError, match="of layers "):
            patch.setattr(steps, "_order", [0, 2, 1])
            Imitation(steps, stepped.forward, monkeypatch)
        assert steps.tokens == 1 and stepped.cache.get_seq_length() == PROMPT + 1
        graph = Imitation(steps, stepped.forward, monkeypatch)
        for _ in range(2):
            graph.step.replay()
            stepped.take(graph.logits)
    assert torch.allclose(stepped.all_logits(), plain.all_logits(), rtol=1e-4, atol=1e-4)


def test_a_step_is_not_replayed_before_its_capture_has_ended_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stepped = Decoding(stepped_model("llama"))
    found: list[captured_steps.CapturedStep] = []

    class Seen(captured_steps.CapturedStep):
        def __init__(self, run: Callable[[], None]) -> None:
            super().__init__(run)
            found.append(self)

    monkeypatch.setattr(captured_steps, "CapturedStep", Seen)

    def within() -> torch.Tensor:
        stepped.forward()
        for call in (found[0].replay, lambda: Imitation(steps, stepped.forward, monkeypatch)):
            with pytest.raises(BitslabError, match="within a"):
                call()
        raise KeyError

    with stepped.steps(3) as steps:
        with pytest.raises(KeyError):
            Imitation(steps, within, monkeypatch)
        with pytest.raises(BitslabError, match="has not ended, or by an error"):
            found[0].replay()
        with pytest.raises(BitslabError, match="CUDA graphs are of GPUs"), steps.capture():
            pass
        assert steps.tokens == 0


def test_updates_in_captures_by_other_means_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped, plain = pair(stepped_model("llama"))
    plain.eager(3)
    with stepped.steps(3) as steps:
        stepped.take(stepped.forward())
        with monkeypatch.context() as patch:
            patch.setattr(captured_steps, "capturing", lambda device: True)
            with pytest.raises(BitslabError, match=r"other means than steps.capture\(\)"):
                stepped.forward()
            with pytest.raises(BitslabError, match="within another capture"), steps.capture():
                pass
        assert stepped.cache.get_seq_length() == PROMPT + 1
        graph = Imitation(steps, stepped.forward, monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(captured_steps, "capturing", lambda device: True)
            with pytest.raises(BitslabError, match="replay\\(\\): within a capture"):
                graph.step.replay()
        while steps.left:
            graph.step.replay()
            stepped.take(graph.logits)
    assert torch.allclose(stepped.all_logits(), plain.all_logits(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("where", ["launch", "count-0", "count-1"])
def test_an_interrupt_in_a_replay_takes_no_token(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not the device has run it by then."""
    stepped, plain = pair(stepped_model("llama"))
    plain.eager(5)

    def interrupted(*args: Any) -> None:
        patch.undo()
        raise KeyboardInterrupt

    with stepped.steps(5) as steps:
        graph = Imitation(steps, stepped.forward, monkeypatch)
        for i in range(5):
            if i in (1, 3):
                before = stepped.cache.stats()
                with monkeypatch.context() as patch:
                    owner: Any = graph
                    if where != "launch":
                        owner = steps._layers[int(where[-1])].steps
                    patch.setattr(owner, "replay" if owner is graph else "set", interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        graph.step.replay()
                assert {x.get_seq_length() for x in stepped.cache.layers} == {PROMPT + i}
                assert steps.tokens == i and stepped.cache.stats() == before
            if i == 3:
                stepped.take(stepped.forward())
                continue
            graph.step.replay()
            stepped.take(graph.logits)
    assert torch.allclose(stepped.all_logits(), plain.all_logits(), rtol=1e-4, atol=1e-4)


def test_positions_and_padding_that_were_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Decoding(stepped_model("llama"), batch=2, padding=3)
    model, cache = stepped.model, stepped.cache
    with pytest.raises(ArgumentError, match="attention_mask: None, but the cache holds padding"):
        open_block(cache)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(stepped.ids, past_key_values=cache).logits
        return logits

    with stepped.steps(3) as steps:
        with pytest.raises(BitslabError, match="pass the model position_ids, in memory on the"):
            Imitation(steps, forward, monkeypatch)
        forward()  # eager steps may ask
        assert steps.tokens == 1
    with pytest.raises(ArgumentError, match="attention_mask: None"):
        open_block(cache)
    cache.reset()
    with torch.no_grad():
        model(prompt_of(batch=2, length=PROMPT), past_key_values=cache)
    open_block(cache)


def test_padding_is_known_of_pass_and_first_tokens() -> None:
    """Of caches that keep no first tokens by the last pass, of others by those."""
    stepped = Decoding(stepped_model("llama"), batch=2, padding=3, sinks=0)
    with pytest.raises(ArgumentError, match="attention_mask: None"):
        open_block(stepped.cache)
    stepped = Decoding(stepped_model("llama"), batch=2, padding=3)
    for layer in stepped.cache.layers:
        del layer._padding  # as of one that was pickled without it
    with pytest.raises(ArgumentError, match="attention_mask: None"):
        open_block(stepped.cache)
    open_block(stepped.cache, attention_mask=stepped.mask)


def test_handles_of_a_step_have_one_length() -> None:
    stepped = Decoding(stepped_model("llama"))
    lengths = []
    update = stepped.cache.update

    def seen(*args: Any, **kwargs: Any) -> Any:
        found = update(*args, **kwargs)
        lengths.append([t.shape[2] for t in found])
        return found

    stepped.cache.update = seen
    with stepped.steps(4):
        for _ in range(2):
            stepped.take(stepped.forward())
    assert lengths == [[PROMPT + 1 + i] * 2 for i in (0, 0, 1, 1)]


def test_errors_of_the_device_come_from_replays_and_the_end_of_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stepped = Decoding(stepped_model("llama"))

    def pending(device: torch.device) -> None:
        raise CorruptedDataError("packed: a row")

    with pytest.raises(CorruptedDataError), stepped.steps(4) as steps:
        graph = Imitation(steps, stepped.forward, monkeypatch)
        monkeypatch.setattr(token_steps, "_gpu_kernels", pending)
        with pytest.raises(CorruptedDataError):
            graph.step.replay()
        assert steps.tokens == 0 and not graph.logits.numel()
    assert graph.resets == 1
    monkeypatch.undo()
    stepped.eager(2)


def test_a_block_takes_the_turn_of_all_histories_first(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Decoding(stepped_model("llama"))
    calls: list[str] = []
    real = PackedHistory.take_turn
    learns = stepped.cache._histories
    monkeypatch.setattr(learns, "finish_learning", lambda: calls.append("learn"))

    def take_turn(history: PackedHistory) -> int:
        calls.append("turn")
        return real(history)

    monkeypatch.setattr(PackedHistory, "take_turn", take_turn)
    open_block(stepped.cache)
    assert calls[:5] == ["turn"] * 4 + ["learn"]


@pytest.mark.parametrize(
    ("where", "layer"),
    [("attention", 0), ("attention", 1), ("update", 0), ("update", 1), ("model", 0)],
    ids=str,
)
def test_a_forward_pass_that_fails_leaves_the_cache_as_it_was(
    where: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stepped_model("llama")
    stepped, plain = pair(model, batch=2)
    plain.eager(7)
    with stepped.steps(9) as steps:
        graph = Imitation(steps, stepped.forward, monkeypatch)
        for i in range(7):
            if i in (2, 5):
                with monkeypatch.context() as patch:
                    fail_at(where, layer, model, stepped.cache, patch)
                    with pytest.raises((RuntimeError, ArgumentError)):
                        stepped.forward()
                assert steps.tokens == i
            if i % 2:
                stepped.take(stepped.forward())
            else:
                graph.step.replay()
                stepped.take(graph.logits)
        assert steps.left == 2
    assert torch.allclose(stepped.all_logits(), plain.all_logits(), rtol=1e-4, atol=1e-4)


def fail_at(where: str, layer: int, model: Any, cache: Any, patch: pytest.MonkeyPatch) -> None:
    """Let the next forward pass fail in a layer."""

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("injected")

    if where == "attention":
        patch.setattr(cache.layers[layer].attention, "serves", fails)
    elif where == "update":
        patch.setattr(cache.layers[layer].histories[1], "check", fails)
    else:
        patch.setattr(model.model.layers[layer].mlp, "forward", fails)


def test_an_error_within_the_block_leaves_the_tokens_that_were_taken() -> None:
    stepped, plain = pair(stepped_model("llama"))
    plain.eager(5)
    with pytest.raises(KeyError), stepped.steps(9):
        for _ in range(3):
            stepped.take(stepped.forward())
        raise KeyError
    stepped.eager(2)
    assert torch.allclose(stepped.all_logits(), plain.all_logits(), rtol=1e-4, atol=1e-4)
