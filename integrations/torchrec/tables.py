"""TableSet: several tables in few packed ones, looked up together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bitslab import RowCodec
from bitslab.embedding import CachedRows, CacheOptions, RowsModule
from bitslab.errors import ArgumentError
from bitslab.integrations.torchrec.features import Picked, Ranges, pick
from bitslab.integrations.torchrec.grouping import Sample, group_tables
from bitslab.integrations.torchrec.sources import Source

#: Figures of groups that add up.
SUMMED = (
    "raw_bytes",
    "host_bytes",
    "map_bytes",
    "device_bytes",
    "lookups",
    "hits",
    "misses",
    "written_back",
    "moved_bytes",
)


@dataclass(frozen=True)
class TableSpec:
    """A table, and the features that are looked up in it.

    Parameters
    ----------
    name : str
        The table's name.
    n_rows, row_dim : int
        Its shape.
    dtype : torch.dtype
        Its dtype.
    features : tuple of str
        The features whose values are rows of it.
    pooling : str
        ``"sum"`` or ``"mean"``; of no meaning where rows are not pooled.
    trainable : bool
        Whether its rows may change.
    """

    name: str
    n_rows: int
    row_dim: int
    dtype: torch.dtype
    features: tuple[str, ...]
    pooling: str = "sum"
    trainable: bool = True


@dataclass(frozen=True)
class TableOptions(CacheOptions):
    """How the packed tables of a collection are kept; `cache_ratio` is that of each of them.

    Parameters
    ----------
    min_rows : int
        Tables with fewer rows are resident whole.
    """

    min_rows: int = 0


@dataclass(frozen=True, eq=False)
class TableGroup:
    """Tables that lie back to back in one `CachedRows`.

    Parameters
    ----------
    rows : CachedRows
        Their rows.
    tables : list of int
        The tables, by their number in the set.
    """

    rows: CachedRows
    tables: list[int]


@dataclass(frozen=True, eq=False)
class _Run:
    """Features of a group that are looked up by one call of torch.

    Parameters
    ----------
    pooling : str
        How bags are pooled.
    uses : list of int
        The features, by their number in the set.
    """

    pooling: str
    uses: list[int]


class TableSet(RowsModule):
    """Tables whose rows are packed together as far as one plan suits them.

    Rows of one shape and dtype lie back to back in one packed table, so that the values of all
    their features are looked up at once.

    Parameters
    ----------
    specs : sequence of TableSpec
        The tables.
    sources : mapping of str to Source
        The rows of each table, by name.
    options : TableOptions
        How they are kept.
    device : torch.device or None
        Where lookups happen. On the meta device tables have shapes alone, and so have outputs.
    key : str
        What the names of tables begin with in state dicts.

    Attributes
    ----------
    uses : list of (int, str)
        The table, by number, and the feature of each output, table by table.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        sources: Mapping[str, Source],
        options: TableOptions,
        device: torch.device | None,
        key: str,
    ) -> None:
        super().__init__()
        self.key = key
        self.specs = list(specs)
        self.options = options
        self.uses = [(i, feature) for i, spec in enumerate(specs) for feature in spec.features]
        self.groups: list[TableGroup] = []
        #: Group, and first row in it, of each table.
        self._place: dict[int, tuple[int, int]] = {}
        self._estimates: dict[int, float] = {}
        self._runs: list[list[_Run]] = []
        self._ranges: list[Ranges] = []
        #: Whether the tables have shapes alone, on the meta device.
        self.on_meta = device is not None and device.type == "meta"
        if self.on_meta:
            for spec in self.specs:
                rows = torch.empty(spec.n_rows, spec.row_dim, dtype=spec.dtype, device=device)
                # Not by register_parameter: the name has dots.
                self._parameters[f"{key}.{spec.name}.weight"] = torch.nn.Parameter(
                    rows, requires_grad=spec.trainable
                )
            return
        small = [i for i, spec in enumerate(self.specs) if spec.n_rows < options.min_rows]
        large = [i for i, spec in enumerate(self.specs) if spec.n_rows >= options.min_rows]
        try:
            for numbers, resident in ((large, False), (small, True)):
                samples = [self._sampled(self.specs[i], sources) for i in numbers]
                for group in group_tables(samples, options.codec, options.layout):
                    tables = [numbers[i] for i in group.tables]
                    self._add(group.codec, tables, sources, device, resident=resident)
                    for i in group.tables:
                        self._estimates[numbers[i]] = samples[i].nbytes(self._codec_of(numbers[i]))
        except BaseException:
            self.close()
            raise
        self._runs = [self._runs_of(group.tables) for group in self.groups]
        self._ranges = [self._ranges_of(runs) for runs in self._runs]

    @staticmethod
    def _sampled(spec: TableSpec, sources: Mapping[str, Source]) -> Sample:
        rows = sources[spec.name].sample().to(spec.dtype)
        return Sample(spec.n_rows, rows, spec.trainable)

    def _codec_of(self, table: int) -> RowCodec:
        return self.groups[self._place[table][0]].rows.table.codec

    def _add(
        self,
        codec: str | RowCodec,
        tables: list[int],
        sources: Mapping[str, Source],
        device: torch.device | None,
        *,
        resident: bool,
    ) -> None:
        """Pack tables back to back."""
        end = 0
        for i in tables:
            self._place[i] = (len(self.groups), end)
            end += self.specs[i].n_rows
        options, like = self.options, self.specs[tables[0]]

        def batches() -> Iterator[torch.Tensor]:
            if not end:
                # The shard of a rank may be empty; a table is not.
                yield torch.zeros(1, like.row_dim, dtype=like.dtype)
            for i in tables:
                for rows in sources[self.specs[i].name].batches():
                    yield rows.to(like.dtype)

        if resident:
            options = replace(options, cache="rows", cache_ratio=1.0)
        options = replace(options, codec=codec)
        rows = options.pack(batches(), max(1, end), device=device, trainable=like.trainable)
        self.own(f"rows_{len(self.groups)}", rows)
        self.groups.append(TableGroup(rows, tables))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        on_meta = [p for p in self._parameters.values() if p is not None and p.is_meta]
        if any(not fn(parameter.detach()).is_meta for parameter in on_meta):
            raise ArgumentError(
                "device: a collection on the meta device has no rows to move; make it anew on cpu "
                "or cuda"
            )
        return super()._apply(fn, recurse)

    def tables(self) -> Iterator[tuple[str, CachedRows, int, int]]:
        """Yield the name of each table in state dicts, its rows, the first and the last + 1."""
        if self.on_meta:
            return  # nothing but parameters there
        for i, spec in enumerate(self.specs):
            number, begin = self._place[i]
            rows = self.groups[number].rows
            yield f"{self.key}.{spec.name}.weight", rows, begin, begin + spec.n_rows

    def _runs_of(self, tables: Sequence[int]) -> list[_Run]:
        """Divide the features of a group into calls.

        Gradients of the features of one table are summed feature by feature, as they are where
        each feature is looked up by itself: so a call holds at most one feature of a table.
        """
        runs: dict[tuple[int, str], _Run] = {}
        seen: dict[int, int] = {}
        for use, (table, _) in enumerate(self.uses):
            if table in tables:
                turn = seen[table] = seen.get(table, -1) + 1
                key = (turn, self.specs[table].pooling)
                runs.setdefault(key, _Run(key[1], [])).uses.append(use)
        return [runs[key] for key in sorted(runs)]

    def _ranges_of(self, runs: Sequence[_Run]) -> Ranges:
        tables = [self.uses[use][0] for run in runs for use in run.uses]
        return Ranges(
            [self.uses[use][1] for run in runs for use in run.uses],
            [self.specs[i].name for i in tables],
            [self._place[i][1] for i in tables],
            [self.specs[i].n_rows for i in tables],
        )

    # Lookups

    def _looked_up(
        self, features: KeyedJaggedTensor, positions: Sequence[int], weighted: bool
    ) -> Iterator[tuple[list[_Run], Picked, torch.Tensor, torch.Tensor]]:
        """Yield for each group: calls, what the features hold, the weight and the index of it."""
        self.check_parameters()
        asked: list[tuple[Picked, torch.Tensor] | None] = []
        for runs, ranges in zip(self._runs, self._ranges, strict=True):
            wanted = [positions[use] for run in runs for use in run.uses]
            if wanted:
                picked = pick(features, wanted, weighted=weighted)
                asked.append((picked, ranges.rows_of(picked)))
            else:
                asked.append(None)
        # Values on the host are all checked before any row moves.
        for group, runs, request in zip(self.groups, self._runs, asked, strict=True):
            if request is not None:
                picked, ids = request
                weight, index = group.rows.lookup(ids, train=self.training)
                yield runs, picked, weight, index.to(weight.device)

    def pooled(
        self, features: KeyedJaggedTensor, positions: Sequence[int], *, weighted: bool
    ) -> list[torch.Tensor]:
        """Return the pooled rows of each feature.

        Parameters
        ----------
        features : KeyedJaggedTensor
            The values.
        positions : sequence of int
            Which of its keys belongs to each of `uses`.
        weighted : bool
            Whether rows are multiplied by the weights that `features` holds.

        Returns
        -------
        list of torch.Tensor
            float32 ``[bags, D]`` for each of `uses`.

        Raises
        ------
        IndexRangeError
            When a value is out of range; nothing was changed. Of values on a GPU by a later call.
        """
        if self.on_meta:
            return self._shaped(features.stride_per_key(), positions)
        out: list[torch.Tensor] = [torch.empty(0)] * len(self.uses)
        for runs, picked, weight, index in self._looked_up(features, positions, weighted):
            parts: list[tuple[torch.Tensor, int]]
            if weight.requires_grad and weight.device.type == "cpu":
                # On a CPU torch sums the gradient of a row in an order that depends on all indices
                # of the call: features are pooled one by one, as TorchRec does.
                runs = [_Run(run.pooling, [use]) for run in runs for use in run.uses]
                parts = self._pieces(runs, picked, weight, index)
            else:
                parts = [(weight, 0)] * len(runs)
            found = picked.parts([len(run.uses) for run in runs])
            calls = sorted(zip(runs, found, parts, strict=True), key=lambda call: call[0].uses[0])
            for run, (values, offsets, strides), (rows, first) in calls:
                weights = picked.weights
                if weights is not None:
                    weights = weights[values].to(weight.device)
                bags = torch.nn.functional.embedding_bag(
                    index[values] - first if first else index[values],
                    rows,
                    offsets.to(weight.device),
                    mode=run.pooling,
                    per_sample_weights=weights,
                    include_last_offset=True,
                ).float()
                for use, part in zip(run.uses, torch.split(bags, strides), strict=True):
                    out[use] = part
        return out

    def _pieces(
        self, runs: Sequence[_Run], picked: Picked, weight: torch.Tensor, index: torch.Tensor
    ) -> list[tuple[torch.Tensor, int]]:
        """Return for each run of one feature: the rows of its table in `weight`, and the first.

        The rows of a table follow each other in `weight`, unless the order of rows is not that of
        the ids; then all rows are returned. Small gradients are what this is for.
        """
        bounds: dict[int, tuple[int, int]] = {}
        for run, (values, _, _) in zip(runs, picked.parts([1] * len(runs)), strict=True):
            table = self.uses[run.uses[0]][0]
            if values.start < values.stop:
                low, high = (int(end) for end in torch.aminmax(index[values]))
                before = bounds.get(table, (low, high + 1))
                bounds[table] = (min(low, before[0]), max(high + 1, before[1]))
        sizes, end = [], 0
        for table in sorted(bounds):
            first, last = bounds[table]
            if first != end:
                return [(weight, 0)] * len(runs)
            sizes.append(last - first)
            end = last
        pieces = torch.split(weight, [*sizes, weight.shape[0] - end])
        found = dict(zip(sorted(bounds), pieces, strict=False))
        rest = (pieces[-1] if len(pieces[-1]) else weight, 0)
        tables = [self.uses[run.uses[0]][0] for run in runs]
        return [(found[t], bounds[t][0]) if t in found else rest for t in tables]

    def sequences(
        self, features: KeyedJaggedTensor, positions: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the rows of each feature, not pooled.

        Parameters
        ----------
        features, positions
            As for `pooled`.

        Returns
        -------
        list of torch.Tensor
            float32 ``[n, D]`` for each of `uses`: a row for each value.
        """
        if self.on_meta:
            return self._shaped(features.length_per_key(), positions)
        out: list[torch.Tensor] = [torch.empty(0)] * len(self.uses)
        for runs, picked, weight, index in self._looked_up(features, positions, False):
            first = 0
            key = 0
            for run in runs:
                counts = picked.counts[key : key + len(run.uses)]
                last = first + sum(counts)
                rows = torch.nn.functional.embedding(index[first:last], weight).float()
                for use, part in zip(run.uses, torch.split(rows, counts), strict=True):
                    out[use] = part
                first, key = last, key + len(run.uses)
        return out

    def _shaped(self, rows_of_key: Sequence[int], positions: Sequence[int]) -> list[torch.Tensor]:
        """Return float32 outputs on the meta device, of so many rows for each key."""
        return [
            torch.empty(
                rows_of_key[position],
                self.specs[table].row_dim,
                dtype=torch.float32,
                device="meta",
            )
            for (table, _), position in zip(self.uses, positions, strict=True)
        ]

    def prefetch_at(self, features: KeyedJaggedTensor, positions: Sequence[int]) -> None:
        """Start to fetch the rows of a later lookup; results never depend on it."""
        for group, runs, ranges in zip(self.groups, self._runs, self._ranges, strict=True):
            wanted = [positions[use] for run in runs for use in run.uses]
            if wanted:
                group.rows.prefetch(ranges.rows_of(pick(features, wanted, weighted=False)))

    # Rows of a table

    def parameter_of(self, table: int) -> torch.nn.Parameter | None:
        """Return the parameter of a table's group, for the first table of it, else None."""
        number, _ = self._place[table]
        group = self.groups[number]
        return group.rows.parameter if group.tables[0] == table else None

    def rows_of(self, table: int) -> slice:
        """Return where the rows of a table lie in its group."""
        begin = self._place[table][1]
        return slice(begin, begin + self.specs[table].n_rows)

    def decoded(self, table: int) -> torch.Tensor:
        """Return the rows of a table as they are now, ``[n_rows, row_dim]`` on the CPU.

        Of tables on the meta device they are there.
        """
        spec = self.specs[table]
        if self.on_meta:
            return torch.empty(spec.n_rows, spec.row_dim, dtype=spec.dtype, device="meta")
        number, begin = self._place[table]
        rows = self.groups[number].rows
        out = torch.empty(spec.n_rows, spec.row_dim, dtype=rows.dtype)
        for first, last in rows.ranges(begin, begin + spec.n_rows):
            out[first - begin : last - begin] = rows.decoded(first, last)
        return out

    def load(self, table: int, weight: torch.Tensor) -> None:
        """Give a table new rows ``[n_rows, row_dim]``."""
        spec = self.specs[table]
        if self.on_meta:
            raise ArgumentError(f"weight: table {spec.name!r} is on the meta device, with no rows")
        if tuple(weight.shape) != (spec.n_rows, spec.row_dim):
            raise ArgumentError(
                f"weight: {list(weight.shape)} for table {spec.name!r} of "
                f"{[spec.n_rows, spec.row_dim]}"
            )
        number, begin = self._place[table]
        if spec.n_rows:
            self.groups[number].rows.load(weight, begin)

    def stats(self) -> dict[str, Any]:
        """Return sizes and counts; see `CompressedEmbeddingBagCollection.stats`."""
        groups = [group.rows.stats() for group in self.groups]
        tables = {}
        for i, spec in enumerate(self.specs if groups else ()):
            number, _ = self._place[i]
            whole = groups[number]
            raw_bytes = spec.n_rows * whole["row_bytes"]
            estimated = sum(self._estimates[k] for k in self.groups[number].tables)
            host_bytes = whole["host_bytes"] * self._estimates[i] / max(1.0, estimated)
            tables[spec.name] = {
                "rows": spec.n_rows,
                "raw_bytes": raw_bytes,
                "host_bytes": round(host_bytes),
                "ratio": raw_bytes / host_bytes if host_bytes else 1.0,
                "codec": whole["codec"],
                "group": number,
                # Its share; which rows these are changes.
                "cache_rows": round(whole["cache_rows"] * spec.n_rows / whole["rows"]),
            }
        total: dict[str, Any] = {name: sum(g[name] for g in groups) for name in SUMMED}
        total["ratio"] = total["raw_bytes"] / total["host_bytes"] if groups else 1.0
        found = total["hits"] + total["misses"]
        total["hit_rate"] = total["hits"] / found if found else 0.0
        return total | {"tables": tables, "groups": groups}
