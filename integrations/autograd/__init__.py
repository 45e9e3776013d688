"""Saved tensors: classes in the place of those that move them to the CPU, with their arguments.

- `save_on_cpu`: for ``torch.autograd.graph.save_on_cpu``.
- `OffloadActivations`: for the class of torchtune, and of TRL where arguments are named.

Both are `bitslab.ActivationOffload`: tensors cross beside the computation, packed where that is
faster, and gradients are the same to the last bit. `bitslab.offload_activations` attaches one to a
model, whose loop needs no context manager.
"""

from __future__ import annotations

from bitslab.integrations.autograd.contexts import OffloadActivations, save_on_cpu

__all__ = ["OffloadActivations", "save_on_cpu"]
