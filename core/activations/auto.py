"""``policy="auto"``: raw or packed, decided from profiles by the advisor's cost model, and anew."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from ..engine.advisor import (
    Decision,
    DecisionHistory,
    SiteRecord,
    SwapLimits,
    SwapLink,
    TimeModel,
    decide,
)
from ..errors import BitslabError
from .disk_share import disk_link, required_note, sites_for_disk, with_place
from .pass_record import PassRecord
from .policies import RAW, Choice, Codecs
from .profile import PassProfile
from .sites import Site
from .tiers import Tier, Tiers
from .time_models import TimeModels
from .traffic import SentBlob

#: The first pass compiles kernels and is slow; this one is profiled too, whatever `every` is.
WARM_PASS = 2
#: Where `every` is not given: passes from one profile to the next at least, and how often that is
#: doubled at most. Doubled, so that ranks whose times differ a little profile the same passes,
#: unless what profiles take lies between them.
PROFILE_EVERY, MOST_DOUBLINGS = 200, 4
#: Share of the passes' time that profiles and the decisions by them are to take of the host: a
#: thousandth with what is not counted, some sixth of it.
PROFILE_SHARE = 0.8e-3
#: Profiles, and passes between them, whose median times count.
TIMED_PROFILES, TIMED_PASSES = 3, 9


def _median(seconds: Iterable[float]) -> float:
    # The module that has one imports decimal, as large as this package.
    ordered = sorted(seconds)
    return ordered[len(ordered) // 2]


class AutoPolicy:
    """Decides from what a profile of a pass shows, by measured times of codecs and link.

    Parameters
    ----------
    codecs : Codecs
        What may be used.
    every : int or None
        Of so many passes one is profiled; None: as `interval` says.
    limits : callable
        Returns how many bytes of a device may be under way, and how many copies ahead.

    Attributes
    ----------
    history : DecisionHistory
        What was decided at each profile.

    Notes
    -----
    The first profile is that of the first pass, in which all tensors cross raw. A profile is
    evaluated when a pass begins and what it saved has been read or dropped.
    """

    def __init__(
        self, codecs: Codecs, every: int | None, limits: Callable[[torch.device], SwapLimits]
    ) -> None:
        self._codecs, self._every, self._limits = codecs, every, limits
        self.history = DecisionHistory()
        self._lock = threading.Lock()
        self._passes = 0
        self._profiles = 0
        self._profiled: PassRecord | None = None
        self._decisions: dict[str, Decision] = {}
        self._tiers = Tiers()
        self._disk_note = ""
        #: By site, where its tensors go, where there is a disk.
        self._places: dict[str, Tier] = {}
        #: What each site's codecs were chosen and fitted by.
        self._fitted: dict[str, SiteRecord] = {}
        self._models = TimeModels(codecs)
        self._failure_reported = False
        #: As `begin_epoch` was called with, and that of the pass that is profiled.
        self._epoch: int | None = None
        self._profiled_epoch: int | None = None
        self._epoch_began = False
        #: What profiles and passes took of the host, and when the last pass began.
        self._profile_s: deque[float] = deque(maxlen=TIMED_PROFILES)
        self._pass_s: deque[float] = deque(maxlen=TIMED_PASSES)
        self._began_s: float | None = None

    def decide(self, site: Site) -> Choice:
        """Return what is done with the tensors of a site, as decided last."""
        found = self._decisions.get(site.name)
        if found is None:
            return Choice(RAW, "Raw: not profiled yet.")
        return Choice(found.codec or RAW, found.reason, self._places.get(site.name))

    def use_tiers(self, tiers: Tiers) -> None:
        """Say whether there is a disk behind the host, whose rates then count."""
        self._tiers = tiers

    def begin(self, entered: PassRecord) -> bool:
        """Begin a pass; return whether sites are to be decided anew."""
        with self._lock:
            number = self._passes
            self._passes += 1
            changed = False
            began_s = time.perf_counter()
            last = self._profiled
            if last is not None:
                profile = last.profile
                changed = self._evaluate(last)
                # The first one compiles and measures; one whose graph was dropped is no example.
                if isinstance(profile, PassProfile) and changed and self._profiles > 1:
                    self._profile_s.append(profile.host_s + time.perf_counter() - began_s)
            elif self._began_s is not None:
                self._pass_s.append(began_s - self._began_s)
            self._began_s = time.perf_counter()
            due = number % (self._every or self.interval) == 0
            due |= number == WARM_PASS or self._epoch_began
            # Codecs that were not fitted to a GPU's tensors at the last profile: soon, then later.
            due |= self._codecs.was_fitting and number & (number - 1) == 0
            if self._profiled is None and (due or not self._profiles):
                self._codecs.was_fitting = False
                entered.profile = PassProfile(self._codecs)
                self._profiled, self._profiled_epoch = entered, self._known_epoch()
                self._epoch_began = False
            return changed

    def _known_epoch(self) -> int | None:
        """Return the epoch that passes are counted by, or that `begin_epoch` was called with."""
        rate = self._codecs.rate
        return self._epoch if rate is None or rate.options.epoch_passes is None else rate.epoch

    @property
    def interval(self) -> int:
        """Passes from one profile to the next where `every` is not given."""
        interval = PROFILE_EVERY
        if self._profile_s and self._pass_s:
            limit_s = PROFILE_SHARE * _median(self._pass_s)
            profile_s = _median(self._profile_s)
            while profile_s > interval * limit_s and interval < PROFILE_EVERY << MOST_DOUBLINGS:
                interval *= 2
        return interval

    def ended_forward(self, left: PassRecord) -> None:
        """Do nothing: the profile has recorded it."""

    def notes(self) -> list[str]:
        """Return how often passes are profiled, and what a disk would have to carry."""
        found = [self._disk_note] if self._disk_note else []
        if self._profile_s and self._pass_s:
            profile_ms, pass_ms = (
                1e3 * _median(seconds) for seconds in (self._profile_s, self._pass_s)
            )
            found.append(
                f"One of {self._every or self.interval} passes is profiled, which takes "
                f"{profile_ms:.3g} ms of the host; a pass takes {pass_ms:.3g}."
            )
        return found

    def packed_bytes(self, site: str) -> float:
        """Return 0: nothing is packed on the device."""
        return 0.0

    def begin_epoch(self, epoch: int) -> None:
        """Profile the next pass."""
        self._epoch, self._epoch_began = epoch, True

    def observed(self, blob: SentBlob, decodes: bool, seconds: float) -> None:
        """Correct the model of a device by what a real swap took there."""
        self._models.observed(blob, decodes, seconds)

    def _evaluate(self, profiled: PassRecord) -> bool:
        profile = profiled.profile
        assert isinstance(profile, PassProfile)
        if not profile.is_over:
            return False
        self._profiled = profiled.profile = None
        if not profile.is_used:  # the graph was dropped: another pass tells more
            return False
        self._profiles += 1
        for device, records in profile.records().items():
            self._refit_drifted(records, profile.sites())
            last = [self._decisions[r.site] for r in records if r.site in self._decisions]
            try:
                model, link = (
                    self._models.of(device, {r.dtype.itemsize for r in records}),
                    SwapLink.measured(device),
                )
                records = self._with_lossy(records, profile.sites(), model, link)
                made = self._decided(device, records, model, link, last)
            except (BitslabError, torch.OutOfMemoryError) as error:
                self._tell(device, error)
                continue
            self.history.add(self._profiles - 1, records, made, self._profiled_epoch)
            self._decisions.update({decision.site: decision for decision in made})
        return True

    def _decided(
        self,
        device: torch.device,
        records: list[SiteRecord],
        model: TimeModel,
        link: SwapLink,
        last: list[Decision],
    ) -> list[Decision]:
        """Decide what is packed, and where there is a disk which tensors go on to that."""
        disk, limits = self._tiers.disk, self._limits(device)
        if disk is None:
            return decide(records, model, link, previous=last, limits=limits)
        on_gpu = device.type == "cuda"
        step_bytes = sum(r.nbytes for r in records)
        step_s = sum(r.hidden_forward_s + r.hidden_backward_s for r in records)
        if step_bytes and step_s:
            self._disk_note = required_note(step_bytes, step_s, disk.write_bytes_per_s)
        slow = disk_link(link, disk, on_gpu=on_gpu)
        written = decide(records, model, slow, previous=last, limits=limits)
        # On a CPU the host is where tensors are, so that only the disk saves memory.
        whole = not on_gpu or not self._tiers.host
        names = {r.site for r in records} if whole else sites_for_disk(records, written, slow)
        others = [record for record in records if record.site not in names]
        on_host = decide(others, model, link, previous=last, limits=limits)
        found = {each.site: each for each in on_host}
        found |= {each.site: each for each in written if each.site in names}
        self._places.update((site, "disk" if site in names else "host") for site in found)
        return [
            with_place(found[r.site], disk, on_disk=r.site in names, whole=whole) for r in records
        ]

    def _with_lossy(
        self,
        records: list[SiteRecord],
        sites: dict[str, Site],
        model: TimeModel,
        link: SwapLink,
    ) -> list[SiteRecord]:
        """Return records in which dense tensors alone may be packed by the lossy codec.

        Sparse ones may only where no lossless codec takes them.
        """
        name, rate = self._codecs.lossy, self._codecs.rate
        if name is None:
            return records
        lossy = [r for r in records if self._is_dense(r) and not sites[r.site].is_exact]
        if rate is not None:
            rate.find(lossy, model, link)
        chosen = {r.site for r in lossy}
        found = []
        for record in records:
            ratio = {codec: share for codec, share in record.ratio.items() if codec != name}
            if record.site in chosen:
                if rate is None:
                    ratio = dict(record.ratio)
                elif rate.block_bits is not None:
                    ratio[name] = rate.share(record)
            found.append(replace(record, ratio=ratio))
        return found

    def _is_dense(self, record: SiteRecord) -> bool:
        return not record.sparse or not set(record.ratio) - {self._codecs.lossy}

    def _refit_drifted(self, records: Iterable[SiteRecord], sites: dict[str, Site]) -> None:
        """Fit codecs anew where values have changed, which those of another batch size have not."""
        for record in records:
            since = self._fitted.get(record.site)
            if since is None or replace(record, nbytes=since.nbytes).drifted(since):
                self._fitted[record.site] = record
                # Codecs that were not fitted then are new.
                if since is not None and record.ratio.keys() <= since.ratio.keys():
                    self._codecs.refit(sites[record.site])

    def _tell(self, device: torch.device, error: BaseException) -> None:
        if not self._failure_reported:
            self._failure_reported = True
            warnings.warn(
                f"bitslab: codecs or link of {device} could not be measured ({error}); saved "
                "tensors cross as was decided before, at first raw",
                UserWarning,
                stacklevel=2,
            )

    def sm_budget(self, name: str, site: Site) -> int | None:
        """Return the multiprocessors that a codec was measured to need; None for all."""
        return self._models.sm_budget(name, site)

    def rows(self) -> list[dict[str, Any]]:
        """Return what was decided at each profile, and from what."""
        return self.history.rows()
