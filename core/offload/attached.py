"""A model whose weights stream: what is attached to it, and how that is detached."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..engine.transfer.unit_report import UnitReport
from ..errors import ArgumentError, BitslabError
from ..module_methods import alive
from ..tracing import not_traced
from .fused import Fused, FusedUnit
from .guards import ApplyGuard, CallGuard, PickleGuard, StateGuard
from .handles import WeightHandle
from .hooks import EnterCallback, UnitHooks, aligned
from .report import OffloadReport
from .residence import Tier, is_lookup
from .store import PackedWeights
from .stream import WeightStream
from .units import ParameterRef, Unit

ATTRIBUTE = "_bitslab_offload"


#: What is installed on a model's modules in addition to hooks.
Guard = StateGuard | ApplyGuard | CallGuard | PickleGuard


class LateStream:
    """A source of weights whose stream is made after the handles that use it."""

    def __init__(self) -> None:
        self.stream: WeightStream | None = None

    def _get(self) -> WeightStream:
        if self.stream is None:
            raise BitslabError("the weights of this model are just being packed")
        return self.stream

    def whole(self, name: str) -> torch.Tensor:
        """Decode a tensor on the device that it is used on."""
        return self._get().whole(name)

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Decode rows of a tensor on the device that it is used on."""
        return self._get().rows(name, ids)


class OffloadedModel:
    """The packed weights of a model, with the hooks and guards that bind them to it.

    Parameters
    ----------
    model : torch.nn.Module
        The model, with handles instead of its packed parameters. It holds this object and is
        held weakly, so that the memory of both goes with the last reference to the model.
    units : sequence of Unit
        Its units; their refs hold handles.
    tiers : mapping of str to Tier
        Where each unit is kept; those on the device are only reported.
    on_device : mapping of str to int
        Raw bytes of the units that are kept unpacked on the device.
    weights : PackedWeights
        The packed weights.
    source : LateStream
        The source of weights of the handles.
    device : torch.device
        Where the model runs.
    depth, sm_budget
        See `WeightStream`.
    trainable : set of str
        Names of the parameters that required gradients before.
    fused : bool or "auto"
        See `offload_weights`.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        tiers: Mapping[str, Tier],
        on_device: Mapping[str, int],
        weights: PackedWeights,
        source: LateStream,
        device: torch.device,
        depth: int,
        sm_budget: int | None,
        trainable: Iterable[str],
        fused: Fused = False,
    ) -> None:
        self._model = weakref.ref(model)
        self.weights = weights
        self.units = list(units)
        self._tiers = dict(tiers)
        self._on_device = dict(on_device)
        self._trainable = set(trainable)
        streamed = [unit for unit in self.units if not is_lookup(unit)]
        names = {unit.name: [_handle(ref).packed_name for ref in unit.refs] for unit in streamed}
        # Images that some unit of tier "packed" uses are kept on the device.
        users: dict[str, set[str]] = {}
        for unit in self.units:
            for ref in unit.refs:
                stored_in = weights.unit_of(_handle(ref).packed_name)
                users.setdefault(stored_in, set()).add(self._tiers.get(unit.name, "host"))
        packed = [stored_in for stored_in, tiers_of in users.items() if "packed" in tiers_of]
        weights.move_to_device(packed, device)
        self.stream = WeightStream(weights, names, device=device, depth=depth, sm_budget=sm_budget)
        source.stream = self.stream
        self._guards: list[Guard] = []
        self.hooks: list[UnitHooks] = []
        for unit in streamed:
            # Those of which the caller has not asked for packed weights on the device are fetched.
            wanted = fused if self._tiers.get(unit.name) == "packed" else False
            fused_unit = FusedUnit.of(unit, self.stream, wanted)
            if fused_unit is not None:
                self._guards += fused_unit.guards(unit)
            self.hooks.append(UnitHooks(unit, self.stream, fused_unit))
        owners: dict[int, list[ParameterRef]] = {}
        for unit in self.units:
            for ref in unit.refs:
                owners.setdefault(id(ref.module), []).append(ref)
        for refs in owners.values():
            distinct = list({ref.attribute: ref for ref in refs}.values())
            self._guards.append(StateGuard(weights, distinct))
            if refs[0].module is not model:
                own = [_handle(ref) for ref in distinct]
                self._guards.append(ApplyGuard(refs[0].module, own))
        handles = [_handle(ref) for unit in self.units for ref in unit.refs]
        self._guards.append(ApplyGuard(model, handles))
        self._guards += [CallGuard(unit.module) for unit in self.units if is_lookup(unit)]
        # Wherever pickling meets a hook or a guard before it meets a handle.
        touched = [model, *(unit.module for unit in streamed)]
        touched += [refs[0].module for refs in owners.values()]
        self._guards += [PickleGuard(module) for module in dict.fromkeys(touched)]
        self._begin_hook = model.register_forward_pre_hook(
            not_traced(self._begin), with_kwargs=True, prepend=True
        )
        model.__dict__[ATTRIBUTE] = self

    @property
    def model(self) -> nn.Module:
        """The model."""
        return alive(self._model)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.stream.device

    def _begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin a pass of the whole model; undo what an interrupted one left."""
        if any(hooks.is_active() for hooks in self.hooks) and not _is_inside_itself(module):
            for hooks in self.hooks:
                hooks.abandon()
        return aligned(args, kwargs, self.device)

    def add_on_device(self, units: Mapping[str, int]) -> None:
        """Add units that are kept unpacked on the device, by their raw bytes, to the report."""
        self._on_device.update(units)

    def set_enter_callback(self, callback: EnterCallback | None) -> None:
        """Set the function that each thread calls before it enters a unit; None for none."""
        for hooks in self.hooks:
            hooks.enter_callback = callback

    def report(self) -> OffloadReport:
        """Return sizes and times of the units; on a GPU this waits for it."""
        times = self.stream.times()
        rows = []
        for unit in self.units:
            stored = {_handle(ref).packed_name for ref in unit.refs}
            records = [self.weights.record(name) for name in stored]
            stored_in = {self.weights.unit_of(name) for name in stored} == {unit.name}
            rows.append(
                UnitReport(
                    unit.name,
                    self._tier_of(unit),
                    sum(record.raw_nbytes for record in records),
                    self.weights.unit_nbytes(unit.name)
                    if stored_in
                    else sum(record.packed_nbytes for record in records),
                    times.get(unit.name),
                    shared=not stored_in,
                )
            )
        rows += [UnitReport(name, "device", n, n, None) for name, n in self._on_device.items()]
        order = {name: position for position, name in enumerate(self._tiers)}
        rows.sort(key=lambda row: order.get(row.name, len(order)))
        return OffloadReport(rows, str(self.device), self.stream.stats(), self.weights.path)

    def _tier_of(self, unit: Unit) -> str:
        """Return a unit's tier, "disk" where its host tier is a file."""
        tier = self._tiers.get(unit.name, "host")
        return "disk" if tier == "host" and self.weights.path is not None else tier

    def restore(self, device: torch.device | None = None) -> None:
        """Give the model its ordinary parameters back; remove hooks and release all memory.

        Parameters
        ----------
        device : torch.device, optional
            The device of the parameters; the CPU when left out.
        """
        # Detached last: if memory runs out on the way, the model is right and this can be repeated.
        restored: dict[str, nn.Parameter] = {}
        for unit in self.units:
            for ref in unit.refs:
                handle = ref.get()
                if not isinstance(handle, WeightHandle):
                    continue  # replaced by another parameter since
                name = handle.packed_name
                if name not in restored:
                    data = self.weights.read(name, device or "cpu")
                    wanted = name in self._trainable
                    restored[name] = nn.Parameter(data, requires_grad=wanted)
                ref.put(restored[name])
        self.detach()
        self.close()

    def detach(self) -> None:
        """Take hooks and guards off the model; handles are left, and decode themselves."""
        for hooks in self.hooks:
            hooks.remove()
        for guard in reversed(self._guards):
            guard.remove()
        self._begin_hook.remove()
        self.model.__dict__.pop(ATTRIBUTE, None)

    def close(self) -> None:
        """Release packed weights and buffers; handles that are left raise."""
        self.stream.close()
        self.weights.close()


def find_offloaded(model: nn.Module) -> OffloadedModel:
    """Return the `OffloadedModel` of a model, or of a module inside it.

    Raises
    ------
    ArgumentError
        When no weights of the model stream.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        found = module.__dict__.get(ATTRIBUTE)
        if isinstance(found, OffloadedModel):
            return found
    raise ArgumentError(
        "model: none of its weights are offloaded by bitslab; call "
        "bitslab.offload.offload_weights(model) first"
    )


def _is_inside_itself(model: nn.Module) -> bool:
    """Return whether the running call of a model is nested in another call of it."""
    calls = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is model:
            calls += 1
        frame = frame.f_back
    return calls > 1


def _handle(ref: ParameterRef) -> WeightHandle:
    handle = ref.get()
    if not isinstance(handle, WeightHandle):
        raise BitslabError(f"{ref.name}: expected a handle, got {type(handle).__name__}")
    return handle
