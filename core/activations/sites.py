"""Sites: where in a model a tensor is saved, the same in every step."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

#: The frame of a module's call, which has the module as `self`.
_CALL = nn.Module._call_impl.__code__


@dataclass(frozen=True)
class Site:
    """Where a tensor is saved for the backward pass.

    Parameters
    ----------
    name : str
        The path of the module that saves it (the class of a module that is in no model), a colon,
        and which of the tensors it is that the module saves in a pass.
    module_type : type or None
        Class of that module; None outside of all modules.
    operation : str
        The node of autograd that made it; "" for one that needs no gradient.
    shape : torch.Size
        Its shape.
    dtype : torch.dtype
        Its dtype.
    nbytes : int
        Bytes of its storage that are copied.
    device : torch.device
        Where it is.
    is_exact : bool
        Whether no lossy codec may have it: integers, masks (which need no gradient, whatever their
        dtype), statistics of norms, scalars and vectors.
    """

    name: str
    module_type: type[nn.Module] | None
    operation: str
    shape: torch.Size
    dtype: torch.dtype
    nbytes: int
    device: torch.device
    is_exact: bool = True


#: Which tensors are moved.
Select = Callable[[Site], bool]


def is_exact(t: torch.Tensor) -> bool:
    """Return whether no lossy codec may have a saved tensor; see `Site`."""
    node = t.grad_fn
    if node is None or not t.is_floating_point() or t.dim() < 2 or t.shape[-1] == 1:
        return True
    # Mean and deviation are outputs behind the first; those of a row have a last dimension of 1.
    return t.output_nr > 0 and "Norm" in node.name()


def conv_inputs(site: Site) -> bool:
    """Select the inputs of convolutions, as vDNN does: what a ``nn.Conv*`` module saves."""
    return site.module_type is not None and issubclass(site.module_type, _ConvNd)


def module_names(model: nn.Module) -> Mapping[nn.Module, str]:
    """Return the paths of a model's modules, which are held weakly."""
    return weakref.WeakKeyDictionary((module, name) for name, module in model.named_modules())


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is a wrapper of ``torch.compile``, or was compiled in place."""
    # By name: the class is in a part of torch that takes a second to import.
    return type(module).__name__ == "OptimizedModule" or (
        getattr(module, "_compiled_call_impl", None) is not None
    )


def running_module(frames: int = 1) -> nn.Module | None:
    """Return the innermost module whose call is running in this thread; None outside of all.

    Parameters
    ----------
    frames : int
        Number of the callers that are not looked at.
    """
    try:
        frame: FrameType | None = sys._getframe(frames)
    except ValueError:  # a thread of autograd, which calls the hook itself
        return None
    while frame is not None:
        if frame.f_code is _CALL:
            module = frame.f_locals.get("self")
            return module if isinstance(module, nn.Module) else None
        frame = frame.f_back
    return None


def operation_of(t: torch.Tensor) -> str:
    """Return the name of the node of autograd that made a tensor."""
    return "" if t.grad_fn is None else t.grad_fn.name()


def inside_module(site: str, module: str) -> bool:
    """Return whether a site is one of a module, or of a module in it."""
    path = site.rsplit(":", 1)[0]
    return path == module or path.startswith(f"{module}.")


def are_inside(sites: Iterable[str], module: str) -> bool:
    """Return whether all sites that save a tensor are a module's: else it lives on without it."""
    return all(inside_module(site, module) for site in sites)


def module_of_sites(sites: Collection[str], modules: Iterable[str]) -> str:
    """Return the first module that all sites are inside of; "" where there is none."""
    return next((name for name in modules if are_inside(sites, name)), "")
