"""The kernels on a GPU: CUDA C++ text, compiled by cupy at first use, run on torch's stream."""

from __future__ import annotations

import threading
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
from .frames import BoundKernel, Sizes
from .kernels import CudaKernels
from .parameters import Parameters, Value
from .runner import BLOB_ERROR, INDEX_ERROR, MAILBOX_WORDS, OFFSETS_ERROR, SLOTS_ERROR
from .source import AnyVariant, kernels_of, source_text

__all__ = ["CudaKernels", "kernels_on", "raise_pending_errors"]

# Before it looks into its cache, cupy loads NVRTC and asks it for a few things.
notice = CompileNotice("kernels for the GPU", load_s=0.5)

_lock = threading.Lock()
_runners: dict[int, CupyRunner] = {}
_local = threading.local()


class _Kernel:
    """A compiled kernel."""

    __slots__ = ("address", "function", "shared_bytes")

    def __init__(self, function: Any) -> None:
        self.function = function
        self.address: int = function.kernel.ptr
        # That it may ask for; more than 48 KiB, static arrays included, must be asked for.
        self.shared_bytes = 40 << 10


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

    def bind(
        self,
        variant: AnyVariant,
        parameters: type[Parameters],
        threads: int | Sizes,
        shared_bytes: int = 0,
        /,
        **fixed: Value,
    ) -> BoundKernel:
        """Return a kernel that is ready to be started; see `Runner.bind`."""
        address = self._kernel(variant, parameters.kernel, shared_bytes).address
        return BoundKernel(self.start, address, parameters, threads, shared_bytes, fixed)

    def start(
        self,
        address: int,
        grid: Sizes,
        block: Sizes,
        shared_bytes: int,
        places: int,
        stream: int | None = None,
    ) -> None:
        """Start a kernel on a stream of the device.

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
        stream : int, optional
            Address of the stream; torch's current one when left out.
        """
        if torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self._index):
                self.start(address, grid, block, shared_bytes, places, stream)
            return
        if not getattr(_local, "ready", False):
            # Of a new thread the driver knows no context until the runtime has been asked for one.
            self._cupy.cuda.runtime.setDevice(self._index)
            _local.ready = True
        if stream is None:
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
        if kind == SLOTS_ERROR:
            raise BitslabError(
                f"cache: an earlier lookup on {self._device} found {where} slots for {index} rows; "
                "its output is not to be used. This is a bug of bitslab"
            )
        if kind == BLOB_ERROR:
            place = "the header" if where < 0 else f"block {where}"
            raise CorruptedDataError(
                f"blob: {place} of an earlier decode on {self._device} is damaged"
            )
        place = "a row" if where < 0 else f"row {where}"
        raise CorruptedDataError(
            f"packed: {place} of an earlier decode on {self._device} is damaged"
        )


def _runner(device: torch.device) -> CupyRunner:
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        if index not in _runners:
            _runners[index] = CupyRunner(torch.device("cuda", index))
        return _runners[index]


def kernels_on(device: torch.device, *, raise_errors: bool = True) -> CudaKernels:
    """Return the kernels of a GPU.

    Parameters
    ----------
    device : torch.device
        The GPU.
    raise_errors : bool
        Whether to raise the error that an earlier call on the GPU met, if it is known by now. If
        not, it waits for the next call that does.

    Raises
    ------
    BitslabError
        When torch sees no GPU.
    IndexRangeError, ArgumentError, CorruptedDataError
        Of an earlier call; see `raise_pending_errors`.
    """
    runner = None if device.index is None else _runners.get(device.index)
    if runner is None:
        if not torch.cuda.is_available():
            raise BitslabError(f"device: {device}, but torch sees no CUDA GPU")
        runner = _runner(device)
    if raise_errors:
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
