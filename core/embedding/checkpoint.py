"""Checkpoints of models with cached tables, written and read piece by piece.

The file is a plain safetensors file of the model's whole state dict: tables are in it as rows in
the order of their ids, as any other model with the same names loads them. An optimizer's state may
be in it too; see `optimizer_file`.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from ..dtypes import dtype_name
from ..engine.files.new_file import PathLike, replacing
from ..engine.files.safetensors_writer import can_store, write_safetensors
from ..engine.memory.readonly import ReadOnlyTensor
from ..errors import ArgumentError, ArgumentTypeError, CorruptedDataError, load_optional
from .cached_rows import CachedRows
from .optimizer_file import KEY, PREFIX, LoadedOptimizer, SavedOptimizer
from .optimizers import PIECE_BYTES

_KINDS = (torch.Tensor, torch.nn.Parameter, ReadOnlyTensor)


class _InPieces(Protocol):
    """Rows of a state dict that are read piece by piece when a file is written."""

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield them in the order of the ids."""


class _Table:
    """Rows of a cached table that stand in a state dict."""

    def __init__(self, rows: CachedRows, begin: int, end: int) -> None:
        self.rows, self.begin, self.end = rows, begin, end
        shape = (end - begin, *rows.shape[1:])
        #: Stand-in on the meta device; hooks of state dicts may give it another name.
        self.stand_in = torch.empty(shape, dtype=rows.dtype, device="meta")

    def pieces(self) -> Iterator[torch.Tensor]:
        step = max(1, PIECE_BYTES // self.rows.table.row_bytes)
        for begin in range(self.begin, self.end, step):
            yield self.rows.decoded(begin, min(begin + step, self.end))


class _StateDict(OrderedDict[str, Any]):
    """A state dict that `RowsModule` gives its tables as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, _InPieces] = {}

    def defer(self, key: str, rows: CachedRows, begin: int, end: int) -> None:
        """Take rows begin..end of a table."""
        table = _Table(rows, begin, end)
        self.tables[id(table.stand_in)] = table
        self[key] = table.stand_in


def save_state(
    model: torch.nn.Module, path: PathLike, *, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Write the state dict of a model to a safetensors file, cached tables piece by piece.

    The file can be read by `load_state`, and by ``safetensors.torch.load_file`` for a model with
    plain embeddings. What the state dict has under several names is in the file under each.

    With an optimizer its state dict is in the file too, state of cached rows for all rows in the
    order of their ids. Its tensors have names that begin with ``.optimizer.``, which a model loads
    with ``strict=False`` only; `load_state` leaves them out.

    Parameters
    ----------
    model : torch.nn.Module
        With or without cached tables. Nobody may train it meanwhile.
    path : str or os.PathLike
        Written under another name in the same folder and then renamed, so that it is the whole
        file or, after an error, what it was before.
    optimizer : torch.optim.Optimizer, optional
        One of the model's parameters, whose state is saved too.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When it is no module, or its state dict holds what safetensors cannot; when the optimizer is
        none, has parameters that the model does not have, or is one that cached rows refuse.
    OSError
        When the file cannot be written.

    Notes
    -----
    Memory: a few MB beyond the model and the optimizer, whatever the size of the tables.

    Examples
    --------
    >>> import torch
    >>> from bitslab.integrations.embedding import CachedEmbedding, load_state, save_state
    >>> model = CachedEmbedding(1000, 16, cache_ratio=0.1, device="cpu")
    >>> optimizer = torch.optim.Adagrad(model.parameters())
    >>> save_state(model, "model.safetensors", optimizer=optimizer)  # doctest: +SKIP
    >>> load_state(model, "model.safetensors", optimizer=optimizer)  # doctest: +SKIP
    """
    _check_model(model)
    state = _StateDict()
    model.state_dict(destination=state)
    metadata = {"format": "pt"}
    found = [(key, _checked("model", key, value, state.tables)) for key, value in state.items()]
    in_pieces: dict[int, _InPieces] = {**state.tables}
    if optimizer is not None:
        for key in state:
            if key.startswith(PREFIX):
                raise ArgumentError(
                    f"model: its state dict holds {key!r}; names that begin with {PREFIX!r} are "
                    "those of an optimizer's state"
                )
        saved = SavedOptimizer(model, optimizer)
        metadata[KEY] = saved.text
        in_pieces |= saved.rows
        for key, value in saved.tensors.items():
            found.append((key, _checked("optimizer", key, value, saved.rows)))
    tensors = dict(found)
    pieces = {key: in_pieces[id(t)].pieces() for key, t in found if id(t) in in_pieces}
    with replacing(path) as temporary:
        write_safetensors(temporary, tensors, metadata, pieces)


def load_state(
    model: torch.nn.Module,
    path: PathLike,
    *,
    strict: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    """Read a safetensors file into a model, cached tables piece by piece.

    The state of an optimizer that `save_state` wrote is read if `optimizer` is given. It may be
    that of a plain model, or be loaded into one: names and shapes are those of the whole tables.

    Parameters
    ----------
    model : torch.nn.Module
        With or without cached tables.
    path : str or os.PathLike
        As `save_state`, or ``safetensors.torch.save_file`` of a state dict, wrote it.
    strict : bool
        As for `torch.nn.Module.load_state_dict`, which is called.
    optimizer : torch.optim.Optimizer, optional
        Of the class of the one that was saved, over parameters of the same names in the same
        groups, whose options it takes, as `torch.optim.Optimizer.load_state_dict` does.

    Returns
    -------
    NamedTuple
        ``missing_keys`` and ``unexpected_keys``, as that returns them.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When it is no module; when the optimizer is none, has parameters that the model does not
        have, is not like the one that was saved, or is one that cached rows refuse; when the file
        holds no state of an optimizer. Neither model nor optimizer was changed.
    CorruptedDataError
        When the file is no safetensors file, truncated, or of a newer version.
    RuntimeError
        When names or shapes do not fit, as from `torch.nn.Module.load_state_dict`; the optimizer
        was not changed.
    OSError
        When the file cannot be read.

    Notes
    -----
    Memory: the file is mapped, and a table packed from it in pieces, which takes some 100 MB
    whatever its size. Both the old and the new packed table exist until it is packed. So do the
    old and new optimizer state of all rows, in host memory.
    """
    _check_model(model)
    where = os.fspath(path)
    load_optional("safetensors", extra=None, purpose="reading a checkpoint")
    from safetensors import SafetensorError, safe_open

    open(where, "rb").close()  # its errors name the file, those of the library do not
    try:
        with safe_open(where, framework="pt") as file:
            metadata = file.metadata() or {}
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CorruptedDataError(
            f"{where}: no safetensors file, or truncated or damaged: {error}"
        ) from error
    saved = metadata.get(KEY)
    of_optimizer = {}
    if saved is not None:
        of_optimizer = {key: state.pop(key) for key in list(state) if key.startswith(PREFIX)}
    if optimizer is None:
        return model.load_state_dict(state, strict=strict)
    loaded = LoadedOptimizer(saved, of_optimizer, where, model, optimizer)
    keys = model.load_state_dict(state, strict=strict)
    loaded.load()
    return keys


def _check_model(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")


def _checked(
    argument: str, key: str, value: object, in_pieces: Mapping[int, _InPieces]
) -> torch.Tensor:
    """Return what stands in the state dict of an argument if a file can hold it."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentTypeError(
            f"{argument}: its state dict holds {key!r}, a {type(value).__name__}; a safetensors "
            "file holds tensors only"
        )
    if type(value) not in _KINDS or value.layout is not torch.strided or value.is_quantized:
        raise ArgumentTypeError(
            f"{argument}: its state dict holds {key!r}, a {type(value).__name__} of layout "
            f"{value.layout}; a safetensors file holds plain tensors only"
        )
    if value.is_meta and id(value) not in in_pieces:
        raise ArgumentError(f"{argument}: {key!r} is on the meta device, which has no values")
    if not can_store(value.dtype):
        raise ArgumentError(
            f"{argument}: {key!r} is {dtype_name(value.dtype)}, unknown to safetensors"
        )
    return value
