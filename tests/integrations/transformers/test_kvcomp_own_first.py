"""KVCompCache: the first tokens of sequences behind padding on the left are kept as they came."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from bitslab.integrations.transformers import KVCompCache
from bitslab.integrations.transformers.attention import attention
from bitslab.integrations.transformers.kvcomp_layer import Padding
from tests.integrations.transformers.models import prompt_of
from tests.integrations.transformers.test_kvcomp_cache import (
    DIM,
    HEADS,
    QUERY_HEADS,
    SIZES,
    Module,
    config,
)
from tests.integrations.transformers.test_kvcomp_generate import attended_model

pytestmark = pytest.mark.usefixtures("one_thread")

SINKS = 4
#: A batch of sequences without padding, with some among the first tokens, amid what is packed, at
#: its end, and with tokens that are packed later alone.
BEGINS = [0, 2, 37, 79, 98]


class Padded:
    """A cache of padded sequences beside all of their K and V as they came.

    Parameters
    ----------
    begins : list of int
        Where sequences begin.
    device : str
        Where K and V are.
    options
        Of the cache.
    """

    def __init__(self, begins: list[int], device: str = "cpu", **options: Any) -> None:
        self.cache: Any = KVCompCache(config("bitslab"), **{"error": 0.3, **SIZES, **options})
        self.device = device
        self.begins = torch.tensor(begins, dtype=torch.int32, device=device)
        self.generator = torch.Generator().manual_seed(0)
        batch, layers = len(begins), len(self.cache.layers)
        self.raw = [
            [torch.empty(batch, HEADS, 0, DIM, device=device) for _ in "kv"] for _ in range(layers)
        ]

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def run(self, n: int = 1) -> None:
        """Append to all layers and attend; outputs are those of attention to what is decoded."""
        batch = len(self.begins)
        for i, raw in enumerate(self.raw):
            new = [self.normal(batch, HEADS, n, DIM) for _ in "kv"]
            raw[:] = [torch.cat(both, dim=2) for both in zip(raw, new, strict=True)]
            length = raw[0].shape[2]
            at = torch.arange(length, device=self.device)
            mask = (at >= self.begins[:, None])[:, None, None] & (at <= at[length - n :, None])
            padding = Padding(self.begins.clamp(max=length), min(length, int(self.begins.max())))
            mask.bitslab_padding = padding  # type: ignore[attr-defined]
            keys, values = self.cache.update(*new, i)
            query = self.normal(batch, QUERY_HEADS, n, DIM)
            found, _ = attention(Module(), query, keys, values, mask, scaling=0.3)
            if n > 1:
                continue
            layer = self.cache.layers[i]
            k, v = (t.repeat_interleave(2, dim=1) for t in (layer.keys, layer.values))
            shown = (query @ k.transpose(2, 3) * 0.3).masked_fill(~mask, -torch.inf)
            expected = (shown.softmax(dim=3) @ v).transpose(1, 2)
            sees = self.begins < length
            assert torch.allclose(found[sees], expected[sees], atol=2e-5)

    def take(self, index: list[int]) -> None:
        """Take other sequences."""
        self.cache.reorder_cache(torch.tensor(index, device=self.device))
        self.begins = self.begins[index]
        self.raw = [[t[index] for t in raw] for raw in self.raw]

    def crop(self, tokens: int) -> None:
        """Remove tokens from the end."""
        self.cache.crop(-tokens)
        self.raw = [[t[:, :, :-tokens] for t in raw] for raw in self.raw]

    def check(self) -> None:
        """Compare the first tokens of all sequences, and say whether others are coded."""
        for layer, raw in zip(self.cache.layers, self.raw, strict=True):
            for found, came in zip((layer.keys, layer.values), raw, strict=True):
                assert found.shape == came.shape
                for b, begin in enumerate(self.begins.tolist()):
                    first = slice(begin, begin + SINKS)
                    assert torch.equal(found[b, :, first], came[b, :, first])
                    assert torch.equal(found[b, :, :SINKS], came[b, :, :SINKS])
                if layer.packed_tokens:
                    assert not torch.equal(found, came)


def changed(padded: Padded) -> None:
    """Grow, and change in all ways in between, comparing all the time."""
    padded.run(100)
    for _ in range(40):
        padded.run()
        padded.check()
    # Which is a matter of time on a GPU, whose packing nobody waits for.
    assert padded.cache.stats()["packed_tokens"] in ({112} if padded.device == "cpu" else {96, 112})
    padded.take([4, 2, 2, 0, 1])
    padded.check()
    padded.crop(55)  # into what is packed, before the first of a sequence
    padded.check()
    padded.cache = pickle.loads(pickle.dumps(copy.deepcopy(padded.cache)))
    for _ in range(60):
        padded.run()
        padded.check()
    assert padded.cache.stats()["packed_passes"] > 150


def test_own_first_tokens_are_kept_through_all_changes() -> None:
    changed(Padded(BEGINS))


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_own_first_tokens_are_kept_on_a_gpu(offload: bool) -> None:
    changed(Padded(BEGINS, "cuda", offload=offload))


@pytest.mark.parametrize("begin", [37, 50, 55, 120], ids=str)
def test_a_prompt_in_chunks_keeps_them_too(begin: int) -> None:
    """Whose sequences may begin behind the first chunk, which is packed by then."""
    padded = Padded([0, begin])
    for _ in range(3):
        padded.run(50)
    for _ in range(20):
        padded.run()
        padded.check()
    assert padded.cache.stats()["packed_tokens"] == 144


@pytest.mark.parametrize("chunk", [100, 50, 30], ids=str)
def test_masks_of_a_model_say_where_sequences_begin(chunk: int) -> None:
    model, begins = attended_model("llama"), [0, 3, 33, 60]
    tokens = prompt_of(len(begins), 100)
    mask = (torch.arange(103) >= torch.tensor(begins)[:, None]).long()
    cache: Any = KVCompCache(model.config, **{"error": 0.3, **SIZES})
    plain: Any = transformers.DynamicCache(config=model.config)
    ends = [*range(chunk, 100, chunk), 100, 101, 102, 103]
    tokens = torch.cat([tokens, tokens[:, :3]], dim=1)
    with torch.no_grad():
        for begin, end in zip([0, *ends], ends, strict=False):
            for each in (cache, plain):
                at = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, begin:]
                model(
                    tokens[:, begin:end],
                    attention_mask=mask[:, :end],
                    position_ids=at,
                    past_key_values=each,
                )
    # Of the first layer K and V are the same, whatever attention gives.
    layer, expected = cache.layers[0], plain.layers[0]
    assert layer.packed_tokens >= 64
    for found, came in ((layer.keys, expected.keys), (layer.values, expected.values)):
        for b, begin in enumerate(begins):
            assert torch.equal(
                found[b, :, begin : begin + SINKS], came[b, :, begin : begin + SINKS]
            )
        assert not torch.equal(found, came)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("left", [0, 2], ids=["nothing", "some-first-tokens"])
@pytest.mark.parametrize("begins", [[40, 60], [10, 20, 30, 50, 0, 7], [5, 0, 79, 2, 90]], ids=len)
def test_other_sequences_begin_elsewhere(left: int, begins: list[int]) -> None:
    padded = Padded(BEGINS)
    padded.run(100)
    padded.run()
    if left:
        begins = (begins * 3)[: len(BEGINS)]
    padded.crop(101 - left)
    padded.begins = torch.tensor(begins, dtype=torch.int32)
    if not left:
        empty = torch.empty(len(begins), HEADS, 0, DIM)
        padded.raw = [[empty, empty] for _ in padded.raw]
    padded.run(100)
    for _ in range(25):
        padded.run()
    padded.check()
    assert padded.cache.stats()["packed_tokens"] == 96


def test_sequences_are_repeated_and_chosen() -> None:
    padded = Padded(BEGINS)
    padded.run(100)
    padded.run()
    padded.cache.batch_repeat_interleave(2)
    padded.begins = padded.begins.repeat_interleave(2)
    padded.raw = [[t.repeat_interleave(2, dim=0) for t in raw] for raw in padded.raw]
    padded.check()
    padded.run()
    index = [7, 1]
    padded.cache.batch_select_indices(index)
    padded.begins, padded.raw = padded.begins[index], [[t[index] for t in r] for r in padded.raw]
    for _ in range(20):
        padded.run()
    padded.check()


def test_attention_reads_them_while_k_is_packed_further_than_v(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    padded = Padded([0, 78])
    padded.run(100)
    padded.run()
    with monkeypatch.context() as patched:
        for layer in padded.cache.layers:
            patched.setattr(layer.histories[1], "pack", lambda: None)
        for _ in range(17):
            padded.run()
        of_keys, of_values = padded.cache.layers[0].histories
        assert (of_keys.packed_tokens, of_values.packed_tokens) == (96, 80)
        padded.check()
    for _ in range(4):
        padded.run()
    assert of_values.packed_tokens == 96
    padded.check()


@settings(max_examples=12)
@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=4),
    st.lists(st.integers(-120, 40), max_size=4),
)
def test_any_padding_and_removal(begins: list[int], steps: list[int]) -> None:
    padded = Padded(begins)
    padded.run(100)
    for step in steps:
        if step < 0:
            padded.crop(min(-step, padded.raw[0][0].shape[2] - 1))
        for _ in range(max(step, 1)):
            padded.run()
        padded.check()


def test_an_error_amid_a_pass_leaves_them() -> None:
    padded = Padded(BEGINS)
    padded.run(100)
    padded.run()
    before = [layer.keys for layer in padded.cache.layers]
    new = [padded.normal(len(BEGINS), HEADS, 1, DIM) for _ in "kv"]
    padded.cache.update(*new, 0)
    with pytest.raises(ValueError, match="of another batch"):
        padded.cache.update(new[0][:, :1], new[1][:, :1], 1)
    after = [layer.keys for layer in padded.cache.layers]
    assert all(map(torch.equal, before, after))
    padded.check()
    padded.run()


@pytest.mark.parametrize("options", [{"sinks": 0}, {"error": 0}], ids=["no-first", "lossless"])
def test_nothing_is_kept_that_is_not_needed(options: dict[str, Any]) -> None:
    padded = Padded([0, 30], **options)
    padded.run(100)
    padded.run()
    histories = [h for layer in padded.cache.layers for h in layer.histories]
    assert all(h.unpacked.own_first is None for h in histories)
    without = Padded([0, 0])
    without.run(100)
    without.run()
    histories = [h for layer in without.cache.layers for h in layer.histories]
    assert all(h.unpacked.own_first is None for h in histories)


def test_their_bytes_are_counted() -> None:
    stats = []
    for begins in ([0, 30], [0, 0]):
        padded = Padded(begins)
        padded.run(100)
        padded.run()
        stats.append(padded.cache.stats()["device_bytes"])
    of_tokens = 2 * 2 * 2 * HEADS * SINKS * DIM * 4  # layers, K and V, sequences
    assert stats[0] - stats[1] == of_tokens + 2 * 2 * 2 * 4
