"""TensorPacker: packs the weights of a model one by one, or keeps them raw."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..compressed import CompressedTensor, compress
from ..dtypes import dense
from ..engine.codecs import PackedRows, RawCodec, RowCodec, codec_class
from ..engine.codecs.base import elements, gathered_by_kernels, rows_as_bytes
from ..engine.codecs.words import WordRowCodec
from ..engine.kernels.format import MAX_ROW_BYTES
from ..engine.row_map import as_rows, natural_row_elements, row_map
from ..engine.transfer import RowUploader
from ..errors import ArgumentError
from .codec_choice import CodecChooser
from .records import stride_order

CodecName = Literal["auto", "raw"]

#: Tensors of fewer bytes, norms and biases mostly, are kept raw: their profile would cost what they
#: save.
MIN_PACKED_BYTES = 4 << 10
#: Below this share of bytes saved, decoding costs more than the link gains.
MIN_SAVED = 0.02


@dataclass(frozen=True, eq=False)
class PackingPlan:
    """A tensor whose codec is chosen.

    Parameters
    ----------
    stored : torch.Tensor
        The tensor, its dimensions in the order in which it is packed; it shares the memory.
    order : tuple of int
        That order; see `stride_order`.
    codec : RowCodec or None
        What packs it; None keeps it raw.
    """

    stored: torch.Tensor
    order: tuple[int, ...]
    codec: RowCodec | None

    @property
    def uploadable(self) -> bool:
        """Whether it is in host memory and a GPU can pack it."""
        codec = self.codec
        on_gpu = isinstance(codec, WordRowCodec) and "cuda" in codec.device_types
        return on_gpu and self.stored.device.type == "cpu" and self.stored.numel() > 0

    def packed(self) -> CompressedTensor:
        """Return it packed, on its device; what is kept raw may share its memory."""
        if self.codec is not None:
            ct = compress(self.stored, self.codec)
            if _pays(ct):
                return ct
        return self.raw()

    def packed_by(self, uploader: RowUploader) -> CompressedTensor:
        """Return it packed on a GPU, or raw in host memory; for one that is `uploadable`.

        The bytes are those of `packed`.
        """
        codec, stored = self.codec, self.stored
        assert isinstance(codec, WordRowCodec)
        rows = as_rows(stored, row_map(stored.shape, elements(codec.row_shape)), codec.row_shape)
        with closing(uploader.pieces(rows_as_bytes(rows, codec.row_bytes))) as pieces:
            ct = CompressedTensor(codec, codec.encode_pieces(pieces), stored.shape)
        return ct if _pays(ct) else self.raw()

    def raw(self) -> CompressedTensor:
        """Return it as it is, without a copy where it is contiguous."""
        codec = RawCodec(tuple(self.stored.shape[1:]), self.stored.dtype)
        rows = dense(self.stored)
        rows = rows if rows.dim() else rows.reshape(1)
        return CompressedTensor(codec, PackedRows(rows.shape[0], {"rows": rows}), self.stored.shape)


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
        cls = plan_with or codec_class("auto")
        if not gathered_by_kernels(cls):
            raise ArgumentError(
                f"plan_with: codec {cls.name!r} has no method `kernels` of its own for "
                "the rows that it packs (bitslab.engine.codecs.WordRowCodec)"
            )
        if cls.error_bound is not None:
            raise ArgumentError(
                f"plan_with: codec {cls.name!r} is lossy, accepted are codecs that keep every bit"
            )
        self._chooser = CodecChooser(cls)

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
        planned = self.plan(tensor)
        return planned.packed(), planned.order

    def plan(self, tensor: torch.Tensor, device: torch.device | None = None) -> PackingPlan:
        """Choose the codec of a dense tensor of any dtype, on a CPU or GPU.

        Parameters
        ----------
        tensor : torch.Tensor
            The tensor.
        device : torch.device, optional
            Where codecs are planned; where the tensor is when left out.
        """
        order = stride_order(tensor)
        stored = tensor.detach().permute(order)
        return PackingPlan(stored, order, self._codec_for(stored, device))

    def _codec_for(self, tensor: torch.Tensor, device: torch.device | None) -> RowCodec | None:
        """Return a codec fitted to a tensor, None where it is to be kept raw."""
        if self._codec == "raw" or tensor.dim() < 2 or tensor.nbytes < MIN_PACKED_BYTES:
            return None
        row_elements = natural_row_elements(tensor.shape, tensor.dtype.itemsize)
        row_bytes = row_elements * tensor.dtype.itemsize
        if row_bytes > MAX_ROW_BYTES or row_bytes == 0:
            return None
        rows = row_map(tensor.shape, row_elements)
        codec, saved = self._chooser.choose(as_rows(tensor, rows, (row_elements,)), device)
        return codec if saved >= MIN_SAVED else None


def _pays(ct: CompressedTensor) -> bool:
    return ct.nbytes <= (1 - MIN_SAVED) * ct.raw_nbytes
