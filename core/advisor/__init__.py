"""Models of links and codecs, and the decisions that follow from them."""

from .advice import Advice, Advisor, advise, advisor_for
from .decoding import decode_bytes_per_s
from .link import LinkModel, measure_link

__all__ = [
    "Advice",
    "Advisor",
    "LinkModel",
    "advise",
    "advisor_for",
    "decode_bytes_per_s",
    "measure_link",
]
