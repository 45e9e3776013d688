"""What CachedEmbeddingBag and CachedEmbedding have in common: one table, its cache, its options."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bitslab import CompressedTable
from bitslab.embedding import CachedRows, CacheOptions, RowsModule
from bitslab.engine.memory import ReadOnlyTensor, keep_from_compiler, plain
from bitslab.errors import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.tables import rows_per_batch

#: All that a state dict of ColossalAI's class holds.
COLOSSAL_KEY = "cache_weight_mgr.cuda_cached_weight"


class TableModule(RowsModule):
    """A module with one table of embeddings; see `CachedEmbeddingBag` for the parameters."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        sparse: bool,
        weight: torch.Tensor | CompressedTable | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        options: CacheOptions,
        *,
        ids_freq_mapping: torch.Tensor | Sequence[int] | None,
        freeze: bool,
        rows: CachedRows | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings = _positive("num_embeddings", num_embeddings)
        self.embedding_dim = _positive("embedding_dim", embedding_dim)
        self.padding_idx = _row("padding_idx", padding_idx, self.num_embeddings)
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        #: Remarks on how the table was made, for `stats`.
        self.notes: list[str] = []
        if rows is not None:
            self._check_rows(rows)
        else:
            self.notes += notes_on_ratio(self.num_embeddings, options.cache_ratio)
            for note in self.notes:
                # Points at the line that makes the module; compressing a model reports it instead.
                warnings.warn(f"bitslab: {note}", UserWarning, stacklevel=3)
            source: Any = self._drawn(dtype) if weight is None else weight
            if isinstance(source, CompressedTable):
                self._check_weight(source.shape, source.dtype, dtype)
            elif isinstance(source, torch.Tensor):
                self._check_weight(source.shape, source.dtype, None)
                source = plain(source.detach())
                source = source if dtype is None else source.to(dtype)
            rows = options.pack(
                source,
                self.num_embeddings,
                device=device,
                trainable=not freeze,
                counts=ids_freq_mapping,
                pinned_ids=() if self.padding_idx is None else (self.padding_idx,),
            )
        self.evict_strategy = rows.slot_table.evict
        self.own("weight", rows)

    def _check_rows(self, rows: CachedRows) -> None:
        if not isinstance(rows, CachedRows):
            raise ArgumentTypeError(f"rows: expected CachedRows, got {type(rows).__name__}")
        if tuple(rows.shape) != (self.num_embeddings, self.embedding_dim):
            raise ArgumentError(
                f"rows: {list(rows.shape)}, expected [num_embeddings, embedding_dim] = "
                f"[{self.num_embeddings}, {self.embedding_dim}]"
            )
        kept = rows.cache == "packed" or rows.all_resident or self.padding_idx in rows.pinned_ids
        if self.padding_idx is not None and not kept:
            raise ArgumentError(
                f"rows: made with pinned_ids={rows.pinned_ids}, expected padding_idx="
                f"{self.padding_idx} among them"
            )

    def _check_weight(
        self, shape: torch.Size, dtype: torch.dtype, wanted: torch.dtype | None
    ) -> None:
        if tuple(shape) != (self.num_embeddings, self.embedding_dim):
            raise ArgumentError(
                f"_weight: {list(shape)}, expected [num_embeddings, embedding_dim] = "
                f"[{self.num_embeddings}, {self.embedding_dim}]"
            )
        if wanted not in (None, dtype) or not dtype.is_floating_point:
            raise ArgumentTypeError(f"_weight: {dtype}, expected {wanted or 'floating-point rows'}")

    def _drawn(self, dtype: torch.dtype | None) -> Iterator[torch.Tensor]:
        """Yield batches of rows as torch draws those of a new embedding."""
        dtype = dtype or torch.get_default_dtype()
        # Multiples of 16 elements, so that the generator gives what one draw of all would; a last
        # piece of fewer is drawn with the piece before.
        step = max(16, rows_per_batch(self.embedding_dim * dtype.itemsize) // 16 * 16)
        begin = 0
        while begin < self.num_embeddings:
            end = begin + step
            if self.num_embeddings - end < 16:
                end = self.num_embeddings
            rows = torch.empty(end - begin, self.embedding_dim, dtype=dtype).normal_()
            if self.padding_idx is not None and begin <= self.padding_idx < end:
                rows[self.padding_idx - begin] = 0
            yield rows
            begin = end

    def reset_parameters(self) -> None:
        """Draw all rows again, as torch does for a new embedding."""
        self.rows.load(self._drawn(self.rows.dtype))

    @property
    def rows(self) -> CachedRows:
        """Table and cache."""
        return self._rows_of["weight"]

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the whole table ``[N, D]`` on the CPU, decoded, in the order of the ids.

        It can be read, not written to nor trained, because the table would not change with it: for
        that there are `CachedRows.load` and ``parameters()``. That holds for its views too, such as
        ``detach()``, ``data`` and ``numpy()``; writes through DLPack (``torch.from_dlpack``) cannot
        be refused, and do not reach the table either. What ``clone()``, ``cpu()`` and ``to(...)``
        make of them is a plain tensor of the caller's own.
        """
        whole = self.rows.whole()
        if torch.is_grad_enabled() and self.rows.parameter.requires_grad:
            whole = _no_gradient(self.rows.parameter, whole)
        keep_from_compiler(TableCopy)
        with torch._C.DisableTorchFunctionSubclass():
            return whole.as_subclass(TableCopy)

    def stats(self) -> dict[str, Any]:
        """Return sizes and counts.

        Returns
        -------
        dict
            What `CachedRows.stats` returns, and ``notes``: remarks, in words.
        """
        stats = self.rows.stats()
        notes = [*stats.get("notes", []), *self.notes]
        if stats["codec"] == "raw":
            notes.append("kept raw: packing would not make this table smaller, or was not wanted")
        return stats | {"notes": notes}

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
        cached = f"{prefix}{COLOSSAL_KEY}"
        if cached in state_dict and f"{prefix}weight" not in state_dict:
            error_msgs.append(
                f"{cached}: the rows that lay in ColossalAI's cache, in the order of its slots; "
                "which ids they belong to is not saved, so that not even all rows of a table can "
                f"be identified. Save the table instead, after cache_weight_mgr.flush(): "
                f"{prefix}weight = cache_weight_mgr.weight[cache_weight_mgr.idx_map.cpu()]"
            )
            return
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        if cached in unexpected_keys:
            unexpected_keys.remove(cached)

    def extra_repr(self) -> str:
        """Name sizes and options."""
        parts = [f"{self.num_embeddings}, {self.embedding_dim}"]
        if self.padding_idx is not None:
            parts.append(f"padding_idx={self.padding_idx}")
        if self.max_norm is not None:
            parts.append(f"max_norm={self.max_norm}")
        parts.append(f"cache_rows={self.rows.cache_rows}")
        parts.append(self.rows.table.codec.describe())
        return ", ".join(parts)


class TableCopy(ReadOnlyTensor):
    """A copy of a whole table: read-only, until it is copied to a plain tensor."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return plain tensors from copying functions; else act as the base class."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in _TAKES:
                return plain(func(*args, **(kwargs or {})))
        found = super().__torch_function__(func, types, args, kwargs)
        if type(found) is ReadOnlyTensor:
            with torch._C.DisableTorchFunctionSubclass():
                return found.as_subclass(cls)  # so that its own copies are plain as well
        return found


_TAKES = (torch.Tensor.clone, torch.Tensor.cpu, torch.Tensor.to)


class _NoGradient(torch.autograd.Function):
    """A copy of rows whose backward raises."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise BitslabError(
            "weight: is a copy of the table that takes no gradient; train through forward(), or "
            "leave a table whose weight is used elsewhere, as by a tied output layer, uncompressed"
        )


_no_gradient: Callable[..., torch.Tensor] = _NoGradient.apply


def pretrained_shape(embeddings: torch.Tensor | CompressedTable) -> tuple[int, int]:
    """Return N and D of a table ``[N, D]``, or refuse it."""
    shape: tuple[int, ...] = tuple(getattr(embeddings, "shape", ()))
    if len(shape) != 2:
        raise ArgumentError(f"embeddings: {list(shape)}, expected [N, D]")
    return shape[0], shape[1]


def notes_on_ratio(n_rows: int, cache_ratio: float) -> list[str]:
    """Return a note if a share of a table is less than the one row that is resident at least."""
    # A ratio of 1 / n_rows is one row, whatever the product is rounded to.
    if n_rows * cache_ratio < 1 - 1e-9:
        return [
            f"cache_ratio={cache_ratio} of {n_rows} rows is less than one row; one is resident, "
            "the fewest that work"
        ]
    return []


def _positive(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{name}: expected an int, got {value!r:.60}") from None
    if number < 1:
        raise ArgumentError(f"{name}: {number}, accepted are 1 and more")
    return number


def _row(name: str, value: int | None, n_rows: int) -> int | None:
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{name}: expected an int, got {value!r:.60}") from None
    if not -n_rows <= number < n_rows:
        raise ArgumentError(f"{name}: {number}, accepted are {-n_rows} to {n_rows - 1}")
    return number % n_rows
