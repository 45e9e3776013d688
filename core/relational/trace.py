"""The first level: what a program computes, for nodes, edges and relations, without any layout.

A program is a Python function. It is run once on `Value` objects instead of tensors, and every
operation on these makes another one. Each knows what it depends on: the source of an edge (``s``),
its destination (``d``), its relation (``r``), the edge itself (``e``), the type of its source
(``p``) and of its destination (``q``), which node and relation have already. A value that depends
on source and relation alone is the same for all edges that share them, whatever its place in the
program: where it is computed is decided later, from these letters.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from ..errors import BitslabError

Number = int | float


class ProgramError(BitslabError, TypeError):
    """A program does what cannot be compiled; the message has the line."""


class Value:
    """A value of a program while it is traced, and an operation with its arguments.

    Attributes
    ----------
    op : str
        The operation.
    args : tuple of Value
        What it is applied to.
    attrs : tuple
        Numbers and names that belong to the operation.
    deps : frozenset of str
        Letters of what it depends on: s, d, r, e, p, q; none for a tensor that all share.
    line : str
        Where the program makes it, for messages.
    """

    def __init__(
        self,
        op: str,
        args: tuple[Value, ...] = (),
        attrs: tuple[Any, ...] = (),
        deps: str | frozenset[str] | None = None,
        line: str = "",
    ) -> None:
        self.op, self.args, self.attrs = op, args, attrs
        union = frozenset().union(*(a.deps for a in args)) if deps is None else frozenset(deps)
        self.deps: frozenset[str] = _without_implied(union)
        self.line = line or _line()

    def with_args(self, args: Sequence[Value]) -> Value:
        """Return the same operation on other arguments."""
        return Value(self.op, tuple(args), self.attrs, self.deps, self.line)

    def __add__(self, other: Value | Number) -> Value:
        return _pair("add", self, other)

    def __radd__(self, other: Number) -> Value:
        return _pair("add", self, other)

    def __sub__(self, other: Value | Number) -> Value:
        return _pair("sub", self, other)

    def __rsub__(self, other: Number) -> Value:
        return _pair("add", -self, other)

    def __mul__(self, other: Value | Number) -> Value:
        return _pair("mul", self, other)

    def __rmul__(self, other: Number) -> Value:
        return _pair("mul", self, other)

    def __truediv__(self, other: Value | Number) -> Value:
        return _pair("div", self, other)

    def __neg__(self) -> Value:
        return _pair("mul", self, -1.0)

    def __matmul__(self, weight: Value) -> Value:
        """Multiply the last dimension by a weight ``[K, N]`` that all rows share."""
        return Value("linear", (_row(self), _shared(_value(weight, "@"))))

    def __bool__(self) -> NoReturn:
        raise ProgramError(
            f"{_line()}: a Python branch on a value of the program; a program is traced once, so "
            "its branches may depend on plain Python values only"
        )

    def _compared(self, other: object) -> NoReturn:
        self.__bool__()

    __lt__ = __le__ = __gt__ = __ge__ = _compared
    __eq__ = _compared
    __hash__ = object.__hash__

    def __iter__(self) -> NoReturn:
        raise ProgramError(f"{_line()}: a value of the program cannot be iterated over")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ProgramError(f"{_line()}: values have no operation {name!r}; {_accepted()}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        name = getattr(function, "__name__", str(function))
        raise ProgramError(f"{_line()}: torch's {name} is not known here; {_accepted()}")


class Graph:
    """The graph as a program sees it, its first argument."""

    edge_type = "edge_type"

    @property
    def inverse_counts(self) -> Value:
        """For each edge, 1 / (edges of its relation into its destination)."""
        return Value("inverse_counts", deps="dr")

    def src(self, x: Value) -> Value:
        """Return the value of each edge's source of a nodewise input ``[N_src, ...]``."""
        return _placed(x, "s", "src")

    def dst(self, x: Value) -> Value:
        """Return that of each edge's destination, of an input ``[N_dst, ...]`` or a sum."""
        value = _value(x, "dst")
        return value if value.deps == {"d"} else _placed(value, "d", "dst")

    def edge(self, x: Value) -> Value:
        """Return an edgewise input ``[E, ...]``; an input that meets others bare is one."""
        return _placed(x, "e", "edge")

    def relation(self, x: Value) -> Value:
        """Return the value of each edge's relation of an input ``[R, ...]``."""
        return _placed(x, "r", "relation")

    def src_type(self, x: Value) -> Value:
        """Return the value of the type of each edge's source of an input ``[types, ...]``."""
        return _placed(x, "p", "src_type")

    def dst_type(self, x: Value) -> Value:
        """Return that of the type of each edge's destination."""
        return _placed(x, "q", "dst_type")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ProgramError(
            f"{_line()}: the graph has no {name!r}; accepted are src, dst, edge, relation, "
            "src_type, dst_type, edge_type and inverse_counts"
        )


def typed_linear(x: Value, weight: Value, edge_type: object = Graph.edge_type) -> Value:
    """Multiply each row by its relation's weight, or each node by its type's.

    Parameters
    ----------
    x : Value
        Rows of shape ``[K]``, or ``[H, K]`` with a weight for each head.
    weight : Value
        An input ``[R, K, N]``, or ``[R, H, K, N]``; of types of nodes ``[types, K, N]``.
    edge_type : object
        ``g.edge_type``; ``g.src_type`` for values of sources and ``g.dst_type`` for those of
        destinations, of a graph with `NodeTypes`.

    Returns
    -------
    Value
        Rows of shape ``[N]``, or ``[H, N]``.
    """
    value = _of_rows(x, "typed_linear")
    for end, letters in (("src_type", "ps"), ("dst_type", "qd")):
        if getattr(edge_type, "__func__", None) is getattr(Graph, end):
            if value.deps != {letters[1]}:
                raise ProgramError(
                    f"{_line()}: typed_linear by g.{end} of {value.op}; accepted are values of "
                    f"{end[:3]} alone"
                )
            placed = _placed(_value(weight, "typed_linear"), letters[0], end)
            return Value("typed_linear", (value, placed))
    if edge_type is not Graph.edge_type:
        raise ProgramError(
            f"{_line()}: typed_linear by {edge_type!r}; accepted are g.edge_type, g.src_type and "
            "g.dst_type"
        )
    return Value(
        "typed_linear", (value, _typed(_value(weight, "typed_linear"))), (), value.deps | {"r"}
    )


def shared(x: Value) -> Value:
    """Return an input that all rows share, such as a bias ``[N]``."""
    return _shared(_value(x, "shared"))


def transposed(weight: Value) -> Value:
    """Return a weight ``[N, K]`` that all rows share as ``[K, N]``."""
    return Value("t", (_shared(_value(weight, "transposed")),), (), "")


def sum_to_dst(x: Value) -> Value:
    """Return for each destination the sum over its edges, 0 for a node without edges."""
    return Value("sum_to_dst", (_of_rows(x, "sum_to_dst"),), (), "d")


def softmax_by_dst(x: Value) -> Value:
    """Return the softmax of an edgewise value over all edges of the same destination."""
    value = _of_rows(x, "softmax_by_dst")
    return Value("softmax", (value,), (), value.deps | {"e", "d"})


def dot(x: Value, y: Value) -> Value:
    """Return the dot products over the last dimension, which becomes 1."""
    left, right = (_row(_value(each, "dot")) for each in (x, y))
    return Value("dot", (left if right.deps else _of_rows(left, "dot"), right))


def leaky_relu(x: Value, slope: Number = 0.01) -> Value:
    """Return x where it is positive, else slope * x."""
    return Value("leaky_relu", (_row(_value(x, "leaky_relu")),), (float(slope),))


def exp(x: Value) -> Value:
    """Return e to the power of x."""
    return Value("exp", (_row(_value(x, "exp")),))


def split(x: Value, heads: int) -> Value:
    """Return rows ``[H * D]`` as ``[H, D]``."""
    return Value("split", (_of_rows(x, "split"),), (int(heads),))


def flatten(x: Value) -> Value:
    """Return rows ``[H, D]`` as ``[H * D]``."""
    return Value("flatten", (_of_rows(x, "flatten"),))


def trace(function: Callable[..., Any]) -> tuple[list[str], tuple[Value, ...], bool]:
    """Run a program on values.

    Returns
    -------
    names : list of str
        The inputs, in the order of the function's parameters after the graph.
    outputs : tuple of Value
        What it returned.
    single : bool
        Whether it returned one value, not a tuple.
    """
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) < 2 or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
        raise ProgramError(
            f"{function.__name__}{inspect.signature(function)}: a program takes the graph, then "
            "one input or more, each by name"
        )
    names = [p.name for p in parameters[1:]]
    found = function(Graph(), *(Value("input", (), (n,), "", f"input {n}") for n in names))
    outputs = found if isinstance(found, tuple) else (found,)
    for each in outputs:
        if not isinstance(each, Value) or not each.deps:
            raise ProgramError(
                f"{function.__name__} returned {type(each).__name__}; accepted are values of "
                "nodes or edges, one or a tuple of them"
            )
    return names, outputs, not isinstance(found, tuple)


def in_order(outputs: Sequence[Any]) -> list[Any]:
    """Return all values that outputs are made of, arguments before what is made of them."""
    found: dict[int, Any] = {}

    def visit(value: Any) -> Iterator[Any]:
        if id(value) not in found:
            for argument in value.args:
                yield from visit(argument)
            if id(value) not in found:
                found[id(value)] = value
                yield value

    return [value for output in outputs for value in visit(output)]


def described(outputs: Sequence[Value]) -> str:
    """Return the text of a traced program, a line for each operation."""
    names: dict[int, str] = {}
    lines: list[str] = []
    kinds = {
        "": "shared", "s": "source", "d": "destination", "r": "relation", "e": "edge",
        "p": "type of source", "q": "type of destination",
    }  # fmt: skip
    for value in in_order(outputs):
        if value.op == "input":
            names[id(value)] = value.attrs[0]
            continue
        if value.op in ("place", "shared"):
            letter = "".join(value.deps)
            names[id(value)] = f"{kinds[letter]}({value.args[0].attrs[0]})"
            continue
        names[id(value)] = f"%{len(lines)}"
        arguments = [*(names[id(a)] for a in value.args), *map(str, value.attrs)]
        of = (
            ", ".join(kinds[letter] for letter in sorted(value.deps, key="sdrepq".index))
            or "shared"
        )
        lines.append(f"{names[id(value)]} = {value.op}({', '.join(arguments)})  # by {of}")
    return "\n".join([*lines, "return " + ", ".join(names[id(o)] for o in outputs)])


def _accepted() -> str:
    return (
        "accepted are + - * / @ and the functions of bitslab.relational: typed_linear, "
        "sum_to_dst, softmax_by_dst, dot, leaky_relu, exp, split, flatten, shared"
    )


def _without_implied(deps: frozenset[str]) -> frozenset[str]:
    """Return letters without types of nodes that a node or a relation among them has."""
    if "p" in deps and deps & {"s", "r", "e"}:
        deps = deps - {"p"}
    if "q" in deps and deps & {"d", "r", "e"}:
        deps = deps - {"q"}
    return deps


def _value(x: Any, what: str) -> Value:
    if not isinstance(x, Value):
        raise ProgramError(
            f"{_line()}: {what} takes values of the program, not {type(x).__name__}; give tensors "
            "to the program as inputs"
        )
    return x


def _placed(x: Value, letter: str, what: str) -> Value:
    value = _value(x, what)
    if value.op != "input" or value.deps:
        raise ProgramError(f"{_line()}: g.{what} takes an input of the program, not {value.op}")
    return Value("place", (value,), (), letter)


def _row(x: Value) -> Value:
    """Return a value with rows: a bare input is edgewise."""
    return _placed(x, "e", "edge") if x.op == "input" else x


def _of_rows(x: Any, what: str) -> Value:
    """Return a value with rows of its own, not one that all rows share."""
    value = _row(_value(x, what))
    if not value.deps:
        raise ProgramError(
            f"{_line()}: {what} of a value that all rows share; accepted are values of nodes, "
            "edges and relations"
        )
    return value


def _shared(x: Value) -> Value:
    if x.op == "shared" or (x.op == "t" and not x.deps):
        return x
    if x.op != "input":
        raise ProgramError(f"{_line()}: a weight is an input of the program, not {x.op}")
    return Value("shared", (x,), (), "")


def _typed(x: Value) -> Value:
    return x if x.deps == {"r"} else _placed(x, "r", "relation")


def _pair(op: str, x: Value, other: Value | Number) -> Value:
    if isinstance(other, Number):
        return Value(f"{op}_number", (_row(x),), (float(other),))
    return Value(op, (_row(x), _row(_value(other, op))))


def _line() -> str:
    """Return file and line of the innermost caller outside of this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
