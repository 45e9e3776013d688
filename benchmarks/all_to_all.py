"""How small the messages of an all-to-all become, and how fast they are made.

python benchmarks/all_to_all.py                 # sizes and rates on this machine's processors
python benchmarks/all_to_all.py --only ratio    # sizes alone
python benchmarks/all_to_all.py --only bounds   # by class and by decay function
python benchmarks/all_to_all.py --only tables   # by method, as Table V of the SC'24 paper
python benchmarks/all_to_all.py --only links    # whole exchanges between two ranks
python benchmarks/all_to_all.py --only gpu      # rates of all messages of a step on a GPU

Data is looked for in the folder $BITSLAB_DATA, or shared/data next to the repo, below recsys/.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from all_to_all_gpu import gpu
from all_to_all_links import NCCL_LINKS, links
from codec_ratio import find
from timing import print_tables

from bitslab.distributed import AdaptiveBound, drop, linear, logarithmic, stepwise
from bitslab.distributed.wire import DESCRIPTOR_BYTES
from bitslab.engine.codecs import BlobCodec, BoundedVectorCodec, VectorLzCodec
from bitslab.engine.codecs.blob import HEADER_BYTES

DESTINATIONS = (1, 8, 32)
RELATIVE = 0.03
WINDOWS = (32, 64, 128, 255, None)
#: By payload: the least ratios within a bound, and of every bit, to 1, 8 and 32 destinations.
TARGETS = {
    "EMB_1": ((35, 22, 17.5), (2.4, 1.5, 1.25)),
    "EMB_8": ((260, 110, 42), (90, 19, 6.5)),
    "EMB_5": ((1200, 400, 110), (600, 115, 30)),
    "ML-1M users": ((21, 11, 9.3), None),
    "ML-1M items": ((22, 12.5, 11), None),
}
EMB = {"EMB_1": "EMB_1_iter_20.bin", "EMB_8": "EMB_8_iter_20.bin.TB", "EMB_5": "EMB_5_iter_20.bin"}
#: Rates of two cores, MB/s of float32: encode, decode.
RATES = {"EMB_1, tiled": (700, 1200), "normal, no repeats": (200, 250)}

Table = list[dict[str, Any]]


def payloads() -> dict[str, torch.Tensor]:
    """Return the rows that a rank looks up in a step, float32 [2048, dim]."""
    found = {
        name: torch.from_numpy(np.fromfile(find("recsys", file), np.float32).reshape(2048, 64))
        for name, file in EMB.items()
    }
    events = np.loadtxt(find("recsys", "ml-100k-u.data"), dtype=np.int64)[:2048]
    for column, kind in enumerate(("user", "item")):
        name = f"ml-1m_MLP_64-32-16-8__{kind}_embedding_{kind}_embedding_W.npy"
        rows = np.load(find("recsys", name)).astype(np.float32)[events[:, column]]
        found[f"ML-1M {kind}s"] = torch.from_numpy(rows)
    return found


def message_bytes(codec: BlobCodec, rows: torch.Tensor, destinations: int) -> int:
    """Return the bytes of messages to so many destinations, without their descriptors."""
    found = 0
    for part in rows.chunk(destinations):
        blob = codec.encode(part)
        decoded = codec.decode(blob)
        errors = (decoded.double() - part.double()).abs()
        assert bool((errors <= codec.bounds(part)).all())
        found += min(blob.nbytes - HEADER_BYTES, part.nbytes)
    return found


def zstd_bytes(rows: torch.Tensor, destinations: int) -> int:
    return sum(len(zstd(part.numpy().tobytes())) for part in rows.chunk(destinations))


def zstd(data: bytes) -> bytes:
    import zstandard  # not where links alone are measured

    return zstandard.ZstdCompressor(level=3).compress(data)


def verdict(ratio: float, least: float | None) -> str:
    return "" if least is None else f">= {least}x: {'ok' if ratio >= least else 'missed'}"


def ratio() -> dict[str, Table]:
    """Return sizes: within a bound and of every bit, and by window."""
    bounded: Table = []
    exact: Table = []
    windows: Table = []
    for name, rows in payloads().items():
        bound = RELATIVE * float(rows.max() - rows.min())
        least_bounded, least_exact = TARGETS[name]
        for i, n in enumerate(DESTINATIONS):
            plain = message_bytes(BoundedVectorCodec(bound, references=False), rows, n)
            near = message_bytes(BoundedVectorCodec(bound, window=255), rows, n)
            best = message_bytes(BoundedVectorCodec(bound), rows, n)
            descriptors = DESCRIPTOR_BYTES * n
            bounded.append(
                {
                    "payload": name,
                    "destinations": n,
                    "no references": rows.nbytes / plain,
                    "window 255": rows.nbytes / near,
                    "ratio": rows.nbytes / best,
                    "with descriptors": rows.nbytes / (best + descriptors),
                    "target": verdict(rows.nbytes / (best + descriptors), least_bounded[i]),
                }
            )
            size = message_bytes(VectorLzCodec(), rows, n)
            exact.append(
                {
                    "payload": name,
                    "destinations": n,
                    "zstd -3": rows.nbytes / zstd_bytes(rows, n),
                    "ratio": rows.nbytes / size,
                    "with descriptors": rows.nbytes / (size + descriptors),
                    "target": verdict(
                        rows.nbytes / (size + descriptors),
                        None if least_exact is None else least_exact[i],
                    ),
                }
            )
        sizes = [message_bytes(BoundedVectorCodec(bound, window=w), rows, 1) for w in WINDOWS]
        labels = [str(w) if w else "unlimited" for w in WINDOWS]
        windows.append(
            {"payload": name}
            | {label: rows.nbytes / size for label, size in zip(labels, sizes, strict=True)}
        )
    return {
        f"Within {RELATIVE} of the range": bounded,
        "Every bit": exact,
        "By window, one destination": windows,
    }


def best_s(work: Callable[[], Any], repeats: int = 15) -> float:
    """Return the least seconds of several calls."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def cpu() -> dict[str, Table]:
    """Return rates of encoding and decoding 16 MB."""
    given = {
        "EMB_1, tiled": payloads()["EMB_1"].repeat(32, 1),
        "normal, no repeats": torch.randn(65536, 64, generator=torch.Generator().manual_seed(1)),
    }
    table: Table = []
    for name, rows in given.items():
        bound = RELATIVE * float(rows.max() - rows.min())
        for codec in (BoundedVectorCodec(bound), VectorLzCodec()):
            blob = codec.encode(rows)
            out = torch.empty_like(rows)
            encode = rows.nbytes / 1e6 / best_s(partial(codec.encode, rows))
            decode = rows.nbytes / 1e6 / best_s(partial(codec.decode, blob, out))
            line = {
                "rows": name,
                "codec": codec.name,
                "ratio": blob.raw_nbytes / blob.nbytes,
                "encode MB/s": encode,
                "decode MB/s": decode,
                "target": "",
            }
            if codec.error_bound is not None:
                least_encode, least_decode = RATES[name]
                ok = encode >= least_encode and decode >= least_decode
                line["target"] = f">= {least_encode}, {least_decode}: {'ok' if ok else 'missed'}"
            table.append(line)
    return {f"Rates of {torch.get_num_threads()} threads": table}


#: Bounds of classes and the global one, as shares of the range (section IV-B of the paper).
CLASS_BOUNDS = {"large": 0.05, "medium": 0.03, "small": 0.01}
GLOBAL_BOUND = 0.02
#: Of the initial phase of a schedule, at which sizes are measured: two in each step.
DECAY_POINTS = 20
SCHEDULES = {"linear": linear, "logarithmic": logarithmic, "stepwise": stepwise, "drop": drop}


def bounds() -> dict[str, Table]:
    """Return ratios by class beside one bound for all, and over schedules (figures 9 and 10)."""
    classes: Table = []
    decay: Table = []
    adaptive = AdaptiveBound()
    for name, rows in payloads().items():
        index, kind = adaptive.classify(rows)

        def ratio_at(share: float, rows: torch.Tensor = rows) -> float:
            codec = BoundedVectorCodec(share, relative=True)
            return rows.nbytes / (message_bytes(codec, rows, 1) + DESCRIPTOR_BYTES)

        by_class = {f"{kind} {bound}": ratio_at(bound) for kind, bound in CLASS_BOUNDS.items()}
        own = ratio_at(CLASS_BOUNDS[kind])
        classes.append(
            {"payload": name, "index": index, "class": kind}
            | by_class
            | {f"global {GLOBAL_BOUND}": ratio_at(GLOBAL_BOUND), "by class": own}
        )
        line: dict[str, Any] = {"payload": name, "constant": own}
        for schedule, make in SCHEDULES.items():
            factor = make(DECAY_POINTS)
            seen = [ratio_at(CLASS_BOUNDS[kind] * factor(i)) for i in range(DECAY_POINTS)]
            line[schedule] = len(seen) / sum(1 / ratio for ratio in seen)
        decay.append(line)
    return {
        "By class and with one bound for all, one destination": classes,
        "Over the initial phase from twice the bound, by decay function, one destination": decay,
    }


#: Of the published vector-LZ.
PAPER_WINDOW = 255
#: Of a table of the paper, its bound there: Table V is measured at the bounds of its classes.
PAPER_BOUNDS = {"EMB_1": 0.03, "EMB_8": 0.05, "EMB_5": 0.05}
#: What Table V has of these tables: vector-LZ, Huffman.
PAPER_RATIOS = {"EMB_1": 21.44, "EMB_8": 124.77, "EMB_5": 915.47}


def vector_lz_bytes(codes: np.ndarray[Any, Any], width: int, window: int | None) -> int:
    """Return the bytes of codes ``[N, row]`` as the paper writes them: references, fixed fields.

    A reference names one of the last `window` rows; None: any row before, by its number.
    """
    last: dict[bytes, int] = {}
    most = len(codes) if window is None else window
    reference_bits = max(1, (most - 1).bit_length())
    bits = 0
    for i, row in enumerate(codes):
        key = row.tobytes()
        near = i - last.get(key, -most - 1) <= most
        bits += 1 + (reference_bits if near else len(row) * width)
        last[key] = i
    return bits // 8


def by_method() -> dict[str, Table]:
    """Return ratios by method of the three tables of which dumps can be had."""
    table: Table = []
    rows_of = payloads()
    for name, share in PAPER_BOUNDS.items():
        rows = rows_of[name]
        bound = share * float(rows.max() - rows.min())
        codes = torch.round(rows.double() / (2 * bound)).to(torch.int16).numpy()
        width = max(1, int(codes.max() - codes.min()).bit_length())
        small = (codes - codes.min()).astype(np.uint8).tobytes()
        sizes = {
            "vector-LZ, window 255": vector_lz_bytes(codes, width, PAPER_WINDOW),
            "Huffman": message_bytes(BoundedVectorCodec(bound, references=False), rows, 1),
        }
        sizes["the better one (paper)"] = min(sizes.values())
        sizes["vector-LZ, any window"] = vector_lz_bytes(codes, width, None)
        sizes["references, then Huffman"] = message_bytes(BoundedVectorCodec(bound), rows, 1)
        sizes["Deflate of codes"] = len(zlib.compress(small))
        sizes["zstd -3 of codes"] = len(zstd(small))
        ratios = {method: rows.nbytes / n for method, n in sizes.items()}
        table.append({"table": name, "bound": share, "paper": PAPER_RATIOS[name]} | ratios)
    means = {key: len(table) / sum(1 / line[key] for line in table) for key in list(table[0])[2:]}
    table.append({"table": "harmonic mean of 3", "bound": ""} | means)
    return {
        "By method, 3 of the paper's 26 tables, one destination": table,
        "Narrower elements": narrower(rows_of),
    }


def narrower(rows_of: dict[str, torch.Tensor]) -> Table:
    """Return ratio and error of halves, and of bytes with a scale and a least value a row."""
    found: Table = []
    for name, rows in rows_of.items():
        spread = float(rows.max() - rows.min())
        least = rows.amin(1, keepdim=True)
        scale = ((rows.amax(1, keepdim=True) - least) / 255).clamp(min=1e-30)
        as_bytes = torch.round((rows - least) / scale) * scale + least
        for kind, decoded, row_bytes in (
            ("fp16", rows.half().float(), 2 * rows.shape[1]),
            ("int8 by row", as_bytes, rows.shape[1] + 8),
        ):
            error = float((decoded - rows).abs().max()) / spread
            ratio = 4 * rows.shape[1] / row_bytes
            found.append(
                {"payload": name, "kind": kind, "ratio": ratio, "largest error / range": error}
            )
    return found


PARTS: dict[str, Callable[[], dict[str, Table]]] = {
    "ratio": ratio,
    "cpu": cpu,
    "bounds": bounds,
    "tables": by_method,
    "gpu": gpu,
    "links": links,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=("ratio", "cpu"))
    parser.add_argument(
        "--links", nargs="+", choices=(*NCCL_LINKS, "gloo"), help="of the part links; default: all"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--out", type=Path, help="file to write to as well")
    options = parser.parse_args()
    parts = PARTS | {"links": partial(links, options.links)}
    tables = {k: v for name in options.only for k, v in parts[name]().items()}
    print_tables(tables, options.json, options.out)


if __name__ == "__main__":
    main()
