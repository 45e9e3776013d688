"""KVCompCache.captured_steps: tokens, what is kept of them, and errors; on the CPU.

test_gpu_captured_steps.py captures and replays graphs.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from bitslab import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.integrations.transformers import HeavyHitterSelector, KVCompCache
from bitslab.kvcache import token_steps
from tests.integrations.transformers.models import prompt_of
from tests.integrations.transformers.steps import (
    BLOCK,
    PROMPT,
    SIZES,
    WINDOW,
    Decoding,
    Imitation,
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
            graph = None if imitates is None else Imitation(stepped.forward, imitates)
            for i in range(n):
                if graph is None or i == 3:  # any mixture of both
                    stepped.take(stepped.forward())
                else:
                    steps.replay(graph)
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


@pytest.mark.drawn(4)
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
        graph = Imitation(stepped.forward, monkeypatch)
        launched = []
        for _ in range(5):
            runner.launched.clear()
            runner.grids.clear()
            steps.replay(graph)
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
        graph = Imitation(both[1].forward, monkeypatch)
        for _ in range(20):
            steps.replay(graph)
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
        graph = Imitation(stepped.forward, monkeypatch)
        for _ in range(5):
            steps.replay(graph)
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


def test_no_token_is_put_behind_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a replay that the cache is asked for, nor by those that it hears of too late."""
    stepped, plain = pair(stepped_model("llama"))
    plain.eager(4)
    with stepped.steps(4) as steps:
        graph = Imitation(stepped.forward, monkeypatch)
        for _ in range(3):
            steps.replay(graph)
            stepped.take(graph.logits)
        tails = [h.unpacked.tail.memory for x in stepped.cache.layers for h in x.histories]
        before = [tail.clone() for tail in tails]
        ids, at = stepped.ids.clone(), stepped.at.clone()
        for _ in range(3):
            graph.replay()
        for tail, then in zip(tails, before, strict=True):
            same = tail.view(torch.int32) == then.view(torch.int32)  # what is not there may be NaN
            same = same.all(-1).all(0).all(0)  # of each token
            assert same.sum() == same.shape[0] - 1 and not same[WINDOW + 3]
        with pytest.raises(BitslabError, match=r"replayed\(\): 3 more tokens, room is left for 1 "):
            steps.replayed(3)
        assert stepped.cache.get_seq_length() == PROMPT + 3
        assert torch.equal(stepped.ids, ids) and torch.equal(stepped.at, at)
        steps.replay(graph)  # goes on where the cache is
        stepped.take(graph.logits)
        with pytest.raises(BitslabError, match=r"replay\(\): 1 more tokens, room is left for 0 of"):
            steps.replay(graph)
        with pytest.raises(BitslabError, match=r"update\(\): 1 more tokens, room is left for 0"):
            stepped.forward()
    assert torch.equal(stepped.tokens(), plain.tokens())
    assert torch.allclose(stepped.all_logits(), plain.all_logits(), rtol=1e-4, atol=1e-4)


def test_replays_behind_the_block_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = Decoding(stepped_model("llama"))
    with stepped.steps(8) as steps:
        graph = Imitation(stepped.forward, monkeypatch)
        steps.replay(graph)
        found = [layer.steps for layer in steps._layers.values()]
        memory = [each.memory for each in found]
        count = steps._count.short_by
        kept = [[t.view(torch.int32).clone() for t in both] for both in memory]  # some is no number
    for _ in range(3):
        # What a graph does that was captured then.
        count.sub_(1)
        for i, each in enumerate(found):
            each.append(*(torch.ones(1, 2, 1, 16) for _ in "kv"))
            for now, before in zip(memory[i], kept[i], strict=True):
                assert torch.equal(now.view(torch.int32), before)
    for call in (lambda: steps.replay(graph), steps.replayed):
        with pytest.raises(BitslabError, match="has been left, and the memory"):
            call()
    assert stepped.cache.get_seq_length() == PROMPT + 1
    with stepped.steps(8) as another:
        assert another._count.short_by.data_ptr() != count.data_ptr()


def test_tokens_that_were_replayed_elsewhere_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped, plain = pair(stepped_model("llama"), batch=2)
    plain.eager(6)
    with stepped.steps(6) as steps:
        graph = Imitation(stepped.forward, monkeypatch)
        for _ in range(6):
            graph.replay()
            stepped.take(graph.logits)
        assert stepped.cache.get_seq_length() == PROMPT
        steps.replayed(6)
        assert stepped.cache.get_seq_length() == PROMPT + 6 and not steps.left
    assert torch.allclose(stepped.all_logits(), plain.all_logits(), rtol=1e-4, atol=1e-4)


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
        graph = Imitation(stepped.forward, monkeypatch)
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
                steps.replay(graph)
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


CHANGES: dict[str, Any] = {
    "crop": lambda cache: cache.crop(-1),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([0])),
    "reset": lambda cache: cache.reset(),
    "another-block": lambda cache: cache.captured_steps(3).__enter__(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_refuses_what_would_move_its_tokens(change: str) -> None:
    stepped = Decoding(stepped_model("llama"))
    with stepped.steps(4):
        stepped.take(stepped.forward())
        with pytest.raises(BitslabError, match=r"captured_steps\(\)"):
            CHANGES[change](stepped.cache)
        stepped.take(stepped.forward())
    assert stepped.cache.get_seq_length() == PROMPT + 2
    if change != "another-block":
        CHANGES[change](stepped.cache)


def test_a_step_that_cannot_be_read_packed_is_refused() -> None:
    stepped = Decoding(stepped_model("llama"), batch=2)
    model, cache = stepped.model, stepped.cache
    with stepped.steps(4) as steps:
        with torch.no_grad(), pytest.raises(ArgumentError, match="key_states: 3 tokens; within"):
            model(prompt_of(batch=2, length=3), past_key_values=cache)
        with torch.no_grad(), pytest.raises(ArgumentError, match="shape"):
            model(prompt_of(batch=3, length=1), past_key_values=cache)
        mask = torch.ones(2, PROMPT + 1, dtype=torch.int64)
        mask[0, :5] = 0
        with torch.no_grad(), pytest.raises(BitslabError, match="without a mask"):
            model(stepped.ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(BitslabError, match=r"gradients \(run the model within torch.no_grad"):
            model(stepped.ids, past_key_values=cache)
        model.set_attn_implementation("sdpa")
        with torch.no_grad(), pytest.raises(BitslabError, match='attention by "bitslab"'):
            model(stepped.ids, past_key_values=cache)
        model.set_attn_implementation("bitslab")
        assert steps.tokens == 0 and cache.get_seq_length() == PROMPT
        stepped.take(stepped.forward())
    plain = Decoding(model, batch=2)
    plain.eager(1)
    assert torch.allclose(stepped.all_logits(), plain.all_logits(), rtol=1e-4, atol=1e-4)


def refused(cache: Any, tokens: Any = 4, **options: Any) -> None:
    with cache.captured_steps(tokens, **options):
        pass


ARGUMENTS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "none": (0, {}, ArgumentError, "tokens: 0, accepted are integers from 1"),
    "float": (2.5, {}, ArgumentTypeError, "tokens: expected an int, got 2.5"),
    "mask-list": (
        4,
        {"attention_mask": [1]},
        ArgumentTypeError,
        "attention_mask: expected a tensor",
    ),
    "mask-short": (
        4,
        {"attention_mask": torch.ones(1, 9)},
        ArgumentError,
        rf"attention_mask: shape \[1, 9\], accepted is \[1, {PROMPT}\]",
    ),
    "mask-right": (
        4,
        {"attention_mask": torch.ones(1, PROMPT).index_fill(1, torch.tensor([9]), 0)},
        ArgumentError,
        "accepted are sequences with padding on the left alone",
    ),
}


@pytest.mark.parametrize(("tokens", "options", "kind", "text"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_are_checked(
    tokens: Any, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    stepped = Decoding(stepped_model("llama"))
    with pytest.raises(kind, match=text):
        refused(stepped.cache, tokens, **options)
    stepped.eager(2)


@pytest.mark.parametrize("offload", [True, 0.5, "auto"])
def test_words_in_host_memory_are_refused(offload: Any) -> None:
    stepped = Decoding(stepped_model("llama"), offload=offload)
    with pytest.raises(ArgumentError, match="offload: packed words lie in host memory"):
        refused(stepped.cache)


def test_caches_that_attention_does_not_read_packed_are_refused() -> None:
    model = stepped_model("llama")
    selecting = KVCompCache(model.config, select=HeavyHitterSelector(0.5, 4), offload=False)
    with pytest.raises(ArgumentError, match="select: "):
        refused(selecting)
    with pytest.raises(BitslabError, match="hold a prompt, on one device, this one is on none"):
        refused(KVCompCache(model.config, offload=False))
    for options, text in (
        ({"error": 0}, r"layer 0 .*\(error 0\)"),
        ({"granularity": "token", "error": 0.3}, r"layer 0 .*\(granularity 'token'\)"),
        ({"window": 64}, rf"layer 0 .*of {PROMPT} tokens none is packed: there are 4 first and 64"),
    ):
        with pytest.raises(BitslabError, match=text):
            refused(Decoding(model, **options).cache)
    stepped = Decoding(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(BitslabError, match=r'call model.set_attn_implementation\("bitslab"\)'):
        refused(stepped.cache)


def test_layers_of_other_kinds_are_refused() -> None:
    model = stepped_model("gemma2")
    cache = KVCompCache(model.config, **SIZES)
    with torch.no_grad():
        model(prompt_of(length=PROMPT), past_key_values=cache)
    with pytest.raises(BitslabError, match="layers all have full attention, this one has Dynamic"):
        refused(cache)


def test_an_error_within_the_block_leaves_the_tokens_that_were_taken() -> None:
    stepped, plain = pair(stepped_model("llama"))
    plain.eager(5)
    with pytest.raises(KeyError), stepped.steps(9):
        for _ in range(3):
            stepped.take(stepped.forward())
        raise KeyError
    stepped.eager(2)
    assert torch.allclose(stepped.all_logits(), plain.all_logits(), rtol=1e-4, atol=1e-4)
