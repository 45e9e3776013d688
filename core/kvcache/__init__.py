"""Packed K/V history of attention layers: lossless, append-only on the host, decoded ahead.

`PackedHistory` holds the K or the V of one layer, `HistoryReader` brings histories to their device.
Framework-free: `bitslab.integrations.transformers.CompressedCache` is made of them.
"""

from .history import PackedHistory
from .packing import CodecPlans
from .reader import HistoryReader

__all__ = ["CodecPlans", "HistoryReader", "PackedHistory"]
