"""Which bytes a saved tensor is: those of its storage, which torch keeps one Python object for.

The object of a storage lives as long as any tensor over it, so that it is known by the object and
never by an address, a time or a shape, which all come again.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

#: A view of this share of its root or more stands for all of it, so that parts that are saved one
#: by one, as q, k and v of one product, are one copy.
WHOLE_SHARE = 8


#: Returns the tensor that a tensor is a view of, or None. No function of Python: see `version_of`.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")


class Span(NamedTuple):
    """Bytes of a storage, from `begin` to before `end`."""

    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.end - self.begin

    def holds(self, other: Span) -> bool:
        """Return whether another span lies in this one."""
        return self.begin <= other.begin and other.end <= self.end


def root_of(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a tensor is a view of, or itself; both have one version counter."""
    base = base_of(t)
    return t if base is None else base


def span_of(t: torch.Tensor) -> Span:
    """Return the bytes of its storage that a tensor of one element or more reaches."""
    size = t.element_size()
    begin = int(t.storage_offset()) * size
    if t.is_contiguous():
        return Span(begin, begin + t.numel() * size)
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return Span(begin, begin + (last + 1) * size)


def flat_span(t: torch.Tensor, storage: torch.UntypedStorage, span: Span) -> torch.Tensor:
    """Return bytes of a storage as ``[n]`` of the dtype of `t`; of complex ones the real parts."""
    dtype = t.dtype
    if dtype.is_complex:
        dtype = dtype.to_real()
    size = dtype.itemsize
    with torch.no_grad():
        return torch.empty(0, dtype=dtype, device=t.device).set_(
            storage, span.begin // size, (span.nbytes // size,), (1,)
        )


def copied_span(span: Span, whole: Span, element_bytes: int) -> Span:
    """Return the bytes to copy for a view: all of its root, but for a small part of a large one.

    What else is in the storage has version counters of its own, and may be changed while these
    bytes are copied, as the chunks of ``unsafe_chunk`` are in an LSTM.

    Parameters
    ----------
    span : Span
        Bytes of the view.
    whole : Span
        Those of its root.
    element_bytes : int
        Of an element: what is copied begins and ends with whole ones, counted from the storage's
        first byte.
    """
    if span == whole or span.nbytes * WHOLE_SHARE < whole.nbytes:
        return span
    begin = whole.begin + -whole.begin % element_bytes
    rounded = Span(begin, whole.end - whole.end % element_bytes)
    # Strides that were set by hand reach beyond the root.
    return rounded if rounded.holds(span) else span


class Kept(Protocol):
    """A copy of bytes of a storage."""

    span: Span
    #: Whose version counter is meant, and what it was when they were copied.
    root: weakref.ref[torch.Tensor]
    version: int


K = TypeVar("K", bound=Kept)


class CopyTable(Generic[K]):
    """The copies there are of each storage; it keeps neither storages nor copies alive.

    A copy is good for all that has its version counter, a tensor and its views: other tensors over
    the storage, as those of ``unsafe_chunk`` in a GRU, count changes of their own parts alone.

    A change that torch does not count (through ``.data``, or by a foreign kernel) between two
    saves of one tensor is not seen here, as torch itself does not see it; `verify` does.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[weakref.ref[torch.UntypedStorage], list[weakref.ref[K]]]] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Return whether there may be a copy of a storage."""
        return id(storage) in self._copies

    def find(
        self, storage: torch.UntypedStorage, root: torch.Tensor, version: int, span: Span
    ) -> K | None:
        """Return a copy of some bytes of a storage as they are since `version` of `root`."""
        found = self._copies.get(id(storage))
        if found is None or found[0]() is not storage:
            return None
        for ref in found[1]:
            copy = ref()
            if (
                copy is not None
                and copy.version == version
                and copy.root() is root
                and copy.span.holds(span)
            ):
                return copy
        return None

    def add(self, storage: torch.UntypedStorage, copy: K) -> None:
        """Record a copy of bytes of a storage."""
        key = id(storage)
        found = self._copies.get(key)
        if found is None or found[0]() is not storage:
            ref = _StorageRef(storage, _remove)
            ref.copies, ref.key = self._copies, key
            self._copies[key] = ref, [weakref.ref(copy)]
            return
        refs = found[1]
        refs[:] = [each for each in refs if each() is not None]
        refs.append(weakref.ref(copy))


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """A reference that knows where it is recorded: a closure for each storage takes longer."""

    __slots__ = ("copies", "key")

    copies: dict[int, Any]
    key: int


def _remove(ref: _StorageRef) -> None:
    """Remove a storage that is gone, in whatever thread it is collected."""
    found = ref.copies.get(ref.key)
    if found is not None and found[0] is ref:  # not of a later one with this number
        ref.copies.pop(ref.key, None)
