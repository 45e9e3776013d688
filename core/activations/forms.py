"""Forms of saved tensors: what follows from shape, strides and dtype, found once for each site.

Training saves tensors of one form at a site, step after step.
"""

from __future__ import annotations

import math

import torch

from .guards import no_bytes_of
from .identity import base_of, copied_span, flat_span, span_of


class Gaps:
    """How elements lie in a storage with others between them, as columns of a matrix.

    Those others may have a version counter of their own, and be changed while these are copied: a
    copy of these alone is made at once. Gates of an LSTM lie so.

    Parameters
    ----------
    t : torch.Tensor
        The tensor that has these elements.

    Attributes
    ----------
    nbytes : int
        Bytes of the elements.
    """

    __slots__ = ("_dtype", "_offset", "_shape", "_stride", "nbytes")

    def __init__(self, t: torch.Tensor) -> None:
        self._dtype, self._offset = t.dtype, int(t.storage_offset())
        self._shape, self._stride = _distinct(t)
        if t.is_complex():
            self._dtype, self._offset = t.dtype.to_real(), 2 * self._offset
            self._shape = *self._shape, 2
            self._stride = *(2 * stride for stride in self._stride), 1
        self.nbytes = math.prod(self._shape) * self._dtype.itemsize

    def gathered(self, storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
        """Return a copy of the elements, ``[n]``; of complex ones the real parts."""
        with torch.no_grad():
            apart = torch.empty(0, dtype=self._dtype, device=device).set_(
                storage, self._offset, self._shape, self._stride
            )
            return apart.contiguous().view(-1)

    def spread(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements as they lie in their storage, ``[m]``; others are not set."""
        reach = 1 + sum((n - 1) * s for n, s in zip(self._shape, self._stride, strict=True))
        made = torch.empty(reach, dtype=self._dtype, device=flat.device)
        apart = flat.view(-1).view(self._dtype).view(self._shape)
        made.as_strided(self._shape, self._stride).copy_(apart)
        return made


def has_gaps(t: torch.Tensor) -> bool:
    """Return whether there are bytes between the elements of a tensor that are not its own."""
    if t.is_contiguous():
        return False
    shape, stride = _distinct(t)
    reach = 1 + sum((n - 1) * each for n, each in zip(shape, stride, strict=True))
    return math.prod(shape) < reach


def _distinct(t: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of the elements that there are: those of an expanded one once."""
    kept = [(n, stride) for n, stride in zip(t.shape, t.stride(), strict=True) if stride]
    return tuple(n for n, _ in kept), tuple(stride for _, stride in kept)


class SavedForm:
    """How a saved tensor lies in its storage, and which bytes of that are copied for it.

    Parameters
    ----------
    t : torch.Tensor
        The tensor, of one element or more.
    storage : torch.UntypedStorage
        Its storage.

    Attributes
    ----------
    shape, stride, dtype
        As the tensor has them.
    begin : int
        Its first byte in the storage.
    span : Span
        Bytes that it reaches.
    copied : Span
        Bytes that are copied for it, see `copied_span`.
    nbytes : int
        Number of these.
    elements : int
        Elements that they are.
    is_whole : bool
        Whether the tensor is these bytes, in order.
    gaps : Gaps or None
        Where the elements lie that are copied, if there are others between them.
    no_bytes : torch.Tensor
        See `no_bytes_of`.
    """

    __slots__ = (
        "_base",
        "_device",
        "_first",
        "_is_conj",
        "_is_neg",
        "_is_simple",
        "_offset",
        "_storage_bytes",
        "begin",
        "copied",
        "dtype",
        "elements",
        "gaps",
        "is_whole",
        "nbytes",
        "no_bytes",
        "shape",
        "span",
        "stride",
    )

    def __init__(self, t: torch.Tensor, storage: torch.UntypedStorage) -> None:
        self.shape, self.stride, self.dtype = t.shape, t.stride(), t.dtype
        self._offset = t.storage_offset()
        self._storage_bytes, self._device = storage.nbytes(), t.device
        self._is_conj, self._is_neg = t.is_conj(), t.is_neg()
        size = t.element_size()
        self.begin = self._offset * size
        self.span = span_of(t)
        base = base_of(t)
        self._base = None if base is None else _layout(base)
        whole = self.span if base is None else span_of(base)
        self.copied = copied_span(self.span, whole, size)
        source = t if base is None or self.copied == self.span else base
        self.gaps = Gaps(source) if has_gaps(source) else None
        if self.gaps is not None:
            self.copied = span_of(source)
        self.nbytes = self.copied.nbytes if self.gaps is None else self.gaps.nbytes
        #: Whether the copied bytes are a view of elements, and not those of real parts.
        self._is_simple = not (self.dtype.is_complex or self._is_neg)
        self._first, self.elements = self.copied.begin // size, self.nbytes // size
        self.no_bytes = no_bytes_of(self.dtype, self._device)
        self.is_whole = (
            self._is_simple
            and not self._is_conj
            and self.span == self.copied
            and t.is_contiguous()
            and t.dim() > 0
        )

    def fits(
        self, t: torch.Tensor, storage: torch.UntypedStorage, base: torch.Tensor | None
    ) -> bool:
        """Return whether a tensor, a view of `base` or of none, has this form."""
        return (
            t.shape == self.shape
            and t.stride() == self.stride
            and t.dtype is self.dtype
            and t.storage_offset() == self._offset
            and storage.nbytes() == self._storage_bytes
            and t.device == self._device
            and t.is_conj() is self._is_conj
            and t.is_neg() is self._is_neg
            and (self._base is None if base is None else self._base == _layout(base))
        )

    def copied_bytes(self, t: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the bytes that are copied for a tensor of this form; see `flat_span`."""
        if self.gaps is not None:
            return self.gaps.gathered(storage, t.device)
        if self._is_simple:  # at half the price of what follows
            return t.detach().as_strided((self.elements,), (1,), self._first)
        return flat_span(t, storage, self.copied)

    def tensor_of(self, flat: torch.Tensor, begin: int, gaps: Gaps | None = None) -> torch.Tensor:
        """Return the tensor, from bytes of its storage from `begin` on, in any shape and dtype.

        With `gaps` they are the elements alone that lie so from `begin` on.
        """
        if gaps is not None:
            flat = gaps.spread(flat)
        dtype = self.dtype
        behind = int(self.begin - begin)
        if flat.dtype is not dtype:
            flat, behind = _viewed_as(dtype, flat, behind)
        offset = flat.storage_offset()
        if behind:
            offset += behind // dtype.itemsize
        t = flat.as_strided(self.shape, self.stride, offset)
        if self._is_conj:
            t = t.conj()
        return torch._neg_view(t) if self._is_neg else t


def _layout(base: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...], int]:
    """Return what the bytes of a tensor follow from."""
    return int(base.storage_offset()), base.shape, base.stride(), base.element_size()


def _viewed_as(dtype: torch.dtype, flat: torch.Tensor, behind: int) -> tuple[torch.Tensor, int]:
    """Return bytes as ``[n]`` of another dtype, and how many of them are before a tensor's first.

    They were copied for a tensor whose elements may begin and end where none of this dtype do.
    """
    data, size = flat.view(-1).view(torch.uint8), dtype.itemsize
    skipped = behind % size
    over = (data.shape[0] - skipped) % size
    if skipped or over:
        data = data[skipped : data.shape[0] - over]
    if data.storage_offset() % size:
        data = data.clone()
    return data.view(dtype), behind - skipped
