"""The kernels on a GPU: CUDA C++ text, compiled by cupy at first use, run on torch's stream."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import BitslabError, CorruptedDataError, IndexRangeError, load_optional
from .launch import CudaKernels
from .runner import INDEX_ERROR, MAILBOX_WORDS
from .source import AnyVariant, kernels_of, source_text
from .stream import stream_pointer

__all__ = ["CudaKernels", "kernels_on", "raise_pending_errors"]

_lock = threading.Lock()
_runners: dict[int, CupyRunner] = {}


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
        self._functions: dict[tuple[AnyVariant, str], Any] = {}
        self._shared_bytes: dict[tuple[AnyVariant, str], int] = {}  # that kernels may ask for
        self._streams: dict[int, Any] = {}  # cupy's objects for torch's streams, by address
        properties = torch.cuda.get_device_properties(device)
        self.multiprocessors: int = properties.multi_processor_count
        self.shared_bytes_per_multiprocessor: int = properties.shared_memory_per_multiprocessor
        self.mailbox = torch.zeros(MAILBOX_WORDS, dtype=torch.int64).pin_memory()
        self._mail = self.mailbox.numpy()
        self.kernels = CudaKernels(self)

    def function(self, variant: AnyVariant, kernel: str) -> Any:
        """Return a compiled kernel; cupy keeps the binary on disk for the next process."""
        found = self._functions.get((variant, kernel))
        if found is None:
            options = ["--std=c++17", *(f"-D{k}={v}" for k, v in variant.defines().items())]
            module = self._cupy.RawModule(code=source_text(variant.file), options=tuple(options))
            with self._cupy.cuda.Device(self._device.index):
                for name in kernels_of(variant):
                    self._functions[variant, name] = module.get_function(name)
            found = self._functions[variant, kernel]
        return found

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
        function = self.function(variant, kernel)
        # More than 48 KiB, static arrays included, must be asked for.
        if shared_bytes > self._shared_bytes.get((variant, kernel), 40 << 10):
            function.max_dynamic_shared_size_bytes = shared_bytes
            self._shared_bytes[variant, kernel] = shared_bytes
        raw = tuple(
            a.data_ptr() if isinstance(a, torch.Tensor) else 0 if a is None else a for a in args
        )
        pointer = stream_pointer(self._device)
        stream = self._streams.get(pointer)
        if stream is None:
            current = torch.cuda.current_stream(self._device)
            stream = self._streams[pointer] = self._cupy.cuda.Stream.from_external(current)
        if torch.cuda.current_device() == self._index:
            function(grid, block, raw, shared_mem=shared_bytes, stream=stream)
            return
        with self._cupy.cuda.Device(self._index):
            function(grid, block, raw, shared_mem=shared_bytes, stream=stream)

    def raise_pending(self) -> None:
        """Raise the error that a kernel told of, if any, and forget it. Waits for nothing."""
        if not self._mail[0] or torch.cuda.is_current_stream_capturing():
            return
        kind, where, index, n_rows = self.mailbox.tolist()
        self.mailbox.zero_()
        if kind == INDEX_ERROR:
            raise IndexRangeError(
                f"indices: an earlier decode on {self._device} got index {index} at position "
                f"{where}, out of range for {n_rows} rows; its output was left untouched"
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

    Decoding never waits for the GPU, so an index out of range or a damaged row that only the
    kernel sees is told by the next call on that device, or here.

    Parameters
    ----------
    device : torch.device or str, optional
        The GPU; all that were used when left out.

    Raises
    ------
    IndexRangeError
        When an index was out of range; the output of that decode was left untouched.
    CorruptedDataError
        When a packed row was damaged; that row of the output is undefined.
    """
    if device is None:
        devices = [torch.device("cuda", index) for index in _runners]
    else:
        devices = [torch.device(device)]
    for each in devices:
        if each.type == "cuda":
            torch.cuda.synchronize(each)
            _runner(each).raise_pending()
