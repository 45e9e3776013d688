"""`CompressedCache`: transformers' K/V cache, packed, losslessly."""

from __future__ import annotations

from functools import partial

import torch
from transformers import PreTrainedConfig

from bitslab.devices import checked_device
from bitslab.integrations.transformers.cache_layer import CompressedLayer
from bitslab.integrations.transformers.layer_histories import LayerHistories
from bitslab.integrations.transformers.packed_cache import (
    PackedCache,
    check_cache_options,
    check_selector,
    exported_as_constant,
)
from bitslab.integrations.transformers.selectors import KVSelector
from bitslab.kvcache import Offload, check_options


@exported_as_constant
class CompressedCache(PackedCache):
    """A K/V cache whose full-attention layers keep their history packed, losslessly.

    Pass it as ``past_key_values=`` to ``generate`` or to a forward pass. K and V have the bits that
    `transformers.DynamicCache` returns, after every operation that ``generate`` uses; so tokens are
    the same. Only packed blocks ever cross to the host, each once. The next layer is fetched and
    decoded while the current one computes.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's. Layers of other kinds than full attention (sliding window, linear, hybrid,
        shared) are transformers' own. Where there is no other kind the cache is a plain one, as
        `stats` says.
    offload : bool, float or "auto"
        The part of the packed history that lies in page-locked host memory: True, all of it; False
        or 0, nothing; a share between, rounded to whole layers, evenly spread, whose words cross
        while the layers up to them compute. "auto" begins with all, and after some tokens keeps as
        many layers there as cross while the others compute, more where the device lacks room. The
        rest is packed on the layer's device.
    device : torch.device or str, optional
        Where K and V are used: refuses others. Left out, each layer takes it from its first K.
    window : int
        Tokens that are kept unpacked on the device, at least.
    block_tokens : int
        Tokens that are packed and moved together; a power of two up to 4096.
    reserve_tokens : int, optional
        Tokens of a sequence for which memory is taken when the first are packed, so that a
        history that grows, by chunks of a prompt or by tokens, is not copied to larger memory on
        the device. Left out, memory is taken as it is needed, an eighth ahead where packing has
        saved as much.
    sm_budget : int or None
        Multiprocessors that decoding ahead may take from the computation; None for all. Decoding
        for which the computation waits takes all.
    select : KVSelector, optional
        Chooses which packed tokens each layer attends to; only they are fetched. Run the model
        within ``with select.attached(model):``. Left out, all are, and nothing is lost. With one, a
        GPU is waited for whenever a block is packed, since results depend on what is packed.

    Raises
    ------
    ArgumentError
        For a selector and a config that does not fit it, or options out of range.
    ArgumentTypeError
        For arguments of another type.

    Notes
    -----
    On a GPU `update` decodes the packed tokens of a layer into the tensors that it returns, with
    the last ones behind them, in one launch; packed words of two layers that cross lie in buffers
    that all layers share. Where K and V are no such rows as that kernel knows (heads of more than
    1 KiB, or of no multiple of 16 bytes; tokens that nothing makes smaller; new ones with
    gradients), the next layer is decoded while this one computes, into a buffer that all layers
    share too. K and V of two layers are there unpacked at most.

    Torch's current stream may be another one at each call: it waits for the one that was current
    at the call before.

    Encoder-decoder models are given a cache for each kind of attention, as
    ``EncoderDecoderCache(CompressedCache(config), DynamicCache(config=config))``, both of which may
    be compressed. Alone, the cache keeps K and V of self-attention, and the model computes those of
    the encoder in each forward pass: logits are the same, and steps take longer.

    The method is that of IBP sections 5 and 6.4. The profile of each layer is learnt from the first
    K and V that are packed, the prompt's as a rule, and again when blocks become larger. On a GPU
    it is that of the last cache of the process for such a config, as long as it packs as well; not
    with a selector, whose results depend on what is packed.

    On a GPU the pass of a prompt waits neither for samples nor for packed sizes: a layer is packed
    while those behind it compute, the last ones in the next forward pass. Until then its K and V
    are on the device as they are, at most of two layers beyond the current one, or of as many as
    take 256 MiB. The first cache of a process, made while a GPU is in use, loads kernels, for some
    tenths of a second.

    `torch.compile` runs what packs and unpacks outside of its graphs. `torch.export` is refused:
    what is packed depends on values.

    After an error of the cache (another model's shapes, no memory), or of the attention function
    "bitslab" as it reads K and V, all full-attention layers hold the tokens that they held before
    the forward pass, bit for bit, and the cache remains usable. An interrupt
    (Ctrl-C) leaves K and V of each layer alike; layers before it may hold the new tokens, as where
    it comes amid the model: `reset` the cache then. Gradients do not flow into past tokens. One
    thread at a time.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from bitslab.integrations.transformers import CompressedCache
    >>> config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64,
    ...                      num_hidden_layers=2, num_attention_heads=4)
    >>> model = LlamaForCausalLM(config).eval()
    >>> cache = CompressedCache(config, window=16, block_tokens=16)
    >>> prompt = torch.arange(48)[None]
    >>> tokens = model.generate(prompt, past_key_values=cache, max_new_tokens=4, do_sample=False)
    >>> torch.equal(tokens, model.generate(prompt, max_new_tokens=4, do_sample=False))
    True
    >>> cache.stats()["packed_tokens"]
    32
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        offload: Offload = True,
        device: torch.device | str | None = None,
        window: int = 128,
        block_tokens: int = 64,
        reserve_tokens: int | None = None,
        sm_budget: int | None = 64,
        select: KVSelector | None = None,
    ) -> None:
        check_cache_options(config, offload, sm_budget)
        check_selector(select)
        reserve_tokens = 0 if reserve_tokens is None else reserve_tokens
        check_options(window, block_tokens, reserve_tokens)
        self.selector = select
        histories = LayerHistories(
            config,
            offload=offload,
            device=None if device is None else checked_device(device),
            sm_budget=sm_budget,
            options={
                "window": window if select is None else max(window, select.recent),
                "block_tokens": block_tokens,
                "reserve_tokens": reserve_tokens,
                "at_once": select is not None,
            },
        )
        super().__init__(
            config,
            histories,
            lambda i: CompressedLayer(
                partial(histories.open, i), select, None if select is None else select.scores(i)
            ),
        )

    def _check_layers(self, packed: list[int]) -> None:
        if self.selector is not None:
            self.selector.check_layers(packed)
