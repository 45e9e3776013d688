"""Replays: saved tensors that single operations make again from what these saved.

The node of autograd that made a tensor names its operation and gives back what it saved, so that
nothing is wrapped: SiLU, GELU, powers, products, casts, the product of dropout, and matrix
products, such as what linear layers return. What a node did not save may be the output of another
such node, or a leaf.

What is read has to be there, and as it was: see `operands`.

A replay holds nodes and no tensors, but for a bias, which no node saves. It is for what later nodes
save: these are run before the ones that it holds, and hold them anyway. An output that its own node
saved (ReLU's) is no replay, for the node would hold itself for ever; what is made of one is
replayed from the node's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..engine.tensor_bits import INTEGERS
from ..engine.versions import version_of
from ..errors import BitslabError
from .guards import modified
from .identity import root_of
from .matmul_flags import matmul_flags, under_flags
from .operands import Operands, Weight

#: Operations that follow each other and are replayed for one tensor, at most.
MOST_OPERATIONS = 4
_LEAF = "torch::autograd::AccumulateGrad"

#: Computes a value that a node takes or makes.
_Value = Callable[[], torch.Tensor]


class _Known(NamedTuple):
    """What is known of a node's output: all of the saved tensor, of others maybe the dtype."""

    dtype: torch.dtype | None = None
    shape: torch.Size | None = None


class _Search:
    """Operations that were found, and what is known of their operands.

    Parameters
    ----------
    operands : Operands or None
        None where whoever calls knows them all.
    """

    def __init__(self, operands: Operands | None) -> None:
        self.operations: list[str] = []
        self.weights: dict[int, Weight] = {}
        self._operands = operands

    def add(self, operation: str) -> None:
        """Add an operation."""
        self.operations.append(operation)

    def may_read(self, node: Any, *saved: str, aligned: bool = False) -> bool:
        """Return whether what a node saved is as it was when that is read."""
        if self._operands is None:
            return True
        self.weights |= self._operands.weights(node)
        return self._operands.knows(node, *saved, aligned=aligned)

    def may_read_leaf(self, leaf: torch.Tensor) -> bool:
        """Return whether a leaf that no node saved is where it was."""
        return self._operands is None or self._operands.knows_leaf(leaf)


_NOTHING = _Known()


@dataclass(frozen=True)
class Replay:
    """How a saved tensor is computed again.

    Parameters
    ----------
    operations : tuple of str
        The operations that are run, the last of them first, with their constants.
    shape, stride : tuple of int
        Of the tensor.
    dtype : torch.dtype
        Its dtype.
    device_type : str
        Type of the device that it is on.
    weights : dict
        Weights that are read, by number of their storage.
    """

    operations: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    _compute: _Value
    weights: Mapping[int, Weight] = field(default_factory=dict)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What replays of a site have in common from step to step.

        One that is as that of a tensor whose replay was found exact is taken to be so, too.
        """
        return self.operations, self.shape, self.stride, self.dtype

    def tensor(self) -> torch.Tensor:
        """Return the tensor, computed again; it needs no gradient.

        Raises
        ------
        ModifiedInPlaceError
            When a leaf that it is computed from was changed in place since.
        BitslabError
            When the graph that it is computed from was freed, or a weight given up, or it comes out
            in another form.
        """
        if not all(each.is_there() for each in self.weights.values()):
            raise BitslabError(
                f"replay of {self.operations[0]}: a weight that it reads was given up since its "
                "forward pass; attach with recompute=False"
            )
        try:
            with torch.no_grad(), torch.autocast(self.device_type, enabled=False):
                t = self._compute()
        except BitslabError:
            raise
        except RuntimeError as error:
            if "freed" not in str(error):
                raise
            raise BitslabError(
                f"replay of {self.operations[0]}: the part of the graph that it is computed from "
                "was freed; pass retain_graph=True to the first backward pass"
            ) from error
        if (tuple(t.shape), t.stride(), t.dtype) != (self.shape, self.stride, self.dtype):
            raise BitslabError(
                f"replay of {self.operations[0]}: {t.dtype} of shape {tuple(t.shape)} and strides "
                f"{t.stride()}, saved was {self.dtype} of {self.shape} and {self.stride}"
            )
        return t


def replayable(t: torch.Tensor, operands: Operands | None = None) -> Replay | None:
    """Return how a tensor is computed again, proven equal to it bit for bit; None where it is not.

    Parameters
    ----------
    t : torch.Tensor
        An output of an operation, in a graph that is not freed. It is computed once more.
    operands : Operands, optional
        As for `replay_of`.
    """
    found = replay_of(t, operands)
    return found if found is not None and is_exact(found, t) else None


def replay_of(t: torch.Tensor, operands: Operands | None = None) -> Replay | None:
    """Return how a tensor would be computed again; None for other operations, and for views.

    Of a view, as linear layers save of their inputs, the tensor that it is a view of may be asked
    for. Nothing that was saved is read.

    Parameters
    ----------
    t : torch.Tensor
        An output of an operation, unchanged since.
    operands : Operands, optional
        What the pass has saved so far. Left out, all of it is taken to be read as it was.
    """
    node = t.grad_fn
    if node is None or t.output_nr != 0 or root_of(t) is not t or _saves_output(node):
        return None
    if version_of(t):  # changed in place, maybe by what autograd did not see
        return None
    search = _Search(operands)
    compute = _output_of(node, _Known(t.dtype, t.shape), search)
    if compute is None or (operands is not None and search.weights.keys() & operands.unsure):
        return None
    found, of = tuple(search.operations), search.weights
    return Replay(found, tuple(t.shape), t.stride(), t.dtype, t.device.type, compute, of)


def is_exact(replay: Replay, t: torch.Tensor) -> bool:
    """Return whether a replay gives a tensor's very bits, in the same strides."""
    try:
        again = replay.tensor()
    except BitslabError:
        return False
    if again.device != t.device or not again.numel():
        return again.device == t.device
    size = _integers_of(t)
    return size is not None and torch.equal(again.view(size), t.detach().view(size))


def differing_elements(again: torch.Tensor, t: torch.Tensor) -> torch.Tensor | None:
    """Return how many elements of a replayed tensor have other bits, without waiting.

    Parameters
    ----------
    again : torch.Tensor
        What `Replay.tensor` returned.
    t : torch.Tensor
        The tensor that was saved.

    Returns
    -------
    torch.Tensor or None
        int64 ``[]`` on the device of `t`; None for what cannot be compared.
    """
    size = _integers_of(t)
    if again.device != t.device or size is None:
        return None
    return (again.view(size) != t.detach().view(size)).sum()


def _integers_of(t: torch.Tensor) -> torch.dtype | None:
    """Return integers as large as elements: NaN equals itself then, and -0.0 is not 0.0."""
    if t.is_conj() or t.is_neg():
        return None
    return INTEGERS.get(t.element_size())


def _saves_output(node: Any) -> bool:
    # Of its class: asking the node itself would read, and unpack, what it saved.
    return hasattr(type(node), "_saved_result")


def _output_of(node: Any, known: _Known, search: _Search) -> _Value | None:
    """Return what computes a node's output; its operations are added to those found."""
    maker = _MAKERS.get(node.name())
    if maker is None or len(search.operations) == MOST_OPERATIONS:
        return None
    return maker(node, known, search)


def _input_of(
    node: Any, saved: str, number: int, search: _Search, known: _Known = _NOTHING
) -> _Value | None:
    """Return what gives an input of a node: saved by it, a leaf, or another node's output."""
    if saved and _saved_factor(node, number):
        return (lambda: _saved(node, saved)) if search.may_read(node, saved) else None
    following, output = node.next_functions[number]
    if following is None or output != 0:
        return None
    if following.name() == _LEAF:
        leaf = following.variable
        if not search.may_read_leaf(leaf):
            return None
        version, shape, dtype = version_of(leaf), leaf.shape, leaf.dtype
        del leaf

        def of_leaf() -> torch.Tensor:
            now: torch.Tensor = following.variable
            if version_of(now) != version:
                raise modified(shape, dtype, version_of(now), version, " that a replay reads,")
            return now

        return of_leaf
    if _saves_output(following):
        search.add(f"result of {following.name()}")
        read = search.may_read(following, "result")
        return (lambda: _saved(following, "result")) if read else None
    return _output_of(following, known, search)


def _saved(node: Any, name: str) -> Any:
    """Return what a node of autograd has saved: torch has no public names for it."""
    return getattr(node, f"_saved_{name}")


def _saved_factor(node: Any, number: int) -> bool:
    """Return whether a product saved a factor: it does for the other one's gradient."""
    return node.next_functions[1 - number][0] is not None


def _silu(node: Any, known: _Known, search: _Search) -> _Value | None:
    if not search.may_read(node, "self"):
        return None
    search.add("SiluBackward0")
    return lambda: torch.nn.functional.silu(_saved(node, "self"))


def _gelu(node: Any, known: _Known, search: _Search) -> _Value | None:
    if not search.may_read(node, "self"):
        return None
    how = _saved(node, "approximate")
    search.add(f"GeluBackward0 {how}")
    return lambda: torch.nn.functional.gelu(_saved(node, "self"), approximate=how)


def _pow(node: Any, known: _Known, search: _Search) -> _Value | None:
    if not search.may_read(node, "self"):
        return None
    exponent = _saved(node, "exponent")
    search.add(f"PowBackward0 {exponent}")
    return lambda: torch.pow(_saved(node, "self"), exponent)


def _product(node: Any, known: _Known, search: _Search) -> _Value | None:
    search.add("MulBackward0")
    first = _input_of(node, "self", 0, search)
    second = _input_of(node, "other", 1, search)
    if first is None or second is None:
        return None
    left, right = first, second
    return lambda: torch.mul(left(), right())


def _cast(node: Any, known: _Known, search: _Search) -> _Value | None:
    dtype = known.dtype
    if dtype is None:
        return None
    search.add(f"ToCopyBackward0 {dtype}")
    source = _input_of(node, "", 0, search)
    if source is None:
        return None
    given = source
    # As the cast itself does: strides are kept where they are dense.
    return lambda: given().to(dtype=dtype, copy=True)


def _dropout(node: Any, known: _Known, search: _Search) -> _Value | None:
    p = _saved(node, "p")
    search.add(f"NativeDropoutBackward0 {p}")
    source = _input_of(node, "", 0, search)
    if source is None or not 0 <= p < 1 or not search.may_read(node, "result1"):
        return None
    given, scale = source, 1.0 / (1.0 - p)

    def compute() -> torch.Tensor:
        t, mask = given(), _saved(node, "result1")
        if t.device.type == "cpu":  # which rounds the scale as well, unlike the fused kernel
            return torch.mul(t, mask.to(t.dtype).mul_(scale))
        made: torch.Tensor = torch.ops.aten.native_dropout_backward(t, mask, scale)
        return made

    return compute


def _unsafe_view(node: Any, known: _Known, search: _Search) -> _Value | None:
    # Of a matrix product of more than two dimensions, which is its own root.
    shape = known.shape
    if shape is None:
        return None
    search.add(f"UnsafeViewBackward0 {tuple(shape)}")
    source = _input_of(node, "", 0, search, _Known(known.dtype))
    if source is None:
        return None
    given = source
    return lambda: given().view(shape)


def _matrix_product(node: Any, known: _Known, search: _Search) -> _Value | None:
    search.add(node.name())
    # Each is saved for the other one's gradient.
    if not (_saved_factor(node, 0) and _saved_factor(node, 1)):
        return None
    if not search.may_read(node, "self", "mat2", aligned=True):
        return None
    multiply = torch.mm if node.name() == "MmBackward0" else torch.bmm
    return _as_now(lambda: multiply(_saved(node, "self"), _saved(node, "mat2")))


def _matrix_product_and_bias(node: Any, known: _Known, search: _Search) -> _Value | None:
    scales = {"beta": _saved(node, "beta"), "alpha": _saved(node, "alpha")}
    search.add(f"AddmmBackward0 {scales}")
    following = [each for each, _ in node.next_functions]
    if None in following or not search.may_read(node, "mat1", "mat2", aligned=True):
        return None
    bias = _bias_of(node, search, _Known(known.dtype))
    if bias is None:
        return None
    # No node saves it, so that it may be changed before the backward pass.
    with torch.no_grad():
        added = bias().clone()
    return _as_now(lambda: torch.addmm(added, _saved(node, "mat1"), _saved(node, "mat2"), **scales))


def _bias_of(node: Any, search: _Search, known: _Known) -> _Value | None:
    """Return what gives a vector that is added: a leaf, or the cast of one; nothing else is small.

    It is computed at once, and so must read nothing that was saved.
    """
    leaf = node.next_functions[0][0]
    if leaf.name() == "ToCopyBackward0":
        leaf = leaf.next_functions[0][0]
    if leaf is None or leaf.name() != _LEAF or leaf.variable.dim() > 1:
        return None
    return _input_of(node, "", 0, search, known)


def _as_now(multiply: _Value) -> _Value:
    """Return what multiplies under the settings of this moment."""
    flags = matmul_flags()

    def compute() -> torch.Tensor:
        with under_flags(flags):
            return multiply()

    return compute


_MAKERS: dict[str, Callable[[Any, _Known, _Search], _Value | None]] = {
    "SiluBackward0": _silu,
    "GeluBackward0": _gelu,
    "PowBackward0": _pow,
    "MulBackward0": _product,
    "ToCopyBackward0": _cast,
    "NativeDropoutBackward0": _dropout,
    "UnsafeViewBackward0": _unsafe_view,
    "MmBackward0": _matrix_product,
    "BmmBackward0": _matrix_product,
    "AddmmBackward0": _matrix_product_and_bias,
}
