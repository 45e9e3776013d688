"""TorchRec's collections of embedding tables, with the tables packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torchrec.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
    pooling_type_to_str,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
    process_pooled_embeddings,
    reorder_inverse_indices,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from bitslab import RowCodec
from bitslab.devices import checked_device, device_or_default
from bitslab.embedding import EvictionStrategy
from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.integrations.torchrec.features import checked_features, pick, positions_of
from bitslab.integrations.torchrec.sources import (
    FilledSource,
    RowsSource,
    Source,
    skip_first_draw,
)
from bitslab.integrations.torchrec.tables import TableOptions, TableSet, TableSpec
from bitslab.integrations.torchrec.traced import as_leaf
from bitslab.tables import Layout, Rows

Weights = Mapping[str, Rows]
#: TorchRec's EmbeddingBagConfig or EmbeddingConfig, which have no types.
Config = Any
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class TableView:
    """One table of a collection.

    Parameters
    ----------
    collection : TableSet
        The collection.
    number : int
        The table's number in it.
    """

    def __init__(self, collection: TableSet, number: int) -> None:
        self._collection = collection
        self._number = number

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the rows as they are now, ``[N, D]`` on the CPU; see `load` to change them."""
        return self._collection.decoded(self._number)

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return self._collection.specs[self._number].n_rows

    @property
    def embedding_dim(self) -> int:
        """Elements of a row."""
        return self._collection.specs[self._number].row_dim

    def load(self, weight: torch.Tensor) -> None:
        """Give the table new rows ``[N, D]``."""
        self._collection.load(self._number, weight)

    def __repr__(self) -> str:
        """Name table and shape."""
        spec = self._collection.specs[self._number]
        return f"TableView({spec.name!r}, {spec.n_rows} x {spec.row_dim} {spec.dtype})"


class _Collection(TableSet):
    """What the collections have in common.

    Parameters
    ----------
    tables : sequence of configs
        TorchRec's configs.
    device, weights, options
        As for the collections.
    key : str
        What the names of tables begin with in state dicts.
    interleaved : bool
        Whether TorchRec fills each table before it makes the next one.
    trainable : mapping of str to bool
        Whether the rows of each table may change; they may when left out.
    """

    def __init__(
        self,
        tables: Sequence[Config],
        device: torch.device | str | None,
        weights: Weights | None,
        options: TableOptions,
        key: str,
        *,
        interleaved: bool,
        trainable: Mapping[str, bool],
    ) -> None:
        configs = list(tables)
        device = _checked_device(device)
        on_meta = device is not None and device.type == "meta"
        weights = _checked_weights(configs, weights)
        if weights and on_meta:
            raise ArgumentError("weights: given with the meta device, where tables have no rows")
        specs = [
            TableSpec(
                config.name,
                config.num_embeddings,
                config.embedding_dim,
                _dtype_of(config, weights.get(config.name)),
                tuple(config.feature_names),
                _pooling_of(config),
                trainable.get(config.name, True),
            )
            for config in configs
        ]
        sources: Mapping[str, Source] = {}
        if not on_meta:
            sources = _sources(configs, specs, weights, interleaved=interleaved)
        super().__init__(specs, sources, options, device, key)
        # Where there are no tables.
        self._device = device or device_or_default(None)
        self._configs = list(tables)
        self._names_by_table: list[list[str]] = get_embedding_names_by_table(configs)
        self._positions: tuple[tuple[str, ...], list[int]] | None = None

    @property
    def device(self) -> torch.device:
        """Where lookups happen."""
        if self.on_meta:
            return torch.device("meta")
        return self.groups[0].rows.device if self.groups else self._device

    @property
    def collection(self) -> _Collection:
        """Itself: a graph that torch.fx has made of it alone calls it by this name."""
        return self

    @property
    def _views(self) -> dict[str, TableView]:
        return {spec.name: TableView(self, i) for i, spec in enumerate(self.specs)}

    def reset_parameters(self) -> None:
        """Fill the tables again by the `init_fn` of their configs; nothing on the meta device."""
        if self.on_meta:
            return
        for i, (config, spec) in enumerate(zip(self._configs, self.specs, strict=True)):
            source = _filled(config, spec)
            for rows in source.batches():
                self.load(i, rows)

    def prefetch(self, features: KeyedJaggedTensor) -> None:
        """Start to fetch the rows of a later batch.

        A hint: results never depend on it.

        Parameters
        ----------
        features : KeyedJaggedTensor
            The batch.
        """
        features = checked_features(features, weighted=False)
        if self.on_meta:
            return
        self.prefetch_at(features, self._where(features))

    def _where(self, features: KeyedJaggedTensor) -> list[int]:
        """Return which key of a batch belongs to each use."""
        keys = tuple(features.keys())
        if self._positions is None or self._positions[0] != keys:
            wanted = [feature for _, feature in self.uses]
            self._positions = (keys, positions_of(features, wanted))
        return self._positions[1]


class CompressedEmbeddingBagCollection(_Collection, EmbeddingBagCollection):  # type: ignore[misc]
    """TorchRec's EmbeddingBagCollection with packed tables and hot rows on the device.

    Outputs and training are those of `torchrec.EmbeddingBagCollection`, bit for bit on a CPU, with
    the optimizers that `bitslab.embedding.CachedRows` accepts. Its state dict is the same too:
    ``embedding_bags.<table>.weight``, whole tables; each loads the other's.

    It is an instance of TorchRec's class. Graphs of `torch.fx` call it and do not look into it; it
    cannot be scripted.

    Tables of one row shape and dtype lie back to back in one packed table, and one lookup serves
    all their features. Tables that packing does not make smaller are kept raw in a table of their
    own, as are tables whose rows need another plan. `parameters` are the resident rows, one matrix
    for each of these groups.

    Parameters
    ----------
    tables : list of EmbeddingBagConfig
        The tables, or none. FP32, FP16 and BF16; with TorchRec's own class BF16 means float16.
    is_weighted : bool
        Whether rows are multiplied by the weights of the features before they are summed.
    device : torch.device or str, optional
        Where lookups happen; the current GPU, or the CPU where there is none, when left out. On the
        meta device, which is also taken from ``with torch.device("meta")``, tables and outputs
        have shapes alone; for rows make the collection again on another device.
    weights : mapping of str to torch.Tensor or numpy.ndarray, optional
        Rows of tables, by table, instead of what `init_fn` fills them with. They are packed piece
        by piece, so that they may be memory-mapped.
    cache_ratio : float
        Share of the rows that are resident on the device, more than 0 to 1; at least one row.
    min_rows : int
        Tables with fewer rows are resident whole.
    codec, layout : str
        How rows are packed, as in `bitslab.CompressedTable.from_tensor`.
    cache : {"rows", "packed"}
        How resident rows lie on the device, as in `bitslab.embedding.CachedRows`.
    evict : EvictionStrategy
        Which resident row leaves first.
    freeze : bool or mapping of str to bool
        Whether the rows never change, of all tables or by table; nothing is ever written back then.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When an argument is not accepted.

    Examples
    --------
    >>> import torch
    >>> from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
    >>> from bitslab.integrations.torchrec import CompressedEmbeddingBagCollection
    >>> collection = CompressedEmbeddingBagCollection(
    ...     tables=[
    ...         EmbeddingBagConfig(
    ...             name="movies", num_embeddings=1000, embedding_dim=8, feature_names=["movie"]
    ...         )
    ...     ],
    ...     device="cpu",
    ... )
    >>> features = KeyedJaggedTensor(
    ...     keys=["movie"], values=torch.tensor([3, 999, 3]), lengths=torch.tensor([2, 1])
    ... )
    >>> collection(features)["movie"].shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        weights: Weights | None = None,
        cache_ratio: float = 0.01,
        min_rows: int = 0,
        codec: str | RowCodec = "auto",
        layout: Layout = "compact",
        cache: Literal["rows", "packed"] = "rows",
        evict: EvictionStrategy = EvictionStrategy.LFU,
        freeze: bool | Mapping[str, bool] = False,
    ) -> None:
        _check_configs(tables, EmbeddingBagConfig)
        if is_weighted and any(table.pooling is not PoolingType.SUM for table in tables):
            raise ArgumentError("is_weighted: weights can be summed, not averaged; use pooling SUM")
        super().__init__(
            tables,
            device,
            weights,
            TableOptions(
                cache_ratio=cache_ratio,
                cache=cache,
                evict=evict,
                codec=codec,
                layout=layout,
                min_rows=min_rows,
            ),
            "embedding_bags",
            interleaved=False,
            trainable=_trainable(tables, freeze),
        )
        self._is_weighted = is_weighted
        self._embedding_names = [name for names in self._names_by_table for name in names]
        self._lengths_per_embedding = [self.specs[table].row_dim for table, _ in self.uses]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look rows up and pool them.

        Parameters
        ----------
        features : KeyedJaggedTensor
            A key for each feature of the tables; others are ignored.

        Returns
        -------
        KeyedTensor
            float32 ``[B, sum of D]``: the features table by table; one that several tables have
            goes by ``feature@table``.

        Raises
        ------
        IndexRangeError
            When a value is no row of its table; nothing was changed. Of values on a GPU a later
            call raises it, or `bitslab.raise_pending_errors`; until then such a value counts as
            the first or the last row of its table.
        ArgumentError, ArgumentTypeError
            When `features` lacks a key or weights, or is something else.
        """
        if isinstance(features, torch.fx.Proxy):
            return as_leaf(self, features)
        features = checked_features(features, weighted=self._is_weighted)
        bags = self.pooled(features, self._where(features), weighted=self._is_weighted)
        if not bags:
            return KeyedTensor([], [], torch.empty(features.stride(), 0, device=self.device))
        inverse = reorder_inverse_indices(
            features.inverse_indices_or_none(), [feature for _, feature in self.uses]
        )
        return KeyedTensor(
            keys=self._embedding_names,
            values=process_pooled_embeddings(bags, inverse),
            length_per_key=self._lengths_per_embedding,
        )

    @property
    def embedding_bags(self) -> dict[str, TableView]:
        """The tables by name."""
        return self._views

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the tables."""
        return self._configs

    def is_weighted(self) -> bool:
        """Return whether rows are weighted."""
        return self._is_weighted


class CompressedEmbeddingCollection(_Collection, EmbeddingCollection):  # type: ignore[misc]
    """TorchRec's EmbeddingCollection with packed tables and hot rows on the device.

    As `CompressedEmbeddingBagCollection`, with a row for each value instead of pooled ones.

    Parameters
    ----------
    tables : list of EmbeddingConfig
        The tables, all of one `embedding_dim`.
    device
        Where lookups happen; the current GPU, or the CPU where there is none, when left out.
    need_indices : bool
        Whether the outputs hold the values too, as their weights.
    weights, cache_ratio, min_rows, codec, layout, cache, evict, freeze
        As for `CompressedEmbeddingBagCollection`.
    """

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        weights: Weights | None = None,
        cache_ratio: float = 0.01,
        min_rows: int = 0,
        codec: str | RowCodec = "auto",
        layout: Layout = "compact",
        cache: Literal["rows", "packed"] = "rows",
        evict: EvictionStrategy = EvictionStrategy.LFU,
        freeze: bool | Mapping[str, bool] = False,
    ) -> None:
        _check_configs(tables, EmbeddingConfig)
        dims = {table.name: table.embedding_dim for table in tables}
        if len(set(dims.values())) > 1:
            raise ArgumentError(f"tables: must have one embedding_dim, got {dims}")
        super().__init__(
            tables,
            device,
            weights,
            TableOptions(
                cache_ratio=cache_ratio,
                cache=cache,
                evict=evict,
                codec=codec,
                layout=layout,
                min_rows=min_rows,
            ),
            "embeddings",
            interleaved=True,
            trainable=_trainable(tables, freeze),
        )
        self._need_indices = need_indices

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look rows up.

        Parameters
        ----------
        features : KeyedJaggedTensor
            A key for each feature of the tables; others are ignored.

        Returns
        -------
        dict of str to JaggedTensor
            float32 rows ``[n, D]`` by feature; one that several tables have goes by
            ``feature@table``.

        Raises
        ------
        IndexRangeError
            When a value is no row of its table; nothing was changed. Of values on a GPU a later
            call raises it, or `bitslab.raise_pending_errors`; until then such a value counts as
            the first or the last row of its table.
        ArgumentError, ArgumentTypeError
            When `features` lacks a key, or is something else.
        """
        if isinstance(features, torch.fx.Proxy):
            leaf: dict[str, JaggedTensor] = as_leaf(self, features)
            return leaf
        features = checked_features(features, weighted=False)
        positions = self._where(features)
        rows = self.sequences(features, positions)
        names = [name for names in self._names_by_table for name in names]
        out = {}
        for name, position, part in zip(names, positions, rows, strict=True):
            picked = pick(features, [position], weighted=False)
            indices = picked.values if self._need_indices else None
            out[name] = JaggedTensor(values=part, lengths=picked.lengths, weights=indices)
        return out

    @property
    def embeddings(self) -> dict[str, TableView]:
        """The tables by name."""
        return self._views

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the configs of the tables."""
        return self._configs

    def need_indices(self) -> bool:
        """Return whether outputs hold the values too."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Return the elements of a row; -1 where there are no tables."""
        return self.specs[0].row_dim if self.specs else -1

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the names of outputs, table by table."""
        return self._names_by_table


def _check_configs(tables: Sequence[Config], kind: type[Any]) -> None:
    """Refuse configs that are none, and give those without features one, as TorchRec does."""
    names: set[str] = set()
    for config in tables:
        if not isinstance(config, kind):
            raise ArgumentTypeError(
                f"tables: expected TorchRec's {kind.__name__}, got {type(config).__name__}"
            )
        if config.name in names:
            raise ArgumentError(f"tables: two are named {config.name!r}")
        if config.use_virtual_table:
            raise ArgumentError(f"tables: {config.name!r} is a virtual table, which has no rows")
        names.add(config.name)
        if not config.feature_names:
            config.feature_names = [config.name]


def _checked_device(device: torch.device | str | None) -> torch.device | None:
    """Return a device; meta too where a context makes that the default, as TorchRec does."""
    if device is None and torch.get_default_device().type == "meta":
        device = "meta"
    if device is not None and str(device) == "meta":
        return torch.device("meta")
    return None if device is None else checked_device(device)


def _checked_weights(configs: Sequence[Config], weights: Weights | None) -> Weights:
    """Return the given rows of tables, or refuse them."""
    given = dict(weights or {})
    shapes = {config.name: (config.num_embeddings, config.embedding_dim) for config in configs}
    for name, rows in given.items():
        if name not in shapes:
            raise ArgumentError(f"weights: there is no table {name!r}; tables are {list(shapes)}")
        if not isinstance(rows, (torch.Tensor, np.ndarray)):
            raise ArgumentTypeError(
                f"weights: {name!r} is {type(rows).__name__}, expected a tensor or an array"
            )
        if tuple(rows.shape) != shapes[name]:
            raise ArgumentError(
                f"weights: {name!r} has shape {list(rows.shape)}, its table {list(shapes[name])}"
            )
    return given


def _dtype_of(config: Config, rows: Rows | None) -> torch.dtype:
    """Return the dtype of a table: that of given rows, if they are a tensor, or the config's."""
    dtype: torch.dtype = data_type_to_dtype(config.data_type)
    if isinstance(rows, torch.Tensor):
        dtype = rows.dtype
    if dtype not in DTYPES:
        raise ArgumentError(
            f"tables: {config.name!r} is {dtype}, accepted are float32, float16 and bfloat16"
        )
    return dtype


def _pooling_of(config: Config) -> str:
    pooling = getattr(config, "pooling", PoolingType.SUM)
    if pooling is PoolingType.NONE:
        raise ArgumentError(f"tables: {config.name!r} has pooling NONE, accepted are SUM and MEAN")
    name: str = pooling_type_to_str(pooling)
    return name


def _trainable(tables: Sequence[Config], freeze: bool | Mapping[str, bool]) -> dict[str, bool]:
    if isinstance(freeze, Mapping):
        names = [table.name for table in tables]
        for name in freeze:
            if name not in names:
                raise ArgumentError(f"freeze: there is no table {name!r}; tables are {names}")
        return {name: not frozen for name, frozen in freeze.items()}
    return {table.name: not freeze for table in tables}


def _filled(config: Config, spec: TableSpec) -> FilledSource:
    fill: Callable[[torch.Tensor], Any] = config.init_fn
    return FilledSource(spec.n_rows, spec.row_dim, spec.dtype, fill)


def _sources(
    configs: Sequence[Config],
    specs: Sequence[TableSpec],
    weights: Weights,
    *,
    interleaved: bool,
) -> dict[str, Source]:
    """Return the source of each table's rows; draws random numbers as TorchRec does."""
    sources: dict[str, Source] = {name: RowsSource(rows) for name, rows in weights.items()}
    to_fill = [(c, s) for c, s in zip(configs, specs, strict=True) if c.name not in weights]
    if not interleaved:
        for _, spec in to_fill:
            skip_first_draw(spec.n_rows, spec.row_dim, spec.dtype)
    for config, spec in to_fill:
        if interleaved:
            skip_first_draw(spec.n_rows, spec.row_dim, spec.dtype)
        sources[config.name] = _filled(config, spec)
    return sources
