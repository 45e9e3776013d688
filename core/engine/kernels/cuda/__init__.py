"""The kernels on a GPU: CUDA C++ text, compiled by cupy at first use, run on torch's stream."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ....devices import checked_device
from ....errors import (
    ArgumentError,
    BitslabError,
    CorruptedDataError,
    IndexRangeError,
    load_optional,
)
from ..compile_notice import CompileNotice
from .launch import CudaKernels
from .runner import INDEX_ERROR, MAILBOX_WORDS, OFFSETS_ERROR
from .source import AnyVariant, kernels_of, source_text

__all__ = ["CudaKernels", "kernels_on", "raise_pending_errors"]

# Before it looks into its cache, cupy loads NVRTC and asks it for a few things.
notice = CompileNotice("kernels for the GPU", load_s=0.5)

_lock = threading.Lock()
_runners: dict[int, CupyRunner] = {}
_local = threading.local()


class _Frame:
    """Memory for the arguments of one launch: eight bytes each, and where each lies.

    A kernel reads as many of the eight bytes as its parameter has, the lowest first.

    Parameters
    ----------
    values : sequence of int
        The arguments.
    first : sequence of int
        Those that come first in `values` of the frame; the others follow.
    """

    __slots__ = ("_places", "address", "values")

    def __init__(self, values: Sequence[int], first: Sequence[int] = ()) -> None:
        n = len(values)
        order = [*first, *(i for i in range(n) if i not in first)]
        self.values = (ctypes.c_int64 * n)(*(values[i] for i in order))
        begin = ctypes.addressof(self.values)
        self._places = (ctypes.c_void_p * n)(*(begin + 8 * order.index(i) for i in range(n)))
        self.address = ctypes.addressof(self._places)


class _Kernel:
    """A compiled kernel."""

    __slots__ = ("address", "function", "shared_bytes")

    def __init__(self, function: Any) -> None:
        self.function = function
        self.address: int = function.kernel.ptr
        # That it may ask for; more than 48 KiB, static arrays included, must be asked for.
        self.shared_bytes = 40 << 10


class _Prepared:
    """See `Runner.prepare`."""

    def __init__(
        self,
        runner: CupyRunner,
        kernel: _Kernel,
        threads: int,
        args: Sequence[Any],
        changing: Sequence[int],
        shared_bytes: int,
    ) -> None:
        self._runner = runner
        self._address = kernel.address
        self._threads = threads
        self._owners = args  # of the memory that the arguments point to
        self._values = [_value(a) for a in args]
        self._changing = tuple(changing)
        self._put = struct.Struct(f"={len(changing)}q").pack_into
        self._shared_bytes = shared_bytes
        # One for each launch that is being put together: by threads, or a finaliser amid another.
        self._frames: list[_Frame] = []

    def __call__(self, blocks: int, *changing: int) -> None:
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _Frame(self._values, self._changing)
        self._put(frame.values, 0, *changing)
        block = (self._threads, 1, 1)
        self._runner.start(self._address, (blocks, 1, 1), block, self._shared_bytes, frame.address)
        self._frames.append(frame)


def _value(argument: Any) -> int:
    """Return what stands for an argument in a frame."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return 0 if argument is None else int(argument)


class CupyRunner:
    """Compiles kernels with cupy and starts them on torch's current stream.

    Parameters
    ----------
    device : torch.device
        The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._cupy = load_optional(
            "cupy",
            extra="cuda12" if (torch.version.cuda or "").startswith("12") else "cuda13",
            purpose="packed rows on a GPU",
        )
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        # cupy's own launches take thrice the time of these.
        self._launch: Any = self._cupy.cuda.driver.launchKernel
        self._kernels: dict[tuple[AnyVariant, str], _Kernel] = {}
        self._frames: dict[int, list[_Frame]] = {}  # by number of arguments
        properties = torch.cuda.get_device_properties(device)
        self.multiprocessors: int = properties.multi_processor_count
        self.shared_bytes_per_multiprocessor: int = properties.shared_memory_per_multiprocessor
        self.mailbox = torch.zeros(MAILBOX_WORDS, dtype=torch.int64).pin_memory()
        self._mail = self.mailbox.numpy()
        self.kernels = CudaKernels(self)

    def _kernel(self, variant: AnyVariant, kernel: str, shared_bytes: int) -> _Kernel:
        """Return a compiled kernel; cupy keeps the binary on disk for the next process."""
        found = self._kernels.get((variant, kernel))
        if found is None or shared_bytes > found.shared_bytes:
            with self._cupy.cuda.Device(self._index):
                if found is None:
                    self._compile(variant)
                    found = self._kernels[variant, kernel]
                if shared_bytes > found.shared_bytes:
                    found.function.max_dynamic_shared_size_bytes = shared_bytes
                    found.shared_bytes = shared_bytes
        return found

    def _compile(self, variant: AnyVariant) -> None:
        options = ["--std=c++17", *(f"-D{k}={v}" for k, v in variant.defines().items())]
        module = self._cupy.RawModule(code=source_text(variant.file), options=tuple(options))
        with notice.watching():
            for name in kernels_of(variant):
                self._kernels[variant, name] = _Kernel(module.get_function(name))

    def launch(
        self,
        variant: AnyVariant,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_bytes: int = 0,
    ) -> None:
        """Start a kernel on torch's current stream of the device."""
        address = self._kernel(variant, kernel, shared_bytes).address
        values: list[ctypes.c_int64 | int] = [_value(a) for a in args]
        frames = self._frames.setdefault(len(values), [])
        try:
            frame = frames.pop()
        except IndexError:
            frame = _Frame([0] * len(values))
        frame.values[:] = values
        self.start(address, _three(grid), _three(block), shared_bytes, frame.address)
        frames.append(frame)

    def prepare(
        self,
        variant: AnyVariant,
        kernel: str,
        threads: int,
        args: Sequence[Any],
        changing: Sequence[int],
        shared_bytes: int = 0,
    ) -> _Prepared:
        """Return a kernel ready for launches that differ in few arguments."""
        found = self._kernel(variant, kernel, shared_bytes)
        return _Prepared(self, found, threads, args, changing, shared_bytes)

    def start(
        self,
        address: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        places: int,
    ) -> None:
        """Start a kernel on torch's current stream of the device.

        Parameters
        ----------
        address : int
            Of the kernel.
        grid, block : tuple of int
            Blocks of the grid, threads of a block.
        shared_bytes : int
            Dynamic shared memory of a block.
        places : int
            Address of an array with the address of each argument.
        """
        if torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self._index):
                self.start(address, grid, block, shared_bytes, places)
            return
        if not getattr(_local, "ready", False):
            # Of a new thread the driver knows no context until the runtime has been asked for one.
            self._cupy.cuda.runtime.setDevice(self._index)
            _local.ready = True
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        self._launch(address, *grid, *block, shared_bytes, stream, places, 0)

    def raise_pending(self) -> None:
        """Raise the error in the mailbox, if any, and clear it. Waits for nothing."""
        if not self._mail[0] or torch.cuda.is_current_stream_capturing():
            return
        kind, where, index, n_rows = self.mailbox.tolist()
        self.mailbox.zero_()
        if kind == INDEX_ERROR:
            raise IndexRangeError(
                f"indices: an earlier decode on {self._device} got index {index} at position "
                f"{where}, out of range for {n_rows} rows; its output is not to be used"
            )
        if kind == OFFSETS_ERROR:
            raise ArgumentError(
                f"offsets: an earlier lookup of {n_rows} ids on {self._device} got such as do not "
                f"rise from 0 to at most {n_rows}, as seen at position {where}; its output is not "
                "to be used"
            )
        place = "a row" if where < 0 else f"row {where}"
        raise CorruptedDataError(
            f"packed: {place} of an earlier decode on {self._device} is damaged"
        )


def _three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _runner(device: torch.device) -> CupyRunner:
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        if index not in _runners:
            _runners[index] = CupyRunner(torch.device("cuda", index))
        return _runners[index]


def kernels_on(device: torch.device, *, tell: bool = True) -> CudaKernels:
    """Return the kernels of a GPU.

    Parameters
    ----------
    device : torch.device
        The GPU.
    tell : bool
        Whether to raise the error of an earlier call there, if one is known.
    """
    runner = None if device.index is None else _runners.get(device.index)
    if runner is None:
        if not torch.cuda.is_available():
            raise BitslabError(f"device: {device}, but torch sees no CUDA GPU")
        runner = _runner(device)
    if tell:
        runner.raise_pending()
    return runner.kernels


def raise_pending_errors(device: torch.device | str | None = None) -> None:
    """Wait for a GPU and raise the error that a decode on it met, if any.

    Decoding never waits for the GPU, so an index out of range, offsets of bags that are not sound,
    or a damaged row that only the kernel sees is raised by the next call on that device, or here.

    Parameters
    ----------
    device : torch.device or str, optional
        The GPU; all that were used when left out.

    Raises
    ------
    IndexRangeError
        When an index was out of range; the output of that decode is not to be used.
    ArgumentError
        When offsets of bags were not sound; the output of that lookup is not to be used.
    CorruptedDataError
        When a packed row was damaged; that row of the output is undefined.
    """
    if device is None:
        devices = [torch.device("cuda", index) for index in _runners]
    else:
        devices = [checked_device(device)]
    for each in devices:
        if each.type == "cuda":
            torch.cuda.synchronize(each)
            _runner(each).raise_pending()
