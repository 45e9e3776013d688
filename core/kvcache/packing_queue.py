"""Histories whose prompts are being packed, while the layers behind them are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from weakref import ref

import torch

from ..errors import BitslabError, add_note

#: Raw bytes of the histories whose samples, or whose packed sizes, have not come to the host. With
#: more of them, the host waits for the oldest, behind whose work that of later layers is queued, so
#: that the GPU never waits.
MOST_BYTES = 128 << 20
#: Histories that may be in either state whatever their size: the K and V of a layer.
LEAST_HISTORIES = 2
#: Appends that come before a codec is fitted to a sample, which takes the host milliseconds: the
#: GPU computes meanwhile what these have queued.
LEAD = 6


class Packs(Protocol):
    """A history, as far as the queue knows it; `name` is for messages."""

    name: str

    @property
    def samples(self) -> bool:
        """Whether a sample of its tokens is on its way to the host."""
        ...

    @property
    def packs(self) -> bool:
        """Whether the sizes of packed blocks are on their way to the host."""
        ...

    @property
    def tail(self) -> torch.Tensor:
        """The tokens behind its packed ones."""
        ...

    def pack_on(self, *, wait: bool) -> None:
        """Go on with packing; `wait` for what is on its way to the host, and for that alone."""
        ...


@dataclass
class Queued:
    """A history in the queue, and how many appends there were when its sample began; or None."""

    history: ref[Packs]
    since: int | None


class PackingQueue:
    """Histories of one device that are being packed without waiting for it, oldest first.

    A history is in the queue from the append that brought a prompt until its blocks are packed.
    Each append of any of them goes on with all.

    Attributes
    ----------
    histories : list of Queued
        The histories.
    """

    def __init__(self) -> None:
        self.histories: list[Queued] = []
        self._appends = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the unpacked tokens of all histories in the queue."""
        return sum(history.tail.nbytes for history in self._there())

    def __len__(self) -> int:
        return len(self.histories)

    def add(self, history: Packs) -> None:
        """Go on with a history whenever others append, until nothing of it is on its way."""
        if all(history is not other for other in self._there()):
            since = self._appends if history.samples else None
            self.histories.append(Queued(ref(history), since))

    def advance(self) -> None:
        """Go on with all histories as far as that needs no waiting, and wait where there are many.

        For each append. A history whose sample began with the last LEAD of them is left alone,
        unless unpacked tokens of such take more than MOST_BYTES.

        Raises
        ------
        BitslabError
            That of a history, whose name it gives. Its tokens are there, unpacked, and the next
            call tries again; so after any other error.
        """
        if not self.histories:
            return
        self._appends += 1
        early, early_bytes = [], 0
        for queued in list(self.histories):
            history = queued.history()
            if history is None:
                continue
            if not history.samples:
                queued.since = None
            elif queued.since is None:  # a second one: the codec that was kept did not suit
                queued.since = self._appends
            if queued.since is not None and self._appends - queued.since <= LEAD:
                early.append(history)
                early_bytes += history.tail.nbytes
            else:
                _pack_on(history, wait=False)
        for history in early if early_bytes > MOST_BYTES else ():
            _pack_on(history, wait=False)
        there = self._drop_packed()
        for state in ("samples", "packs"):
            waiting = [history for history in there if getattr(history, state)]
            nbytes = sum(history.tail.nbytes for history in waiting)
            while len(waiting) > LEAST_HISTORIES and nbytes > MOST_BYTES:
                oldest = waiting.pop(0)
                nbytes -= oldest.tail.nbytes
                _pack_on(oldest, wait=True)
        self._drop_packed()

    def finish(self) -> None:
        """Pack all blocks of all histories, and wait for that.

        Raises
        ------
        BitslabError
            As `advance`.
        """
        while self.histories:
            for history in self._there():
                _pack_on(history, wait=True)
            self._drop_packed()

    def _there(self) -> list[Packs]:
        """Return the histories that have not been collected."""
        found = (each.history() for each in self.histories)
        return [history for history in found if history is not None]

    def _drop_packed(self) -> list[Packs]:
        """Forget histories of which nothing is on its way; return the others."""
        self.histories = [
            queued
            for queued in self.histories
            if (history := queued.history()) is not None and (history.samples or history.packs)
        ]
        return self._there()


def _pack_on(history: Packs, *, wait: bool) -> None:
    try:
        history.pack_on(wait=wait)
    except BitslabError as error:
        raise type(error)(f"{history.name}: {error}") from error
    except Exception as error:
        add_note(error, f"bitslab: while packing {history.name}")
        raise
