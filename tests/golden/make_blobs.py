"""Write the golden files of whole tensors: blobs that every later version must decode.

Run by hand, from the root of the repository, when a codec of whole tensors is added::

    python tests/golden/make_blobs.py

As with make_golden.py, a file that is there is never written again. test_blob_golden.py reads them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bitslab.engine.codecs import (
    BlobCodec,
    BoundedVectorCodec,
    ChainCodec,
    CsrCodec,
    InvariantBlobCodec,
    Lz4Codec,
    RleCodec,
    VectorLzCodec,
    ZfpCodec,
    ZvcCodec,
)
from tests.helpers import bits_of

FOLDER = Path(__file__).parent / "blobs"


def sparse(dtype: torch.dtype, n: int, every: int = 1) -> torch.Tensor:
    """Half zeros, -0.0, a NaN and an infinity; else numbers close in size, of which some remain."""
    t = torch.randn(n, generator=torch.Generator().manual_seed(n)).relu()
    t[torch.arange(n) % every > 0] = 0
    t[1], t[4], t[n - 1] = -0.0, float("nan"), float("inf")
    return t.to(dtype)


def repeated(dtype: torch.dtype, distinct: int, n: int, row: int) -> torch.Tensor:
    """Rows of which many are equal; one has a NaN, one an infinity."""
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(distinct, row, generator=generator)
    if dtype.is_floating_point:
        rows[1, 1], rows[2, 0] = float("nan"), float("inf")
    else:
        rows *= 1000
    return rows.to(dtype)[torch.arange(n) ** 2 % distinct]


def bools(n: int) -> torch.Tensor:
    return torch.arange(n) % 3 == 0


def packed(
    cls: type[InvariantBlobCodec] | type[ChainCodec], t: torch.Tensor, code_bits: int
) -> tuple[BlobCodec, torch.Tensor]:
    return cls.fit(t, code_bits=code_bits), t


#: By name: the codec, and the tensor.
CASES: dict[str, Callable[[], tuple[BlobCodec, torch.Tensor]]] = {
    "zvc1-1B": lambda: (ZvcCodec(), sparse(torch.float8_e5m2, 300)),
    "zvc1-2B": lambda: (ZvcCodec(), sparse(torch.bfloat16, 300)),
    "zvc1-4B": lambda: (ZvcCodec(), sparse(torch.float32, 2100)),  # two blocks
    "zvc1-8B": lambda: (ZvcCodec(), sparse(torch.float64, 100)),
    "zvc1-16B": lambda: (ZvcCodec(), sparse(torch.complex128, 50)),
    "zvc1-bool": lambda: (ZvcCodec(), bools(1000)),
    "zvc1-empty": lambda: (ZvcCodec(), torch.zeros(3, 0)),
    "ibp-blob1-2B": lambda: packed(InvariantBlobCodec, torch.randn(1100).bfloat16(), 3),
    "ibp-blob1-4B-grouped": lambda: packed(InvariantBlobCodec, sparse(torch.float32, 600), 1),
    "ibp-blob1-tail": lambda: packed(InvariantBlobCodec, torch.ones(10), 1),
    "zvc+ibp1-2B": lambda: packed(ChainCodec, sparse(torch.bfloat16, 2200), 3),
    "zvc+ibp1-8B": lambda: packed(ChainCodec, sparse(torch.float64, 600), 2),
    "csr1-1B": lambda: (CsrCodec(), sparse(torch.float32, 300, 8).to(torch.float8_e5m2)),
    "csr1-2B": lambda: (CsrCodec(), sparse(torch.bfloat16, 300, 8)),
    "csr1-4B": lambda: (CsrCodec(), sparse(torch.float32, 4200, 8)),  # two rows
    "csr1-16B": lambda: (CsrCodec(), sparse(torch.complex128, 50)),
    "csr1-raw": lambda: (CsrCodec(), torch.arange(1, 9)),
    "csr1-zeros": lambda: (CsrCodec(), torch.zeros(7, 3)),
    "rle1-1B": lambda: (RleCodec(), torch.arange(900).div(300).byte()),
    "rle1-4B": lambda: (RleCodec(), sparse(torch.float32, 700).repeat_interleave(6)),  # two rows
    "rle1-8B": lambda: (RleCodec(), torch.arange(40).repeat_interleave(3)),
    "rle1-raw": lambda: (RleCodec(), torch.arange(9)),
    "lz4-4B": lambda: (Lz4Codec(), sparse(torch.float32, 1 << 14, 97).repeat(2)),  # two blocks
    "lz4-raw": lambda: (Lz4Codec(), torch.arange(9).byte()),
    "lz4-empty": lambda: (Lz4Codec(), torch.zeros(0)),
    "zfp1-float32": lambda: (ZfpCodec(37), sparse(torch.float32, 203)),
    "zfp1-float64": lambda: (ZfpCodec(96), sparse(torch.float64, 102)),
    "zfp1-float16": lambda: (ZfpCodec(33), sparse(torch.float16, 301)),
    "zfp1-bfloat16": lambda: (ZfpCodec(24), torch.arange(50).sin().bfloat16()),
    "zfp1-raw": lambda: (ZfpCodec(64), sparse(torch.bfloat16, 40)),
    "vlz1-raw": lambda: (VectorLzCodec(), torch.arange(6).byte()),
    "vlz1-index": lambda: (VectorLzCodec(), repeated(torch.float32, 40, 30, 8)),
    "vlz1-window": lambda: (VectorLzCodec(32), repeated(torch.bfloat16, 9, 60, 8)),
    "vlz1-coded": lambda: (VectorLzCodec(), repeated(torch.int64, 3, 200, 4)),
    "vlzq1-huffman": lambda: (BoundedVectorCodec(0.25), repeated(torch.float32, 20, 150, 64)),
    "vlzq1-fixed": lambda: (BoundedVectorCodec(1e-3), repeated(torch.float16, 30, 40, 8)),
    "vlzq1-relative": lambda: (
        BoundedVectorCodec(0.05, relative=True, window=64),
        repeated(torch.bfloat16, 30, 70, 16),
    ),
    "zvc1-scalar": lambda: (ZvcCodec(), torch.tensor(2.5)),
}


def tensor_to_json(t: torch.Tensor) -> dict[str, Any]:
    data = base64.b64encode(bits_of(t).numpy().tobytes()).decode()
    return {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape), "data": data}


def tensor_from_json(content: Mapping[str, Any]) -> torch.Tensor:
    data = torch.tensor(list(base64.b64decode(content["data"])), dtype=torch.uint8)
    return data.view(getattr(torch, content["dtype"])).view(content["shape"])


def write(name: str) -> bool:
    """Write a golden file, unless it is there."""
    path = FOLDER / f"{name}.json"
    if path.exists():
        return False
    codec, t = CASES[name]()
    content = {
        "codec": codec.name,
        "config": codec.to_config(),
        "tensor": tensor_to_json(t),
        "data": tensor_to_json(codec.encode(t).trimmed().data),
    }
    if codec.error_bound is not None:
        content["decoded"] = tensor_to_json(codec.decode(codec.encode(t)))
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return True


def main() -> None:
    for name in CASES:
        print(("wrote " if write(name) else "kept  ") + name)


if __name__ == "__main__":
    main()
