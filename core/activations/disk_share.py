"""What a disk carries by its measured rates, and with policy "auto" which sites go on to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..engine.advisor import Decision, SiteRecord, SwapLink
from ..engine.advisor.planning import OffloadUnit, adaptive_offload
from .disk import DiskTier, required_bytes_per_s


def disk_link(link: SwapLink, disk: DiskTier, *, on_gpu: bool) -> SwapLink:
    """Return what tensors cross on their way to a disk: the slower one of link and disk.

    On a CPU raw ones are written from where they are, and cross no link.
    """
    write, read = disk.write_bytes_per_s, disk.read_bytes_per_s
    if not on_gpu:
        return SwapLink(write, read)
    return SwapLink(
        min(write, link.d2h_bytes_per_s), min(read, link.h2d_bytes_per_s), link.copy_seconds
    )


def sites_for_disk(
    records: Sequence[SiteRecord], decisions: Sequence[Decision], disk: SwapLink
) -> set[str]:
    """Return the sites whose tensors a disk carries while a step computes.

    They are those that are saved first, and thus read last, up to the last one that
    `adaptive_offload` says (SSDTrain, section 5.3.5), packed as was decided.

    Parameters
    ----------
    records : sequence of SiteRecord
        In the order of the forward pass.
    decisions : sequence of Decision
        One each, for the disk.
    disk : SwapLink
        Its rates.
    """
    if not records:
        return set()
    units, begin_s, backward_s = [], 0.0, 0.0
    for record, made in zip(records, decisions, strict=True):
        share = 1.0 if made.codec is None else record.ratio[made.codec]
        nbytes = int(record.nbytes * share)
        # What is read behind a tensor, in reverse order, is what was saved before it.
        units.append(OffloadUnit(record.site, nbytes, begin_s, 0.0, backward_s))
        begin_s += record.hidden_forward_s
        backward_s = record.hidden_backward_s
    rate = min(disk.d2h_bytes_per_s, disk.h2d_bytes_per_s)
    return set(adaptive_offload(units, begin_s + backward_s, rate).moved)


def with_place(decision: Decision, disk: DiskTier, *, on_disk: bool, whole: bool) -> Decision:
    """Return a decision whose reason says where the tensors go.

    Parameters
    ----------
    decision : Decision
        For the disk, or for the host.
    disk : DiskTier
        The disk.
    on_disk : bool
        Which of both.
    whole : bool
        Whether all sites go to the disk, whatever it carries in the time.
    """
    rates = f"{disk.write_bytes_per_s / 1e9:.3g} and {disk.read_bytes_per_s / 1e9:.3g} GB/s"
    if on_disk:
        where = f"To the disk, {rates} there and back"
        where += "." if whole else ", in the time of the step."
    else:
        where = f"To the host: the disk, {rates}, carries no more in the time of the step."
    return replace(decision, reason=f"{decision.reason} {where}")


def required_note(step_bytes: float, step_s: float, write_bytes_per_s: float) -> str:
    """Return how fast a disk would have to write to take all tensors of a step.

    Parameters
    ----------
    step_bytes, step_s : float
        Bytes of its tensors, and its seconds (SSDTrain, section 5.3.6: half of them for writing).
    write_bytes_per_s : float
        What the disk writes.
    """
    required = required_bytes_per_s(step_bytes, step_s)
    return (
        f"To take all {step_bytes / 1e6:,.1f} MB of a step's tensors in half of its "
        f"{step_s * 1e3:,.4g} ms a disk would have to write {required / 1e9:.3g} GB/s; measured "
        f"were {write_bytes_per_s / 1e9:.3g}."
    )
