"""Choosing a codec for each weight of a model.

A full plan of a tensor takes longer than packing a few megabytes, and the weights of a model mostly
differ in scale, not in kind. So a plan is made once for each dtype and row size; the tensors after
the first keep its masks and learn only the values, and are planned anew where that saves less.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch

from ..compressed import CompressedTensor, compress
from ..dtypes import dense, flat_bytes
from ..engine.codecs import PackedRows, RawCodec, RowCodec, codec_class
from ..engine.codecs.base import gathered_by_kernels, rows_as_bytes
from ..engine.codecs.registry import fit_codec
from ..engine.kernels.format import MAX_ROW_BYTES
from ..engine.row_map import as_rows, natural_row_elements, row_map
from ..errors import ArgumentError
from .records import stride_order

CodecName = Literal["auto", "raw"]

#: Tensors of fewer bytes, norms and biases mostly, are kept raw: their profile would cost what they
#: save.
MIN_PACKED_BYTES = 4 << 10
#: What a codec is fitted on at the most. Of weights, more changes the result by less than 0.1 %.
SAMPLE_BYTES = 512 << 10
MIN_SAMPLE_ROWS = 32
#: A tensor that saves so much less, or more, of its bytes than the one whose plan it takes, or of
#: which so many more or fewer bytes are 0, is of another kind, and planned anew.
LESS_SAVED, MORE_SAVED, MORE_ZEROS = 0.01, 0.05, 0.1
#: Below this share of bytes saved, decoding costs more than the link gains.
MIN_SAVED = 0.02


class TensorPacker:
    """Packs tensors, remembering plans.

    Parameters
    ----------
    codec : {"auto", "raw"}
        "auto": invariant bit packing where it saves at least 2 %; "raw": everything as it is.
    plan_with : type, optional
        A class of row codecs to take in place of invariant bit packing.

    Raises
    ------
    ArgumentError
        For another codec.

    Notes
    -----
    One thread at a time may use one packer.
    """

    def __init__(
        self, codec: CodecName = "auto", *, plan_with: type[RowCodec] | None = None
    ) -> None:
        if codec not in get_args(CodecName):
            raise ArgumentError(f"codec: {codec!r:.60}, accepted are 'auto' and 'raw'")
        self._codec = codec
        self._plan_with = plan_with or codec_class("auto")
        if not gathered_by_kernels(self._plan_with):
            raise ArgumentError(
                f"plan_with: codec {self._plan_with.name!r} has no method `kernels` of its own for "
                "the rows that it packs (bitslab.engine.codecs.WordRowCodec)"
            )
        self._plans: dict[tuple[torch.dtype, int], tuple[RowCodec, float, float]] = {}

    def pack(self, tensor: torch.Tensor) -> tuple[CompressedTensor, tuple[int, ...]]:
        """Pack a dense tensor of any dtype, on a CPU or GPU.

        Returns
        -------
        packed : CompressedTensor
            On the tensor's device, its dimensions in the order of `stride_order`. What is kept raw
            may share the tensor's memory.
        order : tuple of int
            That order.
        """
        order = stride_order(tensor)
        stored = tensor.detach().permute(order)
        codec = self._codec_for(stored)
        if codec is not None:
            ct = compress(stored, codec)
            if ct.nbytes <= (1 - MIN_SAVED) * ct.raw_nbytes:
                return ct, order
        return _kept_raw(stored), order

    def _codec_for(self, tensor: torch.Tensor) -> RowCodec | None:
        """Return a codec fitted to a tensor, None where it is to be kept raw."""
        if self._codec == "raw" or tensor.dim() < 2 or tensor.nbytes < MIN_PACKED_BYTES:
            return None
        row_elements = natural_row_elements(tensor.shape, tensor.dtype.itemsize)
        row_bytes = row_elements * tensor.dtype.itemsize
        if row_bytes > MAX_ROW_BYTES or row_bytes == 0:
            return None
        rows = row_map(tensor.shape, row_elements)
        sample = _sample(as_rows(tensor, rows, (row_elements,)), row_bytes)
        key = (tensor.dtype, row_bytes)
        plan = self._plans.get(key)
        if plan is not None:
            codec, share, zeros = plan[0].refitted(sample), plan[1], plan[2]
            saved = _saved_share(codec, sample)
            alike = abs(_zero_share(sample) - zeros) <= MORE_ZEROS
            if alike and share - LESS_SAVED <= saved <= share + MORE_SAVED:
                return codec if saved >= MIN_SAVED else None
        codec = fit_codec(self._plan_with, sample, {}, n_rows=rows.n_rows)
        saved = _saved_share(codec, sample)
        self._plans[key] = codec, saved, _zero_share(sample)
        return codec if saved >= MIN_SAVED else None


def _sample(rows: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """Return rows spread over all, about SAMPLE_BYTES of them, on the CPU."""
    wanted = max(MIN_SAMPLE_ROWS, SAMPLE_BYTES // row_bytes)
    if rows.shape[0] > wanted:
        step = rows.shape[0] / wanted
        picked = (torch.arange(wanted, dtype=torch.float64) * step).long()
        data = rows_as_bytes(rows, row_bytes)[picked.to(rows.device)]
        rows = data.flatten().view(rows.dtype).view(wanted, *rows.shape[1:])
    return rows.cpu()


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


def _kept_raw(tensor: torch.Tensor) -> CompressedTensor:
    """Wrap a tensor that is kept raw, without a copy where it is contiguous."""
    codec = RawCodec(tuple(tensor.shape[1:]), tensor.dtype)
    rows = dense(tensor)
    rows = rows if rows.dim() else rows.reshape(1)
    return CompressedTensor(codec, PackedRows(rows.shape[0], {"rows": rows}), tensor.shape)
