"""accelerate: models that it has dispatched, with their offloaded weights packed.

- `compress_offloaded`: one line after ``device_map=``, `cpu_offload`, `disk_offload` or
  `dispatch_model`; what was offloaded streams packed from then on.
- `offload_compressed`: the same from a plain model.
- `report`, `restore`: what it costs, and the way back.
- `offload_activations`: after ``prepare``, plans and moves what training keeps for its backward
  pass.
- `generate_blocks`: several batches generate together, so that one transfer of a layer serves all.

Importing this package imports accelerate.
"""

from __future__ import annotations

from bitslab.errors import load_optional

load_optional("accelerate", extra="transformers", purpose="bitslab.integrations.accelerate")

from bitslab.integrations.accelerate.activations import offload_activations  # noqa: E402
from bitslab.integrations.accelerate.compress import (  # noqa: E402
    compress_offloaded,
    offload_compressed,
    report,
    restore,
)
from bitslab.integrations.accelerate.generate import generate_blocks  # noqa: E402

__all__ = [
    "compress_offloaded",
    "generate_blocks",
    "offload_activations",
    "offload_compressed",
    "report",
    "restore",
]
