"""Replays: saved tensors that single pointwise operations make again from what these saved.

The node of autograd that made a tensor names its operation and gives back what it saved, so that
nothing is wrapped: SiLU, GELU, powers, products, casts, and the product of dropout. What a node did
not save may be the output of another such node, or a leaf.

A replay holds nodes and no tensors. It is for what later nodes save: these are run before the ones
that it holds, and hold them anyway. An output that its own node saved (ReLU's) is no replay, for
the node would hold itself for ever; what is made of one is replayed from the node's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.tensor_bits import INTEGERS
from ..engine.versions import version_of
from ..errors import BitslabError
from .guards import modified
from .identity import root_of

#: Operations that follow each other and are replayed for one tensor, at most.
MOST_OPERATIONS = 4

#: Computes a value that a node takes or makes.
_Value = Callable[[], torch.Tensor]


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
    """

    operations: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    _compute: _Value

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
            When the graph was freed that it is computed from, or it comes out in another form.
        """
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


def replayable(t: torch.Tensor) -> Replay | None:
    """Return how a tensor is computed again, proven equal to it bit for bit; None where it is not.

    Parameters
    ----------
    t : torch.Tensor
        An output of an operation, in a graph that is not freed. It is computed once more.
    """
    found = replay_of(t)
    return found if found is not None and is_exact(found, t) else None


def replay_of(t: torch.Tensor) -> Replay | None:
    """Return how a tensor would be computed again; None for other operations, and for views.

    Of a view, as linear layers save of their inputs, the tensor that it is a view of may be asked
    for. Nothing is computed, and nothing that was saved is read.
    """
    node = t.grad_fn
    if node is None or t.output_nr != 0 or root_of(t) is not t or _saves_output(node):
        return None
    operations: list[str] = []
    compute = _output_of(node, t.dtype, operations)
    if compute is None:
        return None
    return Replay(tuple(operations), tuple(t.shape), t.stride(), t.dtype, t.device.type, compute)


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


def _output_of(node: Any, dtype: torch.dtype | None, operations: list[str]) -> _Value | None:
    """Return what computes a node's output; its operations are added to a list."""
    maker = _MAKERS.get(node.name())
    if maker is None or len(operations) == MOST_OPERATIONS:
        return None
    return maker(node, dtype, operations)


def _input_of(node: Any, saved: str, number: int, operations: list[str]) -> _Value | None:
    """Return what gives an input of a node: saved by it, a leaf, or another node's output."""
    if saved and _saved_factor(node, number):
        return lambda: getattr(node, saved)
    following, output = node.next_functions[number]
    if following is None or output != 0:
        return None
    if following.name() == "torch::autograd::AccumulateGrad":
        leaf = following.variable
        version, shape, dtype = version_of(leaf), leaf.shape, leaf.dtype
        del leaf

        def of_leaf() -> torch.Tensor:
            now: torch.Tensor = following.variable
            if version_of(now) != version:
                raise modified(shape, dtype, version_of(now), version, " that a replay reads,")
            return now

        return of_leaf
    if _saves_output(following):
        operations.append(f"result of {following.name()}")
        return lambda: _saved(following, "result")
    return _output_of(following, None, operations)


def _saved(node: Any, name: str) -> Any:
    """Return what a node of autograd has saved: torch has no public names for it."""
    return getattr(node, f"_saved_{name}")


def _saved_factor(node: Any, number: int) -> bool:
    """Return whether a product saved a factor: it does for the other one's gradient."""
    return node.next_functions[1 - number][0] is not None


def _silu(node: Any, dtype: torch.dtype | None, operations: list[str]) -> _Value | None:
    operations.append("SiluBackward0")
    return lambda: torch.nn.functional.silu(_saved(node, "self"))


def _gelu(node: Any, dtype: torch.dtype | None, operations: list[str]) -> _Value | None:
    how = _saved(node, "approximate")
    operations.append(f"GeluBackward0 {how}")
    return lambda: torch.nn.functional.gelu(_saved(node, "self"), approximate=how)


def _pow(node: Any, dtype: torch.dtype | None, operations: list[str]) -> _Value | None:
    exponent = _saved(node, "exponent")
    operations.append(f"PowBackward0 {exponent}")
    return lambda: torch.pow(_saved(node, "self"), exponent)


def _product(node: Any, dtype: torch.dtype | None, operations: list[str]) -> _Value | None:
    operations.append("MulBackward0")
    first = _input_of(node, "_saved_self", 0, operations)
    second = _input_of(node, "_saved_other", 1, operations)
    if first is None or second is None:
        return None
    left, right = first, second
    return lambda: torch.mul(left(), right())


def _cast(node: Any, dtype: torch.dtype | None, operations: list[str]) -> _Value | None:
    if dtype is None:  # known of the tensor that is saved alone
        return None
    operations.append(f"ToCopyBackward0 {dtype}")
    source = _input_of(node, "", 0, operations)
    if source is None:
        return None
    given = source
    # As the cast itself does: strides are kept where they are dense.
    return lambda: given().to(dtype=dtype, copy=True)


def _dropout(node: Any, dtype: torch.dtype | None, operations: list[str]) -> _Value | None:
    p = _saved(node, "p")
    operations.append(f"NativeDropoutBackward0 {p}")
    source = _input_of(node, "", 0, operations)
    if source is None or not 0 <= p < 1:
        return None
    given, scale = source, 1.0 / (1.0 - p)

    def compute() -> torch.Tensor:
        t, mask = given(), _saved(node, "result1")
        if t.device.type == "cpu":  # which rounds the scale as well, unlike the fused kernel
            return torch.mul(t, mask.to(t.dtype).mul_(scale))
        made: torch.Tensor = torch.ops.aten.native_dropout_backward(t, mask, scale)
        return made

    return compute


_MAKERS: dict[str, Callable[[Any, torch.dtype | None, list[str]], _Value | None]] = {
    "SiluBackward0": _silu,
    "GeluBackward0": _gelu,
    "PowBackward0": _pow,
    "MulBackward0": _product,
    "ToCopyBackward0": _cast,
    "NativeDropoutBackward0": _dropout,
}
