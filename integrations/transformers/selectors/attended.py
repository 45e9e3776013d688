"""What a tensor of keys says to the attention function that receives it: who chose its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bitslab.kvcache import Selection, TokenScores

_ATTRIBUTE = "bitslab_attended"


class Observer(Protocol):
    """What attention asks of a selector; `KVSelector` documents both."""

    def observe(
        self,
        attended: Attended,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        weights: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> None:
        """See the attention of a layer."""
        ...

    def before_attention(
        self,
        cache: Any,
        modules: Mapping[int, Any],
        module: Any,
        hidden: torch.Tensor,
        options: Mapping[str, Any],
    ) -> None:
        """See the input of an attention module, before it runs."""
        ...


@dataclass(frozen=True, eq=False)
class Attended:
    """What a tensor of keys says to the attention function that receives it.

    Parameters
    ----------
    selector : KVSelector
        That chose.
    scores : TokenScores
        Of the layer.
    selection : Selection or None
        What was chosen; None when all tokens are there.
    """

    selector: Observer
    scores: TokenScores
    selection: Selection | None

    def attach_to(self, keys: torch.Tensor) -> None:
        """Let a tensor of keys say this."""
        setattr(keys, _ATTRIBUTE, self)


def attended_of(keys: torch.Tensor) -> Attended | None:
    """Return what a tensor of keys says, if anything."""
    found: Attended | None = getattr(keys, _ATTRIBUTE, None)
    return found
