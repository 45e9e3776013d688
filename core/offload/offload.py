"""Packing the weights of a model, and restoring them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..devices import checked_device, device_or_default
from ..engine.progress import Progress, ProgressFunction
from ..errors import ArgumentError, ArgumentTypeError
from ..module_tensors import own_buffers, own_parameters
from .attached import ATTRIBUTE, LateStream, OffloadedModel, find_offloaded
from .fused import Fused, check_fused
from .handles import WeightHandle
from .hooks import aligned
from .report import OffloadReport
from .residence import MIN_UNIT_BYTES, Keep, Tier, choose_tiers
from .store import PackedWeights
from .stream import check_counts
from .tensor_packer import CodecName
from .units import ParameterRef, Predicate, Unit, cut_units, is_plain
from .weight_packer import WeightPacker


def offload_weights(
    model: nn.Module,
    *,
    execution_device: torch.device | str | None = None,
    keep: Keep = None,
    disk: str | os.PathLike[str] | None = None,
    depth: int = 2,
    sm_budget: int | None = 64,
    fused: Fused = False,
    min_bytes: int = MIN_UNIT_BYTES,
    predicate: Predicate | None = None,
    codec: CodecName = "auto",
    progress: ProgressFunction | bool | None = None,
) -> OffloadReport:
    """Pack the weights of a model and stream them to the device as it runs.

    The model remains the same object, with the same outputs, bit for bit, unless `fused` asks for
    others. Its weights lie
    packed in page-locked host memory and cross one unit (transformer layer) after the other, ahead
    of their use; see `WeightStream`. Of embeddings, and where code takes rows of a weight itself
    (``weight[ids]``, ``weight[5:7]``), only the rows asked for are decoded.

    Parameters
    ----------
    model : torch.nn.Module
        Any model with its parameters on the CPU or a GPU. Where most of a model is frozen, the
        parameters that require gradients (adapters, a head) are not packed, nor are parameters of a
        class of their own (quantised weights) and buffers; they move to `execution_device`.
    execution_device : torch.device or str, optional
        Where the model runs; the current GPU, or the CPU without one, when left out.
    keep : None, "all", "packed", float, mapping or callable
        What is kept on the device. "all": every unit, unpacked. "packed": every unit, packed in
        device memory and decoded for each use. A share 0 to 1 of the raw bytes: units spread
        evenly, unpacked. By name of the unit (a mapping, or a function of it): "device",
        "packed" or "host".
    disk : str or os.PathLike, optional
        A safetensors file to write the packed weights to and read them from, instead of host
        memory. One that a model is using, in any process, is refused.
    depth : int
        Units that are fetched ahead.
    sm_budget : int or None
        Multiprocessors of the GPU that decoding may take.
    fused : bool or "auto"
        Of units that are kept "packed", whether linear layers with 1 to 16 rows of input multiply
        while they decode, so that weights are read once, packed. True: wherever they can. "auto":
        where that is faster on this device, measured once for each shape and number of rows. What
        they return is summed in another order than torch's product, so it differs by rounding, and
        generated tokens may differ: the default is False, with the same bits. Larger inputs, passes
        with gradients or autocast, and other weights than bfloat16 in the usual plan are decoded
        ahead as ever.
    min_bytes : int
        Units of fewer raw bytes are kept on the device.
    predicate : callable, optional
        Gets a parameter's name and the parameter; only those for which it is true are packed.
    codec : {"auto", "raw"}
        "raw" streams the weights as they are.
    progress : callable, bool or None
        Called with the raw bytes packed so far and in all; a bar on the terminal when left out.

    Returns
    -------
    OffloadReport
        The sizes of all units.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When an argument is not accepted, the model's weights stream already, are on the meta
        device, or there are none to pack.
    BitslabError
        When host memory runs out; the model is as it was before, and the message says how much is
        needed.

    Notes
    -----
    With a GPU, weights are packed there wherever they lie, and replaced unit by unit; up to 2 GiB
    of them are on the way at a time, two thirds of the weights or half of the GPU's free memory
    where that is less.

    A packed weight is read-only and gets no gradients; gradients pass through it. What a module
    returns is its caller's for good, but a weight, or a view of one, that code keeps aside during a
    pass is overwritten by the next units: keep a clone.

    A packed model cannot be pickled, saved as a whole by ``torch.save`` or copied; its
    ``state_dict()`` has the plain weights. Its memory goes with the last reference to the model. A
    parameter's ``numel() * element_size()``, and with it ``get_memory_footprint()`` of
    transformers, counts the bytes of the plain weight; the report has those of the packed ones.

    Examples
    --------
    >>> import torch
    >>> from bitslab.offload import offload_weights, restore_weights
    >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
    >>> x = torch.randn(3, 512)
    >>> before = model(x)
    >>> report = offload_weights(model, execution_device="cpu")
    >>> torch.equal(model(x), before), report.packed_bytes < report.raw_bytes
    (True, True)
    >>> restore_weights(model)
    """
    _check_model(model)
    check_counts(depth, sm_budget)
    check_fused(fused)
    device = device_or_default(execution_device, "execution_device")
    units = cut_units(model, packable(model, predicate))
    tiers = choose_tiers(units, keep, min_bytes)
    _check_data(units)
    streamed, on_device = split_units(units, tiers)
    source = LateStream()
    names, aliases = stored_names(streamed)
    trainable = {
        s.name for u in streamed for s in u.refs if (p := s.get()) is not None and p.requires_grad
    }
    # Where the model comes from, for undoing.
    devices = {s.name: p.device for u in streamed for s in u.refs if (p := s.get()) is not None}
    packer = WeightPacker(
        names,
        disk=disk,
        codec=codec,
        aliases=aliases,
        device=device,
        tensors_bytes=sum(unit.raw_nbytes for unit in streamed),
    )
    try:
        _pack(streamed, packer, source, device, progress)
        weights = packer.finish()
    except BaseException:
        _put_back(streamed, PackedWeights(packer.salvage()), trainable, devices)
        packer.abandon()
        raise
    try:
        attached = OffloadedModel(
            model, streamed, tiers, on_device, weights, source, device, depth, sm_budget, trainable,
            fused,
        )  # fmt: skip
    except BaseException:
        _put_back(streamed, weights, trainable, devices)
        weights.close()
        raise
    try:
        move_unpacked(model, device)
    except BaseException:
        restore_weights(model)
        raise
    return attached.report()


def attach_weights(
    model: nn.Module,
    weights: PackedWeights,
    *,
    execution_device: torch.device | str | None = None,
    keep: Keep = None,
    depth: int = 2,
    sm_budget: int | None = 64,
    fused: Fused = False,
    move_rest: bool = True,
) -> OffloadReport:
    """Stream weights that are packed already through a model.

    Parameters
    ----------
    model : torch.nn.Module
        A model whose parameters of the names in `weights` are replaced; they may be on the meta
        device. Its other parameters and its buffers move to `execution_device`; those on the meta
        device are left there.
    weights : PackedWeights
        By the names of the model's parameters. They belong to the model from here on.
    execution_device, keep, depth, sm_budget, fused
        As for `offload_weights`; of `keep` only "packed" and "host" apply.
    move_rest : bool
        Whether the other parameters and the buffers move; not where they were placed already.

    Returns
    -------
    OffloadReport

    Raises
    ------
    ArgumentError
        When the model has no such parameters, or of other shapes.

    Notes
    -----
    After an error the model is as it was before, and the weights are still open.
    """
    _check_model(model)
    check_counts(depth, sm_budget)
    check_fused(fused)
    device = device_or_default(execution_device, "execution_device")
    units = cut_units(model, lambda name, _: name in weights)
    found = {ref.name for unit in units for ref in unit.refs}
    missing = [name for name in weights.names if name not in found]
    if missing:
        raise ArgumentError(
            f"weights: the model has no parameters {missing[:5]}, {len(missing)} in all"
        )
    tiers = choose_tiers(units, keep, 0)
    tiers = {name: "host" if tier == "device" else tier for name, tier in tiers.items()}
    source = LateStream()
    handles: dict[str, WeightHandle] = {}
    trainable = set()
    for unit in units:
        for ref in unit.refs:
            parameter, name = ref.get(), weights.stored_name(ref.name)
            record = weights.record(name)
            assert parameter is not None
            if tuple(parameter.shape) != record.shape:
                raise ArgumentError(
                    f"weights: {name!r} has shape {list(record.shape)}, the model's parameter "
                    f"{list(parameter.shape)}"
                )
            if name not in handles:
                like = torch.empty(record.shape, dtype=record.dtype, device="meta")
                handles[name] = WeightHandle(source, name, like, device)
                if parameter.requires_grad:
                    trainable.add(name)
    before = [(ref, ref.get()) for unit in units for ref in unit.refs]
    try:
        for ref, _ in before:
            ref.put(handles[weights.stored_name(ref.name)])
        if move_rest:
            move_unpacked(model, device)
        attached = OffloadedModel(
            model, units, tiers, {}, weights, source, device, depth, sm_budget, trainable, fused
        )
    except BaseException:
        for ref, parameter in before:
            assert parameter is not None
            ref.put(parameter)
        raise
    return attached.report()


def restore_weights(model: nn.Module, device: torch.device | str | None = None) -> None:
    """Give a model its ordinary parameters back, decoded, and release the packed ones.

    Parameters
    ----------
    model : torch.nn.Module
        A model whose weights stream, or a module around it.
    device : torch.device or str, optional
        The device of the parameters; the CPU when left out. What was kept on the device moves
        there too.

    Raises
    ------
    ArgumentError
        When no weights of the model stream.
    """
    attached = find_offloaded(model)
    target = checked_device("cpu" if device is None else device)
    attached.restore(target)
    move_unpacked(attached.model, target)


def offload_report(model: nn.Module) -> OffloadReport:
    """Return sizes and times of the weights of a model; on a GPU this waits for it.

    Raises
    ------
    ArgumentError
        When no weights of the model stream.
    """
    return find_offloaded(model).report()


# Shared by the ways to pack a model


def packable(model: nn.Module, predicate: Predicate | None) -> Predicate:
    """Return a predicate of the parameters to pack: where most are frozen, only frozen ones.

    A frozen table of positions does not make adapters of the other weights, nor do 8-bit numbers,
    which cannot be trained anyway.
    """
    floating = [p for p in model.parameters() if p.is_floating_point() and p.itemsize > 1]
    trained = sum(p.nbytes for p in floating if p.requires_grad)
    adapters = 2 * trained <= sum(p.nbytes for p in floating)

    def wanted(name: str, parameter: nn.Parameter) -> bool:
        if adapters and parameter.requires_grad:
            return False
        return predicate is None or bool(predicate(name, parameter))

    return wanted


def split_units(
    units: Sequence[Unit], tiers: Mapping[str, Tier]
) -> tuple[list[Unit], dict[str, int]]:
    """Return the units that are packed, and the raw bytes of those that are kept on the device.

    A parameter that is tied to one on the device is kept there.
    """
    kept = {id(s.get()) for unit in units if tiers[unit.name] == "device" for s in unit.refs}
    streamed, on_device = [], {}
    for unit in units:
        refs = [ref for ref in unit.refs if id(ref.get()) not in kept]
        if tiers[unit.name] == "device" or not refs:
            on_device[unit.name] = unit.raw_nbytes
        else:
            streamed.append(Unit(unit.name, unit.module, refs))
    return streamed, on_device


def stored_names(units: Sequence[Unit]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the names that each unit stores, and the further names of tied parameters."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    aliases: dict[str, str] = {}
    for unit in units:
        own = []
        for ref in unit.refs:
            key = id(ref.get())
            if key not in first:
                first[key] = ref.name
                own.append(ref.name)
            elif first[key] != ref.name:
                aliases[ref.name] = first[key]
        if own:
            names[unit.name] = own
    return names, aliases


def move_unpacked(model: nn.Module, device: torch.device) -> None:
    """Move what is not packed to a device, in place: parameters remain the same objects.

    Only parameters of a class of their own, which know best what moves with their data, are
    replaced by what their own `to` returns.
    """
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for name, parameter in list(own_parameters(module).items()):
            if parameter is None or isinstance(parameter, WeightHandle) or parameter.is_meta:
                continue
            if parameter.device == device:
                continue
            if is_plain(parameter):
                parameter.data = parameter.data.to(device)
                continue
            if id(parameter) not in replaced:
                moved = parameter.to(device)
                if not isinstance(moved, nn.Parameter):
                    moved = nn.Parameter(moved, requires_grad=parameter.requires_grad)
                replaced[id(parameter)] = parameter, moved
            own_parameters(module)[name] = replaced[id(parameter)][1]
        buffers = own_buffers(module)
        for name, buffer in buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                buffers[name] = buffer.to(device)


def bring_inputs(model: nn.Module) -> None:
    """Have what a model is called with moved to its parameters, as it is where weights stream."""
    model.register_forward_pre_hook(_to_parameters, with_kwargs=True, prepend=True)


def _to_parameters(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    return aligned(args, kwargs, next(module.parameters()).device)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if any(ATTRIBUTE in module.__dict__ for module in model.modules()):
        raise ArgumentError(
            "model: its weights are offloaded already; call "
            "bitslab.offload.restore_weights(model) first"
        )


def _check_data(units: Sequence[Unit]) -> None:
    if not units:
        raise ArgumentError("model: it has no parameters that can be packed")
    for unit in units:
        for ref in unit.refs:
            parameter = ref.get()
            if parameter is not None and parameter.is_meta:
                raise ArgumentError(
                    f"model: {ref.name!r} is on the meta device and has no data; for a model that "
                    "accelerate has dispatched, use bitslab.integrations.accelerate"
                )


def _pack(
    units: Sequence[Unit],
    packer: WeightPacker,
    source: LateStream,
    device: torch.device,
    progress: ProgressFunction | bool | None,
) -> None:
    """Pack unit by unit, and replace what is packed by handles."""
    refs_by_id: dict[int, list[ParameterRef]] = {}
    for unit in units:
        for ref in unit.refs:
            refs_by_id.setdefault(id(ref.get()), []).append(ref)
    total = sum(p.nbytes for refs in refs_by_id.values() if (p := refs[0].get()) is not None)
    done: set[int] = set()
    packed: dict[str, list[tuple[str, torch.Tensor]]] = {}

    def replace(completed: Iterable[str]) -> None:
        """Replace the parameters of units whose images are there, which frees them."""
        for unit in completed:
            for name, parameter in packed.pop(unit):
                handle = WeightHandle(source, name, parameter, device)
                for ref in refs_by_id[id(parameter)]:
                    ref.put(handle)
                bar.advance(parameter.nbytes)

    with Progress("packing weights", total, progress) as bar:
        for unit in units:
            for ref in unit.refs:
                parameter = ref.get()
                assert parameter is not None
                if id(parameter) in done or isinstance(parameter, WeightHandle):
                    continue
                done.add(id(parameter))
                packed.setdefault(unit.name, []).append((ref.name, parameter))
                packer.add(ref.name, parameter)
            del parameter
            replace(packer.completed())
        replace(packer.completed(wait=True))


def _put_back(
    units: Sequence[Unit],
    weights: PackedWeights,
    trainable: set[str],
    devices: Mapping[str, torch.device],
) -> None:
    """Replace handles by decoded parameters, and release each unit's image when it is done."""
    restored: dict[str, nn.Parameter] = {}
    for unit in units:
        for ref in unit.refs:
            handle = ref.get()
            if isinstance(handle, WeightHandle):
                name = handle.packed_name
                if name not in restored:
                    data = weights.read(name, devices[name])
                    restored[name] = nn.Parameter(data, requires_grad=name in trainable)
                ref.put(restored[name])
        if unit.name in weights.units and weights.unit(unit.name).image.tier == "host":
            weights.unit(unit.name).image.close()
