"""Packed K/V history of attention layers: lossless, append-only on the host, decoded ahead.

`PackedHistory` holds the K or the V of one layer, `HistoryReader` fetches histories to their
device.
It knows no framework: `bitslab.integrations.transformers.CompressedCache` is built
on it.
"""

from ..engine.kernels.spans import MAX_ROWS
from .attending import PackedAttention
from .gathering import Gathered
from .history import PackedHistory
from .index import beam_index, repeat_count, sequence_index
from .joining import TokenJoin
from .loading import load_kernels
from .model_codecs import LayerCodecs, ModelCodecs, codecs_of_model
from .options import check_options
from .packed_tokens import Commit
from .packing import CodecPlans, Plans
from .placement import Balance, Offload, Placement, check_offload, crossing_seconds, free_bytes
from .raw_tokens import RawTokens, put_back
from .reader import HistoryReader, check_sm_budget
from .scores import (
    HeavyScores,
    PartialKeys,
    TokenScores,
    check_share,
    probability_sums,
    skew_of,
)
from .selection import Selection, Take
from .tile_plans import QUERIES, TileOptions, TilePlans
from .token_steps import StepCount, TokenSteps
from .words import Words

__all__ = [
    "Balance",
    "CodecPlans",
    "Commit",
    "Gathered",
    "HeavyScores",
    "HistoryReader",
    "LayerCodecs",
    "MAX_ROWS",
    "ModelCodecs",
    "Offload",
    "PackedAttention",
    "PackedHistory",
    "QUERIES",
    "PartialKeys",
    "Placement",
    "Plans",
    "RawTokens",
    "Selection",
    "StepCount",
    "Take",
    "TileOptions",
    "TilePlans",
    "TokenJoin",
    "TokenScores",
    "TokenSteps",
    "Words",
    "beam_index",
    "check_offload",
    "check_options",
    "check_share",
    "check_sm_budget",
    "codecs_of_model",
    "crossing_seconds",
    "free_bytes",
    "load_kernels",
    "probability_sums",
    "put_back",
    "repeat_count",
    "sequence_index",
    "skew_of",
]
