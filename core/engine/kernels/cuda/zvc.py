"""Zero-value compression of whole tensors on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..blob_format import ALIGN_BYTES, ZvcLayout, zvc_blocks, zvc_threads
from .parameters import Address, Int32, Int64, Parameters
from .runner import Launch, Runner
from .source import zvc_variant
from .tiles import aligned_to


@dataclass(init=False)
class EncodeZvc(Parameters):
    """Parameters of `encode_zvc`: the numbers of a `ZvcLayout`, and what the header says.

    `values` are `values_at` in `data` or elsewhere. `states`, int64 ``[blocks + 1]``, are 0 at the
    start.
    """

    kernel = "encode_zvc"

    x: Address
    units: Int64
    blocks: Int64
    elements: Int64
    element_bytes: Int32
    form: Int32
    starts_at: Int64
    bitmap_at: Int64
    values_at: Int64
    fill_bytes: Int32
    data: Address
    values: Address
    states: Address


@dataclass(init=False)
class DecodeZvc(Parameters):
    """Parameters of `decode_zvc`: as of `EncodeZvc`; errors go to the mailbox."""

    kernel = "decode_zvc"

    data: Address
    data_bytes: Int64
    units: Int64
    blocks: Int64
    elements: Int64
    element_bytes: Int32
    form: Int32
    starts_at: Int64
    bitmap_at: Int64
    values_at: Int64
    values: Address
    value_room: Int64
    out: Address
    mailbox: Address


class ZvcKernels:
    """The kernels of zvc.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launches: dict[tuple[int, type[Parameters]], Launch] = {}

    def encode_zvc(
        self,
        x: torch.Tensor,
        layout: ZvcLayout,
        form: int,
        data: torch.Tensor,
        sm_budget: int | None = None,
        values: torch.Tensor | None = None,
        fill_bytes: int = ALIGN_BYTES,
    ) -> None:
        """Encode a tensor; see `kernels.cpu.encode_zvc`."""
        x = aligned_to(x, layout.unit_bytes)
        states = torch.zeros(layout.blocks + 1, dtype=torch.int64, device=x.device)
        self._launch(layout, EncodeZvc)(
            self._blocks(layout, sm_budget, zvc_blocks(layout.unit_bytes)),
            x.data_ptr(),
            layout.units,
            layout.blocks,
            layout.elements,
            layout.element_bytes,
            form,
            layout.starts_at,
            layout.bitmap_at,
            layout.values_at,
            fill_bytes,
            data.data_ptr(),
            data.data_ptr() + layout.values_at if values is None else values.data_ptr(),
            states.data_ptr(),
        )

    def decode_zvc(
        self,
        data: torch.Tensor,
        layout: ZvcLayout,
        form: int,
        out: torch.Tensor,
        sm_budget: int | None = None,
        values: torch.Tensor | None = None,
    ) -> None:
        """Decode a tensor; see `kernels.cpu.decode_zvc`. Damage is in the mailbox."""
        if values is None:  # there may be none: an empty slice would have no address
            values_from = data.data_ptr() + layout.values_at
            room = max(0, data.shape[0] - layout.values_at)
        else:
            values_from, room = values.data_ptr(), values.shape[0]
        self._launch(layout, DecodeZvc)(
            self._blocks(layout, sm_budget, zvc_blocks(layout.unit_bytes, decodes=True)),
            data.data_ptr(),
            data.shape[0],
            layout.units,
            layout.blocks,
            layout.elements,
            layout.element_bytes,
            form,
            layout.starts_at,
            layout.bitmap_at,
            layout.values_at,
            values_from,
            room,
            out.data_ptr(),
            self._runner.mailbox.data_ptr(),
        )

    def _launch(self, layout: ZvcLayout, parameters: type[Parameters]) -> Launch:
        unit_bytes = layout.unit_bytes
        found = self._launches.get((unit_bytes, parameters))
        if found is None:
            threads = zvc_threads(unit_bytes)
            found = self._runner.bind(zvc_variant(unit_bytes), parameters, threads)
            self._launches[unit_bytes, parameters] = found
        return found

    def _blocks(self, layout: ZvcLayout, sm_budget: int | None, at_once: int) -> int:
        """Return the blocks of a launch: one for each of the layout, or as many as may run."""
        if sm_budget is None:
            return max(1, layout.blocks)
        processors = max(1, min(sm_budget, self._runner.multiprocessors))
        return max(1, min(layout.blocks, processors * at_once))
