"""ReadOnlyTensor: a tensor over decoded rows of another owner that refuses writes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch

from ...errors import BitslabError

# In-place functions whose name does not end in one underscore.
_WRITES = frozenset(
    """
    __setitem__ __iadd__ __isub__ __imul__ __imatmul__ __itruediv__ __idiv__ __ifloordiv__ __imod__
    __ipow__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__
    """.split()
)
# Names that end like those of in-place functions, but leave the elements as they are.
_LEAVES_ELEMENTS = frozenset(["requires_grad_", "retain_grad_", "detach_", "rename_", "is_shared_"])
# Properties of a tensor that may be set without a change of its elements.
_SETTABLE = frozenset(["grad", "requires_grad", "names", "__dict__"])


class ReadOnlyTensor(torch.Tensor):
    """A tensor on the CPU whose elements must not change; made by `read_only`.

    Every operator works on it and gives a plain tensor, but for views, which are read-only too.
    What would write to its memory (``t[0] = x``, ``t.add_(x)``, ``out=t``) raises BitslabError.
    Pickles and deep copies of it are plain tensors of their own.

    Writers that torch does not see, such as a NumPy view or a kernel of another library, are not
    stopped; `written` says whether there were some that torch counts.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuse writers; keep views read-only."""
        kwargs = kwargs or {}
        refuse_writes(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor):
                return _guarded(result, args)
            if isinstance(result, (tuple, list)) and any(
                isinstance(item, torch.Tensor) for item in result
            ):
                items = [_guarded(item, args) for item in result]
                if isinstance(result, tuple) and hasattr(result, "_fields"):
                    return type(result)(*items)
                return type(result)(items)
        if func is torch.Tensor.numpy:
            result.flags.writeable = False
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor."""
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy to a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            copied = plain(self).clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __repr__(self) -> str:  # type: ignore[override]
        """Show the elements as those of any tensor."""
        return repr(plain(self))

    def __format__(self, format_spec: str) -> str:
        """Format as any tensor, such as one element with ``.3f``."""
        return format(plain(self), format_spec)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return a NumPy array; of the memory itself only when it cannot be written to."""
        array = plain(self).detach().numpy()
        if dtype is not None and array.dtype != dtype:
            return array.astype(dtype)
        if copy:
            return array.copy()
        array.flags.writeable = False
        return array


def read_only(t: torch.Tensor) -> ReadOnlyTensor:
    """Return a view of a plain tensor that refuses to be written to."""
    keep_from_compiler(ReadOnlyTensor)
    with torch._C.DisableTorchFunctionSubclass():
        return t.as_subclass(ReadOnlyTensor)


def keep_from_compiler(cls: Any) -> None:
    """Have torch.compile run what meets tensors of a class as it is, between what it compiles.

    It would otherwise trace ``__torch_function__`` itself, which does not end. Call this when a
    tensor is made: the compiler may be imported at any time, and is not imported for this.
    """
    config: Any = getattr(sys.modules.get("torch._dynamo"), "config", None)
    classes = getattr(config, "nontraceable_tensor_subclasses", None)
    if classes is not None and cls not in classes:
        classes.add(cls)
        function = torch.compiler.disable(cls.__torch_function__.__func__)  # type: ignore[no-untyped-call]
        cls.__torch_function__ = classmethod(function)


def plain(t: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a plain tensor, for code that only reads it."""
    with torch._C.DisableTorchFunctionSubclass():
        return t.as_subclass(torch.Tensor)


def refuse_writes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise BitslabError when a function of torch would write to a read-only argument."""
    # Operators are named aten::add_ or, an overload, add_.Tensor.
    name = getattr(func, "__name__", "").rpartition("::")[2].partition(".")[0]
    if name in ("__set__", "__delete__"):
        owner = getattr(func, "__self__", None)
        name = str(getattr(owner, "__name__", ""))
        writes = name not in _SETTABLE
    elif name.endswith("_") and not name.endswith("__"):
        writes = name not in _LEAVES_ELEMENTS
    else:
        writes = name in _WRITES
    if not writes and isinstance(func, FunctionType) and "inplace" in func.__code__.co_varnames:
        writes = bool(inspect.signature(func).bind(*args, **kwargs).arguments.get("inplace"))
    # Some are called with keywords alone.
    targets = [*args[:1], *kwargs.values()][:1] if writes else []
    if "out" in kwargs:
        targets.append(kwargs["out"])
    for target in targets:
        some = target if isinstance(target, (tuple, list)) else (target,)
        if any(isinstance(t, ReadOnlyTensor) for t in some):
            raise BitslabError(
                f"{name}: this tensor is read-only: it was decoded from compressed rows, which "
                "would not change with it; write to a clone() of it, or replace the whole feature "
                "or table"
            )


def _guarded(result: Any, args: tuple[Any, ...]) -> Any:
    """Make a result read-only when it lies in the memory of a read-only argument."""
    if (
        not isinstance(result, torch.Tensor)
        or isinstance(result, ReadOnlyTensor)
        or result.layout is not torch.strided
        or result.device.type != "cpu"
    ):
        return result
    try:
        address = result.untyped_storage().data_ptr()
    except RuntimeError:  # what functions such as torch.func.grad wrap has no storage
        return result
    for arg in args:
        some = arg if isinstance(arg, (tuple, list)) else (arg,)
        for t in some:
            if isinstance(t, ReadOnlyTensor) and address == t.untyped_storage().data_ptr():
                return result.as_subclass(ReadOnlyTensor) if address else result
    return result
