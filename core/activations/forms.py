"""Forms of saved tensors: what follows from shape, strides and dtype, found once for each site.

Training saves tensors of one form at a site, step after step.
"""

from __future__ import annotations

import torch

from .guards import no_bytes_of
from .identity import copied_span, flat_span, span_of


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
    no_bytes : torch.Tensor
        See `no_bytes_of`.
    """

    __slots__ = (
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
        self.copied = copied_span(self.span, self._storage_bytes, size)
        self.nbytes = self.copied.nbytes
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

    def fits(self, t: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Return whether a tensor has this form."""
        return (
            t.shape == self.shape
            and t.stride() == self.stride
            and t.dtype is self.dtype
            and t.storage_offset() == self._offset
            and storage.nbytes() == self._storage_bytes
            and t.device == self._device
            and t.is_conj() is self._is_conj
            and t.is_neg() is self._is_neg
        )

    def copied_bytes(self, t: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the bytes that are copied for a tensor of this form; see `flat_span`."""
        if self._is_simple:  # at half the price of what follows
            return t.detach().as_strided((self.elements,), (1,), self._first)
        return flat_span(t, storage, self.copied)

    def tensor_of(self, flat: torch.Tensor, begin: int) -> torch.Tensor:
        """Return the tensor, from bytes of its storage from `begin` on, in any shape and dtype."""
        dtype = self.dtype
        if flat.dtype is not dtype:
            flat = flat.view(-1).view(torch.uint8).view(dtype)
        offset = flat.storage_offset()
        if behind := self.begin - begin:
            offset += behind // dtype.itemsize
        t = flat.as_strided(self.shape, self.stride, offset)
        if self._is_conj:
            t = t.conj()
        return torch._neg_view(t) if self._is_neg else t
