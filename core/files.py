"""Reading and writing ordinary tensor files: safetensors, npy, npz and torch's own."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .container import PathLike
from .dtypes import dtype_name
from .errors import ArgumentError, load_optional

SAFETENSORS = (".safetensors", ".bitslab")
TORCH = (".pt", ".pth", ".bin")
READABLE = (*SAFETENSORS, ".npy", ".npz", *TORCH)
WRITABLE = (".safetensors", ".npy", ".npz", *TORCH)

#: Name of the tensor of a file that gives it none.
ONLY_NAME = "tensor"


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
        What the file holds beside tensors, each with its name and type.
    """

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str] | None = None
    left_out: list[str] = field(default_factory=list)


def read_tensors(path: PathLike) -> TensorFile:
    """Read a tensor file by its extension.

    Parameters
    ----------
    path : str or os.PathLike
        ``.safetensors``, ``.npy``, ``.npz``, or a ``.pt``, ``.pth`` or ``.bin`` file of
        torch.save that holds tensors, lists and dicts of them; never unpickled beyond that.

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
    extension = checked_extension(where, READABLE)
    open(where, "rb").close()  # its errors name the file, those of the libraries not always
    if extension in SAFETENSORS:
        return _read_safetensors(where)
    if extension in TORCH:
        return _read_torch(where)
    try:
        return _read_npy(where) if extension == ".npy" else _read_npz(where)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
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
        _write_safetensors(tensors, path, metadata)
    elif extension in TORCH:
        torch.save(dict(tensors), path)
    else:
        if extension == ".npy" and len(tensors) != 1:
            raise ArgumentError(
                f"npy holds one tensor, there are {len(tensors)}; write .npz or .safetensors"
            )
        arrays = {name: _as_array(name, t) for name, t in tensors.items()}
        with open(path, "wb") as file:
            if extension == ".npy":
                np.lib.format.write_array(file, next(iter(arrays.values())), allow_pickle=False)
            else:
                # Not numpy.savez, which takes names as keywords and has two of its own.
                with zipfile.ZipFile(file, "w") as archive:
                    for name, array in arrays.items():
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                            np.lib.format.write_array(member, array, allow_pickle=False)


def checked_extension(path: PathLike, accepted: tuple[str, ...]) -> str:
    """Return the extension of a path in lower case, or refuse it."""
    extension = Path(path).suffix.lower()
    if extension not in accepted:
        raise ArgumentError(
            f"{os.fspath(path)}: extension {extension!r}, accepted are {', '.join(accepted)}"
        )
    return extension


def _read_safetensors(where: str) -> TensorFile:
    load_optional("safetensors", extra=None, purpose="reading a safetensors file")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(where, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return TensorFile(tensors, file.metadata())
    except (SafetensorError, KeyError, AttributeError) as error:  # the last two: unknown dtypes
        raise ArgumentError(f"{where}: cannot be read as safetensors: {error}") from error


def _write_safetensors(
    tensors: Mapping[str, torch.Tensor], path: PathLike, metadata: Mapping[str, str] | None
) -> None:
    st = load_optional("safetensors.torch", extra=None, purpose="writing a safetensors file")
    from safetensors import SafetensorError

    try:
        st.save_file(dict(tensors), path, metadata=dict(metadata) if metadata else None)
    except KeyError as error:
        raise ArgumentError(f"safetensors has no {error}; write .pt") from error
    except SafetensorError as error:  # how the library reports a full disk
        raise OSError(f"{os.fspath(path)}: cannot be written: {error}") from error


def _read_npy(where: str) -> TensorFile:
    # Copy on write, because torch warns of arrays that cannot be written to.
    array = np.lib.format.open_memmap(where, mode="c")
    return TensorFile({ONLY_NAME: _as_tensor(where, array)})


def _read_npz(where: str) -> TensorFile:
    tensors, left_out = {}, []
    # Opened here, because numpy leaves a file open that is no archive.
    with open(where, "rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as archive:
        for name in archive.files:
            try:
                tensors[name] = _as_tensor(name, archive[name])
            except ValueError as error:  # objects, which would be unpickled
                left_out.append(f"{name} ({error})")
            except ArgumentError as error:
                left_out.append(str(error))
    return TensorFile(tensors, None, left_out)


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
    for name, value in _leaves("", content):
        if not isinstance(value, torch.Tensor):
            left_out.append(f"{name} ({type(value).__name__})")
        elif (name or ONLY_NAME) in tensors:
            raise ArgumentError(f"{where}: two tensors would be called {name!r}")
        else:
            tensors[name or ONLY_NAME] = value.detach()
    return TensorFile(tensors, None, left_out)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is in nested dicts and lists, with dotted names."""
    if isinstance(value, Mapping):
        children = list(value.items())
    elif isinstance(value, (list, tuple)):
        children = list(enumerate(value))
    else:
        yield name, value
        return
    for key, child in children:
        yield from _leaves(f"{name}.{key}" if name else str(key), child)


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
