"""What the launch code needs of a device: something that runs kernels and a mailbox for errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .source import AnyVariant

MAILBOX_WORDS = 4

NO_ERROR, INDEX_ERROR, DAMAGED_ERROR, OFFSETS_ERROR = 0, 1, 2, 3  # as in mailbox.cuh


class Prepared(Protocol):
    """A kernel whose launches have most arguments in common."""

    def __call__(self, blocks: int, *changing: int) -> None:
        """Start it on so many blocks, on torch's current stream.

        Parameters
        ----------
        blocks : int
            Blocks of the grid.
        *changing : int
            What changes: numbers, and addresses, 0 for none.
        """


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
        """Start a kernel on torch's current stream; tensors pass their address.

        Arguments are tensors, None, or numpy integers of the parameter's size.
        """
        ...

    def prepare(
        self,
        variant: AnyVariant,
        kernel: str,
        threads: int,
        args: Sequence[Any],
        changing: Sequence[int],
        shared_bytes: int = 0,
    ) -> Prepared:
        """Return a kernel ready for launches that differ in few arguments.

        Parameters
        ----------
        variant, kernel, args, shared_bytes
            As for `launch`; tensors among `args` live as long as what is returned.
        threads : int
            Of a block.
        changing : sequence of int
            Places in `args` of what is given at each launch. There None stands for an address, a
            numpy integer for a number of its size.
        """
        ...


def do_nothing() -> None:
    """Stand for a launch that has nothing to do."""
