"""Reads Criteo's click logs: the Kaggle challenge's and the Terabyte's TSV, and CSV of either."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.report import Report

from .clicks import Clicks, ClicksError, Feature, tested_lines

N_DENSE, N_SPARSE = 13, 26
#: A label and the features.
COLUMNS = 1 + N_DENSE + N_SPARSE
#: Rows of the 26 tables when every value in the Kaggle challenge's log has one of its own.
KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
DENSE_NAMES = tuple(f"I{i + 1}" for i in range(N_DENSE))
NAMES = tuple(f"C{i + 1}" for i in range(N_SPARSE))
#: Bytes read at once.
READ_BYTES = 1 << 24
#: Digits of the numbers that are read without Python.
INT_DIGITS, HEX_DIGITS = 18, 8
#: An empty field: no value of a category, which has at most 32 bits, and stands before them all.
EMPTY = -1

_HEX = np.full(256, 255, np.uint8)
for _i, _c in enumerate(b"0123456789abcdef"):
    _HEX[_c] = _i
_HEX[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)


def read_criteo(
    path: Path,
    max_rows: int,
    max_lines: int | None = None,
    test_share: float = 0.1,
    report: Report | None = None,
) -> Clicks:
    """Read a log.

    The fields of a line are a label, 13 integers and 26 categories in hexadecimal, parted by tabs
    or by commas; any of the features may be empty. A line of names may come first, and a number of
    the line may be the first field, as in CSV files made of these logs.

    Integers x become ``log(1 + max(x, 0))``, 0 when empty. The values of a category are numbered
    in their order, an empty field being a value; if there are more than `max_rows` of them, its
    table has `max_rows` rows and values are hashed to these.

    Parameters
    ----------
    path : Path
        The file; ``.gz`` is decompressed.
    max_rows : int
        Rows of a table, at most.
    max_lines : int, optional
        Lines to read, at most.
    test_share : float
        Share of the lines, the last ones, to keep back for testing.
    report : callable, optional
        Called with the bytes of the file that are read, and how many there are.

    Raises
    ------
    ClicksError
        When the file cannot be read, or a line has another form; the message has its number.

    Notes
    -----
    Takes about 600 bytes of memory a line while it reads, and half of that afterwards.
    """
    parts = []
    n_lines = 0
    try:
        for block in _blocks(path, report):
            part = block.parsed(None if max_lines is None else max_lines - n_lines)
            parts.append(part)
            n_lines += len(part[0])
            if n_lines == max_lines:
                break
    except (OSError, EOFError, zlib.error) as error:
        raise ClicksError(f"--data {path}: cannot be read: {error}") from error
    n_tested = tested_lines(n_lines, test_share, f"--data {path}")
    labels, dense, categories = (
        np.concatenate(arrays, axis=-1) for arrays in zip(*parts, strict=True)
    )
    features = [
        Feature(name, *numbered(values, max_rows))
        for name, values in zip(NAMES, categories, strict=True)
    ]
    numbers = torch.from_numpy(np.ascontiguousarray(dense.T))
    return Clicks(path.name, numbers, torch.from_numpy(labels), features, n_tested)


def numbered(values: np.ndarray[Any, Any], max_rows: int) -> tuple[int, torch.Tensor]:
    """Turn the values of a category, int64 ``[N]``, to ids; return the rows that these need."""
    distinct, ids = np.unique(values, return_inverse=True)
    if len(distinct) <= max_rows:
        return len(distinct), torch.from_numpy(ids.astype(np.int32))
    return max_rows, torch.from_numpy(hashed(values, max_rows))


def hashed(values: np.ndarray[Any, Any], rows: int) -> np.ndarray[Any, Any]:
    """Hash int64 values to int32 ids below `rows`: the upper bits of a product, then a remainder.

    The last bits alone would do for Criteo's values, which are hashes, but not for others.
    """
    mixed = (values + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(32)) % np.uint64(rows)).astype(np.int32)


@dataclass
class _Block:
    """Whole lines of a log, each ending with a newline; `first_line` is the number of the first."""

    path: Path
    text: bytes
    delimiter: int
    numbered_lines: bool
    first_line: int

    def parsed(self, max_lines: int | None) -> tuple[np.ndarray[Any, Any], ...]:
        """Return labels float32 [n], dense float32 [13, n] and categories int64 [26, n]."""
        self.bytes = np.frombuffer(self.text, np.uint8)
        columns = COLUMNS + self.numbered_lines
        is_end = self.bytes == ord("\n")
        ends = np.flatnonzero(is_end | (self.bytes == self.delimiter))
        found = np.diff(np.flatnonzero(is_end[ends]), prepend=-1)
        n_lines = len(found) if max_lines is None else min(max_lines, len(found))
        for line in np.flatnonzero(found[:n_lines] != columns):
            self._refuse(line, f"{int(found[line])} fields, expected {columns}")
        # One field after the other of these lines, each after the end of the last.
        ends = ends[: n_lines * columns]
        begins = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])
        counts = ends - begins
        fields = [(begins[i::columns], counts[i::columns]) for i in range(columns)]
        fields = fields[self.numbered_lines :]
        labels = self._integers("label", *fields[0])
        for line in np.flatnonzero((labels != 0) & (labels != 1) | (fields[0][1] == 0)):
            self._refuse(line, f"label {self._field(*fields[0], line)!r}, accepted are 0 and 1")
        dense = np.stack(
            [
                np.log1p(np.maximum(self._integers(name, *field), 0)).astype(np.float32)
                for name, field in zip(DENSE_NAMES, fields[1 : 1 + N_DENSE], strict=True)
            ]
        )
        categories = np.stack([self._categories(*field) for field in fields[1 + N_DENSE :]])
        return labels.astype(np.float32), dense, categories

    def _integers(
        self, name: str, begins: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """Return a column of numbers, float64; 0 where it is empty."""
        negative = self._bytes_at(begins, 0, counts) == ord("-")
        values = np.zeros(len(begins), np.int64)
        odd = (counts > INT_DIGITS) | (negative & (counts == 1))
        for i in range(min(int(counts.max(initial=0)), INT_DIGITS)):
            digit = self._bytes_at(begins, i, counts).astype(np.int64) - ord("0")
            there = (counts > i) & ~(negative & (i == 0))
            odd |= there & ((digit < 0) | (digit > 9))
            values = np.where(there & ~odd, values * 10 + digit, values)
        numbers = np.where(negative, -values, values).astype(np.float64)
        for line in np.flatnonzero(odd):
            # Such as 3.0, what some programs make of integers where others are missing.
            text = self._field(begins, counts, line)
            try:
                numbers[line] = float(text)
            except ValueError:
                self._refuse(line, f"{name} {text!r}, accepted are numbers and nothing")
            if not np.isfinite(numbers[line]):
                self._refuse(line, f"{name} {text!r}, accepted are finite numbers")
        return numbers

    def _categories(
        self, begins: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """Return a column of categories, int64, EMPTY where it is empty."""
        values = np.zeros(len(begins), np.int64)
        odd = counts > HEX_DIGITS
        for i in range(min(int(counts.max(initial=0)), HEX_DIGITS)):
            digit = _HEX[self._bytes_at(begins, i, counts)]
            there = counts > i
            odd |= there & (digit == 255)
            values = np.where(there, values << 4 | digit, values)
        for line in np.flatnonzero(odd):
            values[line] = zlib.crc32(self._field(begins, counts, line).encode())
        return np.where(counts == 0, EMPTY, values)

    def _bytes_at(
        self, begins: np.ndarray[Any, Any], i: int, counts: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """Return byte i of each field; any byte where a field is shorter."""
        found: np.ndarray[Any, Any] = self.bytes[np.minimum(begins + i, begins + counts)]
        return found

    def _field(self, begins: np.ndarray[Any, Any], counts: np.ndarray[Any, Any], line: Any) -> str:
        begin = int(begins[line])
        return self.text[begin : begin + int(counts[line])].decode(errors="replace")

    def _refuse(self, line: Any, reason: str) -> None:
        raise ClicksError(
            f"--data {self.path}: line {self.first_line + int(line):,} has {reason}; wanted are a "
            f"label, {N_DENSE} integers and {N_SPARSE} categories, parted by tabs or commas"
        )


def _blocks(path: Path, report: Report | None) -> Iterator[_Block]:
    """Cut a file into blocks of whole lines, without the line of names if there is one."""
    delimiter, numbered_lines, line = ord("\t"), False, 1
    for text in _texts(path, report):
        if line == 1:
            first, _, others = text.partition(b"\n")
            delimiter = ord("\t" if b"\t" in first else ",")
            fields = first.split(bytes([delimiter]))
            numbered_lines = len(fields) == COLUMNS + 1
            if _is_header(fields):
                text, line = others, 2
        if text:
            yield _Block(path, text, delimiter, numbered_lines, line)
            line += text.count(b"\n")


def _texts(path: Path, report: Report | None) -> Iterator[bytes]:
    """Read a file in pieces of whole lines, each ending with a newline."""
    rest = b""
    with path.open("rb") as raw:
        file = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        while piece := file.read(READ_BYTES):
            if report:
                report(raw.tell(), path.stat().st_size)
            whole, newline, rest = (rest + piece).rpartition(b"\n")
            if newline:
                yield (whole + newline).replace(b"\r\n", b"\n")
    if rest:
        yield rest.rstrip(b"\r") + b"\n"


def _is_header(fields: list[bytes]) -> bool:
    """Whether the first line has names: no label or number of a line begins with a letter."""
    return len(fields) >= COLUMNS and fields[0][:1].isalpha()
