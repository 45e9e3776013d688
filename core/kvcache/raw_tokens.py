"""RawTokens: what a history holds unpacked at one time, to be put back after an error."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .history import PackedHistory


class RawTokens(NamedTuple):
    """The unpacked tokens of a history, by reference: packing never writes to their memory.

    Attributes
    ----------
    head : torch.Tensor
        The first tokens.
    memory : torch.Tensor
        ``[B, H, t or more, D]``, which begins with the last tokens.
    tokens : int
        t, how many of a sequence these are.
    begin : int
        The packed tokens before them.
    """

    head: torch.Tensor
    memory: torch.Tensor
    tokens: int
    begin: int


def put_back(history: PackedHistory, raw: RawTokens, length: int) -> None:
    """Keep the first tokens of a history, and have those unpacked that were.

    What a lossy codec has packed of them meanwhile is dropped for the tokens as they came.

    Parameters
    ----------
    history : PackedHistory
        To which tokens were only appended since.
    raw : RawTokens
        What it held.
    length : int
        Tokens of a sequence then.
    """
    packed = history.packed
    if packed.length < raw.begin or (
        packed.length > raw.begin and packed.croppable(raw.begin) != raw.begin
    ):
        # The tokens kept begin amid what is not packed, or amid a block without loss.
        history.crop(min(length, history.length))
        return
    history.take_turn()
    if packed.length > raw.begin:
        packed.prepare_crop(raw.begin)()
    else:
        packed.forget_in_flight(raw.tokens)
    history.unpacked.replace(raw.head, raw.memory.narrow(2, 0, raw.tokens))
    if not history.packed.length:
        history.unpacked.own_first = None
