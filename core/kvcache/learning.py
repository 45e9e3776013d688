"""Layers whose codecs are learnt from a prompt, while the layers behind them are computed."""

from __future__ import annotations

from typing import Protocol
from weakref import ref

import torch

from ..engine.transfer.lanes import StreamLane, pooled_lane, record_on

#: Raw bytes of layers that may wait, at the most, and the share of the free memory of the device;
#: with more of them the host learns the oldest, behind whose work that of later layers is queued.
MOST_BYTES = 4 << 30
FREE_SHARE = 8
#: Layers that may wait whatever their size.
LEAST_LAYERS = 2


class Learns(Protocol):
    """A layer, as far as the queue knows it."""

    @property
    def waits(self) -> bool:
        """Whether its codecs are to be learnt."""
        ...

    @property
    def learns_from(self) -> list[torch.Tensor]:
        """All tensors that it learns from; others as soon as its tokens change."""
        ...

    def learn(self) -> None:
        """Learn the codecs on the current stream, which the host waits for."""
        ...

    def settle(self) -> None:
        """Pack what has left the windows, after learning where that is still to be done."""
        ...


class LearningQueue:
    """Layers of one device whose codecs are to be learnt, oldest first.

    The host has queued the forward pass of later layers by then, so that the GPU computes while the
    host learns. It learns on a stream of its own, which waits for the K and V of the layer alone;
    what is learnt is the same whenever that is done. A layer that is never taken up here learns in
    its next update.

    Parameters
    ----------
    device : torch.device
        Where K and V are used.

    Attributes
    ----------
    puts_off : bool
        Whether layers wait at all: on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.puts_off = device.type == "cuda"
        self._lane: StreamLane | None = None
        self._entries: list[_Entry] = []

    @property
    def nbytes(self) -> int:
        """Raw bytes that layers are to learn from."""
        return sum(entry.nbytes for entry in self._entries)

    def add(self, layer: Learns) -> None:
        """Learn a layer's codecs later; those of the oldest now where many wait.

        Its tensors are read behind what is queued on the current stream now.

        Raises
        ------
        Exception
            What learning and packing the oldest raise; it learns in its next update.
        """
        self._entries = [entry for entry in self._entries if entry.there]
        self._entries.append(_Entry(layer, self._mark()))
        nbytes = self.nbytes
        most = self._most_bytes() if len(self._entries) > LEAST_LAYERS else nbytes
        while len(self._entries) > LEAST_LAYERS and nbytes > most:
            oldest = self._entries.pop(0)
            nbytes -= oldest.nbytes
            found = self._learn(oldest)
            if found is not None:
                found.settle()

    def advance(self) -> None:
        """Learn while the device is busy with what is queued on the current stream now, and pack.

        Layers that are left learn in their next update, as does one that raises an error.
        """
        if not self._entries:
            return
        entries, self._entries = self._entries, []
        busy = self._mark()
        learnt: list[Learns] = []
        try:
            for entry in entries:
                if busy is not None and busy.query():  # type: ignore[no-untyped-call]
                    break
                found = self._learn(entry)
                if found is not None:
                    learnt.append(found)
            # Behind all that is queued: a wait for packed sizes is one for the whole pass.
            for layer in learnt:
                layer.settle()
        except Exception:  # raised again by the update of that layer, which can be undone
            return

    def finish(self) -> None:
        """Learn and pack all layers that are left, before their tokens change."""
        entries, self._entries = self._entries, []
        for entry in entries:
            layer = entry.layer
            if layer is not None and entry.there:
                layer.settle()

    def _learn(self, entry: _Entry) -> Learns | None:
        """Learn a layer's codecs; return it, or None if that is not to be done any more."""
        layer = entry.layer
        if layer is None or not entry.there:
            return None
        if entry.ready is None:
            layer.learn()
            return layer
        if self._lane is None:
            # Its small kernels pass by the large ones of the model.
            self._lane = pooled_lane(self, self._device, "K/V codecs", priority=-1)
        self._lane.wait(entry.ready)
        with self._lane.on():
            layer.learn()
        self._lane.keep(*layer.learns_from)
        return layer

    def _mark(self) -> torch.cuda.Event | None:
        """Return an event behind what is queued on the current stream."""
        if self._device.type != "cuda":
            return None
        return record_on(torch.cuda.current_stream(self._device))

    def _most_bytes(self) -> int:
        if self._device.type != "cuda":
            return MOST_BYTES
        free = torch.cuda.mem_get_info(self._device)[0]
        free += torch.cuda.memory_reserved(self._device)
        free -= torch.cuda.memory_allocated(self._device)
        return min(MOST_BYTES, free // FREE_SHARE)


class _Entry:
    """A layer that is to learn from the tensors that it has now, once an event has passed."""

    def __init__(self, layer: Learns, ready: torch.cuda.Event | None) -> None:
        self._layer = ref(layer)
        self._tensors = [ref(t) for t in layer.learns_from]
        self.nbytes = sum(t.nbytes for t in layer.learns_from)
        self.ready = ready

    @property
    def layer(self) -> Learns | None:
        """The layer, unless it was collected."""
        return self._layer()

    @property
    def there(self) -> bool:
        """Whether the layer still is to learn from just these tensors."""
        layer = self.layer
        if layer is None or not layer.waits:
            return False
        now = layer.learns_from
        return len(now) == len(self._tensors) and all(
            before() is t for before, t in zip(self._tensors, now, strict=True)
        )
