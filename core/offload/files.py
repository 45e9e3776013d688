"""Files of packed weights: safetensors with one uint8 tensor for each unit's image.

Images are written as they are made, so the header, which comes first in the file, gets its space
before its content is known, and is padded with blanks as the format allows. How tensors lie in
images stands behind them in one more entry, ``bitslab_weights``: JSON with ``version``, ``units``
(for each its ``tensors`` and the ``crc32`` of its image) and ``aliases``. The metadata has
``bitslab_weights``: the version, and ``bitslab_crc32``: the checksum of that entry.

Compatibility law: files of every older version can be read.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from ..engine.files.file_locks import check_free, one_writer
from ..engine.files.new_file import NewFile
from ..errors import ArgumentError, BitslabError, CorruptedDataError
from .images import FileImage, MappedFile
from .records import TensorRecord, round_up

FILE_VERSION = 1
INDEX_ENTRY = "bitslab_weights"
CHECKSUM_ENTRY = "bitslab_crc32"
#: Images start at such multiples, for reads that bypass the system's page cache.
ALIGNMENT_BYTES = 4096
#: More than the JSON of one header entry takes in addition to its name.
_ENTRY_BYTES = 160


class WeightFile:
    """Writes a file of packed weights, image by image.

    Parameters
    ----------
    path : str or os.PathLike
        Written under another name in the same folder until `finish` renames it.
    units : sequence of str
        Names of the units that will come.
    argument : str
        The argument that gave `path`, for messages.

    Raises
    ------
    ArgumentError
        When `path` is a folder, or a file that a model reads its weights from. `finish` asks again.
    OSError
        When the file cannot be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], units: Sequence[str], argument: str = "disk"
    ) -> None:
        if INDEX_ENTRY in units:
            raise ArgumentError(f"units: the name {INDEX_ENTRY!r} is taken")
        if os.path.isdir(path):
            raise ArgumentError(
                f"{argument}: {os.fspath(path)} is a folder, expected the name of a file"
            )
        self._argument = argument
        check_free(path, argument)
        names = [*units, INDEX_ENTRY]
        # An image may have an entry for the bytes left free before it.
        guess = 2 * sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names) + 4 * _ENTRY_BYTES
        self._start = round_up(8 + guess, ALIGNMENT_BYTES)
        self._new = NewFile(path)
        try:
            self._file = open(self._new.temporary, "rb+")
            self._file.truncate(self._start)
        except BaseException:
            self._new.close()
            raise
        self._at = self._start
        self._entries: dict[str, dict[str, Any]] = {}
        self._units: dict[str, dict[str, Any]] = {}
        self._mapped: MappedFile | None = None
        self._finished = False

    def write(
        self, unit: str, data: torch.Tensor, records: Mapping[str, TensorRecord]
    ) -> FileImage:
        """Write the image of a unit, uint8 ``[nbytes]`` on the CPU; it can be read at once."""
        try:
            offset = self._append(unit, data.numpy().data, ALIGNMENT_BYTES)
            self._file.flush()
        except OSError as error:
            raise BitslabError(
                f"{self._argument}: {data.numel()} bytes of {unit!r}: {self._new.named(error)}"
            ) from error
        self._units[unit] = {
            "tensors": {name: record.to_json() for name, record in records.items()},
            "crc32": zlib.crc32(data.numpy().data),
        }
        if self._mapped is None:
            self._mapped = MappedFile(os.fspath(self._new.temporary), in_use=False)
        return FileImage(self._mapped, offset, data.numel())

    def _append(self, name: str, data: memoryview, multiple: int) -> int:
        """Append an entry, after a padding entry for the bytes that its alignment leaves free."""
        begin = self._at
        offset = round_up(begin, multiple)
        self._file.seek(offset)
        self._file.write(data)
        self._at = offset + len(data)
        if offset > begin:
            # safetensors knows no holes between its entries.
            self._entries[f"{name}.padding"] = self._entry(begin, offset)
        self._entries[name] = self._entry(offset, self._at)
        return offset

    def _entry(self, begin: int, end: int) -> dict[str, Any]:
        offsets = [begin - self._start, end - self._start]
        return {"dtype": "U8", "shape": [end - begin], "data_offsets": offsets}

    def finish(self, aliases: Mapping[str, str]) -> str:
        """Write the header, rename the file to its final path and return that."""
        index = {"version": FILE_VERSION, "units": self._units, "aliases": dict(aliases)}
        text = json.dumps(index, separators=(",", ":")).encode()
        metadata = {INDEX_ENTRY: str(FILE_VERSION), CHECKSUM_ENTRY: f"{zlib.crc32(text):08x}"}
        try:
            self._append(INDEX_ENTRY, memoryview(text), 8)
            header = json.dumps({"__metadata__": metadata, **self._entries}).encode()
            room = self._start - 8
            if len(header) > room:
                raise BitslabError(f"header of {len(header)} bytes, its place has {room}")
            self._file.seek(0)
            self._file.write(struct.pack("<Q", room) + header.ljust(room))
            self._file.close()
            # Two that write the same new file come one after the other: the second is refused.
            with one_writer(self._new.target.parent):
                check_free(self._new.target, self._argument)
                self._new.commit()
                self._new.close()
                if self._mapped is not None:
                    self._mapped.renamed(os.fspath(self._new.target))
        except OSError as error:
            raise BitslabError(f"{self._argument}: {self._new.named(error)}") from error
        self._finished = True
        return os.fspath(self._new.target)

    def abandon(self) -> None:
        """Remove the file unless it is finished."""
        if not self._finished:
            self._finished = True
            with contextlib.suppress(OSError):  # what a full disk did not take
                self._file.close()
            self._new.close()

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()


#: For each unit its image and, by the names of its tensors, where they lie in it.
Units = dict[str, tuple[FileImage, dict[str, TensorRecord]]]


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], *, verify: bool) -> Iterator[tuple[Units, dict[str, str]]]:
    """Open a file of packed weights, and close it where what is made of it fails.

    Parameters
    ----------
    path : str or os.PathLike
        As `WeightFile` wrote it.
    verify : bool
        Compare the checksum of every image.

    Yields
    ------
    units : Units
        In the order of the model.
    aliases : dict of str to str
        Further names of tensors.

    Raises
    ------
    CorruptedDataError
        When the file is damaged, or the block refuses its content by a `BitslabError`.
    OSError
        When it cannot be read.
    """
    where = os.fspath(path)
    file = MappedFile(where)
    try:
        yield _read_units(file, verify)
    except BitslabError as error:
        file.close()
        raise CorruptedDataError(f"{where}: {error}") from error


def _read_units(file: MappedFile, verify: bool) -> tuple[Units, dict[str, str]]:
    """Read header and index, and check what they say."""
    data = file.mapped()
    start, entries = _read_header(data)
    found = entries.get("__metadata__", {})
    version = found.get(INDEX_ENTRY) if isinstance(found, dict) else None
    if version is None:
        raise CorruptedDataError("no file of packed weights of bitslab")
    if not str(version).isdigit() or int(version) > FILE_VERSION:
        raise CorruptedDataError(
            f"written in version {version}, this bitslab reads up to version {FILE_VERSION}"
        )
    begin, end = _span(entries, INDEX_ENTRY, start, file.nbytes)
    text = data[begin:end].numpy().tobytes()
    if found.get(CHECKSUM_ENTRY) != f"{zlib.crc32(text):08x}":
        raise CorruptedDataError("damaged: its index does not match its checksum")
    index = json.loads(text)
    units: Units = {}
    for name, described in index["units"].items():
        begin, end = _span(entries, name, start, file.nbytes)
        if verify and zlib.crc32(data[begin:end].numpy().data) != described["crc32"]:
            raise CorruptedDataError(f"unit {name!r} is damaged: it does not match its checksum")
        records = {
            tensor: TensorRecord.from_json(content, end - begin)
            for tensor, content in described["tensors"].items()
        }
        units[name] = FileImage(file, begin, end - begin), records
    return units, index["aliases"]


def _read_header(data: torch.Tensor) -> tuple[int, dict[str, Any]]:
    """Return where the entries start, and the header."""
    if data.numel() < 8:
        raise CorruptedDataError("truncated: no safetensors header")
    (length,) = struct.unpack("<Q", data[:8].numpy().tobytes())
    if length > data.numel() - 8:
        raise CorruptedDataError("truncated, or no safetensors file")
    try:
        entries = json.loads(data[8 : 8 + length].numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise CorruptedDataError(f"its header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise CorruptedDataError("its header is no JSON object")
    return 8 + length, entries


def _span(entries: Mapping[str, Any], name: str, start: int, nbytes: int) -> tuple[int, int]:
    """Return first byte and end of an entry in the file."""
    try:
        begin, end = (start + int(offset) for offset in entries[name]["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptedDataError(f"its entry {name!r} is missing or damaged") from error
    if not start <= begin <= end <= nbytes:
        raise CorruptedDataError(f"truncated: its entry {name!r} ends behind the file")
    return begin, end
