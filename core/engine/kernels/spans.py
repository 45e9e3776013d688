"""What attention reads of a cache: spans of coded tiles, and runs of tokens that are not coded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...errors import ArgumentError
from .format import TableStorage, ceil_div
from .tile_format import Granularity, TileTables

#: Query rows, heads of a group times tokens, that kernels serve with one decode of a tile.
MAX_ROWS = 16

#: Position of its first token, keys and values ``[B, Hkv, t, D]``.
RawRun = tuple[int, torch.Tensor, torch.Tensor]

#: In the place of the position of `OwnTokens`, which begin elsewhere in each sequence.
OWN_RUN = -1


@dataclass(frozen=True, eq=False)
class Span:
    """Coded keys and values of consecutive tokens of a batch.

    Parameters
    ----------
    k, v : TableStorage
        Compact tables whose rows are tiles.
    k_tables, v_tables : TileTables
        Of granularity CHANNEL (K, no pairs of tokens) and TOKEN_LEVEL (V, pairs of tokens), or both
        LOSSLESS, on the device that attends; of Hkv heads or of one.
    k_ids, v_ids : torch.Tensor
        int32 ``[B * Hkv * tiles]`` there: the row of each tile, by batch, head and tile.
    first_token : int
        Position of the first token.
    tokens : int
        Tokens that count; the last tile may have more.
    """

    k: TableStorage
    k_tables: TileTables
    k_ids: torch.Tensor
    v: TableStorage
    v_tables: TileTables
    v_ids: torch.Tensor
    first_token: int
    tokens: int

    @property
    def tiles(self) -> int:
        """Tiles of a head."""
        return ceil_div(self.tokens, self.k_tables.format.tokens)


@dataclass(frozen=True, eq=False)
class OwnTokens:
    """Tokens of sequences, not coded, that begin at another position in each.

    They count, and what `Span` and `RawRun` have at these positions does not.

    Parameters
    ----------
    positions : torch.Tensor
        int32 ``[B]``, on the device that attends: where they begin, from 0.
    keys, values : torch.Tensor
        ``[B, Hkv, n, D]``: of n consecutive tokens.
    end : int
        Before it they count; behind it other tokens do.
    """

    positions: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    end: int

    def same_as(self, other: OwnTokens) -> bool:
        """Return whether these are the very tensors of others."""
        return (
            self.positions is other.positions
            and self.keys is other.keys
            and self.values is other.values
            and self.end == other.end
        )

    @property
    def run(self) -> RawRun:
        """The tokens as a run."""
        return OWN_RUN, self.keys, self.values


def group_of(
    query: torch.Tensor,
    spans: Sequence[Span],
    raw: Sequence[RawRun],
    *,
    length: int,
    sinks: torch.Tensor | None,
    first_valid: torch.Tensor | None,
    own: OwnTokens | None = None,
) -> tuple[int, int]:
    """Return K/V heads and query heads of each, or refuse what attention does not take.

    Raises
    ------
    ArgumentError
        For shapes, dtypes, granularities and devices that do not fit together.
    """
    if query.ndim != 4:
        raise ArgumentError(f"query: {list(query.shape)}, accepted is [B, Hq, n, D]")
    batch, query_heads, n, dim = query.shape
    heads = _heads(query, spans, raw)
    if heads == 0 or query_heads % heads or query_heads // heads > MAX_ROWS:
        raise ArgumentError(
            f"query: {query_heads} heads, accepted are 1 to {MAX_ROWS} for each of {heads} of K/V"
        )
    if n > length:
        raise ArgumentError(f"length: {length} tokens, {n} of which are queries")
    for span in spans:
        _check_span(span, query, heads)
    for first, keys, values in raw if own is None else (*raw, own.run):
        shape = (batch, heads, keys.shape[2] if keys.ndim == 4 else -1, dim)
        for name, part in (("keys", keys), ("values", values)):
            if tuple(part.shape) != shape or part.dtype != query.dtype:
                raise ArgumentError(
                    f"raw: {name} at {first}: {part.dtype} {list(part.shape)}, accepted are "
                    f"{query.dtype} {list(shape)}"
                )
    if sinks is not None and tuple(sinks.shape) != (query_heads,):
        raise ArgumentError(f"sinks: {list(sinks.shape)}, accepted are [{query_heads}]")
    positions = None if own is None else own.positions
    for name, given in (("first_valid", first_valid), ("own: positions", positions)):
        if given is not None and (tuple(given.shape) != (batch,) or given.dtype != torch.int32):
            raise ArgumentError(
                f"{name}: {given.dtype} {list(given.shape)}, accepted are {torch.int32} [{batch}]"
            )
    return heads, query_heads // heads


def _heads(query: torch.Tensor, spans: Sequence[Span], raw: Sequence[RawRun]) -> int:
    """Return the heads of K and V, by what there is of them."""
    for _, keys, _ in raw:
        if keys.ndim == 4:
            return keys.shape[1]
    for span in spans:
        if span.tiles and query.shape[0]:
            return span.k_ids.numel() // (query.shape[0] * span.tiles)
    raise ArgumentError("spans, raw: both are empty, accepted are some tokens")


def _check_span(span: Span, query: torch.Tensor, heads: int) -> None:
    if span.k_tables.format.lossless:
        wanted = (Granularity.LOSSLESS, False), (Granularity.LOSSLESS, True)
    else:
        wanted = (Granularity.CHANNEL, False), (Granularity.TOKEN_LEVEL, True)
    tiles = query.shape[0] * heads * span.tiles
    for name, table, tables, ids, (granularity, pairs) in (
        ("k", span.k, span.k_tables, span.k_ids, wanted[0]),
        ("v", span.v, span.v_tables, span.v_ids, wanted[1]),
    ):
        fmt = tables.format
        if fmt.granularity is not granularity or fmt.token_pairs != pairs:
            raise ArgumentError(
                f"spans: {name}: {fmt.granularity.name}, token_pairs={fmt.token_pairs}, accepted "
                f"is {granularity.name}, token_pairs={pairs}"
            )
        if (fmt.dim, fmt.dtype) != (query.shape[3], query.dtype):
            raise ArgumentError(
                f"spans: {name}: {fmt.dtype} of dim {fmt.dim}, the query is {query.dtype} of dim "
                f"{query.shape[3]}"
            )
        if fmt.tokens != span.k_tables.format.tokens:
            raise ArgumentError(
                f"spans: {name}: tiles of {fmt.tokens} tokens, those of k have "
                f"{span.k_tables.format.tokens}"
            )
        if tables.heads not in (1, heads):
            raise ArgumentError(f"spans: {name}: tables of {tables.heads} heads, not of {heads}")
        if table.bases is None or table.lengths is None:
            raise ArgumentError(f"spans: {name}: a table in place, accepted are compact ones")
        if ids.dtype != torch.int32 or ids.numel() != tiles or not ids.is_contiguous():
            raise ArgumentError(
                f"spans: {name}_ids: {ids.dtype}, {ids.numel()} of them, accepted are {tiles} "
                f"contiguous {torch.int32}"
            )
