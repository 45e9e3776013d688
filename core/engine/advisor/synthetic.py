"""Tensors of a size and a share of zeros, to measure codecs with (CSWAP+, section 5.4)."""

from __future__ import annotations

import torch

from ...errors import ArgumentError, ArgumentTypeError
from ..tensor_bits import as_integers

#: Zeros come in runs, as after ReLU, where neighbours tend to be zero together: 4 on the average.
LONGEST_RUN = 7
LEVELS = (1 << 15) - 1  # levels and a threshold above all of them are int16
MAX_INTEGER = 1 << 20  # what indices of pooling and tokens are below


class SyntheticTensors:
    """Makes tensors such as activations: magnitudes of normal values, and zeros in runs.

    Parameters
    ----------
    dtype : torch.dtype
        Of the tensors. Integers are even below 2^20, or what the dtype holds; of bool all that is
        not zero is True.
    max_bytes : int
        Most bytes of a tensor.
    device : torch.device
        Where they are made. It holds two to three times `max_bytes` for that.
    seed : int
        The same one gives the same tensors on devices of one type.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For sizes below an element, and complex numbers.
    """

    def __init__(
        self, dtype: torch.dtype, max_bytes: int, device: torch.device, *, seed: int = 0
    ) -> None:
        if dtype.is_complex:
            raise ArgumentTypeError(f"dtype: {dtype}, accepted are real numbers and bool")
        n = max_bytes // dtype.itemsize
        if n < 1:
            raise ArgumentError(f"max_bytes: {max_bytes}, accepted are {dtype.itemsize} or more")
        self.dtype = dtype
        self.max_bytes = n * dtype.itemsize
        random = torch.Generator(device).manual_seed(seed)
        if dtype == torch.bool:
            self._values = torch.ones(n, dtype=dtype, device=device)
        elif dtype.is_floating_point:
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            normal = torch.randn(n, dtype=wide, device=device, generator=random)
            self._values = normal.abs_().to(dtype)
        else:
            top = min(MAX_INTEGER, torch.iinfo(dtype).max)
            self._values = torch.randint(
                1, top + 1, (n,), dtype=dtype, device=device, generator=random
            )
        # A level for each run, and all its elements are zero below it.
        n_runs = 2 * n // (1 + LONGEST_RUN) + 1
        lengths = torch.randint(1, LONGEST_RUN + 1, (n_runs,), device=device, generator=random)
        levels = torch.randint(
            LEVELS, (n_runs,), dtype=torch.int16, device=device, generator=random
        )
        self._levels = levels.repeat_interleave(lengths)[:n]
        if len(self._levels) < n:  # the runs were short
            self._levels = self._levels.repeat(-(-n // len(self._levels)))[:n]
        self._next = 0

    def make(self, nbytes: int, sparsity: float) -> torch.Tensor:
        """Return a tensor of one dimension.

        Parameters
        ----------
        nbytes : int
            Its bytes, rounded down to whole elements.
        sparsity : float
            Share of its elements that are zero, but for chance.

        Raises
        ------
        ArgumentError
            For a size or share that is not accepted.
        """
        n, most = nbytes // self.dtype.itemsize, len(self._values)
        if not 1 <= n <= most:
            raise ArgumentError(
                f"nbytes: {nbytes}, accepted are {self.dtype.itemsize} to {self.max_bytes}"
            )
        if not 0 <= sparsity <= 1:
            raise ArgumentError(f"sparsity: {sparsity}, accepted are 0 to 1")
        begin = self._next if self._next + n <= most else 0
        self._next = begin + n
        values = self._values[begin : begin + n]
        zero = self._levels[begin : begin + n] < round(sparsity * LEVELS)
        # As integers, which can be filled whatever the dtype.
        return as_integers(values).masked_fill(zero, 0).view(self.dtype)
