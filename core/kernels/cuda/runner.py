"""What the launch code needs of a device: something that runs kernels and a mailbox for errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .source import AnyVariant

MAILBOX_WORDS = 4

NO_ERROR, INDEX_ERROR, DAMAGED_ERROR = 0, 1, 2  # as in mailbox.cuh


class Runner(Protocol):
    """Runs kernels of one device."""

    #: Multiprocessors of the device.
    multiprocessors: int
    #: Shared memory of each, in bytes.
    shared_bytes_per_multiprocessor: int
    #: int64 ``[MAILBOX_WORDS]`` that kernels write errors to and the host reads at any time.
    mailbox: torch.Tensor

    def launch(
        self,
        variant: AnyVariant,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_bytes: int = 0,
    ) -> None:
        """Start a kernel on torch's current stream; tensors pass their address."""
        ...
