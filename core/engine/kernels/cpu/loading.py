"""The modules of Numba functions, loaded on first use: importing bitslab does not load Numba."""

from __future__ import annotations

import functools
from typing import Any

from ....errors import load_optional


@functools.cache
def packing() -> Any:
    """Load the functions that pack, check and decode rows."""
    load_optional("numba", extra=None, purpose="packing rows on the CPU")
    from . import rows

    return rows


@functools.cache
def rewriting() -> Any:
    """Load the function that packs rows into a table."""
    load_optional("numba", extra=None, purpose="packing rows on the CPU")
    from . import rewrite

    return rewrite


@functools.cache
def encoding_shorts() -> Any:
    """Load the functions that encode rows of short chunks."""
    load_optional("numba", extra=None, purpose="packing rows on the CPU")
    from . import shorts

    return shorts


@functools.cache
def gathering() -> Any:
    """Load the functions that gather rows."""
    load_optional("numba", extra=None, purpose="gathering rows on the CPU")
    from . import gather

    return gather


@functools.cache
def mapping() -> Any:
    """Load the functions of the map."""
    load_optional("numba", extra=None, purpose="looking up rows on the CPU")
    from . import maps

    return maps


@functools.cache
def planning() -> Any:
    """Load the functions that count for a planner."""
    load_optional("numba", extra=None, purpose="planning a codec")
    from . import plan

    return plan


@functools.cache
def zero_values() -> Any:
    """Load the functions of zero-value compression."""
    load_optional("numba", extra=None, purpose="compressing tensors on the CPU")
    from . import zvc

    return zvc


@functools.cache
def tiling() -> Any:
    """Load the functions of coded tiles."""
    load_optional("numba", extra=None, purpose="coding tiles on the CPU")
    from . import tile_streams

    return tile_streams


@functools.cache
def keeping() -> Any:
    """Load the functions that the forms share which keep some elements."""
    load_optional("numba", extra=None, purpose="packing tensors on the CPU")
    from . import kept

    return kept


@functools.cache
def sparse_rows() -> Any:
    """Load the functions of compressed sparse rows."""
    load_optional("numba", extra=None, purpose="packing tensors on the CPU")
    from . import csr

    return csr


@functools.cache
def run_lengths() -> Any:
    """Load the functions of runs of equal units."""
    load_optional("numba", extra=None, purpose="packing tensors on the CPU")
    from . import rle

    return rle


@functools.cache
def zfp_blocks() -> Any:
    """Load the functions of zfp's blocks."""
    load_optional("numba", extra=None, purpose="packing tensors on the CPU")
    from . import zfp

    return zfp


@functools.cache
def merging() -> Any:
    """Load the function that finds lengths of codes."""
    load_optional("numba", extra=None, purpose="finding lengths of codes")
    from . import package_merge

    return package_merge


@functools.cache
def equal_rows() -> Any:
    """Load the functions of rows of which equal ones are kept once."""
    load_optional("numba", extra=None, purpose="packing rows on the CPU")
    from . import vectors

    return vectors


@functools.cache
def vector_bodies() -> Any:
    """Load the functions that write the sections of bodies of rows."""
    load_optional("numba", extra=None, purpose="packing rows on the CPU")
    from . import vector_bodies

    return vector_bodies


@functools.cache
def vector_reading() -> Any:
    """Load the functions that read the sections of bodies of rows."""
    load_optional("numba", extra=None, purpose="unpacking rows on the CPU")
    from . import vector_reading

    return vector_reading


@functools.cache
def code_streams() -> Any:
    """Load the functions of fields and streams of codes."""
    load_optional("numba", extra=None, purpose="packing rows on the CPU")
    from . import code_streams

    return code_streams


@functools.cache
def summing() -> Any:
    """Load the functions that sum rows by the entries of sparse matrices."""
    load_optional("numba", extra=None, purpose="summing rows over edges on the CPU")
    from . import segments

    return segments
