"""Optimizer adapters: optimizer state follows cached rows between device and host.

An optimizer sees the resident rows alone; `supported_optimizers` says when that is right.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..dtypes import dense
from ..errors import ArgumentError, ArgumentTypeError, BitslabError
from .device_access import access_to
from .membership import add_watched, rows_among, rows_in, rows_with
from .ownership import sync_from_device
from .row_state import RowState
from .state import CacheState
from .supported_optimizers import passes_over, refused, why_refused, why_refused_when_made

Array = np.ndarray[Any, Any]


class OptimizerAdapter:
    """Keeps one optimizer's state in step with the rows in the slots of a table's cache.

    Parameters
    ----------
    rows : CacheState
        The rows.
    optimizer : torch.optim.Optimizer
        The optimizer that has their parameter.
    row_wise : bool
        Whether the caller guarantees that a step leaves rows without gradient, and their state,
        alone.
    stores : dict of str to RowState
        Earlier state of rows that are not resident.

    Raises
    ------
    ArgumentError
        When the optimizer is not one that can be followed.
    """

    def __init__(
        self,
        rows: CacheState,
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
        """Raise if the optimizer would move rows without gradient.

        Parameters
        ----------
        options : mapping, optional
            Options to check instead of those of the rows' parameter group.
        """
        optimizer = self._optimizer()
        if optimizer is None or self.row_wise:
            return
        rows = self._rows()
        if rows is None:
            raise BitslabError("optimizer: its rows are gone")
        options = self.options if options is None else options
        reason = why_refused(optimizer, options, rows.parameter)
        if reason:
            raise refused(optimizer, reason)

    @property
    def options(self) -> dict[str, Any]:
        """Options of the rows' parameter group, with defaults; empty once the optimizer is gone."""
        optimizer = self._optimizer()
        return {} if optimizer is None else _group_of(optimizer, self._parameter)

    @property
    def shape(self) -> torch.Size:
        """Shape of the table, ``[N, D]``."""
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
        if optimizer is None or not optimizer.state:
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
        """Make every row state of the optimizer one with a row for each slot.

        State of all rows in id order, as a checkpoint holds it, is divided between the resident
        rows and the host.

        Parameters
        ----------
        made_now : bool
            Whether new state was made by the step just taken, in the shape of the parameter.
        """
        optimizer = self._optimizer()
        if not self._known and (optimizer is None or not optimizer.state):
            return  # as of SGD, in each step
        rows = self._rows()
        if rows is None or (not self._known and not self._state()):
            return
        n_slots, n_rows = rows.parameter.shape[0], len(rows)
        if not made_now:
            there = {name for name, _ in self._row_states()}
            for name in [name for name in self._known if name not in there]:
                # The optimizer's state was cleared from outside.
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
                sync_from_device(rows)  # the GPU may still write to the store
                store.load(value)
                self._set(name, self._resident_state(name, value.device))
            elif inherited:
                # A copy of an optimizer: other rows may be resident since, but the store has all.
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
        sync_from_device(rows)
        ids = rows.slot_table.id_of
        return self.stores[name].read(np.maximum(ids, 0), device)

    def complete(self) -> dict[str, RowState]:
        """Return the state of all rows, those that are resident too."""
        rows = self._rows()
        assert rows is not None
        sync_from_device(rows)
        slots = rows.slot_table.resident()
        self.save(slots, rows.slot_table.id_of[slots])
        return self.stores

    def save(self, slots: Array, ids: Array) -> None:
        """Save the state of rows that leave their slots: int64 ``[n]`` each."""
        for name, value in self._row_states():
            if name in self.stores:
                picked = torch.from_numpy(slots).to(value.device)
                self.stores[name].write(ids, value[picked])

    def restore(self, slots: Array, ids: Array) -> None:
        """Load the state of rows that were put into slots: int64 ``[n]`` each."""
        for name, value in self._row_states():
            if name in self.stores:
                picked = torch.from_numpy(slots).to(value.device)
                value[picked] = self.stores[name].read(ids, value.device)

    def grow(self, ids: Array, first: int) -> None:
        """Append the state of rows ``ids``, for slots from `first` on."""
        for name, value in self._row_states():
            if name in self.stores:
                more = self.stores[name].read(ids, value.device)
                self._set(name, torch.cat([value[:first], more]))

    # Rows that a GPU exchanges with the host

    def followed(self) -> list[tuple[torch.Tensor, RowState]] | None:
        """Return the state of rows in slots ``[S, ...]``, and that of all rows, page-locked.

        None where a GPU cannot exchange them.
        """
        state, found = self._state(), []
        if state:
            rows = self._rows()
            assert rows is not None
            device, n_slots = rows.device, rows.parameter.shape[0]
            access = access_to(device)
            assert access is not None
            for name, value in state.items():
                if not isinstance(value, torch.Tensor) or not value.dim() or value.is_sparse:
                    continue
                store = self.stores.get(name)
                fits = value.shape[0] == n_slots and value.device == device
                if store is None or not fits or not value.is_contiguous() or not store.pin(access):
                    return None
                found.append((value, store))
        return found

    def states(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the state that have a row for each slot."""
        return {name: value for name, value in self._row_states() if name in self.stores}

    def widened(self, more: int) -> dict[str, torch.Tensor]:
        """Return copies of the state with `more` slots appended, filled with the default."""
        found = {}
        for name, value in self.states().items():
            new = value.new_full((more, *value.shape[1:]), self.stores[name].default)
            found[name] = torch.cat([value, new])
        return found

    def follow(self, states: dict[str, torch.Tensor]) -> None:
        """Use other tensors as the state, such as `widened` returns."""
        for name, value in states.items():
            self._set(name, value)

    def move(self, slots: torch.Tensor, to: torch.Tensor) -> None:
        """Copy state of rows to other slots: int64 ``[n]`` each, on their device."""
        for name, value in self._row_states():
            if name in self.stores:
                value[to.to(value.device)] = value[slots.to(value.device)]

    def shrink(self, slots: int) -> None:
        """Cut the state off behind the first `slots` slots; `save` it before."""
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
                sync_from_device(rows)
                found = store.read(np.arange(begin, end), _CPU)
                at, slots = rows.slot_table.among(begin, end)
                there = torch.from_numpy(slots).to(value.device)
                found[torch.from_numpy(at)] = value.detach()[there].cpu()
            yield found.to(value.dtype)

    def whole(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return the entry of a state dict: the state of all rows ``[N, ...]``, on the CPU."""
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

        Rows that equal the default are not written. The state gets the dtype of the rows, as in
        `torch.optim.Optimizer.load_state_dict`.
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
        """Install stores while the optimizer loads a state dict whose row states have no rows.

        Parameters
        ----------
        stores : dict of str to RowState
            State of all rows; the previous stores come back if the block raises.
        """
        before = self.stores, self._known
        self.stores, self._known = stores, {}
        try:
            yield
        except BaseException:
            self.stores, self._known = before
            raise


class StateOfRows:
    """State of all rows in a state dict, read when the state dict is written to a file.

    Parameters
    ----------
    adapter : OptimizerAdapter
        Of the rows and the optimizer.
    name : str
        Name of the state.
    value : torch.Tensor
        The state of the resident rows.
    stand_in : torch.Tensor
        ``[N, ...]`` on the meta device, the entry of the state dict.
    """

    def __init__(
        self, adapter: OptimizerAdapter, name: str, value: torch.Tensor, stand_in: torch.Tensor
    ) -> None:
        self._adapter, self._name, self._value = adapter, name, value
        self.stand_in = stand_in

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield it in id order, some rows at a time, on the CPU."""
        return self._adapter.pieces(self._name, self._value)


#: Set while a state dict is made for a file: stand-ins of row states by their id.
_deferred: ContextVar[dict[int, StateOfRows] | None] = ContextVar("_deferred", default=None)
_CPU = torch.device("cpu")
#: Bytes of rows, or of their state, that are read and written at once.
PIECE_BYTES = 2 << 20


@contextlib.contextmanager
def deferred_rows() -> Iterator[dict[int, StateOfRows]]:
    """Make state dicts of optimizers hold stand-ins for state of all rows; yield it by their id.

    Applies to this thread or task alone; others get the whole state meanwhile.
    """
    found: dict[int, StateOfRows] = {}
    token = _deferred.set(found)
    try:
        yield found
    finally:
        _deferred.reset(token)


def _ranges(n_rows: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, last + 1) of rows of some PIECE_BYTES each; all take `nbytes`."""
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
    """Return whether an optimizer has state of a parameter other than its initial state."""
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


# Finding the optimizers of watched parameters

_hooks: list[Any] = []
_followed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def watch(rows: CacheState) -> None:
    """Run `before_step` and `after_step` around steps of optimizers that have these rows."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))
        _check_new_groups()
    add_watched(rows)


def _concerns(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether a step is about rows without gradient: not if it could not train them.

    It skips them where it trains the rest of a model.
    """
    if not passes_over(optimizer):
        return True
    return not why_refused_when_made(optimizer, {**optimizer.defaults, **group})


def _check_new_groups() -> None:
    """Refuse optimizers as they are made, which torch has no hook for."""
    add = torch.optim.Optimizer.add_param_group

    # Without attributes: they mark `add` alone for torch.compile.
    @functools.wraps(add, updated=())
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        trained = (r.parameter.requires_grad for r in rows_among(param_group["params"]))
        reason = why_refused_when_made(self, param_group) if any(trained) else ""
        if reason:
            self.param_groups.pop()
            raise refused(self, reason)

    torch.optim.Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def adapters_of(optimizer: torch.optim.Optimizer) -> dict[int, OptimizerAdapter]:
    """Return the adapters of an optimizer, made where there are none yet.

    Returns
    -------
    dict of int to OptimizerAdapter
        By the id of the parameter.

    Raises
    ------
    ArgumentError
        When the optimizer is not one that can be followed.
    """
    found = {}
    for rows, _ in rows_in(optimizer):
        with rows.lock:
            rows.training.adapters.attach(optimizer)
        adapter = rows.training.adapters.of(optimizer)
        assert adapter is not None
        found[id(rows.parameter)] = adapter
    return found


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    ours = rows_in(optimizer)
    if not ours:
        return None
    _check_step(optimizer, ours)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None
    ready = _with_gradients(optimizer, closure)
    if "closure" in kwargs:
        return args, kwargs | {"closure": ready}
    return (args[0], ready, *args[2:]), kwargs


def _check_step(
    optimizer: torch.optim.Optimizer, ours: Iterable[tuple[CacheState, dict[str, Any]]]
) -> None:
    for rows, group in ours:
        if rows.parameter.grad is not None or _concerns(optimizer, group):
            rows.training.before_step(optimizer, {**optimizer.defaults, **group})


def _with_gradients(
    optimizer: torch.optim.Optimizer, closure: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a closure that also checks the gradients that it has computed."""

    def ready(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        with torch.no_grad():
            _check_step(optimizer, rows_in(optimizer))
        return loss

    return ready


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for rows, group in rows_in(optimizer, same_step=True):
        if rows.parameter.grad is not None or _concerns(optimizer, group):
            rows.training.after_step(optimizer)


def _in_id_order(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace state of resident rows in a state dict by that of all rows."""
    number = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            rows = rows_with(parameter)
            adapter = None if rows is None else rows.training.adapters.of(optimizer)
            if adapter is not None and number in state_dict["state"]:
                state_dict["state"][number] = {
                    name: adapter.whole(name, value)
                    if isinstance(value, torch.Tensor) and value.dim()
                    else value
                    for name, value in state_dict["state"][number].items()
                }
            number += 1


def _took_state(optimizer: torch.optim.Optimizer) -> None:
    """Divide state that an optimizer has loaded between the device and the host."""
    for rows, _ in rows_in(optimizer):
        adapter = rows.training.adapters.of(optimizer)
        if adapter is not None:
            adapter.align()


def check_optimizer(optimizer: object) -> torch.optim.Optimizer:
    """Return an optimizer, or refuse what is none."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentTypeError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    return optimizer
