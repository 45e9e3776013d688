"""`KVCompCache`: a K/V cache of quantised, entropy-coded tiles, within an error of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from transformers import PreTrainedConfig

from bitslab.devices import checked_device
from bitslab.errors import ArgumentError, BitslabError
from bitslab.integrations.transformers.attention import NAME
from bitslab.integrations.transformers.cache_layer import CompressedLayer
from bitslab.integrations.transformers.captured_steps import (
    CapturedSteps,
    capturing,
    checked_tokens,
    first_valid_of,
)
from bitslab.integrations.transformers.handles import KVHandle
from bitslab.integrations.transformers.kvcomp_layer import KVCompLayer, LayerUpdate
from bitslab.integrations.transformers.layer_histories import LayerHistories
from bitslab.integrations.transformers.packed_cache import (
    PackedCache,
    check_cache_options,
    check_selector,
    exported_as_constant,
)
from bitslab.integrations.transformers.selectors import KVSelector
from bitslab.kvcache import Commit, Offload, StepCount, TileOptions, check_options

#: Multiples of it, without their whole part, lie evenly between 0 and 1 however many they are.
_GOLDEN = (5**0.5 - 1) / 2

#: Bytes of K, and of V, of a prompt that are kept unpacked until the pass behind it is over: of the
#: last layer, which packs its prompt as that begins.
_KEPT_BYTES = 64 << 20


@exported_as_constant
class KVCompCache(PackedCache):
    """A K/V cache whose full-attention layers keep their history quantised and entropy-coded.

    Pass it as ``past_key_values=`` to ``generate`` or to a forward pass. The lossy sister of
    `CompressedCache`: K and V are quantised once, by steps that are chosen for each layer so that
    the outputs of attention change by `error`, and take about a seventh of their bytes. After
    ``model.set_attn_implementation("bitslab")``, attention reads what is packed where its kernels
    serve the model; else K and V are decoded first.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's own, whose attention implementation is looked up in each forward pass. Layers of
        other kinds than full attention are transformers' own.
    error : float
        Relative error of softmax(QK)V that each layer aims at, 0 to 1. It is a target, measured on
        the last queries of the prompt, not a bound for later tokens; of a prompt of more than 2,048
        tokens on as many of them, drawn evenly: of SmolLM2 all 4,096 tokens give 0.060 where 0.055
        was asked for, in single layers up to 0.119. The coarsest steps that keep it are taken, and
        a layer where none do keeps its tokens lossless. Queries of padding count for nothing, and
        those that see no coded token. 0: all layers are lossless, as in `CompressedCache`. The
        default keeps what SmolLM2 says, of 4,096 tokens behind a prompt of 2,048: at 0.055 K and V
        are 6.7 times smaller, the KL divergence to the plain model is 0.012, and 95 % of the top
        tokens are the same; at 0.1 8.6 times, with 0.047 and 90 %. Of a shorter prompt the same
        error takes more bits.
    key_scale, value_scale : float, optional
        Steps of K and V that are taken instead, in the units of `granularity`.
    granularity : {"weighted", "block", "channel", "token"}
        Where steps come from. ``"weighted"``: K has one step a channel, so that each adds the same
        error to the logits of the prompt's last queries, and V one a token and head, `value_scale`
        times its rms; 1 is a middling scale of either. The others are those of KVComp: `key_scale`
        is the step over the range of a tile of K, of each channel in it, or of a token, and
        `value_scale` over the range of a token of V.
    coder : {"huffman", "fixed", "lossless"}
        How codes are written; ``"fixed"`` as fields of one width. ``"lossless"``: nothing is
        quantised, `error` is not used, and attention reads bfloat16 and float16 tile by tile, with
        nothing decoded first, on the device and out of host memory. K and V of bfloat16 then take
        about two thirds of their bytes; those of other dtypes are rows as in `CompressedCache`.
    sinks, window : int
        First and last tokens of a sequence that are kept as they came, on the device. The first
        `sinks` tokens of a batch, and of a sequence that begins behind padding on the left, of
        which the attention function "bitslab" knows, its own first ones too.
    block_tokens : int
        Tokens that are packed and moved together; a power of two from 16 to 4096.
    offload : bool, float or "auto"
        The part of the packed history that lies in page-locked host memory: True, all of it; False
        or 0, nothing; a share between, rounded to whole layers, evenly spread, whose words cross
        while the layers up to them compute. "auto" begins with all, and after some tokens keeps as
        many layers there as cross while the others compute, more where the device lacks room. The
        rest is packed on the layer's device.
    device : torch.device or str, optional
        Where K and V are used: refuses others. Left out, each layer takes it from its first K.
    reserve_tokens : int, optional
        Tokens of a sequence for which memory is taken when the first are packed, so that a
        history that grows, by chunks of a prompt or by tokens, is not copied to larger memory on
        the device.
    sm_budget : int or None
        Multiprocessors that decoding may take from the computation; None for all. Attention to
        tiles, for which the computation waits, takes all.
    select : KVSelector, optional
        Chooses whole tiles that each layer attends to, by head, as in `CompressedCache`; they are
        gathered and decoded. The model runs within ``select.attached(model)``, whose attention sees
        no queries for the fit.

    Raises
    ------
    ArgumentError
        For options out of range.
    ArgumentTypeError
        For arguments of another type.

    Notes
    -----
    The method is that of KVComp (arXiv 2509.00579), with steps by the queries added. Queries are
    seen by the attention function "bitslab" alone. With another one, steps are by range: where no
    scale is given, ``2 * error`` of a channel of K in a tile and ``1.5 * error`` of a token of V
    (K by tile: ``0.45 * error``; by token ``1.5 * error``), which causes about that error on
    SmolLM2.

    A prompt in one forward pass attends to itself as it came, and has the plain model's logits;
    later tokens attend to what is packed. Codecs are learnt from the prompt and kept; they are
    fitted again when tiles become larger. No value is quantised twice: `crop`, beams and copies
    keep what is packed as it is.

    K and V that tiles do not serve are kept lossless, as rows, and `stats` says why: a head_dim
    that is no multiple of 16 up to 256, values of another head_dim than keys, other dtypes than
    bfloat16, float16 and float32. So is a layer whose prompt has a NaN or an infinity, which no
    steps serve.
    Attention decodes K and V first for masks other than causal ones with padding on the left, for
    gradients and dropout, for steps of another granularity than "weighted", and for more than 64
    query rows of a K/V head in a pass or more than 16 query heads of one; `stats` counts it.

    With ``offload=False`` steps of decoding can be captured in CUDA graphs: see `captured_steps`.

    Encoder-decoder models, errors, `torch.compile` and `torch.export` are as with
    `CompressedCache`. One thread at a time.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from bitslab.integrations.transformers import KVCompCache
    >>> config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64,
    ...                      num_hidden_layers=2, num_attention_heads=4, eos_token_id=None)
    >>> model = LlamaForCausalLM(config).eval()
    >>> model.set_attn_implementation("bitslab")
    >>> cache = KVCompCache(model.config, window=16, block_tokens=16)
    >>> prompt = torch.arange(48)[None]
    >>> tokens = model.generate(prompt, past_key_values=cache, max_new_tokens=4, do_sample=False)
    >>> tokens.shape, cache.stats()["packed_tokens"]
    (torch.Size([1, 52]), 16)
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        error: float = 0.055,
        key_scale: float | None = None,
        value_scale: float | None = None,
        granularity: str = "weighted",
        coder: str = "huffman",
        sinks: int = 4,
        window: int = 128,
        block_tokens: int = 64,
        offload: Offload = True,
        device: torch.device | str | None = None,
        reserve_tokens: int | None = None,
        sm_budget: int | None = 64,
        select: KVSelector | None = None,
    ) -> None:
        check_cache_options(config, offload, sm_budget)
        check_selector(select)
        reserve_tokens = 0 if reserve_tokens is None else reserve_tokens
        check_options(window, block_tokens, reserve_tokens, sinks)
        window = window if select is None else max(window, select.recent)
        self._tiles = TileOptions(
            error=error,
            key_scale=key_scale,
            value_scale=value_scale,
            granularity=granularity,
            coder=coder,
            sinks=sinks,
            window=window,
            block_tokens=block_tokens,
        )
        histories = LayerHistories(
            config,
            offload=offload,
            device=None if device is None else checked_device(device),
            sm_budget=sm_budget,
            options={
                "window": window,
                "block_tokens": block_tokens,
                "reserve_tokens": reserve_tokens,
                "at_once": select is not None,
            },
        )
        hands = self._hands = _AttentionOf(config)
        self.selector = select

        def make_layer(i: int) -> KVCompLayer:
            plans = histories.tile_plans(self._tiles, i)
            return KVCompLayer(
                partial(histories.open_tiles, i, plans),
                partial(histories.open, i),
                plans,
                hands,
                select,
                None if select is None else select.scores(i),
                turn=i * _GOLDEN % 1,
            )

        super().__init__(config, histories, make_layer)
        if self._packed:
            self._layer(max(self._packed)).attended = histories.learn_ahead
        self._updated: int | None = None  # the layer whose last tokens are to be packed

    def _check_layers(self, packed: list[int]) -> None:
        if self.selector is not None:
            self.selector.check_layers(packed)

    def append_to(
        self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to one of our layers, and pack what the last one has attended to."""
        last, self._updated = self._updated, None
        if last is not None:
            behind = cast(KVCompLayer, self._packed[last])
            if layer_idx <= last:
                behind.kept = behind.as_it_is(_KEPT_BYTES)
            behind.settle(later=True)
        if last is None or layer_idx <= last:  # of another forward pass
            self._hands.look()
        found = super().append_to(layer_idx, key_states, value_states)
        keys = found[0]
        if isinstance(keys, KVHandle) and isinstance(keys.update, LayerUpdate):
            keys.update.undo = None if self._pass is None else self._pass.undo
            if layer_idx in self._histories.placement.hosted:
                following = self._next_hosted[layer_idx]
                next_one = None if following is None else self._next_hosted[following]
                keys.update.behind_next = None if next_one is None else self._layer(next_one)
        self._updated = layer_idx
        return found

    @contextmanager
    def captured_steps(
        self, tokens: int, *, attention_mask: torch.Tensor | None = None
    ) -> Iterator[CapturedSteps]:
        """Make room for so many tokens, so that forward passes can be captured in CUDA graphs.

        Within the block each forward pass has one token of each sequence. One that `capture` has
        recorded is run by each `replay`, behind the tokens that are there by then; others run at
        once. Nothing is packed before the block is left, which packs what is due.

        Parameters
        ----------
        tokens : int
            Tokens of a sequence that the block takes at the most.
        attention_mask : torch.Tensor, optional
            ``[B, T]`` of all tokens that are there; needed where some are padding, on the left.
            The model is given no mask within the block, but ``position_ids``, which the caller
            writes to.

        Yields
        ------
        CapturedSteps
            `capture` records a step, whose `replay` runs it.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            For arguments out of range, no mask where tokens are padding, and a cache whose options
            keep its tokens from being read in replays: offload other than False, and a selector.
        BitslabError
            Within another block or a capture; for a model with another attention function than
            "bitslab", layers of other kinds than full attention, or on several devices; for a layer
            whose tokens attention does not read as they are packed, as before the first are.

        Notes
        -----
        Graphs end with their block, as the memory that they write to does. Warm the model up before
        a capture, as ever: a step that runs within the block is one of the tokens.

        Examples
        --------
        ::

            with torch.no_grad(), cache.captured_steps(64) as steps:
                with steps.capture() as step:
                    logits = model(ids, position_ids=at, past_key_values=cache).logits
                while steps.left:
                    step.replay()
                    ids.copy_(logits[:, -1:].argmax(-1))
                    at.add_(1)
        """
        if self._steps is not None:
            raise BitslabError("captured_steps(): within another block, which is to be left first")
        steps = self._steps = self._open_steps(checked_tokens(tokens), attention_mask)
        try:
            yield steps
        finally:
            self._steps = None
            steps.close()
        steps.raise_pending()
        for i in self._packed:
            self._layer(i).pack_due()

    def _open_steps(self, tokens: int, mask: torch.Tensor | None) -> CapturedSteps:
        """Pack what is due, wait for that, and return steps of all layers."""
        histories, layers = self._histories, {i: self._layer(i) for i in self._packed}
        if histories.placement.hosted or histories.placement.balance is not None:
            raise ArgumentError(
                "offload: packed words lie in host memory, from where no replay fetches them; "
                "captured_steps() accepts caches that were made with offload=False"
            )
        if self.selector is not None:
            raise ArgumentError("select: captured_steps() accepts caches without a selector")
        others = {type(layer).__name__ for layer in self.layers} - {KVCompLayer.__name__}
        if others or not layers:
            raise BitslabError(
                "captured_steps(): accepted are models whose layers all have full attention, this "
                f"one has {', '.join(sorted(others)) or 'none'}"
            )
        devices = {layer.device for layer in layers.values() if layer.is_initialized}
        if len(devices) != 1 or not all(layer.is_initialized for layer in layers.values()):
            raise BitslabError(
                "captured_steps(): accepted are caches that hold a prompt, on one device, this one "
                f"is on {', '.join(sorted(map(str, devices))) or 'none'}"
            )
        [device] = devices
        if capturing(device):
            raise BitslabError("captured_steps(): within a capture; it is to be entered before")
        self._undo_captured()
        self._hands.look()
        if not self._hands.now:
            raise BitslabError(
                "captured_steps(): attention decodes K and V, which no replay can do; call "
                f'model.set_attn_implementation("{NAME}")'
            )
        for layer in layers.values():  # behind what they did on another stream
            for history in layer.histories:
                history.take_turn()
        if mask is None and any(layer.padded for layer in layers.values()):
            raise ArgumentError(
                "attention_mask: None, but the cache holds padding, which attention would see; "
                "pass the mask of all its tokens, [B, T] (ones, where sequences with padding are "
                "gone)"
            )
        layer = layers[min(layers)]
        first_valid = first_valid_of(mask, layer.batch, layer.get_seq_length(), device)
        self._histories.finish_learning()
        self._pass = self._updated = None
        for layer in layers.values():
            layer.pack_due()
        histories.readers[device].finish_packing()
        for layer in layers.values():
            for history in layer.histories:
                while history.packs:  # a single block, which no queue has
                    history.pack_on(wait=True)
        count = StepCount(device, tokens)
        return CapturedSteps(layers, count, first_valid, self._hands.query_heads)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens of a layer.

        Raises
        ------
        BitslabError
            Within `CapturedSteps.capture`, for a model that was given no ``position_ids``.
        """
        if self._steps is not None:
            self._steps.check_length()
        return super().get_seq_length(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the number of tokens of a layer, as masks ask for it."""
        return super().get_seq_length(layer_idx)

    def change_layers(
        self, prepare: Callable[[CompressedLayer], Commit], plain: Callable[[Any], None]
    ) -> None:
        """Change all layers, or none when one cannot; none within `captured_steps`."""
        self._check_no_steps()
        # Those that have not come to it yet learn from the same tokens as the others.
        self._histories.finish_learning()
        super().change_layers(prepare, plain)

    def reset(self) -> None:
        """Forget all tokens.

        Raises
        ------
        BitslabError
            Within `captured_steps`.
        """
        self._check_no_steps()
        super().reset()  # type: ignore[no-untyped-call]

    def _check_no_steps(self) -> None:
        """Raise within a block of steps, whose graphs read and write the memory of the tokens."""
        if self._steps is not None:
            raise BitslabError(
                "KVCompCache: within captured_steps() the cache takes steps alone, as graphs read "
                "and write the memory of its tokens; leave the block first"
            )

    def _layer(self, i: int) -> KVCompLayer:
        layer = self._packed[i]
        assert isinstance(layer, KVCompLayer)
        return layer

    def stats(self) -> dict[str, Any]:
        """Return what the cache holds and has moved, and how well K and V are kept.

        Returns
        -------
        dict
            As `CompressedCache.stats`, all metadata of tiles among ``packed_bytes``, and
            ``errors``: by layer the relative error of attention that was measured when its codecs
            were fitted, on 2,048 tokens of a longer prompt, without those that saw no queries;
            ``measured_without``: by layer what its attention has and that error leaves out, as a
            position bias, or why padding left nothing to measure, so that steps are those without
            queries;
            ``lossless``: by layer why its tokens are not quantised; ``packed_passes`` and
            ``dense_passes``: how often attention has read packed tokens as they are, and decoded
            first.
        """
        layers = {i: self._layer(i) for i in self._packed}
        lossless = {}
        for i, layer in layers.items():
            if self._tiles.lossless:
                lossless[i] = "error 0"
            elif layer.unfit:
                lossless[i] = layer.unfit
            elif layer.plans.why_lossless:
                lossless[i] = layer.plans.why_lossless
            elif self._tiles.lossless_tiles:
                lossless[i] = "coder 'lossless'"
        return {
            **super().stats(),
            "errors": {
                i: layer.plans.measured.error
                for i, layer in layers.items()
                if layer.plans.measured is not None
            },
            "measured_without": {
                i: text for i, layer in layers.items() if (text := layer.left_out)
            },
            "lossless": lossless,
            "packed_passes": sum(layer.packed_passes for layer in layers.values()),
            "dense_passes": sum(layer.dense_passes for layer in layers.values()),
        }


class _AttentionOf:
    """Whether the attention of a model takes handles, by its config, which copies share.

    Attributes
    ----------
    now : bool
        What `look` has found last.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self.now = False

    def look(self) -> None:
        """Look the attention of the model up, as it may have been set since."""
        self.now = bool(_decoder(self._config)._attn_implementation == NAME)

    @property
    def query_heads(self) -> int | None:
        """Query heads of a layer, where the config has them."""
        found = getattr(_decoder(self._config), "num_attention_heads", None)
        return found if isinstance(found, int) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> _AttentionOf:
        return self


def _decoder(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of a config that transformers makes caches of."""
    return config.get_text_config(decoder=True)
