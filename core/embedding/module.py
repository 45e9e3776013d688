"""RowsModule: what every module that owns cached rows does about moving, saving and copying."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import ArgumentTypeError, BitslabError
from .cached_rows import CachedRows
from .parameter_watch import covers


class RowsModule(torch.nn.Module):
    """A module whose tables are cached rows.

    Its parameters are the resident rows. Its state dict holds whole tables instead, in the order of
    the ids, under the names that `tables` gives. They are copies: what is written into them does
    not reach the table before `load_state_dict` is given them.

    A subclass calls `own` once for each `CachedRows`, and may override `tables`.
    """

    def __init__(self) -> None:
        # Not super(): a subclass may also derive from a framework's class, which would make tables.
        torch.nn.Module.__init__(self)
        self._rows_of: dict[str, CachedRows] = {}

    def own(self, name: str, rows: CachedRows) -> None:
        """Take rows in, their parameter under a name.

        Parameters
        ----------
        name : str
            Name of the parameter, with no dot.
        rows : CachedRows
            The rows.
        """
        self._rows_of[name] = rows
        # Not by register_parameter: the name may also be a property, such as `weight`.
        self._parameters[name] = rows.parameter

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; refuse the parameter of the rows."""
        self._refuse_change(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute; refuse the parameter of the rows."""
        self._refuse_change(name)
        super().__delattr__(name)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Add a parameter; refuse another one in the place of that of the rows."""
        self._refuse_change(name)
        super().register_parameter(name, param)

    def _refuse_change(self, name: str) -> None:
        if name in self.__dict__.get("_rows_of", ()):
            raise BitslabError(
                f"{name}: belongs to the packed table and cannot be replaced or deleted; give the "
                "table new rows with load_state_dict() or rows.load()"
            )

    def check_parameters(self) -> None:
        """Refuse to look rows up with other parameters than those of the rows.

        Raises
        ------
        BitslabError
            When one was put in their place, such as by `torch.func.functional_call`.
        """
        for name, rows in self._rows_of.items():
            # Another thread that makes a state dict takes them out meanwhile.
            if self._parameters.get(name, rows.parameter) is not rows.parameter:
                raise BitslabError(
                    f"{name}: another tensor was put in the place of the module's parameter, such "
                    "as by torch.func.functional_call, and would be ignored; pass the module's own "
                    "parameter, or leave the table uncompressed"
                )

    def tables(self) -> Iterator[tuple[str, CachedRows, int, int]]:
        """Yield the name of each table in state dicts, its rows, the first and the last + 1."""
        for name, rows in self._rows_of.items():
            yield name, rows, 0, len(rows)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        self.check_parameters()
        for rows in self._rows_of.values():
            rows.before_move()
        failed: BaseException | None = None
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        except BaseException as error:
            failed = error
        # Whatever failed, a table follows its parameter, or both are left where they were.
        for name, rows in self._rows_of.items():
            parameter = self._parameters[name]
            assert parameter is not None
            try:
                rows.moved(parameter)
            except BaseException as error:
                failed = failed or error
            self._parameters[name] = rows.parameter
        if failed is not None:
            raise failed
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Give parameters their size between steps before anything is copied."""
        for rows in self._rows_of.values():
            rows.before_move()
        return self.__dict__.copy()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        theirs = {name: self._parameters.pop(name) for name in self._rows_of}
        try:
            super()._save_to_state_dict(destination, prefix, keep_vars)
        finally:
            self._parameters.update(theirs)
        defer = getattr(destination, "defer", None)
        for name, rows, begin, end in self.tables():
            if defer is not None:  # it writes them piece by piece; see checkpoint.py
                defer(prefix + name, rows, begin, end)
                continue
            whole = torch.empty((end - begin, *rows.shape[1:]), dtype=rows.dtype)
            for first, last in rows.ranges(begin, end):
                whole[first - begin : last - begin] = rows.decoded(first, last)
            destination[prefix + name] = whole

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        tables = list(self.tables())
        names = {prefix + name for name, *_ in tables}
        theirs = {name: self._parameters.pop(name) for name in self._rows_of}
        unexpected: list[str] = []
        try:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected, error_msgs
            )
        finally:
            self._parameters.update(theirs)
        unexpected_keys += [key for key in unexpected if key not in names]
        fitting: dict[CachedRows, list[tuple[int, torch.Tensor]]] = {}
        for name, rows, begin, end in tables:
            key = prefix + name
            if key not in state_dict:
                if strict:
                    missing_keys.append(key)
                continue
            value, shape = state_dict[key], (end - begin, *rows.shape[1:])
            if not isinstance(value, torch.Tensor):
                error_msgs.append(f"{key}: expected a torch.Tensor, got {type(value).__name__}")
            elif tuple(value.shape) != shape:
                error_msgs.append(
                    f"size mismatch for {key}: {list(value.shape)} in the state dict, "
                    f"{list(shape)} in the module"
                )
            elif not value.dtype.is_floating_point:
                error_msgs.append(f"{key}: {value.dtype}, expected floating-point rows")
            else:
                fitting.setdefault(rows, []).append((begin, value))
        if not error_msgs:
            for rows, pieces in fitting.items():
                if not _are_whole(rows, pieces):
                    with rows.lock:  # before anything is loaded
                        rows.watch.check()
            for rows, pieces in fitting.items():
                if _are_whole(rows, pieces):
                    rows.load(_pieces(rows, pieces))
                    continue
                for begin, value in pieces:
                    rows.load(value, begin)

    def __prepare_scriptable__(self) -> Any:
        """Refuse `torch.jit.script`, which asks each module for what it scripts instead."""
        raise ArgumentTypeError(
            f"torch.jit.script: {type(self).__name__} cannot be scripted, because rows come and go "
            "between its calls; put plain modules back in its place first"
        )

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, *, row_wise: bool = False) -> None:
        """Attach an optimizer before its first step, so that its state follows the rows.

        Parameters
        ----------
        optimizer : torch.optim.Optimizer
            Made from this module's parameters.
        row_wise : bool
            Whether the caller guarantees that a step leaves rows without gradient, and their state,
            alone.
        """
        for rows in self._rows_of.values():
            rows.attach_optimizer(optimizer, row_wise=row_wise)

    def flush(self) -> None:
        """Pack every row that may have changed back into host memory."""
        for rows in self._rows_of.values():
            rows.flush()

    def close(self) -> None:
        """Free the memory of the tables; the module cannot be used afterwards."""
        for rows in self._rows_of.values():
            rows.close()


def _are_whole(rows: CachedRows, pieces: Sequence[tuple[int, torch.Tensor]]) -> bool:
    """Return whether pieces, each with its first row, cover all rows."""
    ranges = [(begin, begin + len(value)) for begin, value in pieces]
    return sum(len(value) for _, value in pieces) == len(rows) and covers(ranges, len(rows))


def _pieces(rows: CachedRows, pieces: Sequence[tuple[int, torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Yield the rows of the pieces in order, in batches of bounded size."""
    for _, value in sorted(pieces, key=lambda piece: piece[0]):
        for first, last in rows.ranges(0, len(value)):
            yield value[first:last]
