"""How collections appear in graphs of torch.fx."""

from __future__ import annotations

from typing import Any

import torch

#: Where a graph has a collection that was traced by itself: an attribute of that.
OWN_PATH = "collection"


def as_leaf(module: torch.nn.Module, features: torch.fx.Proxy) -> Any:
    """Return what stands for the output of a collection while a model is traced.

    The graph calls the collection and does not look into it, whichever tracer makes it.

    Parameters
    ----------
    module : torch.nn.Module
        The collection. One that is traced by itself has an attribute `OWN_PATH`, itself.
    features : torch.fx.Proxy
        What stands for its argument.
    """
    tracer: Any = features.tracer
    path = tracer.path_of_module(module) or OWN_PATH
    return tracer.create_proxy("call_module", path, (features,), {})
