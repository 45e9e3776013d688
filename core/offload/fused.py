"""Units that are kept packed and whose linear layers multiply while they decode, for few rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from ..engine.advisor import fused_times, measured_rows
from ..engine.kernels.packed_products import MAX_INPUT_ROWS
from ..errors import ArgumentError
from .guards import CallGuard
from .handles import WeightHandle
from .products import PackedProduct
from .stream import WeightStream
from .units import ParameterRef, Unit

#: Whether linear layers whose weights are kept packed multiply while they decode: never, wherever
#: they can, or where that was measured to be faster.
Fused = Literal["auto"] | bool


def check_fused(fused: object) -> None:
    """Refuse a `fused` that is none of the accepted."""
    if not isinstance(fused, bool) and fused != "auto":
        raise ArgumentError(f"fused: {fused!r:.60}, accepted are True, False and 'auto'")


class FusedUnit:
    """A unit that is kept packed, and when its weights are multiplied without being decoded first.

    Parameters
    ----------
    stream : WeightStream
        What has its weights.
    products : mapping of str to PackedProduct
        Products with each of its packed weights, by name; none of a unit whose tensors are all raw.
    measured : bool
        Whether it is fused only where that was measured to be faster.

    Attributes
    ----------
    active : bool
        Whether the unit's linear layers multiply packed weights now: the unit runs, and its hooks
        have left the handles of these weights in place.
    """

    def __init__(
        self, stream: WeightStream, products: Mapping[str, PackedProduct], measured: bool
    ) -> None:
        self._device = stream.device
        self._products = products
        self._measured = measured
        self._pays: dict[int, bool] = {}
        self.active = False

    @classmethod
    def of(cls, unit: Unit, stream: WeightStream, fused: Fused) -> FusedUnit | None:
        """Return a unit as a fused one; None where it has packed weights that are decoded first.

        These are weights of other layers than `torch.nn.Linear`, of a class with another forward
        pass, and those for which their codec has no product.
        """
        if not fused:
            return None
        products = stream.products(unit.name)
        if products is None or not all(
            _is_linear_weight(ref) for ref, name in _handles(unit) if name in products
        ):
            return None
        return cls(stream, products, fused == "auto")

    def guards(self, unit: Unit) -> list[CallGuard]:
        """Put the fused forward passes in place of those of the unit's linear layers."""
        return [
            CallGuard(ref.module, self._around(ref, name))
            for ref, name in _handles(unit)
            if name in self._products
        ]

    def takes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a pass with these arguments of the unit's module is to be fused.

        One of a unit that has no packed weights always is: what it has is used in the image, and
        no unit is decoded ahead because of it.
        """
        if not self._products:
            return True
        if not _computes_plainly(self._device):
            return False
        x_rows = _input_rows((*args, *kwargs.values()))
        return 0 < x_rows <= MAX_INPUT_ROWS and (not self._measured or self._is_faster(x_rows))

    def _is_faster(self, x_rows: int) -> bool:
        """Return whether the products take less time, all together, than after decoding."""
        rows = measured_rows(x_rows)
        found = self._pays.get(rows)
        if found is None:
            try:
                times = [
                    fused_times(product.name, rows, self._device, product.prepared)
                    for product in self._products.values()
                ]
            except torch.OutOfMemoryError:  # no room to measure: asked again in the next pass
                return False
            fused, decoded = sum(t.fused_s for t in times), sum(t.decoded_s for t in times)
            found = self._pays[rows] = fused < decoded
        return found

    def _around(self, ref: ParameterRef, name: str) -> Callable[..., Callable[..., Any]]:
        """Return what makes a linear layer's forward pass a fused one."""
        product = self._products[name]

        def around(forward: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                x = kwargs.get("input") if not args else args[0]
                if self.active and len(args) + len(kwargs) == 1 and x is not None:
                    weight = ref.get()
                    if isinstance(weight, WeightHandle) and weight.packed_name == name:
                        # As its forward pass finds it, which may be no parameter (pruning).
                        bias = getattr(ref.module, "bias", None)
                        found = product.multiplied(x, bias)
                        if found is not None:
                            return found
                return forward(*args, **kwargs)

            called.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
            return called

        return around


def _handles(unit: Unit) -> list[tuple[ParameterRef, str]]:
    """Return the unit's parameters that are handles, with their names among the packed weights."""
    found = ((ref, ref.get()) for ref in unit.refs)
    return [(ref, held.packed_name) for ref, held in found if isinstance(held, WeightHandle)]


def _is_linear_weight(ref: ParameterRef) -> bool:
    """Return whether a parameter is the weight of a linear layer that nothing else computes.

    accelerate keeps the forward pass behind its own as ``_old_forward``.
    """
    module = ref.module
    own = module.__dict__.get("_old_forward", module.__dict__.get("forward"))
    function = type(module).forward if own is None else getattr(own, "__func__", None)
    return ref.attribute == "weight" and function is nn.Linear.forward


def _computes_plainly(device: torch.device) -> bool:
    """Return whether results need no gradients and are of the dtype of what is multiplied."""
    return not torch.is_grad_enabled() and not torch.is_autocast_enabled(device.type)


def _input_rows(values: Iterable[Any]) -> int:
    """Return the rows of the first floating-point tensor among arguments; 0 without one."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
            return value.numel() // max(1, value.shape[-1])
    return 0
