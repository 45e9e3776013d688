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
#: Bytes before the header's text, which say how long that is.
LENGTH_BYTES = 8
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
    layout = SafetensorsLayout(tensors)
    with open(path, "wb") as file:
        file.write(layout.header(metadata))
        begin = file.tell()
        for name in layout.offsets:
            given = None if pieces is None else pieces.get(name)
            for piece in _pieces(tensors[name]) if given is None else given:
                _write(file, piece)
        if file.tell() != begin + layout.data_bytes:
            raise OSError(errno.EIO, "its size is not what was to be written", os.fspath(path))


class SafetensorsLayout:
    """Where tensors lie in a safetensors file, known before their content.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        Their dtypes and shapes count alone: they may be on the meta device.

    Attributes
    ----------
    offsets : dict of str to int
        By name, in the order of the file: where each begins, in bytes from the end of the header.
    data_bytes : int
        Bytes of all tensors.

    Raises
    ------
    ArgumentError
        When safetensors cannot hold a dtype or a name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.offsets: dict[str, int] = {}
        self.data_bytes = 0
        self._described: dict[str, Any] = {}
        for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
            t = tensors[name]
            if name == METADATA:
                raise ArgumentError(f"tensors: the name {name!r} is taken by safetensors")
            if not can_store(t.dtype):
                raise ArgumentError(f"{name}: safetensors has no {dtype_name(t.dtype)}")
            begin, end = self.data_bytes, self.data_bytes + t.numel() * t.dtype.itemsize
            described = {"dtype": _NAMES[dtype_name(t.dtype)], "shape": list(t.shape)}
            self._described[name] = described | {"data_offsets": [begin, end]}
            self.offsets[name], self.data_bytes = begin, end

    def header(self, metadata: Mapping[str, str] | None = None, least_bytes: int = 0) -> bytes:
        """Return the bytes before the tensors.

        Parameters
        ----------
        metadata : mapping of str to str, optional
            For the file's header.
        least_bytes : int
            Spaces fill a shorter header up to this, a multiple of 8.

        Raises
        ------
        ArgumentError
            When a text cannot be written as UTF-8, or the header is too long.
        """
        entries: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
        text = _as_text(entries | self._described, least_bytes - LENGTH_BYTES)
        return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _as_text(header: Mapping[str, Any], least_bytes: int) -> bytes:
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        part = error.object[max(error.start - 20, 0) : error.end + 20]
        raise ArgumentError(f"names and metadata: {part!r} cannot be written as UTF-8") from error
    text += b" " * max(-len(text) % 8, least_bytes - len(text))
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
