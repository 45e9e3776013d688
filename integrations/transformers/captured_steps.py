"""Steps of a `KVCompCache` in CUDA graphs: one token at a time, at places in device memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch

from bitslab.engine.transfer import StreamLane
from bitslab.errors import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.integrations.transformers.attention import NAME, left_padding
from bitslab.integrations.transformers.handles import KVHandle
from bitslab.integrations.transformers.kvcomp_layer import KVCompLayer, LayerUpdate, Padding
from bitslab.kvcache import MAX_ROWS, StepCount, TokenSteps


class Graph(Protocol):
    """What `recorded` yields, as `torch.cuda.CUDAGraph`."""

    def replay(self) -> Any:
        """Run what was captured."""
        ...

    def reset(self) -> Any:
        """Forget what was captured."""
        ...


class CapturedStep:
    """A step that was captured by `CapturedSteps.capture`; the only thing that replays it.

    Parameters
    ----------
    run : callable
        Replays it, where its block allows that.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def replay(self) -> None:
        """Run the step on the current stream: one token more of each sequence. Waits for nothing.

        Raises
        ------
        BitslabError
            Behind the block, within a capture, of a capture that did not end well, and when there
            is no room; also of an earlier call on the GPU, as a damaged tile. Nothing is run then.
        """
        self._run()

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _none, ()  # graphs belong to their process


@dataclass(eq=False)
class _Capture:
    """What a block knows of one of its captures.

    Attributes
    ----------
    graph : Graph or None
        None before the capture has begun, and once it is forgotten.
    passes : int
        Forward passes that have begun within it.
    failed : bool
        Whether one of them has failed.
    """

    graph: Graph | None = None
    passes: int = 0
    failed: bool = False

    def forget(self) -> None:
        """Drop the graph; a replay under way goes on to its end."""
        graph, self.graph = self.graph, None
        if graph is not None:
            graph.reset()


class CapturedSteps:
    """Steps of decoding within ``with cache.captured_steps(...)``, captured or not.

    A step is a forward pass of one token a sequence. Within the block the cache takes steps alone:
    within `capture` one is recorded, which each replay runs again behind the tokens that are there
    by then; else it is run, and counted.

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
        self._count, self._first_valid = count, first_valid
        self._layers = {i: _StepLayer(i, layer, count, first_valid) for i, layer in layers.items()}
        if query_heads is not None:
            for layer in self._layers.values():
                layer.steps.load_kernels(query_heads)
        self._order = sorted(layers)
        first = layers[self._order[0]]
        self._length = first.get_seq_length()  # before the block
        self._link = first.histories[0].words.link  # on one device all have one
        self._seen: list[int] = []  # the layers of the forward pass under way
        self._pass = 0  # its number, or that of the last one
        self._began = 0  # the tokens before it
        self._ahead = False  # whether the device may count other tokens than the host
        self._recording: _Capture | None = None  # under way
        self._captured: list[_Capture] = []
        self._open = True

    @property
    def left(self) -> int:
        """Tokens of a sequence that the cache can still take within the block."""
        return self.room - self.tokens

    # Captured steps

    @contextmanager
    def capture(self, **options: Any) -> Iterator[CapturedStep]:
        """Capture one forward pass, and what else is launched, in a CUDA graph; nothing is run.

        Parameters
        ----------
        options
            Of `torch.cuda.graph`: ``pool``, ``stream`` and ``capture_error_mode``.

        Yields
        ------
        CapturedStep
            Its `replay` runs the step, once the capture is over.

        Raises
        ------
        BitslabError
            Behind the block, within a capture, and where no forward pass, not all layers of one or
            more than one were captured. After any error the cache is as it was.
        """
        device = self._count.short_by.device
        self._check_open("capture()")
        if self._recording is not None or capturing(device):
            raise BitslabError("capture(): within another capture, which is to end before")
        made = _Capture()
        try:
            self._recording, self._seen = made, []
            self._pass += 1
            with recorded(device, **options) as graph:
                made.graph = graph
                yield CapturedStep(partial(self._replay, made))
            self._check_open("capture()")
            if made.passes != 1 or self._seen or made.failed:
                partly = ", not all of them whole," if self._seen or made.failed else ""
                raise BitslabError(
                    f"capture(): {made.passes} forward passes{partly} were captured; a step is "
                    "one, of the model with this cache"
                )
            self._captured.append(made)
        except BaseException:
            made.forget()
            raise
        finally:
            self._recording, self._seen = None, []

    def check_length(self) -> None:
        """Raise within a capture, where the model asks how many tokens are there."""
        if self._recording is not None:
            raise BitslabError(
                "get_seq_length(): a capture would keep this number for all replays; pass the "
                "model position_ids, in memory on the device to which you write the positions of "
                "each step"
            )

    def _replay(self, made: _Capture) -> None:
        """Replay the graph of a step, and count its token."""
        self._check_room("replay()")
        graph = made.graph
        if graph is None:
            raise BitslabError(
                "replay(): the capture of this step has not ended, or by an error; capture it anew"
            )
        if self._recording is not None or capturing(self._count.short_by.device):
            raise BitslabError("replay(): within a capture; it is to end before")
        self.raise_pending()
        self._take_turn()
        if self._ahead:
            self._count.set(self.tokens)
        self._ahead = True
        self._pass += 1  # no pass before is undone any more
        self._seen, self._began = [], self.tokens
        try:
            graph.replay()
            self._set(self.tokens + 1)
        except BaseException:
            self._set(self._began)
            raise
        self._ahead = False

    # Forward passes

    def update(
        self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[KVHandle, KVHandle]:
        """Take the K and V of a layer ``[B, H, 1, D]`` in a step; see `KVCompCache.update`.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            For more than one token, and K and V that do not continue those that are there.
        BitslabError
            When there is no room for a token, and within a capture other than by `capture`. After
            any error the cache is as it was before the forward pass.
        """
        self._check_open("update()")
        layer = self._layers[layer_idx]
        under_way = bool(self._seen) and layer_idx > self._seen[-1]
        try:
            self._check_capture()
            layer.check(key_states, value_states)
            if not under_way:
                self._begin()
                under_way = True
            self._seen.append(layer_idx)
            update = layer.update(key_states, value_states)
            length = self._length + self.tokens + 1
            if layer_idx == self._order[-1]:
                self._end()
        except BaseException:
            if under_way:
                self._undo(self._pass)
            raise
        update.undo = partial(self._undo, self._pass)
        return KVHandle(update, 0, key_states, length), KVHandle(update, 1, value_states, length)

    def _begin(self) -> None:
        """Begin a forward pass: let the device count its token."""
        self._check_room("update()")
        self._pass += 1
        self._seen, self._began = [], self.tokens
        if self._recording is not None:
            self._recording.passes += 1
            self._count.step()
            return
        self._take_turn()
        self._ahead = True
        self._count.set(self.tokens + 1)

    def _end(self) -> None:
        """End a forward pass with its last layer: count its token."""
        if self._seen != self._order:
            raise BitslabError(
                f"update(): a forward pass of layers {self._seen}, this cache has {self._order}"
            )
        if self._recording is None:
            self._set(self.tokens + 1)
            self._ahead = False
        self._seen = []

    def _undo(self, number: int) -> None:
        """Undo a forward pass, if it is the last one; the device hears of it at the next use."""
        if number != self._pass or not self._open:
            return
        self._pass += 1
        self._seen = []
        if self._recording is not None:
            self._recording.failed = True  # to be discarded, whoever catches the error
            return
        self._ahead = True
        self._set(self._began)

    def _set(self, tokens: int) -> None:
        """Set the tokens of all layers."""
        for each in self._layers.values():
            each.set(tokens)
        self.tokens = tokens

    def _check_capture(self) -> None:
        """Raise within a capture that is not this block's, and outside of it on another stream."""
        if capturing(self._count.short_by.device) != (self._recording is not None):
            raise BitslabError(
                "update(): a CUDA graph is being captured by other means than steps.capture(), or "
                "on another stream; capture steps by `with steps.capture() as step:`, of the steps "
                "that captured_steps() yields, and replay them by step.replay()"
            )

    def _check_room(self, what: str) -> None:
        """Raise unless there is room for a token more."""
        self._check_open(what)
        if self.left < 1:
            raise BitslabError(
                f"{what}: no room is left of captured_steps({self.room}); leave the block, which "
                "packs what is due, and capture steps anew in another one"
            )

    def _check_open(self, what: str) -> None:
        if not self._open:
            raise BitslabError(
                f"{what}: the captured_steps() block of these steps has been left, and the memory "
                "that its graphs write to is no longer theirs; capture them anew in another one"
            )

    def _take_turn(self) -> None:
        """Order the current stream behind what the histories did on another one."""
        self._link.take_turn()
        if self._link.several_streams:
            for each in self._layers.values():
                for history in each.layer.histories:
                    history.take_turn()

    def raise_pending(self) -> None:
        """Raise the error of an earlier call on the GPU, if one is known; waits for nothing."""
        self._count.raise_pending()

    def close(self) -> None:
        """End the block: drop its graphs, and what they read."""
        self._open = False
        try:
            self._take_turn()  # behind the replays
            self._set(self.tokens)  # of all layers alike, whatever has failed
        finally:
            for made in self._captured:
                made.forget()
        # What no history keeps for the streams that take turns.
        kept = [t for each in self._layers.values() for t in each.steps.read_by_graphs]
        if self._first_valid is not None:
            kept.append(self._first_valid)
        self._link.keep_for_turn(self._count.short_by, *kept)
        self._layers, self._captured, self._first_valid = {}, [], None

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
        self._before = layer.packed_passes, layer.there_tokens, layer.read_tokens

    def set(self, tokens: int) -> None:
        """Set how many tokens were taken within the block, and what the layer counts of them."""
        layer, (passes, there, read) = self.layer, self._before
        new = tokens * layer.packed_tokens
        self.steps.set(tokens)
        layer.packed_passes = passes + tokens
        layer.there_tokens, layer.read_tokens = there + new, read + new

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


@contextmanager
def recorded(device: torch.device, **options: Any) -> Iterator[Graph]:
    """Capture what is launched in a CUDA graph, by `torch.cuda.graph` and its options."""
    if device.type != "cuda":
        raise BitslabError(f"capture(): CUDA graphs are of GPUs, this cache is on {device}")
    graph = torch.cuda.CUDAGraph()
    if options.get("stream") is None:
        options["stream"] = _lane_of(device).stream
    with torch.cuda.graph(graph, **options):
        yield graph


@cache
def _lane_of(device: torch.device) -> StreamLane:
    """Return the lane for captures: torch's own stream is of the device that captured first."""
    return StreamLane(device)


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
