"""Write the golden files: packed rows that every later version must decode.

Run by hand, from the root of the repository, when a codec or a format version is added::

    python tests/golden/make_golden.py

A file that is there is never written again; there is no reason to change one, because bytes that
were written remain readable. test_golden.py reads the files with what is defined here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bitslab
from bitslab.engine.codecs import TileCodec
from bitslab.engine.codecs.invariant import Profile
from bitslab.engine.kernels.format import RowFormat

FOLDER = Path(__file__).parent
ROWS = 3
#: Chunks of a row by their width: of two groups, one short, where that is cheap to keep. Bytes need
#: more chunks than that to be packed at all.
CHUNKS = {1: 131, 2: 33, 4: 33, 8: 33}
FEW_CHUNKS = {1: 131, 2: 33, 4: 9, 8: 5}  # with a mask for each and no group bits

#: Of coded tiles: granularity, dtype, further options; every granularity and dtype, both ways to
#: pair, classes of pairs and of singles, both coders, heads.
TILES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "tiles1-channel-bfloat16": ("channel", torch.bfloat16, {"scale": 1.5, "heads": 2}),
    "tiles1-channel-float32-singles": ("channel", torch.float32, {"scale": 0.1}),
    "tiles1-token_level-bfloat16-tokens": (
        "token_level",
        torch.bfloat16,
        {"scale": 1.2, "token_pairs": True, "heads": 2, "rows_per_head": 2},
    ),
    "tiles1-token_level-float16-fixed": (
        "token_level",
        torch.float16,
        {"scale": 0.5, "coder": "fixed"},
    ),
    "tiles1-block_range-float32-tokens": (
        "block_range",
        torch.float32,
        {"scale": 0.2, "token_pairs": True, "code_bits": 8},
    ),
    "tiles1-channel_range-bfloat16": ("channel_range", torch.bfloat16, {"scale": 0.25}),
    "tiles1-token_range-float16-tokens": (
        "token_range",
        torch.float16,
        {"scale": 0.3, "token_pairs": True},
    ),
    "tiles1-lossless-bfloat16": ("lossless", torch.bfloat16, {"heads": 2, "code_bits": 8}),
    "tiles1-lossless-float16-tokens": ("lossless", torch.float16, {"token_pairs": True}),
}
TILE_SHAPE = (16, 32)

Case = tuple[bitslab.RowCodec, torch.Tensor]


def formats() -> Iterator[RowFormat]:
    """Every chunk width with every code width; of the switches a half and its opposite."""
    for i, (width, code_bits) in enumerate(product((1, 2, 4, 8), (1, 2, 3))):
        switches = (bool(i & 1), bool(i & 2), bool((i + i // 4) & 1))
        for flip in (False, True):
            grouped, uniform, clustered = (switch != flip for switch in switches)
            chunks = (CHUNKS if grouped or uniform else FEW_CHUNKS)[width]
            clusters = 2 if clustered else 1
            yield RowFormat(chunks * width, width, code_bits, grouped, uniform, clusters)


def name_of(fmt: RowFormat) -> str:
    words = ["ibp1", f"{fmt.chunk_bytes}B", f"k{fmt.code_bits}"]
    words.append("uniform" if fmt.uniform else "positional")
    words += ["grouped"] if fmt.grouped else []
    words += [f"x{fmt.clusters}"] if fmt.clusters > 1 else []
    return "-".join(words)


def names() -> list[str]:
    """Return the names of all golden files, without the ending."""
    return ["raw1", *TILES, *map(name_of, formats())]


def make_invariant(fmt: RowFormat) -> Case:
    """One row with few exceptions, one with all values and more exceptions, one that is raw."""
    rng = np.random.default_rng(list(name_of(fmt).encode()))
    dtype = np.dtype(f"<u{fmt.chunk_bytes}")

    def draw(*shape: int) -> np.ndarray:
        size = int(np.prod(shape)) * fmt.chunk_bytes
        return rng.integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(shape)

    masks = draw(fmt.clusters, fmt.positions) | draw(fmt.clusters, fmt.positions)
    if fmt.uniform:  # one run of ones, as of an exponent, and scattered bits
        width = 8 * fmt.chunk_bytes
        masks[0] = ((1 << (width * 5 // 8)) - 1) << (width // 8)
    values = draw(fmt.clusters, fmt.positions, fmt.values) & masks[..., None]
    rows = draw(ROWS, fmt.chunks)
    for r, (share, most) in enumerate(((0.97, 1), (0.9, fmt.values))):
        cluster = r % fmt.clusters
        code = rng.integers(0, most, fmt.chunks)
        value = np.broadcast_to(values[cluster], (fmt.chunks, fmt.values))
        value = np.take_along_axis(value, code[:, None], 1)[:, 0]
        hit = rng.random(fmt.chunks) < share
        rows[r] = np.where(hit, (rows[r] & ~masks[cluster]) | value, rows[r])
    raw = torch.from_numpy(rows.view(np.uint8).reshape(ROWS, fmt.row_bytes).copy())
    codec = bitslab.InvariantCodec(Profile(fmt, masks, values), (fmt.row_bytes,), torch.uint8)
    return codec, raw


def make_tiles(name: str) -> Case:
    """Two usual tiles of each head, one with exceptions, one that is raw."""
    granularity, dtype, options = TILES[name]
    rng = np.random.default_rng(list(name.encode()))
    spread = 2.0 ** rng.integers(-2, 2, TILE_SHAPE[1])
    x = torch.from_numpy(rng.normal(0, 1, (44, *TILE_SHAPE)) * spread).to(dtype)
    codec = TileCodec.fit(x[4:], granularity=granularity, **options)
    rows = x[:4].clone()
    for k, value in enumerate((float("nan"), float("inf"), float("-inf"), 30000.0, -0.0)):
        rows[2].view(-1)[k * 97 :: 311] = value
    width = 8 * dtype.itemsize
    bits = rng.integers(0, 256, rows[3].nbytes, dtype=np.uint8).view(f"<u{width // 8}")
    infinity = torch.tensor(float("inf")).to(dtype).view(getattr(torch, f"int{width}"))
    bits |= bits.dtype.type(int(infinity))  # NaN of all kinds
    rows[3] = torch.from_numpy(bits.view(np.uint8)).view(dtype).view(TILE_SHAPE)
    return codec, rows


def make(name: str) -> Case:
    if name in TILES:
        return make_tiles(name)
    if name == "raw1":
        numbers = [[0.0, -0.0, 1.5], [float("inf"), float("-inf"), float("nan")]]
        return bitslab.RawCodec((3,), torch.bfloat16), torch.tensor(numbers, dtype=torch.bfloat16)
    return make_invariant(next(fmt for fmt in formats() if name_of(fmt) == name))


def tensor_to_json(t: torch.Tensor) -> dict[str, Any]:
    data = t.contiguous().view(torch.uint8).numpy().tobytes()
    name = str(t.dtype).removeprefix("torch.")
    return {"dtype": name, "shape": list(t.shape), "data": base64.b64encode(data).decode()}


def tensor_from_json(content: Mapping[str, Any]) -> torch.Tensor:
    data = bytearray(base64.b64decode(content["data"]))
    flat = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, content["dtype"]))
    return flat.view(content["shape"])


def write(name: str) -> bool:
    """Write a file that is not there yet."""
    path = FOLDER / f"{name}.json"
    if path.exists():
        return False
    codec, rows = make(name)
    packed = codec.encode(rows)
    content = {
        "codec": codec.name,
        "config": codec.to_config(),
        "rows": tensor_to_json(rows),
        "parts": {key: tensor_to_json(part) for key, part in packed.parts.items()},
    }
    if codec.error_bound is not None:
        content["decoded"] = tensor_to_json(codec.decode(packed))
    path.write_text(json.dumps(content, indent=1) + "\n")
    return True


def main() -> None:
    for name in names():
        print(("wrote " if write(name) else "kept  ") + name)


if __name__ == "__main__":
    main()
