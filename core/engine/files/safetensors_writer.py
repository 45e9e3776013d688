"""Safetensors files, written so that the same content has the same bytes.

The safetensors library puts metadata in the order of a hash table that begins anew in every
process. Here the header is in order: metadata by key, tensors by the size of their elements, the
widest first, so that each lies where it can be mapped, and then by name.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

import torch

from ...dtypes import dtype_name, flat_bytes
from ...errors import ArgumentError
from .new_file import PathLike

#: What the safetensors library reads.
MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"
#: Bytes of a tensor that are copied at a time where it does not lie in order in host memory.
PIECE_BYTES = 4 << 20

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}


def can_store(dtype: torch.dtype) -> bool:
    """Return whether safetensors has a name for a dtype."""
    return dtype_name(dtype) in _NAMES


def write_safetensors(
    path: PathLike,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    pieces: Mapping[str, Iterable[torch.Tensor]] | None = None,
) -> None:
    """Write a safetensors file; the same content always gives the same bytes.

    Parameters
    ----------
    path : str or os.PathLike
        Written in place; see `new_file` for files that appear whole.
    tensors : mapping of str to torch.Tensor
        Dense, on any device; a tensor under several names is written under each.
    metadata : mapping of str to str, optional
        For the file's header.
    pieces : mapping of str to iterable of torch.Tensor, optional
        What is written in place of the tensors of these names, which may be on the meta device:
        their elements in order, some at a time.

    Raises
    ------
    ArgumentError
        When safetensors cannot hold a dtype or a name, or the header is too long.
    OSError
        When the file cannot be written.
    """
    header: dict[str, Any] = {}
    if metadata:
        header[METADATA] = dict(sorted(metadata.items()))
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    end = 0
    for name in names:
        t = tensors[name]
        if name == METADATA:
            raise ArgumentError(f"tensors: the name {name!r} is taken by safetensors")
        if not can_store(t.dtype):
            raise ArgumentError(f"{name}: safetensors has no {dtype_name(t.dtype)}")
        begin, end = end, end + t.numel() * t.dtype.itemsize
        described = {"dtype": _NAMES[dtype_name(t.dtype)], "shape": list(t.shape)}
        header[name] = described | {"data_offsets": [begin, end]}
    text = _as_text(header)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            given = None if pieces is None else pieces.get(name)
            for piece in _pieces(tensors[name]) if given is None else given:
                _write(file, piece)
        if file.tell() != 8 + len(text) + end:
            raise OSError(errno.EIO, "its size is not what was to be written", os.fspath(path))


def _as_text(header: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        part = error.object[max(error.start - 20, 0) : error.end + 20]
        raise ArgumentError(f"names and metadata: {part!r} cannot be written as UTF-8") from error
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ArgumentError(
            f"tensors: the file's header would have {len(text)} bytes, safetensors reads "
            f"{MAX_HEADER_BYTES}; use several files"
        )
    return text


def _pieces(t: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in order, some at a time."""
    flat = t.detach().resolve_conj().resolve_neg().reshape(-1)
    step = max(1, PIECE_BYTES // t.dtype.itemsize)
    for begin in range(0, len(flat), step):
        yield flat[begin : begin + step]


def _write(file: BinaryIO, piece: torch.Tensor) -> None:
    file.write(flat_bytes(piece.cpu()).numpy().data)
