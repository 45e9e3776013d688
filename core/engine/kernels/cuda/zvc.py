"""Zero-value compression of whole tensors on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..blob_format import ALIGN_BYTES, ZvcLayout, zvc_blocks, zvc_threads
from .driver import zero_words
from .parameters import Address, Int32, Int64, Parameters, Value
from .runner import Launch, Runner
from .source import zvc_variant
from .tiles import aligned_to

#: Launches that are kept, one for each size of a tensor.
MOST_BOUND = 1024


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
        #: By id of a layout, form and fill: with the layout, so that no other one gets its number.
        self._encoders: dict[tuple[int, int, int], tuple[ZvcLayout, Launch]] = {}
        self._decoders: dict[tuple[int, int], tuple[ZvcLayout, Launch]] = {}

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
        """Encode a tensor; see `kernels.cpu.encode_zvc`. `x` may have any dtype."""
        found = self._encoders.get((id(layout), form, fill_bytes))
        launch = self._bind_encoder(layout, form, fill_bytes) if found is None else found[1]
        if (x_at := x.data_ptr()) % layout.unit_bytes:
            x = aligned_to(x, layout.unit_bytes)
            x_at = x.data_ptr()
        states = zero_words(layout.blocks + 1, x.device)
        address = data.data_ptr()
        launch(
            self._blocks(layout, sm_budget, decodes=False),
            x_at,
            address,
            address + layout.values_at if values is None else values.data_ptr(),
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
        """Decode a tensor; see `kernels.cpu.decode_zvc`. Damage is in the mailbox.

        `out` may have any dtype.
        """
        found = self._decoders.get((id(layout), form))
        launch = self._bind_decoder(layout, form) if found is None else found[1]
        address, nbytes = data.data_ptr(), data.shape[0]
        if values is None:  # there may be none: an empty slice would have no address
            values_from = address + layout.values_at
            room = max(0, nbytes - layout.values_at)
        else:
            values_from, room = values.data_ptr(), values.shape[0]
        launch(
            self._blocks(layout, sm_budget, decodes=True),
            address,
            nbytes,
            values_from,
            room,
            out.data_ptr(),
        )

    def _bind_encoder(self, layout: ZvcLayout, form: int, fill_bytes: int) -> Launch:
        launch = self._bind(layout, EncodeZvc, form, fill_bytes=fill_bytes)
        if len(self._encoders) >= MOST_BOUND:
            self._encoders.clear()
        self._encoders[id(layout), form, fill_bytes] = layout, launch
        return launch

    def _bind_decoder(self, layout: ZvcLayout, form: int) -> Launch:
        launch = self._bind(layout, DecodeZvc, form, mailbox=self._runner.mailbox)
        if len(self._decoders) >= MOST_BOUND:
            self._decoders.clear()
        self._decoders[id(layout), form] = layout, launch
        return launch

    def _bind(
        self, layout: ZvcLayout, parameters: type[Parameters], form: int, **fixed: Value
    ) -> Launch:
        """Return the kernel for tensors of one size: only addresses change from start to start."""
        unit_bytes = layout.unit_bytes
        return self._runner.bind(
            zvc_variant(unit_bytes),
            parameters,
            zvc_threads(unit_bytes),
            units=layout.units,
            blocks=layout.blocks,
            elements=layout.elements,
            element_bytes=layout.element_bytes,
            form=form,
            starts_at=layout.starts_at,
            bitmap_at=layout.bitmap_at,
            values_at=layout.values_at,
            **fixed,
        )

    def _blocks(self, layout: ZvcLayout, sm_budget: int | None, decodes: bool) -> int:
        """Return the blocks of a launch: one for each of the layout, or as many as may run."""
        if sm_budget is None:
            return layout.blocks or 1
        processors = max(1, min(sm_budget, self._runner.multiprocessors))
        return max(1, min(layout.blocks, processors * zvc_blocks(layout.unit_bytes, decodes)))
