"""Programs whose gradients are compared with those of plain training, bit for bit.

Each takes a `Training` and returns all that it computed: gradients, losses, outputs. It must do the
same each time, whatever moves its saved tensors.
"""

from tests.activations.cases import (
    hooks_and_faults,
    language_models,
    modules_and_passes,
    saved_tensors,
)
from tests.activations.cases.training import CASES, Offloaded, Training

__all__ = [
    "CASES",
    "Offloaded",
    "Training",
    "hooks_and_faults",
    "language_models",
    "modules_and_passes",
    "saved_tensors",
]
