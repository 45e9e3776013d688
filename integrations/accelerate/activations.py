"""Activations of models that accelerate has prepared."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from bitslab.activations import ActivationOffload
from bitslab.activations import offload_activations as attach
from bitslab.errors import ArgumentError, ArgumentTypeError

#: What a prepared model may be.
_TAKEN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def offload_activations(
    accelerator: Accelerator, model: nn.Module, **options: Any
) -> ActivationOffload:
    """Attach to a model that `Accelerator.prepare` returned what moves its saved tensors.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
        What has prepared the model.
    model : torch.nn.Module
        The model: on one device, wrapped by DistributedDataParallel, or sharded by FSDP2, of which
        nothing is computed again unless ``recompute=True`` is given.
    **options
        As for `bitslab.offload_activations`.

    Returns
    -------
    ActivationOffload
        With ``report()``, ``stats()`` and ``detach()``.

    Raises
    ------
    ArgumentTypeError
        For an accelerator or a model of another kind.
    ArgumentError
        For FSDP1, DeepSpeed, Megatron and other engines, which take over forward and backward
        passes; and as `bitslab.offload_activations`.

    Notes
    -----
    accelerate shards on accelerators alone: of ranks on CPUs it makes DistributedDataParallel,
    whatever plugin it is given, and such a model is taken as one.

    Examples
    --------
    ::

        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        offload = offload_activations(accelerator, model, memory="60GiB")
    """
    if not isinstance(accelerator, Accelerator):
        raise ArgumentTypeError(
            f"accelerator: expected an accelerate.Accelerator, got {type(accelerator).__name__}"
        )
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and accelerator.is_fsdp2:
        return attach(model, **{"recompute": False, **options})
    if kind not in _TAKEN:
        name = "FSDP1" if kind == DistributedType.FSDP else str(kind.value)
        raise ArgumentError(
            f"accelerator: prepared for {name}, accepted are one device, DistributedDataParallel "
            "and FSDP2"
        )
    return attach(model, **options)
