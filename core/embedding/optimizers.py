"""Optimizers of cached rows, and how their state follows the rows.

An optimizer sees the resident rows alone; `refusals` says when that is right.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..dtypes import dense
from ..engine.kernels.cuda import kernels_on
from ..errors import ArgumentError, ArgumentTypeError, BitslabError
from .device_notes import take_notes
from .refusals import passes_over, refused, why_refused, why_refused_when_made
from .state import RowState

if TYPE_CHECKING:
    from .rows import CachedRows

Array = np.ndarray[Any, Any]


class OptimizerLink:
    """What joins a table's cached rows and one optimizer.

    Parameters
    ----------
    rows : CachedRows
        The rows.
    optimizer : torch.optim.Optimizer
        The optimizer that has their parameter.
    row_wise : bool
        Whether the caller vouches that rows without gradient, and their state, stay as they are.
    stores : dict of str to RowState
        State of rows that are not resident, from before.

    Raises
    ------
    ArgumentError
        When the optimizer is not one that can be followed.
    """

    def __init__(
        self,
        rows: CachedRows,
        optimizer: torch.optim.Optimizer,
        *,
        row_wise: bool = False,
        stores: dict[str, RowState] | None = None,
    ) -> None:
        self._rows = weakref.ref(rows)
        self._optimizer = weakref.ref(optimizer)
        self.row_wise = row_wise
        self.stores: dict[str, RowState] = dict(stores or {})
        # Tensors of the optimizer that are known to follow the slots.
        self._known: dict[str, weakref.ref[torch.Tensor]] = {}
        self.check()
        if optimizer not in _followed:
            _followed.add(optimizer)
            optimizer.register_state_dict_post_hook(_in_id_order)
            optimizer.register_load_state_dict_post_hook(_took_state)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None once it is gone."""
        return self._optimizer()

    def check(self, options: Mapping[str, Any] | None = None) -> None:
        """Refuse the optimizer as its options are now.

        Parameters
        ----------
        options : mapping, optional
            Options that the group of the rows is to have instead of those that it has.
        """
        optimizer = self._optimizer()
        if optimizer is None or self.row_wise:
            return
        options = self.options if options is None else options
        reason = why_refused(optimizer, options, self._parameter)
        if reason:
            raise refused(optimizer, reason)

    @property
    def options(self) -> dict[str, Any]:
        """Those of the optimizer for the rows, looked for among all; empty once it is gone."""
        optimizer = self._optimizer()
        return {} if optimizer is None else _group_of(optimizer, self._parameter)

    @property
    def shape(self) -> torch.Size:
        """That of the table, ``[N, D]``."""
        rows = self._rows()
        assert rows is not None
        return rows.shape

    @property
    def _parameter(self) -> torch.nn.Parameter:
        rows = self._rows()
        if rows is None:
            raise BitslabError("optimizer: its rows are gone")
        return rows.parameter

    def _state(self) -> dict[str, Any]:
        """Return the optimizer's state of the parameter; it may be empty."""
        optimizer = self._optimizer()
        if optimizer is None:
            return {}
        state: dict[str, Any] = optimizer.state.get(self._parameter, {})
        return state

    def _row_states(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in list(self._state().items()):
            if isinstance(value, torch.Tensor) and value.dim() and not value.is_sparse:
                yield name, value

    def _set(self, name: str, value: torch.Tensor) -> None:
        self._state()[name] = value
        self._known[name] = weakref.ref(value)

    def _default_of(self, name: str, options: Mapping[str, Any] | None = None) -> float:
        if type(self._optimizer()) is torch.optim.Adagrad and name == "sum":
            return float((options or self.options).get("initial_accumulator_value", 0))
        return 0.0

    def _store(self, name: str, value: torch.Tensor, default: float) -> RowState:
        if name not in self.stores:
            rows = self._rows()
            assert rows is not None
            self.stores[name] = RowState(len(rows), value.shape[1:], value.dtype, default)
        return self.stores[name]

    def align(self, *, made_now: bool = False) -> None:
        """Make every row state of the optimizer one that follows the slots.

        State of all rows in id order, as a checkpoint holds it, is divided between the resident
        rows and the host.

        Parameters
        ----------
        made_now : bool
            Whether state that is new was made by the step just taken, from the parameter as it is.
        """
        rows = self._rows()
        if rows is None:
            return
        n_slots, n_rows = rows.parameter.shape[0], len(rows)
        if not made_now:
            there = {name for name, _ in self._row_states()}
            for name in [name for name in self._known if name not in there]:
                # Somebody has let the optimizer begin anew.
                del self._known[name], self.stores[name]
        for name, value in self._row_states():
            known = self._known.get(name)
            if known is not None and known() is value and value.shape[0] == n_slots:
                continue
            everywhere = None if made_now else _only_value(value)
            inherited = name in self.stores and known is None and not made_now
            default = self._default_of(name) if everywhere is None else everywhere
            store = self._store(name, value, default)
            if value.shape[0] == n_slots and (made_now or rows.all_resident):
                self._known[name] = weakref.ref(value)
            elif value.shape[0] == n_rows:
                store.load(value)
                self._set(name, self._resident_state(name, value.device))
            elif inherited:
                # A copy of an optimizer: rows may have come and gone since, but the store has all.
                self._set(name, self._resident_state(name, value.device))
            elif value.shape[0] == n_slots:
                self._known[name] = weakref.ref(value)
            elif not len(value):
                self._set(name, self._resident_state(name, value.device))
            elif everywhere is not None:
                # As it was made with the optimizer, when the parameter had another size.
                self._set(name, value[:1].repeat(n_slots, *[1] * (value.dim() - 1)))
            else:
                raise BitslabError(
                    f"optimizer: its state {name!r} has {value.shape[0]} rows; accepted are the "
                    f"{n_slots} resident ones, or all {n_rows} in the order of the ids"
                )

    def _resident_state(self, name: str, device: torch.device) -> torch.Tensor:
        rows = self._rows()
        assert rows is not None
        take_notes(rows)
        ids = rows.residents.id_of
        return self.stores[name].read(np.maximum(ids, 0), device)

    def complete(self) -> dict[str, RowState]:
        """Return the state of all rows, those that are resident too."""
        rows = self._rows()
        assert rows is not None
        take_notes(rows)
        slots = rows.residents.resident()
        self.save(slots, rows.residents.id_of[slots])
        return self.stores

    def save(self, slots: Array, ids: Array) -> None:
        """Keep the state of rows that leave their slots."""
        for name, value in self._row_states():
            if name in self.stores:
                picked = torch.from_numpy(slots).to(value.device)
                self.stores[name].write(ids, value[picked])

    def restore(self, slots: Array, ids: Array) -> None:
        """Bring the state of rows that came to slots."""
        for name, value in self._row_states():
            if name in self.stores:
                picked = torch.from_numpy(slots).to(value.device)
                value[picked] = self.stores[name].read(ids, value.device)

    def grow(self, ids: Array, first: int) -> None:
        """Make room for rows from slot `first` on."""
        for name, value in self._row_states():
            if name in self.stores:
                more = self.stores[name].read(ids, value.device)
                self._set(name, torch.cat([value[:first], more]))

    # Where a GPU brings rows by itself

    def follows_on_gpu(self) -> bool:
        """Tell whether the GPU can bring the state of rows; get the state ready for that."""
        rows = self._rows()
        assert rows is not None
        n_slots = rows.parameter.shape[0]
        return all(
            name in self.stores
            and value.device == rows.device
            and value.shape[0] == n_slots
            and value.is_contiguous()
            and self.stores[name].pin()
            for name, value in self._row_states()
        )

    def states(self) -> dict[str, torch.Tensor]:
        """Return the state that follows the slots."""
        return {name: value for name, value in self._row_states() if name in self.stores}

    def widened(self, more: int) -> dict[str, torch.Tensor]:
        """Return the state with room for so many slots more, where rows have none yet."""
        found = {}
        for name, value in self.states().items():
            new = value.new_full((more, *value.shape[1:]), self.stores[name].default)
            found[name] = torch.cat([value, new])
        return found

    def follow(self, states: dict[str, torch.Tensor]) -> None:
        """Let other tensors be the state, such as `widened` has returned them."""
        for name, value in states.items():
            self._set(name, value)

    def restore_on_gpu(self, ids: torch.Tensor, first: int) -> None:
        """Bring the state of rows int64 ``[n]``, or NO_ROW, to slots from `first` on."""
        kernels = None
        for name, value in self._row_states():
            kernels = kernels or kernels_on(value.device, tell=False)
            stored = self.stores[name].as_bytes()
            kernels.copy_rows(stored, stored.shape[1], ids, value[first : first + len(ids)])

    def move(self, slots: torch.Tensor, to: torch.Tensor) -> None:
        """Follow rows to other slots: int64 ``[n]`` each, on their device."""
        for name, value in self._row_states():
            if name in self.stores:
                value[to.to(value.device)] = value[slots.to(value.device)]

    def shrink(self, slots: int) -> None:
        """Let state behind the first slots go; `save` it before."""
        for name, value in self._row_states():
            if name in self.stores and value.shape[0] > slots:
                self._set(name, value[:slots].clone())

    # State of all rows

    def pieces(self, name: str, value: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the state of all rows in id order, some rows ``[n, ...]`` at a time, on the CPU.

        Parameters
        ----------
        name : str
            One of `stores`.
        value : torch.Tensor
            The state of the resident rows.
        """
        rows = self._rows()
        assert rows is not None
        store = self.stores[name]
        for begin, end in _ranges(len(rows), store.nbytes):
            with rows.lock:
                take_notes(rows)
                found = store.read(np.arange(begin, end), _CPU)
                at, slots = rows.residents.among(begin, end)
                there = torch.from_numpy(slots).to(value.device)
                found[torch.from_numpy(at)] = value.detach()[there].cpu()
            yield found.to(value.dtype)

    def whole(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return what stands in a state dict: the state of all rows ``[N, ...]``, on the CPU."""
        if name not in self.stores:
            return value
        rows = self._rows()
        assert rows is not None
        shape = (len(rows), *value.shape[1:])
        deferred = _deferred.get()
        if deferred is not None:
            stand_in = torch.empty(shape, dtype=value.dtype, device="meta")
            deferred[id(stand_in)] = StateOfRows(self, name, value, stand_in)
            return stand_in
        values = torch.empty(shape, dtype=value.dtype, device=_CPU)
        begin = 0
        for piece in self.pieces(name, value):
            values[begin : begin + len(piece)] = piece
            begin += len(piece)
        return values

    def store_of(
        self, name: str, values: torch.Tensor, options: Mapping[str, Any] | None = None
    ) -> RowState:
        """Return the state of all rows ``[N, ...]`` as `replacing_stores` takes it.

        Rows that are as if never written are not, by the options that the rows are to have. Such
        state has the dtype of the rows, as `torch.optim.Optimizer.load_state_dict` gives it.
        """
        if len(values) != self.shape[0]:
            raise ArgumentError(
                f"optimizer: its state {name!r} has {len(values)} rows, the table has "
                f"{self.shape[0]}"
            )
        dtype = values.dtype if name == "step" else self._parameter.dtype
        store = RowState(len(values), values.shape[1:], dtype, self._default_of(name, options))
        for begin, end in _ranges(len(values), store.nbytes):
            piece = values[begin:end].to(dtype)
            untouched = torch.full_like(piece, store.default)
            differs = _bytes_of_rows(piece) != _bytes_of_rows(untouched)
            ids = differs.any(1).nonzero()[:, 0]
            store.write(begin + ids.numpy(), piece[ids])
        return store

    @contextlib.contextmanager
    def replacing_stores(self, stores: dict[str, RowState]) -> Iterator[None]:
        """Let the optimizer load state for which it is given tensors of no rows.

        Parameters
        ----------
        stores : dict of str to RowState
            Its state of all rows, which is taken unless the block raises.
        """
        before = self.stores, self._known
        self.stores, self._known = stores, {}
        try:
            yield
        except BaseException:
            self.stores, self._known = before
            raise


class StateOfRows:
    """State of all rows that stands in a state dict, read when it is written to a file.

    Parameters
    ----------
    link : OptimizerLink
        What joins rows and optimizer.
    name : str
        Name of the state.
    value : torch.Tensor
        That of the resident rows.
    stand_in : torch.Tensor
        ``[N, ...]`` on the meta device, what stands there instead.
    """

    def __init__(
        self, link: OptimizerLink, name: str, value: torch.Tensor, stand_in: torch.Tensor
    ) -> None:
        self._link, self._name, self._value = link, name, value
        self.stand_in = stand_in

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield it in id order, some rows at a time, on the CPU."""
        return self._link.pieces(self._name, self._value)


#: What takes state of rows piece by piece, where a state dict is made for a file.
_deferred: ContextVar[dict[int, StateOfRows] | None] = ContextVar("_deferred", default=None)
_CPU = torch.device("cpu")
#: Bytes of rows, or of their state, that are read and written at once.
PIECE_BYTES = 2 << 20


@contextlib.contextmanager
def deferred_rows() -> Iterator[dict[int, StateOfRows]]:
    """Let state dicts of optimizers hold stand-ins for what all rows have; yield that by their id.

    Only in this thread or task, so that others get whole state meanwhile.
    """
    found: dict[int, StateOfRows] = {}
    token = _deferred.set(found)
    try:
        yield found
    finally:
        _deferred.reset(token)


def _ranges(n_rows: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last + 1 of rows that take so many bytes in all, some at a time."""
    step = max(1, PIECE_BYTES * n_rows // max(1, nbytes))
    for begin in range(0, n_rows, step):
        yield begin, min(begin + step, n_rows)


def _bytes_of_rows(values: torch.Tensor) -> torch.Tensor:
    return dense(values.reshape(len(values), -1)).view(torch.uint8)


def _only_value(value: torch.Tensor) -> float | None:
    """Return the value that all elements have; None when they differ."""
    first = value.flatten()[:1]
    return float(first) if len(first) and bool((value == first).all()) else None


def has_stepped(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Tell whether an optimizer has state of a parameter that is not as it was made."""
    for name, value in optimizer.state.get(parameter, {}).items():
        if name == "step" and float(value) > 0:
            return True
        if isinstance(value, torch.Tensor) and value.dim() and _only_value(value) is None:
            return True
    return False


def _group_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    for group in optimizer.param_groups:
        if any(p is parameter for p in group["params"]):
            return {**optimizer.defaults, **group}
    raise ArgumentError(
        "optimizer: does not have the parameter of these rows; make it from module.parameters()"
    )


# Finding optimizers by themselves

_watched: weakref.WeakValueDictionary[int, CachedRows] = weakref.WeakValueDictionary()
_hooks: list[Any] = []
_followed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def watch(rows: CachedRows) -> None:
    """Hear of every step of an optimizer that has the parameter of these rows."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))
        _check_new_groups()
    _watched[id(rows.parameter)] = rows


def _ours(optimizer: torch.optim.Optimizer) -> list[CachedRows]:
    return [rows for group in optimizer.param_groups for rows in _ours_among(group["params"])]


def _ours_among(parameters: Iterable[torch.Tensor]) -> Iterator[CachedRows]:
    for parameter in parameters:
        rows = _watched.get(id(parameter))
        if rows is not None and rows.parameter is parameter:
            yield rows


def _concerned(optimizer: torch.optim.Optimizer) -> list[CachedRows]:
    """Return the rows of an optimizer but those that it passes over and could not train.

    Such as where it trains the rest of a model.
    """
    return [
        rows
        for rows in _ours(optimizer)
        if rows.parameter.grad is not None
        or not passes_over(optimizer)
        or not why_refused_when_made(optimizer, _group_of(optimizer, rows.parameter))
    ]


def _check_new_groups() -> None:
    """Refuse optimizers as they are made, which torch has no hook for."""
    add = torch.optim.Optimizer.add_param_group

    # Not with what marks `add` for torch.compile, which is of that function alone.
    @functools.wraps(add, updated=())
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        trained = (r.parameter.requires_grad for r in _ours_among(param_group["params"]))
        reason = why_refused_when_made(self, param_group) if any(trained) else ""
        if reason:
            self.param_groups.pop()
            raise refused(self, reason)

    torch.optim.Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def links_of(optimizer: torch.optim.Optimizer) -> dict[int, OptimizerLink]:
    """Return what joins an optimizer and cached rows, made where there is nothing yet.

    Returns
    -------
    dict of int to OptimizerLink
        By the id of the parameter.

    Raises
    ------
    ArgumentError
        When the optimizer is not one that can be followed.
    """
    found = {}
    for rows in _ours(optimizer):
        rows.attach_optimizer(optimizer)
        link = rows.training.link_of(optimizer)
        assert link is not None
        found[id(rows.parameter)] = link
    return found


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    ours = _ours(optimizer)
    for rows in _concerned(optimizer):
        rows.training.before_step(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not ours or not callable(closure):
        return None
    ready = _with_gradients(optimizer, closure)
    if "closure" in kwargs:
        return args, kwargs | {"closure": ready}
    return (args[0], ready, *args[2:]), kwargs


def _with_gradients(
    optimizer: torch.optim.Optimizer, closure: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a closure after which the gradients that it has brought are looked at too."""

    def ready(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        with torch.no_grad():
            for rows in _concerned(optimizer):
                rows.training.before_step(optimizer)
        return loss

    return ready


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for rows in _concerned(optimizer):
        rows.training.after_step(optimizer)


def _in_id_order(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Put state of all rows into a state dict, in the place of that of the resident ones."""
    number = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            rows = _watched.get(id(parameter))
            link = None if rows is None else rows.training.link_of(optimizer)
            if link is not None and number in state_dict["state"]:
                state_dict["state"][number] = {
                    name: link.whole(name, value)
                    if isinstance(value, torch.Tensor) and value.dim()
                    else value
                    for name, value in state_dict["state"][number].items()
                }
            number += 1


def _took_state(optimizer: torch.optim.Optimizer) -> None:
    """Divide the state that an optimizer loaded between the device and the host."""
    for rows in _ours(optimizer):
        link = rows.training.link_of(optimizer)
        if link is not None:
            link.align()


def check_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """Return an optimizer, or refuse what is none."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    return optimizer
