"""Attention over coded tiles beside every backend of SDPA and flex_attention, on a GPU.

Rates are in bytes of the bfloat16 keys and values. Peers read the decoded values of the same tiles;
"decode, then" is this library's own decoding of all tiles, followed by the fastest of them. Some
hundred distinct tiles are encoded by the CPU; their words are repeated until the memory holds the
whole context, so that each tile is read from a place of its own. Every repetition has queries of
its own. The error is that of the output against float32 attention over the decoded values; of this
the peers' own is shown too.

Steps "smollm2" are K and V of SmolLM2, two heads of 64 side by side as one of 128, with steps that
keep its error of attention under 0.055; of the others values are normal. "fixed" behind a name says
that codes are plain fields of the narrowest width, read by the same kernels, "short" that no code
has more than 8 bits: more bytes, fewer instructions.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# SmolLM2 and its text are those of the examples.
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import torch  # noqa: E402
from kvcomp_states import wide_heads  # noqa: E402
from textgen.smollm import ModelMissingError  # noqa: E402
from timing import gpu_seconds, markdown  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from bitslab.engine.codecs.quantized import fit_lossless, fit_tiles  # noqa: E402
from bitslab.engine.kernels.cpu.attend import decoded  # noqa: E402
from bitslab.engine.kernels.cpu.tiles import encode_tiles, measure_tiles  # noqa: E402
from bitslab.engine.kernels.cuda import kernels_on, raise_pending_errors  # noqa: E402
from bitslab.engine.kernels.cuda.prepared_attention import PreparedAttention  # noqa: E402
from bitslab.engine.kernels.format import (  # noqa: E402
    PAD_WORDS,
    TableStorage,
    bases_of_rows,
    unsigned_lengths,
    words_of_rows,
)
from bitslab.engine.kernels.spans import Span  # noqa: E402
from bitslab.engine.kernels.tile_format import (  # noqa: E402
    MAX_CODE_BITS,
    SHORT_BITS,
    Granularity,
    TileTables,
)

Rows = list[dict[str, Any]]
Attend = Callable[[torch.Tensor], torch.Tensor]
Size = tuple[int, int]
HEADS, DIM, TILE_TOKENS = 8, 128, 64
#: Distinct tiles of a head.
DISTINCT = 32
#: Batch and context, of few rows and of the map; with flex_attention, which compiles for each size.
FEW = ((1, 8192), (1, 32768), (1, 131072), (16, 8192))
SIZES = (
    *((1, tokens) for tokens in (2048, 4096, 8192, 16384, 32768, 65536, 131072)),
    *((4, tokens) for tokens in (2048, 8192, 32768, 131072)),
    *((16, tokens) for tokens in (2048, 8192, 32768, 131072)),
    *((64, tokens) for tokens in (2048, 8192, 32768)),
)
FLEX = ((16, 8192),)
#: Steps over rms of K's channels and of V's tokens.
STEPS = {"fine": (0.4, 0.5), "middle": (0.75, 0.85), "coarse": (1.3, 1.3)}
SMOLLM2 = "smollm2"
#: Coders, behind the name of steps: plain fields, codes that lanes ask for two at a time, and tiles
#: that are lossless, whose values are the same whatever the steps.
CODERS: dict[str, dict[str, Any]] = {
    "fixed": {"coder": "fixed"},
    "short": {"code_bits": SHORT_BITS},
    "lossless": {"coder": "lossless", "code_bits": SHORT_BITS},
}
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


def distinct_tiles(
    scale: float, *, keys: bool, coder: str = "huffman", code_bits: int = MAX_CODE_BITS
) -> Part:
    """Encode normal values of channels that are spread differently."""
    generator = torch.Generator().manual_seed(int(keys))
    spread = 0.5 + torch.rand(1, HEADS, 1, DIM, generator=generator)
    mean = torch.randn(1, HEADS, 1, DIM, generator=generator) if keys else 0
    x = torch.randn(DISTINCT, HEADS, TILE_TOKENS, DIM, generator=generator)
    x = (x * spread + mean).to(torch.bfloat16)
    sample = x.transpose(0, 1).reshape(1, HEADS, -1, DIM)
    return encoded(sample, scale, None, keys=keys, coder=coder, code_bits=code_bits)


def smollm2_tiles(*, keys: bool, coder: str = "huffman", code_bits: int = MAX_CODE_BITS) -> Part:
    """Encode K or V of SmolLM2.

    Raises
    ------
    ModelMissingError
        When it is not installed.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    found = wide_heads(HEADS, DISTINCT * TILE_TOKENS, device)
    how: dict[str, Any] = {"keys": keys, "coder": coder, "code_bits": code_bits}
    if keys:
        return encoded(found.keys, 1.0, found.weights, **how)
    return encoded(found.values, found.value_scale, None, **how)


def encoded(
    sample: torch.Tensor,
    scale: float,
    weights: torch.Tensor | None,
    *,
    keys: bool,
    coder: str,
    code_bits: int,
) -> Part:
    """Encode ``[1, HEADS, DISTINCT * TILE_TOKENS, DIM]``."""
    if coder == "lossless":
        plan = fit_lossless(
            sample, tile_tokens=TILE_TOKENS, token_pairs=not keys, code_bits=code_bits
        )
    else:
        plan = fit_tiles(
            sample,
            tile_tokens=TILE_TOKENS,
            granularity=Granularity.CHANNEL if keys else Granularity.TOKEN_LEVEL,
            token_pairs=not keys,
            scale=scale,
            weights=weights,
            coder=coder,
            code_bits=code_bits,
        )
    tables = plan.tables()
    tiles = torch.unflatten(sample[0], 1, (DISTINCT, TILE_TOKENS)).transpose(0, 1)
    rows = tiles.contiguous().view(torch.uint8).reshape(DISTINCT * HEADS, -1)
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


def peers(k: torch.Tensor, v: torch.Tensor, *, flex: bool) -> dict[str, Attend]:
    """Return what computes the same of dense keys and values."""

    def by(backend: SDPBackend) -> Attend:
        def run(query: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel([backend]):
                return torch.nn.functional.scaled_dot_product_attention(
                    query, k, v, enable_gqa=query.shape[1] != k.shape[1]
                )

        return run

    found = {name: by(backend) for name, backend in BACKENDS.items()}
    if not flex:
        return found
    try:
        from torch.nn.attention.flex_attention import flex_attention
    except ImportError as error:
        print(f"flex: left out: {error}", file=sys.stderr)
        return found
    compiled = torch.compile(flex_attention, dynamic=False)
    found["flex"] = lambda q: compiled(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    return found


def decoding(
    span: Span, k: torch.Tensor, v: torch.Tensor
) -> tuple[Callable[[], None], tuple[torch.Tensor, torch.Tensor]]:
    """Return what decodes the tiles of a span, and where to; they are compared with `k` and `v`."""
    kernels = kernels_on(k.device)
    out = torch.empty_like(k), torch.empty_like(v)
    rows = [x.view(len(span.k_ids), -1).view(torch.uint8) for x in out]

    def decode() -> None:
        kernels.decode_tiles(span.k, span.k_tables, span.k_ids, rows[0])
        kernels.decode_tiles(span.v, span.v_tables, span.v_ids, rows[1])

    decode()
    raise_pending_errors()
    if not torch.equal(out[0], k) or not torch.equal(out[1], v):
        raise SystemExit("decoded values are not those of the CPU")
    return decode, out


def exact(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return float32 attention of the first sequence, ``[Hq, D]``."""
    rows = query[0].float().view(HEADS, -1, DIM)
    scores = torch.einsum("hgd,htd->hgt", rows, k[0].float()) * DIM**-0.5
    return torch.einsum("hgt,htd->hgd", scores.softmax(-1), v[0].float()).reshape(-1, DIM)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def measured(
    k: Part,
    v: Part,
    size: Size,
    groups: Sequence[int],
    reps: int,
    backends: Sequence[str],
    flex: Sequence[int],
) -> Rows:
    """Measure one size with each number of query heads a K/V head.

    Parameters
    ----------
    backends : sequence of str
        Of BACKENDS, beside them.
    flex : sequence of int
        Numbers of query heads for which flex_attention is compiled.
    """
    batch, tokens = size
    span = made_span(k, v, batch, tokens)
    keys, values = dense(k, batch, tokens), dense(v, batch, tokens)
    raw_bytes = keys.nbytes + values.nbytes
    prepare = kernels_on(keys.device).prepare_attention
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
        for name, run in peers(keys, values, flex=group in flex).items():
            if name not in backends and name != "flex":
                continue
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
            decode, decoded_states = decoding(span, keys, values)
            dense_attend = peers(*decoded_states, flex=best == "flex")[best]

            def decode_then(i: int) -> torch.Tensor:
                decode()  # noqa: B023
                return dense_attend(queries[i])  # noqa: B023

            then = gpu_seconds(decode_then, reps)
            line["decode, then"], line["of decode, then"] = then * 1e6, then / seconds
        found.append(line)
        print(line, file=sys.stderr, flush=True)
    return found


def parts_of(name: str) -> tuple[Part, Part]:
    """Return K and V of a name: of STEPS or SMOLLM2, and of CODERS behind it."""
    steps, *coder = name.split()
    how = CODERS[coder[0]] if coder else {}
    if steps == SMOLLM2:
        return smollm2_tiles(keys=True, **how), smollm2_tiles(keys=False, **how)
    k_scale, v_scale = STEPS[steps]
    return (
        distinct_tiles(k_scale, keys=True, **how),
        distinct_tiles(v_scale, keys=False, **how),
    )


def rates(
    *,
    sizes: Sequence[Size] = FEW,
    steps: Sequence[str] = ("middle",),
    groups: Sequence[int] = (1, 4, 8),
    reps: int = 10,
    backends: Sequence[str] = tuple(BACKENDS),
    flex: Sequence[Size] = (),
    flex_groups: Sequence[int] = (4,),
) -> Rows:
    """Return a row for each size, step and number of query heads a K/V head.

    flex_attention is measured with the first steps alone: what K and V hold makes no difference.
    """
    found: Rows = []
    for number, name in enumerate(steps):
        try:
            k, v = parts_of(name)
        except ModelMissingError as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
            continue
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
        for size in sizes:
            compiled = tuple(flex_groups) if number == 0 and size in flex else ()
            rows = measured(k, v, size, groups, reps, backends, compiled)
            found += [{**label, **row} for row in rows]
            torch.cuda.empty_cache()
    return found


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Return the tables of this part; `arguments` has `map`, `peers` and `repetitions`."""
    reps, tables = arguments.repetitions, {}
    fast = ("cudnn", "flash") if arguments.peers else ()
    tables["Attention over coded tiles"] = rates(
        sizes=FEW,
        steps=(
            *("middle", "middle short", "coarse", "middle fixed", "middle lossless"),
            *(SMOLLM2, f"{SMOLLM2} short", f"{SMOLLM2} fixed", f"{SMOLLM2} lossless"),
        ),
        reps=reps,
        backends=fast,
        flex=FLEX if arguments.peers else (),
    )
    if arguments.map:
        tables["Attention over coded tiles, by batch and context"] = rates(
            sizes=SIZES,
            reps=reps,
            backends=tuple(BACKENDS) if arguments.peers else (),
            flex=((64, 2048), (64, 8192)) if arguments.peers else (),
        )
    return tables


def main() -> None:
    named = [*STEPS, SMOLLM2]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--steps",
        nargs="+",
        choices=[*named, *(f"{name} {coder}" for name in named for coder in CODERS)],
        default=["middle"],
    )
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--sizes", nargs="+", help="batch:context", default=None)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--backends", nargs="+", choices=tuple(BACKENDS), default=tuple(BACKENDS))
    parser.add_argument("--no-flex", action="store_true", help="compile no flex_attention")
    args = parser.parse_args()
    given = [each.split(":") for each in args.sizes or ()]
    sizes = tuple((int(batch), int(tokens)) for batch, tokens in given) or SIZES
    found = rates(
        sizes=sizes,
        steps=tuple(args.steps),
        groups=tuple(args.groups),
        reps=args.repetitions,
        backends=() if args.no_peers else args.backends,
        flex=() if args.no_peers or args.no_flex else sizes,
        flex_groups=tuple(args.groups),
    )
    print(markdown("Attention over coded tiles", found))


if __name__ == "__main__":
    main()
