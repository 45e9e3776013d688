"""CachedEmbedding: an nn.Embedding with a packed table in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from bitslab import CompressedTable, RowCodec
from bitslab.embedding import CachedRows, CacheKind, CacheOptions, EvictionStrategy
from bitslab.integrations.embedding.table import TableModule, pretrained_shape
from bitslab.tables import Layout
from bitslab.tracing import not_traced


class CachedEmbedding(TableModule):
    """Rows of an embedding table by their ids; the table is packed on the host, hot rows cached.

    A drop-in for `torch.nn.Embedding`: same results, bit for bit on a CPU, in training too. See
    `bitslab.embedding.CachedRows` for what happens inside.

    Parameters
    ----------
    num_embeddings, embedding_dim : int
        Rows of the table, N, and elements of a row, D.
    padding_idx : int, optional
        Row that takes no gradient; negative from the end.
    max_norm, norm_type, scale_grad_by_freq, sparse, _weight, _freeze, device, dtype
        As in `torch.nn.Embedding`; `_weight` may be a `bitslab.CompressedTable` too, and lookups
        happen on the current GPU, or the CPU where there is none, when `device` is left out.
    cache_ratio, ids_freq_mapping, warmup_ratio, buffer_size, pin_weight, evict_strategy
        As in `CachedEmbeddingBag`.
    codec, layout, freeze, cache, rows
        As in `CachedEmbeddingBag`; `freeze` is `_freeze` by another name.

    Attributes
    ----------
    rows : bitslab.embedding.CachedRows
        Table and cache.

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
    >>> from bitslab.integrations.embedding import CachedEmbedding
    >>> embedding = CachedEmbedding(1000, 16, padding_idx=0, cache_ratio=0.05, device="cpu")
    >>> embedding(torch.tensor([[1, 2, 999], [5, 0, 0]])).shape
    torch.Size([2, 3, 16])
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
        _freeze: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        cache_ratio: float = 0.01,
        ids_freq_mapping: torch.Tensor | Sequence[int] | None = None,
        warmup_ratio: float = 0.7,
        buffer_size: int = 0,
        pin_weight: bool = True,
        evict_strategy: EvictionStrategy = EvictionStrategy.LFU,
        codec: str | RowCodec = "auto",
        layout: Layout = "compact",
        freeze: bool = False,
        cache: CacheKind = "rows",
        rows: CachedRows | None = None,
    ) -> None:
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
            freeze=freeze or _freeze,
            rows=rows,
        )

    @classmethod
    def from_pretrained(
        cls,
        embeddings: torch.Tensor | CompressedTable,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        **options: Any,
    ) -> CachedEmbedding:
        """Make an embedding over an existing table.

        Parameters
        ----------
        embeddings : torch.Tensor or bitslab.CompressedTable
            ``[N, D]``. A CompressedTable is used as it is, and with ``freeze=False`` changed.
        freeze : bool
            For inference.
        padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
            As in `torch.nn.Embedding.from_pretrained`.
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
            freeze=freeze,
            **options,
        )

    @classmethod
    def from_module(cls, module: torch.nn.Embedding, **options: Any) -> CachedEmbedding:
        """Make an embedding that does what an `nn.Embedding` does, over the same values.

        Parameters
        ----------
        module : torch.nn.Embedding
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
            **{
                "_weight": module.weight,
                "freeze": not module.weight.requires_grad,
                "device": module.weight.device,
                **options,
            },
        )
        return made.train(module.training)

    def to_module(self, weight: torch.nn.Parameter | None = None) -> torch.nn.Embedding:
        """Return an `nn.Embedding` with the same table, decoded, on the same device.

        Parameters
        ----------
        weight : torch.nn.Parameter, optional
            Its weight, if the table was decoded before for a module that shared `rows`.
        """
        made = torch.nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
            self.rows.whole().to(self.rows.device) if weight is None else weight.detach(),
            not self.rows.parameter.requires_grad,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
        assert isinstance(made, torch.nn.Embedding)
        if weight is not None:
            made.weight = weight
        return made.train(self.training)

    # A changing cache cannot be traced; compiled models break the graph around it.
    @not_traced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the row of each id.

        Parameters
        ----------
        input : torch.Tensor
            int32 or int64 ids of any shape.

        Returns
        -------
        torch.Tensor
            ``[*input.shape, D]`` on the device of the rows.

        Raises
        ------
        IndexRangeError
            When an id is out of range.
        ArgumentTypeError
            When `input` is no tensor of int32 or int64. Nothing was changed.
        """
        self.check_parameters()
        rows = self.rows
        wants_grad = torch.is_grad_enabled() and rows.parameter.requires_grad
        comes_and_goes = self.training and rows.trainable and rows.cache == "rows"
        if not (wants_grad or comes_and_goes) and self.max_norm is None:
            found: torch.Tensor = rows.read(input)
            return found
        looked_up = rows.lookup_to_follow(
            input,
            train=self.training,
            sparse=self.sparse,
            padding_idx=self.padding_idx,
            max_norm=self.max_norm,
            norm_type=self.norm_type,
        )
        weight, index, padding = looked_up[:3]
        out = F.embedding(index, weight, padding, None, 2.0, self.scale_grad_by_freq, self.sparse)
        rows.follow(looked_up, out)
        return out

    def prefetch(self, input: torch.Tensor) -> None:
        """Start to fetch the rows of a later batch; see `CachedRows.prefetch`.

        Parameters
        ----------
        input : torch.Tensor
            As for `forward`.
        """
        self.rows.prefetch(input)
