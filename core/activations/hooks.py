"""The hooks that autograd calls for each tensor that it saves, and for each that it reads."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..engine.codecs.blob import BlobCodec
from ..errors import BitslabError
from .copies import KeptView, Pass, SavedView, StoredCopy
from .executor import Executor
from .guards import is_form_of_leaf, is_plain, modified
from .host_room import HostMemoryError
from .identity import CopyTable, Span, copied_span, root_of, span_of, version_of
from .lossy import ErrorSample
from .moments import now
from .policies import HOST, KEEP, RAW, Choice, Codecs, Policy
from .read_order import ReadOrder
from .samples import sample_of
from .sites import Select, Site, is_exact, operation_of, running_module
from .verify import Verifier

#: A tensor that is left as it is, with its version. Detached: an output that its own node saved
#: would make a cycle that is never freed.
KeptTensor = tuple[torch.Tensor, int]


@dataclass
class SiteCounts:
    """What was done with the tensors of a site so far.

    Parameters
    ----------
    site : Site
        As its last tensor was.
    choice : str
        What is done with them: "keep", "raw", "host" or the name of a codec.
    reason : str
        Why.
    tensors : int
        Number that were moved.
    raw_bytes, packed_bytes : int
        Bytes of those that came back, before packing and as they crossed.
    error : ErrorSample or None
        How far a tensor was off that a lossy codec packed, at its present rate.
    """

    site: Site
    choice: str = KEEP
    reason: str = ""
    tensors: int = 0
    raw_bytes: int = 0
    packed_bytes: int = 0
    error: ErrorSample | None = None

    def decided(self, choice: Choice) -> None:
        """Take over what was decided."""
        self.choice, self.reason = choice


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
    ) -> None:
        self.sites: dict[str, SiteCounts] = {}
        self.kept_bytes_reported = False
        #: By site, the error of the first tensor of it that could not be packed.
        self.failures: dict[str, str] = {}
        self.failures_reported = False
        self._policy, self._codecs = policy, codecs
        self._min_bytes, self._select = min_bytes, select
        self._in_flight_bytes = in_flight_bytes
        self._order = ReadOrder(depth)
        self._verifier = verifier
        self._sm_budget = sm_budget
        self._copies: CopyTable[StoredCopy] = CopyTable()
        self._executors: dict[torch.device, Executor] = {}
        self._lock = threading.Lock()
        self._module_names: Mapping[nn.Module, str] = {}
        #: Types of devices whose tensors are moved; None for all.
        self._devices: set[torch.device] | None = None
        self._local = threading.local()
        self._passes = 0

    # Passes

    def watch(self, names: Mapping[nn.Module, str], devices: set[torch.device] | None) -> None:
        """Name sites by modules, and move tensors of some devices only."""
        self._module_names, self._devices = names, devices

    def enter(self, parameters: set[int]) -> Pass:
        """Begin a pass in this thread; storages in `parameters` are left alone."""
        entered = Pass(self._passes, parameters)
        self._passes += 1
        if self._codecs.rate is not None and not self.inside():
            self._codecs.rate.begin_pass()
        if not self.inside() and self._policy.begin(entered):
            for counts in list(self.sites.values()):
                counts.decided(self._choice(counts.site))
        self._entered().append(entered)
        return entered

    def inside(self) -> bool:
        """Return whether this thread is in a pass."""
        return bool(self._entered())

    def leave(self) -> None:
        """End the pass that this thread began last."""
        left = self._entered().pop()
        if left.profile is not None:
            left.profile.end_forward()

    def _entered(self) -> list[Pass]:
        try:
            found: list[Pass] = self._local.passes
        except AttributeError:
            found = self._local.passes = []
        return found

    # Saving

    def pack(self, t: torch.Tensor) -> KeptTensor | KeptView | SavedView:
        """Return what stands for a tensor in the graph."""
        version = version_of(t)
        if t.numel() * t.element_size() < self._min_bytes or not is_plain(t):
            return t.detach(), version
        passes = self._entered()
        # Threads of autograd, in which a graph of a backward pass is made, are in no pass.
        current = passes[-1] if passes else Pass(-1, set())
        storage = t.untyped_storage()
        if id(storage) in current.parameters or is_form_of_leaf(t):
            return t.detach(), version
        if self._devices is not None and t.device not in self._devices:
            return t.detach(), version
        if not t.is_contiguous() and span_of(t).nbytes < self._min_bytes:  # an expanded one
            return t.detach(), version
        return self._pack(t, version, storage, current)

    def _pack(
        self, t: torch.Tensor, version: int, storage: torch.UntypedStorage, current: Pass
    ) -> KeptTensor | KeptView | SavedView:
        module = running_module(3)
        name = current.next_name("" if module is None else self._name_of(module))
        counts = self.sites.get(name)
        if counts is not None and counts.choice == KEEP and not self._copies.knows(storage):
            site = counts.site
            if site.shape == t.shape and site.dtype == t.dtype:
                if self._select is None:
                    return t.detach(), version
                return self._keep(t, version, storage, current, name)
        root, span = root_of(t), span_of(t)
        copy = self._copies.find(storage, root, version, span)
        if copy is not None and copy.is_lossy and is_exact(t):
            copy = None  # other views of these bytes may lose bits, and this one may not
        if copy is None:
            span = copied_span(span, storage.nbytes(), t.element_size())
            nbytes = span.end - span.begin
            if counts is None or counts.site.nbytes != nbytes or counts.site.dtype != t.dtype:
                counts = self._site(name, module, t, nbytes)
            if counts.choice == KEEP:
                return self._keep(t, version, storage, current, name)
            copy = StoredCopy(name, _flat(t, storage, span), span, root, version, current)
            if not self._store(copy, counts, t):
                return t.detach(), version
            self._copies.add(storage, copy)
            current.add(copy)
            if self._select is not None:
                current.convert_kept(copy, storage)
        else:
            Executor.save_again(copy, t)
        view = SavedView(copy, t, version)
        view.name = name
        view.operation = operation_of(t)
        self._verifier.saved(view, t, current.number)
        return view

    def _keep(
        self,
        t: torch.Tensor,
        version: int,
        storage: torch.UntypedStorage,
        current: Pass,
        name: str,
    ) -> KeptTensor | KeptView:
        """Return what stands for a tensor that is kept, at least until another site moves it."""
        if self._select is None:
            return t.detach(), version
        kept = KeptView(t, version, name)
        current.keep(kept, storage)
        return kept

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

    def _store(self, copy: StoredCopy, counts: SiteCounts, t: torch.Tensor) -> bool:
        """Send a copy to the host; return whether there was room."""
        flat, codec, codec_on_host = copy.original, None, None
        assert flat is not None
        profile = copy.made_in.profile
        begin = None if profile is None else now(flat.device)
        budget = self._sm_budget
        if counts.choice == HOST:
            name = self._codecs.names[0]
            codec_on_host = functools.partial(self._codecs.for_site, name, counts.site)
        elif counts.choice != RAW:
            codec = self._codec(counts, flat, t)
            if codec is not None and budget is None:
                budget = self._policy.sm_budget(counts.choice, counts.site)
        try:
            self.executor(flat.device).store(copy, codec, budget, codec_on_host)
            if profile is not None and begin is not None:
                profile.saved(copy, counts.site, flat, begin)
        except HostMemoryError as error:
            self._tell(f"host memory for {counts.site.name!r} cannot be had ({error})")
            copy.original = None
            return False
        except torch.OutOfMemoryError as error:
            where = f"device memory to pack {counts.site.name!r} in"
            self._tell(f"{where} cannot be had ({str(error).splitlines()[0]})")
            return False
        except Exception as error:
            error.add_note(f"bitslab: while packing {counts.site.name!r}")
            raise
        counts.tensors += 1
        return True

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
            return _unchanged(*packed)
        if isinstance(packed, KeptView):
            if packed.view is None:
                assert packed.t is not None
                return _unchanged(packed.t, packed.version)
            packed = packed.view
        assert isinstance(packed, SavedView)
        packed.check_version()
        copy = packed.copy
        if copy.process != os.getpid() and copy.original is None:
            raise BitslabError(
                f"{packed.name!r}: saved by process {copy.process}, whose host memory a forked "
                "child does not have; run the backward pass there"
            )
        executor = self.executor(packed.device)
        profile = copy.made_in.profile
        begin = None if profile is None else now(packed.device)
        try:
            flat = executor.bytes_of(copy, copy.is_read(packed))
            t = packed.of(flat)
        except Exception as error:
            error.add_note(f"bitslab: while reading {packed.name!r} for the backward pass")
            raise
        self._verifier.read(packed, t)
        self._order.read(copy, self._fetch, executor.in_flight_bytes)
        if profile is not None and begin is not None:
            profile.read(copy, begin)
        return t

    def _fetch(self, copy: StoredCopy) -> None:
        # Of what is read next, which may be on another device.
        self.executor(copy.device).fetch(copy)

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


def _unchanged(t: torch.Tensor, version: int) -> torch.Tensor:
    """Return a tensor that was kept, or refuse one that was changed since."""
    if (found := version_of(t)) != version:
        raise modified(t.shape, t.dtype, found, version, "")
    return t


def _flat(t: torch.Tensor, storage: torch.UntypedStorage, span: Span) -> torch.Tensor:
    """Return bytes of a storage as ``[n]`` of the dtype of `t`; of complex ones the real parts."""
    dtype = t.dtype
    if not dtype.is_complex and not t.is_neg():  # at half the price of what follows
        size = dtype.itemsize
        return t.detach().as_strided((span.nbytes // size,), (1,), span.begin // size)
    if dtype.is_complex:
        dtype = dtype.to_real()
    size = dtype.itemsize
    with torch.no_grad():
        return torch.empty(0, dtype=dtype, device=t.device).set_(
            storage, span.begin // size, (span.nbytes // size,), (1,)
        )
