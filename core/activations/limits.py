"""How far copies may be behind what computes, and ahead of what reads them."""

from __future__ import annotations

import torch

from ..engine.advisor import SwapLimits

#: Originals whose copies are under way take so much at most where nobody says, or a larger share of
#: a GPU's memory.
IN_FLIGHT_BYTES = 256 << 20
IN_FLIGHT_SHARE = 1 / 32
#: Encoded copies that may wait for the link whatever their size, and originals that may wait until
#: they are encoded: one is encoded while another one crosses.
STAGED_COPIES = 2
#: Host memory is reserved in pieces of this many bytes or more: page-locking costs by the call.
RESERVED_BYTES = 64 << 20
#: A larger tensor's are rounded up to so many sizes from one power of two to the next.
SIZES_IN_AN_OCTAVE = 8


def usual_in_flight_bytes(device: torch.device) -> int:
    """Return what originals may take while they are copied, where nobody says.

    Less makes what computes wait for copies of large tensors: a step of an AlexNet whose inputs of
    convolutions have 1.4 GB took 68 ms on an H200 with 256 MiB, 47 with what is returned here.
    """
    if device.type != "cuda":
        return IN_FLIGHT_BYTES
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return max(IN_FLIGHT_BYTES, int(total_bytes * IN_FLIGHT_SHARE))


def bytes_to_reserve(nbytes: int) -> int:
    """Return the host memory to reserve where `nbytes` of it are needed.

    Large tensors that grow a little from step to step, as batches of longer sequences do, would
    each need a buffer of their own.
    """
    if nbytes <= RESERVED_BYTES:
        return RESERVED_BYTES
    step = (1 << (nbytes - 1).bit_length()) // (2 * SIZES_IN_AN_OCTAVE)
    return -(-nbytes // step) * step


def limits_of(in_flight_bytes: int | None, depth: int, device: torch.device) -> SwapLimits:
    """Return the limits of a device, by the options of `ActivationOffload`."""
    if in_flight_bytes is None:
        in_flight_bytes = usual_in_flight_bytes(device)
    return SwapLimits(in_flight_bytes, depth, STAGED_COPIES)
