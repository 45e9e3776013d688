"""Spans of coded tiles for tests of attention, made from keys and values by the CPU's own codec."""

from __future__ import annotations

from dataclasses import replace

import torch

from bitslab.engine.codecs.quantized import fit_lossless, fit_tiles
from bitslab.engine.kernels.cpu.tiles import encode_tiles, measure_tiles
from bitslab.engine.kernels.format import TableStorage, bases_of_rows, words_of_rows
from bitslab.engine.kernels.spans import Span
from bitslab.engine.kernels.tile_format import Granularity, TileTables


def stored(rows: torch.Tensor, tables: TileTables) -> TableStorage:
    """Return a compact table of tiles, ``[N, tokens, dim]``."""
    fmt = tables.format
    flat = rows.contiguous().view(torch.uint8).reshape(-1, fmt.row_bytes)
    lengths = measure_tiles(flat, tables)
    words_each = words_of_rows(lengths, fmt.row_bytes // 4)
    bases, _ = bases_of_rows(words_each)
    words = encode_tiles(flat, tables, lengths, bases, int(bases[-1]))
    return TableStorage(flat.shape[0], words, bases, lengths)


def tiles_of(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return tiles by batch, tile and head; the last one is filled up with zeros."""
    batch, heads, length, dim = x.shape
    padded = torch.nn.functional.pad(x, (0, 0, 0, -length % tokens))
    cut = padded.view(batch, heads, -1, tokens, dim).transpose(1, 2)
    return cut.reshape(-1, tokens, dim)


def span_of(
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    tile_tokens: int = 64,
    first_token: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 0.7,
    coder: str = "huffman",
    code_bits: int = 10,
    lossless: bool = False,
) -> Span:
    """Return the span of keys and values ``[B, Hkv, T, D]``, quantised or `lossless`."""
    batch, heads, length, _ = keys.shape
    parts: list[tuple[TableStorage, TileTables]] = []
    for x, granularity, pairs, scale in (
        (keys, Granularity.CHANNEL, False, k_scale),
        (values, Granularity.TOKEN_LEVEL, True, v_scale),
    ):
        whole = torch.nn.functional.pad(x, (0, 0, 0, -length % tile_tokens))
        if lossless:
            plan = fit_lossless(
                whole, tile_tokens=tile_tokens, token_pairs=pairs, code_bits=code_bits
            )
        else:
            plan = fit_tiles(
                whole,
                tile_tokens=tile_tokens,
                granularity=granularity,
                token_pairs=pairs,
                scale=scale,
                coder=coder,
                code_bits=code_bits,
            )
        tables = plan.tables()
        parts.append((stored(tiles_of(x, tile_tokens), tables), tables))
    tiles = -(-length // tile_tokens)
    # Rows of tables go by batch, tile, head; ids by batch, head, tile.
    rows = torch.arange(batch * tiles * heads, dtype=torch.int32).view(batch, tiles, heads)
    ids = rows.transpose(1, 2).reshape(-1).contiguous()
    (k, k_tables), (v, v_tables) = parts
    return Span(k, k_tables, ids, v, v_tables, ids, first_token, length)


def span_to(span: Span, device: torch.device | str) -> Span:
    """Return a span on a device."""

    def moved(table: TableStorage) -> TableStorage:
        assert table.bases is not None and table.lengths is not None
        return replace(
            table,
            words=table.words.to(device),
            bases=table.bases.to(device),
            lengths=table.lengths.to(device),
        )

    to = torch.device(device)
    return Span(
        moved(span.k),
        span.k_tables.to(to),
        span.k_ids.to(to),
        moved(span.v),
        span.v_tables.to(to),
        span.v_ids.to(to),
        span.first_token,
        span.tokens,
    )
