"""FeatureTensor: a compressed feature in the form of a tensor, for code that expects one."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import numpy as np
import torch
from torch.utils._pytree import tree_map

from ..engine.codecs.base import raise_bad_index
from ..engine.memory.readonly import keep_from_compiler, plain, read_only, refuse_writes
from ..engine.tensor_rows import are_row_ids, is_row_dim, row_functions, written_tensors
from ..errors import ArgumentTypeError, BitslabError
from ..tables.arguments import check_not_from_end
from ..tables.feature import CompressedFeature

# Functions whose result is known without elements of the tensor.
_FACTS = frozenset(
    """
    __hash__ __len__ _is_view dim dim_order element_size get_device has_names is_complex is_conj
    is_contiguous is_distributed is_floating_point is_inference is_neg is_signed is_tensor
    ndimension nelement numel result_type size storage_offset stride
    """.split()
)
# Properties whose value is made of elements; the others are facts.
_ELEMENT_PROPERTIES = frozenset(["", "H", "T", "data", "imag", "mH", "mT", "real"])
# Functions that change dtype, device or strides, or return the tensor as it is.
_CONVERSIONS = frozenset(
    "bfloat16 contiguous cpu cuda double float half resolve_conj resolve_neg to type".split()
)
# Functions that look at dtype and shape, not at elements.
_MAKERS = frozenset(
    """
    empty_like full_like new new_empty new_empty_strided new_full new_ones new_tensor new_zeros
    ones_like rand_like randint_like randn_like zeros_like
    """.split()
)

# What a list that chooses rows is made of.
_NUMBERS = (int, float, np.number, np.bool_)


class FeatureTensor(torch.Tensor):
    """A tensor on the CPU that holds a `CompressedFeature` in place of its elements.

    It goes where a feature tensor ``[N, ...]`` goes, such as ``data.x`` of PyG. What asks for some
    of its rows gets those, decoded, and no others:

    - ``t[ids]``, ``t[mask]``, ``torch.index_select(t, 0, ids)``, also with ``out=``, and
      ``torch.nn.functional.embedding(ids, t)`` give plain tensors, on the GPU of the ids if those
      are on one;
    - ``t[3]``, ``t[2:5]``, ``t.narrow(0, 2, 3)`` and ``t.select(0, 3)``, which are views of other
      tensors, give `ReadOnlyTensor` copies: writing to them raises;
    - more ids than there are rows, in this process and on the CPU, are taken from `whole`.

    Shape, dtype and the like need no row. ``t.clone()``, ``t.to(device)`` and ``t.cuda()`` decode
    to a plain tensor. Everything else works on ``t.feature.whole()``, all rows, decoded once, kept
    and read-only; a note in ``t.feature.stats()`` says so. In-place functions and gradients are
    refused. Writes that torch does not see, such as another library's through DLPack
    (``torch.from_dlpack(t)``), are not: they change the decoded copy and not the packed rows. Give
    such a writer ``t.clone()``. ``torch.utils.dlpack.to_dlpack(t)``, which no class can intercept,
    raises, or with torch 2.8 and older gives that copy, as ``torch.from_dlpack(t)`` does: there is
    no address before rows are decoded.

    Processes: `multiprocessing` and DataLoader workers, forked or spawned, share the table.
    `copy.deepcopy` copies it. `pickle` and `torch.save` write the plain tensor, so that a file can
    be read without bitslab; ``t.feature.table.save`` writes a compressed one.

    Parameters
    ----------
    feature : CompressedFeature
        ``[N, *row_shape]``.

    Examples
    --------
    >>> import torch, bitslab
    >>> from bitslab.tensors.feature_tensor import FeatureTensor
    >>> x = torch.randn(1000, 64).round()
    >>> t = FeatureTensor(bitslab.CompressedFeature.from_tensor(x))
    >>> torch.equal(t[[3, 1]], x[[3, 1]]), t.shape
    (True, torch.Size([1000, 64]))
    """

    _feature: CompressedFeature

    @staticmethod
    def __new__(cls: type[FeatureTensor], feature: CompressedFeature) -> FeatureTensor:
        """Make the tensor; see the class."""
        if not isinstance(feature, CompressedFeature):
            raise ArgumentTypeError(
                f"feature: expected a CompressedFeature, got {type(feature).__name__}"
            )
        keep_from_compiler(cls)
        made = torch.Tensor._make_wrapper_subclass(
            cls, feature.shape, dtype=feature.dtype, device=torch.device("cpu")
        )
        # What takes the address of its memory must fail: there is none.
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    def __init__(self, feature: CompressedFeature) -> None:
        self._feature = feature

    @property
    def feature(self) -> CompressedFeature:
        """The rows and what is counted of them."""
        return self._feature

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer from facts and rows where that is enough, else from the whole feature."""
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None and not (special in _DECODERS and _is_transforming()):
            result = special(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if isinstance(func, torch._ops.OpOverload):
            return cls.__torch_dispatch__(func, types, args, kwargs)
        name, attribute = name_of(func)
        if name == "__set__" and attribute in ("requires_grad", "grad"):
            if args[1] is None or args[1] is False:
                return None
            raise _no_gradient()
        if name == "__get__" and attribute == "data":
            return _alias(args[0])
        if is_fact(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, FeatureTensor):
            if name in _MAKERS:
                if name.endswith("_like"):
                    kwargs = {"memory_format": torch.contiguous_format} | kwargs
                return func(_stand_in(first), *args[1:], **kwargs)
            if name in _CONVERSIONS:
                return _convert(func, first, args[1:], kwargs)
        # Before anything is decoded for it.
        refuse_writes(func, *_replaced(args, kwargs, lambda t: read_only(torch.empty(0))))
        args, kwargs = _replaced(args, kwargs, _whole)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as no class method
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer what torch asks below its functions, as where another subclass calls it."""
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return _alias(args[0])
        if func is torch.ops.aten.index_select.default and isinstance(args[0], FeatureTensor):
            rows = _index_select(*args)
            if rows is not NotImplemented:
                return rows
        if any(isinstance(t, FeatureTensor) for t in written_tensors(func, args, kwargs)):
            raise _read_only(str(func))
        args, kwargs = _replaced(args, kwargs, lambda t: plain(_whole(t)))
        return func(*args, **kwargs)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        """Name what it holds; no element is decoded for it."""
        return f"FeatureTensor({self._feature!r})"

    def __format__(self, format_spec: str) -> str:
        """Format the `repr`."""
        return format(repr(self), format_spec)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return a NumPy array of all rows, which cannot be written to."""
        return self._feature.whole().__array__(dtype, copy)

    def __copy__(self) -> FeatureTensor:
        return _alias(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> FeatureTensor:
        copied = memo[id(self)] = FeatureTensor(copy.deepcopy(self._feature, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor; other processes get it by `_pass_on`."""
        return _decoded(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def name_of(func: Callable[..., Any]) -> tuple[str, str]:
    """Return the name of a function of torch and, where it reads or sets a property, that one's."""
    name = getattr(func, "__name__", "")
    if name not in ("__get__", "__set__"):
        return name, ""
    return name, str(getattr(getattr(func, "__self__", None), "__name__", ""))


def is_fact(func: Callable[..., Any]) -> bool:
    """Return whether the result of a function of torch is known without elements."""
    name, attribute = name_of(func)
    return name in _FACTS or (name == "__get__" and attribute not in _ELEMENT_PROPERTIES)


def _alias(t: FeatureTensor) -> FeatureTensor:
    """Return another tensor of the same class over the same rows."""
    return type(t)(t.feature)


def _decoded(t: FeatureTensor) -> torch.Tensor:
    """Return all rows as a plain tensor of its own."""
    return t.feature.table.decoded(0, len(t.feature))


def _whole(t: FeatureTensor) -> torch.Tensor:
    """Return all rows, decoded once and kept, read-only."""
    if not _is_transforming():
        return t.feature.whole()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        return t.feature.whole()


def _stand_in(t: FeatureTensor) -> torch.Tensor:
    """Return a tensor of the same shape and dtype that takes the memory of one element."""
    return torch.zeros((), dtype=t.feature.dtype).expand(t.feature.shape)


def _replaced(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    function: Callable[[FeatureTensor], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put something else in the place of each FeatureTensor among the arguments."""

    def replace(x: Any) -> Any:
        return function(x) if isinstance(x, FeatureTensor) else x

    return cast(tuple[tuple[Any, ...], dict[str, Any]], tree_map(replace, (args, kwargs)))


def _read_only(name: str) -> BitslabError:
    return BitslabError(
        f"{name}: this tensor is a compressed feature, which is read-only; write to a clone() of "
        "it, or replace the whole feature"
    )


def _no_gradient() -> BitslabError:
    return BitslabError(
        "requires_grad: a compressed feature takes no gradient; use a clone() of it, or of its rows"
    )


# Rows


def _is_transforming() -> bool:
    """Return whether torch.func is at work, whose ids and new tensors may have no memory."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _take(t: FeatureTensor, ids: torch.Tensor, *, from_end: bool) -> Any:
    """Return rows ``[*ids.shape, *row_shape]``, or NotImplemented where `whole` serves better.

    Parameters
    ----------
    t : FeatureTensor
        The rows.
    ids : torch.Tensor
        int32 or int64 of any shape, on a CPU or GPU.
    from_end : bool
        Whether negative ids count from the end, as in ``t[ids]``, or are refused.
    """
    feature = t.feature
    ids = _as_plain(ids)
    flat = ids.reshape(-1)
    n_ids = flat.shape[0]
    if not ids.is_cuda:
        if not from_end:
            check_not_from_end(flat, len(feature), "index")
        # A layer over all edges asks for rows again and again. The workers of a loader do not keep
        # what they have decoded: each would have its own.
        if n_ids > len(feature) and torch.utils.data.get_worker_info() is None:
            feature.table.check_ids(flat)
            return NotImplemented
    rows = feature.gather(flat)
    return rows.view(*ids.shape, *feature.shape[1:])


def _as_plain(ids: torch.Tensor) -> torch.Tensor:
    """Return ids of a subclass of tensor, such as PyG's Index, as a plain tensor."""
    if isinstance(ids, FeatureTensor):
        return plain(ids.feature.whole())
    if type(ids) is not torch.Tensor:
        return ids.as_tensor() if hasattr(ids, "as_tensor") else plain(ids)
    return ids


def _index_select(
    input: torch.Tensor, dim: int, index: torch.Tensor, *, out: torch.Tensor | None = None
) -> Any:
    """``torch.index_select(input, dim, index, out=out)``."""
    if not isinstance(input, FeatureTensor) or isinstance(out, FeatureTensor):
        return NotImplemented
    if not is_row_dim(input, dim) or index.dim() > 1 or not are_row_ids(index):
        return NotImplemented
    index = _as_plain(index).reshape(-1)
    direct = (
        out is not None
        and type(out) is torch.Tensor
        and out.dtype == input.dtype
        and out.device == index.device
        and tuple(out.shape) == (len(index), *input.shape[1:])
        and not out.requires_grad
    )
    if direct:
        check_not_from_end(index, len(input), "index")
        return input.feature.gather(index, out)
    rows = _take(input, index, from_end=False)
    if out is None or rows is NotImplemented:
        return rows
    # Torch says what it thinks of such an `out`.
    return torch.index_select(rows, 0, torch.arange(len(rows), device=rows.device), out=out)


def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``torch.nn.functional.embedding``; arguments other than `max_norm` act on gradients."""
    if not isinstance(weight, FeatureTensor) or not are_row_ids(input):
        return NotImplemented
    if max_norm is not None:
        raise _read_only("embedding with max_norm")
    return _take(weight, input, from_end=False)


def _get_item(t: torch.Tensor, index: Any) -> Any:
    """``t[index]``; NotImplemented for what is no choice of rows."""
    if not isinstance(t, FeatureTensor):
        return NotImplemented
    first, *rest = index if isinstance(index, tuple) and index else (index,)
    if first is None or first is ... or isinstance(first, (bool, tuple)):
        return NotImplemented
    if isinstance(first, list) and not all(isinstance(i, _NUMBERS) for i in first):
        return NotImplemented  # torch takes some such lists for tuples
    if isinstance(first, slice):
        return _slice(t, first, rest)
    ids: torch.Tensor
    try:
        ids = first if isinstance(first, torch.Tensor) else torch.as_tensor(first)
    except (TypeError, ValueError, RuntimeError):
        return NotImplemented
    if ids.dtype == torch.bool and ids.shape == (len(t),):
        ids = _as_plain(ids).nonzero()[:, 0]
    elif isinstance(first, (list, range)) and not ids.numel():
        ids = ids.to(torch.int64)  # torch makes floats of it
    elif not are_row_ids(ids):
        if ids.dtype not in (torch.bool, torch.uint8):
            _stand_in(t)[index]  # raises what torch raises
        return NotImplemented
    if ids.dim() == 0:
        return _row(t, int(ids), rest)
    rows = _take(t, ids, from_end=True)
    if rows is NotImplemented or not rest:
        return rows
    numbers = torch.arange(ids.numel(), device=rows.device).view(ids.shape)
    return rows.view(-1, *t.shape[1:])[(numbers, *rest)]


def _row(t: FeatureTensor, number: int, rest: list[Any]) -> torch.Tensor:
    n_rows = len(t)
    if not -n_rows <= number < n_rows:
        raise_bad_index(number, 0, n_rows, "index")
    row = read_only(t.feature.gather(torch.tensor([number]))[0])
    return row[tuple(rest)] if rest else row


def _slice(t: FeatureTensor, picked: slice, rest: list[Any]) -> Any:
    torch.empty(0)[picked]  # raises what torch raises, as for a negative step
    numbers = range(len(t))[picked]
    if len(numbers) == len(t):
        return NotImplemented  # a view of all rows
    ids = torch.arange(numbers.start, max(numbers.start, numbers.stop), numbers.step)
    rows: torch.Tensor = read_only(t.feature.gather(ids))
    return rows[(slice(None), *rest)] if rest else rows


def _narrow(input: torch.Tensor, dim: int, start: Any, length: int) -> Any:
    if not isinstance(input, FeatureTensor) or not is_row_dim(input, dim):
        return NotImplemented
    if isinstance(start, torch.Tensor):
        start = int(start)
    begin = start + len(input) if start < 0 else start
    if not 0 <= begin <= begin + length <= len(input):
        return NotImplemented  # torch says why not
    return _get_item(input, slice(begin, begin + length))


def _select(input: torch.Tensor, dim: int, index: Any) -> Any:
    if not isinstance(input, FeatureTensor) or not is_row_dim(input, dim):
        return NotImplemented
    return _row(input, operator.index(index), [])


# What is no choice of rows


def _convert(
    func: Callable[..., Any], t: FeatureTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``to`` and its like: the tensor as it is where nothing changes, else a plain one."""
    probe = torch.empty((0, *t.shape[1:]), dtype=t.dtype)
    result = func(probe, *args, **kwargs)
    if result is probe:
        return t
    if not isinstance(result, torch.Tensor):
        return result  # `t.type()` names a type
    if result.is_cuda:
        # Packed rows cross the link, and are decoded there.
        ids = torch.arange(len(t), device=result.device)
        return func(t.feature.gather(ids), *args, **kwargs)
    return func(t.feature.whole(), *args, **kwargs)


def _clone(input: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> Any:
    if not isinstance(input, FeatureTensor):
        return NotImplemented
    rows = _decoded(input)
    return rows if memory_format is None else rows.contiguous(memory_format=memory_format)


def _itself(t: FeatureTensor, *args: Any, **kwargs: Any) -> FeatureTensor:
    """Return the tensor: what is asked for is so already, or concerns gradients."""
    return t


def _requires_grad_(t: FeatureTensor, requires_grad: bool = True) -> FeatureTensor:
    if requires_grad:
        raise _no_gradient()
    return t


def _storage(t: FeatureTensor) -> torch.UntypedStorage:
    # Empty. PyG's workers ask its class for shared memory that rows are to be written to.
    return torch.empty(0, dtype=t.dtype).untyped_storage()


_SPECIAL: dict[Callable[..., Any], Callable[..., Any]] = {
    **row_functions(get_item=_get_item, index_select=_index_select, embedding=_embedding),
    torch.Tensor.clone: _clone,
    torch.Tensor.detach: _alias,
    torch.Tensor.detach_: _itself,
    torch.Tensor.is_pinned: lambda t, *device: False,
    torch.Tensor.is_shared: lambda t: True,
    torch.Tensor.narrow: _narrow,
    torch.Tensor.record_stream: lambda t, stream: None,  # nothing of it is on a GPU
    torch.Tensor.requires_grad_: _requires_grad_,
    torch.Tensor.select: _select,
    torch.Tensor.share_memory_: _itself,
    torch.Tensor.untyped_storage: _storage,
    torch._C._VariableFunctions.clone: _clone,
    torch._C._VariableFunctions.narrow: _narrow,
    torch._C._VariableFunctions.select: _select,
}

_DECODERS = frozenset([_clone, _embedding, _get_item, _index_select, _narrow, _select])


def _pass_on(t: FeatureTensor) -> tuple[Any, ...]:
    """Send a tensor to another process, which shares the memory of the table."""
    return FeatureTensor, (t.feature,)


ForkingPickler.register(FeatureTensor, _pass_on)
