"""The codec that keeps rows as they are: what every other codec falls back to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from ...dtypes import dtype_from_name, dtype_name
from ...errors import ArgumentError, ArgumentTypeError, CorruptedDataError
from ..kernels.format import RowFormat
from ..kernels.row_kernels import LayoutKernels, RowKernels
from .base import (
    PackedRows,
    RowCodec,
    check_indices_argument,
    check_out_argument,
    check_packed_argument,
    check_range_argument,
    check_rows_argument,
    check_tensor_argument,
    raise_bad_index,
    rows_as_bytes,
)
from .invariant.layout import build_layout


class RawCodec(RowCodec):
    """Rows kept raw.

    Parameters
    ----------
    row_shape : tuple of int
        Shape of a row.
    dtype : torch.dtype
        Dtype of its elements.
    """

    name: ClassVar[str] = "raw"
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    keeps_raw: ClassVar[bool] = True

    def __init__(self, row_shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.row_shape = tuple(row_shape)
        self.dtype = dtype

    @property
    def profile_bytes(self) -> int:
        """Nothing is learnt: 0."""
        return 0

    @classmethod
    def fit(cls, sample: torch.Tensor, **options: Any) -> RawCodec:
        """Take shape and dtype from the sample; there are no options."""
        check_tensor_argument("sample", sample)
        if sample.dim() < 1:
            raise ArgumentTypeError("sample: expected rows, got a tensor with no dimension")
        if options:
            raise ArgumentTypeError(f"raw: takes no options, got {sorted(options)}")
        return cls(tuple(sample.shape[1:]), sample.dtype)

    def encode(self, rows: torch.Tensor) -> PackedRows:
        """Copy the rows."""
        check_rows_argument(self, rows)
        data = rows.detach().resolve_conj().resolve_neg()
        data = data.clone(memory_format=torch.contiguous_format)
        return PackedRows(rows.shape[0], {"rows": data})

    def decode(
        self,
        packed: PackedRows,
        indices: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
    ) -> torch.Tensor:
        """Copy the rows of `indices`, or rows `start` to `stop`, out again.

        Indices on a GPU are checked on the host, which waits for the GPU.
        """
        n_rows = getattr(packed, "n_rows", None)
        check_packed_argument(packed, {"rows": (self.dtype, (n_rows, *self.row_shape))})
        data = packed.parts["rows"]
        if out is not None:
            check_tensor_argument("out", out)
        wanted = None
        if indices is None:
            stop = check_range_argument(start, stop, packed.n_rows)
            n = stop - start
        else:
            if start != 0 or stop is not None:
                raise ArgumentError("start, stop: not together with indices")
            # Indices that are on a GPU come to the host: torch's own check would end the process's
            # use of that GPU.
            wanted = check_indices_argument(indices).cpu()
            n = wanted.shape[0]
            bad = ((wanted < -packed.n_rows) | (wanted >= packed.n_rows)).nonzero()
            if len(bad):
                position = int(bad[0])
                raise_bad_index(int(wanted[position]), position, packed.n_rows)
            wanted = torch.where(wanted < 0, wanted + packed.n_rows, wanted)
        if out is not None:
            sources = [data] if indices is None else [data, indices]
            check_out_argument(out, (n, *self.row_shape), self.dtype, out.device, sources)
        # Rows are picked as bytes, which every dtype can be viewed as.
        rows = rows_as_bytes(data, self.row_bytes)
        if data.device.type == "cpu":
            # By numpy: a forked child hangs in torch's own threads.
            picked = rows.numpy()[slice(start, stop) if wanted is None else wanted.numpy()]
            rows = torch.from_numpy(picked.copy() if wanted is None else picked)
        else:
            rows = rows[start:stop].clone() if wanted is None else rows[wanted.to(data.device)]
        result = rows.flatten().view(self.dtype).view(n, *self.row_shape)
        return result if out is None else out.copy_(result)

    def packed_bytes(self, rows: torch.Tensor) -> torch.Tensor:
        """Return row_bytes for every row."""
        check_rows_argument(self, rows)
        return torch.full((rows.shape[0],), self.row_bytes, dtype=torch.int64, device=rows.device)

    def adopt(self, n_rows: int, parts: Mapping[str, torch.Tensor]) -> PackedRows:
        """Check shape and dtype of the rows."""
        if set(parts) != {"rows"}:
            raise CorruptedDataError(f"raw rows: parts {sorted(parts)}, expected ['rows']")
        rows = parts["rows"]
        expected = (n_rows, *self.row_shape)
        if tuple(rows.shape) != expected or rows.dtype != self.dtype:
            raise CorruptedDataError(
                f"raw rows: expected {list(expected)} {self.dtype}, "
                f"got {list(rows.shape)} {rows.dtype}"
            )
        return PackedRows(n_rows, {"rows": rows})

    def kernels(self, device: torch.device) -> RowKernels:
        """Return kernels that gather raw rows, out of a table and the slabs of its cache."""
        chunk_bytes = math.gcd(self.row_bytes, 4) or 4
        fmt = RowFormat(self.row_bytes, chunk_bytes, 1, grouped=False, uniform=True)
        dtype = np.dtype(f"u{chunk_bytes}")
        layout = build_layout(fmt, np.zeros((1, 1), dtype), np.zeros((1, 1, 1), dtype))
        return LayoutKernels(layout.to(device))

    def to_config(self) -> dict[str, Any]:
        """Return row shape and dtype."""
        return {"row_shape": list(self.row_shape), "dtype": dtype_name(self.dtype)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RawCodec:
        """Build the codec that `to_config` described."""
        if not isinstance(config, Mapping):
            raise CorruptedDataError(f"raw: configuration is {config!r:.60}, expected a mapping")
        shape = config.get("row_shape")
        if not isinstance(shape, list) or not all(isinstance(s, int) and s >= 0 for s in shape):
            raise CorruptedDataError(f"raw: row_shape is {shape!r}, expected non-negative integers")
        return cls(tuple(shape), dtype_from_name(config.get("dtype", "")))
