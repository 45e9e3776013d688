"""Canonical, length-limited Huffman codes over small integers."""

from .codes import canonical_codes, check_lengths, code_lengths, lookup_table

__all__ = ["canonical_codes", "check_lengths", "code_lengths", "lookup_table"]
