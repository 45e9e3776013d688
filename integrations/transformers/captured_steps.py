"""Steps of a `KVCompCache` in CUDA graphs: one token at a time, at places in device memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from bitslab.errors import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.integrations.transformers.attention import NAME, left_padding
from bitslab.integrations.transformers.handles import KVHandle
from bitslab.integrations.transformers.kvcomp_layer import KVCompLayer, LayerUpdate, Padding
from bitslab.kvcache import MAX_ROWS, StepCount, TokenSteps


class Graph(Protocol):
    """What `CapturedSteps.replay` takes, as `torch.cuda.CUDAGraph`."""

    def replay(self) -> Any:
        """Run what was captured."""
        ...


class CapturedSteps:
    """Steps of decoding within ``with cache.captured_steps(...)``, captured or not.

    A step is a forward pass of one token a sequence. Within the block the cache takes steps alone:
    where a CUDA graph is being captured it records one, which each replay runs again behind the
    tokens that are there by then; else it runs one, and counts it.

    Parameters
    ----------
    layers : mapping of int to KVCompLayer
        All layers of the model, on one device, with nothing to pack that is due or in flight.
    count : StepCount
        What is there of the tokens that there is to be room for.
    first_valid : torch.Tensor, optional
        int32 ``[B]`` there: the first token of each sequence that is no padding.
    query_heads : int, optional
        Of the model, where known: kernels are loaded for them before any capture.

    Attributes
    ----------
    tokens : int
        Tokens of a sequence that the cache has taken within the block.
    room : int
        Those that it can take.
    """

    def __init__(
        self,
        layers: Mapping[int, KVCompLayer],
        count: StepCount,
        first_valid: torch.Tensor | None = None,
        query_heads: int | None = None,
    ) -> None:
        self.tokens, self.room = 0, count.room
        self._count = count
        self._layers = {i: _StepLayer(i, layer, count, first_valid) for i, layer in layers.items()}
        if query_heads is not None:
            for layer in self._layers.values():
                layer.steps.load_kernels(query_heads)
        self._last = max(layers)
        self._at = self._last  # the layer of the last update
        self._pass = 0  # the number of the forward pass under way, or the last one
        self._counted = 0  # the last one whose token counts
        self._in_capture = False  # whether the last one was recorded, not run
        self._ahead = False  # whether the device counts a token of a pass that may have failed
        self._open = True

    @property
    def left(self) -> int:
        """Tokens of a sequence that the cache can still take within the block."""
        return self.room - self.tokens

    # Steps

    def replay(self, graph: Graph, tokens: int = 1) -> None:
        """Replay a graph on the current stream, and count its tokens.

        Parameters
        ----------
        graph : torch.cuda.CUDAGraph
            In which steps were captured within this block.
        tokens : int
            How many steps it has.

        Raises
        ------
        BitslabError
            When there is no room for them, or the block has been left; nothing is replayed then.
        """
        self._check_room("replay()", tokens)
        if self._ahead:
            self._resume()
        else:
            self._take_turn()
        self._pass += 1  # no pass before is undone any more
        graph.replay()
        self._add(tokens)

    def replayed(self, tokens: int = 1) -> None:
        """Count tokens of steps that were replayed by other means than `replay`.

        Parameters
        ----------
        tokens : int
            How many of a sequence.

        Raises
        ------
        BitslabError
            When there was no room for them: nothing was overwritten, and the cache holds the tokens
            that it held before these replays; or when the block has been left.
        """
        try:
            self._check_room("replayed()", tokens)
        except BitslabError:
            if self._open:
                self._resume()
            raise
        self._take_turn()
        self._pass += 1
        self._add(tokens)

    def update(
        self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[KVHandle, KVHandle]:
        """Take the K and V of a layer ``[B, H, 1, D]`` in a step; see `KVCompCache.update`.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            For more than one token, and K and V that do not continue those that are there.
        BitslabError
            When there is no room for a token. After any error outside of a capture the cache is as
            it was before the forward pass.
        """
        self._check_open("update()")
        layer = self._layers[layer_idx]
        under_way = layer_idx > self._at
        try:
            layer.check(key_states, value_states)
            if not under_way:
                self._begin()
                under_way = True
            self._at = layer_idx
            update = layer.update(key_states, value_states)
            if layer_idx == self._last and not self._in_capture:
                self._add(1)
                self._counted, self._ahead = self._pass, False
        except BaseException:
            if under_way:
                self._undo(self._pass)
            raise
        update.undo = partial(self._undo, self._pass)
        length = layer.layer.get_seq_length()  # with this token, where it was run and counted
        return KVHandle(update, 0, key_states, length), KVHandle(update, 1, value_states, length)

    def _begin(self) -> None:
        """Begin a forward pass: let the device count its token."""
        self._check_room("update()", 1)
        self._pass += 1
        self._in_capture = capturing(self._count.short_by.device)
        if self._in_capture:
            self._count.step()
        else:
            self._take_turn()
            self._ahead = True
            self._count.set(self.tokens + 1)

    def _undo(self, number: int) -> None:
        """Undo a forward pass that was run, if it is the last one."""
        if number != self._pass or self._in_capture or not self._open:
            return
        if self._counted == number:
            self._add(-1)
        self._pass += 1
        self._at = self._last
        self._resume()

    def _resume(self) -> None:
        """Let the device count the tokens that are there."""
        self._take_turn()
        self._count.set(self.tokens)
        self._ahead = False

    def _check_room(self, what: str, tokens: object) -> None:
        """Raise unless there is room for so many tokens more."""
        self._check_open(what)
        n = checked_tokens(tokens)
        if n > self.left:
            raise BitslabError(
                f"{what}: {n} more tokens, room is left for {self.left} of the {self.room} of "
                f"captured_steps({self.room}); leave the block, which packs what is due, and "
                "capture steps anew in another one"
            )

    def _check_open(self, what: str) -> None:
        if not self._open:
            raise BitslabError(
                f"{what}: the captured_steps() block of these steps has been left, and the memory "
                "that its graphs write to is no longer theirs; capture them anew in another one"
            )

    def _add(self, tokens: int) -> None:
        self.tokens += tokens
        for each in self._layers.values():
            each.steps.count(tokens)
            each.layer.count_steps(tokens)

    def _take_turn(self) -> None:
        """Order the current stream behind what the histories did on another one."""
        histories = self._layers[self._last].layer.histories
        histories[0].take_turn()  # on one device all have one link
        if histories[0].words.link.several_streams:
            for each in self._layers.values():
                for history in each.layer.histories:
                    history.take_turn()

    def close(self) -> None:
        """Let graphs that are replayed from now on write nothing."""
        self._take_turn()
        self._open = False
        self._count.close()
        self._layers = {}  # nobody keeps the memory of tokens by keeping this

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _none, ()  # a copy of a cache is in no block


class _StepLayer:
    """A layer within a block, as its updates know it.

    Parameters
    ----------
    number : int
        Of the layer, for messages.
    layer : KVCompLayer
        The layer.
    count : StepCount
        That of the block.
    first_valid : torch.Tensor, optional
        As of `CapturedSteps`.
    """

    changes = 0  # there are none within a block

    def __init__(
        self, number: int, layer: KVCompLayer, count: StepCount, first_valid: torch.Tensor | None
    ) -> None:
        self.layer, self._first_valid = layer, first_valid
        self.steps = _opened(number, layer, count)
        self._length = layer.get_seq_length() + count.room

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> LayerUpdate:
        """Append K and V ``[B, H, 1, D]``, and return what attention reads."""
        self.steps.append(keys, values)
        return LayerUpdate(self, (keys, values), self._length)

    def check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Raise for K and V that are not the next token of each sequence."""
        given = {"key_states": key_states, "value_states": value_states}
        for (name, new), history in zip(given.items(), self.layer.histories, strict=True):
            if not isinstance(new, torch.Tensor):
                raise ArgumentTypeError(f"{name}: expected a tensor, got {type(new).__name__}")
            history.check(new)
            if new.shape[2] != 1:
                raise ArgumentError(
                    f"{name}: {new.shape[2]} tokens; within captured_steps() a forward pass has "
                    "one token of each sequence"
                )

    def latest(self, update: LayerUpdate) -> bool:
        """Return True: attention reads what is there."""
        return True

    def read(self, update: LayerUpdate) -> tuple[torch.Tensor, torch.Tensor]:
        """Raise: no replay would decode the tokens that are there by then."""
        raise BitslabError(
            "captured_steps(): K and V would have to be decoded, which no replay does; accepted is "
            f'attention by "{NAME}" without a mask (captured_steps() takes that of padding), '
            "gradients (run the model within torch.no_grad()), dropout and position bias, to no "
            f"more tokens than a sliding window has, of up to {MAX_ROWS} query heads a K/V head"
        )

    def attend_packed(
        self, query: torch.Tensor, padding: Padding | None, options: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """Return attention to the tokens that are there ``[B, 1, query heads, D]``."""
        attention = self.layer.attention
        if padding is not None and padding.first_valid is not None:
            return None  # which the mask of a replay would not know
        if attention is None or not attention.serves(query):
            return None
        return self.steps.attend(
            query,
            scaling=options.get("scaling"),
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
            first_valid=self._first_valid,
        )

    def see(
        self,
        query: torch.Tensor,
        padding: Padding | None,
        options: Mapping[str, Any],
        *,
        other_mask: bool = False,
    ) -> None:
        """Do nothing: codecs have been learnt."""

    def end_pass(self) -> None:
        """Do nothing."""


def capturing(device: torch.device) -> bool:
    """Return whether what is launched on a device is recorded, not run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def checked_tokens(tokens: object) -> int:
    """Return a number of tokens.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When it is no integer from 1.
    """
    try:
        n = operator.index(tokens)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentTypeError(f"tokens: expected an int, got {tokens!r:.60}") from None
    if n < 1:
        raise ArgumentError(f"tokens: {n}, accepted are integers from 1")
    return n


def first_valid_of(
    mask: object, batch: int, length: int, device: torch.device
) -> torch.Tensor | None:
    """Return the first token of each sequence that is no padding, int32 ``[B]`` on a device.

    Parameters
    ----------
    mask : torch.Tensor, optional
        ``[B, T]`` of all tokens that are there, 0 for padding, which is on the left.
    batch, length : int
        Of the tokens that are there.
    device : torch.device
        The device.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For another mask.
    """
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        raise ArgumentTypeError(f"attention_mask: expected a tensor, got {mask!r:.60}")
    if tuple(mask.shape) != (batch, length):
        raise ArgumentError(
            f"attention_mask: shape {list(mask.shape)}, accepted is [{batch}, {length}], of the "
            "tokens that the cache holds"
        )
    padding = left_padding(mask.to(device), length)
    if padding is None:
        raise ArgumentError("attention_mask: accepted are sequences with padding on the left alone")
    return padding.first_valid


def _opened(number: int, layer: KVCompLayer, count: StepCount) -> TokenSteps:
    """Return the steps of a layer, if attention reads its tokens as they are packed."""
    reads = None if layer.attention is None else layer.attention.here()
    if reads is not None:
        return TokenSteps(reads, layer.histories, count)
    options = layer.plans.options
    why = f"granularity {options.granularity!r}"
    if layer.lossless or layer.plans.why_lossless:
        why = layer.unfit or layer.plans.why_lossless or "error 0"
    elif not layer.packed_tokens:
        why = (
            f"of {layer.get_seq_length()} tokens none is packed: there are {options.sinks} first "
            f"and {options.window} last ones that are not, and blocks have {options.block_tokens}"
        )
    raise BitslabError(
        f"captured_steps(): layer {number} has no tokens that attention reads as they are packed "
        f"({why}), and no replay can decode them first"
    )


def _none() -> None:
    """Return what stands for steps in a copy of a cache."""
