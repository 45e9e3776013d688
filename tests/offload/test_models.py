"""Models whose weights stream compute what they computed before, and come back as they were."""

from __future__ import annotations

import copy
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from bitslab.errors import ArgumentError, BitslabError
from bitslab.offload import (
    WeightHandle,
    find_offloaded,
    offload_report,
    offload_weights,
    restore_weights,
)
from bitslab.offload.hooks import aligned
from bitslab.offload.offload import bring_inputs, move_unpacked
from tests.helpers import same_bits
from tests.offload.models import (
    Blocks,
    generated,
    logits,
    mini_lm,
    stats,
    tiny_llama,
    token_ids,
)

KEEPS = {
    "host": None,
    "packed": "packed",
    "half": 0.5,
    "all": "all",
    "mapping": {"model.layers.1": "device", "lm_head": "packed"},
    "function": lambda name: "device" if name.endswith("2") else None,
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_language_model_computes_the_same(dtype, tied):
    model = tiny_llama(tied=tied, dtype=dtype)
    expected, tokens = logits(model), generated(model, max_new_tokens=3)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = offload_weights(model, execution_device="cpu", min_bytes=0)
    assert report.packed_bytes < report.raw_bytes
    assert same_bits(logits(model), expected)
    assert torch.equal(generated(model, max_new_tokens=3), tokens)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert all(isinstance(p, WeightHandle) for p in model.parameters())
    streamed = model.state_dict()
    assert list(streamed) == list(state)
    assert all(same_bits(streamed[name], tensor) for name, tensor in state.items())
    if tied:
        data = streamed["lm_head.weight"].data_ptr()
        assert data == streamed["model.embed_tokens.weight"].data_ptr()
    restore_weights(model)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert not any(isinstance(p, WeightHandle) for p in model.parameters())
    assert all(type(p) is nn.Parameter and p.requires_grad for p in model.parameters())
    assert same_bits(logits(model), expected)
    assert all(same_bits(model.state_dict()[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_what_is_kept_on_the_device_changes_nothing(keep):
    model = tiny_llama(dtype=torch.bfloat16)
    expected = logits(model)
    report = offload_weights(model, execution_device="cpu", keep=keep, min_bytes=0)
    assert same_bits(logits(model), expected)
    tiers = {unit.name: unit.tier for unit in report.units}
    if keep == "all":
        assert set(tiers.values()) == {"device"}
        assert stats(model)["acquisitions"] == 0
    if keep == 0.5:
        kept = sum(unit.raw_bytes for unit in report.units if unit.tier == "device")
        assert 0.3 * report.raw_bytes < kept <= 0.5 * report.raw_bytes
    if isinstance(keep, dict):
        assert tiers["model.layers.1"] == "device" and tiers["lm_head"] == "packed"
    restore_weights(model)
    assert same_bits(logits(model), expected)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_trained_model_gives_the_same_embeddings_and_shrinks(dtype):
    model = mini_lm(dtype)
    ids = torch.randint(1000, 30000, (4, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids).last_hidden_state
    matrices = [name for name, p in model.named_parameters() if p.dim() == 2]
    offload_weights(model, execution_device="cpu", min_bytes=0)
    with torch.no_grad():
        assert same_bits(model(input_ids=ids).last_hidden_state, expected)
    weights = find_offloaded(model).weights
    raw = sum(weights.record(name).raw_nbytes for name in matrices)
    packed = sum(weights.record(name).packed_nbytes for name in matrices)
    assert 1 - packed / raw >= (0.288 if dtype == torch.bfloat16 else 0.143)
    everything = weights.nbytes / weights.raw_nbytes
    assert 1 - everything >= (0.288 if dtype == torch.bfloat16 else 0.143)


def test_saved_checkpoints_are_the_same_bytes(tmp_path):
    model = tiny_llama(tied=True, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    offload_weights(model, execution_device="cpu", min_bytes=0)
    model.save_pretrained(tmp_path / "packed")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        plain = (tmp_path / "plain" / name).read_bytes()
        assert (tmp_path / "packed" / name).read_bytes() == plain, name
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    loaded = type(model).from_pretrained(tmp_path / "shards", dtype=torch.bfloat16)
    state = model.state_dict()
    assert all(same_bits(tensor, state[name]) for name, tensor in loaded.state_dict().items())


def test_embeddings_are_looked_up_by_row(monkeypatch):
    model = tiny_llama()
    table = model.model.embed_tokens.weight.detach().clone()
    offload_weights(model, execution_device="cpu", min_bytes=0)
    attached = find_offloaded(model)
    whole = attached.stream.whole
    asked: list[str] = []

    def reported(name):
        asked.append(name)
        return whole(name)

    monkeypatch.setattr(attached.stream, "whole", reported)
    ids = token_ids()
    assert same_bits(model.model.embed_tokens(ids), table[ids])
    assert asked == []
    with pytest.raises(IndexError):
        model.model.embed_tokens(torch.tensor([320]))
    with pytest.raises(IndexError):
        model.model.embed_tokens(torch.tensor([-1]))


def test_a_weight_that_is_used_without_its_module_decodes_itself():
    model = tiny_llama(dtype=torch.bfloat16)
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    offload_weights(model, execution_device="cpu", min_bytes=0)
    x = torch.randn(3, 64).bfloat16()
    head, name = model.lm_head.weight, "lm_head.weight"
    assert torch.equal(torch.nn.functional.linear(x, head), x @ plain[name].T)
    assert torch.equal(head[5:7], plain[name][5:7])
    assert torch.equal(head.float().sum(), plain[name].float().sum())
    assert torch.equal(head.detach().clone(), plain[name])
    layer = "model.layers.0.self_attn.q_proj"
    assert torch.equal(model.get_submodule(layer)(x), x @ plain[f"{layer}.weight"].T)
    assert head.shape == (320, 64) and head.dtype == torch.bfloat16 and not head.requires_grad
    assert "lm_head.weight" in repr(head)
    assert model.device == torch.device("cpu") and model.dtype == torch.bfloat16


def test_handles_are_read_only():
    model = tiny_llama()
    state = model.state_dict()
    offload_weights(model, execution_device="cpu", min_bytes=0)
    expected = logits(model)
    weight = model.lm_head.weight
    for change in (
        weight.zero_,
        lambda: weight.data.add_(1),
        lambda: torch._foreach_mul_([weight], 2.0),
        lambda: torch.mul(torch.ones(320, 64), 2.0, out=weight),
    ):
        with pytest.raises(BitslabError, match=r"lm_head\.weight.*changed in place"):
            change()
    with pytest.raises(BitslabError, match=r"embed_tokens\.weight.*given other data"):
        model.resize_token_embeddings(400)
    assert torch.equal(weight[:], state["lm_head.weight"])
    with pytest.raises((BitslabError, RuntimeError), match="packed and cannot be loaded"):
        model.load_state_dict(state)
    with pytest.raises(BitslabError, match="copied"):
        copy.deepcopy(model)
    with pytest.raises(BitslabError, match="pickled"):
        pickle.dumps(model.lm_head.weight)
    assert same_bits(logits(model), expected)


def test_handles_are_not_trained():
    """Optimizers skip parameters without a gradient, so that nobody would notice."""
    model = tiny_llama()
    model.requires_grad_(False)
    offload_weights(model, execution_device="cpu", min_bytes=20_000)
    weight = model.lm_head.weight
    for change in (
        weight.requires_grad_,
        lambda: setattr(weight, "requires_grad", True),
        lambda: model.requires_grad_(True),
        model.lm_head.requires_grad_,
    ):
        with pytest.raises(BitslabError, match=r"weight is packed and cannot be trained"):
            change()
    assert model.requires_grad_(False) is model and weight.requires_grad_(False) is weight
    assert not weight.requires_grad
    model.model.norm.weight.requires_grad_(True)  # small: it remains
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert model.model.norm.weight.grad is not None


def test_moves_and_casts_of_the_model_are_refused_and_change_nothing():
    model = tiny_llama()
    offload_weights(model, execution_device="cpu", min_bytes=20_000)
    expected = logits(model)
    norm = model.model.norm.weight
    assert type(norm) is nn.Parameter  # small: it remains
    for cast in (model.half, lambda: model.to(torch.bfloat16), lambda: model.to("meta")):
        with pytest.raises(BitslabError, match="packed as torch.float32 for cpu"):
            cast()
        assert model.model.norm.weight.dtype == torch.float32
    assert model.to("cpu") is model and model.float() is model
    assert same_bits(logits(model), expected)
    restore_weights(model)
    assert model.half().lm_head.weight.dtype == torch.float16


def test_units_out_of_order_and_twice_are_right():
    model = Blocks()
    x = torch.randn(5, 64)
    orders: tuple[list[int], ...] = ([0, 1, 2, 3], [3, 1, 0, 2], [2], [1, 1, 1, 0], [])
    expected = []
    for order in orders:
        model.order = order
        expected.append(model(x).detach())
    offload_weights(model, execution_device="cpu", min_bytes=0)
    for _ in range(2):
        for order, wanted in zip(orders, expected, strict=True):
            model.order = order
            assert same_bits(model(x), wanted)
    model.order = [1, 1, 1]
    model(x)
    loads = stats(model)["loads"]
    model(x)
    assert stats(model)["loads"] == loads + 3  # first, block 1 once, last


def test_an_error_inside_a_pass_leaves_the_model_usable():
    model = Blocks()
    x = torch.randn(5, 64)
    expected = model(x).detach()
    offload_weights(model, execution_device="cpu", min_bytes=0)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(5, 63))

    def interrupt(*_):
        raise KeyboardInterrupt

    linear: Any = model.blocks[2].linear
    hook = linear.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    hook.remove()
    assert same_bits(model(x), expected)
    assert all(isinstance(p, WeightHandle) for p in model.parameters())
    assert stats(model)["buffers"] <= 2


def test_a_parameter_that_was_replaced_is_used_as_it_is():
    model = Blocks()
    x = torch.randn(5, 64)
    offload_weights(model, execution_device="cpu", min_bytes=0)
    fresh = nn.Parameter(torch.zeros(8, 64))
    model.last.weight = fresh
    bias = model.last.bias.detach().clone()
    assert torch.equal(model(x), bias.expand(5, 8))
    assert model.last.weight is fresh
    restore_weights(model)
    assert model.last.weight is fresh


def test_gradients_flow_through_streamed_weights():
    model = Blocks()
    x = torch.randn(5, 64, requires_grad=True)
    model(x).square().sum().backward()
    assert x.grad is not None
    expected = x.grad.clone()
    for parameter in model.parameters():
        parameter.grad = None
    offload_weights(model, execution_device="cpu", min_bytes=0)
    x.grad = None
    model(x).square().sum().backward()
    assert torch.equal(torch.as_tensor(x.grad), expected)
    # The buffers were used again by then.
    assert stats(model)["buffers"] <= 2


def test_checkpointed_blocks_are_computed_again():
    from torch.utils.checkpoint import checkpoint

    model = Blocks()
    x = torch.randn(5, 64, requires_grad=True)
    calls: list[int] = []
    for block in model.blocks:
        block.get_submodule("linear").register_forward_pre_hook(lambda *_: calls.append(1))

    def gradient(use_reentrant: bool) -> torch.Tensor:
        y = x
        for block in model.blocks:
            y = checkpoint(block, y, use_reentrant=use_reentrant)
        (found,) = torch.autograd.grad(y.square().sum(), x)
        return found

    expected = gradient(False)
    offload_weights(model, execution_device="cpu", min_bytes=0)
    calls.clear()
    assert torch.equal(gradient(False), expected)
    assert len(calls) == 2 * len(model.blocks)  # nothing between them was kept


def test_results_that_nobody_differentiates_are_freed():
    kept: list[weakref.ref[torch.Tensor]] = []

    class Exp(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.exp(x)  # autograd keeps this result
            kept.append(weakref.ref(y))
            return y * 2

    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), Exp()) for _ in range(2)))
    offload_weights(model, execution_device="cpu", min_bytes=0)
    model(torch.randn(3, 64, requires_grad=True))
    assert len(kept) == 2 and all(ref() is None for ref in kept)


def test_a_first_pass_in_inference_mode_leaves_weights_to_train_through():
    model = Blocks()
    x = torch.randn(5, 64, requires_grad=True)
    model(x).square().sum().backward()
    expected, x.grad = torch.as_tensor(x.grad), None
    with torch.inference_mode():
        offload_weights(model, execution_device="cpu", min_bytes=0)
        model(x)
    model(x).square().sum().backward()
    assert torch.equal(torch.as_tensor(x.grad), expected)


def test_a_view_of_a_weight_that_a_module_returns_is_the_callers():
    class Latents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(64, 64))

        def forward(self, batch: int) -> dict[str, Any]:
            return {"states": (self.latents.expand(batch, -1, -1), batch)}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents = Latents()
            self.linear = nn.Linear(64, 64)

        def forward(self, batch: int) -> torch.Tensor:
            states: torch.Tensor = self.latents(batch)["states"][0]
            changed: torch.Tensor = self.linear(states)
            return states + changed

    model = Model()
    expected = model(2).detach()
    offload_weights(model, execution_device="cpu", min_bytes=0)
    assert same_bits(model(2), expected)


def test_a_model_that_calls_itself_and_hooks_that_raise():
    model = Blocks()
    x = torch.randn(5, 64)
    expected = model(x).detach()
    offload_weights(model, execution_device="cpu", min_bytes=0)
    inner: list[Any] = []

    def calls_again(*_):
        if not inner:
            inner.append(None)
            inner.append(model(x))

    linear: Any = model.blocks[2].linear
    hook = linear.register_forward_pre_hook(calls_again)
    assert same_bits(model(x), expected) and same_bits(inner[1], expected)
    hook.remove()

    def fails(*_):
        raise RuntimeError("before the weights came")

    hook = model.blocks[1].register_forward_pre_hook(fails, prepend=True)
    with pytest.raises(RuntimeError, match="before the weights came"):
        model(x)
    hook.remove()
    assert same_bits(model(x), expected)
    assert all(isinstance(p, WeightHandle) for p in model.parameters())


def test_threads_share_a_model():
    model = Blocks()
    inputs = [torch.randn(5, 64) for _ in range(4)]
    expected = [model(x).detach() for x in inputs]
    offload_weights(model, execution_device="cpu", min_bytes=0)

    def run(number: int) -> bool:
        with torch.no_grad():
            return all(same_bits(model(inputs[number]), expected[number]) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))
    assert all(isinstance(p, WeightHandle) for p in model.parameters())


def test_adapters_are_what_little_is_trained():
    model = Blocks()
    model.blocks[0].requires_grad_(False)  # as a frozen table of positions
    offload_weights(model, execution_device="cpu", min_bytes=0)
    assert all(isinstance(p, WeightHandle) for p in model.parameters())
    restore_weights(model)
    assert not any(p.requires_grad for p in model.blocks[0].parameters())
    model.requires_grad_(False)
    model.last.requires_grad_()
    offload_weights(model, execution_device="cpu", min_bytes=0)
    resident = {n for n, p in model.named_parameters() if not isinstance(p, WeightHandle)}
    assert resident == {"last.weight", "last.bias"}


def test_arguments_and_parameters_of_other_classes_are_moved_as_they_are():
    class Own(nn.Parameter):
        pass

    model = nn.Linear(2, 2, bias=False)
    model.weight = Own(torch.ones(2, 2))
    move_unpacked(model, torch.device("meta"))
    assert model.weight.is_meta and isinstance(model.weight, nn.Parameter)
    cache, there = object(), torch.ones(1)
    given = {"mask": torch.ones(1, device="meta"), "cache": cache, "pair": (there, 3)}
    moved = aligned((given,), {}, torch.device("meta"))
    assert moved is not None and moved[0][0]["pair"][0].is_meta and moved[0][0]["cache"] is cache
    assert aligned((there, [there], {"a": there}), {}, torch.device("cpu")) is None


def test_inputs_are_brought_to_where_the_parameters_are() -> None:
    model = nn.Linear(2, 2)
    bring_inputs(model)
    x = torch.ones(3, 2)
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    there = pickle.loads(pickle.dumps(model)).to("meta")
    assert there(x).is_meta and there(input=x).is_meta


def test_memory_that_runs_out_while_restoring_changes_nothing(monkeypatch):
    model = Blocks()
    x = torch.randn(5, 64)
    expected = model(x).detach()
    offload_weights(model, execution_device="cpu", min_bytes=0)
    weights = find_offloaded(model).weights
    read, reads = weights.read, []

    def scarce(name, device):
        reads.append(name)
        if len(reads) == 5:
            raise MemoryError
        return read(name, device)

    monkeypatch.setattr(weights, "read", scarce)
    with pytest.raises(MemoryError):
        restore_weights(model)
    assert same_bits(model(x), expected)
    restore_weights(model)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert same_bits(model(x), expected)


def test_transposed_and_convolution_weights_keep_their_strides():
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(16, 64)).to(
        memory_format=torch.channels_last
    )  # type: ignore[call-overload]
    model[2].weight = nn.Parameter(torch.randn(16, 64).T)
    x = torch.randn(2, 8, 3, 3)
    expected = model(x).detach()
    strides = [p.stride() for p in model.parameters()]
    offload_weights(model, execution_device="cpu", min_bytes=0)
    assert [p.stride() for p in model.parameters()] == strides
    assert same_bits(model(x), expected)
    restore_weights(model)
    assert [p.stride() for p in model.parameters()] == strides
    assert same_bits(model(x), expected)


def test_recurrent_layers_find_their_weights():
    model = nn.LSTM(32, 64, num_layers=2)
    x = torch.randn(7, 3, 32)
    expected = model(x)[0].detach()
    offload_weights(model, execution_device="cpu", min_bytes=0)
    assert same_bits(model(x)[0], expected)
    assert same_bits(model(x)[0], expected)
    restore_weights(model)
    assert same_bits(model(x)[0], expected)


def test_quantised_weights_pass_through():
    class Scaled(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            numbers = torch.randn(64, 64).mul(20).to(dtype)
            self.weight = nn.Parameter(numbers, requires_grad=False)
            self.scale: torch.Tensor
            self.register_buffer("scale", torch.rand(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.weight.float() * self.scale)

    kinds = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
    model = nn.Sequential(*(Scaled(dtype) for dtype in kinds))
    x = torch.randn(3, 64)
    expected = model(x)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offload_weights(model, execution_device="cpu", min_bytes=0)
    assert same_bits(model(x), expected)
    assert all(same_bits(model.state_dict()[name], tensor) for name, tensor in state.items())


def test_the_report_says_what_it_costs():
    model = tiny_llama(tied=True, dtype=torch.bfloat16)
    offload_weights(model, execution_device="cpu", min_bytes=0)
    logits(model)
    report = offload_report(model)
    content = report.to_dict()
    assert [unit["name"] for unit in content["units"]] == [
        "model.embed_tokens",
        *(f"model.layers.{i}" for i in range(3)),
        "model.norm",
        "lm_head",
    ]
    layer = report.units[1]
    assert layer.times is not None
    assert layer.times.decode_ms > 0 and layer.times.compute_ms > 0 and layer.hidden == 0
    assert layer.raw_bytes == sum(p.numel() * 2 for p in model.model.layers[0].parameters())
    assert report.units[-1].shared  # the head is the embedding
    assert content["raw_bytes"] == sum(p.numel() * 2 for p in model.parameters())
    assert "model.layers.1" in str(report) and f"{report.ratio:.2f}x" in str(report)


def test_progress_is_reported():
    reported: list[tuple[int, int | None]] = []
    model = Blocks()
    raw = sum(p.nbytes for p in model.parameters())
    offload_weights(
        model, execution_device="cpu", min_bytes=0, progress=lambda *now: reported.append(now)
    )
    assert reported[-1] == (raw, raw) and reported == sorted(reported)


def test_only_what_is_wanted_is_packed():
    model = Blocks()
    expected = model(torch.ones(1, 64)).detach()
    offload_weights(
        model, execution_device="cpu", min_bytes=0, predicate=lambda name, p: p.dim() == 2
    )
    handles = {n for n, p in model.named_parameters() if isinstance(p, WeightHandle)}
    assert handles == {n for n, p in model.named_parameters() if p.dim() == 2}
    assert same_bits(model(torch.ones(1, 64)), expected)


def test_bad_arguments_are_refused():
    model = Blocks()
    with pytest.raises(TypeError, match="model: expected"):
        offload_weights("model")  # type: ignore[arg-type]
    bad: tuple[tuple[dict[str, Any], str], ...] = (
        ({"keep": "some"}, "keep: 'some'"),
        ({"keep": 1.5}, "keep: 1.5"),
        ({"keep": {"nowhere": "host"}}, "nowhere"),
        ({"keep": {"first": "moon"}}, "moon"),
        ({"depth": -1}, "depth: -1"),
        ({"sm_budget": 0}, "sm_budget: 0"),
        ({"min_bytes": -1}, "min_bytes: -1"),
        ({"codec": "zip"}, "codec: 'zip'"),
        ({"execution_device": "meta"}, "accepted are cpu and cuda"),
    )
    for options, message in bad:
        with pytest.raises((ArgumentError, TypeError), match=message):
            offload_weights(model, **{"execution_device": "cpu", "min_bytes": 0, **options})
        assert not any(isinstance(p, WeightHandle) for p in model.parameters()), options
    with pytest.raises(ArgumentError, match="no parameters"):
        offload_weights(nn.ReLU())
    with pytest.raises(ArgumentError, match="meta device"):
        offload_weights(Blocks().to("meta"), execution_device="cpu")
    with pytest.raises(ArgumentError, match="none of its weights are offloaded"):
        restore_weights(model)
    offload_weights(model, execution_device="cpu", min_bytes=0)
    with pytest.raises(ArgumentError, match="offloaded already"):
        offload_weights(model, execution_device="cpu")
