"""What the launch code needs of a device: something that runs kernels and a mailbox for errors."""

from __future__ import annotations

from typing import Protocol

import torch

from .parameters import Parameters, Value
from .source import AnyVariant

MAILBOX_WORDS = 4

# As in mailbox.cuh.
NO_ERROR, INDEX_ERROR, DAMAGED_ERROR, OFFSETS_ERROR, SLOTS_ERROR, BLOB_ERROR = range(6)


class Launch(Protocol):
    """A kernel that is bound: see `Runner.bind`."""

    def __call__(
        self, blocks: int | tuple[int, int, int], *changing: int, stream: int | None = None
    ) -> None:
        """Start it on a stream.

        Parameters
        ----------
        blocks : int or tuple of int
            Blocks of the grid.
        *changing : int
            The parameters that are not fixed, in the order of the kernel: numbers, and addresses,
            0 for none. What they point to is to live until this returns, and from then on as any
            tensor that the stream uses.
        stream : int, optional
            Address of the stream; torch's current one when left out.
        """


class Runner(Protocol):
    """Runs kernels of one device."""

    #: Multiprocessors of the device.
    multiprocessors: int
    #: Shared memory of each, in bytes.
    shared_bytes_per_multiprocessor: int
    #: int64 ``[MAILBOX_WORDS]`` that kernels write errors to and the host reads at any time.
    mailbox: torch.Tensor

    def bind(
        self,
        variant: AnyVariant,
        parameters: type[Parameters],
        threads: int | tuple[int, int, int],
        shared_bytes: int = 0,
        /,
        **fixed: Value,
    ) -> Launch:
        """Return a kernel that is ready to be started any number of times, by any thread.

        Parameters
        ----------
        variant : Variant or PlainVariant
            The compilation that has the kernel; it is compiled now if it is not yet.
        parameters : type of Parameters
            The kernel.
        threads : int or tuple of int
            Threads of a block.
        shared_bytes : int
            Dynamic shared memory of a block.
        **fixed
            Parameters that are the same at each start: numbers, tensors, None. Tensors live as long
            as what is returned. The other parameters change from start to start.
        """
        ...


def do_nothing() -> None:
    """Stand for a launch that has nothing to do."""
