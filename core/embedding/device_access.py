"""What lookups by ids on a device ask of it: its kernels, and the host memory that these reach."""

from __future__ import annotations

import torch

from ..engine.kernels.cuda import CudaKernels, kernels_on
from ..engine.memory.host import HostBuffer
from ..tables.gpu_writes import GpuWrites
from ..tables.table import CompressedTable


class DeviceAccess:
    """The kernels of GPUs, and host memory as they read and write it."""

    def kernels(self, device: torch.device, *, raise_errors: bool = True) -> CudaKernels:
        """Return the kernels of a device; by default raise the error that an earlier one met."""
        return kernels_on(device, raise_errors=raise_errors)

    def reads_memory(self, buffer: HostBuffer) -> bool:
        """Return whether kernels can read and write a buffer."""
        return buffer.pinned

    def reads_table(self, table: CompressedTable) -> bool:
        """Return whether kernels can read a table's rows; page-lock them if so."""
        return table.readable_by_gpu()

    def raw_rows(self, table: CompressedTable) -> torch.Tensor | None:
        """Return raw rows that kernels may overwrite; see `CompressedTable.rows_for_gpu`."""
        return table.rows_for_gpu()

    def packed_rows(self, table: CompressedTable, device: torch.device) -> GpuWrites | None:
        """Return what packs rows into a table; see `CompressedTable.writes_by_gpu`."""
        return table.writes_by_gpu(device)

    def gather_some(self, table: CompressedTable, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Gather rows of a table; see `CompressedTable.gather_some_on_gpu`."""
        table.gather_some_on_gpu(ids, out)


#: By the type of the device. On others the host looks rows up.
DEVICES: dict[str, DeviceAccess] = {"cuda": DeviceAccess()}


def access_to(device: torch.device) -> DeviceAccess | None:
    """Return how lookups reach a device by themselves, or None where the host does all."""
    return DEVICES.get(device.type)
