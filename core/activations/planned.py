"""Activations under a limit of memory: a profiled step is planned, followed and compared.

The first pass warms up, two are profiled, and those behind follow the plan. With a limit of
memory all saved tensors are moved until there is a plan, since nobody knows yet what fits; without
one they are kept. Two planned passes are compared with what was predicted, again from time to time,
and at first, without a limit, with two in turn with them in which everything is kept.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..engine.advisor.planning import (
    COMPARED_STEPS,
    MOST_CORRECTIONS,
    MOST_FACTOR,
    Correction,
    MeasuredStep,
    MemoryLimitError,
    Plan,
    StepProfile,
    compare,
    least_plan,
    make_plan,
    predicted_again,
)
from .checkpointed import CheckpointedModules, ModuleWatch, checkpointable
from .disk_share import required_note
from .followed import MOST_STEPS, Followed, FollowedPlans
from .measured_link import measured_link
from .measured_pass import MeasuredPass
from .memory_limit import limit_bytes
from .pass_record import PassRecord
from .plain_passes import PlainPasses
from .planned_passes import choice_of, packed_bytes, pass_plan
from .planned_tiers import PlannedTiers
from .policies import CHECKPOINT, KEEP, RAW, Choice, Codecs
from .resting import RestingPasses
from .sites import Select, Site, inside_module
from .step_recorder import RecordedStep, StepRecorder
from .tiers import Tiers
from .time_models import TimeModels
from .traffic import SentBlob

#: Passes whose backward pass never came, after which nothing is planned any more.
MOST_ATTEMPTS = 8
#: A profiled pass that is not over after so many others is given up.
PATIENCE_PASSES = 64
#: Planned passes that are measured and not over, as those that fail are not, which are waited for.
MOST_MEASURED = 8
#: Passes from a plan to the next one because of larger tensors, at first; twice as many each time.
REPLAN_PASSES = 4


class PlannedPolicy:
    """Decides by a plan of a profiled step.

    Parameters
    ----------
    codecs : Codecs
        What may pack.
    memory : int, float or None
        Limit of device memory, as `checked_memory` returns it; None for the least that costs no
        more than `slowdown`.
    slowdown : float
        Share of a step.
    recompute : bool
        Whether tensors may be replayed, and modules checkpointed.
    select : callable or None
        Which sites may be moved.
    every : int
        Of so many passes two are compared with the prediction.
    """

    def __init__(
        self,
        codecs: Codecs,
        *,
        memory: int | float | None,
        slowdown: float,
        recompute: bool,
        select: Select | None,
        every: int,
    ) -> None:
        self._codecs, self._memory, self._slowdown = codecs, memory, slowdown
        # A profiled pass is to show what each codec makes of a tensor, or no plan could use it.
        codecs.waits_for_fits = True
        self._recompute, self._select, self._every = recompute, select, max(1, every)
        self._models = TimeModels(codecs)
        self._lock = threading.RLock()
        self._tiers = PlannedTiers(Tiers())
        self._modules: CheckpointedModules | None = None
        self._running = threading.local()
        self._following: Followed | None = None
        self._recorded: RecordedStep | None = None
        self._planned_on = torch.device("cpu")
        self._fits = False
        self.resting = RestingPasses()
        self._without_plan = False
        self._passes = self._attempts = self._planned_passes = 0
        self._recording: tuple[PassRecord, StepRecorder, ModuleWatch | None, int] | None = None
        #: The profiled pass before, of two of which the shorter one's times count.
        self._earlier: StepRecorder | None = None
        self._measuring: list[tuple[MeasuredPass, int]] = []
        self._steps: list[MeasuredStep] = []
        self._compared: Correction | None = None
        self._corrections = 0
        self._plain = PlainPasses(may_keep=memory is None)
        #: Since the profile was made.
        self._followed = FollowedPlans(MOST_STEPS if memory is not None else COMPARED_STEPS)
        self._tried_without_moves = self._withdrawn = self._limit_said = self._loss_said = False
        self._seen: dict[str, Site] = {}
        #: Sites that were not as planned, with how often.
        self._unplanned: dict[str, int] = {}
        self._larger = False
        self._replan_passes = REPLAN_PASSES
        self._warned: set[str] = set()

    # What may be done

    def attach(self, model: nn.Module) -> None:
        """Let modules of a model be checkpointed, too."""
        if self._recompute:
            self._modules = CheckpointedModules(
                checkpointable(model), self._is_checkpointed, self._begins
            )

    def detach(self) -> None:
        """Take everything off the model."""
        with self._lock:
            if self._recording is not None and self._recording[2] is not None:
                self._recording[2].remove()
            if self._modules is not None:
                self._modules.apply(())
            self._modules = None

    def use_tiers(self, tiers: Tiers) -> None:
        """Say what there is behind the device, and how much of it may be used."""
        self._tiers = PlannedTiers(tiers)

    def _is_checkpointed(self, module: str) -> bool:
        record: PassRecord | None = getattr(self._running, "record", None)
        return (
            record is not None
            and record.plan is not None
            and module in record.plan.modules
            and torch.is_grad_enabled()
        )

    def _begins(self, module: str) -> Callable[[], None]:
        """Return what is to be called when a module of the running pass is computed again."""
        record: PassRecord = self._running.record
        return functools.partial(record.begin_module, module, self._planned_on)

    @property
    def plan(self) -> Plan | None:
        """What is followed; None until a step was profiled."""
        return None if self._following is None else self._following.plan

    @property
    def profile(self) -> StepProfile | None:
        """What it was made from."""
        return None if self._following is None else self._following.profile

    @property
    def is_idle(self) -> bool:
        """Whether all is kept, and fits, and nothing is to be profiled."""
        busy = self._recording is not None or self._earlier is not None or self._larger
        return self._fits and not busy and not self._withdrawn

    # Decisions

    def decide(self, site: Site) -> Choice:
        """Return what is done with the tensors of a site, as planned."""
        # Known ones are decided anew when a plan begins, as the last pass had them.
        known = self._seen.get(site.name) is site
        self._seen[site.name] = site
        if self._withdrawn:
            return Choice(KEEP, "Kept: the plan was withdrawn.")
        plan, recorded = self.plan, self._recorded
        if plan is None or recorded is None or self._without_plan:
            if self._memory is None:
                return Choice(KEEP, "Kept: plans are made from this pass, or compared with it.")
            return Choice(RAW, "Raw: moved until a step was profiled.")
        if site.name in recorded.views or site.name in recorded.unread:
            return Choice(KEEP, "Kept: a view of what another site saved, or never read.")
        planned = plan.site(site.name)
        if any(inside_module(site.name, module) for module in plan.modules):
            return Choice(CHECKPOINT, "Kept: its module is computed again from it.", "device")
        if planned is None:
            if not known:
                self._note_unplanned(site, larger=True)
            return self._fallback("not in the profiled step")
        candidate = planned.candidate
        if site.nbytes != planned.nbytes:
            larger = site.nbytes > planned.nbytes
            if not known:
                self._note_unplanned(site, larger)
            if candidate.action == "keep" and larger:
                return self._fallback(f"{site.nbytes:,} bytes, planned were {planned.nbytes:,}")
        return choice_of(candidate, planned.reason)

    def _fallback(self, why: str) -> Choice:
        if self._memory is None:
            return Choice(KEEP, f"Kept: {why}.")
        return Choice(RAW, f"Raw: {why}.")

    def _note_unplanned(self, site: Site, larger: bool) -> None:
        self._unplanned[site.name] = self._unplanned.get(site.name, 0) + 1
        self._larger |= larger

    # Passes

    def begin(self, entered: PassRecord) -> bool:
        """Begin a pass; return whether sites are to be decided anew."""
        with self._lock:
            number = self._passes
            self._passes += 1
            changed = self._take_recorded(number)
            changed |= self._take_lost()  # before what was measured while it failed is compared
            changed |= self._take_measured()
            changed |= self._take_refused()
            profiled = self._recording is None and self._profile_due(number)
            plain = self._plain_pass(profiled)
            if plain is not None:
                entered.profile = entered.watcher = plain
            elif profiled:
                self._record(entered, number)
            without_plan = profiled or plain is not None
            changed |= without_plan != self._without_plan
            self._without_plan = without_plan
            following = self._following
            if following is not None and not self._withdrawn and not without_plan:
                if not following.plan.declined:
                    entered.plan = following.pass_plan
                    self._measure(entered)
                self._planned_passes += 1
            self._running.record = entered
            return changed

    def _profile_due(self, number: int) -> bool:
        if self._withdrawn or self._attempts >= MOST_ATTEMPTS or not number:
            return False
        if not self._seen:
            return False
        if self.plan is None or self._earlier is not None:
            return True
        if self._larger and self._planned_passes >= self._replan_passes:
            self._replan_passes *= 2
            return True
        return False

    def _plain_pass(self, profiled: bool) -> MeasuredPass | None:
        """Return what measures a pass that keeps everything; None for any other."""
        if self.plan is None:
            return self._plain.before_profile(self._device()) if profiled else None
        if profiled or self.plan.declined or self._withdrawn:
            return None
        peak_bytes = self.plan.plain.peak_bytes
        return self._plain.in_turn(self._planned_on, self._planned_passes, peak_bytes)

    def _device(self) -> torch.device:
        """Return the device of most of what is saved."""
        found: dict[torch.device, int] = {}
        for site in self._seen.values():
            found[site.device] = found.get(site.device, 0) + site.nbytes
        return max(found, key=lambda device: found[device])

    def _record(self, entered: PassRecord, number: int) -> None:
        recorder = StepRecorder(self._codecs, self._device(), self._select, self._recompute)
        entered.profile = entered.watcher = recorder
        entered.serial = self._memory is not None
        watch = None
        if self._modules is not None:
            watch = ModuleWatch(self._modules.modules, recorder)
        self._recording = entered, recorder, watch, number
        self._larger = False
        self._unplanned.clear()

    def ended_forward(self, left: PassRecord) -> None:
        """End a forward pass of this thread."""
        self._running.record = None
        with self._lock:
            if self._recording is not None and self._recording[0] is left:
                watch = self._recording[2]
                if watch is not None:
                    watch.remove()

    def _take_recorded(self, number: int) -> bool:
        """Plan from a profiled pass that is over; return whether there is another plan."""
        if self._recording is None:
            return False
        entered, recorder, _, since = self._recording
        if not recorder.is_over and number - since < PATIENCE_PASSES:
            return False
        self._recording = None
        entered.profile = entered.watcher = None
        if not recorder.is_used:
            self._attempts += 1
            return False
        earlier, self._earlier = self._earlier, recorder
        if earlier is None:  # once more
            return False
        self._earlier = None
        # Smaller steps follow the plan of a larger one.
        earlier, recorder = sorted((earlier, recorder), key=lambda r: sum(r.saved_bytes.values()))
        if not self._is_larger(recorder):
            return False
        modules: tuple[str, ...] = ()
        if self._modules is not None:
            refused = self._modules.refused
            modules = tuple(name for name in self._modules.modules if name not in refused)
        link, share = measured_link(recorder.device, self._warn)
        recorded = recorder.recorded(self._times(recorder.device), link, modules, earlier)
        self._recorded = recorded
        profile = self._plain.use_profile(recorded.profile)
        if profile.link is not None:
            on_gpu = self._device().type == "cuda"
            behind = self._tiers.fields(profile, on_gpu=on_gpu)
            profile = replace(profile, link_share_both_ways=share, **behind)
        self._plan_anew(profile)
        return True

    def _is_larger(self, recorder: StepRecorder) -> bool:
        """Return whether a step saves anything that is not in the planned one, or is larger."""
        if self._recorded is None:
            return True
        known = {each.site: each.nbytes for each in self._recorded.profile.sites}
        unread = self._recorded.unread
        saved = recorder.saved_bytes.items()
        return any(n > known.get(name, 0) for name, n in saved if name not in unread)

    def _times(self, device: torch.device) -> Callable[..., tuple[float, float] | None]:
        """Return what predicts the seconds of codecs on a device."""
        sizes = {site.dtype.itemsize for site in self._seen.values() if site.device == device}
        try:
            model = self._models.of(device, sizes)
        except Exception as error:
            self._warn(f"codecs of {device} could not be measured ({error})")
            return lambda *_: None

        def times(
            name: str, nbytes: int, share: float, element_bytes: int
        ) -> tuple[float, float] | None:
            try:
                return model.predict(name, nbytes, share, element_bytes)
            except KeyError:
                return None

        return times

    def _plan_anew(self, profile: StepProfile) -> None:
        """Plan a profile of which none of the plans that were followed before was made."""
        self._corrections = 0
        self._followed.clear()
        self._tried_without_moves = False
        self._plan(profile)

    def _plan(self, profile: StepProfile) -> None:
        """Plan a profile, and follow that from now on."""
        self._follow_made(self._made(profile), profile)

    def _follow_made(self, plan: Plan, profile: StepProfile) -> None:
        assert self._recorded is not None
        passes = pass_plan(
            plan,
            profile,
            self._recorded.replays,
            self._recorded.views,
            falls_back_to_keeping=self._memory is None,
        )
        self._follow(Followed(plan, passes, profile, plan.prediction))

    def _follow(self, followed: Followed) -> None:
        self._following, plan = followed, followed.plan
        self._planned_on = self._device()
        share = 0.0
        if self._memory is not None:
            share = plan.plain.peak_bytes / limit_bytes(self._memory, self._planned_on)
        self._fits = plan.declined and share <= 1
        self.resting.begin(share)
        self._planned_passes = 0
        self._plain.begin_plan()
        self._measuring.clear()
        self._steps.clear()
        if self._modules is not None:
            self._modules.apply(() if plan.declined else plan.modules)

    def _made(self, profile: StepProfile) -> Plan:
        if self._memory is None:
            return make_plan(profile, slowdown=self._slowdown)
        limit = limit_bytes(self._memory, self._device())
        try:
            return make_plan(profile, memory_bytes=limit)
        except MemoryLimitError as error:
            if not profile.unprofiled_bytes:
                self._limit_said = True
                self._warn(f"{error}; the plan of least memory is followed")
                return make_plan(profile, memory_bytes=error.least_bytes)
        return self._least(profile, limit)

    def _least(self, profile: StepProfile, limit: int) -> Plan:
        """Return the plan of least memory, with no copies on their way.

        In the profiled step there were none, so that bytes which others took besides do not count.
        """
        return least_plan(replace(profile, unprofiled_bytes=0), memory_bytes=limit)

    def _take_lost(self) -> bool:
        """Plan anew where the disk failed, or is full; return whether there is another plan."""
        if self._following is None or self._withdrawn:
            return False
        profile, predicted = self._following.profile, self._following.plan.prediction
        fields = self._tiers.lost(predicted.written_bytes)
        if not fields or profile.disk is None:
            return False
        if not predicted.written_bytes:
            self._following = replace(self._following, profile=replace(profile, **fields))
            self._followed.clear()  # others may write
            return False
        if not self._loss_said:
            self._loss_said = True
            self._warn(f"the disk does not take what was planned. {self._tiers.note}")
        self._plan_anew(replace(profile, **fields))
        return True

    def _take_refused(self) -> bool:
        """Plan without modules that gave other bits; return whether there is another plan."""
        if self._modules is None or self._following is None:
            return False
        profile, refused = self._following.profile, self._modules.refused
        if self._withdrawn or not any(each.module in refused for each in profile.modules):
            return False
        self._plan_anew(profile.without_modules(refused))
        return True

    def _measure(self, entered: PassRecord) -> None:
        """Measure a planned pass, if it is one of those that are compared."""
        # The first one fills pools.
        at = self._planned_passes % self._every if self._every > COMPARED_STEPS else -1
        due = 0 < self._planned_passes <= COMPARED_STEPS or (
            self._planned_passes > COMPARED_STEPS and 0 <= at < COMPARED_STEPS
        )
        if due and entered.profile is None:
            measured = MeasuredPass(self._device())
            entered.profile = entered.watcher = measured
            self._measuring.append((measured, sum(self._unplanned.values())))
            del self._measuring[:-MOST_MEASURED]

    def _take_measured(self) -> bool:
        """Compare passes that are over with what was predicted; return whether that changes it."""
        following = self._following
        if following is None:
            return False
        for measured, unplanned in [each for each in self._measuring if each[0].is_over]:
            self._measuring.remove((measured, unplanned))
            if sum(self._unplanned.values()) == unplanned:  # it was the step that was planned
                self._steps.append(measured.step())
        if len(self._steps) < COMPARED_STEPS:
            return False
        steps = self._followed.last_steps(following, self._steps)
        self._steps.clear()
        found = compare(
            following.plan,
            steps,
            plain_step_s=self._plain.step_s,
            corrections=self._corrections,
            turn_s=following.profile.turn_s,
            promised=following.promised,
        )
        followed = following.measured(steps)
        self._followed.add(followed)
        if found.off:
            self._following = followed
        self._compared = found
        if found.outcome == "holds" and self._memory is not None:
            return self._go_on(followed, limit_bytes(self._memory, self._device()))
        if found.outcome == "withdrawn":
            self._withdrawn = True
            if self._modules is not None:
                self._modules.apply(())
        elif found.outcome == "corrected":
            self._corrections += 1
            self._plan(found.corrected(following.profile))
        return found.outcome != "holds"

    def _try_without_moves(self, following: Followed) -> bool:
        """Follow a plan that recomputes where it can, once behind corrections; return whether.

        What copies cost the work beside them is known of the steps that were compared alone: where
        they were slower than predicted, one that moves little may be the fastest.
        """
        plan, profile = following.plan, following.profile
        moves = plan.prediction.link_bytes or plan.prediction.written_bytes
        if self._tried_without_moves or not self._corrections or plan.serial:
            return False
        if not (moves and self._recompute):
            return False
        self._tried_without_moves = True
        dear = profile.scaled(link=MOST_FACTOR, disk=MOST_FACTOR)
        made = self._made(dear)
        if made.serial:  # nothing but moves keeps the limit
            return False
        self._corrections = MOST_CORRECTIONS  # it is dear by intent
        # Chosen as if moves were dear; what is published and compared is what they take.
        self._follow_made(predicted_again(made, profile), profile)
        return True

    def _go_on(self, following: Followed, limit: int) -> bool:
        """Follow the best plan of a profile from now on; return whether it is another one.

        The last one was made to be as predicted, which may be slower. Where none keeps the limit
        for what copies on their way take, one is tried under which there are none.
        """
        plan, profile, peak_bytes = following.plan, following.profile, following.peak_bytes
        if self._try_without_moves(following):
            return True
        if self._followed.needs_least(max(limit, plan.memory_bytes or 0)):
            self._follow_made(self._least(profile, limit), profile)
            return True
        if plan.serial and peak_bytes > limit and not self._limit_said:
            self._limit_said = True
            self._warn(f"memory: {limit:,} bytes, and {peak_bytes:,.0f} were the least in a step")
        best = self._followed.best(limit)
        if best.pass_plan is following.pass_plan:
            return False
        self._follow(best)
        return True

    def _warn(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"bitslab: {what}", UserWarning, stacklevel=4)

    # For the hooks and the report

    def begin_epoch(self, epoch: int) -> None:
        """Do nothing: plans are made anew when steps change."""

    def observed(self, blob: SentBlob, decodes: bool, seconds: float) -> None:
        """Correct the model of a device by what a real swap took there."""
        self._models.observed(blob, decodes, seconds)

    def sm_budget(self, name: str, site: Site) -> int | None:
        """Return the multiprocessors that a codec was measured to need; None for all."""
        return self._models.sm_budget(name, site)

    def rows(self) -> list[dict[str, Any]]:
        """Return nothing: the plan says what was decided."""
        return []

    def packed_bytes(self, site: str) -> float:
        """Return the bytes that a site's tensor is expected to be packed to."""
        if self.profile is None or self.plan is None:
            return 0.0
        return packed_bytes(self.plan, self.profile, site)

    def notes(self) -> list[str]:
        """Return what is to be known of the plan."""
        if self._withdrawn and self._compared is not None:
            return [self._compared.reason]
        if self.plan is None or self._recorded is None:
            if self._attempts >= MOST_ATTEMPTS:
                return ["Nothing is planned: no backward pass has read what was saved."]
            return ["Nothing is planned yet: no profiled step is over."]
        found = [f"Plan: {self.plan.summary()}"]
        if not self.plan.declined:
            found.append(self.plan.prediction.summary())
        profile = self.profile
        if profile is not None and profile.disk is not None:
            movable = sum(each.nbytes for each in profile.sites if each.movable)
            if movable and profile.step_s:
                rate = profile.disk.write_bytes_per_s
                found.append(required_note(movable, profile.step_s, rate))
        if self.plan.modules:
            found.append(f"Checkpointed: {', '.join(self.plan.modules)}.")
        not_checkpointed = dict(self._recorded.not_checkpointed)
        if self._modules is not None:
            not_checkpointed |= self._modules.refused
        if not_checkpointed:
            why = "; ".join(f"{n}: {w}" for n, w in not_checkpointed.items())
            found.append(f"Modules that are not computed again: {why}")
        if self._compared is not None:
            found.append(self._compared.reason)
        if self._tiers.note:
            found.append(self._tiers.note)
        if self._unplanned:
            name = next(iter(self._unplanned))
            found.append(
                f"{len(self._unplanned)} sites were not as in the profiled step, first {name!r}."
            )
        return found
