"""PackedCache: what caches of transformers share whose full-attention layers are packed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar
from weakref import ref

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from bitslab.errors import ArgumentError, ArgumentTypeError, BitslabError, MissingExtraError
from bitslab.integrations.transformers.cache_layer import CompressedLayer
from bitslab.integrations.transformers.cross_attention import SelfAttentionCache
from bitslab.integrations.transformers.forward_pass import ForwardPass
from bitslab.integrations.transformers.layer_histories import LayerHistories
from bitslab.integrations.transformers.selectors import KVSelector
from bitslab.kvcache import (
    Commit,
    check_offload,
    check_sm_budget,
    load_kernels,
    repeat_count,
    sequence_index,
)
from bitslab.tracing import exporting, not_traced

Kind = TypeVar("Kind", bound="PackedCache")

#: Begin of the `note` in `stats` of a cache that packs nothing.
NOTHING_PACKED = (
    "nothing is packed: the config has no full-attention layer, and this cache is transformers' own"
)


class Steps(Protocol):
    """What takes the updates of all packed layers for a while."""

    def update(
        self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the K and V of a layer, and return all of its K and V."""
        ...

    def check_length(self) -> None:
        """Raise where the number of tokens must not be asked for."""
        ...


class PackedCache(DynamicCache, SelfAttentionCache):
    """A K/V cache whose full-attention layers are packed; layers of other kinds are transformers'.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's.
    histories : LayerHistories
        Opens the histories of the layers.
    make_layer : callable
        Returns the layer of a number.

    Raises
    ------
    ArgumentError
        For a config with layers that transformers does not know.
    """

    _pass: ForwardPass | None = None  #: the one under way, or the last one
    _to_undo: ForwardPass | None = None  #: one that a capture within it has ended
    _steps: Steps | None = None  #: that take updates, within their block

    def __init__(
        self,
        config: PreTrainedConfig,
        histories: LayerHistories,
        make_layer: Callable[[int], CompressedLayer],
    ) -> None:
        self._histories = histories
        try:
            super().__init__(config=config)
        except KeyError as error:
            raise ArgumentError(
                f"config: {type(config).__name__} has layers of type {error}, which transformers' "
                "DynamicCache does not know"
            ) from error
        # transformers decides which layers a model has; the plain ones are replaced.
        packed = [i for i, layer in enumerate(self.layers) if type(layer) is DynamicLayer]
        self._check_layers(packed)
        self._histories.place(packed)
        self._packed = {i: make_layer(i) for i in packed}
        for i, layer in self._packed.items():
            self.layers[i] = layer
        if packed:
            _load_kernels(self._histories.device, getattr(config, "dtype", None))
        self._next = dict(zip(packed, [*packed[1:], *packed[:1]], strict=True))
        self._next_hosted = self._histories.placement.next_hosted()
        self._first = min(packed, default=-1)

    def _check_layers(self, packed: list[int]) -> None:
        """Raise for layers that cannot be served."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the K and V of a layer and return all of its K and V.

        Parameters
        ----------
        key_states, value_states : torch.Tensor
            ``[B, H, n, D]``.
        layer_idx : int
            The layer.
        args, kwargs
            Handed on to layers of other kinds.

        Returns
        -------
        keys, values : torch.Tensor
            ``[B, H, T, D]``.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            In `torch.export`, for a layer that the config does not have, and K and V that do not
            continue those that are there.
        BitslabError
            When host memory runs out, or a CUDA graph is being captured, whose replays would put
            other tokens in the place of these. After any error the cache is as it was before.
        """
        if exporting():
            raise ArgumentTypeError(
                f"past_key_values: {type(self).__name__} cannot be exported: what it packs depends "
                "on values; export the model with transformers' DynamicCache or StaticCache"
            )
        return self._update(key_states, value_states, layer_idx, *args, **kwargs)

    @not_traced
    def _update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self._packed.get(layer_idx)
        if layer is None:
            self._check_index(layer_idx)
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        current = self._pass
        if self._steps is not None:
            return self._steps.update(layer_idx, key_states, value_states)
        if getattr(key_states, "is_cuda", False) and torch.cuda.is_current_stream_capturing():
            # Nothing is packed or put back here, which would be captured.
            if current is not None and current.layers and layer_idx > current.layers[-1]:
                self._to_undo = current
            raise BitslabError(
                "update(): a CUDA graph is being captured; a packed cache grows with each token, "
                "which no replay can follow. Capture steps by steps.capture() within "
                "KVCompCache.captured_steps(), or with transformers' StaticCache"
            )
        if self._to_undo is not None:
            self._undo_captured()
            current = self._pass
        if current is None or not current.layers or layer_idx <= current.layers[-1]:
            current = self._pass = ForwardPass(self.undo_pass)
            for each in self._packed.values():
                each.kept = None
        current.layers.append(layer_idx)
        if layer_idx == self._first:
            self._begin_pass(key_states)
        try:
            found = self.append_to(layer_idx, key_states, value_states)
            current.returned.append(ref(found[0]))
            new = key_states.shape[2]
            following = self._next[layer_idx]
            layer = self._packed[following]
            layer.prefetch(new)
            crossing = self._next_hosted[following]
            # Attention to words as they are asks for the next ones when it has read those before.
            if crossing is not None and not layer.reads_words:
                self._packed[crossing].prefetch_words(early=True)
        except BaseException:
            self.undo_pass(current)
            raise
        return found

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens of a layer."""
        self._undo_captured()
        return super().get_seq_length(layer_idx)

    def _undo_captured(self) -> None:
        """Undo the pass in which an update was refused within a capture, behind that."""
        failed = self._to_undo
        if failed is None or (
            torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            and torch.cuda.is_current_stream_capturing()
        ):
            return
        self._to_undo = None
        self.undo_pass(failed)

    def _check_index(self, layer_idx: object) -> None:
        """Raise for what numbers no layer."""
        try:
            number = operator.index(layer_idx)  # type: ignore[arg-type]
        except TypeError:
            raise ArgumentTypeError(f"layer_idx: expected an int, got {layer_idx!r:.60}") from None
        if not 0 <= number < len(self.layers):
            raise ArgumentError(
                f"layer_idx: {number}, this cache was made for a model of {len(self.layers)} layers"
            )

    def _begin_pass(self, key_states: torch.Tensor) -> None:
        """Move layers between host and device before a pass, where they are placed by measuring."""
        if self._histories.placement.balance is None:
            return
        if not isinstance(key_states, torch.Tensor) or key_states.dim() != 4:
            return  # the layer refuses it
        layers = {i: layer.histories for i, layer in self._packed.items()}
        if self._histories.rebalance(layers, key_states.shape[2]):
            self._next_hosted = self._histories.placement.next_hosted()

    def append_to(
        self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to one of our layers."""
        return self._packed[layer_idx].update(key_states, value_states)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end, of no layer when one refuses.

        Parameters
        ----------
        tokens_to_remove : int
            Their number, negative or 0, as in transformers 5.

        Raises
        ------
        ArgumentError
            When it is positive or there are not so many.
        """
        self.change_layers(
            lambda layer: layer.prepare_crop(tokens_to_remove),
            lambda layer: layer.crop(tokens_to_remove),
        )

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take sequence ``beam_idx[b]`` for each b: beam search.

        Parameters
        ----------
        beam_idx : torch.Tensor or sequence
            Integers ``[any]``. On the cache's GPU they are not read by the host, so that bad ones
            end in a device-side assertion of torch.

        Raises
        ------
        ArgumentError, ArgumentTypeError, IndexRangeError
            For an index that names no sequences; no layer has changed then.
        """
        batch = self._batch()
        if isinstance(beam_idx, torch.Tensor) and beam_idx.device.type == "cuda":
            plain = beam_idx
        else:
            plain = beam_idx if batch is None else sequence_index(beam_idx, batch, "beam_idx")
        self.change_layers(
            lambda layer: layer.prepare_reorder(beam_idx),
            lambda layer: layer.reorder_cache(plain),
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put each sequence `repeats` times in a row.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            When `repeats` is no integer from 0; no layer has changed then.
        """
        count = repeat_count(repeats)
        self.change_layers(
            lambda layer: layer.prepare_repeat(count),
            lambda layer: layer.batch_repeat_interleave(count),
        )

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the sequences of an index.

        Parameters
        ----------
        indices : torch.Tensor, sequence or slice
            Integers ``[any]``, negative ones counted from the end, or bools ``[B]``. Those on a GPU
            are waited for.

        Raises
        ------
        ArgumentError, ArgumentTypeError, IndexRangeError
            For an index that names no sequences; no layer has changed then.
        """
        batch = self._batch()
        plain = indices if batch is None else sequence_index(indices, batch)
        self.change_layers(
            lambda layer: layer.prepare_select(plain),
            lambda layer: layer.batch_select_indices(plain),
        )

    def stats(self) -> dict[str, Any]:
        """Return what the cache holds and has moved.

        Returns
        -------
        dict
            ``tokens`` and ``packed_tokens`` of a sequence; ``packed_layers`` and ``plain_layers``,
            the layers of full attention and those that are transformers' own; ``note``, that and
            why nothing is packed, or empty. Of the full-attention layers:
            ``raw_bytes`` of all tokens, which a `DynamicCache` takes; ``host_bytes`` and
            ``device_bytes``, all memory that is reserved, each byte once: packed words and metadata
            with room ahead, unpacked tokens, selectors' scores, and ``buffer_bytes`` (of
            ``device_bytes``) fetch buffers on a GPU, as much as two layers take packed, where they
            cross, and one raw, where that is decoded ahead; ``ratio``, raw bytes over both. Of
            packed tokens: ``packed_raw_bytes``, ``packed_bytes`` and ``kept_raw_bytes`` of
            `PackedHistory.stats`,
            their ``packed_ratio``, and ``ratios`` by layer. ``moved_to_host_bytes`` and
            ``moved_to_device_bytes``, the packed words that were stored and fetched;
            ``host_layers``, the layers whose packed words lie in host memory, with
            ``packed_host_bytes`` and ``packed_device_bytes``, the words there and on the device,
            and ``offload``, the share of the first; ``selected``,
            the share of packed tokens that forward passes have fetched; ``refits`` of codecs;
            ``reserved_bytes``, the host memory of packed words, which a reset keeps.
        """
        layers = {
            i: [history.stats() for history in layer.histories] for i, layer in self._packed.items()
        }
        sums = {
            name: sum(s[name] for both in layers.values() for s in both)
            for name in (
                "raw_bytes",
                "packed_raw_bytes",
                "packed_bytes",
                "kept_raw_bytes",
                "device_bytes",
                "moved_to_host_bytes",
                "refits",
            )
        }
        readers = self._histories.readers.values()
        histories = [history for layer in self._packed.values() for history in layer.histories]
        reserved = sum(
            reader.host_bytes(history for history in histories if history.device == device)
            for device, reader in self._histories.readers.items()
        )
        buffers = sum(reader.buffer_bytes for reader in readers)
        sums["device_bytes"] += buffers
        for layer in self._packed.values():
            sums["device_bytes"] += layer.kept_bytes
            if layer.scores is not None:
                sums["device_bytes"] += layer.scores.nbytes
        there = sum(layer.there_tokens for layer in self._packed.values())
        read = sum(layer.read_tokens for layer in self._packed.values())
        others = [type(layer).__name__ for i, layer in enumerate(self.layers) if i not in layers]
        on_host, on_device = (
            sum(4 * h.words.n_words for h in histories if h.words.on_host is there)
            for there in (True, False)
        )
        hosted = sorted(self._histories.placement.hosted)
        note = "" if layers else f"{NOTHING_PACKED}: {', '.join(sorted(set(others))) or 'none'}"
        return {
            "tokens": self._tokens(),
            "packed_tokens": next((x.packed_tokens for x in self._packed.values()), 0),
            "packed_layers": len(layers),
            "plain_layers": len(others),
            "note": note,
            **sums,
            "host_bytes": reserved,
            "host_layers": hosted,
            "packed_host_bytes": on_host,
            "packed_device_bytes": on_device,
            "offload": _share(on_host, on_device, len(hosted) / max(1, len(layers))),
            "moved_to_device_bytes": sum(reader.moved_to_device_bytes for reader in readers),
            "selected": read / there if there else 1.0,
            "reserved_bytes": reserved,
            "buffer_bytes": buffers,
            "ratio": _ratio(sums["raw_bytes"], sums["device_bytes"] + reserved),
            "packed_ratio": _ratio(sums["packed_raw_bytes"], sums["packed_bytes"]),
            "ratios": {
                i: _ratio(
                    sum(s["packed_raw_bytes"] for s in both), sum(s["packed_bytes"] for s in both)
                )
                for i, both in layers.items()
            },
        }

    def _tokens(self) -> int:
        """Return the tokens of a sequence; those that transformers' own layers count if need be."""
        if self._packed:  # whose keys would be decoded
            return next(iter(self._packed.values())).get_seq_length()
        held: list[Any] = [x for x in self.layers if getattr(x, "keys", None) is not None]
        return max((layer.get_seq_length() for layer in held), default=0)

    def _batch(self) -> int | None:
        """Return the number of sequences; None before the first."""
        for layer in self.layers:
            if isinstance(layer, CompressedLayer):
                if layer.get_seq_length():
                    return layer.batch
                continue
            keys: torch.Tensor | None = getattr(layer, "keys", None)
            if keys is not None and keys.numel():
                return keys.shape[0]
        return None

    def change_layers(
        self, prepare: Callable[[CompressedLayer], Commit], plain: Callable[[Any], None]
    ) -> None:
        """Change all layers, or none when one cannot: `prepare` ours, `plain` the others."""
        self._undo_captured()
        self._pass = None
        commits = [prepare(layer) for layer in self._packed.values()]
        with _as_they_were(
            layer for i, layer in enumerate(self.layers) if i not in self._packed
        ) as others:
            for other in others:
                plain(other)
        for commit in commits:
            commit()

    def undo_pass(self, failed: ForwardPass) -> None:
        """Put all layers back to what they were like before a pass, if it is the last one."""
        if failed is not self._pass:
            return
        self._pass = None
        for layer in self._packed.values():
            layer.undo()


def _load_kernels(device: torch.device | None, dtype: object) -> None:
    """Load kernels for a GPU that is used already, so that no prompt waits for them."""
    if device is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.device("cuda", torch.cuda.current_device())
    if device is not None and device.type == "cuda":
        with suppress(MissingExtraError):  # the layers may be on the CPU, or raise it themselves
            load_kernels(device, dtype if isinstance(dtype, torch.dtype) else torch.bfloat16)


def exported_as_constant(kind: type[Kind]) -> type[Kind]:
    """Make `torch.export`, which flattens its inputs, take caches of a class for constants.

    So they reach `update`, which refuses them by name, also where transformers registers all kinds
    of caches as containers of tensors.
    """
    torch.utils._pytree.register_pytree_node(
        kind,
        lambda cache: ([], cache),
        lambda _, cache: cache,
        serialized_type_name=f"{kind.__module__}.{kind.__name__}",
        flatten_with_keys_fn=lambda cache: ([], cache),
    )
    return kind


def check_cache_options(config: object, offload: object, sm_budget: object) -> None:
    """Raise for options that no cache accepts."""
    if not isinstance(config, PreTrainedConfig):
        raise ArgumentTypeError(
            f"config: expected a transformers config, got {type(config).__name__}"
        )
    check_offload(offload)
    check_sm_budget(sm_budget)


def check_selector(select: object) -> None:
    """Raise for what chooses no tokens."""
    if select is not None and not isinstance(select, KVSelector):
        raise ArgumentTypeError(
            "select: expected a KVSelector, as HeavyHitterSelector or InfiniGenSelector, got "
            f"{select!r:.60}"
        )


@contextmanager
def _as_they_were(layers: Iterable[Any]) -> Iterator[list[Any]]:
    """Restore the state of transformers' layers if the block raises.

    They replace tensors, never write to them: in attributes and in dicts of a layer.
    """
    found = list(layers)
    kept = [
        {name: dict(v) if isinstance(v, dict) else v for name, v in vars(layer).items()}
        for layer in found
    ]
    try:
        yield found
    except BaseException:
        for layer, state in zip(found, kept, strict=True):
            vars(layer).clear()
            vars(layer).update(state)
        raise


def _share(part: float, rest: float, expected: float) -> float:
    """Return the share of a part, or what is expected of it as long as there is none."""
    return part / (part + rest) if part + rest else expected


def _ratio(raw: float, packed: float) -> float:
    return raw / packed if raw else 1.0
