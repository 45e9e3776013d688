"""Attention over coded tiles beside every backend of SDPA and flex_attention, on a GPU.

Rates are in bytes of the bfloat16 keys and values. Peers read the decoded values of the same tiles.
Some hundred distinct tiles are encoded by the CPU; their words are repeated until the memory holds
the whole context, so that each tile is read from a place of its own. Every repetition has queries
of its own. The error is that of the output against float32 attention over the decoded values; of
this the peers' own is shown too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timing import gpu_seconds, markdown
from torch.nn.attention import SDPBackend, sdpa_kernel

from bitslab.engine.codecs.quantized.fit import fit_tiles
from bitslab.engine.kernels.cpu.attend import decoded
from bitslab.engine.kernels.cpu.tiles import encode_tiles, measure_tiles
from bitslab.engine.kernels.cuda import kernels_on, raise_pending_errors
from bitslab.engine.kernels.cuda.prepared_attention import PreparedAttention
from bitslab.engine.kernels.format import (
    PAD_WORDS,
    TableStorage,
    bases_of_rows,
    unsigned_lengths,
    words_of_rows,
)
from bitslab.engine.kernels.spans import Span
from bitslab.engine.kernels.tile_format import SHORT_BITS, Granularity, TileTables

Rows = list[dict[str, Any]]
HEADS, DIM, TILE_TOKENS = 8, 128, 64
#: Distinct tiles of a head.
DISTINCT = 32
#: Batch and context: of the issue's map.
SIZES = ((1, 2048), (1, 8192), (1, 32768), (1, 131072), (16, 2048), (16, 8192), (64, 8192))
#: Steps over rms of K's channels and of V's tokens.
STEPS = {"fine": (0.4, 0.5), "middle": (0.75, 0.85), "coarse": (1.3, 1.3)}
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass
class Part:
    """Distinct tiles of K or V: on the CPU, their words and decoded values."""

    tables: TileTables
    table: TableStorage
    values: torch.Tensor  # [DISTINCT, HEADS, TILE_TOKENS, DIM]

    @property
    def bits_per_value(self) -> float:
        """Bits of a value, with bases and lengths."""
        assert self.table.bases is not None and self.table.lengths is not None
        words = int(self.table.bases[-1]) * 32
        metadata = 8 * (self.table.bases.nbytes - 8 + self.table.lengths.nbytes)
        return (words + metadata) / self.values.numel()


def distinct_tiles(scale: float, *, keys: bool) -> Part:
    """Encode normal values of channels that are spread differently."""
    generator = torch.Generator().manual_seed(int(keys))
    spread = 0.5 + torch.rand(1, HEADS, 1, DIM, generator=generator)
    mean = torch.randn(1, HEADS, 1, DIM, generator=generator) if keys else 0
    x = torch.randn(DISTINCT, HEADS, TILE_TOKENS, DIM, generator=generator)
    x = (x * spread + mean).to(torch.bfloat16)
    tables = fit_tiles(
        x.transpose(0, 1).reshape(1, HEADS, -1, DIM),
        tile_tokens=TILE_TOKENS,
        granularity=Granularity.CHANNEL if keys else Granularity.TOKEN_LEVEL,
        token_pairs=not keys,
        scale=scale,
    ).tables()
    rows = x.view(torch.uint8).reshape(DISTINCT * HEADS, -1)
    lengths = measure_tiles(rows, tables)
    bases, _ = bases_of_rows(words_of_rows(lengths, tables.format.row_bytes // 4))
    words = encode_tiles(rows, tables, lengths, bases, int(bases[-1]))
    table = TableStorage(len(rows), words, bases, lengths)
    values = decoded(table, tables, torch.arange(len(rows)))
    return Part(tables, table, values.view(DISTINCT, HEADS, TILE_TOKENS, DIM))


def repeated(part: Part, repetitions: int) -> TableStorage:
    """Return the tiles that often on the GPU, each in a place of its own."""
    assert part.table.bases is not None and part.table.lengths is not None
    n_words = int(part.table.bases[-1])
    words = part.table.words[:n_words].cuda().repeat(repetitions)
    starts = torch.arange(repetitions).view(-1, 1) * n_words
    bases = torch.cat([(starts + part.table.bases[:-1]).flatten(), starts[-1] + n_words])
    return TableStorage(
        part.table.n_rows * repetitions,
        torch.nn.functional.pad(words, (0, PAD_WORDS)),
        bases.cuda(),
        part.table.lengths.cuda().repeat(repetitions),
    )


def made_span(k: Part, v: Part, batch: int, tokens: int) -> Span:
    """Return a span of `tokens` a sequence on the GPU."""
    tiles = tokens // TILE_TOKENS
    repetitions = -(-batch * tiles // DISTINCT)
    at = torch.arange(batch * tiles, dtype=torch.int32).view(batch, 1, tiles) * HEADS
    ids = (at + torch.arange(HEADS, dtype=torch.int32).view(1, HEADS, 1)).flatten().cuda()
    device = torch.device("cuda")
    return Span(
        repeated(k, repetitions),
        k.tables.to(device),
        ids,
        repeated(v, repetitions),
        v.tables.to(device),
        ids,
        0,
        tokens,
    )


def dense(part: Part, batch: int, tokens: int) -> torch.Tensor:
    """Return the decoded values of the same tiles, ``[B, H, T, D]``."""
    tiles = tokens // TILE_TOKENS
    at = torch.arange(batch * tiles).view(batch, tiles) % DISTINCT
    chosen = part.values.cuda()[at.cuda()]
    return chosen.transpose(1, 2).reshape(batch, HEADS, tokens, DIM).contiguous()


def peers(k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return what computes the same of dense keys and values."""

    def by(backend: SDPBackend) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(query: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel([backend]):
                return torch.nn.functional.scaled_dot_product_attention(
                    query, k, v, enable_gqa=query.shape[1] != k.shape[1]
                )

        return run

    found = {name: by(backend) for name, backend in BACKENDS.items()}
    try:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        found["flex"] = lambda q: compiled(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    except ImportError:
        pass
    return found


def exact(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return float32 attention of the first sequence, ``[Hq, D]``."""
    rows = query[0].float().view(HEADS, -1, DIM)
    scores = torch.einsum("hgd,htd->hgt", rows, k[0].float()) * DIM**-0.5
    return torch.einsum("hgt,htd->hgd", scores.softmax(-1), v[0].float()).reshape(-1, DIM)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def measured(
    k: Part, v: Part, batch: int, tokens: int, groups: list[int], reps: int, with_peers: bool
) -> Rows:
    """Measure one size with each number of query heads a K/V head."""
    span = made_span(k, v, batch, tokens)
    keys, values = dense(k, batch, tokens), dense(v, batch, tokens)
    raw_bytes = keys.nbytes + values.nbytes
    prepare = kernels_on(torch.device("cuda")).prepare_attention
    found: Rows = []
    for group in groups:
        queries = torch.randn(
            reps + 2, batch, HEADS * group, 1, DIM, dtype=torch.bfloat16, device="cuda"
        )

        attend = prepare(queries[0], [span], length=tokens, scaling=DIM**-0.5)

        def ours(
            i: int, queries: torch.Tensor = queries, attend: PreparedAttention = attend
        ) -> torch.Tensor:
            return attend(queries[i], [], tokens)

        line: dict[str, Any] = {
            "batch": batch,
            "context": tokens,
            "raw MiB": raw_bytes / 2**20,
            "heads a K/V head": group,
        }
        expected = exact(queries[0], keys, values)
        line["error"] = relative_error(ours(0)[0, 0], expected)
        raise_pending_errors()
        seconds = gpu_seconds(ours, reps)
        begin = time.perf_counter()
        for i in range(reps):
            ours(i)
        line["host us"] = (time.perf_counter() - begin) / reps * 1e6
        torch.cuda.synchronize()
        line["us"], line["GB/s"] = seconds * 1e6, raw_bytes / seconds / 1e9
        others = {}
        for name, run in (peers(keys, values) if with_peers else {}).items():
            try:
                error = relative_error(run(queries[0])[0, :, 0], expected)
                others[name] = gpu_seconds(lambda i: run(queries[i]), reps)  # noqa: B023
            except Exception as problem:  # a backend says in its own way what it does not take
                problem_line = str(problem).splitlines()[0]
                print(f"{name}: {type(problem).__name__}: {problem_line:.150}", file=sys.stderr)
                continue
            line[f"{name} us"] = others[name] * 1e6
            line[f"{name} GB/s"] = raw_bytes / others[name] / 1e9
            line[f"{name} error"] = error
        if others:
            best = min(others, key=others.__getitem__)
            line["best peer"], line["of best"] = best, others[best] / seconds
        found.append(line)
        print(line, file=sys.stderr, flush=True)
    return found


def rates(
    *,
    sizes: tuple[tuple[int, int], ...] = SIZES,
    steps: tuple[str, ...] = ("middle",),
    groups: tuple[int, ...] = (1, 4, 8),
    reps: int = 10,
    with_peers: bool = True,
) -> Rows:
    """Return a row for each size, step and number of query heads a K/V head."""
    found: Rows = []
    for name in steps:
        k_scale, v_scale = STEPS[name]
        k, v = distinct_tiles(k_scale, keys=True), distinct_tiles(v_scale, keys=False)
        pairs, short = [], []
        for tables in (k.tables, v.tables):
            of_blocks = tables.block_class.long()
            pairs.append(f"{(tables.radius[of_blocks] > 0).float().mean():.0%}")
            short.append(f"{(tables.class_bits[of_blocks] <= SHORT_BITS).float().mean():.0%}")
        for part in (k, v):
            assert part.table.lengths is not None
            assert int(unsigned_lengths(part.table.lengths).min()) > 0
        label = {
            "steps": name,
            "bits K": k.bits_per_value,
            "bits V": v.bits_per_value,
            "blocks of pairs": " / ".join(pairs),
            "of short codes": " / ".join(short),
        }
        print(label, file=sys.stderr, flush=True)
        for batch, tokens in sizes:
            rows = measured(k, v, batch, tokens, list(groups), reps, with_peers)
            found += [{**label, **row} for row in rows]
            torch.cuda.empty_cache()
    return found


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Return the table of this part; `arguments` has `peers` and `repetitions`."""
    found = rates(reps=arguments.repetitions, with_peers=arguments.peers)
    return {"Attention over coded tiles": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", nargs="+", choices=[*STEPS], default=["middle"])
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--sizes", nargs="+", help="batch:context", default=None)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--no-peers", action="store_true")
    args = parser.parse_args()
    given = [each.split(":") for each in args.sizes or ()]
    sizes = tuple((int(batch), int(tokens)) for batch, tokens in given) or SIZES
    found = rates(
        sizes=sizes,
        steps=tuple(args.steps),
        groups=tuple(args.groups),
        reps=args.repetitions,
        with_peers=not args.no_peers,
    )
    print(markdown("Attention over coded tiles", found))


if __name__ == "__main__":
    main()
