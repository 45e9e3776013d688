"""Codecs that the caches of one model leave to the next: a second prompt is packed at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from ..engine.codecs import RowCodec

#: Models whose codecs are kept; those of a model take some hundred bytes a layer where chunks have
#: one mask, some kilobytes where each position has its own.
MODELS = 8
#: Share of the raw bytes that packed rows may take if their codec is kept.
MOST_SHARE = 0.95


@dataclass(frozen=True)
class KeptCodec:
    """A codec, and the share of the raw bytes that rows took which it packed."""

    codec: RowCodec
    share: float


class FirstCodec(Protocol):
    """What may know the first codec of a history without a sample; `name` is for messages."""

    @property
    def name(self) -> str:
        """The layer and kind."""
        ...

    @property
    def tells(self) -> bool:
        """Whether the first rows tell if a codec suits them, and which is left to others."""
        ...

    def get(self, dtype: torch.dtype, row_bytes: int) -> KeptCodec | None:
        """Return the codec of such rows and the share that they are expected to take, if any."""
        ...

    def put(self, dtype: torch.dtype, row_bytes: int, codec: RowCodec, share: float) -> None:
        """Leave a codec and the share that rows take with it; where it `tells`."""
        ...

    def drop(self, dtype: torch.dtype, row_bytes: int) -> None:
        """Leave none; where it `tells`."""
        ...


class ModelCodecs:
    """The codecs of the layers of one model, left by the cache that packed last.

    Parameters
    ----------
    model : hashable
        What tells models apart, as given to `codecs_of_model`.

    Notes
    -----
    Threads may share it. A copy or pickle is what the process that it comes to has for the model.
    """

    def __init__(self, model: Hashable) -> None:
        self._model = model
        self._kept: dict[Hashable, KeptCodec] = {}

    def of(self, layer: int, kind: str) -> LayerCodecs:
        """Return the codecs of the K (``"k"``) or V (``"v"``) of a layer."""
        return LayerCodecs(self, layer, kind)

    def get(self, key: Hashable) -> KeptCodec | None:
        """Return what was left under a key, if anything."""
        return self._kept.get(key)

    def put(self, key: Hashable, kept: KeptCodec) -> None:
        """Leave a codec to the next cache."""
        self._kept[key] = kept

    def drop(self, key: Hashable) -> None:
        """Leave none."""
        self._kept.pop(key, None)

    def __reduce__(self) -> tuple[Callable[..., ModelCodecs], tuple[Any, ...]]:
        return codecs_of_model, (self._model,)


@dataclass(frozen=True)
class LayerCodecs:
    """What one history takes from `ModelCodecs` and leaves there: by dtype and size of its rows."""

    codecs: ModelCodecs
    layer: int
    kind: str
    tells: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The layer, for messages."""
        return f"layer {self.layer}, {self.kind}"

    def get(self, dtype: torch.dtype, row_bytes: int) -> KeptCodec | None:
        """Return the codec that a history before left for such rows, if any."""
        return self.codecs.get((self.layer, self.kind, dtype, row_bytes))

    def put(self, dtype: torch.dtype, row_bytes: int, codec: RowCodec, share: float) -> None:
        """Leave a codec and the share that rows take with it; none where that saves little."""
        if share <= MOST_SHARE:
            key = (self.layer, self.kind, dtype, row_bytes)
            self.codecs.put(key, KeptCodec(codec, share))
        else:
            self.drop(dtype, row_bytes)

    def drop(self, dtype: torch.dtype, row_bytes: int) -> None:
        """Leave none."""
        self.codecs.drop((self.layer, self.kind, dtype, row_bytes))


_lock = threading.Lock()
_models: OrderedDict[Hashable, ModelCodecs] = OrderedDict()


def codecs_of_model(model: Hashable) -> ModelCodecs:
    """Return the codecs of a model in this process, which the last MODELS of them have."""
    with _lock:
        found = _models.pop(model, None) or ModelCodecs(model)
        _models[model] = found  # the last used one last
        while len(_models) > MODELS:
            _models.popitem(last=False)
        return found
