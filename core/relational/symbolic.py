"""Shapes of a program's inputs before there are any: sizes that only inputs have are symbols."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ..errors import ArgumentError
from .graph import RelationalGraph
from .passes import ROWS_OF, InputInfo
from .trace import Value, in_order

#: What a size that is not known counts as where steps are chosen.
ASSUMED = 64


class Dim(int):
    """A size that is shown as a number times names; products and parts of it are, too.

    Parameters
    ----------
    value : int
        What it counts as.
    factor : int
        The number.
    names : tuple of str
        The names.
    """

    factor: int
    names: tuple[str, ...]

    def __new__(cls, value: int, factor: int, names: tuple[str, ...]) -> Dim:
        """Return an int with a text."""
        self = super().__new__(cls, value)
        self.factor, self.names = factor, names
        return self

    def __repr__(self) -> str:
        factor = () if self.factor == 1 else (str(self.factor),)
        return " ".join((*factor, *self.names))

    __str__ = __repr__

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        factor, names = (other.factor, other.names) if isinstance(other, Dim) else (other, ())
        return Dim(int(self) * int(other), self.factor * factor, (*self.names, *names))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        if isinstance(other, Dim) or self.factor % other:
            return int(self) // other
        return Dim(int(self) // other, self.factor // other, self.names)


class _Symbol:
    """A size: another one once that is known, as a number, a symbol, or a product of two."""

    def __init__(self) -> None:
        self.known: Any = None


Size = Any  # int, _Symbol, or a tuple of two sizes that are multiplied


class _Row:
    """The shape of a row, None while its rank is not known; `letter`: what an input depends on."""

    def __init__(self, shape: tuple[Size, ...] | None = None) -> None:
        self.shape, self.letter = shape, ""

    def or_else(self, shape: tuple[Size, ...], rank: int = 0) -> tuple[Size, ...]:
        """Return the shape; where it was not known it is this one from now on.

        One of less than `rank` dimensions was guessed wrongly.
        """
        if self.shape is None:
            self.shape = shape
        if len(self.shape) < rank:
            raise ArgumentError(f"a row of {rank} dimensions or more was taken for another")
        return self.shape

    def alone(self, numbers: str) -> tuple[Size, ...]:
        """Return the shape; where nothing says it, a number if its letter is given, or a vector."""
        return self.or_else(() if self.letter and self.letter in numbers else (_Symbol(),))


def symbolic_inputs(
    names: Sequence[str], outputs: Sequence[Value], graph: RelationalGraph, numbers: str = "er"
) -> dict[str, InputInfo]:
    """Return shapes for the inputs of a program on a graph, by what the program does with them.

    Rank and equal sizes follow from the operators. Where these leave a choice, rows have one
    dimension, and those of the letters `numbers` none where they are factors.

    Raises
    ------
    ArgumentError
        Where that choice does not fit what follows.
    """
    inputs: dict[str, _Row] = {}
    rows: dict[int, _Row] = {}
    for value in in_order(outputs):
        if value.op == "input":
            found = inputs.setdefault(value.attrs[0], _Row())
        elif value.op in ("place", "shared"):
            found = rows[id(value.args[0])]
            found.letter = found.letter or "".join(value.deps)
        else:
            found = _result(value, [rows[id(a)] for a in value.args], numbers)
        rows[id(value)] = found
    count_up = itertools.count(1)
    sizes: dict[_Symbol, Dim] = {}

    def size(term: Size) -> int:
        term = _resolved(term)
        if isinstance(term, tuple):
            return size(term[0]) * size(term[1])
        if isinstance(term, _Symbol):
            if term not in sizes:
                sizes[term] = Dim(ASSUMED, 1, (f"F{next(count_up)}",))
            return sizes[term]
        return int(term)

    infos = {}
    for name in names:
        row = inputs.get(name, _Row(()))
        count = (graph.row_count(ROWS_OF[row.letter]),) if row.letter else ()
        infos[name] = InputInfo((*count, *map(size, row.alone(numbers))))
    return infos


def _result(value: Value, args: list[_Row], numbers: str) -> _Row:
    """Return the shape of a value, and make those of its arguments fit."""
    match value.op:
        case "inverse_counts":
            return _Row(())
        case "typed_linear" | "linear":
            return _Row(_product(args[0], args[1], value.op == "typed_linear"))
        case "t":
            *rest, k, n = args[0].or_else((_Symbol(), _Symbol()), 2)
            return _Row((*rest, n, k))
        case "split":
            return _Row(_split(args[0], *value.attrs))
        case "flatten":
            shape = args[0].or_else((_Symbol(), _Symbol()), 1)
            return _Row((shape if len(shape) == 2 else shape[0],))
    if len(args) == 1:
        return _Row(args[0].alone(numbers))
    if value.op in ("mul", "div"):
        for row in args:
            if row.letter and row.letter in numbers:
                row.alone(numbers)
    for row, other in (args, args[::-1]):
        if row.shape is None and other.shape:  # a number says nothing
            row.shape = other.shape
    shape = args[0].or_else((_Symbol(),))
    shape = _joined(shape, args[1].or_else(shape or (_Symbol(),)))
    return _Row((*shape[:-1], 1) if value.op == "dot" else shape)


def _product(x: _Row, weight: _Row, heads: bool) -> tuple[Size, ...]:
    if x.shape is None and weight.shape is not None:
        x.shape = weight.shape[:-1]
    rows = x.or_else((_Symbol(),), 1)
    shape = weight.or_else((*(rows[:-1] if heads else ()), rows[-1], _Symbol()), 2)
    for size, other in zip(rows if heads else rows[-1:], shape[:-1], strict=False):
        _equal(size, other, broadcast=False)
    return (*rows[:-1], shape[-1])


def _split(x: _Row, heads: int) -> tuple[Size, ...]:
    width = _resolved(x.or_else((_Symbol(),), 1)[0])
    if isinstance(width, int):
        return heads, width // heads
    if isinstance(width, tuple) and _resolved(width[0]) == heads:
        return width
    part = _Symbol()
    if isinstance(width, _Symbol):
        width.known = (heads, part)
    return heads, part


def _joined(a: tuple[Size, ...], b: tuple[Size, ...]) -> tuple[Size, ...]:
    """Return the shape of both after broadcasting; sizes that must be equal are, from now on."""
    n = max(len(a), len(b))
    padded = ((1,) * (n - len(shape)) + shape for shape in (a, b))
    return tuple(_equal(x, y) for x, y in zip(*padded, strict=True))


def _equal(a: Size, b: Size, broadcast: bool = True) -> Size:
    """Make sizes equal, unless one is 1 and may be broadcast; return that of the result."""
    a, b = _resolved(a), _resolved(b)
    if a is b or (broadcast and b == 1):
        return a
    if broadcast and a == 1:
        return b
    if isinstance(a, tuple) and isinstance(b, tuple):
        return tuple(_equal(x, y) for x, y in zip(a, b, strict=True))
    if not isinstance(a, _Symbol):
        if not isinstance(b, _Symbol):
            return a
        a, b = b, a
    rest = _factors(b)
    if a not in rest:
        a.known = b
        return b
    rest.remove(a)
    if broadcast and any(factor != 1 for factor in rest):
        a.known = 1
        return b
    for factor in rest:
        if isinstance(factor, _Symbol):
            factor.known = 1
        elif factor != 1:
            raise ArgumentError(f"a size would be {factor} times itself")
    return b


def _factors(term: Size) -> list[Size]:
    """Return the numbers and symbols whose product a size is."""
    term = _resolved(term)
    if isinstance(term, tuple):
        return [*_factors(term[0]), *_factors(term[1])]
    return [term]


def _resolved(term: Size) -> Size:
    while isinstance(term, _Symbol) and term.known is not None:
        term = term.known
    return term
