"""Models of links and codecs, and the decisions that follow from them."""

from .advice import (
    MIN_SORTED_IDS,
    Advice,
    Advisor,
    advise,
    advisor_for,
    pays_to_sort,
    pays_to_sort_rows,
)
from .codec_times import CodecTimes, Line, TimeModel, TimeSample
from .decoding import decode_bytes_per_s
from .link import LinkModel, measure_link
from .swapping import Decision, SiteRecord, SwapLink, decide

__all__ = [
    "MIN_SORTED_IDS",
    "Advice",
    "Advisor",
    "CodecTimes",
    "Decision",
    "Line",
    "LinkModel",
    "SiteRecord",
    "SwapLink",
    "TimeModel",
    "TimeSample",
    "advise",
    "advisor_for",
    "decide",
    "decode_bytes_per_s",
    "measure_link",
    "pays_to_sort",
    "pays_to_sort_rows",
]
