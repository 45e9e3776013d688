"""CachedEmbeddingBag: an nn.EmbeddingBag with a packed table in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from bitslab import CompressedTable, RowCodec
from bitslab.embedding import (
    CachedRows,
    CacheKind,
    CacheOptions,
    EvictionStrategy,
    LookedUp,
    plain_lookup_on_gpu,
    pooled_on_gpu,
    pools_on_gpu,
    sound_offsets,
)
from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.integrations.embedding.manager import CacheManager
from bitslab.integrations.embedding.table import TableModule, pretrained_shape
from bitslab.tables import Layout
from bitslab.tracing import not_traced

MODES = ("sum", "mean", "max")


class CachedEmbeddingBag(TableModule):
    """Sums, means or maxima of embedding rows; the table is packed on the host, hot rows cached.

    A drop-in for `torch.nn.EmbeddingBag` and for ColossalAI's CachedEmbeddingBag: same results, bit
    for bit on a CPU, in training too. See `bitslab.embedding.CachedRows` for what happens inside.

    Parameters
    ----------
    num_embeddings, embedding_dim : int
        Rows of the table, N, and elements of a row, D.
    padding_idx : int, optional
        Row that counts for nothing in a bag and takes no gradient; negative from the end.
    max_norm, norm_type, scale_grad_by_freq, sparse, mode, include_last_offset
        As in `torch.nn.EmbeddingBag`.
    _weight : torch.Tensor or bitslab.CompressedTable, optional
        The table ``[N, D]``; drawn as `torch.nn.EmbeddingBag` does when left out.
    dtype : torch.dtype, optional
        Dtype of the rows; that of `_weight`, or torch's default, when left out.
    device : torch.device or str, optional
        Where lookups happen. The current GPU, or the CPU where there is none, when left out.
    cache_ratio : float
        Share of the rows that is resident on the device; one row at least.
    ids_freq_mapping : torch.Tensor or sequence of int, optional
        ``[N]``, how often each id is used in the data set. The most used are resident at first, and
        with ``EvictionStrategy.DATASET`` the least used leave first.
    warmup_ratio : float
        Share of the cache that is filled at first.
    buffer_size : int
        The most rows that are fetched at once, which bounds the memory for that; 0 for no bound.
    pin_weight : bool
        Whether the packed table is page-locked, as a GPU needs to read it directly. Nothing is
        locked without a GPU.
    evict_strategy : EvictionStrategy
        Which row leaves first: the least often used of late (LFU), in the data set (DATASET), or
        the one not used for longest (LRU).
    codec : str or RowCodec
        As in `bitslab.CompressedTable.from_tensor`; ``"raw"`` packs nothing.
    layout : {"compact", "inplace"}
        How rows lie on the host; see `bitslab.CompressedTable`.
    freeze : bool
        For inference: no gradient, nothing is written back.
    cache : {"rows", "packed"}
        Whether resident rows are kept as they are, or packed, so that more fit; the latter is for
        inference.
    rows : bitslab.embedding.CachedRows, optional
        Existing table and cache, such as those of another module, which are shared. `_weight` and
        the options of table and cache have no effect then.

    Attributes
    ----------
    rows : bitslab.embedding.CachedRows
        Table and cache.
    cache_weight_mgr : CacheManager
        The same by ColossalAI's names.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When an argument is not accepted.

    Notes
    -----
    ``parameters()`` yields the resident rows, ``[C, D]``, for an optimizer whose step leaves rows
    without gradient alone; others are refused. `weight` and the state dict hold the whole table in
    the order of the ids.

    With ``cache_ratio=1.0`` the parameter is the table: whatever writes to it, or gives it a
    gradient, changes the table. Else an in-place change of it outside of an optimizer's step
    (`torch.nn.init`, ``clamp_``) and a gradient that no lookup made (a penalty over
    ``parameters()``) raise, since only the resident rows would follow. A gradient that was assigned
    or changed by hand (``p.grad.add_(noise)``) raises at the step, before anything moves, if it is
    not zero in rows that no lookup of the step holds; clipping and scaling pass. On a GPU nothing
    waits for that: the next lookup or step raises, and rows that no lookup holds do not move.
    Writes through ``.data`` of the parameter or of its gradient are not seen then, and not
    supported, but for a step by hand that moves rows with a gradient alone; nor is a gradient that
    was kept while other rows became resident, which belongs to the earlier rows. Values of the
    state dict are copies: writes into them do not reach the table. Replacing the module's parameter
    raises (`torch.func.functional_call`).

    `torch.nn.utils.clip_grad_norm_` sums in the order of the resident rows, not of the ids, so that
    a norm may differ from that of the plain module in the last bit.

    Other code that takes parameters for the table sees the resident rows only: averages of weights
    (`torch.optim.swa_utils`), and DistributedDataParallel, whose processes have different rows
    resident. For several processes use `bitslab.integrations.torchrec`.

    Examples
    --------
    >>> import torch
    >>> from bitslab.integrations.embedding import CachedEmbeddingBag
    >>> bag = CachedEmbeddingBag(1000, 16, mode="sum", cache_ratio=0.05, device="cpu")
    >>> optimizer = torch.optim.Adagrad(bag.parameters(), lr=0.1)
    >>> bag(torch.tensor([1, 2, 999]), torch.tensor([0, 1])).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | CompressedTable | None = None,
        mode: str = "mean",
        include_last_offset: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        cache_ratio: float = 0.01,
        ids_freq_mapping: torch.Tensor | Sequence[int] | None = None,
        warmup_ratio: float = 0.7,
        buffer_size: int = 0,
        pin_weight: bool = True,
        evict_strategy: EvictionStrategy = EvictionStrategy.LFU,
        *,
        codec: str | RowCodec = "auto",
        layout: Layout = "compact",
        freeze: bool = False,
        cache: CacheKind = "rows",
        rows: CachedRows | None = None,
    ) -> None:
        if mode not in MODES:
            raise ArgumentError(f"mode: {mode!r:.60}, accepted are {MODES}")
        if mode == "max" and (scale_grad_by_freq or sparse):
            raise ArgumentError("mode: 'max' goes with neither scale_grad_by_freq nor sparse")
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            _weight,
            dtype,
            device,
            CacheOptions(
                cache_ratio=cache_ratio,
                cache=cache,
                evict=evict_strategy,
                warmup_ratio=warmup_ratio,
                buffer_rows=buffer_size,
                codec=codec,
                layout=layout,
                pin=pin_weight,
            ),
            ids_freq_mapping=ids_freq_mapping,
            freeze=freeze,
            rows=rows,
        )
        self.mode = mode
        self.include_last_offset = include_last_offset
        self.cache_op = True
        self._manager: CacheManager | None = None

    @classmethod
    def from_pretrained(
        cls,
        embeddings: torch.Tensor | CompressedTable,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **options: Any,
    ) -> CachedEmbeddingBag:
        """Make a bag over an existing table.

        Parameters
        ----------
        embeddings : torch.Tensor or bitslab.CompressedTable
            ``[N, D]``. A CompressedTable is used as it is, and with ``freeze=False`` changed.
        freeze : bool
            For inference.
        max_norm, norm_type, scale_grad_by_freq, mode, sparse, include_last_offset, padding_idx
            As in `torch.nn.EmbeddingBag.from_pretrained`.
        **options
            More of the class, such as ``cache_ratio``.
        """
        return cls(
            *pretrained_shape(embeddings),
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            embeddings,
            mode,
            include_last_offset,
            freeze=freeze,
            **options,
        )

    @classmethod
    def from_module(cls, module: torch.nn.EmbeddingBag, **options: Any) -> CachedEmbeddingBag:
        """Make a bag that does what an `nn.EmbeddingBag` does, over the same values.

        Parameters
        ----------
        module : torch.nn.EmbeddingBag
            It is left unchanged.
        **options
            More of the class, such as ``cache_ratio``.
        """
        made = cls(
            module.num_embeddings,
            module.embedding_dim,
            module.padding_idx,
            module.max_norm,
            module.norm_type,
            module.scale_grad_by_freq,
            module.sparse,
            mode=module.mode,
            include_last_offset=module.include_last_offset,
            **{
                "_weight": module.weight,
                "freeze": not module.weight.requires_grad,
                "device": module.weight.device,
                **options,
            },
        )
        return made.train(module.training)

    def to_module(self, weight: torch.nn.Parameter | None = None) -> torch.nn.EmbeddingBag:
        """Return an `nn.EmbeddingBag` with the same table, decoded, on the same device.

        Parameters
        ----------
        weight : torch.nn.Parameter, optional
            Its weight, if the table was decoded before for a module that shared `rows`.
        """
        made = torch.nn.EmbeddingBag.from_pretrained(
            self.rows.whole().to(self.rows.device) if weight is None else weight.detach(),
            not self.rows.parameter.requires_grad,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            self.include_last_offset,
            self.padding_idx,
        )
        if weight is not None:
            made.weight = weight
        return made.train(self.training)

    # A changing cache cannot be traced; compiled models break the graph around it.
    @not_traced
    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        shape_hook: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return one row for each bag.

        Parameters
        ----------
        input : torch.Tensor
            int32 or int64 ids, ``[n]``, or ``[B, n]`` for B bags of n.
        offsets : torch.Tensor, optional
            ``[B]``, or ``[B + 1]`` with ``include_last_offset``: where bags begin in ``[n]`` ids.
        per_sample_weights : torch.Tensor, optional
            Of the shape of `input`; only with ``mode="sum"``.
        shape_hook : callable, optional
            Applied to the result.

        Returns
        -------
        torch.Tensor
            ``[B, D]`` on the device of the rows.

        Raises
        ------
        IndexRangeError
            When an id is out of range.
        ArgumentError, ArgumentTypeError
            When offsets do not fit, or a dtype or shape is not accepted. Nothing was changed.
            Errors of offsets on a GPU, like those of ids there, are raised by a later call or by
            `bitslab.raise_pending_errors`; a step may have been taken by then. Where all rows are
            resident, ids out of range that torch pools, as of 16-bit rows and ``[B, n]`` ids, end
            in torch's own device assertion.
        """
        self.check_parameters()
        if not torch.is_grad_enabled() and per_sample_weights is None and shape_hook is None:
            plain = self._plain(input, offsets)
            if plain is not None:
                return plain
        self._check_bags(input, offsets, per_sample_weights)
        rows = self.rows
        if self.cache_op:
            found = rows.lookup_to_follow(
                input,
                offsets,
                include_last=self.include_last_offset,
                train=self.training,
                sparse=self.sparse,
                padding_idx=self.padding_idx,
                max_norm=self.max_norm,
                norm_type=self.norm_type,
            )
        else:
            if offsets is not None:
                offsets = sound_offsets(
                    offsets, input.shape[0], rows.device, include_last=self.include_last_offset
                )
            found = LookedUp(*rows.lookup_slots(input, self.padding_idx), offsets)
        if found.offsets is not None and self.mode != "max":
            # What F.embedding_bag calls after its checks, all of which were made above.
            out, *_ = torch.embedding_bag(
                found.weight,
                found.indices,
                found.offsets,
                self.scale_grad_by_freq,
                MODES.index(self.mode),
                self.sparse,
                per_sample_weights,
                self.include_last_offset,
                found.padding,
            )
        else:
            out = F.embedding_bag(
                found.indices,
                found.weight,
                found.offsets,
                None,
                2.0,
                self.scale_grad_by_freq,
                self.mode,
                self.sparse,
                per_sample_weights,
                self.include_last_offset,
                found.padding,
            )
        if found.pinned is not None:
            rows.follow(found, out)
        return out if shape_hook is None else shape_hook(out)

    def _plain(self, input: Any, offsets: Any) -> torch.Tensor | None:
        """Return what `forward` does in the plainest case of inference, or else None.

        On a CPU that is a batch whose rows are all resident.
        """
        rows = self.rows
        if (self.training and rows.trainable) or self.max_norm is not None or not self.cache_op:
            return None
        device = rows.device
        for t in (input, offsets):
            if not isinstance(t, torch.Tensor) or t.dtype is not torch.int64 or t.dim() != 1:
                return None
            if t.device != device or not t.is_contiguous():
                return None
        padding: int | None = None
        if input.is_cuda:
            pools = pools_on_gpu(rows.dtype, len(offsets))
            plain = plain_lookup_on_gpu(rows, input, self.padding_idx, masked=not pools)
            if plain is None:
                return None
            matrix, index, padding = plain
            include_last = self.include_last_offset
            if pools:
                return pooled_on_gpu(
                    matrix,
                    index,
                    offsets,
                    MODES.index(self.mode),
                    padding=padding,
                    include_last=include_last,
                )
            offsets = sound_offsets(offsets, len(input), device, include_last=include_last)
        else:
            found = rows.plain_lookup(
                input,
                offsets,
                include_last=self.include_last_offset,
                one_each=self._one_each(offsets, input),
            )
            if found is None:
                return None
            matrix, slots = found
            if slots is None:
                return matrix
            index = slots
            if self.padding_idx is not None:
                padding = rows.slot_table.slot_or_none(self.padding_idx)
        out, *_ = torch.embedding_bag(
            matrix,
            index,
            offsets,
            self.scale_grad_by_freq,
            MODES.index(self.mode),
            self.sparse,
            None,
            self.include_last_offset,
            padding,
        )
        return out

    def _one_each(self, offsets: torch.Tensor, input: torch.Tensor) -> bool:
        """Return whether each bag may be one id, whose row is then its sum and mean."""
        return (
            offsets.numel() == input.numel()
            and self.mode != "max"
            and self.padding_idx is None
            and not self.include_last_offset
            and self.rows.parameter.dtype in (torch.float32, torch.float64)
        )

    def _check_bags(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None,
        per_sample_weights: torch.Tensor | None,
    ) -> None:
        dim = input.dim() if isinstance(input, torch.Tensor) else 0
        if dim not in (1, 2):
            raise ArgumentTypeError("input: expected ids [n] or [B, n] in a torch.Tensor")
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise ArgumentError(
                    f"per_sample_weights: given with mode={self.mode!r}, accepted with 'sum'"
                )
            if not isinstance(per_sample_weights, torch.Tensor):
                raise ArgumentTypeError(
                    "per_sample_weights: expected a torch.Tensor, got "
                    f"{type(per_sample_weights).__name__}"
                )
            if per_sample_weights.dtype != self.rows.dtype:
                raise ArgumentTypeError(
                    f"per_sample_weights: {per_sample_weights.dtype}, expected {self.rows.dtype} "
                    "as the rows"
                )
            if per_sample_weights.shape != input.shape:
                raise ArgumentError(
                    f"per_sample_weights: {list(per_sample_weights.shape)}, expected "
                    f"{list(input.shape)} as input"
                )
        if dim == 2:
            if offsets is not None:
                raise ArgumentError("offsets: given with input [B, n], whose rows are the bags")
            return
        if not isinstance(offsets, torch.Tensor) or offsets.dim() != 1:
            raise ArgumentTypeError("offsets: expected a 1-D torch.Tensor, since input is [n]")
        if offsets.dtype not in (torch.int32, torch.int64):
            raise ArgumentTypeError(
                f"offsets: {offsets.dtype}, accepted are torch.int32 and torch.int64"
            )

    def prefetch(self, input: torch.Tensor, offsets: torch.Tensor | None = None) -> None:
        """Start to fetch the rows of a later batch; see `CachedRows.prefetch`.

        Parameters
        ----------
        input, offsets : torch.Tensor
            As for `forward`. Offsets are ignored and may be left out.
        """
        self.rows.prefetch(input)

    # By ColossalAI's names

    @property
    def cache_weight_mgr(self) -> CacheManager:
        """Table and cache by ColossalAI's names."""
        if self._manager is None:
            self._manager = CacheManager(self.rows, self.evict_strategy)
        return self._manager

    def set_cache_mgr_async_copy(self, flag: bool) -> None:
        """Accept what ColossalAI's class does; it changes nothing.

        Copies and launches are asynchronous wherever they can be.

        Parameters
        ----------
        flag : bool
            Whether copies shall be asynchronous.
        """
        if not isinstance(flag, bool):
            raise ArgumentTypeError(f"flag: expected a bool, got {flag!r:.60}")

    def set_cache_op(self, cache_op: bool = True) -> None:
        """Make `forward` take ids, or slots from ``cache_weight_mgr.prepare_ids`` if False."""
        self.cache_op = bool(cache_op)

    def print_comm_stats(self) -> None:
        """Print what was moved between host and device."""
        self.cache_weight_mgr.print_comm_stats()

    @property
    def num_hits_history(self) -> list[int]:
        """Different rows of each batch that were resident."""
        with self.rows.lock:
            return self.rows.statistics.hits_history

    @property
    def num_miss_history(self) -> list[int]:
        """Different rows of each batch that were not."""
        with self.rows.lock:
            return self.rows.statistics.misses_history

    @property
    def num_write_back_history(self) -> list[int]:
        """Rows that were packed again for each batch, because they had changed."""
        return self.rows.statistics.written_back_history

    def extra_repr(self) -> str:
        """Name sizes and options."""
        return f"{super().extra_repr()}, mode={self.mode!r}"
