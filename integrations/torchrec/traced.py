"""How collections appear in graphs of torch.fx."""

from __future__ import annotations

from typing import Any

import torch

#: Path in the graph of a collection that is traced as the root: an attribute of it.
OWN_PATH = "collection"


def as_leaf(module: torch.nn.Module, features: torch.fx.Proxy) -> Any:
    """Return the proxy of a collection's output while a model is traced.

    The graph calls the collection and does not look into it, whichever tracer makes it.

    Parameters
    ----------
    module : torch.nn.Module
        The collection. One that is traced by itself has an attribute `OWN_PATH`, itself.
    features : torch.fx.Proxy
        Proxy of its argument.
    """
    tracer: Any = features.tracer
    path = tracer.path_of_module(module) or OWN_PATH
    return tracer.create_proxy("call_module", path, (features,), {})
