"""Values of a KeyedJaggedTensor for a group of tables that are packed back to back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from bitslab.embedding import rows_of_keys
from bitslab.errors import ArgumentError, ArgumentTypeError, IndexRangeError

ID_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Picked:
    """Some keys of a KeyedJaggedTensor, one after another.

    Parameters
    ----------
    values : torch.Tensor
        int32 or int64 ``[n]``.
    lengths : torch.Tensor
        ``[bags]``, how many values each bag has.
    offsets : torch.Tensor or None
        ``[bags + 1]``, where bags begin and the last one ends; None when not known yet.
    weights : torch.Tensor or None
        ``[n]``.
    counts : list of int
        Values of each key.
    strides : list of int
        Bags of each key.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    offsets: torch.Tensor | None
    weights: torch.Tensor | None
    counts: list[int]
    strides: list[int]

    def parts(self, keys: Sequence[int]) -> Iterator[tuple[slice, torch.Tensor, list[int]]]:
        """Yield for each run of so many keys: its values, the offsets of its bags, its strides."""
        offsets = self.offsets if self.offsets is not None else offsets_of(self.lengths)
        key = value = bag = 0
        for n in keys:
            strides = self.strides[key : key + n]
            values, bags = sum(self.counts[key : key + n]), sum(strides)
            mine = offsets[bag : bag + bags + 1]
            yield slice(value, value + values), mine - value if value else mine, strides
            key, value, bag = key + n, value + values, bag + bags


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Return int64 ``[bags + 1]`` from lengths ``[bags]``."""
    offsets = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def checked_features(features: object, *, weighted: bool) -> KeyedJaggedTensor:
    """Return what a collection is called with as a KeyedJaggedTensor, or refuse it."""
    features = maybe_td_to_kjt(features, None)
    if not isinstance(features, KeyedJaggedTensor):
        raise ArgumentTypeError(
            "features: expected a torchrec KeyedJaggedTensor or a TensorDict, got "
            f"{type(features).__name__}"
        )
    values = features.values()
    if values.dtype not in ID_DTYPES:
        raise ArgumentTypeError(
            f"features: values are {values.dtype}, accepted are torch.int32 and torch.int64"
        )
    if weighted and features.weights_or_none() is None:
        raise ArgumentError(
            "features: have no weights, which a collection with is_weighted=True needs"
        )
    return features


def positions_of(features: KeyedJaggedTensor, names: Sequence[str]) -> list[int]:
    """Return the positions of features among the keys."""
    where = features._key_indices()
    missing = [name for name in names if name not in where]
    if missing:
        raise ArgumentError(
            f"features: have no key {missing[0]!r}; the keys are {list(where)}, the tables ask for "
            f"{list(names)}"
        )
    return [where[name] for name in names]


def pick(features: KeyedJaggedTensor, positions: Sequence[int], *, weighted: bool) -> Picked:
    """Return some keys in an order; a key may come more than once."""
    counts, strides = features.length_per_key(), features.stride_per_key()
    values, lengths = features.values(), features.lengths()
    weights = features.weights() if weighted else None
    if list(positions) == list(range(len(counts))):
        return Picked(values, lengths, features.offsets(), weights, list(counts), list(strides))
    value_at, bag_at = _ends(counts), _ends(strides)
    runs = list(_runs(positions))

    def joined(t: torch.Tensor, at: Sequence[int]) -> torch.Tensor:
        parts = [t[at[first] : at[last]] for first, last in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return Picked(
        joined(values, value_at),
        joined(lengths, bag_at),
        None,
        None if weights is None else joined(weights, value_at),
        [counts[i] for i in positions],
        [strides[i] for i in positions],
    )


def _ends(sizes: Sequence[int]) -> list[int]:
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return ends


def _runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ``(first, behind the last)`` of neighbours that follow each other."""
    first = last = positions[0]
    for i in positions[1:]:
        if i != last + 1:
            yield first, last + 1
            first = i
        last = i
    yield first, last + 1


@dataclass(frozen=True, eq=False)
class Ranges:
    """The rows that the features of a group may name.

    Parameters
    ----------
    features, tables : list of str
        The features, and the table of each.
    begins, sizes : list of int
        The first row of each one's table in its group, and the rows of that.
    """

    features: list[str]
    tables: list[str]
    begins: list[int]
    sizes: list[int]

    def rows_of(self, picked: Picked) -> torch.Tensor:
        """Return the rows int64 ``[n]`` in the group that the values of all features name.

        Raises
        ------
        IndexRangeError
            When a value is negative or no row of its table; of values on a GPU by a later call
            there.
        """
        values = picked.values
        found = rows_of_keys(values, picked.counts, self.begins, self.sizes)
        if found is not None:
            return found
        begins, sizes = torch.tensor([self.begins, self.sizes], device=values.device)
        if len(picked.counts) > 1:
            counts, n = torch.tensor(picked.counts, device=values.device), values.shape[0]
            begins, sizes = (
                torch.repeat_interleave(t, counts, output_size=n) for t in (begins, sizes)
            )
        inside = (values >= 0) & (values < sizes)
        if not bool(inside.all()):
            self._refuse(picked, int((~inside).nonzero()[0, 0]))
        rows: torch.Tensor = begins + values
        return rows

    def _refuse(self, picked: Picked, position: int) -> None:
        """Raise the error of a value that is out of range."""
        before = position
        for i, count in enumerate(picked.counts):
            if before < count:
                raise IndexRangeError(
                    f"features: value {int(picked.values[position])} at position {before} of "
                    f"feature {self.features[i]!r} is out of range; table {self.tables[i]!r} has "
                    f"rows 0 to {self.sizes[i] - 1}"
                )
            before -= count
