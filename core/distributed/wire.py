"""What ranks say to each other of messages, and the parts of a message.

The sizes stage exchanges one descriptor between each pair of ranks, an int64:

====== ==================================================================================
bits   content
====== ==================================================================================
0-31   CRC-32 of the terms: what both ranks must know alike of the messages between them
32-63  bytes of the message; `FAILED`: an earlier exchange failed on this rank, or this
       one before it could send, and it sends nothing now; bits 0-31 are then the cause's
       place in `CAUSES`
====== ==================================================================================

Every few exchanges, the same ones on all ranks, numbers for a decision follow in the same stage.
Over gloo a message of up to `SHORT_BYTES` follows them at once: one round in all. Longer ones, and
all over NCCL, cross in a second stage.

The terms are int64 numbers: `VERSION`, the pieces of a message, the calls from one decision to the
next (0: none decides), the calls so far, the numbers that follow a descriptor, then for each table
the dtype by its place in `DTYPES`, the elements of a row, the rows from the lower rank to the
higher one, and those back. The CRC-32 is that of all but the calls so far, then of these. Ranks
whose terms differ send each other the terms themselves behind the payload of the first piece, for
the error's message. Then all go on with as many pieces as the one that has most, so that nobody
waits for one that does not come.

A message has a part for each table of which it has rows, in the order of the tables. Before them
stand the bytes of each part but the last one, uint32. A part is one of three, by its size and its
first byte:

1. As many bytes as the rows have: the rows.
2. First byte `BY_ID`: rows of one id cross once. Byte 1 has the bits of a field, bytes 4 to 7 the
   rows that cross (uint32). Then the fields, as whole words: which of these rows each row is. Then
   these rows, as 1 or 3.
3. Else a body as `bitslab.engine.kernels.vector_format` says.

All numbers are little-endian.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..dtypes import dtype_name

VERSION = 5
#: Bytes of a descriptor.
DESCRIPTOR_BYTES = 8
#: Over gloo, bytes of the longest message that follows its descriptor at once.
SHORT_BYTES = 256 << 10
#: In place of the bytes of a message: the rank failed before, or before it could send.
FAILED = (1 << 32) - 1
#: Why, by its number; new ones are appended.
CAUSES = ("an error there", "out of memory", "a damaged message", "a disagreement")
OTHER_CAUSE, NO_MEMORY, DAMAGE, DISAGREEMENT = range(len(CAUSES))
#: One more than the most rows for a rank, elements of a row, and bytes of a message.
MOST_ROWS, MOST_ELEMENTS, MOST_BYTES = 1 << 31, 1 << 32, FAILED
#: Of numbers of terms that are read of another rank.
MOST_TERMS = 1 << 20
#: Numbers that follow a descriptor, and pieces of a message, at the most.
MOST_NUMBERS, MOST_PIECES = 6, 1024
#: First byte of a part whose rows cross once for each id; no `RowCoding` has this number.
BY_ID = 0xFF
BY_ID_HEADER = struct.Struct("<BBHI")
PART_SIZE = struct.Struct("<I")
#: Numbers of dtypes on the wire; new ones are appended.
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)

_LOW_32 = (1 << 32) - 1
_NUMBERS_OF_ALL, _NUMBERS_OF_A_TABLE = 5, 4
#: Which of them the calls so far are, and what each but the version is, in words.
_CALLS = 3
_EVERY = "decide_every"
_COUNTS = ("calls so far:", "numbers of a decision:")
_WORDS = ("pieces", _EVERY, *_COUNTS)
_CALL = struct.Struct("<q")


class Turn(NamedTuple):
    """Which call of its user an exchange is, and how often that one decides; alike on all ranks.

    Parameters
    ----------
    decide_every : int
        Calls from one decision to the next; 0: none.
    calls : int
        So far, one way.
    """

    decide_every: int = 0
    calls: int = 0


@dataclass(frozen=True)
class TableTerms:
    """What a rank knows of the rows of a table that cross between it and another one.

    Parameters
    ----------
    dtype, row_elements : int
        The dtype's place in `DTYPES`, and the elements of a row.
    sent, expected : int
        Rows that this rank sends, and those that it expects.
    """

    dtype: int
    row_elements: int
    sent: int
    expected: int


@dataclass(frozen=True)
class Terms:
    """What two ranks must know alike of the messages between them.

    Parameters
    ----------
    tables : sequence of TableTerms
        In the order of the tables.
    lower : bool
        Whether this rank is the lower one.
    version : int
        Of the wire.
    pieces, numbers_beside, decide_every : int
        Pieces of a message, numbers that follow each descriptor, and calls from one decision to the
        next.
    """

    tables: Sequence[TableTerms]
    lower: bool
    version: int = VERSION
    pieces: int = 1
    numbers_beside: int = 0
    decide_every: int = 0

    def numbers(self, calls: int = 0) -> list[int]:
        """Return them, behind so many calls, as both ranks write them."""
        found = [self.version, self.pieces, self.decide_every, calls, self.numbers_beside]
        for table in self.tables:
            rows = (table.sent, table.expected) if self.lower else (table.expected, table.sent)
            found += [table.dtype, table.row_elements, *rows]
        return found

    def check(self) -> int:
        """Return the CRC-32 of the numbers but the calls; see `checks_of_calls`."""
        numbers = self.numbers()
        del numbers[_CALLS]
        return zlib.crc32(np.array(numbers, "<i8").tobytes())

    def disagreement(self, theirs: Sequence[int], names: Sequence[str], calls: int = 0) -> str:
        """Return where the other rank's numbers differ, in words."""
        ours = self.numbers(calls)
        if not theirs or theirs[0] != ours[0]:
            there = theirs[0] if theirs else "none"
            return f"version {there} of the wire, here it is {ours[0]}"
        of_all = [
            f"{what} {_or_none(what, there)}, here it is {_or_none(what, here)}"
            for what, there, here in zip(_WORDS, theirs[1:], ours[1:], strict=False)
            if there != here and len(theirs) >= _NUMBERS_OF_ALL
        ]
        # Calls of another dtype or row are counted apart: the table says why, the counts do not.
        if of_all and not of_all[0].startswith(_COUNTS):
            return of_all[0]
        if len(theirs) != len(ours):
            count = (len(theirs) - _NUMBERS_OF_ALL) // _NUMBERS_OF_A_TABLE
            return f"{count} tables, here they are {len(self.tables)}"
        for i, (table, name) in enumerate(zip(self.tables, names, strict=True)):
            at = _NUMBERS_OF_ALL + _NUMBERS_OF_A_TABLE * i
            dtype, elements, *rows = theirs[at : at + _NUMBERS_OF_A_TABLE]
            # Of the other rank: what it expects is what this one sends.
            expected, sent = rows if self.lower else rows[::-1]
            of = f"table {name}: " if name else ""
            if dtype != table.dtype:
                return f"{of}dtype {_name(dtype)}, here it is {_name(table.dtype)}"
            if elements != table.row_elements:
                return f"{of}{elements} elements a row, here they are {table.row_elements}"
            if sent != table.expected:
                return f"{of}{sent} rows sent, {table.expected} are expected here"
            if expected != table.sent:
                return f"{of}{expected} rows expected, {table.sent} are sent from here"
        return of_all[0] if of_all else "other rows"

    def differ_but_in_rows(self, theirs: Sequence[int], calls: int = 0) -> bool:
        """Return whether numbers differ that a rank has alike for all others.

        Each rank of the group then differs from one of the two, and knows it.
        """
        return _of_rank(self.numbers(calls)) != _of_rank(theirs)

    def pieces_of(self, theirs: Sequence[int]) -> int:
        """Return the pieces of the other rank, by its numbers."""
        known = len(theirs) >= _NUMBERS_OF_ALL and theirs[0] == self.version
        return min(MOST_PIECES, theirs[1]) if known else self.pieces


def _of_rank(numbers: Sequence[int]) -> list[int]:
    """Return what does not depend on the other rank: all but the rows, the last two of a table."""
    rows = _NUMBERS_OF_A_TABLE - 2
    return [
        n
        for i, n in enumerate(numbers)
        if i < _NUMBERS_OF_ALL or (i - _NUMBERS_OF_ALL) % _NUMBERS_OF_A_TABLE < rows
    ]


def checks_of_calls(checks: Sequence[int], calls: int) -> list[int]:
    """Return what descriptors have of terms: their checks, and the calls so far."""
    number = _CALL.pack(calls)
    return [zlib.crc32(number, check) for check in checks]


def descriptor(check: int, n_bytes: int) -> int:
    """Return a descriptor as it crosses, of int64."""
    found = n_bytes << 32 | check
    return found - (1 << 64) if found >> 63 else found


def read_descriptor(number: int) -> tuple[int, int]:
    """Return check and bytes of the message of a descriptor."""
    return number & _LOW_32, number >> 32 & _LOW_32


def _or_none(what: str, number: int) -> str:
    """Return a number of `_WORDS`, as it is given."""
    return "none (its codec is not 'auto')" if what == _EVERY and not number else str(number)


def _name(dtype: Any) -> str:
    return dtype_name(DTYPES[dtype]) if 0 <= dtype < len(DTYPES) else f"number {dtype}"
