"""UnifiedTensor: a tensor in host memory that CPU and GPU both work on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..devices import checked_device, named_device
from ..engine.memory.host import HostBuffer
from ..engine.tensor_bits import as_integers
from ..engine.tensor_rows import are_row_ids, is_row_dim, row_functions
from ..engine.versions import version_of
from ..errors import ArgumentError, ArgumentTypeError, BitslabError
from .placement import DIRECT, VIEWS, Affinity, Operand, Placement, names_device, placement
from .unified_rows import by_way_of_cpu, rows_of, rows_to_gpu

__all__ = ["Affinity", "Operand", "Placement", "UnifiedTensor", "placement", "rows_of", "unified"]

#: Results of fewer bytes are left in ordinary memory: a buffer of its own has two file descriptors,
#: of which a process has 1024 by default, and fresh pages, which cost more than most small
#: operators.
SMALL_RESULT_BYTES = 1 << 20


@dataclass(frozen=True)
class UnifiedState:
    """What a unified tensor has besides its elements.

    Parameters
    ----------
    buffer : HostBuffer or None
        The buffer that its memory was taken from; None for ordinary memory.
    affinity : {"host", "device"}
        Where operators compute that nothing else decides about.
    gpu : torch.device or None
        GPU of device affinity.
    """

    buffer: HostBuffer | None = None
    affinity: Affinity = "host"
    gpu: torch.device | None = None


class UnifiedTensor(torch.Tensor):
    """A tensor in page-locked host memory that the GPU reads by itself; made by `unified`.

    For torch it is a CPU tensor (``u.device`` is ``cpu``) and goes where one goes. It owns its
    memory, a `HostBuffer`; so do its views. Where there is no GPU, or the system refuses to lock
    pages, the memory is ordinary and everything works, more slowly.

    **Rows by index.** ``u[idx]``, ``torch.index_select(u, 0, idx)`` and
    ``torch.nn.functional.embedding(idx, u)`` follow the index, whatever the affinity:

    - an int32, int64 or bool index on a GPU gives a tensor on that GPU. The GPU reads the rows
      itself, on the current stream and, but for a bool index, without making the host wait; an id
      out of range is raised by a later call or by `bitslab.raise_pending_errors`, and the output
      is then left untouched;
    - an index on the CPU gives a tensor on the CPU: unified in host affinity, else plain.

    **Other operators.** Affinity, "host" or "device", decides where they compute and where their
    results lie. It is switched by `set_affinity` without moving data. The first line that fits
    holds (PyTorch-Direct, section 4.4.3 of the thesis and its table 4.2):

    ====================================================  ==================  ====================
    among the operands is                                 it computes on      the result is
    ====================================================  ==================  ====================
    a CUDA tensor that is not a scalar                    that tensor's GPU   a CUDA tensor
    a unified tensor in device affinity                   its GPU             a CUDA tensor
    otherwise (unified tensors in host affinity)          the host            a unified tensor,
                                                                              in host affinity
    ====================================================  ==================  ====================

    A scalar (a tensor without dimensions) on the CPU never decides. In DataLoader workers, which
    make batches on the CPU, and in processes that cannot use a GPU, device affinity counts as host.
    Operands that lie elsewhere are copied to where the operator computes; one that it changes in
    place is copied back.

    Some things are no operators in this sense, and do not depend on the affinity. Views
    (``u[2:5]``, ``u.t()``, ``reshape`` where it can) compute nothing: they are unified, of the same
    memory and affinity. What names its place (``u.cpu()``, ``u.cuda()``, ``u.to(device)``,
    ``u.numpy()``, ``u.item()``, ``a.copy_(b)``) gets that place. Autograd works; results that
    require a gradient keep the memory that torch gave them.

    The last line has a price, so it is bounded. A result of 1 MiB or more is copied into a buffer
    of its own, which is page-locked when a GPU first gathers from it, not before: page-locking
    costs as much as a copy. A smaller result, and rows chosen by a CPU index, which DataLoader
    workers make by the thousand and which cross to a GPU whole, are unified tensors over ordinary
    memory (`host_buffer` is None): all of the above holds for them, but a GPU gathers from them by
    way of the CPU. `unified` makes a full one of them.

    **Other processes.** Through `multiprocessing` and DataLoader workers, forked or spawned, the
    memory is shared, not copied; ``share_memory_()`` has nothing to do. `pickle`,
    `copy.deepcopy`, `torch.save` and `torch.load` copy, and give unified tensors. A process that
    uses nothing of bitslab but what it loads imports torch before bitslab, or this module, so that
    torch.load knows of the class.

    Threads may use one UnifiedTensor as they may use one torch.Tensor.
    """

    #: The default is for tensors that torch itself makes of this class, such as a Parameter.
    unified_state = UnifiedState()

    @property
    def affinity(self) -> Affinity:
        """Where operators compute that nothing else decides about: "host" or "device"."""
        return self.unified_state.affinity

    @property
    def cuda_device(self) -> torch.device | None:
        """The GPU of device affinity; None in host affinity."""
        return self.unified_state.gpu

    @property
    def host_buffer(self) -> HostBuffer | None:
        """The buffer that the memory belongs to; None for ordinary memory."""
        # Torch can give a tensor other memory: `u.data = x`, `set_`, `resize_`.
        with torch._C.DisableTorchFunctionSubclass():
            buffer = self.unified_state.buffer
            if buffer is None or buffer.closed or _address(self) != _address(buffer.tensor):
                return None
            return buffer

    def set_affinity(
        self, affinity: Affinity, device: torch.device | str | int | None = None
    ) -> UnifiedTensor:
        """Switch the affinity of this object, not that of its views; no data moves.

        Parameters
        ----------
        affinity : {"host", "device"}
            What to switch to.
        device : torch.device or str or int, optional
            GPU of device affinity; the current one when left out.

        Returns
        -------
        UnifiedTensor
            The same object.

        Raises
        ------
        ArgumentError
            When the affinity is unknown or the GPU is not there.
        """
        gpu = _checked_gpu(affinity, device)
        self.unified_state = replace(self.unified_state, affinity=affinity, gpu=gpu)
        return self

    def with_affinity(
        self, affinity: Affinity, device: torch.device | str | int | None = None
    ) -> UnifiedTensor:
        """Return a tensor over the same memory in another affinity; see `set_affinity`."""
        return _like(_plain(self), self).set_affinity(affinity, device)

    def share_memory_(self) -> UnifiedTensor:
        """Do nothing: the memory is shared already. Ordinary memory is moved as torch does."""
        if self.host_buffer is None:
            super().share_memory_()  # type: ignore[no-untyped-call]
        return self

    def is_shared(self) -> bool:
        """Return whether other processes get this memory without a copy."""
        shared: bool = _plain(self).is_shared()  # type: ignore[no-untyped-call]
        return shared or self.host_buffer is not None

    def __iter__(self) -> Iterator[UnifiedTensor]:
        return iter(cast(tuple[UnifiedTensor, ...], self.unbind(0)))

    def __copy__(self) -> UnifiedTensor:
        return _like(_plain(self), self)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnifiedTensor:
        if id(self) not in memo:
            state, wants = self.unified_state, bool(self.requires_grad)
            memo[id(self)] = _restore(_plain(self), state.affinity, state.gpu, wants)
        return cast(UnifiedTensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        t = _plain(self).detach()
        if t.numel() * t.element_size() < t.untyped_storage().nbytes():
            t = t.clone()  # a view: torch would write the whole memory
        state = self.unified_state
        return _restore, (t, state.affinity, state.gpu, bool(self.requires_grad))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            special = _SPECIAL.get(func)
            if special is not None:
                result = special(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            name = getattr(func, "__name__", "")
            if name == "as_subclass":
                return func(*args, **kwargs)
            if name in DIRECT or (name == "to" and names_device(*args[1:], **kwargs)):
                result = func(*args, **kwargs)
                return result if _is_fact(result) else _with_views(result, (args, kwargs))
            operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            place = placement([_describe(x) for x in operands])
            elsewhere = place.result == "cuda" or any(x.is_cuda for x in operands)
            if elsewhere and name not in VIEWS:
                result = _compute_on(place.device, func, args, kwargs)
            else:
                result = func(*args, **kwargs)
            return tree_map(lambda x: _placed(x, place, operands), result)


def unified(
    t: torch.Tensor,
    *,
    affinity: Affinity = "host",
    device: torch.device | str | int | None = None,
) -> UnifiedTensor:
    """Copy a tensor into page-locked host memory of its exact size, which a GPU reads by itself.

    Parameters
    ----------
    t : torch.Tensor
        Of any dtype, shape and strides, on the CPU or a GPU. Bits are kept as they are, those of
        NaNs too; gradients do not flow back to it.
    affinity : {"host", "device"}
        Where operators compute and results lie; see `UnifiedTensor`.
    device : torch.device or str or int, optional
        GPU of device affinity; that of `t`, else the current one, when left out.

    Returns
    -------
    UnifiedTensor
        Contiguous, on the CPU, and independent of `t`.

    Raises
    ------
    ArgumentTypeError
        When `t` is no tensor, or one with no plain memory: sparse, nested, quantised, meta.
    ArgumentError
        When the affinity is unknown, or its GPU is not there.
    BitslabError
        When the memory cannot be had.

    Examples
    --------
    >>> u = bitslab.unified(torch.arange(6.0).reshape(3, 2))
    >>> u[torch.tensor([2, 0])].tolist()
    [[4.0, 5.0], [0.0, 1.0]]
    """
    if not isinstance(t, torch.Tensor):
        raise ArgumentTypeError(f"t: expected a torch.Tensor, got {type(t)}")
    what = "a quantised tensor" if t.is_quantized else f"a tensor on {t.device}"
    if t.layout is not torch.strided or t.is_nested:
        what = f"a {'nested' if t.is_nested else t.layout} tensor"
    elif t.device.type in ("cpu", "cuda") and not t.is_quantized:
        what = ""
    if what:
        raise ArgumentTypeError(f"t: expected a dense tensor on the CPU or a GPU, got {what}")
    if device is None and t.is_cuda:
        device = t.device
    gpu = _checked_gpu(affinity, device)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        source = t.detach().resolve_conj().resolve_neg()
        buffer = HostBuffer.allocate(source.numel() * source.element_size())
        target = _typed(buffer, source.shape, source.dtype)
        as_integers(target).copy_(as_integers(source))
    return _over(target, UnifiedState(buffer, affinity, gpu))


def _checked_gpu(affinity: Any, device: torch.device | str | int | None) -> torch.device | None:
    """Return the GPU of an affinity, which is None for the host."""
    if affinity not in ("host", "device"):
        raise ArgumentError(f"affinity: expected 'host' or 'device', got {affinity!r}")
    gpu = named_device("cuda" if device is None else device)
    if affinity == "host":
        return None
    if not torch.cuda.is_available():
        raise ArgumentError("affinity: 'device' needs a GPU, and torch sees no CUDA GPU")
    if gpu.type != "cuda":
        raise ArgumentError(f"device: expected a CUDA GPU, got {gpu}")
    return checked_device(gpu)


def _over(t: torch.Tensor, state: UnifiedState) -> UnifiedTensor:
    """Return a unified tensor over the memory of a plain one."""
    with torch._C.DisableTorchFunctionSubclass():
        u = t.as_subclass(UnifiedTensor)
    u.unified_state = state
    return u


def _like(t: torch.Tensor, u: UnifiedTensor) -> UnifiedTensor:
    """Return a tensor over the memory of `u` as a unified one."""
    return _over(t, u.unified_state)


def _plain(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory that torch handles alone."""
    with torch._C.DisableTorchFunctionSubclass():
        return t.as_subclass(torch.Tensor)


def _address(t: torch.Tensor) -> int:
    """Where a tensor's storage starts; 0 for one that has none or an empty one."""
    return t.untyped_storage().data_ptr() if t.layout is torch.strided else 0


def _typed(buffer: HostBuffer, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """View a buffer as a contiguous tensor."""
    return buffer.tensor.view(dtype).view(shape)


def _is_fact(result: Any) -> bool:
    """Return whether a result is something about a tensor, not a tensor."""
    return result is None or isinstance(
        result, (bool, int, float, str, torch.Size, torch.device, torch.dtype)
    )


def _describe(t: torch.Tensor) -> Operand:
    if isinstance(t, UnifiedTensor):
        state = t.unified_state
        affinity = state.affinity if state.affinity == "host" or _uses_gpu() else "host"
        return Operand("unified", t.dim() == 0, affinity, state.gpu)
    if t.is_cuda:
        return Operand("cuda", t.dim() == 0, device=t.device)
    return Operand("cpu", t.dim() == 0)


def _uses_gpu() -> bool:
    """Return whether device affinity holds here: not in DataLoader workers, not without a GPU."""
    if torch.cuda._is_in_bad_fork() or torch.utils.data.get_worker_info() is not None:
        return False
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized or torch.cuda.is_available()


def _with_views(result: Any, args: Any) -> Any:
    """Make those of the results unified that lie in the memory of a unified argument."""
    owners = [x for x in tree_leaves(args) if isinstance(x, UnifiedTensor)]

    def own(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and not isinstance(x, UnifiedTensor) and _address(x):
            for owner in owners:
                if _address(x) == _address(owner):
                    return _like(x, owner)
        return x

    return tree_map(own, result)


def _placed(x: Any, place: Placement, operands: Sequence[torch.Tensor]) -> Any:
    """Put a result where the rules want it, unless it lies in the memory of an operand."""
    if not isinstance(x, torch.Tensor) or isinstance(x, UnifiedTensor):
        return x
    if x.device.type != "cpu" or x.layout is not torch.strided or x.is_quantized:
        return x
    address = _address(x)
    for operand in operands:
        if operand is x or (address and address == _address(operand)):
            return _like(x, operand) if isinstance(operand, UnifiedTensor) else x
    if place.result == "cuda":
        return x.to(place.device)
    nbytes = x.numel() * x.element_size()
    buffer = None
    if nbytes >= SMALL_RESULT_BYTES and not x.requires_grad:
        with contextlib.suppress(BitslabError):  # out of file descriptors, for one
            buffer = HostBuffer.allocate(nbytes, pin="lazily")
            x, result = _typed(buffer, x.shape, x.dtype), x
            as_integers(x).copy_(as_integers(result.resolve_conj().resolve_neg()))
    return _over(x, UnifiedState(buffer))


def _compute_on(
    device: torch.device, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Call a function with its operands on one device.

    To a GPU come the unified tensors and the CPU tensors that are not scalars, to the CPU the CUDA
    tensors. An operand that was changed is copied back, and is the result where its copy is.
    """
    moved: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def move(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.device == device:
            return x
        if x.device.type == "cpu" and x.dim() == 0 and not isinstance(x, UnifiedTensor):
            return x
        if x.device.type != "cpu" and device.type != "cpu":
            return x  # on another GPU: torch raises
        if id(x) not in moved:
            # A tensor made in inference mode does not count its changes.
            with contextlib.ExitStack() as stack:
                if torch.is_inference_mode_enabled():
                    stack.enter_context(torch.inference_mode(False))
                there = _plain(x).to(device)
            moved[id(x)] = (x, there, version_of(there))
        return moved[id(x)][1]

    result = func(*tree_map(move, args), **tree_map(move, kwargs))
    for here, there, version in moved.values():
        if version_of(there) != version:
            _plain(here).copy_(there)
    back = {id(there): here for here, there, _ in moved.values()}
    return tree_map(lambda x: back.get(id(x), x), result)


# Rows by index.


def _get_item(u: torch.Tensor, index: Any) -> Any:
    """``u[index]``."""
    if not isinstance(u, UnifiedTensor):
        return NotImplemented  # a unified index into another tensor: an operator like others
    if isinstance(index, tuple) and len(index) == 1:
        (index,) = index
    if isinstance(index, torch.Tensor) and index.is_cuda:
        return rows_to_gpu(_plain(u), u.host_buffer, index)
    if any(isinstance(x, torch.Tensor) and x.is_cuda for x in tree_leaves(index)):
        return by_way_of_cpu(_plain(u), index)
    return _placed_on_cpu(u, _plain(u)[index])


def _index_select(
    input: torch.Tensor, dim: int, index: torch.Tensor, *, out: torch.Tensor | None = None
) -> Any:
    """``torch.index_select(input, dim, index, out=out)``."""
    if not isinstance(input, UnifiedTensor) or not isinstance(index, torch.Tensor):
        return NotImplemented
    source = _plain(input)
    if not index.is_cuda:
        rows = torch.index_select(source, dim, index, out=out)
        return rows if out is not None else _placed_on_cpu(input, rows)
    if source.dim() == 0 or index.dim() != 1 or not are_row_ids(index):
        raise ArgumentTypeError(
            "index: expected int32 or int64 [n] for a tensor with dimensions, "
            f"got {index.dtype} {list(index.shape)} for one of shape {list(source.shape)}"
        )
    if is_row_dim(source, dim):
        return rows_to_gpu(source, input.host_buffer, index, out)
    here = torch.index_select(source, dim, index.cpu()).to(index.device)
    return here if out is None else out.copy_(here)


def _embedding(
    input: torch.Tensor, weight: torch.Tensor, *args: Any, max_norm: Any = None, **kwargs: Any
) -> Any:
    """``torch.nn.functional.embedding(input, weight)``; the other arguments act on gradients."""
    plain_lookup = isinstance(weight, UnifiedTensor) and input.is_cuda and max_norm is None
    if args or not plain_lookup or weight.requires_grad:
        return NotImplemented
    return rows_to_gpu(_plain(weight), cast(UnifiedTensor, weight).host_buffer, input)


def _set_item(u: torch.Tensor, index: Any, value: Any) -> Any:
    """``u[index] = value``: writes to host memory, wherever index and value lie."""
    if not isinstance(u, UnifiedTensor):
        return NotImplemented
    index, value = tree_map(
        lambda x: x.cpu() if isinstance(x, torch.Tensor) and x.is_cuda else x, (index, value)
    )
    _plain(u)[index] = value


_SPECIAL: dict[Callable[..., Any], Callable[..., Any]] = {
    **row_functions(get_item=_get_item, index_select=_index_select, embedding=_embedding),
    torch.Tensor.__setitem__: _set_item,
}


def _placed_on_cpu(u: UnifiedTensor, result: torch.Tensor) -> torch.Tensor:
    """Return rows, or a view, of `u` as what a CPU index gives."""
    if _address(result) == _address(u):
        return _like(result, u)
    return result if u.affinity == "device" else _over(result, UnifiedState())


# Other processes, files and copies.


def _restore(
    t: torch.Tensor, affinity: Affinity, gpu: torch.device | None, requires_grad: bool
) -> UnifiedTensor:
    """Make a unified tensor of what was pickled, saved or is copied."""
    u = unified(t)
    # As it was, though this process may have no such GPU: its use raises, not its reading.
    u.unified_state = replace(u.unified_state, affinity=affinity, gpu=gpu)
    u.requires_grad_(requires_grad)
    return u


def _pass_on(u: UnifiedTensor) -> tuple[Any, ...]:
    """Send a tensor to another process: its buffer's memory, or as torch does."""
    t, buffer, state = _plain(u), u.host_buffer, u.unified_state
    if buffer is None or (t.requires_grad and not t.is_leaf):
        reduced = reduce_tensor(t)  # type: ignore[no-untyped-call]
        return _receive_ordinary, (reduced, state.affinity, state.gpu)
    place = (t.storage_offset(), t.shape, t.stride())
    return _receive, (buffer, t.dtype, place, t.requires_grad, state.affinity, state.gpu)


def _receive(
    buffer: HostBuffer,
    dtype: torch.dtype,
    place: tuple[int, Sequence[int], Sequence[int]],
    requires_grad: bool,
    affinity: Affinity,
    gpu: torch.device | None,
) -> UnifiedTensor:
    offset, shape, stride = place
    t = torch.empty(0, dtype=dtype).set_(buffer.tensor.untyped_storage(), offset, shape, stride)
    return _over(t.requires_grad_(requires_grad), UnifiedState(buffer, affinity, gpu))


def _receive_ordinary(
    reduced: tuple[Callable[..., Any], tuple[Any, ...]],
    affinity: Affinity,
    gpu: torch.device | None,
) -> UnifiedTensor:
    rebuild, args = reduced
    return _over(rebuild(*args), UnifiedState(None, affinity, gpu))


ForkingPickler.register(UnifiedTensor, _pass_on)


def _restore_older(*args: Any) -> UnifiedTensor:
    return _restore(*args)


# Files name the function that makes the tensor again by the module that it was in when they were
# written.
_restore_older.__module__ = "bitslab.memory.unified"
_restore_older.__qualname__ = _restore_older.__name__ = "_restore"
torch.serialization.add_safe_globals([_restore, _restore_older])
