"""What becomes of the tensors that training keeps: moved raw, or packed by which codec.

The cost model of CSWAP+ (section 5.3, equations 3 to 7). Of a tensor that is moved counts what
compute cannot hide: the seconds by which its bytes reach the host later than the forward pass
allows, and the device later than the backward pass needs them; packing adds its own seconds and
takes bytes off the link.

The paper charges each tensor alone. Here the link is a queue, one each way: a tensor waits for
those before it and makes those behind it wait, and compute hides what it can of them all. Of a
single tensor both say the same. Where it is known how many bytes may be under way, the copies of a
step are followed instead (`swap_timeline`): compute that waits for a raw copy is charged for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch

from ...errors import ArgumentError, ArgumentTypeError
from .link import LinkModel, measure_link
from .swap_search import PlanSearch
from .swap_timeline import (
    LinkQueue,
    OptionTable,
    Plans,
    Seconds,
    StepModel,
    StepTimeline,
    SwapLimits,
)

Action = Literal["keep", "raw", "pack"]
Policy = Literal["auto", "raw", "static", "keep"]
POLICIES: tuple[Policy, ...] = ("auto", "raw", "static", "keep")

#: Share of a tensor's raw link time that another choice must save before it replaces the last one.
HYSTERESIS = 0.05
#: Relative change of a packed share from which on a site's codec is chosen and fitted anew.
DRIFT = 0.1
#: Share of a step that all choices together may cost by being held, where the step is followed.
MOST_HELD = 0.005


@dataclass(frozen=True, kw_only=True)
class SiteRecord:
    """What a profile saw of one tensor that training keeps.

    Parameters
    ----------
    site : str
        Module path and number within it; one a tensor.
    shape : tuple of int
        Its shape.
    dtype : torch.dtype
        Its dtype.
    nbytes : int
        Its bytes.
    operation : str
        Name of the `grad_fn` that made it.
    hidden_forward_s : float
        Seconds of the forward pass between this tensor's being kept and the next one's, or the end:
        compute that runs while it crosses.
    hidden_backward_s : float
        Seconds of the backward pass between the use of the tensor that is read before it, or the
        start, and its own use.
    sparse : bool
        Whether its operation leaves zeros (ReLU, its pooling, dropout).
    ratio : mapping of str to float
        By codec that may pack it, packed bytes over raw bytes, all metadata counted; for a lossy
        codec P/MAX.
    sparsity : float, optional
        Share of its elements that are zero; None where not counted.
    """

    site: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    operation: str = ""
    hidden_forward_s: float = 0.0
    hidden_backward_s: float = 0.0
    sparse: bool = False
    ratio: Mapping[str, float] = field(default_factory=dict)
    sparsity: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.site, str):
            raise ArgumentTypeError(f"site: expected a str, got {self.site!r:.60}")
        where = f"site {self.site!r}"
        figures = {
            "nbytes": self.nbytes,
            "hidden_forward_s": self.hidden_forward_s,
            "hidden_backward_s": self.hidden_backward_s,
            **{f"ratio of {name!r}": share for name, share in self.ratio.items()},
        }
        for name, value in figures.items():
            if not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
                raise ArgumentError(f"{where}: {name}: {value!r:.60}, accepted are numbers from 0")
        if self.sparsity is not None and not 0 <= self.sparsity <= 1:
            raise ArgumentError(f"{where}: sparsity: {self.sparsity}, accepted are 0 to 1")

    def drifted(self, since: SiteRecord) -> bool:
        """Return whether the codec of the site should be chosen and fitted anew.

        So it should when the tensor has another size or dtype, or when a packed share or the share
        of elements that are not zero changed by `DRIFT` or more since that record.
        """
        if (self.nbytes, self.dtype) != (since.nbytes, since.dtype):
            return True
        pairs = [(self.ratio[name], since.ratio.get(name)) for name in self.ratio]
        if self.sparsity is not None and since.sparsity is not None:
            pairs.append((1 - self.sparsity, 1 - since.sparsity))
        return any(then is None or abs(now - then) >= DRIFT * then for now, then in pairs)


@dataclass(frozen=True)
class SwapLink:
    """What tensors cross on their way to the host and back.

    Parameters
    ----------
    d2h_bytes_per_s, h2d_bytes_per_s : float
        Measured rates from the device to the host and back.
    copy_seconds : float
        What every copy costs in addition to its bytes.
    """

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    copy_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("d2h_bytes_per_s", "h2d_bytes_per_s"):
            rate = getattr(self, name)
            if not (math.isfinite(rate) and rate > 0):
                raise ArgumentError(f"{name}: {rate}, accepted are finite numbers above 0")
        if not (math.isfinite(self.copy_seconds) and self.copy_seconds >= 0):
            raise ArgumentError(f"copy_seconds: {self.copy_seconds}, accepted are numbers from 0")

    @classmethod
    def of(cls, link: LinkModel) -> SwapLink:
        """Return the two directions of a link's model."""
        return cls(
            link.device_to_host_bytes_per_s, link.host_to_device_bytes_per_s, link.copy_seconds
        )

    @classmethod
    def measured(cls, device: torch.device | str) -> SwapLink:
        """Return the link of a device as `measure_link` finds it, once in a process."""
        return cls.of(measure_link(device))

    def to_host_seconds(self, n_bytes: float) -> float:
        """Return the seconds in which bytes leave the device."""
        return self.copy_seconds + n_bytes / self.d2h_bytes_per_s

    def to_device_seconds(self, n_bytes: float) -> float:
        """Return the seconds in which bytes come back."""
        return self.copy_seconds + n_bytes / self.h2d_bytes_per_s


class Times(Protocol):
    """What `decide` asks of a model of codec times; `TimeModel` is one."""

    def predict(
        self, codec_name: str, nbytes: float, share: float, element_bytes: int = 4
    ) -> tuple[float, float]:
        """Return the seconds of encoding and decoding; KeyError for a codec that is not known."""

    def outside(self, codec_name: str, nbytes: float, share: float, element_bytes: int = 4) -> str:
        """Return what of it lies outside the range that was measured, in words, or ""."""


@dataclass(frozen=True)
class Decision:
    """What becomes of the tensor of a site, and why.

    Parameters
    ----------
    site : str
        As in its record.
    action : {"keep", "raw", "pack"}
        Left on the device; moved as it is; packed, moved and unpacked.
    codec : str or None
        Name of the codec that packs it.
    raw_s, packed_s : float or None
        T' and T: seconds that moving it costs a step raw, and packed by the codec (the best one
        where it is not packed), with the others as decided; None with no codec.
    reason : str
        A plain sentence with the figures used.
    """

    site: str
    action: Action
    codec: str | None
    raw_s: float
    packed_s: float | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return dict(vars(self))


@dataclass(frozen=True)
class Cost:
    """Seconds of a tensor's swap, the terms of equation 4.

    Parameters
    ----------
    encode_s, decode_s : float
        Time_c and Time_dc; 0 raw.
    forward_s, backward_s : float
        O_f and O_b: what the passes do not hide of the two copies.
    """

    encode_s: float
    decode_s: float
    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        """T, or T' of a tensor that is moved raw."""
        return self.encode_s + self.decode_s + self.forward_s + self.backward_s

    @property
    def hidden(self) -> bool:
        """Whether compute hides both copies."""
        return self.forward_s <= 0 and self.backward_s <= 0


def swap_cost(
    record: SiteRecord, link: SwapLink, packed_bytes: float, encode_s: float, decode_s: float
) -> Cost:
    """Return what one tensor's swap costs alone: equations 4 to 6, and 3 for its raw bytes."""
    return Cost(
        encode_s,
        decode_s,
        max(link.to_host_seconds(packed_bytes) - record.hidden_forward_s, 0.0),
        max(link.to_device_seconds(packed_bytes) - record.hidden_backward_s, 0.0),
    )


def packed_bytes(record: SiteRecord, codec_name: str, *, published: bool = False) -> float:
    """Return the bytes of a tensor once packed.

    Parameters
    ----------
    record : SiteRecord
        With a ratio of the codec.
    codec_name : str
        A codec of `record.ratio`.
    published : bool
        Equation 7: of sparse tensors those elements that are not zero, with no metadata.
    """
    if published and record.sparse and record.sparsity is not None:
        return record.nbytes * (1 - record.sparsity)
    return record.nbytes * record.ratio[codec_name]


def decide(
    records: Iterable[SiteRecord],
    model: Times,
    link: SwapLink,
    *,
    policy: Policy = "auto",
    previous: Iterable[Decision] | None = None,
    published: bool = False,
    hysteresis: float = HYSTERESIS,
    limits: SwapLimits | None = None,
) -> list[Decision]:
    """Decide for all tensors that a step moves.

    Parameters
    ----------
    records : iterable of SiteRecord
        In the order of the forward pass; the backward pass is taken to read them in reverse.
    model : TimeModel
        Predicts what packing takes. Codecs that it does not know are not considered.
    link : SwapLink
        What the bytes cross.
    policy : {"auto", "raw", "static", "keep"}
        As the cost model says; all raw; all packed (the paper's SC); none moved.
    previous : iterable of Decision, optional
        The last ones. A site's choice is replaced only by one that saves `hysteresis` of its raw
        link time or more.
    published : bool
        Equations 3 to 7 as they stand: each tensor alone, packed where T' > T, sparse ones with no
        metadata, and neither queue nor cost of a copy nor hysteresis.
    hysteresis : float
        See `previous`; with `limits` all that is held costs half a percent of the step at most.
        Infinity keeps each last choice that there still is, with its costs as they are now.
    limits : SwapLimits, optional
        Follow the copies of a step as they are moved within these limits (`StepTimeline`). When
        left out, each pass waits for all of its copies (`LinkQueue`).

    Returns
    -------
    list of Decision
        In the order of `records`.

    Raises
    ------
    ArgumentError
        For a policy that is not known, and two records of one site.
    """
    sites = list(records)
    if policy not in POLICIES:
        raise ArgumentError(f"policy: {policy!r:.60}, accepted are {', '.join(POLICIES)}")
    if len({record.site for record in sites}) != len(sites):
        names = [record.site for record in sites]
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentError(f"records: two of site {twice!r}, expected one each")
    if not hysteresis >= 0:
        raise ArgumentError(f"hysteresis: {hysteresis}, accepted are numbers from 0")
    if policy == "keep":
        return [
            Decision(record.site, "keep", None, 0.0, None, "Kept: policy 'keep' moves nothing.")
            for record in sites
        ]
    if published:
        link = SwapLink(link.d2h_bytes_per_s, link.h2d_bytes_per_s)
    options = [_options(record, model, link, published) for record in sites]
    if published:
        return [
            _alone(record, link, own, policy) for record, own in zip(sites, options, strict=True)
        ]
    last = {} if previous is None else {decision.site: decision for decision in previous}
    return _Plans(sites, options, link, limits, last, hysteresis).decide(policy)


@dataclass(frozen=True)
class _Option:
    """A way to move a tensor: raw (no codec), or packed."""

    codec: str | None
    n_bytes: float
    encode_s: float = 0.0
    decode_s: float = 0.0
    note: str = ""

    @property
    def codec_s(self) -> float:
        return self.encode_s + self.decode_s


def _options(
    record: SiteRecord, model: Times, link: SwapLink, published: bool
) -> tuple[_Option, ...]:
    """Return the ways to move a tensor, raw first, then by the least seconds of codec and link."""
    packed = []
    element_bytes = record.dtype.itemsize
    for name, share in record.ratio.items():
        given = (name, record.nbytes, share, element_bytes)
        try:
            encode_s, decode_s = model.predict(*given)
        except KeyError:
            continue
        n_bytes = packed_bytes(record, name, published=published)
        packed.append(_Option(name, n_bytes, encode_s, decode_s, model.outside(*given)))
    packed.sort(
        key=lambda o: (
            o.codec_s + link.to_host_seconds(o.n_bytes) + link.to_device_seconds(o.n_bytes)
        )
    )
    return (_Option(None, record.nbytes), *packed)


def _alone(
    record: SiteRecord, link: SwapLink, options: Sequence[_Option], policy: Policy
) -> Decision:
    """Decide for one tensor by itself, as published."""
    raw = swap_cost(record, link, record.nbytes, 0.0, 0.0).total_s
    costs = [
        swap_cost(record, link, o.n_bytes, o.encode_s, o.decode_s).total_s for o in options[1:]
    ]
    best = int(np.argmin(costs)) + 1 if costs else 0
    packed = costs[best - 1] if best else None
    pack = packed is not None and policy != "raw" and (policy == "static" or raw > packed)
    chosen = options[best if pack else 0]
    return _decision(record, chosen, options[best] if best else None, raw, packed, policy, "")


def _decision(
    record: SiteRecord,
    chosen: _Option,
    best: _Option | None,
    raw_s: float,
    packed_s: float | None,
    policy: Policy,
    held: str,
) -> Decision:
    """Return the decision with its reason."""
    if policy != "auto":
        why = f"policy {policy!r}"
    elif best is None or packed_s is None:
        why = "no codec may pack it"
    else:
        share = best.n_bytes / record.nbytes if record.nbytes else 1.0
        zeros = "" if record.sparsity is None else f"{record.sparsity:.0%} zeros, "
        why = (
            f"{raw_s * 1e3:.3g} ms raw, {packed_s * 1e3:.3g} ms by {best.codec} "
            f"({zeros}{share:.0%} of the bytes cross, {best.codec_s * 1e3:.3g} ms of it the codec)"
        )
        if raw_s <= 0:
            why = f"hidden; {why}"
        if best.note:
            why += f"; {best.note}"
    if held:
        why += f"; {held}"
    what = "Raw" if chosen.codec is None else f"Packed by {chosen.codec}"
    action: Action = "raw" if chosen.codec is None else "pack"
    return Decision(record.site, action, chosen.codec, raw_s, packed_s, f"{what}: {why}.")


class _Plans:
    """Choices for all sites of a step whose copies share one link.

    Parameters
    ----------
    sites : list of SiteRecord
        In the order of the forward pass.
    options : list of tuple of _Option
        Of each site.
    link : SwapLink
        What they cross.
    limits : SwapLimits or None
        As for `decide`.
    last : mapping of str to Decision
        The last decisions by site.
    hysteresis : float
        As for `decide`.
    """

    def __init__(
        self,
        sites: list[SiteRecord],
        options: list[tuple[_Option, ...]],
        link: SwapLink,
        limits: SwapLimits | None,
        last: Mapping[str, Decision],
        hysteresis: float,
    ) -> None:
        self._sites, self._options = sites, options
        self._link_s = [
            [link.to_host_seconds(o.n_bytes) + link.to_device_seconds(o.n_bytes) for o in own]
            for own in options
        ]
        table = OptionTable.of(
            [
                [
                    (
                        link.to_host_seconds(o.n_bytes),
                        link.to_device_seconds(o.n_bytes),
                        o.encode_s,
                        o.decode_s,
                    )
                    for o in own
                ]
                for own in options
            ],
            [record.nbytes for record in sites],
        )
        hidden = (
            [record.hidden_forward_s for record in sites],
            [record.hidden_backward_s for record in sites],
        )
        self._model: StepModel
        if limits is None:
            self._model = LinkQueue(table, *hidden)
        else:
            self._model = StepTimeline(table, *hidden, limits)
        self._before = [
            _index_of(last.get(record.site), own)
            for record, own in zip(sites, options, strict=True)
        ]
        self._hysteresis = hysteresis
        self._most_held_s = math.inf if limits is None else MOST_HELD * sum(map(sum, hidden))
        #: What a change must gain, ``[N, K + 1]``.
        self._penalty = np.zeros(table.packed.shape)

    def decide(self, policy: Policy) -> list[Decision]:
        """Return the decisions of a policy."""
        most = max(map(len, self._options), default=1)
        same = [[min(k, len(own) - 1) for own in self._options] for k in range(most)]
        if policy == "raw" or not self._sites:
            return self._explained(same[0], policy)
        if policy == "static":
            return self._explained(same[min(1, most - 1)], policy)
        before = [was or 0 for was in self._before]
        is_known = any(was is not None for was in self._before)
        if is_known and self._hysteresis < math.inf:
            self._penalize(before)
        search = PlanSearch(
            [len(own) for own in self._options],
            self._judged,
            [self._kind(i) for i in range(len(self._sites))],
            [self._gains(i) for i in range(len(self._sites))],
        )
        starts = [before, *same] if is_known else same
        self._search = search
        if is_known and self._hysteresis == math.inf:
            return self._explained(before, policy)
        return self._explained(search.best(starts, not is_known), policy)

    def _penalize(self, before: Sequence[int]) -> None:
        """Charge changes, all of them together no more than a share of the step."""
        held = np.zeros(len(before))
        for i, was in enumerate(self._before):
            if was is not None:
                held[i] = self._hysteresis * self._link_s[i][0]
        held *= min(1.0, self._most_held_s / max(float(held.sum()), 1e-12))
        self._penalty[:] = held[:, None]
        self._penalty[np.arange(len(before)), before] = 0.0

    def _kind(self, i: int) -> tuple[object, ...]:
        """Return what is equal for sites that are likely to be treated alike."""
        record = self._sites[i]
        shares = tuple(round(math.log2(max(o.n_bytes, 1)) * 4) for o in self._options[i])
        return record.nbytes, record.dtype, record.operation, shares, self._before[i]

    def _gains(self, i: int) -> tuple[float, float, float]:
        """Return by several measures what packing a site may gain."""
        own, link_s = self._options[i], self._link_s[i]
        if len(own) < 2:
            return -1.0, -1.0, -1.0
        saved = link_s[0] - link_s[1]
        return saved / max(own[1].codec_s, 1e-9), saved - own[1].codec_s, link_s[0]

    def _judged(self, plans: Plans) -> Seconds:
        rows = np.arange(plans.shape[0])[:, None]
        return np.asarray(self._model.seconds(plans) + self._penalty[rows, plans].sum(axis=0))

    def _costs(self, plan: Sequence[int], units: Sequence[Plans]) -> dict[int, Seconds]:
        """Return by site what each option costs more than not to move the tensor.

        Sites of a unit change together, and share what that costs.
        """
        options = len(self._penalty.T)
        plans = np.repeat(np.array(plan, np.intp)[:, None], len(units) * options, axis=1)
        for u, unit in enumerate(units):
            for k in range(options):
                plans[unit, u * options + k] = k
        seconds = self._model.seconds(plans).reshape(len(units), options)
        return {
            int(i): (seconds[u, :-1] - seconds[u, -1]) / len(unit)
            for u, unit in enumerate(units)
            for i in unit
        }

    def _explained(self, plan: Sequence[int], policy: Policy) -> list[Decision]:
        units = [np.array([i]) for i in range(len(plan))]
        if policy == "auto" and plan:
            units = self._search.units
        all_costs = self._costs(plan, units) if plan else {}
        decisions = []
        for i, (record, own) in enumerate(zip(self._sites, self._options, strict=True)):
            costs = all_costs[i][: len(own)]
            chosen = plan[i]
            best = chosen or (int(np.argmin(costs[1:])) + 1 if len(own) > 1 else 0)
            packed = float(costs[best]) if best else None
            held = ""
            if policy == "auto" and int(np.argmin(costs)) != chosen == self._before[i]:
                held = "as before, since the change would save too little"
            decisions.append(
                _decision(
                    record,
                    own[chosen],
                    own[best] if best else None,
                    float(costs[0]),
                    packed,
                    policy,
                    held,
                )
            )
        return decisions


def _index_of(decision: Decision | None, options: Sequence[_Option]) -> int | None:
    """Return which option a decision took; None where it is there no longer."""
    if decision is None or decision.action == "keep":
        return None
    return next((k for k, o in enumerate(options) if o.codec == decision.codec), None)
