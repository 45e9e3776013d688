"""CompressedCache on a GPU: DynamicCache's bits and tokens, and steps that wait for nothing."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest
import torch
import transformers

import bitslab
from bitslab.errors import BitslabError
from bitslab.integrations.accelerate import offload_compressed
from bitslab.integrations.transformers import KVCompCache
from bitslab.kvcache.in_flight import InFlightBlocks
from tests.integrations.transformers.models import (
    CONFIGS,
    SMALL,
    compressed,
    config_of,
    dynamic,
    model_of,
    prompt_of,
)

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "top_k": 20},
    "beam": {"do_sample": False, "num_beams": 3},
    "prompt-lookup": {"do_sample": False, "prompt_lookup_num_tokens": 4},
    "assisted": {"do_sample": False},
    "chunked-prefill": {"do_sample": False, "prefill_chunk_size": 13},
}


def on_gpu(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    return copy.deepcopy(model_of(name, seed)).to("cuda", dtype)


def generated(model: Any, prompt: torch.Tensor, past: Any, options: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)
    found: torch.Tensor = model.generate(prompt, past_key_values=past, **options)
    return found


#: An assistant with layers of a sliding window fails in transformers itself.
CASES = [
    (name, mode) for name in CONFIGS for mode in MODES if (name[:5], mode) != ("gemma", "assisted")
]


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("name, mode", CASES)
def test_tokens_and_bits_equal_the_plain_run(name: str, mode: str, offload: bool) -> None:
    model = on_gpu(name)
    prompt = prompt_of().cuda()
    plain = dynamic(model.config)
    cache = compressed(model.config, offload=offload, **SMALL)
    options = {**MODES[mode], "max_new_tokens": 40}
    if mode == "assisted":
        options["assistant_model"] = on_gpu(name, seed=1)
    expected, found = (generated(model, prompt, past, options) for past in (plain, cache))
    assert torch.equal(found, expected)
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    assert cache.stats()["packed_tokens"] > 50


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("mode", ["greedy", "beam", "assisted", "chunked-prefill"])
@pytest.mark.parametrize("seed", [1, 2])
def test_when_packed_sizes_come_to_be_known_changes_no_token(
    mode: str, offload: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K's and V's, of whichever layer, at any step: a host may be far ahead of its GPU."""
    known, random = InFlightBlocks.known, Random(seed)
    monkeypatch.setattr(
        InFlightBlocks,
        "known",
        lambda blocks, wait: (wait or random.random() < 0.4) and known(blocks, wait),
    )
    model = on_gpu("llama")
    options = {**MODES[mode], "max_new_tokens": 40}
    if mode == "assisted":
        options["assistant_model"] = on_gpu("llama", seed=1)
    cache = compressed(model.config, offload=offload, **SMALL)
    prompt = prompt_of().cuda()
    expected = generated(model, prompt, dynamic(model.config), options)
    assert torch.equal(generated(model, prompt, cache, options), expected)
    assert cache.stats()["packed_tokens"] > 50


@pytest.mark.parametrize("share", [0.5, 0.2, "auto"], ids=str)
@pytest.mark.parametrize("mode", ["greedy", "beam", "prompt-lookup", "chunked-prefill"])
def test_a_share_in_host_memory_gives_the_same_tokens(mode: str, share: Any) -> None:
    config = config_of("llama", num_hidden_layers=6)
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    model.to("cuda").eval()
    prompt = prompt_of().cuda()
    options = {**MODES[mode], "max_new_tokens": 60}
    cache = compressed(config, offload=share, **SMALL)
    expected = generated(model, prompt, dynamic(config), options)
    assert torch.equal(generated(model, prompt, cache, options), expected)
    stats = cache.stats()
    hosted = stats["host_layers"]
    if share != "auto":
        assert hosted == ([1, 3, 5] if share == 0.5 else [5])
    assert (stats["packed_host_bytes"] > 0) == bool(hosted)
    assert (stats["packed_device_bytes"] > 0) == (len(hosted) < 6)


@pytest.mark.parametrize("kind", ["lossless", "kvcomp"])
def test_layers_move_between_host_and_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the next ones are fetched: the same bits as without."""
    config = config_of("llama", num_hidden_layers=8, head_dim=128)
    make: Any = {"lossless": compressed, "kvcomp": KVCompCache}[kind]
    caches = [make(config, offload=share) for share in ("auto", True)]
    balance = caches[0]._histories.placement.balance
    wanted = {5: 3, 20: 0, 30: 8}
    step = -1
    monkeypatch.setattr(balance, "begin", lambda tokens: step in wanted)
    monkeypatch.setattr(balance, "hosted", lambda *_: wanted[step])
    generator = torch.Generator("cuda").manual_seed(0)
    for step in range(40):
        shape = (2, 2, 2000 if not step else 1, 128)
        for layer in range(8):
            k, v = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in "kv")
            found, expected = (past.update(k, v, layer) for past in caches)
            assert all(map(torch.equal, found, expected))
        if step in wanted:
            assert len(caches[0].stats()["host_layers"]) == wanted[step]
            assert (caches[0].stats()["packed_device_bytes"] > 0) == (wanted[step] < 8)


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("keep", [None, "packed"], ids=["streamed", "packed"])
@pytest.mark.parametrize("mode", ["greedy", "sample", "beam"])
def test_packed_weights_and_a_packed_cache_go_together(mode: str, keep: Any, offload: bool) -> None:
    config = config_of("llama", num_hidden_layers=4)
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    model.to("cuda", torch.bfloat16).eval()
    prompt = prompt_of(batch=2).cuda()
    options = {**MODES[mode], "max_new_tokens": 40}
    expected = generated(model, prompt, None, options)
    model.cpu()
    offload_compressed(model, execution_device="cuda", min_bytes=0, keep=keep)
    for _ in range(2):
        cache = compressed(config, offload=offload, **SMALL)
        assert torch.equal(generated(model, prompt, cache, options), expected)
        assert cache.stats()["packed_tokens"] > 50


@pytest.mark.parametrize("offload", [True, 0.5], ids=str)
def test_steps_of_a_model_wait_for_nothing(offload: Any, no_waiting) -> None:
    config = config_of("llama", num_hidden_layers=4, hidden_size=256, head_dim=128)
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    model.to("cuda", torch.bfloat16).eval()
    prompt = prompt_of(length=100).cuda()
    cache = compressed(config, offload=offload, window=16, block_tokens=16)
    plain = dynamic(config)
    token = prompt[:, :1]
    with torch.no_grad():
        for past in (cache, plain):
            model(prompt, past_key_values=past)
            for _ in range(40):
                model(token, past_key_values=past)
        before = cache.stats()["packed_tokens"]
        with no_waiting():
            found = [model(token, past_key_values=cache).logits for _ in range(50)]
        expected = [model(token, past_key_values=plain).logits for _ in range(50)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert cache.stats()["packed_tokens"] > before
    assert cache.stats()["moved_to_host_bytes"] > 0


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_prompts_of_a_second_cache_wait_for_nothing(offload: bool, run_ahead) -> None:
    """With the codecs of the first, while nothing that is queued runs."""
    config = config_of("llama", num_hidden_layers=6, head_dim=128)

    def tokens_of(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        shape = (1, 900, 2, 128)
        return [
            torch.randn(shape, generator=generator, device="cuda").bfloat16().transpose(1, 2)
            for _ in range(12)
        ]

    def feed(cache: Any, tokens: list[torch.Tensor], end: int) -> None:
        for layer in range(6):
            k, v = (t[:, :, :end] for t in tokens[2 * layer : 2 * layer + 2])
            cache.update(k, v, layer)

    for seed in range(2):
        cache, tokens = compressed(config, offload=offload), tokens_of(seed)
        if seed:
            run_ahead(lambda: feed(cache, tokens, 900))  # noqa: B023
        else:
            feed(cache, tokens, 900)
        for _ in range(3):  # the pass of a token goes on with what has come
            torch.cuda.synchronize()
            feed(cache, [t[:, :, -1:] for t in tokens], 1)
        assert cache.stats()["packed_tokens"] > 700
        for layer, k in enumerate(tokens[::2]):
            expected = torch.cat([k, *[k[:, :, -1:]] * 3], dim=2)
            assert torch.equal(cache.layers[layer].keys, expected)


def test_another_device_is_refused() -> None:
    cache = compressed(config_of("llama"), device="cuda")
    with pytest.raises(bitslab.ArgumentTypeError, match="key_states: on cpu"):
        cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)


@pytest.mark.parametrize("kind", [compressed, KVCompCache], ids=["compressed", "kvcomp"])
def test_a_step_that_is_captured_is_refused_and_changes_nothing(kind: Any) -> None:
    cache = kind(config_of("llama"), offload=False)
    k = torch.randn(1, 2, 40, 16, device="cuda")
    cache.update(k, k, 0)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(BitslabError, match="a CUDA graph is being captured"),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        k.add_(0)  # torch warns of graphs that hold nothing
        cache.update(k[:, :, :1], k[:, :, :1], 0)
    assert cache.get_seq_length() == 40
    keys, _ = cache.update(k[:, :, :1], k[:, :, :1], 0)
    assert torch.equal(keys[:, :, :40], k)
