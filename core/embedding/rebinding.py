"""Optimizers that were made before the parameters they hold were replaced.

A table that is compressed in a model has another parameter than before, and so has one that is
restored. `take_over` and `give_back` put the new parameters into live optimizers, with the state
that they have. Those that keep parameters elsewhere too cannot be changed from outside: they hold
what is no longer in the model, and their step raises where it would train nothing.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import BitslabError
from .state import CacheState
from .supported_optimizers import passes_over, why_refused

State = dict[str, Any]


def live_optimizers() -> list[torch.optim.Optimizer]:
    """Return every optimizer of this process; torch keeps no list of them."""
    return [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]


def take_over(
    weights: Sequence[torch.Tensor],
    rows: CacheState,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Replace weights in optimizers by the parameter of the rows packed from them.

    Parameters
    ----------
    weights : sequence of torch.Tensor
        ``[N_i, D]``, which the rows have been packed from, back to back.
    rows : CacheState
        The rows.
    optimizers : sequence of torch.optim.Optimizer
        All optimizers that are live.
    """
    for optimizer in optimizers:
        group = _group_of_all(optimizer, weights, optimizers)
        if group is None:
            continue
        state = _joined([optimizer.state.get(weight, {}) for weight in weights], weights)
        if state is None:
            continue
        _swap(optimizer, group, weights, [rows.parameter], [state])
        if rows.trainable and not why_refused(optimizer, group, rows.parameter):
            with rows.lock:
                rows.training.adapters.attach(optimizer)
        _move_state(optimizer, rows.parameter)
        for weight in weights:
            _warn_of_gradients(weight)
    for weight in weights:
        _record(weight, [rows])


def give_back(
    rows: CacheState,
    weights: Sequence[torch.nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Replace the parameter of rows in optimizers by plain weights.

    Parameters
    ----------
    rows : CacheState
        The rows, which are looked up no more.
    weights : sequence of torch.nn.Parameter
        ``[N_i, D]``, all rows, back to back.
    optimizers : sequence of torch.optim.Optimizer
        All optimizers that are live.
    """
    parameter = rows.parameter
    for optimizer in optimizers:
        group = _group_of_all(optimizer, [parameter], optimizers)
        if group is None or (len(weights) > 1 and "param_names" in group):
            continue
        if rows.trainable and not why_refused(optimizer, group, parameter):
            with rows.lock:
                rows.training.adapters.attach(optimizer)  # what it has may be as it was made
        states = _divided(_state_of_all(rows, optimizer), weights)
        if states is None:
            continue
        _swap(optimizer, group, [parameter], weights, states)
        for weight in weights:
            _move_state(optimizer, weight)
    for entry in list(_replaced.values()):
        if any(each() is rows for each in entry.by):
            entry.by = [weakref.ref(weight) for weight in weights]
    _record(parameter, weights)


# Parameters and state of an optimizer


def _group_of_all(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
) -> State | None:
    """Return the group that holds all of some parameters, if they can be replaced in it.

    That is certain of torch's own classes but for LBFGS, which keeps their sizes, where no other
    optimizer shares the group, as one does that keeps parameters by name.
    """
    if not passes_over(optimizer):
        return None
    for group in _groups(optimizer):
        if all(_holds([group], parameter) for parameter in parameters):
            owners = [o for o in optimizers if any(group is each for each in _groups(o))]
            return group if len(owners) == 1 else None
    return None


def _groups(optimizer: torch.optim.Optimizer) -> list[State]:
    """Return the groups of an optimizer, but not of one that it wraps."""
    groups = vars(optimizer).get("param_groups")
    return groups if isinstance(groups, list) else []


def _holds(groups: Sequence[State], parameter: torch.Tensor) -> bool:
    return any(p is parameter for group in groups for p in group["params"])


def _swap(
    optimizer: torch.optim.Optimizer,
    group: State,
    old: Sequence[torch.Tensor],
    new: Sequence[torch.Tensor],
    states: Sequence[State],
) -> None:
    """Replace parameters of a group, and their state, by others."""
    given = {id(parameter) for parameter in old}
    params: list[torch.Tensor] = group["params"]
    gone = [i for i, p in enumerate(params) if id(p) in given]
    for i in reversed(gone[1:]):
        del params[i]
        if "param_names" in group:
            del group["param_names"][i]
    params[gone[0] : gone[0] + 1] = new  # in place: others may have the list
    for parameter in old:
        optimizer.state.pop(parameter, None)
    for parameter, state in zip(new, states, strict=True):
        if state:
            optimizer.state[parameter] = state


def _state_of_all(rows: CacheState, optimizer: torch.optim.Optimizer) -> State:
    """Return an optimizer's state of rows with all of them in the order of their ids."""
    adapter = rows.training.adapters.of(optimizer)
    state = optimizer.state.get(rows.parameter, {})
    return {
        name: adapter.whole(name, value)
        if adapter is not None and isinstance(value, torch.Tensor) and value.dim()
        else value
        for name, value in state.items()
    }


def _joined(states: Sequence[State], weights: Sequence[torch.Tensor]) -> State | None:
    """Return the state of weights as that of one that has all their rows; None where it cannot be.

    It cannot where they have taken different numbers of steps.
    """
    if len(states) == 1:
        return dict(states[0])
    found: State = {}
    if any(state.keys() != states[0].keys() for state in states):
        return None
    for name in states[0]:
        values = [state[name] for state in states]
        if all(_is_of_rows(v, len(w)) for v, w in zip(values, weights, strict=True)):
            found[name] = torch.cat(values)
        elif all(bool(value == values[0]) for value in values):
            found[name] = values[0]
        else:
            return None
    return found


def _divided(state: State, weights: Sequence[torch.Tensor]) -> list[State] | None:
    """Return state of all rows as that of weights; None where it is not of all rows."""
    n_rows = sum(len(weight) for weight in weights)
    found: list[State] = [{} for _ in weights]
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            shares: list[Any] = [value] * len(weights)
        elif not value.dim():
            shares = [value.clone() for _ in weights]
        elif not _is_of_rows(value, n_rows):
            return None
        elif len(weights) == 1:
            shares = [value]
        else:
            shares = [share.clone() for share in torch.split(value, [len(w) for w in weights])]
        for each, share in zip(found, shares, strict=True):
            each[name] = share
    return found


def _is_of_rows(value: Any, n_rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == n_rows


def _move_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """Move state of rows to the device of their parameter."""
    for value in optimizer.state.get(parameter, {}).values():
        if isinstance(value, torch.Tensor) and value.dim() and value.device != parameter.device:
            # In place: the optimizer adapter knows the tensor.
            value.data = value.data.to(parameter.device)


# Parameters that are no longer in a model


@dataclass
class _Replaced:
    """A parameter that was replaced, and by what: rows, or parameters."""

    weight: weakref.ref[torch.Tensor]
    by: list[weakref.ref[Any]]
    #: An optimizer that holds one of the new ones, once it was looked for.
    owner: weakref.ref[torch.optim.Optimizer] | None = None

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that replace it now."""
        found = [each() for each in self.by]
        return [getattr(each, "parameter", each) for each in found if each is not None]


#: By the id of the parameter that was replaced, while it lives.
_replaced: dict[int, _Replaced] = {}
_hooks: list[Any] = []


def _record(weight: torch.Tensor, by: Sequence[Any]) -> None:
    """Record what a parameter was replaced by."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
    key = id(weight)

    def forget(_: Any) -> None:
        _replaced.pop(key, None)

    _replaced[key] = _Replaced(weakref.ref(weight, forget), [weakref.ref(each) for each in by])


def _before_step(
    optimizer: torch.optim.Optimizer, given: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Refuse a step that leaves alone what it was made to train.

    Gradients that a closure is to make are not there yet.
    """
    if not _replaced:
        return
    closure = options.get("closure", given[1] if len(given) > 1 else None)
    for group in optimizer.param_groups:
        params: list[torch.Tensor] = group["params"]
        for weight in params:
            entry = _replaced.get(id(weight))
            if entry is None or entry.weight() is not weight:
                continue
            for parameter in entry.parameters():
                trained = parameter.grad is not None or (
                    closure is not None and parameter.requires_grad
                )
                if trained and not _has_owner(entry, parameter):
                    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
                    raise BitslabError(
                        f"optimizer: {kind} was made before its weight {list(weight.shape)} was "
                        "compressed or restored, and would not train what stands there now; move "
                        "the line that makes the optimizer behind that one"
                    )


def _has_owner(entry: _Replaced, parameter: torch.Tensor) -> bool:
    """Return whether an optimizer holds a parameter."""
    owner = None if entry.owner is None else entry.owner()
    if owner is None or not _holds(owner.param_groups, parameter):
        owner = next((o for o in live_optimizers() if _holds(_groups(o), parameter)), None)
        entry.owner = None if owner is None else weakref.ref(owner)
    return owner is not None


def _warn_of_gradients(weight: torch.Tensor) -> None:
    """Raise once a weight whose optimizers were taken away from it takes a gradient."""
    if weight.requires_grad and weight.is_leaf:
        register: Any = weight.register_post_accumulate_grad_hook
        register(_took_gradient)


def _took_gradient(weight: torch.Tensor) -> None:
    entry = _replaced.get(id(weight))
    if entry is not None and entry.weight() is weight and not _has_owner(entry, weight):
        raise BitslabError(
            f"weight: {list(weight.shape)}, which was compressed in one model, is trained in "
            "another too, but its optimizers have the compressed rows now; make an optimizer from "
            "the parameters of the other model"
        )
