"""Codecs whose decoded values are within a bound of the given ones."""
