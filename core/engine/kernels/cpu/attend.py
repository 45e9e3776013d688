"""Attention over coded tiles on the CPU: the readable twin of attend.cu."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....errors import CorruptedDataError
from ..format import TableStorage, unsigned_lengths, words_of_rows
from ..spans import OwnTokens, RawRun, Span, group_of
from ..tile_format import TileTables
from .tiles import decode_tiles


def attend(
    query: torch.Tensor,
    spans: Sequence[Span],
    raw: Sequence[RawRun] = (),
    *,
    length: int,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    first_valid: torch.Tensor | None = None,
    own: OwnTokens | None = None,
    short_by: torch.Tensor | None = None,
    computed_in: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the attention of the last tokens of sequences to all of their tokens.

    Parameters
    ----------
    query, spans, raw, length, scaling, softcap, sinks, first_valid, own, short_by
        As for `bitslab.engine.kernels.cuda.attend.AttendKernels.attend`, on the CPU.
    computed_in : torch.dtype
        Of products, softmax and sums.

    Returns
    -------
    torch.Tensor
        ``[B, n, Hq, D]`` of the dtype of the query; rows that see no token are zeros.

    Raises
    ------
    ArgumentError
        For shapes, dtypes and granularities that do not fit together.
    CorruptedDataError
        When a tile is damaged.
    """
    heads, group = group_of(
        query, spans, raw, length=length, sinks=sinks, first_valid=first_valid, own=own
    )
    if short_by is not None:
        *others, (first, last_keys, last_values) = raw
        missing = min(max(int(short_by), 0), last_keys.shape[2])
        left = last_keys.shape[2] - missing
        raw = [*others, (first, last_keys[:, :, :left], last_values[:, :, :left])]
        length -= missing
    batch, query_heads, n, dim = query.shape
    positions: list[torch.Tensor] = []
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for span in spans:
        if span.tiles:
            positions.append(span.first_token + torch.arange(span.tokens))
            shape = (batch, heads, span.tiles * span.k_tables.format.tokens, dim)
            for table, tables, ids, to in (
                (span.k, span.k_tables, span.k_ids, keys),
                (span.v, span.v_tables, span.v_ids, values),
            ):
                to.append(decoded(table, tables, ids).view(shape)[:, :, : span.tokens])
    for first, run_keys, run_values in raw:
        positions.append(first + torch.arange(run_keys.shape[2]))
        keys.append(run_keys)
        values.append(run_values)
    at = torch.cat(positions).expand(batch, -1)
    counts = torch.ones(batch, at.shape[1], dtype=torch.bool)
    if own is not None:
        begin = own.positions.long()[:, None]
        there = begin + torch.arange(own.keys.shape[2])
        end = (begin + own.keys.shape[2]).clamp(max=own.end)
        counts = torch.cat([(at < begin) | (at >= end), there < own.end], dim=1)
        at = torch.cat([at, there], dim=1)
        keys.append(own.keys)
        values.append(own.values)
    k, v = (torch.cat(parts, 2).to(computed_in) for parts in (keys, values))
    rows = query.to(computed_in).reshape(batch, heads, group, n, dim)
    scores = torch.einsum("bhgnd,bhtd->bhgnt", rows, k) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if first_valid is not None:
        counts = counts & (at >= first_valid[:, None])
    seen = at[:, None] <= (length - n + torch.arange(n))[:, None]
    seen = (seen & counts[:, None]).view(batch, 1, 1, n, -1)
    scores = scores.masked_fill(~seen, -torch.inf)
    most = scores.amax(-1, keepdim=True)
    if sinks is not None:
        most = most.maximum(sinks.to(computed_in).view(1, heads, group, 1, 1))
    most = most.masked_fill(most == -torch.inf, 0)
    weights = (scores - most).exp()
    sums = weights.sum(-1, keepdim=True)
    if sinks is not None:
        sums = sums + (sinks.to(computed_in).view(1, heads, group, 1, 1) - most).exp()
    # What no query sees has no weight, whatever its values are.
    unseen = ~seen.any(3, keepdim=True).reshape(batch, 1, -1, 1)
    out = torch.einsum("bhgnt,bhtd->bhgnd", weights, v.masked_fill(unseen, 0))
    out = torch.where(sums == 0, torch.zeros_like(out), out / sums)
    return out.reshape(batch, query_heads, n, dim).transpose(1, 2).to(query.dtype).contiguous()


def decoded(table: TableStorage, tables: TileTables, ids: torch.Tensor) -> torch.Tensor:
    """Return tiles of a compact table, ``[n, tokens, dim]``."""
    fmt = tables.format
    assert table.bases is not None and table.lengths is not None
    rows, lengths = ids.to(torch.int64), unsigned_lengths(table.lengths)
    words = words_of_rows(table.lengths, fmt.row_bytes // 4)
    ends = words.cumsum(0)
    block = rows - rows % 32
    before = (ends - words)[rows] - (ends - words)[block]
    out = torch.empty(len(rows), fmt.tokens, fmt.dim, dtype=fmt.dtype)
    flat = out.view(torch.uint8).view(len(rows), fmt.row_bytes)
    at = table.bases[rows // 32] + before
    bad = decode_tiles(table.words, at, lengths[rows], rows, tables, flat)
    if bad >= 0:
        raise CorruptedDataError(f"packed: row {int(rows[bad])} is damaged")
    return out
