"""Packing what accelerate has offloaded."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import nn

from bitslab.devices import checked_device
from bitslab.engine import Progress, ProgressFunction
from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.integrations.accelerate.dispatched import (
    OffloadedTensor,
    allow_moves,
    check_unpacked,
    offloaded_tensors,
    remove_offloading,
    streamed_model,
)
from bitslab.module_tensors import own_buffers, own_parameters
from bitslab.offload import (
    MIN_UNIT_BYTES,
    CodecName,
    Fused,
    Keep,
    OffloadReport,
    PackedWeights,
    ParameterRef,
    Predicate,
    Unit,
    WeightPacker,
    attach_weights,
    check_counts,
    check_fused,
    choose_tiers,
    cut_units,
    offload_weights,
    split_units,
    stored_names,
)


def compress_offloaded(
    model: nn.Module,
    *,
    keep: Keep = None,
    disk: str | os.PathLike[str] | None = None,
    depth: int = 2,
    sm_budget: int | None = 64,
    fused: Fused = False,
    min_bytes: int = MIN_UNIT_BYTES,
    codec: CodecName = "auto",
    progress: ProgressFunction | bool | None = None,
) -> OffloadReport:
    """Pack what accelerate has offloaded of a model, and stream it from then on.

    Weights that ``device_map=`` (or `cpu_offload`, `disk_offload`, `dispatch_model`) has put into
    host memory or on disk are packed one layer after the other, and accelerate's hooks that would
    fetch them are taken off. Modules that are on a device are left there.

    Parameters
    ----------
    model : torch.nn.Module
        A dispatched model; changed in place. Raw weights in host memory are freed as they are
        packed. A folder of weights on disk is read, and left as it is.
    keep, disk, depth, sm_budget, fused, min_bytes, codec, progress
        As for `bitslab.offload.offload_weights`, for the offloaded parts.

    Returns
    -------
    OffloadReport
        The sizes of all offloaded units.

    Raises
    ------
    ArgumentError
        When the model has no offloaded parts, they run on several devices, its weights are packed
        already, or an argument is not accepted.
    ArgumentTypeError
        When `model` is no module.
    BitslabError
        When host memory runs out; the model goes on with accelerate's offloading as before, and
        the message says how much is needed.

    Notes
    -----
    accelerate does not know the packed weights: its `cpu_offload`, `disk_offload` and
    `dispatch_model` refuse them, and `remove_hook_from_submodules` takes accelerate's own hooks off
    while the weights stream on. `restore` is what gives the plain weights back.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    check_counts(depth, sm_budget)
    check_fused(fused)
    check_unpacked(model)
    tensors = list(offloaded_tensors(model))
    if not tensors:
        raise ArgumentError(
            "model: accelerate has offloaded no part of it; load it with device_map= or dispatch "
            "it, or use offload_compressed(model) for a plain model"
        )
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ArgumentError(
            f"model: its offloaded parts run on {sorted(map(str, devices))}; one device is accepted"
        )
    device = devices.pop()
    by_name = {tensor.name: tensor for tensor in tensors}
    originals = _tie(tensors)
    try:
        units = cut_units(model, lambda name, _: name in by_name)
        tiers = choose_tiers(units, keep, min_bytes)
        streamed, on_device = split_units(units, tiers)
        names, aliases = stored_names(streamed)
        rest = _loaded_rest(tensors, streamed, device)
        packer = WeightPacker(
            names,
            codec=codec,
            disk=disk,
            aliases=aliases,
            device=device,
            tensors_bytes=sum(unit.raw_nbytes for unit in streamed),
        )
        freed: list[tuple[OffloadedTensor, str]] = []
        weights: PackedWeights | None = None
        try:
            _pack(streamed, packer, by_name, aliases, freed, progress)
            weights = packer.finish()
            attach_weights(
                model,
                weights,
                execution_device=device,
                keep={unit.name: tiers[unit.name] for unit in streamed},
                depth=depth,
                sm_budget=sm_budget,
                fused=fused,
                move_rest=False,
            )
        except BaseException:
            _return_freed(freed, PackedWeights(packer.salvage()) if weights is None else weights)
            packer.abandon()
            raise
    except BaseException:
        for ref, parameter in originals:
            ref.put(parameter)
        raise
    for tensor, value in rest:
        own = own_buffers if tensor.is_buffer else own_parameters
        own(tensor.module)[tensor.attribute] = value  # type: ignore[assignment]
    remove_offloading(model)
    allow_moves(model, device)
    attached = streamed_model(model)
    attached.add_on_device(on_device)
    return attached.report()


def offload_compressed(
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
    """Pack the weights of a plain model; see `bitslab.offload.offload_weights`.

    Raises
    ------
    ArgumentError
        When accelerate has offloaded parts of it: then it is `compress_offloaded` that is needed.
        When its weights are packed already.

    Notes
    -----
    Of accelerate's functions see `compress_offloaded`.

    ``torch.compile`` of the model works. Hooks run between its graphs, so each layer whose weights
    stream, or are kept packed, is compiled by itself. With a K/V cache all layers are variants of
    one function, up to eight a layer as lengths of prompts and batches change, and beyond
    ``torch._dynamo.config.recompile_limit`` variants, 8 unless set, torch runs layers uncompiled,
    with the same results. For models of more than two layers set it to eight times their number,
    and ``torch._dynamo.config.accumulated_recompile_limit``, 256 unless set, not below that.
    """
    check_unpacked(model)
    if isinstance(model, nn.Module) and any(True for _ in offloaded_tensors(model)):
        raise ArgumentError(
            "model: accelerate has offloaded parts of it; use compress_offloaded(model)"
        )
    return offload_weights(
        model,
        execution_device=execution_device,
        keep=keep,
        disk=disk,
        depth=depth,
        sm_budget=sm_budget,
        fused=fused,
        min_bytes=min_bytes,
        predicate=predicate,
        codec=codec,
        progress=progress,
    )


def report(model: nn.Module) -> OffloadReport:
    """Return bytes and times of each unit; see `bitslab.offload.offload_report`."""
    return streamed_model(model).report()


def restore(model: nn.Module, device: torch.device | str | None = None) -> None:
    """Give a model its ordinary parameters back, on the device that it runs on.

    Parameters
    ----------
    model : torch.nn.Module
        A model whose weights stream. What is on a device already is left there.
    device : torch.device or str, optional
        Another device for the parameters.

    Raises
    ------
    ArgumentError
        When no weights of the model stream.
    """
    attached = streamed_model(model)
    attached.restore(attached.device if device is None else checked_device(device))


def _tie(tensors: Iterable[OffloadedTensor]) -> list[tuple[ParameterRef, torch.Tensor]]:
    """Share one meta parameter among all names of a tied weight; return the replaced ones.

    accelerate gives every name a meta parameter of its own; the weights themselves, where they are
    in memory, are one tensor still.
    """
    first: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}
    originals = []
    for tensor in tensors:
        if tensor.is_buffer or not tensor.in_memory:
            continue
        ref = ParameterRef(tensor.module, tensor.attribute, tensor.name)
        value, parameter = tensor.value(), ref.get()
        if parameter is None or value.numel() == 0:
            continue
        shared = first.setdefault((value.data_ptr(), value.shape, value.dtype), parameter)
        if shared is not parameter:
            originals.append((ref, parameter))
            ref.put(shared)
    return originals


def _pack(
    units: Iterable[Unit],
    packer: WeightPacker,
    by_name: dict[str, OffloadedTensor],
    aliases: dict[str, str],
    freed: list[tuple[OffloadedTensor, str]],
    progress: ProgressFunction | bool | None,
) -> None:
    """Pack unit by unit, and free the raw weights of complete units."""
    units = list(units)
    total = sum(p.nbytes for u in units for s in u.refs if (p := s.get()) is not None)
    further: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        further.setdefault(name, []).append(alias)
    packed: dict[str, list[tuple[str, int]]] = {}

    def free(completed: Iterable[str]) -> None:
        """Free the raw weights of units whose images are there."""
        for unit in completed:
            for name, nbytes in packed.pop(unit):
                bar.advance(nbytes)
                for tied in (name, *further.get(name, ())):
                    if by_name[tied].release():
                        freed.append((by_name[tied], name))

    with Progress("packing weights", total, progress) as bar:
        for unit in units:
            for ref in unit.refs:
                parameter = ref.get()
                nbytes = 0 if parameter is None else parameter.nbytes
                if ref.name in aliases:
                    bar.advance(nbytes)
                else:
                    packed.setdefault(unit.name, []).append((ref.name, nbytes))
                    packer.add(ref.name, by_name[ref.name].value())
            free(packer.completed())
        free(packer.completed(wait=True))


def _return_freed(freed: list[tuple[OffloadedTensor, str]], held: PackedWeights) -> None:
    """Give accelerate's maps the freed weights back, decoded."""
    restored: dict[str, torch.Tensor] = {}
    for tensor, name in freed:
        if name not in restored:
            restored[name] = held.read(name)
        tensor.put_back(restored[name])
    held.close()


def _loaded_rest(
    tensors: Iterable[OffloadedTensor], streamed: Iterable[Unit], device: torch.device
) -> list[tuple[OffloadedTensor, torch.Tensor]]:
    """Return offloaded tensors that are not packed (buffers, small ones) on the device."""
    packed = {ref.name for unit in streamed for ref in unit.refs}
    loaded: dict[int, nn.Parameter] = {}
    rest: list[tuple[OffloadedTensor, torch.Tensor]] = []
    for tensor in tensors:
        if tensor.name in packed:
            continue
        if tensor.is_buffer:
            rest.append((tensor, tensor.value().to(device)))
            continue
        parameter = own_parameters(tensor.module).get(tensor.attribute)
        if parameter is None:
            continue
        if id(parameter) not in loaded:
            data = tensor.value().to(device)
            loaded[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        rest.append((tensor, loaded[id(parameter)]))
    return rest
