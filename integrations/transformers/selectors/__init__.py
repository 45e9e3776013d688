"""Selectors: which packed tokens a `CompressedCache` fetches; one method a file."""

from bitslab.integrations.transformers.selectors.attended import Attended
from bitslab.integrations.transformers.selectors.base import MAX_QUERIES, KVSelector
from bitslab.integrations.transformers.selectors.heavy_hitter import HeavyHitterSelector
from bitslab.integrations.transformers.selectors.infinigen import InfiniGenSelector

__all__ = ["MAX_QUERIES", "Attended", "HeavyHitterSelector", "InfiniGenSelector", "KVSelector"]
