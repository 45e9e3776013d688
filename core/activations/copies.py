"""Copies of bytes of storages: where they are, the saved tensors that are views, the passes."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from typing import Protocol

import torch

from ..engine.codecs.blob import BlobCodec, FlatCodec
from ..engine.kernels.cuda.stream import current_stream
from ..engine.memory.locks import current_process
from ..engine.tasks import ThreadTask
from ..engine.transfer import Event, Mark, StreamLane
from ..engine.versions import version_of
from .disk import Ticket
from .forms import Gaps, SavedForm
from .guards import modified, version_witness
from .host_packing import RawOnHost
from .host_room import HostMemory
from .identity import Span, root_of, span_of
from .moments import Moment
from .sites import Site, operation_of
from .traffic import SentBlob


class Profile(Protocol):
    """Sees what is saved in a pass, and what of it is read."""

    def saved(self, copy: StoredCopy, site: Site, flat: torch.Tensor, begin: Moment) -> None:
        """Record a tensor that was moved; its hook began at a moment, and ends now."""

    def read(self, copy: StoredCopy, begin: Moment) -> None:
        """Record that a copy was read; its hook began at a moment, and ends now."""

    def end_forward(self) -> None:
        """Record that the forward pass is over."""


class Pass:
    """One forward pass: what it has saved so far.

    Parameters
    ----------
    number : int
        From 0, of all passes.
    parameters : set of int
        Numbers of the storages that are left alone.

    Attributes
    ----------
    copies : dict
        By site, in order, the copy that it made, while anybody wants that.
    """

    def __init__(self, number: int, parameters: set[int]) -> None:
        self.number = number
        self.parameters = parameters
        #: What this pass is to be profiled by.
        self.profile: Profile | None = None
        self._counts: dict[str, int] = {}
        self.copies: dict[str, weakref.ref[StoredCopy]] = {}
        #: By number of its storage; those that live hold it, so that none has another's.
        self._kept: dict[int, list[weakref.ref[KeptView]]] = {}

    def next_name(self, module: str) -> str:
        """Return the name of the site at which a module saves now."""
        number = self._counts.get(module, 0)
        self._counts[module] = number + 1
        return f"{module}:{number}"

    def copy_of(self, name: str) -> StoredCopy | None:
        """Return the copy that a site made, while anybody wants it."""
        ref = self.copies.get(name)
        return None if ref is None else ref()

    def names(self) -> list[str]:
        """Return the sites that made copies, in order."""
        return list(self.copies)

    def keep(self, kept: KeptView, storage: torch.UntypedStorage) -> None:
        """Record a tensor that is kept, and becomes a view of a copy if its storage gets one."""
        self._kept.setdefault(id(storage), []).append(weakref.ref(kept))

    def convert_kept(self, copy: StoredCopy, storage: torch.UntypedStorage) -> None:
        """Make views of a copy of what was kept of a storage, so that its memory is given back."""
        if copy.is_lossy:
            return
        for ref in self._kept.pop(id(storage), ()):
            kept = ref()
            if kept is not None:
                kept.convert(copy, storage)


class Staged(Protocol):
    """The encoded bytes of a copy in device memory."""

    def blob(self) -> torch.Tensor:
        """Return them, uint8, to be decoded on torch's current stream."""


class StoredCopy:
    """Bytes of one storage that are on the host, on their way there, or on their way back.

    It is owned by the saved tensors that are views of it: what it holds is given back with the last
    of them, whether or not they were ever read.

    Parameters
    ----------
    name : str
        Of the site that saved it first.
    flat : torch.Tensor
        ``[n]`` over the bytes in the storage, of the dtype that saved it first; with `form` a
        tensor of that form that nobody else has, and of which witnesses of the version are made.
    span : Span
        Which bytes of the storage these are; with `gaps` what lies between is not meant.
    root : torch.Tensor
        The tensor whose version counter is meant; held weakly.
    version : int
        The version counter when they were saved.
    made_in : Pass
        The forward pass that it belongs to.
    form : SavedForm, optional
        Of one saved tensor that is all of these bytes in order: they come back in its shape, and
        not as ``[n]``, so that its reads make no view of them.

    Attributes
    ----------
    nbytes : int
        Bytes that it is a copy of.
    original : torch.Tensor or None
        `flat`, until the copy is on its way and device memory is wanted.
    codec : BlobCodec or None
        What encoded it; None for one that is moved raw.
    is_lossy : bool
        Whether other bits than those of the original may come back.
    host : torch.Tensor or HostPiece or None
        On the host: the bytes, or the blob at its beginning.
    stored : Event, ThreadTask or None
        When `host` is filled.
    blob : SentBlob or None
        What is known of the encoded bytes in `host`.
    on_host : RawOnHost or None
        In the place of `host`: what the CPU may pack.
    staged : Staged or None
        The encoded bytes on the device, while they are there.
    ticket : Ticket or None
        In the place of `host`: of the disk tier that has these bytes.
    reading : ThreadTask or None
        Its result are the bytes that come back from the disk, uint8 on the host.
    fetched : torch.Tensor or None
        uint8 on the device, what is coming back from the host.
    arrived : Event, ThreadTask or None
        When `fetched` is filled.
    restored : torch.Tensor or None
        ``[n]`` as `flat`, while saved tensors that were not read yet will want it.
    restored_version : int
        Its version counter when it was made.
    """

    # What most copies have not, or not yet, is an attribute of the class until then.

    codec: BlobCodec | None = None
    is_lossy = False
    #: Whether `fetched` may be too small for it: its size was not known.
    is_fetched_short = False
    #: What encodes and decodes it, where it crosses encoded.
    swap: FlatCodec | None = None
    host: HostMemory | None = None
    blob: SentBlob | None = None
    on_host: RawOnHost | None = None
    staged: Staged | None = None
    stored: Mark | None = None
    ticket: Ticket | None = None
    reading: ThreadTask[torch.Tensor] | None = None
    fetched: torch.Tensor | None = None
    arrived: Mark | None = None
    restored: torch.Tensor | None = None
    restored_version = 0
    #: Of what was restored last, while anybody uses it: the storage, where it begins there, and a
    #: witness of `restored_version`.
    shared: tuple[weakref.ref[torch.UntypedStorage], int, torch.Tensor] | None = None
    #: Where its elements lie, if there are others between them.
    gaps: Gaps | None = None
    #: The stream that computed when it was saved, and streams that may be reading the original.
    home: torch.cuda.Stream | None = None
    lanes: tuple[StreamLane, ...] = ()
    #: The stream that may be writing `fetched`, and the one that `restored` was made on.
    filling: StreamLane | None = None
    restored_on: torch.cuda.Stream | None = None
    #: Takes its bytes when it goes while they are on the host alone.
    away: deque[int] | None = None
    #: Which process has sent it.
    process: int | None = None
    _round = 0

    def __init__(
        self,
        name: str,
        flat: torch.Tensor,
        span: Span,
        root: torch.Tensor,
        version: int,
        made_in: Pass,
        form: SavedForm | None = None,
    ) -> None:
        self.name, self.form = name, form
        self.span = span
        self.nbytes = flat.nbytes
        self.root = weakref.ref(root)
        self.version = version
        self.made_in = made_in
        self.dtype, self.device = flat.dtype, flat.device
        self.elements = flat.shape[0] if form is None else form.elements
        self.original: torch.Tensor | None = flat
        #: Behind the work of GPUs that uses `host`, for the arena.
        self.events: list[Event] = []
        self._views: list[weakref.ref[SavedView]] = []

    def encoded_by(self, codec: BlobCodec, swap: FlatCodec | None) -> None:
        """Record what encoded it, and by what it is decoded."""
        self.codec, self.swap = codec, swap
        self.is_lossy = codec.error_bound is not None

    @property
    def is_here(self) -> bool:
        """Whether it is on the device, or coming, so that it need not be fetched."""
        return (
            (self.original is not None and not self.is_lossy)
            or self.fetched is not None
            or self.arrived is not None
            or self.restored is not None
            or self.staged is not None
        )

    def still_restored(self) -> torch.Tensor | None:
        """Return what was restored last, while it is here as it was.

        A backward pass may change what it is given in place: nobody else gets that.
        """
        restored = self.restored
        if restored is None:
            return None if self.shared is None else self._still_shared(*self.shared)
        if version_of(restored) == self.restored_version:
            return restored
        self.restored = self.shared = None
        return None

    def _still_shared(
        self, ref: weakref.ref[torch.UntypedStorage], offset: int, witness: torch.Tensor
    ) -> torch.Tensor | None:
        storage = ref()
        if storage is None or version_of(witness) != self.restored_version:
            return None
        found, again = torch.empty(0, dtype=self.dtype, device=self.device), witness.detach()
        if self.form is None:
            again.data = found.set_(storage, offset, (self.elements,), (1,))
        else:
            again.data = found.set_(storage, offset, self.form.shape, self.form.stride)
        return again

    def restores(self, restored: torch.Tensor) -> None:
        """Record what was restored anew.

        It is given again while somebody has a view of it, as the graph of a backward pass has:
        others are read once.
        """
        self.restored_version = version_of(restored)
        self.shared = None
        if torch.is_grad_enabled():
            offset, witness = int(restored.storage_offset()), version_witness(restored)
            self.shared = weakref.ref(restored.untyped_storage()), offset, witness

    def drop_original(self) -> None:
        """Give up the original's memory: with a `form` the tensor lives on as a witness."""
        original, self.original = self.original, None
        if original is not None and self.form is not None:
            original.data = self.form.no_bytes

    def save_again(self, t: torch.Tensor) -> None:
        """Save another view, maybe on another stream: the memory waits for that one, too."""
        if self.home is not None:
            current = current_stream(t.device)
            if current != self.home:
                t.record_stream(current)

    def use_here(self, restored: torch.Tensor, current: torch.cuda.Stream) -> None:
        """Order torch's current stream behind the one that made a tensor, where it is another."""
        made_on = self.restored_on
        if made_on is not None and made_on is not current and made_on != current:
            current.wait_stream(made_on)
            restored.record_stream(current)

    def add_view(self, view: SavedView) -> None:
        """Record a saved tensor, which holds this copy, and set the round it was read in last."""
        view.round = self._round - 1  # first: a thread that reads another view looks at all
        self._views.append(weakref.ref(view))

    def is_read(self, view: SavedView) -> bool:
        """Record that a view is read; return whether others will be read after it, this time.

        Views are read once in a backward pass, and again in the next one of a graph that is
        retained.
        """
        if view.round >= self._round:  # once more, before others were read at all
            return any(_waits(ref(), self._round) for ref in self._views)
        view.round = self._round
        if len(self._views) > 1:  # else it is the only one
            if any(_waits(ref(), self._round) for ref in self._views):
                return True
            self._views = [ref for ref in self._views if ref() is not None]
        self._round += 1
        return False

    def keep_original_until_copied(self) -> None:
        """Let the memory of the original be used again only when no stream reads it any more."""
        if self.original is not None:
            for lane in self.lanes:
                lane.keep(self.original)

    def keep_fetched_until_filled(self) -> None:
        """Let the memory of `fetched` be used again only when no stream writes it any more."""
        if self.fetched is not None and self.filling is not None:
            self.filling.keep(self.fetched)

    def __del__(self) -> None:
        # Of a graph that was dropped while its copies were under way.
        if (self.lanes or self.filling) and not sys.is_finalizing():
            if self.process == current_process():  # a forked child has no GPU
                self.keep_original_until_copied()
                self.keep_fetched_until_filled()
        if self.away is not None:
            self.away.append(self.nbytes)


def _waits(view: SavedView | None, current: int) -> bool:
    return view is not None and view.round < current


class SavedView:
    """A saved tensor, as a view of a copy of its storage.

    Parameters
    ----------
    copy : StoredCopy
        The copy.
    form : SavedForm
        Of the tensor.
    t : torch.Tensor
        The tensor.
    version : int
        Its version counter.
    name, operation : str
        Of the site that saved it, and of the node that made it.
    witness : torch.Tensor, optional
        One that there is.

    Attributes
    ----------
    witness : torch.Tensor
        See `version_witness`.
    round : int
        See `StoredCopy.is_read`.
    """

    round: int
    __slots__ = (
        "__weakref__",
        "checksum",
        "copy",
        "form",
        "name",
        "operation",
        "round",
        "version",
        "witness",
    )

    def __init__(
        self,
        copy: StoredCopy,
        form: SavedForm,
        t: torch.Tensor,
        version: int,
        name: str,
        operation: str,
        witness: torch.Tensor | None = None,
    ) -> None:
        self.copy, self.form = copy, form
        self.name, self.operation = name, operation
        self.checksum: object = None
        self.witness = version_witness(t) if witness is None else witness
        self.version = version
        copy.add_view(self)

    def check_version(self) -> None:
        """Raise torch's error when the tensor was changed in place since it was saved.

        Raises
        ------
        ModifiedInPlaceError
            When it was.
        """
        at = version_of(self.witness)
        if at != self.version:
            by = f", output of {self.operation}," if self.operation else ""
            where = f"{by} saved by {self.name!r}," if self.name else by
            raise modified(self.form.shape, self.form.dtype, at, self.version, where)


class KeptView:
    """A saved tensor of a site that was not selected: kept, but where a selected one is moved.

    As the output that a ReLU saves, which is the input that a convolution saves: kept by one of
    them, moving it for the other would save no memory.

    Parameters
    ----------
    t : torch.Tensor
        The tensor.
    version : int
        Its version counter.
    name : str
        Of the site.

    Attributes
    ----------
    t : torch.Tensor or None
        The tensor, detached: an output that its own node saved would make a cycle.
    view : SavedView or None
        What it has become.
    """

    __slots__ = ("__weakref__", "_root", "_span", "name", "operation", "t", "version", "view")

    def __init__(self, t: torch.Tensor, version: int, name: str) -> None:
        self.t: torch.Tensor | None = t.detach()
        self.version = version
        self.name, self.operation = name, operation_of(t)
        self._root, self._span = weakref.ref(root_of(t)), span_of(t)
        self.view: SavedView | None = None

    def convert(self, copy: StoredCopy, storage: torch.UntypedStorage) -> None:
        """Become a view of a copy, if it is one of these very bytes."""
        t, root = self.t, self._root()
        if t is None or root is None or t.untyped_storage() is not storage:
            return
        if copy.root() is root and copy.version == self.version and copy.span.holds(self._span):
            form = SavedForm(t, storage)
            self.view = SavedView(copy, form, t, self.version, self.name, self.operation)
            self.t = None
