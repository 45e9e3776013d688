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
from .decoding import decode_bytes_per_s
from .link import LinkModel, measure_link

__all__ = [
    "MIN_SORTED_IDS",
    "Advice",
    "Advisor",
    "LinkModel",
    "advise",
    "advisor_for",
    "decode_bytes_per_s",
    "measure_link",
    "pays_to_sort",
    "pays_to_sort_rows",
]
