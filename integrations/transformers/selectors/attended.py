"""Attended: the selection that a tensor of keys carries to the attention function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bitslab.kvcache import Selection, TokenScores

_ATTRIBUTE = "bitslab_attended"


class Observer(Protocol):
    """The methods of a selector that attention calls; see `KVSelector`."""

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
        """Update scores by the attention of a layer."""
        ...

    def before_attention(
        self,
        cache: Any,
        modules: Mapping[int, Any],
        module: Any,
        hidden: torch.Tensor,
        options: Mapping[str, Any],
    ) -> None:
        """Receive the input of an attention module, before it runs."""
        ...


@dataclass(frozen=True, eq=False)
class Attended:
    """The selection that a tensor of keys carries to the attention function.

    Parameters
    ----------
    selector : KVSelector
        The selector.
    scores : TokenScores
        Scores of the layer.
    selection : Selection or None
        The chosen tokens; None for all.
    """

    selector: Observer
    scores: TokenScores
    selection: Selection | None

    def attach_to(self, keys: torch.Tensor) -> None:
        """Attach this to a tensor of keys."""
        setattr(keys, _ATTRIBUTE, self)


def attended_of(keys: torch.Tensor) -> Attended | None:
    """Return what is attached to a tensor of keys, or None."""
    found: Attended | None = getattr(keys, _ATTRIBUTE, None)
    return found
