"""Loads CUDA C kernel text for the CPU, the way ``cupy.RawModule`` loads it for a GPU.

The text is compiled by g++ with ``simt.hpp`` in front of it; see there for what is emulated and
what is checked. Compiled modules are kept in the folder named by ``BITSLAB_SIMT_CACHE``, or else
in ``build/simt`` below the repository's root.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch

__all__ = ["ModuleSpec", "SimtCompileError", "SimtError", "SimtModule", "compile_many", "guarded"]

_HEADER = Path(__file__).with_name("simt.hpp")
_COMPILER = "g++"
_FLAGS = (
    "-std=c++20",
    "-Og",  # -O1 compiles a third slower than it runs faster; -O0 runs the planner twice as long
    "-fPIC",
    "-fno-exceptions",
    # Two loaded modules must not share the static shared memory of a template they both use.
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    # What NVRTC lets kernels do, and g++ would take as leave to miscompile.
    "-fno-strict-aliasing",
    "-fwrapv",
    "-fstack-clash-protection",  # a deep frame meets the guard below its stack, never steps over it
    "-fno-delete-null-pointer-checks",
    "-ffp-contract=off",
    # A siglongjmp from one fiber's stack to the launch is no smashed stack.
    "-U_FORTIFY_SOURCE",
    # Reported by handlers in simt.hpp; the sanitizer's own library is neither needed nor linked.
    "-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero",
    "-fno-sanitize-recover=all",
    # With the line before: a sixth less time to compile, and no more to run.
    "-fira-algorithm=priority",
    "-fira-region=one",
    "-Wno-unknown-pragmas",
)
_DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?"
    r"(?P<type>[\w:\s]*?\w)\s+(?P<name>\w+)\s*\[\s*\]\s*;"
)
# The emulator's state, memory and signal handlers belong to one launch at a time.
_LAUNCH_LOCK = threading.Lock()

_T = TypeVar("_T", np.ndarray[Any, Any], torch.Tensor)


class SimtCompileError(RuntimeError):
    """The compiler refused the kernel text; the message is the compiler's."""


class SimtError(RuntimeError):
    """A kernel broke a rule; the message names kernel, block, thread and what every lane did."""


class ModuleSpec(NamedTuple):
    """What one module is compiled from: the arguments of `SimtModule`."""

    source: str
    defines: Mapping[str, str | int]
    kernels: Sequence[str]


class _Memory(ctypes.Structure):
    _fields_ = [("stacks", ctypes.c_void_p), ("shared_arena", ctypes.c_void_p)]


class _Shape(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("seed", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("traced", ctypes.c_uint),
        ("memory", _Memory),
    ]


#: Of every launch of every module of this process, mapped by the first.
_memory = _Memory()

#: A load that a kernel made through load_unit (host_load.cuh); loads of one block, warp and step
#: are one instruction.
LOAD = np.dtype(
    [
        ("block", np.uint32),
        ("thread", np.uint32),
        ("step", np.uint32),
        ("bytes", np.uint32),
        ("address", np.uint64),
    ]
)


@functools.cache
def _compiler_version() -> str:
    command = [_COMPILER, "--version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _cache_folder() -> Path:
    folder = os.environ.get("BITSLAB_SIMT_CACHE")
    path = Path(folder) if folder else Path(__file__).resolve().parents[2] / "build" / "simt"
    path.mkdir(parents=True, exist_ok=True)
    return path


def _host_text(source: str, kernels: Sequence[str]) -> str:
    """Rewrite what no macro can and append the exported entry points."""
    text = _DYNAMIC_SHARED.sub(
        r"\g<type>* \g<name> = reinterpret_cast<\g<type>*>(::simt::dynamic_shared());", source
    )
    if left := re.search(r"extern\s+__shared__[^;]*;", text):
        raise ValueError(
            f"cannot rewrite {left.group()!r}: expected "
            "`extern __shared__ [__align__(n)] T name[];` inside a function"
        )
    exports = "".join(f"SIMT_EXPORT({name})\n" for name in kernels)
    return f'#line 1 "kernel.cu"\n{text}\n#line 1 "exports"\n{exports}'


def _compile(spec: ModuleSpec) -> Path:
    """Return the shared library of `spec`, from the cache or freshly compiled."""
    text = _host_text(spec.source, spec.kernels)
    flags = [*_FLAGS, *(f"-D{name}={value}" for name, value in sorted(spec.defines.items()))]
    parts = (text, *flags, _HEADER.read_text(), _compiler_version())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    library = _cache_folder() / f"{key}.so"
    if library.exists():
        return library
    # Everything is written under names of our own; the rename makes it whole for other processes.
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="compile-") as folder:
        kernel, object_file, built = (Path(folder, f"kernel.{end}") for end in ("cu", "o", "so"))
        kernel.write_text(text)
        compile_ = [*flags, "-include", str(_header()), "-x", "c++", "-c", str(kernel)]
        compile_ += ["-o", str(object_file)]
        # Linked apart from -fsanitize, which would ask for its run-time library; without the start
        # files and the C++ library, which nothing here needs and which take most of the time.
        link = ["-shared", "-nostdlib", str(object_file), "-lgcc", "-lm", "-lc", "-o", str(built)]
        for arguments in (compile_, link):
            _run_compiler(arguments)
        os.replace(built, library)
    return library


def _run_compiler(arguments: Sequence[str]) -> None:
    done = subprocess.run([_COMPILER, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SimtCompileError(f"{_COMPILER} failed:\n{done.stderr}")


@functools.cache
def _header() -> Path:
    """Return simt.hpp beside what g++ has made of it, which it takes instead.

    Reading the header and what it includes is a third of the time that a kernel takes.
    """
    text = _HEADER.read_text()
    key = hashlib.sha256("\0".join((text, *_FLAGS, _compiler_version())).encode()).hexdigest()[:32]
    folder = _cache_folder() / f"{key}.header"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="compile-") as made:
            header = Path(made, "header", _HEADER.name)
            header.parent.mkdir()
            header.write_text(text)
            _run_compiler([*_FLAGS, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
            # Another process may have been first.
            with contextlib.suppress(OSError):
                header.parent.rename(folder)
    return folder / _HEADER.name


class SimtModule:
    """CUDA C text compiled for the CPU.

    Parameters
    ----------
    source : str
        The kernel text, as NVRTC would take it. ``SIMT_HOST`` is defined while it is compiled.
    defines : mapping of str to str or int
        Preprocessor macros.
    kernels : sequence of str
        The names to launch, each defined as ``extern "C" __global__ void name(...)``.

    Raises
    ------
    SimtCompileError
        With the compiler's messages; lines are those of `source`, in a file "kernel.cu".

    Examples
    --------
    >>> text = 'extern "C" __global__ void twice(int* x) { x[threadIdx.x] *= 2; }'
    >>> x = torch.arange(4, dtype=torch.int32)
    >>> SimtModule(text, {}, ["twice"]).launch("twice", 1, 4, [x])
    >>> x.tolist()
    [0, 2, 4, 6]
    """

    def __init__(
        self, source: str, defines: Mapping[str, str | int], kernels: Sequence[str]
    ) -> None:
        library = ctypes.CDLL(str(_compile(ModuleSpec(source, defines, kernels))))
        self._launchers: dict[str, Any] = {}
        self._signatures: dict[str, list[str]] = {}
        for name in kernels:
            launcher, signature = library[f"simt_launch_{name}"], library[f"simt_signature_{name}"]
            launcher.restype = signature.restype = ctypes.c_char_p
            launcher.argtypes = [ctypes.POINTER(_Shape), ctypes.POINTER(ctypes.c_void_p)]
            self._launchers[name] = launcher
            self._signatures[name] = signature().decode().split()
        self._map_memory = library.simt_map_memory
        self._map_memory.restype = ctypes.c_bool
        self._map_memory.argtypes = [ctypes.POINTER(_Memory)]
        self._loads = library.simt_loads
        self._loads.restype = ctypes.c_void_p
        self._loads.argtypes = [ctypes.POINTER(ctypes.c_size_t)]

    def launch(
        self,
        name: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        *,
        shared_bytes: int = 0,
        seed: int = 0,
        traced: bool = False,
    ) -> np.ndarray[Any, Any] | None:
        """Run a kernel to its end.

        Parameters
        ----------
        name : str
            One of the module's `kernels`.
        grid, block : int or sequence of up to three int
            Blocks in the grid and threads in a block, x first.
        args : sequence
            One for each parameter. A pointer takes a torch CPU tensor or a numpy array, whose
            memory the kernel uses in place, a ctypes.c_void_p, or None for null; an integer or
            float parameter takes a numpy scalar of exactly its size.
        shared_bytes : int
            Dynamic shared memory of a block.
        seed : int
            Order in which lanes run: 0 is ring order, any other is a random order of its own.
        traced : bool
            Whether to keep the loads that the kernel makes through ``load_unit``.

        Returns
        -------
        numpy.ndarray or None
            The loads of a traced launch, of dtype LOAD, in the order in which they were made.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit the kernel's parameter; nothing has run.
        SimtError
            If the kernel broke a rule. What it wrote until then remains written.
        """
        if name not in self._launchers:
            raise ValueError(f"no kernel {name!r} in this module, only {sorted(self._launchers)}")
        signature = self._signatures[name]
        if len(args) != len(signature):
            raise TypeError(f"{name} takes {len(signature)} arguments, {len(args)} given")
        values = [
            _argument_bytes(argument, parameter, f"argument {i} of {name}")
            for i, (argument, parameter) in enumerate(zip(args, signature, strict=True))
        ]
        buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
        pointers = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        extents = _extent(grid, "grid"), _extent(block, "block")
        with _LAUNCH_LOCK:
            if not _memory.stacks and not self._map_memory(_memory):
                raise MemoryError("no memory for the stacks of a block's threads")
            shape = _Shape(*extents, seed, shared_bytes, traced, _memory)
            error = self._launchers[name](shape, pointers)
            if error is not None:
                raise SimtError(error.decode())
            if not traced:
                return None
            n = ctypes.c_size_t()
            address = self._loads(n)
            return np.frombuffer(ctypes.string_at(address or 0, n.value * LOAD.itemsize), LOAD)


def _extent(value: int | Sequence[int], what: str) -> tuple[int, ...]:
    sizes = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ValueError(f"{what} must be one to three positive sizes, not {value!r}")
    return sizes + (1,) * (3 - len(sizes))


def _argument_bytes(argument: object, parameter: str, where: str) -> bytes:
    """Return the bytes that the kernel's parameter takes; `parameter` is such as "p8" or "i4"."""
    kind, size = parameter[0], int(parameter[1:])
    if argument is None or isinstance(argument, torch.Tensor | np.ndarray | ctypes.c_void_p):
        if kind != "p":
            raise TypeError(f"{where} is a value of {size} bytes, not a pointer")
        address = 0
        if isinstance(argument, torch.Tensor):
            if argument.device.type != "cpu":
                raise ValueError(f"{where} is on {argument.device}; kernels here run on the CPU")
            address = argument.data_ptr()
        elif isinstance(argument, np.ndarray):
            address = argument.ctypes.data
        elif argument is not None:
            address = argument.value or 0
        return address.to_bytes(size, "little")
    if not isinstance(argument, np.generic):
        raise TypeError(
            f"{where} is a {type(argument).__name__}, whose size is ambiguous: pass a numpy scalar "
            "such as np.int32(n), a torch CPU tensor, a numpy array or None"
        )
    if kind == "p":
        raise TypeError(f"{where} is a pointer, not a {type(argument).__name__}")
    if argument.itemsize != size or (kind == "f") != (argument.dtype.kind == "f"):
        wanted = "float" if kind == "f" else "integer"
        raise TypeError(f"{where} is a {size}-byte {wanted}, not a {type(argument).__name__}")
    return argument.tobytes()


def compile_many(specs: Iterable[ModuleSpec], workers: int | None = None) -> list[SimtModule]:
    """Compile several modules, `workers` compilers at a time.

    Parameters
    ----------
    specs : iterable of ModuleSpec
        What to compile; a plain tuple of the three fields will do.
    workers : int, optional
        Compiler processes that run at once; by default the number of processors.

    Returns
    -------
    list of SimtModule
        In the order of `specs`.
    """
    # The threads only wait for compilers, which are processes of their own.
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        return list(pool.map(lambda spec: SimtModule(*spec), specs))


def guarded(data: _T, *, side: Literal["end", "start"] = "end") -> _T:
    """Copy `data` to memory beside a page that may not be touched.

    A kernel that runs over the guarded side is stopped with a `SimtError`. Python code that does so
    ends the process, as ever.

    Parameters
    ----------
    data : numpy.ndarray or torch.Tensor
        Any shape and dtype, on the CPU.
    side : {"end", "start"}
        Which side of the copy touches the forbidden page. With "start" the copy begins on a page;
        with "end" its address is as aligned as its size in bytes: 16 bytes if the size is a
        multiple of 16, and always at least one element.

    Returns
    -------
    numpy.ndarray or torch.Tensor
        A contiguous copy of the same kind, shape and dtype. The memory lives as long as it does.
    """
    if side not in ("end", "start"):
        raise ValueError(f'side must be "end" or "start", not {side!r}')
    if isinstance(data, torch.Tensor):
        flat = data.detach().contiguous().reshape(-1).view(torch.uint8)
        copy = torch.from_numpy(_guarded_bytes(flat.numpy(), side))
        return copy.view(data.dtype).reshape(data.shape)
    raw = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)
    array: np.ndarray[Any, Any] = _guarded_bytes(raw, side).view(data.dtype)
    return array.reshape(data.shape)


def _guarded_bytes(raw: np.ndarray[Any, Any], side: str) -> np.ndarray[Any, Any]:
    page = mmap.PAGESIZE
    room = max(1, -(-raw.size // page)) * page
    memory = mmap.mmap(-1, room + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(memory, np.uint8)  # holds the mapping for as long as a view of it lives
    guard, begin = (room, room - raw.size) if side == "end" else (0, page)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(whole.ctypes.data + guard)
    no_access = 0
    if libc.mprotect(address, ctypes.c_size_t(page), no_access):
        raise OSError(ctypes.get_errno(), "mprotect failed")
    copy = whole[begin : begin + raw.size]
    copy[:] = raw
    return copy
