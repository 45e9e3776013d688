"""UnpackedTokens: the tokens of a history that are not packed, the first ones and the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dtypes import dense
from .link import Link
from .own_first import OwnFirst
from .selection import Take
from .tail import Tail, check_like


class UnpackedTokens:
    """The tokens of a history before its packed ones, and behind them.

    Parameters
    ----------
    link : Link
        Of their device.
    kind : str
        ``"k"`` or ``"v"``, for messages.
    sinks : int
        How many first tokens are kept in front.
    room_tokens : int
        Tokens of a sequence for which the tail takes memory ahead, at the most.

    Attributes
    ----------
    head : torch.Tensor
        ``[B, H, up to sinks, D]`` on the device: the first tokens.
    tail : Tail
        Those behind the packed ones; another object with each change but of tokens put behind it.
    own_first : OwnFirst or None
        The first tokens of sequences that begin behind padding, of which some are packed, too.
    room_tokens : int
        As given.
    """

    head: torch.Tensor
    tail: Tail
    own_first: OwnFirst | None = None

    def __init__(self, link: Link, kind: str, *, sinks: int, room_tokens: int) -> None:
        self._link = link
        self._kind = kind
        self._sinks = sinks
        self.room_tokens = room_tokens
        self._borrowed: torch.Tensor | None = None  # the caller's memory, as a tail, until `own`
        self.clear()

    def clear(self) -> None:
        """Forget all tokens, and what they were like."""
        none = torch.empty((0, 0, 0, 0), device=self._link.device)
        self.replace(none, none)
        self.own_first = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens."""
        return self.head.nbytes + self.tail.tokens.nbytes

    @property
    def device_bytes(self) -> int:
        """Bytes of the memory that they lie in, with the room ahead."""
        own = () if self.own_first is None else self.own_first.tensors
        kept = self.head, self.tail.memory, *own
        return sum(t.untyped_storage().nbytes() for t in kept)

    def check(self, tokens: torch.Tensor, packed: int) -> None:
        """Raise for tokens that do not continue those of a history; see `PackedHistory.check`.

        Parameters
        ----------
        tokens : torch.Tensor
            ``[B, H, any, D]``.
        packed : int
            The packed tokens of a sequence.
        """
        there, shape = self.tail.memory, tokens.shape
        like = there.shape
        if (  # as for each token
            self.tail.length
            and len(shape) == 4
            and shape[0] == like[0]
            and shape[1] == like[1]
            and shape[3] == like[3]
            and tokens.dtype == there.dtype
            and tokens.device == self._link.device
        ):
            return
        length = self.head.shape[2] + packed + self.tail.length
        check_like(tokens, there, self._kind, device=self._link.device, length=length)

    def put(self, tokens: torch.Tensor) -> bool:
        """Put tokens ``[B, H, n, D]`` that were checked behind the last ones, without a gradient.

        Returns
        -------
        bool
            Whether the tail now lies in the memory of `tokens`, which `own` is to end.
        """
        new = tokens.detach() if tokens.requires_grad else tokens
        missing = self._sinks - self.head.shape[2]
        if missing > 0:  # then none are packed, and there is no tail
            first = new[:, :, :missing]
            head = torch.cat([self.head, first], dim=-2) if self.head.shape[2] else first
            self.head = head.clone(memory_format=torch.contiguous_format)
            new = new[:, :, missing:]
        if self.tail.length:
            self.tail.append(new, self.room_tokens)
            return False
        self.tail, self._borrowed = Tail(new), new
        return True

    def own(self) -> None:
        """Copy the tail where it still lies in the caller's memory."""
        borrowed, self._borrowed = self._borrowed, None
        memory = self.tail.memory
        if borrowed is not None and _one_storage(memory, borrowed):  # all of it, or what is left
            self.tail = Tail(memory.clone(memory_format=torch.contiguous_format))

    def replace(self, head: torch.Tensor, tail: torch.Tensor) -> None:
        """Keep these tokens ``[B, H, any, D]`` in front and behind the packed ones instead."""
        self.head, self.tail = head, Tail(tail)

    def taken(self, take: Take) -> tuple[torch.Tensor, torch.Tensor, OwnFirst | None]:
        """Return head and tail of other sequences, and their own first tokens."""
        head = take(self.head, 0) if self.head.shape[2] else self.head
        own = None if self.own_first is None else self.own_first.taken(take)
        return head, take(self.tail.tokens, 0), own

    def begin_at(self, positions: torch.Tensor | None, last: int, packed: int) -> None:
        """Keep the first tokens of sequences that begin at other positions, when they are packed.

        Parameters
        ----------
        positions : torch.Tensor, optional
            int32 ``[B]`` on the device: where each sequence begins, as far as that is known.
        last : int
            The largest of them.
        packed : int
            Tokens of a sequence that are packed.
        """
        if not packed:
            self.own_first = None
        if positions is None:
            return
        if not packed and last and self._sinks:
            self.own_first = OwnFirst(positions, last, self._sinks)
        elif self.own_first is not None:
            self.own_first.begin_later(positions, last, self.head.shape[2] + packed)

    def look_for_own(self, tokens: torch.Tensor, packed: int) -> None:
        """Keep the sequences' own first tokens among those that are to be packed next.

        Parameters
        ----------
        tokens : torch.Tensor
            ``[B, H, n, D]``, as they came.
        packed : int
            Tokens of a sequence that are packed before.
        """
        if self.own_first is None:
            return
        if not packed:
            self.own_first.take_over(self.head, 0)
        self.own_first.take_over(tokens, self.head.shape[2] + packed)

    def around(self, packed: Sequence[torch.Tensor], *new: torch.Tensor) -> torch.Tensor:
        """Return the first tokens, decoded packed ones, the last ones and new ones, contiguous."""
        first = [self.head] if self.head.shape[2] else []
        last = [self.tail.tokens] if self.tail.length or not (first or packed or new) else []
        found = torch.cat([*first, *packed, *last, *new], dim=-2)
        if self.own_first is not None and packed:
            tokens = sum(each.shape[2] for each in packed)
            self.own_first.put_into(found, self.head.shape[2] + tokens)
        return found

    def keep_for(self, stream: int) -> None:
        """Keep them from reuse until torch's current stream, `stream`, has read them."""
        tail = self.tail
        if tail.stream != stream:  # the head is replaced with it alone
            own = () if self.own_first is None else self.own_first.tensors
            self._link.keep_for_turn(tail.memory, self.head, *own)
            tail.stream = stream

    def __getstate__(self) -> dict[str, Any]:
        # As bytes: torch 2.13 cannot unpickle tensors of 8-bit floats.
        tail = self.tail.tokens
        head, last = (dense(t).view(torch.uint8) for t in (self.head, tail))
        return {**self.__dict__, "head": head, "tail": (last, tail.dtype), "_borrowed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tail, dtype = state["tail"]
        self.__dict__.update(state)
        self.replace(state["head"].view(dtype), tail.view(dtype))


def _one_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
