"""What was decided for each site at each profile: the rows behind figures 8 and 9 of CSWAP+."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import ArgumentError
from .swapping import Decision, SiteRecord

#: Profiles that are kept at most; a training of a week may have tens of thousands.
MOST_PROFILES = 256


class DecisionHistory:
    """Decisions of a training run, by profile and site.

    Of more than `MOST_PROFILES` every second one is forgotten, again and again, so that the early
    ones lie further apart. One thread may add while others read.
    """

    def __init__(self) -> None:
        self._rows_of: dict[int, list[dict[str, Any]]] = {}
        #: By site, action and codec.
        self._last: dict[str, tuple[str, str | None]] = {}

    @property
    def _rows(self) -> list[dict[str, Any]]:
        return [row for rows in list(self._rows_of.values()) for row in rows]

    def add(
        self,
        profile: int,
        records: Iterable[SiteRecord],
        decisions: Iterable[Decision],
        epoch: int | None = None,
    ) -> None:
        """Keep what was decided at a profile, and what it was decided from.

        Parameters
        ----------
        profile : int
            Number of the profile.
        records, decisions : iterable
            Of the same sites in the same order.
        epoch : int, optional
            The epoch that it was made in, where one is known.

        Raises
        ------
        ArgumentError
            When they are of different sites.
        """
        sites, chosen = list(records), list(decisions)
        if [record.site for record in sites] != [decision.site for decision in chosen]:
            raise ArgumentError("decisions: of other sites than the records")
        last = self._last
        made = [
            {
                "profile": profile,
                "epoch": epoch,
                **decision.to_dict(),
                "nbytes": record.nbytes,
                "dtype": str(record.dtype).removeprefix("torch."),
                "operation": record.operation,
                "hidden_forward_s": record.hidden_forward_s,
                "hidden_backward_s": record.hidden_backward_s,
                "sparsity": record.sparsity,
                "ratio": dict(record.ratio),
                "changed": last.get(record.site, (decision.action, decision.codec))
                != (decision.action, decision.codec),
            }
            for record, decision in zip(sites, chosen, strict=True)
        ]
        self._last = last | {each.site: (each.action, each.codec) for each in chosen}
        kept = self._rows_of
        if profile not in kept and len(kept) >= MOST_PROFILES:
            profiles = list(kept)
            kept = {each: kept[each] for each in (profiles[0], *profiles[1::2])}  # with the last
        self._rows_of = kept | {profile: kept.get(profile, []) + made}

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each site and profile that is kept, in the order of the profiles.

        Its keys are those of `Decision`, with ``profile`` (its number), ``epoch`` (None where it is
        not known), ``nbytes``, ``dtype``, ``operation``,
        ``hidden_forward_s``, ``hidden_backward_s``, ``sparsity``, ``ratio``, and ``changed``:
        whether the site was treated otherwise before.
        """
        return [dict(row) for row in self._rows]

    def packed_sites(self) -> dict[int, int]:
        """Return the number of sites that are packed, by profile: figure 8."""
        counts: dict[int, int] = {}
        for row in self._rows:
            counts[row["profile"]] = counts.get(row["profile"], 0) + (row["action"] == "pack")
        return counts

    def grid(self) -> dict[str, dict[int, str]]:
        """Return by site and profile the codec, "raw" or "keep": figure 9."""
        grid: dict[str, dict[int, str]] = {}
        for row in self._rows:
            grid.setdefault(row["site"], {})[row["profile"]] = row["codec"] or row["action"]
        return grid


def agreement(decisions: Iterable[Decision], measured: Mapping[str, tuple[float, float]]) -> float:
    """Return the share of decisions that measured times confirm: figure 11 of the paper.

    Parameters
    ----------
    decisions : iterable of Decision
        Those to move a tensor raw or packed count.
    measured : mapping of str to (float, float)
        By site, seconds that its swap cost raw and packed.

    Returns
    -------
    float
        1.0 where there is none to compare.
    """
    verdicts = [
        (decision.action == "pack") == (measured[decision.site][1] < measured[decision.site][0])
        for decision in decisions
        if decision.action != "keep" and decision.site in measured
    ]
    return sum(verdicts) / len(verdicts) if verdicts else 1.0
