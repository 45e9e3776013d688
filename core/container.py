"""Files of compressed tensors: safetensors, with what bitslab needs in the file's metadata.

The parts of a compressed tensor are entries ``<name>.<part>`` of the file. The metadata has

``bitslab``
    JSON: ``version`` of the container and ``tensors``, for each name its ``shape``, ``dtype``,
    ``codec``, ``config``, ``n_rows``, ``row_elements`` and ``parts``: for each part the ``dtype``
    and ``shape`` that the codec gave it and the ``crc32`` of its bytes. A long configuration is a
    part too, called ``config``, because readers of safetensors limit the length of a header.
``bitslab_crc32``
    Checksum of all other metadata, the caller's included.
others
    The caller's.

Compatibility law: files of every older version can be read, and every version keeps these two
entries, so that any reader can tell a newer file from a damaged one.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeGuard, TypeVar

import torch

from .dtypes import dtype_from_name, dtype_name, flat_bytes
from .engine.codecs import PackedRows, RowCodec
from .engine.codecs.base import elements
from .engine.codecs.registry import get_codec
from .engine.files.new_file import PathLike
from .engine.files.safetensors_writer import write_safetensors
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    BitslabError,
    CorruptedDataError,
    load_optional,
)

CONTAINER_VERSION = 1
ENTRY = "bitslab"
CHECKSUM_ENTRY = "bitslab_crc32"
CONFIG_PART = "config"
LONG_CONFIG_BYTES = 16 << 10

#: Stored as they are; parts of other dtypes are stored as bytes, because not every version of
#: safetensors knows every dtype.
_STORED_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)

Made = TypeVar("Made")

# Writing


class PackedTensor(Protocol):
    """What a file holds of a tensor, and `write_tensors` takes."""

    @property
    def codec(self) -> RowCodec:
        """What packed the rows."""
        ...

    @property
    def packed(self) -> PackedRows:
        """The packed rows, on any device."""
        ...

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        ...


def write_tensors(
    path: PathLike, tensors: Mapping[str, PackedTensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors by name straight to `path`; not atomic.

    Raises
    ------
    ArgumentError
        When a name or metadata key cannot be stored.
    OSError
        When the file cannot be written.
    """
    stored, entries = file_entries(tensors, metadata)
    write_safetensors(path, stored, entries)


def file_entries(
    tensors: Mapping[str, PackedTensor], metadata: Mapping[str, str] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the metadata that make up the file of `tensors`."""
    entries = dict(metadata or {})
    for key, text in entries.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise ArgumentTypeError(f"metadata: {key!r}: {text!r}; keys and values must be str")
        if key in (ENTRY, CHECKSUM_ENTRY):
            raise ArgumentError(f"metadata: the key {key!r} is taken by bitslab")
    stored: dict[str, torch.Tensor] = {}
    records: dict[str, Any] = {}
    for name, ct in tensors.items():
        if not isinstance(name, str):
            raise ArgumentTypeError(f"tensors: the name {name!r} is no str")
        parts, records[name] = _record(ct)
        stored |= {f"{name}.{part}": t for part, t in parts.items()}
    entries[ENTRY] = json.dumps(
        {"version": CONTAINER_VERSION, "tensors": records}, separators=(",", ":")
    )
    entries[CHECKSUM_ENTRY] = _checksum_of(entries)
    return stored, entries


def _record(ct: PackedTensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the parts of a tensor as they are stored, and what the metadata says about it."""
    parts = {name: t.cpu().contiguous() for name, t in ct.packed.parts.items()}
    if any(not name or "." in name or name == CONFIG_PART for name in parts):
        raise ArgumentError(
            f"codec {ct.codec.name!r}: parts {sorted(parts)}; a part's name has no dot and is not "
            f"{CONFIG_PART!r}"
        )
    record: dict[str, Any] = {
        "shape": list(ct.shape),
        "dtype": dtype_name(ct.codec.dtype),
        "codec": ct.codec.name,
        "n_rows": ct.packed.n_rows,
        "row_elements": elements(ct.codec.row_shape),
    }
    config = ct.codec.to_config()
    text = json.dumps(config, separators=(",", ":")).encode()
    if len(text) > LONG_CONFIG_BYTES:
        parts[CONFIG_PART] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    else:
        record["config"] = config
    record["parts"] = {
        name: {"dtype": dtype_name(t.dtype), "shape": list(t.shape), "crc32": _crc32(t)}
        for name, t in parts.items()
    }
    return {
        name: t if t.dtype in _STORED_DTYPES else _as_bytes(t) for name, t in parts.items()
    }, record


# Reading


def read_tensors(
    path: PathLike, make: Callable[[RowCodec, PackedRows, tuple[int, ...]], Made]
) -> tuple[dict[str, Made], dict[str, str]]:
    """Read all tensors of a file and the caller's metadata.

    Parameters
    ----------
    path : str or os.PathLike
        The file.
    make : callable
        Makes a tensor of codec, packed rows and shape; a `BitslabError` that it raises says that
        the three do not fit, and so that the file is damaged. The packed rows are memory-mapped
        from the file. Every byte is read once, to compare the checksums.

    Returns
    -------
    tensors : dict of str to what `make` returns
        By name, in the order in which they were saved.
    metadata : dict of str to str
        The caller's.

    Raises
    ------
    CorruptedDataError
        When the file is truncated, altered, written by a newer version, or not by bitslab.
    OSError
        When the file cannot be read.
    MissingExtraError
        When safetensors is not installed.
    """
    where = os.fspath(path)
    load_optional("safetensors", extra=None, purpose="loading a compressed tensor")
    from safetensors import SafetensorError, safe_open

    open(where, "rb").close()  # its errors name the file, those of safetensors do not
    try:
        with safe_open(where, framework="pt") as file:
            entries = dict(file.metadata() or {})
            records = _read_records(entries)
            keys = set(file.keys())
            tensors = {
                name: _read_tensor(name, record, file, keys, make)
                for name, record in records.items()
            }
    except SafetensorError as error:
        raise CorruptedDataError(
            f"{where}: no safetensors file, or truncated or damaged: {error}"
        ) from error
    except CorruptedDataError as error:
        raise CorruptedDataError(f"{where}: {error}") from error
    if keys:
        raise CorruptedDataError(f"{where}: entries that belong to no tensor: {sorted(keys)}")
    metadata = {k: v for k, v in entries.items() if k not in (ENTRY, CHECKSUM_ENTRY)}
    return tensors, metadata


def is_compressed(path: PathLike) -> bool:
    """Return whether a file is a safetensors file that bitslab wrote; False for any other file."""
    load_optional("safetensors", extra=None, purpose="reading a safetensors file")
    from safetensors import SafetensorError, safe_open

    open(path, "rb").close()
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            return ENTRY in (file.metadata() or {})
    except SafetensorError:
        return False


def _read_records(entries: Mapping[str, str]) -> dict[str, Any]:
    """Check the metadata and return what it says about each tensor."""
    if ENTRY not in entries:
        raise CorruptedDataError(f"not written by bitslab: no {ENTRY!r} entry in its metadata")
    checked = {k: v for k, v in entries.items() if k != CHECKSUM_ENTRY}
    if entries.get(CHECKSUM_ENTRY) != _checksum_of(checked):
        raise CorruptedDataError("damaged: its metadata does not match its checksum")
    try:
        content = json.loads(entries[ENTRY])
    except (ValueError, RecursionError) as error:
        raise CorruptedDataError(f"its {ENTRY!r} entry is not JSON: {error}") from error
    version = content.get("version") if isinstance(content, dict) else None
    if not _is_count(version):
        raise CorruptedDataError(f"version is {version!r}, expected an integer")
    if version > CONTAINER_VERSION:
        raise CorruptedDataError(
            f"written in format version {version}, this bitslab reads up to version "
            f"{CONTAINER_VERSION}; a newer bitslab is needed"
        )
    records = content.get("tensors")
    if version < 1 or not isinstance(records, dict):
        raise CorruptedDataError(f"its {ENTRY!r} entry lists no tensors")
    return records


def _read_tensor(
    name: str,
    record: Any,
    file: Any,
    keys: set[str],
    make: Callable[[RowCodec, PackedRows, tuple[int, ...]], Made],
) -> Made:
    """Read and check one tensor; take the entries that belong to it out of `keys`."""
    try:
        fields = _Fields(record)
        parts = {}
        for part, described in fields.get("parts", dict).items():
            key = f"{name}.{part}"
            if key not in keys:
                raise CorruptedDataError(f"part {part!r} is missing")
            keys.discard(key)
            parts[part] = _read_part(part, _Fields(described), file.get_tensor(key))
        config = _read_config(fields, parts)
        codec = _read_codec(fields.get("codec", str), config)
        shape = fields.shape()
        _check_geometry(fields, shape, codec)
        return make(codec, codec.adopt(fields.count("n_rows"), parts), shape)
    except BitslabError as error:
        raise CorruptedDataError(f"tensor {name!r}: {error}") from error


class _Fields:
    """A JSON object that came from outside; each look-up checks the type."""

    def __init__(self, record: Any) -> None:
        if not isinstance(record, dict):
            raise CorruptedDataError(f"its description is {record!r}, expected an object")
        self.record = record

    def get(self, key: str, kind: type) -> Any:
        found = self.record.get(key)
        if not isinstance(found, kind):
            raise CorruptedDataError(f"{key} is {found!r}, expected {kind.__name__}")
        return found

    def count(self, key: str) -> int:
        found = self.record.get(key)
        if not _is_count(found):
            raise CorruptedDataError(f"{key} is {found!r}, expected a non-negative integer")
        return found

    def shape(self) -> tuple[int, ...]:
        shape = self.get("shape", list)
        if not all(_is_count(size) for size in shape):
            raise CorruptedDataError(f"shape is {shape!r}, expected non-negative integers")
        # 16 is the widest element; more than this, torch cannot count, empty or not.
        if elements([max(size, 1) for size in shape]) * 16 >= 1 << 63:
            raise CorruptedDataError(f"shape {shape} is too large")
        return tuple(shape)


def _read_part(part: str, fields: _Fields, stored: torch.Tensor) -> torch.Tensor:
    """Check a part against its description and return it as the codec made it."""
    dtype, shape = dtype_from_name(fields.get("dtype", str)), fields.shape()
    as_bytes = dtype not in _STORED_DTYPES
    expected = (elements(shape) * dtype.itemsize,) if as_bytes else shape
    if stored.dtype != (torch.uint8 if as_bytes else dtype) or tuple(stored.shape) != expected:
        raise CorruptedDataError(
            f"part {part!r} is {list(stored.shape)} {stored.dtype}, expected {list(shape)} {dtype}"
        )
    if _crc32(stored) != fields.count("crc32"):
        raise CorruptedDataError(f"part {part!r} is damaged: it does not match its checksum")
    if as_bytes or stored.data_ptr() % dtype.itemsize:
        # It lies anywhere in the file; a copy lies where torch may read wide elements.
        return _as_bytes(stored).clone().view(dtype).view(shape)
    return stored


def _read_config(fields: _Fields, parts: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the codec's configuration; take it out of `parts` if it is one."""
    if CONFIG_PART not in parts:
        return dict(fields.get("config", dict))
    try:
        config = json.loads(_as_bytes(parts.pop(CONFIG_PART)).numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise CorruptedDataError(f"config is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CorruptedDataError(f"config is a {type(config).__name__}, expected an object")
    return config


def _read_codec(name: str, config: dict[str, Any]) -> RowCodec:
    cls = get_codec(name)
    try:
        codec = cls.from_config(config)
    except BitslabError:
        raise
    except Exception as error:
        # What a codec does with a configuration that it never wrote is not known.
        raise CorruptedDataError(
            f"config does not suit codec {name!r}: {type(error).__name__}: {error}"
        ) from error
    if not all(_is_count(size) for size in codec.row_shape):
        raise CorruptedDataError(f"config: row_shape is {list(codec.row_shape)!r}")
    return codec


def _check_geometry(fields: _Fields, shape: tuple[int, ...], codec: RowCodec) -> None:
    """Compare what the file says about rows with what the codec makes of its configuration."""
    dtype = dtype_from_name(fields.get("dtype", str))
    if dtype != codec.dtype:
        raise CorruptedDataError(f"dtype is {dtype}, its codec's {codec.dtype}")
    row_elements = elements(codec.row_shape)
    if fields.count("row_elements") != row_elements:
        raise CorruptedDataError(
            f"row_elements is {fields.count('row_elements')}, its codec's rows have {row_elements}"
        )


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _as_bytes(t: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as uint8 ``[nbytes]``."""
    return flat_bytes(t)


def _crc32(t: torch.Tensor) -> int:
    return zlib.crc32(_as_bytes(t).numpy().data)


def _checksum_of(entries: Mapping[str, str]) -> str:
    text = json.dumps(sorted(entries.items()), separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"
