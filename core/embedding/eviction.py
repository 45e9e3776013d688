"""Eviction strategies: which row leaves a full cache."""

from __future__ import annotations

from enum import Enum


class EvictionStrategy(Enum):
    """Which row leaves a full cache first.

    ``LFU``: the one looked up least often since it became resident. ``DATASET``: the one that is
    used least in the data set, by counts given before training. ``LRU``: the one not looked up for
    longest.
    """

    LFU = 1
    DATASET = 2
    LRU = 3
