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
from .codec_times import (
    CodecTimes,
    Line,
    TimeModel,
    TimeSample,
    fit_codec_times,
    relative_absolute_error,
)
from .decision_history import DecisionHistory, agreement
from .decoding import decode_bytes_per_s
from .link import LinkModel, measure_link
from .lossy_range import LossyRange, LossySchedule, lossy_range
from .measuring import fit_time_model, measure_codec
from .network import NetworkModel, network_model
from .product_times import FusedTimes, fastest_way, fused_times, measured_rows
from .swap_timeline import SwapLimits
from .swapping import (
    POLICIES,
    Decision,
    SiteRecord,
    SwapLink,
    Times,
    decide,
    packed_bytes,
    swap_cost,
)
from .synthetic import SyntheticTensors

__all__ = [
    "MIN_SORTED_IDS",
    "POLICIES",
    "Advice",
    "Advisor",
    "CodecTimes",
    "Decision",
    "DecisionHistory",
    "FusedTimes",
    "Line",
    "LinkModel",
    "LossyRange",
    "LossySchedule",
    "NetworkModel",
    "SiteRecord",
    "SwapLimits",
    "SwapLink",
    "SyntheticTensors",
    "TimeModel",
    "TimeSample",
    "Times",
    "advise",
    "advisor_for",
    "agreement",
    "decide",
    "decode_bytes_per_s",
    "fastest_way",
    "fit_codec_times",
    "fit_time_model",
    "fused_times",
    "lossy_range",
    "measure_codec",
    "measure_link",
    "measured_rows",
    "network_model",
    "packed_bytes",
    "pays_to_sort",
    "pays_to_sort_rows",
    "relative_absolute_error",
    "swap_cost",
]
