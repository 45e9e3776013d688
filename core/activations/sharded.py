"""Saved tensors of tensor parallelism: a DTensor is moved by its local tensor, and rebuilt.

A DTensor counts changes in place itself; its local tensor does not. One that was changed before it
was saved is left as it is, since what is saved of a local tensor is found again by its own count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ..engine.versions import version_of
from .guards import is_form_of_leaf, modified

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


def local_tensor(t: torch.Tensor) -> torch.Tensor:
    """Return what a rank holds of a DTensor, waiting for what arrives; other tensors as they are.

    Returns
    -------
    torch.Tensor
        The shard or replica of this rank, on its device, without a graph.
    """
    found = _dtensor()
    if found is None or not isinstance(t, found):
        return t
    with torch.no_grad():
        local: torch.Tensor = t.to_local()
    # Of a collective that is under way: its result, which a GPU's stream waits for.
    wait: Callable[[], torch.Tensor] | None = getattr(local, "wait", None)
    return local if wait is None else wait()


class SavedShard:
    """A saved DTensor: what stands for its local tensor, and how it was laid out.

    Parameters
    ----------
    t : torch.Tensor
        The DTensor.
    packed : object
        What stands for its local tensor.
    """

    __slots__ = ("_layout", "_version", "_witness", "packed")

    def __init__(self, t: Any, packed: Any) -> None:
        self.packed = packed
        self._layout = t.device_mesh, t.placements, t.shape, t.stride(), t.dtype
        self._version = version_of(t)
        #: Has the DTensor's version counter, and none of its bytes.
        self._witness = t.detach()
        self._witness._local_tensor = torch.empty(0, dtype=t.dtype)

    def check_version(self) -> None:
        """Raise torch's error when the DTensor was changed in place since it was saved.

        Raises
        ------
        ModifiedInPlaceError
            When it was.
        """
        at = version_of(self._witness)
        if at != self._version:
            shape, dtype = self._layout[2], self._layout[4]
            raise modified(shape, dtype, at, self._version, ", a DTensor,")

    def rebuilt(self, local: torch.Tensor) -> torch.Tensor:
        """Return the DTensor of a local tensor."""
        mesh, placements, shape, stride, _ = self._layout
        with torch.no_grad():
            found: torch.Tensor = _dtensor().from_local(
                local, mesh, placements, run_check=False, shape=shape, stride=stride
            )
        return found


def sharded_hooks(pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
    """Return hooks that take DTensors, too; the given ones while there can be none."""
    dtensor = _dtensor()
    if dtensor is None:
        return pack, unpack

    def pack_local(t: torch.Tensor) -> Any:
        if type(t) is not dtensor or version_of(t) or is_form_of_leaf(t):
            return pack(t)
        return SavedShard(t, pack(local_tensor(t)))

    def unpack_local(packed: Any) -> torch.Tensor:
        if type(packed) is not SavedShard:
            return unpack(packed)
        packed.check_version()
        return packed.rebuilt(unpack(packed.packed))

    return pack_local, unpack_local


def _dtensor() -> Any:
    """Return torch's class, where its module was imported, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)
