"""Products with packed weights: while they are decoded, after they were decoded, and plain ones."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from timing import cpu_seconds, gpu_seconds, say

from bitslab.engine.codecs import RowCodec, codec_class
from bitslab.engine.codecs.registry import fit_codec
from bitslab.engine.kernels.format import RowStorage

#: Rows and columns of a weight: those of an 8B model's layers.
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (6144, 4096))
CPU_SHAPES = ((512, 512), (1024, 512))
INPUT_ROWS = (1, 4, 16)
#: The most time that is asked for, over that of cuBLAS on the plain weight.
TARGETS = {1: 1.0, 16: 1.15}
#: Bytes of plain weights that take turns, so that none is in a cache when its turn comes.
TURN_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}


class Weight:
    """A weight of a trained model's distribution, plain and packed."""

    def __init__(
        self, shape: tuple[int, int], codec: RowCodec | None, device: torch.device
    ) -> None:
        self.plain = (torch.randn(shape, device=device) * 0.02).bfloat16()
        self.codec = codec or fit_codec(codec_class("auto"), self.plain[:512], {})
        packed = self.codec.encode(self.plain)
        parts = packed.parts
        none = torch.empty(0, dtype=torch.uint8, device=device)
        storage = RowStorage(parts["words"], parts["bases"], parts["lengths"], none)
        self.nbytes = sum(part.nbytes for part in parts.values())
        kernels = self.codec.kernels(device)
        multiply = kernels.prepare_linear(storage, self.plain.dtype, packed.facts)
        if multiply is None:
            raise SystemExit(f"{self.codec.describe()}: no product with weights packed like this")
        self.multiply = multiply
        decoded = torch.empty_like(self.plain)
        rows = decoded.view(torch.uint8).view(shape[0], kernels.row_bytes)
        decode = kernels.prepare_decode(storage, rows, packed.facts, 64)

        def after_decoding(x: torch.Tensor, out: torch.Tensor) -> None:
            decode()
            torch.mm(x, decoded.t(), out=out)

        self.after_decoding = after_decoding


def run(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return the table of all shapes and numbers of rows."""
    device = arguments.device
    on_gpu = device.type == "cuda"
    rows = []
    for shape in SHAPES if on_gpu else CPU_SHAPES:
        copies = max(2, -(-TURN_BYTES[device.type] // (2 * shape[0] * shape[1])))
        weights: list[Weight] = []
        while len(weights) < copies:
            weights.append(Weight(shape, weights[0].codec if weights else None, device))
        for x_rows in INPUT_ROWS:
            rows.append(_row(weights, x_rows, arguments.repetitions, on_gpu))
            say(str(rows[-1]))
        del weights
    return {"Products with packed weights": rows}


def _row(weights: list[Weight], x_rows: int, repetitions: int, on_gpu: bool) -> dict[str, Any]:
    n, depth = weights[0].plain.shape
    xs = [torch.randn(x_rows, depth, device=w.plain.device).bfloat16() for w in weights]
    outs = [torch.empty_like(x[:, :1].expand(x_rows, n)).contiguous() for x in xs]

    def turn(product: Callable[[Weight, torch.Tensor, torch.Tensor], object]) -> float:
        def each(i: int) -> None:
            k = i % len(weights)
            product(weights[k], xs[k], outs[k])

        seconds = gpu_seconds if on_gpu else cpu_seconds
        return 1e6 * seconds(each, max(repetitions, 3) * len(weights))

    plain = turn(lambda w, x, out: torch.mm(x, w.plain.t(), out=out))
    expected = [out.clone() for out in outs]
    decoded = turn(lambda w, x, out: w.after_decoding(x, out))
    same = all(torch.equal(out, other) for out, other in zip(outs, expected, strict=True))
    fused = turn(lambda w, x, out: w.multiply(x, None, out))
    apart = max(
        float((out - other).abs().max() / other.abs().max())
        for out, other in zip(outs, expected, strict=True)
    )
    ratio, target = fused / plain, TARGETS.get(x_rows)
    return {
        "weight": f"{n} x {depth}",
        "rows of input": x_rows,
        "plain, us": plain,
        "decoded first, us": decoded,
        "fused, us": fused,
        "fused / plain": ratio,
        "asked": "" if target is None else f"{target}: {'met' if ratio <= target else 'missed'}",
        "packed GB/s": weights[0].nbytes / fused / 1e3,
        "plain / packed bytes": weights[0].plain.nbytes / weights[0].nbytes,
        "decoded first, same bits": same,
        "fused, most apart of the largest": apart,
    }
