"""Canonical, length-limited Huffman codes over small integers."""

from .classes import entropy_bits, expected_bits, group_histograms
from .codes import canonical_codes, check_lengths, code_lengths, fixed_lengths, lookup_table

__all__ = [
    "canonical_codes",
    "check_lengths",
    "code_lengths",
    "entropy_bits",
    "expected_bits",
    "fixed_lengths",
    "group_histograms",
    "lookup_table",
]
