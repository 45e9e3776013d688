"""A new token behind those that are there, at a place that device memory says; see append.cu."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....errors import ArgumentError
from .parameters import Address, Int32, Int64, Parameters
from .runner import Launch, Runner
from .source import APPEND

THREADS = 128  # of a block
WORD_BYTES = 4

#: Of keys, and of values.
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(init=False)
class AppendToken(Parameters):
    """Parameters of `append_token`: strides in words; int32 `short_by`."""

    kernel = "append_token"

    new_keys: Address
    k_batch: Int64
    k_head: Int64
    new_values: Address
    v_batch: Int64
    v_head: Int64
    heads: Int32
    words: Int32
    keys: Address
    values: Address
    to_batch: Int64
    to_head: Int64
    to_token: Int64
    k_last: Int32
    v_last: Int32
    short_by: Address


class AppendKernels:
    """The kernel of append.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launch: Launch | None = None

    def append_token(
        self, new: Pair, memory: Pair, ends: tuple[int, int], short_by: torch.Tensor
    ) -> None:
        """Put a token of each sequence behind those that are there; waits for nothing.

        Parameters
        ----------
        new : (torch.Tensor, torch.Tensor)
            Keys and values ``[B, H, 1, D]`` on the device; D values take whole words of 4 bytes.
        memory : (torch.Tensor, torch.Tensor)
            ``[B, H, any, D]`` of the same dtype, with the same strides; D values lie together, at
            multiples of 4 bytes.
        ends : (int, int)
            Tokens of keys and of values in their memory once none is missing.
        short_by : torch.Tensor
            int32 ``[1]`` on the device: how many of these are missing behind the new ones, which
            become number ``end - 1 - short_by``. Below 0: nothing is written.

        Raises
        ------
        ArgumentError
            For memory that does not fit together.
        """
        keys, values = memory
        size = keys.element_size()
        if keys.stride() != values.stride() or not in_words(keys) or not in_words(values):
            raise ArgumentError(
                f"memory: strides {keys.stride()} of keys and {values.stride()} of values, "
                "accepted are the same ones, of whole words"
            )
        for end, there in zip(ends, memory, strict=True):
            if not 0 < end <= there.shape[2]:
                raise ArgumentError(f"ends: {ends}, accepted are 1 to {there.shape[2]} tokens")
        if self._launch is None:
            self._launch = self._runner.bind(APPEND, AppendToken, THREADS)
        # Contiguous memory as it comes may begin at an odd value.
        new_keys, new_values = (
            t if in_words(t) else t.clone(memory_format=torch.contiguous_format) for t in new
        )
        batch, heads, _, dim = keys.shape
        each = WORD_BYTES // size

        def strides(t: torch.Tensor, n: int) -> list[int]:
            return [stride // each for stride in t.stride()[:n]]

        if batch * heads:
            self._launch(
                batch * heads,
                *(new_keys.data_ptr(), *strides(new_keys, 2)),
                *(new_values.data_ptr(), *strides(new_values, 2)),
                *(heads, dim // each, keys.data_ptr(), values.data_ptr(), *strides(keys, 3)),
                *(ends[0] - 1, ends[1] - 1, short_by.data_ptr()),
            )


def in_words(t: torch.Tensor) -> bool:
    """Return whether the last dimension lies together in words of 4 bytes."""
    size, strides = t.element_size(), t.stride()
    return (
        size <= WORD_BYTES
        and strides[-1] == 1
        and not any(size * n % WORD_BYTES for n in (*strides[:-1], t.shape[-1]))
        and not t.data_ptr() % WORD_BYTES
    )
