"""Files of compressed tensors: safetensors, with what bitslab needs in the file's metadata.

The parts of a compressed tensor are entries ``<name>.<part>`` of the file. The metadata has

``bitslab``
    JSON: ``version`` of the container and ``tensors``, for each name its ``shape``, ``dtype``,
    ``codec``, ``config``, ``n_rows``, ``row_elements`` and ``parts``: for each part the ``dtype``
    and ``shape`` that the codec gave it and the ``crc32`` of its bytes. A long configuration is a
    part too, called ``config``, because readers of safetensors limit the length of a header.
    A tensor of a codec of whole tensors has the one part ``data``, its buffer, and neither
    ``n_rows`` nor ``row_elements``; files with such tensors are of version 2, others of version 1.
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
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch

from .container_parts import STORED_DTYPES, Fields, PartCheck, crc32_of, is_count, read_part, waits
from .dtypes import dtype_from_name, dtype_name, flat_bytes
from .engine.codecs import Blob, BlobCodec, PackedRows, RowCodec
from .engine.codecs.base import elements
from .engine.codecs.blob import ALIGN_BYTES
from .engine.codecs.registry import get_codec, row_codec_class
from .engine.files.checksums import combined_crc32
from .engine.files.new_file import PathLike
from .engine.files.safetensors_writer import SafetensorsLayout, write_safetensors
from .engine.files.writeback import PieceWriter
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    BitslabError,
    CorruptedDataError,
    load_optional,
)

#: Version of files of rows alone, and of those that hold whole tensors too.
ROWS_VERSION, CONTAINER_VERSION = 1, 2
ENTRY = "bitslab"
CHECKSUM_ENTRY = "bitslab_crc32"
CONFIG_PART, BLOB_PART = "config", "data"
LONG_CONFIG_BYTES = 16 << 10
#: Bytes to read of a tensor from which threads are worth it: their checksum takes as long as what
#: Python does for a tensor. Of fewer, eight threads took 60 ms for 48 tensors, and one 16 to 36.
LEAST_EACH_BYTES = 256 << 10

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


@runtime_checkable
class EncodedTensor(Protocol):
    """The same of a tensor of a codec of whole tensors: what encoded it, and the buffer."""

    @property
    def codec(self) -> BlobCodec: ...  # noqa: D102
    @property
    def blob(self) -> Blob: ...  # noqa: D102
    @property
    def shape(self) -> torch.Size: ...  # noqa: D102


AnyTensor: TypeAlias = PackedTensor | EncodedTensor


def write_tensors(
    path: PathLike, tensors: Mapping[str, AnyTensor], metadata: Mapping[str, str] | None = None
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
    tensors: Mapping[str, AnyTensor], metadata: Mapping[str, str] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the metadata that make up the file of `tensors`."""
    _check_metadata(metadata)
    parts = {name: _parts_of(name, ct) for name, ct in tensors.items()}
    crc32s = {_key(n, part): crc32_of(t) for n, its in parts.items() for part, t in its.items()}
    return _stored(parts), _entries(tensors, parts, metadata, crc32s)


class StreamedFile:
    """The file of packed tensors, written piece by piece, in any order; not atomic.

    Where each part lies is known before the content of any: those whose content comes later are on
    the meta device. Other parts are written at once.

    Parameters
    ----------
    path : str or os.PathLike
        An existing file; what it holds is replaced.
    tensors : mapping of str to PackedTensor
        By name.
    metadata : mapping of str to str, optional
        The caller's.

    Raises
    ------
    ArgumentError
        When a name or metadata key cannot be stored.
    OSError
        When the file cannot be written.

    Notes
    -----
    Threads may call `write` at the same time. The header has the checksums: it is written by
    `finish`, and spaces stand at its end for digits that they do not have.
    """

    def __init__(
        self,
        path: PathLike,
        tensors: Mapping[str, AnyTensor],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        _check_metadata(metadata)
        self._tensors, self._metadata = tensors, metadata
        self._parts = {name: _parts_of(name, ct) for name, ct in tensors.items()}
        self._keys = {_key(n, part): t for n, its in self._parts.items() for part, t in its.items()}
        self._layout = SafetensorsLayout(_stored(self._parts))
        self._lock = threading.Lock()
        self._written: dict[str, list[tuple[int, int, int]]] = {key: [] for key in self._keys}
        self._header_bytes = len(self._header(dict.fromkeys(self._keys, 0xFFFFFFFF)))
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._pieces = PieceWriter(fd)
        try:
            os.ftruncate(fd, 0)
            os.ftruncate(fd, self._header_bytes + self._layout.data_bytes)
            for key, t in self._keys.items():
                if t.device.type != "meta":
                    self._write(key, 0, flat_bytes(t))
        except BaseException:
            self.close()
            raise

    def write(self, name: str, part: str, begin: int, data: torch.Tensor) -> None:
        """Write bytes of a part whose content comes later.

        Parameters
        ----------
        name, part : str
            The tensor and its part.
        begin : int
            Where the bytes begin in the part.
        data : torch.Tensor
            uint8 ``[n]`` on the CPU, contiguous.
        """
        self._write(_key(name, part), begin, data)

    def _write(self, key: str, begin: int, data: torch.Tensor) -> None:
        at = self._header_bytes + self._layout.offsets[key] + begin
        self._pieces.write(at, data)
        crc32 = zlib.crc32(data.numpy().data)
        with self._lock:
            self._written[key].append((begin, data.shape[0], crc32))

    def finish(self) -> None:
        """Write the header, and close the file.

        Raises
        ------
        BitslabError
            When bytes of a part were not written, or were written twice.
        """
        crc32s = {}
        for key, pieces in self._written.items():
            pieces.sort()
            end = 0
            for begin, n_bytes, _ in pieces:
                if begin != end:
                    raise BitslabError(f"{key}: byte {begin} follows byte {end} of what is written")
                end += n_bytes
            if end != self._keys[key].nbytes:
                raise BitslabError(f"{key}: {end} of {self._keys[key].nbytes} bytes are written")
            crc32s[key] = combined_crc32((crc32, n_bytes) for _, n_bytes, crc32 in pieces)
        header = torch.frombuffer(bytearray(self._header(crc32s)), dtype=torch.uint8)
        self._pieces.write(0, header)
        self.close()

    def close(self) -> None:
        """Close the file, once what is being written is there; again does nothing."""
        self._pieces.close()

    def _header(self, crc32s: Mapping[str, int]) -> bytes:
        entries = _entries(self._tensors, self._parts, self._metadata, crc32s)
        return self._layout.header(entries, getattr(self, "_header_bytes", 0))


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    if metadata is not None and not isinstance(metadata, Mapping):
        raise ArgumentTypeError(f"metadata: expected str by str, got {type(metadata).__name__}")
    for key, text in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise ArgumentTypeError(f"metadata: {key!r}: {text!r}; keys and values must be str")
        if key in (ENTRY, CHECKSUM_ENTRY):
            raise ArgumentError(f"metadata: the key {key!r} is taken by bitslab")


def _key(name: str, part: str) -> str:
    """Return the name under which the file has a part of a tensor."""
    return f"{name}.{part}"


def _parts_of(name: str, ct: AnyTensor) -> dict[str, torch.Tensor]:
    """Return the parts of a tensor, and its configuration where that is one too."""
    if not isinstance(name, str):
        raise ArgumentTypeError(f"tensors: the name {name!r} is no str")
    its = {BLOB_PART: ct.blob.data} if isinstance(ct, EncodedTensor) else ct.packed.parts
    parts = {
        part: t if t.device.type == "meta" else t.cpu().contiguous() for part, t in its.items()
    }
    if any(not part or "." in part or part == CONFIG_PART for part in parts):
        raise ArgumentError(
            f"codec {ct.codec.name!r}: parts {sorted(parts)}; a part's name has no dot and is not "
            f"{CONFIG_PART!r}"
        )
    text = _config_text(ct)
    if len(text) > LONG_CONFIG_BYTES:
        parts[CONFIG_PART] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return parts


def _config_text(ct: AnyTensor) -> bytes:
    return json.dumps(ct.codec.to_config(), separators=(",", ":")).encode()


def _stored(parts: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the entries of the file: parts of dtypes that not every reader knows as bytes."""
    return {
        _key(name, part): t if t.dtype in STORED_DTYPES else flat_bytes(t)
        for name, its in parts.items()
        for part, t in its.items()
    }


def _entries(
    tensors: Mapping[str, AnyTensor],
    parts: Mapping[str, Mapping[str, torch.Tensor]],
    metadata: Mapping[str, str] | None,
    crc32s: Mapping[str, int],
) -> dict[str, str]:
    """Return the file's metadata; `crc32s` are those of its entries."""
    records: dict[str, Any] = {}
    for name, ct in tensors.items():
        record: dict[str, Any] = {
            "shape": list(ct.shape),
            "dtype": dtype_name(ct.blob.dtype if isinstance(ct, EncodedTensor) else ct.codec.dtype),
            "codec": ct.codec.name,
        }
        if not isinstance(ct, EncodedTensor):
            record["n_rows"] = ct.packed.n_rows
            record["row_elements"] = elements(ct.codec.row_shape)
        if CONFIG_PART not in parts[name]:
            record["config"] = ct.codec.to_config()
        record["parts"] = {
            part: {
                "dtype": dtype_name(t.dtype),
                "shape": list(t.shape),
                "crc32": crc32s[_key(name, part)],
            }
            for part, t in parts[name].items()
        }
        records[name] = record
    entries = dict(metadata or {})
    whole = any(isinstance(ct, EncodedTensor) for ct in tensors.values())
    version = CONTAINER_VERSION if whole else ROWS_VERSION
    entries[ENTRY] = json.dumps({"version": version, "tensors": records}, separators=(",", ":"))
    entries[CHECKSUM_ENTRY] = _checksum_of(entries)
    return entries


# Reading


def read_tensors(
    path: PathLike,
    make: Callable[[RowCodec, PackedRows, tuple[int, ...]], Made],
    each: Callable[[Callable[[str], Made], Iterable[str]], Iterable[Made]] = map,
    make_whole: Callable[[BlobCodec, Blob], Made] | None = None,
    later: dict[str, list[PartCheck]] | None = None,
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
    each : callable
        What `map` does, maybe in several threads: calls a function with each name, and returns the
        results in order. It gets the tensors of which many bytes are read; of others, most is work
        of Python's, which threads only make longer.
    make_whole : callable, optional
        As `make`, of the codec and the buffer of a whole tensor; such tensors are refused without.
    later : dict of str to list of PartCheck, optional
        Gets for each tensor the comparisons of checksums that take long, those of rows: the caller
        makes them, and decodes all rows, which checks them. All is done here when left out.

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
            mapped = {name: _map_parts(name, found, file, keys) for name, found in records.items()}

            def read(name: str) -> Made:
                checks: list[PartCheck] | None = None if later is None else deferred[name]
                return _read_tensor(name, records[name], mapped[name], make, make_whole, checks)

            deferred: dict[str, list[PartCheck]] = {name: [] for name in records}
            long = [
                name
                for name, its in mapped.items()
                if sum(t.nbytes for part, t in its.items() if later is None or not waits(part, t))
                >= LEAST_EACH_BYTES
            ]
            made = dict(zip(long, each(read, long), strict=True))
            tensors = {name: made[name] if name in made else read(name) for name in records}
    except SafetensorError as error:
        raise CorruptedDataError(
            f"{where}: no safetensors file, or truncated or damaged: {error}"
        ) from error
    except CorruptedDataError as error:
        raise CorruptedDataError(f"{where}: {error}") from error
    if keys:
        raise CorruptedDataError(f"{where}: entries that belong to no tensor: {sorted(keys)}")
    if later is not None:
        for name, checks in deferred.items():
            later[name] = [replace(check, prefix=f"{where}: tensor {name!r}: ") for check in checks]
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
    if not is_count(version):
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


def _map_parts(name: str, record: Any, file: Any, keys: set[str]) -> dict[str, torch.Tensor]:
    """Return the stored parts of a tensor, mapped; take their entries out of `keys`."""
    try:
        parts = {}
        for part in Fields(record).get("parts", dict):
            key = _key(name, part)
            if key not in keys:
                raise CorruptedDataError(f"part {part!r} is missing")
            keys.discard(key)
            parts[part] = file.get_tensor(key)
        return parts
    except BitslabError as error:
        raise CorruptedDataError(f"tensor {name!r}: {error}") from error


def _read_tensor(
    name: str,
    record: Any,
    mapped: Mapping[str, torch.Tensor],
    make: Callable[[RowCodec, PackedRows, tuple[int, ...]], Made],
    make_whole: Callable[[BlobCodec, Blob], Made] | None,
    later: list[PartCheck] | None,
) -> Made:
    """Check one tensor, whose stored parts are mapped; see `read_tensors` for `later`."""
    try:
        return _checked_tensor(record, mapped, make, make_whole, later)
    except BitslabError as error:
        why = error
        try:
            for check in later or ():  # where bytes are damaged, that is what is said
                check.run()
        except CorruptedDataError as damage:
            why = damage
        raise CorruptedDataError(f"tensor {name!r}: {why}") from error


def _checked_tensor(
    record: Any,
    mapped: Mapping[str, torch.Tensor],
    make: Callable[[RowCodec, PackedRows, tuple[int, ...]], Made],
    make_whole: Callable[[BlobCodec, Blob], Made] | None,
    later: list[PartCheck] | None,
) -> Made:
    fields = Fields(record)
    described = fields.get("parts", dict)
    parts = {p: read_part(p, Fields(described[p]), t, later) for p, t in mapped.items()}
    config = _read_config(fields, parts)
    codec = _read_codec(fields.get("codec", str), config, rows_only=make_whole is None)
    shape = fields.shape()
    if isinstance(codec, BlobCodec):
        assert make_whole is not None  # or `_read_codec` had refused it
        return make_whole(codec, _read_blob(fields, shape, codec, parts))
    _check_geometry(fields, shape, codec)
    adopt = codec.adopt if later is None else codec.adopt_unread
    return make(codec, adopt(fields.count("n_rows"), parts), shape)


def _read_config(fields: Fields, parts: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the codec's configuration; take it out of `parts` if it is one."""
    if CONFIG_PART not in parts:
        return dict(fields.get("config", dict))
    try:
        config = json.loads(flat_bytes(parts.pop(CONFIG_PART)).numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise CorruptedDataError(f"config is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CorruptedDataError(f"config is a {type(config).__name__}, expected an object")
    return config


def _read_codec(name: str, config: dict[str, Any], rows_only: bool) -> RowCodec | BlobCodec:
    cls = row_codec_class(name) if rows_only else get_codec(name)
    try:
        codec = cls.from_config(config)
    except BitslabError:
        raise
    except Exception as error:
        # What a codec does with a configuration that it never wrote is not known.
        raise CorruptedDataError(
            f"config does not suit codec {name!r}: {type(error).__name__}: {error}"
        ) from error
    if isinstance(codec, BlobCodec):
        return codec
    if not all(is_count(size) for size in codec.row_shape):
        raise CorruptedDataError(f"config: row_shape is {list(codec.row_shape)!r}")
    return codec


def _read_blob(
    fields: Fields, shape: tuple[int, ...], codec: BlobCodec, parts: Mapping[str, torch.Tensor]
) -> Blob:
    """Return the buffer of a whole tensor whose header fits what the file says about it."""
    data = parts.get(BLOB_PART)
    if data is None or len(parts) > 1 or data.dtype != torch.uint8 or data.dim() != 1:
        raise CorruptedDataError(
            f"parts are {sorted(parts)}, codec {codec.name!r} has the bytes {BLOB_PART!r} alone"
        )
    if data.data_ptr() % ALIGN_BYTES:
        data = data.clone()  # torch's memory begins at a multiple of 64
    blob = Blob(data, torch.Size(shape), dtype_from_name(fields.get("dtype", str)))
    if blob.nbytes != data.shape[0]:
        raise CorruptedDataError(f"its header says {blob.nbytes} of {data.shape[0]} bytes")
    return blob


def _check_geometry(fields: Fields, shape: tuple[int, ...], codec: RowCodec) -> None:
    """Compare what the file says about rows with what the codec makes of its configuration."""
    dtype = dtype_from_name(fields.get("dtype", str))
    if dtype != codec.dtype:
        raise CorruptedDataError(f"dtype is {dtype}, its codec's {codec.dtype}")
    row_elements = elements(codec.row_shape)
    if fields.count("row_elements") != row_elements:
        raise CorruptedDataError(
            f"row_elements is {fields.count('row_elements')}, its codec's rows have {row_elements}"
        )


def _checksum_of(entries: Mapping[str, str]) -> str:
    text = json.dumps(sorted(entries.items()), separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"
