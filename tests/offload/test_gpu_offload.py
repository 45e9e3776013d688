"""Streamed weights on a real GPU: the same numbers, no waiting, no growth."""

from __future__ import annotations

import gc
import statistics
import weakref
from typing import Any

import pytest
import torch

from bitslab.engine.kernels.cuda.ids import CHECKED_BY_ALL
from bitslab.errors import BitslabError, IndexRangeError
from bitslab.offload import (
    WeightHandle,
    find_offloaded,
    offload_report,
    offload_weights,
    restore_weights,
)
from tests.helpers import same_bits
from tests.offload.models import Blocks, stats

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU


def llama(hidden: int = 256, layers: int = 5, tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16).eval()


def ids(length: int = 17) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 1000, (2, length), generator=generator).cuda()


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(ids()).logits


MODES = {
    "streamed": {},
    "raw": {"codec": "raw"},
    "no-prefetch": {"depth": 0},
    "deep": {"depth": 4},
    "all-multiprocessors": {"sm_budget": None},
    "packed": {"keep": "packed"},
    "half": {"keep": 0.5},
    "all": {"keep": "all"},
}


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_equal_those_of_the_plain_model(options, tied):
    model = llama(tied=tied).cuda()
    expected = logits(model)
    model.cpu()
    offload_weights(model, execution_device="cuda", min_bytes=0, **options)
    for _ in range(3):
        assert same_bits(logits(model), expected)
    state = model.state_dict()
    assert all(
        tensor.device.type == "cpu" or "norm" in name or options.get("keep")
        for name, tensor in state.items()
    )
    restore_weights(model)
    assert same_bits(logits(model.cuda()), expected)


def test_a_mid_size_model_on_another_stream():
    model = llama(hidden=1024, layers=6).cuda()
    expected = logits(model)
    model.cpu()
    offload_weights(model, execution_device="cuda", min_bytes=0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = [logits(model) for _ in range(3)]
    torch.cuda.current_stream().wait_stream(side)
    assert all(same_bits(one, expected) for one in found)
    assert same_bits(logits(model), expected)


@pytest.mark.parametrize("keep", [None, "packed"], ids=["streamed", "packed"])
def test_a_pass_waits_for_nothing_and_allocates_nothing(keep, no_waiting):
    model = Blocks(width=512, count=6).to(torch.bfloat16)
    x = torch.randn(8, 512, device="cuda", dtype=torch.bfloat16)
    plain = Blocks(width=512, count=6).to(torch.bfloat16).cuda()
    offload_weights(model, execution_device="cuda", min_bytes=0, keep=keep)
    with torch.no_grad():
        expected = plain(x)
        for _ in range(8):  # every unit in every buffer
            model(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        segments = torch.cuda.memory_stats()["segment.all.allocated"]
        with no_waiting():
            for _ in range(5):
                found = model(x)
        assert same_bits(found, expected)
        del found
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_stats()["segment.all.allocated"] == segments
    assert stats(model)["buffers"] == 2


def test_a_changed_order_is_right():
    model = Blocks(width=512, count=6).to(torch.bfloat16)
    x = torch.randn(8, 512, device="cuda", dtype=torch.bfloat16)
    orders: tuple[list[int], ...] = (
        [0, 1, 2, 3, 4, 5],
        [5, 3, 1],
        [2, 2, 2, 0],
        [4, 0, 4, 0, 4],
        [],
    )
    plain = Blocks(width=512, count=6).to(torch.bfloat16).cuda()
    offload_weights(model, execution_device="cuda", min_bytes=0)
    with torch.no_grad():
        for order in [*orders, *orders]:
            model.order = plain.order = order
            assert same_bits(model(x), plain(x)), order


def test_weights_in_a_file(tmp_path):
    model = llama().cuda()
    expected = logits(model)
    model.cpu()
    path = tmp_path / "weights.safetensors"
    offload_weights(model, execution_device="cuda", min_bytes=0, disk=path)
    for _ in range(3):
        assert same_bits(logits(model), expected)
    path.unlink()
    with pytest.raises(BitslabError, match="was removed"):
        for _ in range(2):  # what was read ahead is still there
            logits(model)


def test_gradients_flow_through_streamed_weights():
    plain = Blocks(width=256).cuda()
    model = Blocks(width=256)
    x = torch.randn(5, 256, device="cuda", requires_grad=True)
    plain(x).square().sum().backward()
    expected, x.grad = x.grad, None
    assert expected is not None
    offload_weights(model, execution_device="cuda", min_bytes=0)
    model(x).square().sum().backward()
    assert torch.equal(torch.as_tensor(x.grad), expected)


def test_inputs_on_the_cpu_are_moved_and_generation_runs():
    model = llama().cuda()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids())
    expected = model.generate(ids(), attention_mask=mask, **options)
    model.cpu()
    offload_weights(model, execution_device="cuda", min_bytes=0)
    assert torch.equal(model.generate(ids(), attention_mask=mask, **options), expected)
    with torch.no_grad():
        assert model(ids().cpu()).logits.is_cuda


def test_the_report_says_that_computing_hides_a_transfer():
    model = Blocks(width=2048, count=6)
    x = torch.randn(4, 2048, device="cuda")
    offload_weights(model, execution_device="cuda", min_bytes=0)
    for block in model.blocks:  # what is on its way arrives before the next block begins
        block.register_forward_hook(lambda *_: torch.cuda.synchronize())
    with torch.no_grad():
        for _ in range(4):
            model(x)
    shares = [unit.hidden for unit in offload_report(model).units[2:] if unit.hidden is not None]
    assert len(shares) >= 4
    assert statistics.median(shares) > 0.5, shares


def test_the_report_says_that_a_transfer_is_waited_for(held_stream):
    model = Blocks(width=2048, count=6)
    x = torch.randn(4, 2048, device="cuda")
    offload_weights(model, execution_device="cuda", min_bytes=0, depth=0)
    engine = find_offloaded(model).stream._engine
    with torch.no_grad():
        model(x)
        with held_stream(
            engine._staged.lane.stream
        ):  # the first unit's bytes come later than its module
            model(x)
            clock = next(iter(engine.clocks.values()))
            clock._events["stall", False].synchronize()
    assert offload_report(model).units[0].hidden == 0


def test_the_report_has_times_of_all_spans():
    model = llama(hidden=512)
    offload_weights(model, execution_device="cuda", min_bytes=0)
    for _ in range(2):
        logits(model)
    layer = offload_report(model).units[2]
    times, hidden = layer.times, layer.hidden
    assert times is not None and hidden is not None
    assert times.transfer_ms > 0 and times.decode_ms > 0 and times.compute_ms > 0
    assert 0 <= hidden <= 1
    moved = stats(model)["moved_bytes"]
    assert moved > 0
    find_offloaded(model).stream.close()


@pytest.mark.parametrize("keep", [None, "packed"], ids=["streamed", "packed"])
def test_a_captured_pass_is_refused_and_later_ones_are_right(keep):
    model = Blocks(width=512, count=6).to(torch.bfloat16)
    x = torch.randn(8, 512, device="cuda", dtype=torch.bfloat16)
    plain = Blocks(width=512, count=6).to(torch.bfloat16).cuda()
    offload_weights(model, execution_device="cuda", min_bytes=0, keep=keep)
    stream = find_offloaded(model).stream
    with torch.no_grad():
        expected = plain(x)
        for _ in range(2):
            assert same_bits(model(x), expected)
            before = stream.stats()
            for use in (lambda: model(x), lambda: stream.acquire("blocks.1")):
                graph = torch.cuda.CUDAGraph()
                with (
                    pytest.raises(BitslabError, match="while a CUDA graph is captured; keep the"),
                    torch.cuda.graph(graph),
                ):
                    y = x + 1  # torch warns of a graph with nothing in it
                    use()
                graph.replay()
                assert same_bits(y, x + 1)
            assert stream.stats() == before
        for _ in range(3):
            assert same_bits(model(x), expected)
    restore_weights(model)


def test_a_pass_with_nothing_to_stream_can_be_captured():
    model = Blocks(width=512).to(torch.bfloat16)
    x = torch.randn(8, 512, device="cuda", dtype=torch.bfloat16)
    offload_weights(model, execution_device="cuda", min_bytes=0, keep="all")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        with torch.cuda.stream(side):
            model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = model(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert same_bits(found, model(x))


LOOKUPS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "raw": {"codec": "raw"},
    "packed": {"keep": "packed"},
}


@pytest.mark.parametrize("options", LOOKUPS.values(), ids=LOOKUPS)
def test_lookups_can_be_captured(options):
    model = llama()
    embed = model.model.embed_tokens
    table = embed.weight.detach().cuda()
    offload_weights(model, execution_device="cuda", min_bytes=0, **options)
    given = ids()
    assert same_bits(embed(given), table[given])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = embed(given)
    given.copy_(given.flip(1))
    graph.replay()
    assert same_bits(found, table[given])


@pytest.mark.parametrize("length", [17, CHECKED_BY_ALL], ids=["few", "many"])
@pytest.mark.parametrize("bad", [-1, -1000, 1000, 1 << 40])
@pytest.mark.parametrize("options", LOOKUPS.values(), ids=LOOKUPS)
def test_bad_ids_of_an_embedding_are_reported_by_a_later_call(options, bad, length, no_waiting):
    model = llama()
    embed = model.model.embed_tokens
    table = embed.weight.detach().cuda()
    offload_weights(model, execution_device="cuda", min_bytes=0, **options)
    good = ids(length)
    before = embed(good)
    wrong = good.clone()
    wrong[1, 3] = bad
    with no_waiting():
        found = embed(wrong)
    assert found.shape == before.shape and found.dtype == before.dtype
    torch.cuda.synchronize()
    reported = rf"index {bad} at position {length + 3}, out of range for 1000 rows"
    with pytest.raises(IndexRangeError, match=reported):
        embed(good)
    assert same_bits(embed(good), table[good]) and same_bits(before, table[good])


TAKEN = {
    "one": lambda w, ids: w[5],
    "last": lambda w, ids: w[-1],
    "range": lambda w, ids: w[5:900:7],
    "ids-there": lambda w, ids: w[ids.cuda() - 1000],
    "ids-on-the-host": lambda w, ids: w[ids],
    "selected": lambda w, ids: w.index_select(0, ids.cuda()),
    "embedded": lambda w, ids: torch.nn.functional.embedding(ids.cuda(), w),
}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
def test_rows_are_taken_from_packed_weights_alone(take, monkeypatch):
    model = llama()
    weights = [model.model.embed_tokens.weight, model.lm_head.weight]
    rows = torch.randint(1000, (3, 40)) if take is not TAKEN["selected"] else torch.randint(9, (7,))
    expected = [take(weight.detach().cuda(), rows) for weight in weights]
    offload_weights(model, execution_device="cuda", min_bytes=0)
    handles: list[Any] = [model.model.embed_tokens.weight, model.lm_head.weight]
    monkeypatch.setattr(WeightHandle, "decode", lambda handle: pytest.fail("all of it was decoded"))
    for handle, wanted in zip(handles, expected, strict=True):
        found = take(handle, rows)
        assert found.is_cuda and same_bits(found, wanted)


SLEEP_CYCLES = 100_000_000  # some 50 ms
DROPPED: dict[str, dict[str, Any]] = {
    "streamed": {},
    "deep": {"depth": 4},
    "raw": {"codec": "raw"},
    "packed": {"keep": "packed"},
}


@pytest.mark.parametrize("held_up", ["transfers", "decodes"])
@pytest.mark.parametrize("options", DROPPED.values(), ids=DROPPED)
def test_a_dropped_model_leaves_memory_that_is_used_again_alone(options, held_up):
    plain = Blocks(width=1024, count=6).to(torch.bfloat16).cuda()
    x = torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = plain(x)
    for _ in range(3):
        torch.cuda.empty_cache()  # memory of other tests would be taken first
        model = Blocks(width=1024, count=6).to(torch.bfloat16)
        offload_weights(model, execution_device="cuda", min_bytes=0, **options)
        stream = find_offloaded(model).stream
        engine = stream._engine
        with torch.no_grad():
            assert same_bits(model(x), expected)
            torch.cuda.synchronize()
            slow = engine._staged.lane.stream if held_up == "transfers" else engine._decoding.stream
            with torch.cuda.stream(slow):
                torch.cuda._sleep(SLEEP_CYCLES)
            model(x)  # its units, and those fetched ahead, wait behind that
        images = [stream.weights.unit(name).image for name in stream.weights.units]
        own = [held.data for held in stream._buffers] + [
            b.data for b in engine._staged.ring.buffers
        ]
        own += [image.tensor() for image in images if image.tier == "device"]
        memory = [range(t.data_ptr(), t.data_ptr() + t.numel()) for t in own if t.numel()]
        gone = weakref.ref(engine)
        del model, stream, engine, images, own, slow
        gc.collect()
        assert gone() is None
        # Twice as much as was given up, so that the allocator has to use that again.
        sizes = [len(place) for place in memory for _ in range(2)]
        taken = [torch.full((n,), 0x5A, dtype=torch.uint8, device="cuda") for n in sizes]
        torch.cuda.synchronize()
        assert all(bool((tensor == 0x5A).all()) for tensor in taken)
        assert any(t.data_ptr() in place for t in taken for place in memory)
        del taken


def test_a_model_that_is_dropped_while_rows_are_looked_up():
    model = llama()
    embed = model.model.embed_tokens
    table = embed.weight.detach().cuda()
    offload_weights(model, execution_device="cuda", min_bytes=0)
    given = ids()
    embed(given)
    gone = weakref.ref(find_offloaded(model))
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    found = embed(given)  # reads the packed rows in host memory, which the model owns
    del model, embed
    gc.collect()
    assert gone() is None
    assert same_bits(found, table[given])
