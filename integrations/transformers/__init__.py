"""Hugging Face transformers: models whose weights and K/V caches remain packed, losslessly.

- `BitslabConfig`: passed as ``quantization_config=`` to ``from_pretrained``, packs weights while
  they load; they stream to the device, or remain packed on it. `BitslabQuantizer` does the work.
- `CompressedCache`: passed as ``past_key_values=`` to ``generate`` or a forward pass; the history
  of full-attention layers lies packed in host memory or on the device.
- `KVCompCache`: its lossy sister, quantised within an error of attention; with it comes the
  attention function "bitslab", for ``model.set_attn_implementation``. `CapturedSteps` are what its
  `captured_steps` yields, for decode steps in CUDA graphs, and a `CapturedStep` is one of them.
- `OffloadCallback`: in ``Trainer(callbacks=[...])``, plans, moves and computes again what training
  keeps for its backward pass.
- `HeavyHitterSelector`, `InfiniGenSelector`: fetch a part of the history only. `KVSelector` is the
  base of one of your own.

Importing this package imports transformers when a name of it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from bitslab.errors import load_optional

if TYPE_CHECKING:
    from bitslab.integrations.transformers.activations import OffloadCallback
    from bitslab.integrations.transformers.cache import CompressedCache
    from bitslab.integrations.transformers.captured_steps import CapturedStep, CapturedSteps
    from bitslab.integrations.transformers.config import BitslabConfig
    from bitslab.integrations.transformers.kvcomp import KVCompCache
    from bitslab.integrations.transformers.quantizer import BitslabQuantizer
    from bitslab.integrations.transformers.selectors import (
        HeavyHitterSelector,
        InfiniGenSelector,
        KVSelector,
    )

#: What is exported, and the module it is in.
_MODULES = {
    # Both from the module that tells transformers of them.
    "BitslabConfig": "quantizer",
    "BitslabQuantizer": "quantizer",
    "CapturedStep": "captured_steps",
    "CapturedSteps": "captured_steps",
    "CompressedCache": "cache",
    "HeavyHitterSelector": "selectors",
    "InfiniGenSelector": "selectors",
    "KVCompCache": "kvcomp",
    "KVSelector": "selectors",
    "OffloadCallback": "activations",
}

__all__ = [
    "BitslabConfig",
    "BitslabQuantizer",
    "CapturedStep",
    "CapturedSteps",
    "CompressedCache",
    "HeavyHitterSelector",
    "InfiniGenSelector",
    "KVCompCache",
    "KVSelector",
    "OffloadCallback",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    load_optional("transformers", extra="transformers", purpose=__name__)
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
