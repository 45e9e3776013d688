"""Checks of the ids, devices and indices that callers give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import torch

from ..devices import checked_device
from ..engine.codecs.base import check_tensor_argument, index_tensor, raise_bad_index
from ..errors import ArgumentError, ArgumentTypeError

Index = SupportsIndex | slice | torch.Tensor | Sequence[Any] | np.ndarray[Any, Any]


def check_not_from_end(ids: torch.Tensor, n_rows: int, name: str = "ids") -> None:
    """Refuse ids other than 0 to `n_rows` - 1, where negative ones do not count from the end.

    Parameters
    ----------
    ids : torch.Tensor
        Integers ``[n]``. Ids on a GPU are not checked: that would wait for the GPU.
    n_rows : int
        Number of rows.
    name : str
        Name of the argument, for the message.

    Raises
    ------
    IndexRangeError
        When an id is out of this range.
    """
    if ids.device.type != "cpu" or not ids.numel():
        return
    lowest, highest = (int(bound) for bound in ids.aminmax())
    if lowest < 0 or highest >= n_rows:
        position = int(((ids < 0) | (ids >= n_rows)).nonzero()[0, 0])
        raise_bad_index(int(ids[position]), position, n_rows, name, from_end=False)


def checked_target(
    ids: torch.Tensor, out: torch.Tensor | None, device: torch.device | str | None
) -> torch.device:
    """Return the device that rows go to, or refuse `out` and `device`."""
    if out is not None:
        check_tensor_argument("out", out)
    if device is None:
        return ids.device if out is None else out.device
    target = checked_device(device)
    if out is not None and out.device != target:
        raise ArgumentTypeError(f"out: on {out.device}, expected {target}")
    return target


def row_ids(index: Index, n_rows: int) -> torch.Tensor:
    """Return the row ids, integers of any shape, that an index of a table stands for.

    Parameters
    ----------
    index : int, slice, torch.Tensor, numpy.ndarray or sequence
        Rows, a range with any step, integers of any shape, or a bool mask ``[N]``.
    n_rows : int
        Rows of the table.

    Raises
    ------
    IndexRangeError
        When an int is out of range; integers of a tensor are not checked.
    ArgumentTypeError, ArgumentError
        When it is something else, such as several indices, or a mask of another length.
    """
    if isinstance(index, slice):
        picked = range(*index.indices(n_rows))
        return torch.from_numpy(np.arange(picked.start, picked.stop, picked.step, dtype=np.int64))
    if isinstance(index, (tuple, type(None), type(...), bool, str)):
        raise ArgumentTypeError(
            f"index: {index!r} is not accepted, only rows can be indexed: by an int, a slice, "
            "integers or a mask"
        )
    ids = index if isinstance(index, torch.Tensor) else index_tensor(index, n_rows)
    if ids.dtype != torch.bool:
        return ids
    if ids.shape != (n_rows,):
        raise ArgumentError(f"index: mask of shape {list(ids.shape)}, expected {[n_rows]}")
    return ids.nonzero()[:, 0]
