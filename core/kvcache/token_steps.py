"""TokenSteps: tokens of one layer that come one by one, at places that device memory says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..engine.kernels.cuda import CudaKernels, kernels_on
from ..engine.kernels.cuda.append import in_words
from ..engine.kernels.cuda.prepared_attention import PreparedAttention, PreparedOwn, Run
from ..engine.kernels.spans import MAX_ROWS, OwnTokens, RawRun, Span
from .history import PackedHistory


class Reads(Protocol):
    """What attention reads of a layer whose packed tokens remain as they are."""

    spans: list[Span]

    def raw(self, ends: tuple[int, int] | None = None) -> list[RawRun]:
        """Return all tokens that are no tiles, the tails as long as given."""
        ...

    def runs(self, ends: tuple[int, int] | None = None) -> tuple[list[Run], list[object]]:
        """Return `raw` as the kernels of a GPU take it, and what that points to."""
        ...

    def own(self) -> OwnTokens | None:
        """Return the own first tokens of sequences behind padding, if any are kept."""
        ...

    def prepared_own(self) -> PreparedOwn | None:
        """Return `own` as the kernels of a GPU take it."""
        ...


class StepCount:
    """How many of the tokens that there is room for are missing, in device memory.

    Parameters
    ----------
    device : torch.device
        The device.
    room : int
        Tokens of a sequence that there is room for.

    Attributes
    ----------
    short_by : torch.Tensor
        int32 ``[1]``: the tokens that are missing; below 0 behind the last one.
    room : int
        As given.
    """

    def __init__(self, device: torch.device, room: int) -> None:
        with torch.inference_mode(False):
            self.short_by = torch.zeros(1, dtype=torch.int32, device=device)
        self.room = room
        self.step()  # loads the kernel, which a capture is not to do
        self.set(0)

    def step(self) -> None:
        """Count one token more, from wherever the device is: as a captured step does."""
        self.short_by.sub_(1)

    def set(self, tokens: int) -> None:
        """Set how many tokens are there; of more than there is room for none is written."""
        self.short_by.fill_(self.room - tokens)

    def raise_pending(self) -> None:
        """Raise the error of an earlier call on the device, if one is known; waits for nothing."""
        _gpu_kernels(self.short_by.device)


class TokenSteps:
    """Tokens of a layer, appended and attended to by launches that are the same for each.

    What changes from token to token is read from device memory (`StepCount`): so launches can be
    captured in a CUDA graph. Each new token goes to memory that was taken for all of them, and
    attention, which is cut as for all of them, reads those that are there. Nothing is packed
    meanwhile: until this is dropped the histories must change by `set` alone.

    Parameters
    ----------
    reads : Reads
        What attention reads of the histories.
    histories : sequence of PackedHistory
        Of K and V ``[B, H, T, D]``, of which nothing is in flight.
    steps : StepCount
        That of all layers, which counts before the first of them appends.
    """

    def __init__(self, reads: Reads, histories: Sequence[PackedHistory], steps: StepCount) -> None:
        self._reads, self._steps = reads, steps
        self._tails = [history.unpacked.tail for history in histories]
        self._before = [tail.length for tail in self._tails]
        k_tail, v_tail = self._tails
        self._ends = k_tail.length + steps.room, v_tail.length + steps.room
        self._length = histories[0].length + steps.room
        self._device = histories[0].device
        if not (
            k_tail.has_room(steps.room)
            and v_tail.has_room(steps.room)
            and k_tail.memory.stride() == v_tail.memory.stride()
            and in_words(k_tail.memory)
            and in_words(v_tail.memory)
        ):
            for history, tail in zip(histories, self._tails, strict=True):
                history.take_turn()
                tail.move(max(self._ends))
        self.memory = k_tail.memory, v_tail.memory
        self._prepared: dict[object, PreparedAttention] = {}
        self._own = reads.prepared_own()  # not first in a capture, which would own its memory

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put a token ``[B, H, 1, D]`` of each sequence where the count says."""
        new, short_by = (keys.detach(), values.detach()), self._steps.short_by
        kernels = _gpu_kernels(self._device)
        if kernels is not None:
            kernels.append_token(new, self.memory, self._ends, short_by)
            return
        from ..engine.kernels.cpu.append import append_token

        append_token(new, self.memory, self._ends, short_by)

    def attend(
        self,
        query: torch.Tensor,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        first_valid: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention of the last token to all that are there, as `PackedAttention.attend`.

        Parameters
        ----------
        query : torch.Tensor
            ``[B, query heads, 1, D]``, which `PackedAttention.serves`.
        scaling, softcap, sinks, first_valid
            As there.
        """
        scaling = query.shape[3] ** -0.5 if scaling is None else scaling
        kernels, short_by = _gpu_kernels(query.device), self._steps.short_by
        key = query.shape, scaling, softcap, sinks is None, first_valid is None
        prepared = self._prepared.get(key)
        if kernels is None or prepared is None:
            options: dict[str, Any] = {
                "length": self._length,
                "scaling": scaling,
                "softcap": softcap,
                "sinks": sinks,
                "first_valid": first_valid,
                "own": self._reads.own(),
            }
            spans, raw = self._reads.spans, self._reads.raw(self._ends)
            if kernels is None:
                from ..engine.kernels.cpu.attend import attend

                return attend(query, spans, raw, short_by=short_by, **options)
            prepared = kernels.prepare_attention(query, spans, raw, **options)
            # Its counts of blocks, if made in a capture, are zeros in the replays of that alone.
            if not torch.cuda.is_current_stream_capturing():
                self._prepared[key] = prepared
        runs, kept = self._reads.runs(self._ends)
        return prepared(query, runs, self._length, sinks, first_valid, self._own, short_by)

    def load_kernels(self, query_heads: int) -> None:
        """Load the kernels of a GPU for so many query heads, as a capture must not; before steps.

        Waits for nothing, and changes no tokens.
        """
        batch, heads, _, dim = self.memory[0].shape
        groups, rest = divmod(query_heads, heads)
        if _gpu_kernels(self._device) is None or rest or groups > MAX_ROWS or not batch:
            return
        self._steps.set(self._steps.room + 1)
        keys, values = (memory[:, :, :1] for memory in self.memory)
        self.append(keys, values)
        self._steps.set(0)
        self.attend(keys.new_zeros((batch, query_heads, 1, dim)))

    @property
    def read_by_graphs(self) -> list[torch.Tensor]:
        """What launches read and write that no history has."""
        found = [prepared.arrived for prepared in self._prepared.values()]
        return found if self._own is None else [*found, *self._own.tensors]

    def set(self, tokens: int) -> None:
        """Set how many tokens the device has put there, in all."""
        for tail, before in zip(self._tails, self._before, strict=True):
            tail.count(before + tokens - tail.length)


def _gpu_kernels(device: torch.device) -> CudaKernels | None:
    """Return the kernels of a GPU; None for the CPU."""
    return None if device.type == "cpu" else kernels_on(device)
