"""What a torch module itself holds: the dicts that torch keeps, which iteration and `setattr` hide.

Torch's own iterators leave out None and what is registered twice, and `setattr` runs hooks of the
module. Whoever replaces parameters, buffers or children for others needs the dicts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own parameters by attribute; changing the dict changes the module."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the module's own buffers by attribute; changing the dict changes the module."""
    return module._buffers


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the module's own children by attribute; changing the dict changes the module."""
    return module._modules


def replace_modules(model: nn.Module, replacements: Mapping[int, nn.Module]) -> nn.Module:
    """Replace modules of a model wherever they stand, and return the model or what replaces it.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place.
    replacements : mapping of int to torch.nn.Module
        By the `id` of the module to replace.
    """
    for module in list(model.modules()):
        children = own_children(module)
        for name, child in children.items():
            if id(child) in replacements:
                children[name] = replacements[id(child)]
    return replacements.get(id(model), model)
