"""Products with one packed weight, as a unit's linear layers ask for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..engine.kernels.format import RowStorage
from ..engine.kernels.packed_products import MAX_INPUT_ROWS, PackedLinear
from ..engine.kernels.row_kernels import RowKernels
from .records import TensorRecord

#: Classes of tensors that are nothing but their memory.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class PackedProduct:
    """Few rows of input times a packed weight ``[N, K]``.

    Parameters
    ----------
    record : TensorRecord
        The weight.
    storage : RowStorage
        Its packed rows, where they are multiplied.
    kernels : RowKernels
        Its codec's there.
    multiply : PackedLinear
        What `RowKernels.prepare_linear` returned for it.
    sm_budget : int or None
        Multiprocessors that decoding may take, for what decoding first would take.
    """

    def __init__(
        self,
        record: TensorRecord,
        storage: RowStorage,
        kernels: RowKernels,
        multiply: PackedLinear,
        sm_budget: int | None,
    ) -> None:
        self._record = record
        self._storage = storage
        self._kernels = kernels
        self._multiply = multiply
        self._sm_budget = sm_budget
        self._device = storage.words.device
        self._width, self._depth = record.shape

    @classmethod
    def of(
        cls,
        record: TensorRecord,
        storage: RowStorage,
        kernels: RowKernels,
        sm_budget: int | None = None,
    ) -> PackedProduct | None:
        """Return the product with a weight; None where it has to be decoded first."""
        shape = record.shape
        by_row = len(shape) == 2 and record.row_ordered and record.n_rows == shape[0]
        if not by_row or tuple(record.codec.row_shape) != shape[1:]:
            return None
        multiply = kernels.prepare_linear(storage, record.dtype, record.facts)
        return None if multiply is None else cls(record, storage, kernels, multiply, sm_budget)

    @property
    def name(self) -> str:
        """What tells weights that take other times: shape, plan, multiprocessors for decoding."""
        budget = "all" if self._sm_budget is None else self._sm_budget
        plan = self._record.codec.describe()
        return f"{self._width} x {self._depth} {plan}, {budget} multiprocessors"

    def multiplied(self, x: Any, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return ``x weight^T + bias``, or None where the weight is decoded first.

        Parameters
        ----------
        x : torch.Tensor
            ``[..., K]`` of the weight's dtype and device, in all 1 to 16 rows.
        bias : torch.Tensor or None
            ``[N]``.
        """
        if type(x) not in _PLAIN or x.device != self._device or x.dtype != self._record.dtype:
            return None
        if not x.dim() or x.shape[-1] != self._depth or torch.is_grad_enabled():
            return None
        x_rows = x.numel() // self._depth
        if not 0 < x_rows <= MAX_INPUT_ROWS or torch.is_autocast_enabled(x.device.type):
            return None
        if bias is not None and (
            type(bias) not in _PLAIN or bias.dtype != x.dtype or bias.device != x.device
        ):
            return None
        out: torch.Tensor = x.new_empty(x_rows, self._width)
        given = None if bias is None else bias.contiguous()
        self._multiply(x.reshape(x_rows, self._depth), given, out)
        return out.view(*x.shape[:-1], self._width)

    def prepared(self, x_rows: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return the product of so many rows, and the one after decoding, ready to be timed."""
        record = self._record
        x = torch.ones(x_rows, self._depth, dtype=record.dtype, device=self._device)
        out = x.new_empty(x_rows, self._width)
        decoded = torch.empty(record.decoded_nbytes, dtype=torch.uint8, device=self._device)
        rows = decoded.view(record.n_rows, self._kernels.row_bytes)
        decode = self._kernels.prepare_decode(self._storage, rows, record.facts, self._sm_budget)
        weight = record.restored(decoded)

        def after_decoding() -> None:
            decode()
            torch.mm(x, weight.t(), out=out)

        return lambda: self._multiply(x, None, out), after_decoding
