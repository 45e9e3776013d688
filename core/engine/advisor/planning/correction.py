"""Predictions compared with steps that followed a plan: it holds, is corrected, or is withdrawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ....errors import ArgumentError
from .plan import Plan
from .prediction import StepPrediction
from .profile import StepProfile

#: Planned steps after which they are compared: the first one fills pools.
COMPARED_STEPS = 2
#: Share by which a step may take longer than predicted.
STEP_TOLERANCE = 0.05
#: Share by which its peak may be higher.
PEAK_TOLERANCE = 0.03
#: Corrections of one plan, after which it is withdrawn.
MOST_CORRECTIONS = 2
#: Factors by which one comparison corrects times, at most.
MOST_FACTOR = 8.0
#: Share of the forward pass below which what packing adds to it is not seen apart from hooks.
LEAST_ENCODING = 0.05
#: Share of a step below which replays are compute as any other.
LEAST_REPLAYS = 0.01
#: Share of the seconds that a step is off by, above which nothing measured says why.
LEAST_UNEXPLAINED = 0.5

Outcome = Literal["holds", "corrected", "withdrawn"]


@dataclass(frozen=True)
class MeasuredStep:
    """A step that followed a plan.

    Parameters
    ----------
    step_s : float
        Its seconds.
    peak_bytes : float
        Most bytes of the device at any moment.
    up_s, write_s : float, optional
        Seconds in which copies to the host, and writes to the SSD, were under way.
    codec_s : float, optional
        Seconds of the device that packing and unpacking took.
    compute_s : float, optional
        Its seconds but for waits and unpacking. Packing is in them: all that computing waited for
        it, or took longer meanwhile.
    forward_compute_s, replay_s : float, optional
        Of these the ones of the forward pass, and of replays.
    hooks_s : float, optional
        Seconds of the forward pass in which the device waited for hooks of tensors that are kept or
        leave as they are, without the seconds in which these waited for memory. They are not in
        `compute_s`.
    """

    step_s: float
    peak_bytes: float
    up_s: float | None = None
    write_s: float | None = None
    codec_s: float | None = None
    compute_s: float | None = None
    forward_compute_s: float | None = None
    replay_s: float | None = None
    hooks_s: float | None = None


@dataclass(frozen=True)
class Correction:
    """What a comparison says.

    Parameters
    ----------
    outcome : {"holds", "corrected", "withdrawn"}
        The plan goes on; the profile is corrected and planned again; everything is kept from now.
    reason : str
        A plain sentence with the figures.
    compute, codecs, link, disk, encoding, replays, forward : float
        Factors of the profile's times, as `StepProfile.scaled` takes them.
    more_bytes : int
        Bytes of the device that the profile did not know.
    off : bool
        Whether the plan goes on although its step takes another time, or its peak is another one,
        than predicted. All times have the same factor then, so that later plans are chosen as
        before.
    peak_bytes : float, optional
        The peak that is predicted of it since.
    """

    outcome: Outcome
    reason: str
    compute: float = 1.0
    codecs: float = 1.0
    link: float = 1.0
    disk: float = 1.0
    more_bytes: int = 0
    encoding: float = 1.0
    replays: float = 1.0
    forward: float = 1.0
    off: bool = False
    peak_bytes: float | None = None

    def predicted(self, plan: Plan) -> Plan:
        """Return a plan that goes on with what is predicted of it since."""
        if not self.off:
            return plan
        prediction = plan.prediction.scaled(self.compute)
        if self.peak_bytes is not None:
            prediction = replace(prediction, peak_bytes=self.peak_bytes)
        return replace(plan, prediction=prediction)

    def corrected(self, profile: StepProfile) -> StepProfile:
        """Return the profile as the comparison has it."""
        scaled = profile.scaled(
            compute=self.compute,
            codecs=self.codecs,
            link=self.link,
            disk=self.disk,
            encoding=self.encoding,
            replays=self.replays,
            forward=self.forward,
        )
        return replace(scaled, unprofiled_bytes=scaled.unprofiled_bytes + self.more_bytes)


def compare(
    plan: Plan,
    steps: Sequence[MeasuredStep],
    *,
    plain_step_s: float | None = None,
    corrections: int = 0,
    turn_s: float | None = None,
    promised: StepPrediction | None = None,
) -> Correction:
    """Compare a plan's prediction with steps that followed it.

    Parameters
    ----------
    plan : Plan
        The plan.
    steps : sequence of MeasuredStep
        `COMPARED_STEPS` of them or more; the fastest counts, and the highest peak.
    plain_step_s : float, optional
        Measured seconds of a step in which everything was kept; as predicted when left out.
    corrections : int
        How often the plan was corrected before.
    turn_s : float, optional
        When the backward pass begins, of the profile that the plan was made from. With it the
        backward pass, in which nothing is packed, shows how long compute takes, and the forward
        pass what is added to that: by packing, or where that takes less than `LEAST_ENCODING` of
        it by hooks.
    promised : StepPrediction, optional
        What was predicted when the plan was made from its profile; as now when left out. What it
        was predicted to take since makes no step slow, and no peak high, that keeps this.

    Returns
    -------
    Correction
        "withdrawn" only where everything may be kept: where there is no limit of memory, or a
        plain step fits it.

    Raises
    ------
    ArgumentError
        With fewer steps.
    """
    if len(steps) < COMPARED_STEPS:
        raise ArgumentError(f"steps: {len(steps)}, expected {COMPARED_STEPS} or more")
    fastest = min(steps, key=lambda step: step.step_s)
    peak = max(step.peak_bytes for step in steps)
    predicted, plain_s = plan.prediction, plain_step_s or plan.plain.step_s
    figures = (
        f"{fastest.step_s * 1e3:.4g} ms a step where {predicted.step_s * 1e3:.4g} were predicted, "
        f"peak {peak:,.0f} bytes where {predicted.peak_bytes:,.0f} were"
    )
    may_keep = plan.memory_bytes is None or plan.plain.peak_bytes <= plan.memory_bytes
    allowed_s = plain_s * (1 + plan.slowdown)
    promised = promised or predicted
    expected_s = max(predicted.step_s, promised.step_s)
    expected_bytes = max(predicted.peak_bytes, promised.peak_bytes)
    slow = fastest.step_s > expected_s * (1 + STEP_TOLERANCE)
    if may_keep and plain_step_s is not None:  # as predicted, but no better than keeping all
        slow |= fastest.step_s > allowed_s * (1 + STEP_TOLERANCE)
    high = peak > expected_bytes * (1 + PEAK_TOLERANCE)
    if plan.memory_bytes is not None and peak > plan.memory_bytes:
        high = True
    if plan.serial:  # no plan takes less, whatever it costs
        reason = f"Left as the plan of least memory: {figures}."
        return replace(as_measured(plan, steps), reason=reason)
    if plan.declined or not (slow or high):
        return replace(as_measured(plan, steps), reason=f"The plan holds: {figures}.")
    if may_keep and (corrections >= MOST_CORRECTIONS or peak >= plan.plain.peak_bytes):
        return Correction("withdrawn", f"Withdrawn, everything is kept: {figures}.")
    if not may_keep and corrections >= MOST_CORRECTIONS:
        reason = f"Left as it is, for it cannot be kept: {figures}."
        return replace(as_measured(plan, steps), reason=reason)
    plain = plain_s / max(plan.plain.step_s, 1e-12)
    factors: dict[str, Any] = _factors(predicted, fastest, slow, plain, turn_s)
    # Measured peaks change the prediction, and not the profile: it knows what was promised.
    more = max(0, round(peak - promised.peak_bytes)) if high else 0
    said = f"Corrected: {figures}"
    if may_keep and fastest.step_s > allowed_s:
        said += f"; {allowed_s * 1e3:.4g} ms are allowed"
    return Correction("corrected", f"{said}.", more_bytes=more, **factors)


def as_measured(plan: Plan, steps: Sequence[MeasuredStep]) -> Correction:
    """Return by how much a plan's prediction is off what steps of it took, if it goes on.

    Parameters
    ----------
    plan : Plan
        The plan.
    steps : sequence of MeasuredStep
        One or more; the fastest counts, and the highest peak.

    Returns
    -------
    Correction
        One that holds, of which `Correction.off` says whether it changes anything: that is where
        the step is off by more than `STEP_TOLERANCE`, or the peak by more than `PEAK_TOLERANCE`.
    """
    factor = _factor(min(step.step_s for step in steps), plan.prediction.step_s)
    peak = max(step.peak_bytes for step in steps)
    if abs(factor - 1) <= STEP_TOLERANCE:
        factor = 1.0
    is_peak_off = abs(_factor(peak, plan.prediction.peak_bytes) - 1) > PEAK_TOLERANCE
    if plan.declined or not (factor != 1 or is_peak_off):
        return Correction("holds", "")
    times: dict[str, Any] = dict.fromkeys(("compute", "codecs", "link", "disk"), factor)
    return Correction("holds", "", off=True, peak_bytes=peak if is_peak_off else None, **times)


def _factors(
    predicted: StepPrediction,
    measured: MeasuredStep,
    slow: bool,
    compute: float,
    turn_s: float | None,
) -> dict[str, float]:
    """Return by what the profile's times are multiplied."""
    factors = {"compute": compute, "forward": 1.0, "encoding": 1.0, "replays": 1.0}
    if measured.compute_s is not None:
        factors |= _of_compute(predicted, measured, measured.compute_s, turn_s)
    factors |= {
        "codecs": _factor(measured.codec_s, predicted.codec_s),
        "link": _factor(measured.up_s, predicted.up_s),
        "disk": _factor(measured.write_s, predicted.write_s),
    }
    missing_s = measured.step_s - predicted.step_s
    unexplained_s = missing_s - _explained_s(predicted, factors, turn_s)
    if slow and unexplained_s > LEAST_UNEXPLAINED * abs(missing_s):
        # Nothing says what took longer: what is planned did, in proportion to its seconds.
        planned_s = predicted.codec_s + predicted.recompute_s + predicted.stall_s
        hidden_s = max(predicted.up_s, predicted.write_s)
        factor = 1 + unexplained_s / max(planned_s, 0.5 * hidden_s, 1e-9)
        factors |= dict.fromkeys(("codecs", "link", "disk"), factor)
    return {name: min(max(f, 1 / MOST_FACTOR), MOST_FACTOR) for name, f in factors.items()}


def _of_compute(
    predicted: StepPrediction, measured: MeasuredStep, took_s: float, turn_s: float | None
) -> dict[str, float]:
    """Return the factors of what computes, from the seconds that it took."""
    compute_s = predicted.step_s - predicted.stall_s - predicted.codec_s
    replay_s = measured.replay_s
    if replay_s is not None and predicted.replay_s > LEAST_REPLAYS * compute_s:
        # A GPU that waited before, as one that is profiled does, computes faster for a while:
        # products of matrices most of all.
        took_s, compute_s = took_s - replay_s, compute_s - predicted.replay_s
    else:
        replay_s = None
    forward_s, encode_s = measured.forward_compute_s, predicted.encode_s
    forward = encoding = replays = 1.0
    if turn_s is None or forward_s is None:
        compute = _factor(took_s, compute_s + encode_s)
    else:
        compute = _factor(took_s - forward_s, compute_s - turn_s)
        if encode_s > LEAST_ENCODING * turn_s:
            encoding = max(0.0, forward_s - turn_s * compute) / encode_s
        else:
            # Where the queue of a GPU is empty, it waits for hooks. Of these seconds the predicted
            # stalls are known already.
            hooks_s = max(0.0, (measured.hooks_s or 0.0) - predicted.forward_stall_s)
            forward = _factor(forward_s - encode_s + hooks_s, turn_s * compute)
    if replay_s is not None:
        replays = _factor(replay_s, predicted.replay_s) / compute
    return {"compute": compute, "forward": forward, "encoding": encoding, "replays": replays}


def _explained_s(
    predicted: StepPrediction, factors: dict[str, float], turn_s: float | None
) -> float:
    """Return by how many seconds a step is longer by its factors; less than 0 where shorter."""
    compute, codecs = factors["compute"], factors["codecs"]
    replay_s, encode_s = predicted.replay_s, predicted.encode_s
    compute_s = predicted.step_s - predicted.stall_s - predicted.codec_s - replay_s
    return math.fsum(
        (
            (compute - 1) * compute_s,
            (factors["forward"] - 1) * compute * (turn_s or 0.0),
            (factors["replays"] * compute - 1) * replay_s,
            (codecs * factors["encoding"] - 1) * encode_s,
            (codecs - 1) * (predicted.codec_s - encode_s),
            (factors["link"] - 1) * predicted.up_s,
            (factors["disk"] - 1) * predicted.write_s,
        )
    )


def _factor(measured: float | None, predicted: float) -> float:
    if measured is None or predicted <= 0 or measured <= 0:
        return 1.0
    return measured / predicted
