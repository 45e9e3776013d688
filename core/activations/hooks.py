"""The hooks that autograd calls for each tensor that it saves, and for each that it reads."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Mapping

import torch
from torch import nn

from ..engine.codecs.blob import BlobCodec
from ..engine.versions import version_of
from ..errors import BitslabError, add_note
from .copies import KeptView, SavedView, StoredCopy
from .executor import Executor
from .forms import SavedForm
from .guards import is_computed_again, is_form_of_leaf, is_plain, unchanged
from .host_room import HostMemoryError
from .identity import CopyTable, Span, base_of, span_of
from .local_copies import LocalCopy, PackedCopy, UnsizedCopies, packed_copy, replayed_copy
from .lossy import ErrorSample
from .measured_pass import read_by
from .moments import now
from .pass_record import Begun, NamedView, PassRecord, record_of
from .policies import CHECKPOINT, HOST, KEEP, RAW, REPLAY, Choice, Codecs, Policy
from .read_order import ReadOrder
from .samples import sample_of
from .site_counts import SiteCounts
from .sites import Select, Site, is_exact, operation_of, running_module
from .tiers import Tiers
from .verify import Verifier

#: A tensor that is left as it is, with its version. Detached: an output that its own node saved
#: would make a cycle that is never freed.
KeptTensor = tuple[torch.Tensor, int]

_graph_task = torch._C._current_graph_task_id


class SavedTensorHooks:
    """Packs and unpacks saved tensors.

    Parameters
    ----------
    policy : Policy
        What to do with the tensors of a site; asked when a site is new or another, and when the
        policy says so at the beginning of a pass.
    codecs : Codecs
        The codecs.
    min_bytes : int
        Smaller tensors are kept.
    select : callable or None
        Which sites are moved; all when None.
    in_flight_bytes, depth
        See `Executor` and `ReadOrder`.
    verifier : Verifier
        Compares what comes back with what was saved.
    sm_budget : int, optional
        Multiprocessors that encoding takes at most, in the place of what the policy says.
    tiers : Tiers, optional
        Where tensors are moved to; to host memory when left out.
    """

    def __init__(
        self,
        policy: Policy,
        codecs: Codecs,
        *,
        min_bytes: int,
        select: Select | None,
        in_flight_bytes: int | None,
        depth: int,
        verifier: Verifier,
        sm_budget: int | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        self._tiers = tiers or Tiers()
        self.sites: dict[str, SiteCounts] = {}
        self.kept_bytes_reported = self.failures_reported = False
        #: By site, the error of the first tensor of it that could not be packed.
        self.failures: dict[str, str] = {}
        #: By site, the form of what it saved last.
        self._forms: dict[str, SavedForm] = {}
        self._policy, self._codecs = policy, codecs
        self._min_bytes, self._select = min_bytes, select
        self._in_flight_bytes, self._order = in_flight_bytes, ReadOrder(depth)
        self._verifier, self._sm_budget = verifier, sm_budget
        self._copies: CopyTable[StoredCopy] = CopyTable()
        self._executors: dict[torch.device, Executor] = {}
        self._lock, self._local = threading.Lock(), threading.local()
        self._module_names: Mapping[nn.Module, str] = {}
        #: Types of devices whose tensors are moved; None for all.
        self._devices: set[torch.device] | None = None
        self._passes, self._unsized = 0, UnsizedCopies()
        #: By micro-batch, its last pass.
        self._last_of: dict[int | None, weakref.ref[PassRecord]] = {}

    # Passes

    def watch(self, names: Mapping[nn.Module, str], devices: set[torch.device] | None) -> None:
        """Name sites by modules, and move tensors of some devices only."""
        self._module_names, self._devices = names, devices

    def enter(self, parameters: set[int]) -> PassRecord:
        """Begin a pass in this thread; storages in `parameters` are left alone."""
        entered = PassRecord(self._passes, parameters, self.micro_batch)
        self._last_of[self.micro_batch] = weakref.ref(entered)
        self._passes += 1
        if self._codecs.rate is not None and not self.inside():
            self._codecs.rate.begin_pass()
        if not self.inside() and self._policy.begin(entered):
            for counts in list(self.sites.values()):
                counts.decided(self._choice(counts.site))
        entered.module_begins = self._module_begins
        self._entered().append(entered)
        return entered

    @property
    def passes(self) -> int:
        """Number of passes that were begun."""
        return self._passes

    def inside(self) -> bool:
        """Return whether this thread is in a pass."""
        return bool(self._entered())

    def leave(self) -> None:
        """End the pass that this thread began last."""
        left = self._entered().pop()
        if left.profile is not None:
            left.profile.end_forward()
        if not self.inside():
            self._unsized.settle(behind=0)  # the backward pass has the memory of all originals
            self._policy.ended_forward(left)

    @property
    def micro_batch(self) -> int | None:
        """The micro-batch that this thread works at, as the training loop said."""
        found: int | None = getattr(self._local, "micro_batch", None)
        return found

    @micro_batch.setter
    def micro_batch(self, number: int | None) -> None:
        self._local.micro_batch = number

    def begin_backward(self) -> None:
        """Begin what is to be there first, of the last pass of this thread's micro-batch."""
        ref = self._last_of.get(self.micro_batch)
        record = None if ref is None else ref()
        if record is not None:
            self._begin(record, record.begin_backward())

    def _entered(self) -> list[PassRecord]:
        try:
            found: list[PassRecord] = self._local.passes
        except AttributeError:
            found = self._local.passes = []
        return found

    # Saving

    def pack(self, t: torch.Tensor) -> KeptTensor | KeptView | SavedView:
        """Return what stands for a tensor in the graph."""
        version = version_of(t)
        if t.numel() * t.element_size() < self._min_bytes or not is_plain(t):
            return t.detach(), version
        try:
            passes = self._local.passes
        except AttributeError:
            passes = self._entered()
        # Threads of autograd, in which a graph of a backward pass is made, are in no pass.
        current = passes[-1] if passes else PassRecord(-1, set())
        storage = t.untyped_storage()
        if id(storage) in current.parameters or is_form_of_leaf(t):
            return t.detach(), version
        if self._devices is not None and t.device not in self._devices:
            return t.detach(), version
        if not t.is_contiguous() and span_of(t).nbytes < self._min_bytes:  # an expanded one
            return t.detach(), version
        if _graph_task() != -1 and is_computed_again():
            return t.detach(), version
        return self._pack(t, version, storage, current)

    def _pack(
        self, t: torch.Tensor, version: int, storage: torch.UntypedStorage, current: PassRecord
    ) -> KeptTensor | KeptView | SavedView:
        module = running_module(3)
        name = current.next_name("" if module is None else self._name_of(module))
        counts = self.sites.get(name)
        if counts is not None and counts.choice == KEEP and not self._copies.knows(storage):
            site = counts.site
            if site.shape == t.shape and site.dtype == t.dtype:
                if self._select is None and current.watcher is None and current.plan is None:
                    return t.detach(), version  # nobody sees its read
                return self._keep(t, version, storage, current, counts)
        form, base = self._forms.get(name), base_of(t)
        if form is None or not form.fits(t, storage, base):
            form = self._forms[name] = SavedForm(t, storage)
        root = t if base is None else base
        copy = self._copies.find(storage, root, version, form.span)
        if copy is not None and copy.is_lossy and is_exact(t):
            copy = None  # other views of these bytes may lose bits, and this one may not
        node = t.grad_fn
        operation = "" if node is None else node.name()
        witness = None
        if copy is None:
            span, nbytes = form.copied, form.nbytes
            if counts is None or counts.site.nbytes != nbytes or counts.site.dtype != t.dtype:
                counts = self._site(name, module, t, nbytes)
            if counts.choice in (KEEP, CHECKPOINT):  # what a checkpoint is computed from
                return self._keep(t, version, storage, current, counts)
            local = counts.choice == REPLAY or counts.tier == "device"
            whole = None
            if form.is_whole and not local and counts.choice != HOST and current.profile is None:
                executor = self._executors.get(t.device) or self.executor(t.device)
                if executor.copies_by_address:
                    whole = form
            flat = t.detach() if whole else form.copied_bytes(t, storage)
            if local:
                copy = self._local_copy(counts, flat, span, root, version, current)
            if copy is not None:
                if current.watcher is not None:
                    current.watcher.held(storage)
            else:
                if local and counts.tier == "device" and current.falls_back_to_keeping:
                    return self._keep(t, version, storage, current, counts)
                copy = StoredCopy(name, flat, span, root, version, current, whole)
                if not self._store(copy, counts, t, current):
                    return self._keep(t, version, storage, current, counts)
                current.copies[name] = weakref.ref(copy)
                witness = None if whole is None else flat
            if form.gaps is not None:
                copy.gaps = form.gaps
            self._copies.add(storage, copy)
            if self._select is not None:
                current.convert_kept(copy, storage)
        else:
            copy.save_again(t)
            if current.watcher is not None:
                current.watcher.again(copy, name, now(t.device))
        view = SavedView(copy, form, t, version, name, operation, witness)
        if self._verifier.every:
            self._verifier.saved(view, t, current.number)
        return view

    def _keep(
        self,
        t: torch.Tensor,
        version: int,
        storage: torch.UntypedStorage,
        current: PassRecord,
        counts: SiteCounts,
    ) -> KeptTensor | KeptView:
        """Return what stands for a tensor that is kept, at least until another site moves it."""
        name = counts.site.name
        if current.names_kept(name):
            begin = None if current.watcher is None else now(t.device)
            self._release_planned(current, counts.site)
            named = NamedView(t, version, name, current)
            if self._select is not None:
                current.keep(named, storage)
            if current.watcher is not None and begin is not None:
                flat = SavedForm(t, storage).copied_bytes(t, storage)
                current.watcher.kept(named, counts.site, t, flat, begin)
            return named
        self._release_planned(current, counts.site)
        if self._select is None:
            return t.detach(), version
        kept = KeptView(t, version, name)
        current.keep(kept, storage)
        return kept

    def _local_copy(
        self,
        counts: SiteCounts,
        flat: torch.Tensor,
        span: Span,
        root: torch.Tensor,
        version: int,
        current: PassRecord,
    ) -> LocalCopy | None:
        """Return a copy that remains on the device in another form; None where there is none."""
        name = counts.site.name
        copy: LocalCopy | None = None
        if counts.choice == REPLAY:
            signature = None if current.plan is None else current.plan.replays.get(name)
            copy = replayed_copy(name, flat, span, root, version, current, signature)
        elif counts.tier == "device":
            self._unsized.settle()
            codec = self._codecs.for_site(counts.choice, counts.site, flat)
            if codec is not None and codec.error_bound is None:
                expected = self._policy.packed_bytes(name) * flat.nbytes / counts.site.nbytes
                try:
                    copy = packed_copy(name, flat, span, root, version, current, codec, expected)
                except torch.OutOfMemoryError as error:
                    self._tell_no_memory(counts, error)
                if isinstance(copy, PackedCopy):
                    self._unsized.add(copy)
                    if current.watcher is not None and copy.packed is not None:
                        current.watcher.held(copy.packed.untyped_storage())
        if copy is not None:
            counts.tensors += 1
            self._release_planned(current, counts.site)
        return copy

    def _release_planned(self, current: PassRecord, site: Site) -> None:
        """Wait for copies on their way out, where a plan says so behind what does not leave."""
        if current.plan is not None:
            self._bound(site.device, current.plan.in_flight_bytes.get(site.name))

    def _bound(self, device: torch.device, nbytes: int | None) -> None:
        """Wait until copies on their way out of a device take so much at most; None: as it is."""
        executor = self._executors.get(device)
        if nbytes is not None and executor is not None:
            executor.bound_in_flight(nbytes, now=True)

    def _site(
        self, name: str, module: nn.Module | None, t: torch.Tensor, nbytes: int
    ) -> SiteCounts:
        """Record a site, or one whose tensors have become others, and decide what to do."""
        kind = None if module is None else type(module)
        exact = is_exact(t)
        site = Site(name, kind, operation_of(t), t.shape, t.dtype, nbytes, t.device, exact)
        counts = self.sites.get(name)
        if counts is None:
            counts = self.sites[name] = SiteCounts(site)
        counts.site = site
        counts.decided(self._choice(site))
        return counts

    def _choice(self, site: Site) -> Choice:
        if self._select is not None and not self._select(site):
            return Choice(KEEP, "Kept: not selected.")
        return self._policy.decide(site)

    def _store(
        self, copy: StoredCopy, counts: SiteCounts, t: torch.Tensor, current: PassRecord
    ) -> bool:
        """Send a copy to the host; return whether there was room."""
        flat, codec, codec_on_host = copy.original, None, None
        assert flat is not None
        choice, tier = counts.choice, counts.tier
        profile = current.profile
        begin = None if profile is None else now(copy.device)
        budget = self._sm_budget
        if choice == HOST:
            name = self._codecs.names[0]
            codec_on_host = functools.partial(self._codecs.for_site, name, counts.site)
        elif choice not in (RAW, REPLAY) and tier != "device":
            codec = self._codec(counts, flat, t)
            if codec is not None and budget is None:
                budget = self._policy.sm_budget(counts.choice, counts.site)
        try:
            executor = self._executors.get(copy.device) or self.executor(copy.device)
            # The bytes on their way out behind a site, where a plan says how many may be.
            if current.plan is not None or current.serial:
                executor.bound_in_flight(current.in_flight_bytes(counts.site.name))
            elif executor.is_planned:
                executor.bound_in_flight(None)
            tier = None if tier == "device" else tier
            if not executor.store(copy, codec, budget, codec_on_host, tier=tier):
                copy.original = None
                return False
            if profile is not None and begin is not None:
                profile.saved(copy, counts.site, flat, begin)
        except HostMemoryError as error:
            self._tell(f"host memory for {counts.site.name!r} cannot be had ({error})")
            copy.original = None
            return False
        except torch.OutOfMemoryError as error:
            self._tell_no_memory(counts, error)
            return False
        except Exception as error:
            add_note(error, f"bitslab: while packing {counts.site.name!r}")
            raise
        counts.tensors += 1
        return True

    def _tell_no_memory(self, counts: SiteCounts, error: BaseException) -> None:
        where = f"device memory to pack {counts.site.name!r} in"
        self._tell(f"{where} cannot be had ({str(error).splitlines()[0]})")

    def _codec(self, counts: SiteCounts, flat: torch.Tensor, t: torch.Tensor) -> BlobCodec | None:
        """Return the codec of a site's tensor; None where it crosses raw."""
        codec = self._codecs.for_site(counts.choice, counts.site, flat)
        if codec is None:
            if self._codecs.is_fitting(counts.choice, counts.site, flat.dtype):
                return None
            why = f"Raw: {counts.choice} takes no {flat.dtype} on {flat.device}."
            counts.decided(Choice(RAW, why))
        elif codec.error_bound is not None:
            if is_exact(t):  # another tensor than the one that the site was decided by
                return None
            if counts.error is None or counts.error.codec is not codec:
                counts.error = ErrorSample(codec, sample_of(flat))
        return codec

    def _tell(self, what: str) -> None:
        if not self.kept_bytes_reported:
            self.kept_bytes_reported = True
            warnings.warn(
                f"bitslab: {what}; saved tensors are kept on the device where that is so",
                UserWarning,
                stacklevel=5,
            )

    def _name_of(self, module: nn.Module) -> str:
        name = self._module_names.get(module)
        return type(module).__name__ if name is None else name

    # Reading

    def unpack(self, packed: KeptTensor | KeptView | SavedView) -> torch.Tensor:
        """Return a saved tensor.

        Raises
        ------
        ModifiedInPlaceError
            When it was changed in place since it was saved, as torch does without hooks.
        """
        if type(packed) is tuple:
            kept, version = packed
            return kept if version_of(kept) == version else unchanged(kept, version)
        if type(packed) is not SavedView and isinstance(packed, KeptView):
            if packed.view is None:
                if isinstance(packed, NamedView):
                    self._read_kept(packed)
                assert packed.t is not None
                return unchanged(packed.t, packed.version)
            packed = packed.view
        assert type(packed) is SavedView
        if version_of(packed.witness) != packed.version:
            packed.check_version()  # which raises
        copy = packed.copy
        # In this order: to ask an abstract class takes long.
        if type(copy) is not StoredCopy and isinstance(copy, LocalCopy):
            return self._read_local(packed, copy)
        executor = self._executors.get(copy.device) or self.executor(copy.device)
        if copy.original is None and copy.process != executor.process:
            raise BitslabError(
                f"{packed.name!r}: saved by process {copy.process}, whose host memory a forked "
                "child does not have; run the backward pass there"
            )
        record = copy.made_in
        assert isinstance(record, PassRecord)
        profile, watcher = record.profile, record.watcher
        begin = None if profile is None else now(copy.device)
        # What a replay reads is read once more by its own operation.
        tried = watcher is not None and watcher.replay_reads(packed.name)
        replaying = tried or bool(getattr(self._local, "replays", 0))
        try:
            if not replaying and record.plan is not None:
                self._begin_after(record, copy.name, copy.device, copy)
            flat = executor.bytes_of(copy, True if replaying else copy.is_read(packed))
            form = packed.form
            t = flat if form is copy.form else form.tensor_of(flat, copy.span.begin, copy.gaps)
        except Exception as error:
            add_note(error, f"bitslab: while reading {packed.name!r} for the backward pass")
            raise
        if watcher is not None:
            watcher.held(flat.untyped_storage())
        if packed.checksum is not None:
            self._verifier.read(packed, t)
        if replaying:
            read_by(profile, copy, begin, True)
            return t
        if record.plan is None and not record.serial:
            ahead = None if self._tiers.disk is None else self._read_ahead
            fetch = executor.fetch if len(self._executors) == 1 else self._fetch
            self._order.read(copy, fetch, executor.in_flight_bytes, ahead)
        if profile is not None and begin is not None:
            profile.read(copy, begin)
        return t

    def _read_kept(self, packed: NamedView) -> None:
        record = packed.made_in
        watcher = record.watcher
        if watcher is not None and watcher.replay_reads(packed.name):
            return
        if self._replays_now():
            return
        if watcher is not None:
            watcher.read_kept(packed)
        assert packed.t is not None
        self._begin_after(record, packed.name, packed.t.device)

    def _read_local(self, packed: SavedView, copy: LocalCopy) -> torch.Tensor:
        """Return a saved tensor that remained on the device in another form."""
        record = record_of(copy)
        replaying = self._replays_now()
        if not replaying:
            self._begin_after(record, copy.name, copy.device)
        begin = None if record.profile is None else now(copy.device)
        self._local.replays = getattr(self._local, "replays", 0) + 1
        try:
            flat = copy.bytes_of(True if replaying else copy.is_read(packed))
            t = packed.form.tensor_of(flat, copy.span.begin, copy.gaps)
        except Exception as error:
            add_note(error, f"bitslab: while reading {packed.name!r} for the backward pass")
            raise
        finally:
            self._local.replays -= 1
        if record.watcher is not None:
            record.watcher.held(flat.untyped_storage())
            read_by(record.profile, copy, begin, replaying)
        self._verifier.read(packed, t)
        return t

    def _replays_now(self) -> bool:
        """Return whether this thread computes a saved tensor again."""
        return bool(getattr(self._local, "replays", 0))

    def _begin_after(
        self, record: PassRecord, name: str, device: torch.device, own: StoredCopy | None = None
    ) -> None:
        """Begin what a read lets begin, behind the fetch of its own copy; make room before."""
        begun = record.begins_after(name)
        if begun.in_flight_bytes is not None:
            self._bound(device, begun.in_flight_bytes)
        if own is not None and begun.fetches:
            self._fetch(own)
        if begun.reads or begun.fetches:
            self._begin(record, begun)

    def _module_begins(self, record: PassRecord, name: str, device: torch.device) -> None:
        """Begin what may begin when a checkpointed module is computed again."""
        try:
            with torch.no_grad():
                self._begin_after(record, name, device)
        except Exception as error:
            add_note(error, f"bitslab: while {name!r} began to be computed again")
            raise

    def _begin(self, record: PassRecord, begun: Begun) -> None:
        """Begin reads of a disk, and fetches, which are tried again where a read is not over."""
        for each in begun.reads:
            self._read_ahead(each)
        for each in begun.fetches:
            self._fetch(each)
            if not each.is_here:
                record.is_late(each)
            if record.watcher is not None and each.fetched is not None:
                record.watcher.held(each.fetched.untyped_storage())

    def _fetch(self, copy: StoredCopy) -> None:
        # Of what is read next, which may be on another device.
        (self._executors.get(copy.device) or self.executor(copy.device)).fetch(copy)

    def _read_ahead(self, copy: StoredCopy) -> None:
        self.executor(copy.device).read_ahead(copy)

    def executor(self, device: torch.device) -> Executor:
        """Return what moves tensors of a device."""
        found = self._executors.get(device)
        if found is None:
            with self._lock:
                found = self._executors.get(device)
                if found is None:
                    found = Executor(
                        device,
                        self._in_flight_bytes,
                        self._came_back,
                        self._failed,
                        self._policy.observed,
                        self._tiers,
                    )
                    self._executors[device] = found
        return found

    def executors(self) -> list[Executor]:
        """Return what has moved tensors so far."""
        return list(self._executors.values())

    def _failed(self, name: str, error: BaseException) -> None:
        """Count a tensor that a thread could not encode or copy, and tell of the first."""
        self.failures.setdefault(name, f"{type(error).__name__}: {error}")
        if len(self.failures) == 1 and not self.failures_reported:
            self.failures_reported = True
            warnings.warn(
                f"bitslab: {name!r} could not be packed ({self.failures[name]}); its tensors are "
                "kept on the device where that is so",
                UserWarning,
                stacklevel=2,
            )

    def _came_back(self, site: str, raw_bytes: int, packed_bytes: int) -> None:
        counts = self.sites.get(site)
        if counts is not None:
            counts.raw_bytes += raw_bytes
            counts.packed_bytes += packed_bytes

    def close(self) -> None:
        """End threads; what was saved can still be read."""
        self._codecs.close()
        for executor in self.executors():
            executor.close()
