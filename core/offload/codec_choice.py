"""Choosing codecs for the weights of a model, with plans that are shared by weights of one kind.

A full plan of a tensor takes longer than packing a few megabytes, and the weights of a model mostly
differ in scale, not in kind. So codecs are remembered for each dtype and row size. A tensor takes
one that suits it as it is; else the masks of a plan with values of its own; else it is planned
anew.

Whether a codec suits is judged without a plan to compare with: by how far its saving lies behind
what is ideal for bytes of these frequencies. That distance belongs to the kind of data and to the
plan: it remains nearly the same for tensors of other scales, and grows where the plan does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ..dtypes import flat_bytes
from ..engine.codecs import RowCodec
from ..engine.codecs.base import rows_as_bytes
from ..engine.codecs.registry import fit_codec

#: What a codec is fitted on at the most. Of weights, more changes the result by less than 0.1 %.
SAMPLE_BYTES = 512 << 10
MIN_SAMPLE_ROWS = 32
#: A codec is taken as it is where it lies behind the ideal by so much more, in shares of the bytes
#: of the tensor, than where it was fitted; the masks of a plan, where they do by so much more than
#: where they were planned.
MORE_BEHIND, MORE_BEHIND_REFITTED = 0.001, 0.003
#: Tensors of which so many more or fewer bytes are 0 are of another kind.
MORE_ZEROS = 0.1
#: Codecs that are remembered for each dtype and row size: looking at more takes as long as fitting.
MOST_KEPT = 4
#: Of a sample, the bytes whose frequencies are counted.
COUNTED_BYTES = 128 << 10

_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class _Known:
    """A codec that was chosen before.

    Parameters
    ----------
    codec : RowCodec
        The codec.
    behind, planned_behind : float
        How far it lay behind the ideal on the tensor that it was fitted to, and its plan on the
        one that was planned for.
    zeros : float
        Share of that tensor's bytes that are 0.
    """

    codec: RowCodec
    behind: float
    planned_behind: float
    zeros: float


class CodecChooser:
    """Chooses codecs for tensors that come one after the other, remembering plans.

    Parameters
    ----------
    cls : type
        The class of row codecs that is planned with.

    Notes
    -----
    One thread at a time. What it chooses depends on the tensors and their order alone.
    """

    def __init__(self, cls: type[RowCodec]) -> None:
        self._class = cls
        self._known: dict[tuple[torch.dtype, int], list[_Known]] = {}

    def choose(
        self, rows: torch.Tensor, device: torch.device | None = None
    ) -> tuple[RowCodec, float]:
        """Return a codec for rows, and the share of their bytes that it is expected to save.

        Parameters
        ----------
        rows : torch.Tensor
            ``[N, ...]`` on any device, N at least 1.
        device : torch.device, optional
            Where a plan is made, if one has to be; where the rows are when left out.
        """
        row_bytes = rows[0].numel() * rows.dtype.itemsize
        sample = _sample(rows, row_bytes)
        on_host = sample.cpu()
        ideal, zeros = ideal_share(on_host), _zero_share(on_host)
        known = self._known.setdefault((rows.dtype, row_bytes), [])
        alike = [plan for plan in known if abs(plan.zeros - zeros) <= MORE_ZEROS]
        for plan in alike:
            saved = _saved_share(plan.codec, on_host)
            if ideal - saved <= plan.behind + MORE_BEHIND:
                known.remove(plan)
                known.insert(0, plan)
                return plan.codec, saved
        for planned_behind in dict.fromkeys(plan.planned_behind for plan in alike):
            latest = next(plan for plan in alike if plan.planned_behind == planned_behind)
            codec = latest.codec.refitted(on_host)
            saved = _saved_share(codec, on_host)
            if ideal - saved <= planned_behind + MORE_BEHIND_REFITTED:
                self._remember(known, _Known(codec, ideal - saved, planned_behind, zeros))
                return codec, saved
        given = sample if device is None else sample.to(device)
        codec = fit_codec(self._class, given, _NO_OPTIONS, n_rows=rows.shape[0])
        saved = _saved_share(codec, on_host)
        self._remember(known, _Known(codec, ideal - saved, ideal - saved, zeros))
        return codec, saved

    @staticmethod
    def _remember(known: list[_Known], plan: _Known) -> None:
        known.insert(0, plan)
        del known[MOST_KEPT:]


def ideal_share(sample: torch.Tensor) -> float:
    """Return the share of a sample's bytes that coding each by its frequency would save.

    Frequencies are those of the bytes at one place of an element. Floats are rotated by one bit, so
    that their exponents begin at a byte and are not cut in two.

    Parameters
    ----------
    sample : torch.Tensor
        ``[N, ...]`` on the CPU, of any dtype.
    """
    itemsize = sample.dtype.itemsize
    data = flat_bytes(sample).numpy()
    rows = data.reshape(sample.shape[0], -1)
    data = rows[:: max(1, data.size // COUNTED_BYTES)].reshape(-1)
    width = itemsize // 2 if sample.dtype.is_complex else itemsize
    if width > 1 and (sample.dtype.is_floating_point or sample.dtype.is_complex):
        words = data.view(f"<u{width}")
        one = words.dtype.type(1)
        data = ((words << one) | (words >> words.dtype.type(8 * width - 1))).view(np.uint8)
    bits = 0.0
    for place in data.reshape(-1, width).T:
        counts = np.bincount(place, minlength=256)
        shares = counts[counts > 0] / place.size
        bits -= float((shares * np.log2(shares)).sum())
    return 1 - bits / (8 * width)


def _sample(rows: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """Return rows spread over all, about SAMPLE_BYTES of them, on their device."""
    wanted = max(MIN_SAMPLE_ROWS, SAMPLE_BYTES // row_bytes)
    if rows.shape[0] <= wanted:
        return rows
    step = rows.shape[0] / wanted
    picked = (np.arange(wanted) * step).astype(np.int64)
    source = rows_as_bytes(rows, row_bytes)
    if source.device.type == "cpu":
        # By numpy: torch would start a team of threads, which wait for cores that others use.
        data = torch.from_numpy(source.numpy()[picked])
    else:
        data = source[torch.from_numpy(picked).to(source.device)]
    return data.flatten().view(rows.dtype).view(wanted, *rows.shape[1:])


def _saved_share(codec: RowCodec, sample: torch.Tensor) -> float:
    """Return the share of a sample's bytes that a codec saves, lengths of rows counted."""
    raw = sample.nbytes
    packed = int(codec.packed_bytes(sample).sum()) + codec.row_metadata_bytes(sample.shape[0])
    return 1 - packed / raw


def _zero_share(sample: torch.Tensor) -> float:
    """Return the share of the bytes of a sample on the CPU that are 0."""
    data = flat_bytes(sample).numpy()
    # torch counts bytes a hundred times slower.
    return 1 - int(np.count_nonzero(data)) / max(1, data.size)
