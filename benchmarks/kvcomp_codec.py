"""Coded tiles of K and V on a GPU: encode and decode, beside the lossless codec, a copy and nvCOMP.

Rates are bytes of the bfloat16 values a second. K has steps by channel and pairs of channels, V
levels by token and pairs of tokens, in tiles of 64 tokens; values are normal, with channels of
different spread, and `step` is the step over the rms: 1 is fine, 2.5 coarse; "SmolLM2" are K and V
of that model, two heads of 64 side by side as one of 128, with steps that keep its error of
attention under 0.055, the same tiles again and again. "fixed" says that codes are plain fields of
the narrowest width, read and written by the same kernels; "lossless" that nothing is quantised,
whatever the step: tiles bring every bit back. nvCOMP's ANS packs the bfloat16 values,
and the same quantised codes as bytes, which it neither makes nor turns into values again: its rates
are those of the entropy coder alone. Every repetition works on another of several inputs, each many
times the size of the GPU's cache. Decoded values are compared with the twin of the CPU, and all of
them with the bound. `pack` quantises once what `measure` and `encode` quantise each, as caches of K
and V pack.

python benchmarks/kvcomp_codec.py
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# SmolLM2 and its text are those of the examples.
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import torch  # noqa: E402
from codec_gpu import copy_gbps, nvcomp_row  # noqa: E402
from kvcomp_states import wide_heads  # noqa: E402
from textgen.smollm import ModelMissingError  # noqa: E402
from timing import add_output, gpu_seconds, print_tables  # noqa: E402

from bitslab.engine.codecs.invariant.codec import InvariantCodec  # noqa: E402
from bitslab.engine.codecs.quantized import (  # noqa: E402
    TilePlan,
    fit_lossless,
    measured_fit,
    steps_and_centers,
)
from bitslab.engine.kernels import cpu  # noqa: E402
from bitslab.engine.kernels.cuda import kernels_on, raise_pending_errors  # noqa: E402
from bitslab.engine.kernels.format import TableStorage, bases_of_rows, words_of_rows  # noqa: E402
from bitslab.engine.kernels.tile_format import Granularity  # noqa: E402

Rows = list[dict[str, Any]]
SETS = 3  # inputs that the repetitions rotate through
HEADS, TOKENS = 8, 64
#: Heads' sizes and steps; --map has more.
FEW, ALL = {128: (1.0, 2.5)}, {128: (0.7, 1.0, 1.5, 2.5), 64: (0.7, 1.0, 1.5, 2.5)}
#: Tokens of SmolLM2.
STATES_TOKENS = 32 * TOKENS
#: Tiles that are decoded by the twin, too.
TWIN_TILES = 2 * HEADS


def values(side: str, dim: int, tiles: int, seed: int) -> torch.Tensor:
    """Return bfloat16 tiles of all heads in turn, ``[tiles, TOKENS, dim]``."""
    generator = torch.Generator("cuda").manual_seed(seed)
    spread = torch.Generator("cuda").manual_seed(7)  # the same channels in every input
    width = torch.randn(HEADS, 1, dim, device="cuda", generator=spread).mul(0.5).exp()
    center = torch.randn(HEADS, 1, dim, device="cuda", generator=spread)
    x = torch.empty(tiles // HEADS, HEADS, TOKENS, dim, dtype=torch.bfloat16, device="cuda")
    for part in torch.split(x, 128):  # float32 for a part at a time
        noise = torch.randn(part.shape, device="cuda", generator=generator)
        part.copy_(noise * width + center if side == "K" else noise * width)
    return x.view(-1, TOKENS, dim)


@dataclass
class Case:
    """Inputs of one shape, and how their steps are found.

    Parameters
    ----------
    name : str
        What it is called.
    side : str
        "K" or "V".
    inputs : list of torch.Tensor
        bfloat16 ``[tiles, TOKENS, dim]``, of all heads in turn.
    scale : float
        Of the steps.
    weights : torch.Tensor
        ``[HEADS, dim]``, of K's channels.
    """

    name: str
    side: str
    inputs: list[torch.Tensor]
    scale: float
    weights: torch.Tensor

    def fit(self, coder: str) -> tuple[TilePlan, float | None]:
        """Return the plan for one tile after another of each head, and the bits it expects.

        Lossless tiles expect none.
        """
        x = self.inputs[0]
        by_head = x[: 32 * HEADS].view(-1, HEADS, *x.shape[1:])
        sample = by_head.transpose(0, 1).flatten(1, 2)[None]
        if coder == "lossless":
            pairs = self.side == "V"
            return fit_lossless(sample, tile_tokens=TOKENS, token_pairs=pairs), None
        fit = measured_fit(
            sample,
            tile_tokens=TOKENS,
            granularity=Granularity.CHANNEL if self.side == "K" else Granularity.TOKEN_LEVEL,
            token_pairs=self.side == "V",
            scale=self.scale,
            weights=self.weights if self.side == "K" else None,
            coder=coder,
        )
        return fit.plan, fit.bits_per_value


def count(dim: int, nbytes: int) -> int:
    """Return the tiles of all heads that take so many raw bytes."""
    return nbytes // (2 * TOKENS * dim) // HEADS * HEADS


def normal(side: str, dim: int, step: float, inputs: list[torch.Tensor]) -> Case:
    """Return normal values; of K every channel has a step of its own."""
    x = inputs[0][: 32 * HEADS].view(-1, HEADS, TOKENS, dim).float()
    weights = 1 / x.transpose(0, 1).flatten(1, 2).std(dim=1)
    return Case(f"{side}, dim {dim}, step {step}", side, inputs, step, weights)


def smollm2(side: str, nbytes: int) -> Case:
    """Return K or V of SmolLM2; every input begins with another tile."""
    device = torch.device("cuda", torch.cuda.current_device())
    states = wide_heads(HEADS, STATES_TOKENS, device)
    x = (states.keys if side == "K" else states.values)[0].cuda()
    tiles = torch.unflatten(x, 1, (-1, TOKENS)).transpose(0, 1).contiguous()  # [tiles, heads, ...]
    repetitions = -(-count(128, nbytes) // (len(tiles) * HEADS))
    repeated = tiles.repeat(repetitions, 1, 1, 1).flatten(0, 1)
    inputs = [repeated.roll(7 * HEADS * i, 0) for i in range(SETS)]
    scale = 1.0 if side == "K" else states.value_scale
    return Case(f"{side}, SmolLM2 as heads of 128", side, inputs, scale, states.weights.cuda())


@dataclass
class Tiles:
    """The kernels with a plan, on rows of bytes."""

    plan: TilePlan

    def __post_init__(self) -> None:
        self.host_tables = self.plan.tables()
        self.tables = self.host_tables.to(torch.device("cuda"))
        self.kernels = kernels_on(torch.device("cuda"))
        self.row_words = self.plan.format.row_bytes // 4

    def pack(self, rows: torch.Tensor) -> TableStorage:
        """Return rows packed."""
        lengths = self.kernels.measure_tiles(rows, self.tables)
        bases, _ = bases_of_rows(words_of_rows(lengths, self.row_words))
        n_words = int(bases[-1])
        words = self.kernels.encode_tiles(rows, self.tables, lengths, bases, n_words)
        return TableStorage(len(rows), words, bases, lengths)

    def check(self, x: torch.Tensor, rows: torch.Tensor, packed: TableStorage) -> None:
        """Stop unless what is decoded is what the twin decodes, and within the bound."""
        out = torch.full_like(rows, 0xA5)
        self.kernels.decode_tiles(packed, self.tables, None, out)
        raise_pending_errors()
        some = rows[:TWIN_TILES].cpu()
        lengths = cpu.measure_tiles(some, self.host_tables)
        words = words_of_rows(lengths, self.row_words)
        bases, _ = bases_of_rows(words)
        data = cpu.encode_tiles(some, self.host_tables, lengths, bases, int(bases[-1]))
        twin = torch.empty_like(some)
        cpu.decode_tiles(
            data,
            words.cumsum(0) - words,
            torch.where(lengths == 0, 0, words),
            torch.arange(TWIN_TILES),
            self.host_tables,
            twin,
        )
        found = packed.words[: int(bases[-1])].cpu()
        in_one_pass, _, ends = self.kernels.pack_tiles(rows, self.tables)
        if not torch.equal(in_one_pass[: int(ends[-1])], packed.words[: int(ends[-1])]):
            raise SystemExit("packing in one pass writes other bytes")
        if not torch.equal(out[:TWIN_TILES].cpu(), twin) or not torch.equal(found, data[:-4]):
            raise SystemExit("the twin writes or decodes other bytes")
        back = out.view(x.dtype).view(x.shape)
        if self.plan.format.lossless:
            if not torch.equal(back.view(torch.int16), x.view(torch.int16)):
                raise SystemExit("a lossless value has other bits")
            return
        for given, got in zip(
            torch.split(x, 128 * HEADS), torch.split(back, 128 * HEADS), strict=True
        ):
            by_head = given.view(-1, HEADS, *x.shape[1:])
            steps, _ = steps_and_centers(by_head, self.tables)
            apart = (got.float() - given.float()).abs().view(by_head.shape)
            bound = 0.5 * steps + 1.01 * 2.0**-8 * by_head.float().abs().clamp(min=2.0**-126)
            if not (apart <= 1.01 * bound).all():
                raise SystemExit("a decoded value is beyond its bound")


def tile_row(case: Case, coder: str, copy: float, reps: int) -> dict[str, Any]:
    """Measure one plan."""
    inputs, n = case.inputs, len(case.inputs[0])
    plan, bits = case.fit(coder)
    tiles = Tiles(plan)
    rows = [x.view(torch.uint8).view(n, -1) for x in inputs]
    packed = [tiles.pack(r) for r in rows]
    tiles.check(inputs[0], rows[0], packed[0])
    raw_bytes = rows[0].nbytes
    sizes = [p.words.shape[0] for p in packed]
    moved = 4 * sum(sizes) / SETS
    out = torch.empty_like(rows[0])
    kernels, tables = tiles.kernels, tiles.tables

    def encode(i: int) -> torch.Tensor:
        p = packed[i % SETS]
        assert p.lengths is not None and p.bases is not None
        return kernels.encode_tiles(rows[i % SETS], tables, p.lengths, p.bases, max(sizes))

    measuring = gpu_seconds(lambda i: kernels.measure_tiles(rows[i % SETS], tables), reps)
    encoding = gpu_seconds(encode, reps)
    packing = gpu_seconds(lambda i: kernels.pack_tiles(rows[i % SETS], tables), reps)
    decoding = gpu_seconds(
        lambda i: kernels.decode_tiles(packed[i % SETS], tables, None, out), reps
    )
    ids = [torch.randperm(n, device="cuda", dtype=torch.int32) for _ in range(SETS)]
    gathering = gpu_seconds(
        lambda i: kernels.decode_tiles(packed[i % SETS], tables, ids[i % SETS], out), reps
    )
    host = [replace(p, words=p.words.cpu().pin_memory()) for p in packed[:2]]
    fetching = gpu_seconds(lambda i: kernels.decode_tiles(host[i % 2], tables, None, out), 3)
    raise_pending_errors()
    pairs = float((plan.radius[plan.block_class] > 0).mean())
    both = (raw_bytes + moved) / decoding / 1e9
    return {
        "data": case.name if coder == "huffman" else f"{case.name}, {coder}",
        "ratio": raw_bytes / moved,
        "bits": f"{16 * moved / raw_bytes:.2f}" + (f" ({bits:.2f} expected)" if bits else ""),
        "in pairs": f"{100 * pairs:.0f} %",
        "decode GB/s": raw_bytes / decoding / 1e9,
        "read+write of copy": f"{100 * both / copy:.0f} %",
        "by id GB/s": raw_bytes / gathering / 1e9,
        "measure GB/s": raw_bytes / measuring / 1e9,
        "encode GB/s": raw_bytes / encoding / 1e9,
        "pack GB/s": raw_bytes / packing / 1e9,
        "over link, packed GB/s": moved / fetching / 1e9,
    }


def lossless_row(side: str, dim: int, nbytes: int, copy: float, reps: int) -> dict[str, Any]:
    """Measure this library's lossless codec on the same values, by rows of a token."""
    n = count(dim, nbytes)
    inputs = [values(side, dim, n, seed).view(-1, dim) for seed in range(SETS)]
    codec = InvariantCodec.fit(inputs[0][:8192], chunk_bytes=2, uniform=True)
    packed = [codec.encode(x) for x in inputs]
    out = torch.empty_like(inputs[0])
    raw_bytes = out.nbytes
    moved = sum(p.nbytes for p in packed) / SETS
    decoding = gpu_seconds(lambda i: codec.decode(packed[i % SETS], out=out), reps)
    encoding = gpu_seconds(lambda i: codec.encode(inputs[i % SETS]), reps)
    return {
        "data": f"{side}, dim {dim}, lossless codec",
        "ratio": raw_bytes / moved,
        "decode GB/s": raw_bytes / decoding / 1e9,
        "read+write of copy": f"{100 * (raw_bytes + moved) / decoding / 1e9 / copy:.0f} %",
        "pack GB/s": raw_bytes / encoding / 1e9,
    }


def nvcomp_rows(dim: int, nbytes: int, reps: int) -> Rows:
    """Measure nvCOMP's ANS on the same values, or nothing when it is not installed."""
    nvcomp = _nvcomp()
    if nvcomp is None:
        return []
    n = count(dim, nbytes)
    inputs = [values("V", dim, n, seed).view(torch.int16).flatten() for seed in range(SETS)]
    return [_ans_row(nvcomp, f"V, dim {dim}, nvCOMP ANS", "<f2", inputs, reps)]


def code_rows(case: Case, reps: int) -> Rows:
    """Measure nvCOMP's ANS on the codes of a case, or nothing when it is not installed.

    Codes are bytes here, so that of finer steps the rarest ones are cut to -128 and 127.
    """
    nvcomp = _nvcomp()
    if nvcomp is None:
        return []
    tables = case.fit("huffman")[0].tables().to(torch.device("cuda"))
    inputs = [codes_of(x, tables).flatten() for x in case.inputs]
    row = _ans_row(nvcomp, f"{case.name}, codes, nvCOMP ANS", "|u1", inputs, reps)
    for name in ("ratio", "decode GB/s", "pack GB/s"):  # of bfloat16 values, of two bytes each
        row[name] *= 2
    return [row]


def codes_of(x: torch.Tensor, tables: Any) -> torch.Tensor:
    """Return tiles ``[tiles, TOKENS, dim]`` of all heads in turn quantised, as uint8."""
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    for given, out in zip(
        torch.split(x, 128 * HEADS), torch.split(codes, 128 * HEADS), strict=True
    ):
        by_head = given.view(-1, HEADS, *x.shape[1:])
        steps, centers = steps_and_centers(by_head, tables)
        found = ((by_head.float() - centers) / steps).round().clamp(-128, 127)
        out.view(by_head.shape).copy_(found)
    return codes.view(torch.uint8)


def _nvcomp() -> Any:
    """Return nvCOMP, or None when it is not installed, which is said."""
    try:
        from nvidia import nvcomp
    except ImportError as error:
        print(f"nvCOMP: left out: {error}", file=sys.stderr)
        return None
    return nvcomp


def _ans_row(
    nvcomp: Any, name: str, kind: str, inputs: list[torch.Tensor], reps: int
) -> dict[str, Any]:
    row = nvcomp_row(nvcomp, name, "ANS", kind, inputs, reps)
    row["pack GB/s"] = row.pop("encode GB/s")
    del row["plan"]
    return row


def run(arguments: argparse.Namespace) -> dict[str, Rows]:
    """Return the tables of this part; `arguments` has `gpu_bytes`, `repetitions` and `map`."""
    nbytes, reps = arguments.gpu_bytes, arguments.repetitions
    copy = copy_gbps(nbytes, reps)
    rows: Rows = [
        {"data": f"plain copy: {copy:,.0f} GB/s read+write", "read+write of copy": "100 %"}
    ]

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(row, file=sys.stderr, flush=True)

    for dim, steps in (ALL if arguments.map else FEW).items():
        for side in ("K", "V"):
            inputs = [values(side, dim, count(dim, nbytes), seed) for seed in range(SETS)]
            for step in steps:
                case = normal(side, dim, step, inputs)
                for row in (tile_row(case, "huffman", copy, reps), *code_rows(case, reps)):
                    add(row)
            for coder in ("fixed", "lossless"):
                add(tile_row(normal(side, dim, 1.0, inputs), coder, copy, reps))
            del inputs
            add(lossless_row(side, dim, nbytes, copy, reps))
        for row in nvcomp_rows(dim, nbytes, reps):
            add(row)
    try:
        for side in ("K", "V"):
            case = smollm2(side, nbytes)
            for coder in ("huffman", "fixed", "lossless"):
                add(tile_row(case, coder, copy, reps))
            for row in code_rows(case, reps):
                add(row)
    except ModelMissingError as error:
        print(f"SmolLM2: left out: {error}", file=sys.stderr)
    return {"Coded tiles of K and V, bfloat16": rows}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=7, help="timed runs of each row")
    parser.add_argument("--gpu-bytes", type=int, default=1 << 30, help="raw bytes of an input")
    parser.add_argument("--map", action="store_true", help="heads of 64, and more steps")
    add_output(parser)
    arguments = parser.parse_args()
    print_tables(run(arguments), arguments.json, arguments.out)


if __name__ == "__main__":
    main()
