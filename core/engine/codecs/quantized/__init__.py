"""Codecs whose decoded values are within a bound of the given ones."""

from .attention_error import AttentionFit, Measured, NothingSeenError, fit_error
from .codec import TileCodec
from .fit import CODERS, TileFit, fit_tiles, measured_fit, query_weights
from .lossless import fit_lossless
from .plan import TilePlan
from .quantise import NO_CODE, dequantise, quantise, steps_and_centers

__all__ = [
    "CODERS",
    "NO_CODE",
    "AttentionFit",
    "Measured",
    "NothingSeenError",
    "TileCodec",
    "TileFit",
    "TilePlan",
    "dequantise",
    "fit_error",
    "fit_lossless",
    "fit_tiles",
    "measured_fit",
    "quantise",
    "query_weights",
    "steps_and_centers",
]
