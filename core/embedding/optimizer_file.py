"""State dicts of optimizers in safetensors files: tensors by name, the rest JSON in the metadata.

The file's metadata has an entry ``bitslab_optimizer``, JSON with

``version``
    That of this format; a reader refuses newer ones.
``type``
    Name of the optimizer's class.
``groups``
    For each parameter group the names that its parameters have in the model.
``shapes``
    Shape of each of these parameters, by name; of a cached table that of all rows.
``state_dict``
    What the optimizer's ``state_dict()`` gave: ``state`` as pairs of key and value. A tensor is
    ``{"tensor": name}``, a tuple ``{"tuple": [...]}``, a dict ``{"dict": [[key, value], ...]}``.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import ArgumentError, ArgumentTypeError, BitslabError, CorruptedDataError
from .optimizers import OptimizerAdapter, StateOfRows, adapters_of, check_optimizer, deferred_rows
from .row_state import RowState

#: Entry of the metadata.
KEY = "bitslab_optimizer"
#: What names of tensors begin with. No name of a model does, since no part of one is empty.
PREFIX = ".optimizer."
VERSION = 1


class SavedOptimizer:
    """The state of an optimizer in the form in which a file holds it.

    Parameters
    ----------
    model : torch.nn.Module
        What has the parameters.
    optimizer : torch.optim.Optimizer
        The optimizer.

    Attributes
    ----------
    tensors : dict of str to torch.Tensor
        What the file is to hold, by name.
    rows : dict of int to StateOfRows
        What stands for those on the meta device, by the id of the tensor.
    text : str
        The entry of the metadata.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When it is no optimizer of the model's parameters, cannot be followed, or its state dict
        holds what a file cannot.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        groups = _names_of(model, check_optimizer(optimizer))
        adapters = adapters_of(optimizer)
        self.rows: dict[int, StateOfRows]
        with deferred_rows() as self.rows:
            state_dict = optimizer.state_dict()
        names = [name for group in groups for name in group]
        state = []
        for key, value in state_dict["state"].items():
            where = names[key] if isinstance(key, int) and key < len(names) else str(key)
            state.append([self._encoded(key, where), self._encoded(value, where)])
        content = {
            "version": VERSION,
            "type": type(optimizer).__qualname__,
            "groups": groups,
            "shapes": _shapes(groups, optimizer, adapters),
            "state_dict": {
                "state": state,
                # The parameter groups, and further entries of third-party optimizers.
                **{
                    key: self._encoded(value, str(key))
                    for key, value in state_dict.items()
                    if key != "state"
                },
            },
        }
        self.text = json.dumps(content, separators=(",", ":"))

    def _encoded(self, value: Any, where: str) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, torch.Tensor):
            # The number keeps apart what has the same words after it.
            name = f"{PREFIX}{len(self.tensors)}.{where}"
            self.tensors[name] = value
            return {"tensor": name}
        if isinstance(value, dict):
            pairs = [
                [self._encoded(key, where), self._encoded(each, f"{where}.{key}")]
                for key, each in value.items()
            ]
            return {"dict": pairs}
        if type(value) in (list, tuple):
            many = [self._encoded(each, f"{where}.{n}") for n, each in enumerate(value)]
            return many if type(value) is list else {"tuple": many}
        raise ArgumentTypeError(
            f"optimizer: its state dict holds {where!r}, a {type(value).__name__}; a file holds "
            "tensors, numbers, text, and lists, tuples and dicts of them"
        )


class LoadedOptimizer:
    """The state of an optimizer from a file, checked before anything is changed.

    Parameters
    ----------
    text : str or None
        The entry of the metadata; None when there is none.
    tensors : mapping of str to torch.Tensor
        The tensors of the file, mapped.
    where : str
        The file, for messages.
    model : torch.nn.Module
        What has the parameters.
    optimizer : torch.optim.Optimizer
        The optimizer that `load` gives the state to.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When it is no optimizer of the model's parameters, cannot be followed, or is not like the
        one that was saved; when none was saved.
    CorruptedDataError
        When the entry is damaged, or of a newer version.
    """

    def __init__(
        self,
        text: str | None,
        tensors: Mapping[str, torch.Tensor],
        where: str,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._optimizer = check_optimizer(optimizer)
        self._tensors = tensors
        groups = _names_of(model, optimizer)
        if text is None:
            raise ArgumentError(
                f"optimizer: {where} holds no state of an optimizer; "
                "save_state(model, path, optimizer=optimizer) writes one that does"
            )
        try:
            content = _parsed(text)
            self._check_like(content, groups, where)
            self._take(content["state_dict"])
        except BitslabError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise CorruptedDataError(f"{where}: its {KEY} is damaged: {error!r}") from error

    def _check_like(self, content: dict[str, Any], groups: list[list[str]], where: str) -> None:
        """Refuse an optimizer that is not like the one that was saved."""
        kind = type(self._optimizer).__qualname__
        if content["type"] != kind:
            raise ArgumentError(
                f"optimizer: a {kind}; {where} holds the state of a {content['type']}"
            )
        saved = content["groups"]
        if groups != saved:
            raise ArgumentError(
                f"optimizer: its {_words(groups)}; in {where} it is {_words(saved)}"
            )
        self._adapters = adapters_of(self._optimizer)
        for name, shape in _shapes(groups, self._optimizer, self._adapters).items():
            if content["shapes"][name] != shape:
                raise ArgumentError(
                    f"optimizer: its parameter {name!r} is {shape}, in {where} it is "
                    f"{content['shapes'][name]}"
                )

    def _take(self, saved: dict[str, Any]) -> None:
        """Decode the saved state; that of cached rows goes into stores that `load` installs."""
        param_groups = self._decoded(saved["param_groups"])
        parameters, options_of = [], {}
        for group, options in zip(self._optimizer.param_groups, param_groups, strict=True):
            for name, value in options.items():
                now = group.get(name)
                if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
                    options[name] = value.to(now.device)  # a graph may have captured it
            for parameter in group["params"]:
                parameters.append(parameter)
                if id(parameter) in self._adapters:
                    self._adapters[id(parameter)].check(options)
                    options_of[id(parameter)] = options
        self._stores: dict[int, dict[str, RowState]] = {each: {} for each in self._adapters}
        state: dict[Any, Any] = {}
        for saved_key, value in saved["state"]:
            key = self._decoded(saved_key)
            at = id(parameters[key]) if isinstance(key, int) else None
            if at is not None and at in options_of:
                state[key] = self._rows_of(at, options_of[at], value)
            else:
                state[key] = self._decoded(value)
        self._state_dict = {"state": state, "param_groups": param_groups}
        for key, value in saved.items():
            if key not in self._state_dict:
                self._state_dict[key] = self._decoded(value)

    def _rows_of(self, at: int, options: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """Take the state of all rows into new stores; return the rest, and none of the rows."""
        found: dict[str, Any] = {}
        for name, value in saved["dict"]:
            values = self._tensor(value)
            if values is None or not values.dim():
                found[name] = self._decoded(value)
                continue
            self._stores[at][name] = self._adapters[at].store_of(name, values, options)
            found[name] = values[:0].clone()
        return found

    def _tensor(self, value: Any) -> torch.Tensor | None:
        return self._tensors[value["tensor"]] if _is(value, "tensor") else None

    def _decoded(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._decoded(each) for each in value]
        t = self._tensor(value)
        if t is not None:
            return t.clone()  # no memory of the mapped file, which may change later
        if _is(value, "tuple"):
            return tuple(self._decoded(each) for each in value["tuple"])
        if isinstance(value, dict):
            return {self._decoded(key): self._decoded(each) for key, each in value["dict"]}
        return value

    def load(self) -> None:
        """Give the state to the optimizer."""
        with contextlib.ExitStack() as stack:
            for id_, adapter in self._adapters.items():
                stack.enter_context(adapter.replacing_stores(self._stores[id_]))
            with _restoring(self._optimizer):
                self._optimizer.load_state_dict(self._state_dict)


@contextlib.contextmanager
def _restoring(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Leave an optimizer as it was where it cannot be loaded."""
    state = defaultdict(dict, {key: dict(value) for key, value in optimizer.state.items()})
    groups = [dict(group) for group in optimizer.param_groups]
    try:
        yield
    except BaseException:
        optimizer.state = state
        optimizer.param_groups = groups
        raise


def _names_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return for each parameter group what its parameters are called in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ArgumentError(
                    f"optimizer: has a parameter {list(parameter.shape)} that the model does not "
                    "have; make it from model.parameters()"
                )
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _shapes(
    groups: list[list[str]], optimizer: torch.optim.Optimizer, adapters: dict[int, OptimizerAdapter]
) -> dict[str, list[int]]:
    """Return the shapes of an optimizer's parameters, of tables those of all rows."""
    found = {}
    for names, group in zip(groups, optimizer.param_groups, strict=True):
        for name, parameter in zip(names, group["params"], strict=True):
            adapter = adapters.get(id(parameter))
            found[name] = list(parameter.shape if adapter is None else adapter.shape)
    return found


def _words(groups: list[list[str]]) -> str:
    """Return a description of parameter groups for error messages."""
    held = "; ".join(f"[{', '.join(names)}]" for names in groups)
    return f"{len(groups)} parameter group{'s' * (len(groups) != 1)} {held:.500}"


def _parsed(text: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(text)
    if content["version"] > VERSION:
        raise CorruptedDataError(
            f"{KEY}: written in format version {content['version']}, this bitslab reads up to "
            f"version {VERSION}; use a newer bitslab"
        )
    return content


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, dict) and kind in value
