"""Reading and writing ordinary tensor files: safetensors, npy, npz and torch's own."""

from __future__ import annotations

import math
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, cast

import numpy as np
import torch

from ..dtypes import dtype_name
from ..engine.files.new_file import PathLike
from ..engine.files.safetensors_writer import can_store, write_safetensors
from ..errors import ArgumentError, load_optional
from ..options import READABLE, SAFETENSORS, TORCH, checked_extension

#: Name of the tensor of a file that gives it none.
ONLY_NAME = "tensor"

#: A zip archive counts the bytes of a name in 16 bits.
MAX_MEMBER_BYTES = 65_000

#: The 3rd version is for names of fields, which tensors do not have.
_NPY_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(frozen=True)
class TensorFile:
    """What a tensor file holds.

    Parameters
    ----------
    tensors : dict of str to torch.Tensor
        On the CPU, memory-mapped where the format allows it.
    metadata : dict of str to str, optional
        The metadata of a safetensors file.
    left_out : list of str
        What the file holds in addition to tensors, each with its name and type.
    """

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str] | None = None
    left_out: list[str] = field(default_factory=list)


def read_tensors(path: PathLike, extension: str | None = None) -> TensorFile:
    """Read a tensor file by its extension.

    Parameters
    ----------
    path : str or os.PathLike
        ``.safetensors``, ``.npy``, ``.npz``, or a ``.pt``, ``.pth`` or ``.bin`` file of
        torch.save that holds tensors, lists and dicts of them; never unpickled beyond that.
    extension : str, optional
        Stands for that of `path`, which may then have any name.

    Returns
    -------
    TensorFile
        Tensors in dicts and lists have names with dots, ``"layer.0.weight"``.

    Raises
    ------
    ArgumentError
        When the extension is unknown or the file is not what its extension says.
    OSError
        When the file cannot be read.
    """
    where = os.fspath(path)
    extension = extension or checked_extension(where, READABLE)
    open(where, "rb").close()  # its errors name the file, those of the libraries not always
    if extension in SAFETENSORS:
        return _read_safetensors(where)
    if extension in TORCH:
        return _read_torch(where)
    try:
        return _read_npy(where) if extension == ".npy" else _read_npz(where)
    except Exception as error:  # a damaged archive can fail in any way
        if isinstance(error, ArgumentError) or (isinstance(error, OSError) and error.errno):
            raise
        raise ArgumentError(f"{where}: cannot be read as {extension[1:]}: {error}") from error


def write_tensors(
    tensors: Mapping[str, torch.Tensor],
    path: PathLike,
    extension: str,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a tensor file.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        On the CPU.
    path : str or os.PathLike
        Any name.
    extension : str
        Says the format: ``.safetensors``, ``.npy`` (one tensor), ``.npz``, ``.pt``, ``.pth`` or
        ``.bin``.
    metadata : mapping of str to str, optional
        For a safetensors file; the others have no place for it.

    Raises
    ------
    ArgumentError
        When the format cannot hold a dtype or that many tensors.
    OSError
        When the file cannot be written.
    """
    if extension == ".safetensors":
        check_storable(tensors)
        write_safetensors(path, tensors, metadata)
    elif extension in TORCH:
        _write_torch(tensors, path)
    elif extension == ".npy":
        if len(tensors) != 1:
            raise ArgumentError(
                f"npy holds one tensor, there are {len(tensors)}; write .npz or .safetensors"
            )
        arrays = [_as_array(name, t) for name, t in tensors.items()]
        with open(path, "wb") as file:
            np.lib.format.write_array(cast(IO[bytes], _Sink(file)), arrays[0], allow_pickle=False)
    else:
        _write_npz({name: _as_array(name, t) for name, t in tensors.items()}, path)


def check_storable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse a dtype that safetensors cannot hold.

    Raises
    ------
    ArgumentError
        That names the tensor and says which format can.
    """
    for name, t in tensors.items():
        if not can_store(t.dtype):
            raise ArgumentError(f"{name}: safetensors has no {dtype_name(t.dtype)}; write .pt")


def _read_safetensors(where: str) -> TensorFile:
    load_optional("safetensors", extra=None, purpose="reading a safetensors file")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(where, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return TensorFile(tensors, file.metadata())
    except (SafetensorError, KeyError, AttributeError) as error:  # the last two: unknown dtypes
        raise ArgumentError(f"{where}: cannot be read as safetensors: {error}") from error


def _write_torch(tensors: Mapping[str, torch.Tensor], path: PathLike) -> None:
    # Not by its name, which torch would write into it.
    with open(path, "wb") as file:
        sink = _Sink(file)
        try:
            torch.save(dict(tensors), cast(IO[bytes], sink))
        except RuntimeError as error:
            raise sink.error or error from None


class _Sink:
    """A file to write to that keeps the system's error.

    torch reports an error of its own instead, and numpy one without a number where it is given a
    file of Python's.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write bytes; return their number."""
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Do nothing: closing the file does."""


def _write_npz(arrays: Mapping[str, np.ndarray[Any, Any]], path: PathLike) -> None:
    for name in arrays:
        if "\0" in name or len(name.encode()) > MAX_MEMBER_BYTES:
            raise ArgumentError(f"{name[:40]!r}: npz has no place for this name; write .pt")
    # Not numpy.savez, which takes names as keywords and has two of its own.
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy")  # of 1980, not of now: the same bytes each time
            with archive.open(info, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _read_npy(where: str) -> TensorFile:
    # Copy on write, because torch warns of arrays that cannot be written to.
    array = np.lib.format.open_memmap(where, mode="c")
    return TensorFile({ONLY_NAME: _as_tensor(where, array)})


def _read_npz(where: str) -> TensorFile:
    tensors: dict[str, torch.Tensor] = {}
    left_out = []
    with zipfile.ZipFile(where) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name == info.filename:
                left_out.append(f"{name} (no .npy file)")
                continue
            if name in tensors:
                raise ArgumentError(f"{where}: two tensors would be called {name!r}")
            array = _read_member(archive, info, name)
            try:
                if array is None:
                    raise ArgumentError(f"{name}: Python objects, which would be unpickled")
                tensors[name] = _as_tensor(name, array)
            except ArgumentError as error:
                left_out.append(str(error))
    return TensorFile(tensors, None, left_out)


def _read_member(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str
) -> np.ndarray[Any, Any] | None:
    """Return an array of an archive; None for one of objects."""
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        if version not in _NPY_HEADERS:
            raise ValueError(f"{name}: npy format {version}, accepted are {sorted(_NPY_HEADERS)}")
        shape, _, dtype = _NPY_HEADERS[version](member)
        if dtype.hasobject:
            return None
        claimed = math.prod(shape) * dtype.itemsize
        there = info.file_size - member.tell()
        if claimed > there:  # before memory is asked for
            raise ValueError(f"{name}: claims {claimed} bytes of numbers, {there} are there")
    with archive.open(info) as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def _read_torch(where: str) -> TensorFile:
    try:
        # Files of before torch 1.6 are no zip files and cannot be mapped.
        mapped = zipfile.is_zipfile(where)
        content = torch.load(where, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ArgumentError(
            f"{where}: holds more than tensors, or is no file of torch.save; only files that "
            "torch.load(weights_only=True) reads are accepted"
        ) from error
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        reason = [*str(error).strip().splitlines(), type(error).__name__]
        raise ArgumentError(f"{where}: cannot be read by torch.load: {reason[0]}") from error
    tensors: dict[str, torch.Tensor] = {}
    left_out = []
    for path, value in _leaves((), content):
        name = ".".join(path) if path else ONLY_NAME
        if not isinstance(value, torch.Tensor):
            left_out.append(f"{name} ({type(value).__name__})")
        elif name in tensors:
            raise ArgumentError(f"{where}: two tensors would be called {name!r}")
        else:
            tensors[name] = value.detach()
    return TensorFile(tensors, None, left_out)


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield what is in nested dicts and lists, with the keys that lead there."""
    if isinstance(value, Mapping):
        children = list(value.items())
    elif isinstance(value, (list, tuple)):
        children = list(enumerate(value))
    else:
        yield path, value
        return
    for key, child in children:
        yield from _leaves((*path, str(key)), child)


def _as_tensor(name: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Make a tensor of an array; of another byte order, in this machine's."""
    try:
        # From a view of its own class: torch keeps the memory map alive through it.
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except TypeError as error:
        raise ArgumentError(f"{name}: torch has no dtype like numpy's {array.dtype}") from error


def _as_array(name: str, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    try:
        return tensor.numpy()
    except TypeError as error:
        raise ArgumentError(
            f"{name}: numpy has no {dtype_name(tensor.dtype)}; write .safetensors"
        ) from error
