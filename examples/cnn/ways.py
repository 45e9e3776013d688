"""Ways to keep what a model saves for its backward pass."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

import bitslab
from bitslab.activations import Site, conv_inputs
from bitslab.engine.advisor import LossySchedule
from bitslab.engine.codecs import ZfpCodec

#: By name: what is done. The last ones are policies of `bitslab.offload_activations`.
WAYS = {
    "plain": "nothing is moved",
    "save_on_cpu": "torch.autograd.graph.save_on_cpu: everything, raw, the step waits",
    "raw": "everything, raw, beside the computation (vDNN)",
    "static": "everything, packed on the device (the paper's SC)",
    "auto": "everything; for each tensor raw or a codec, by measured times (CSWAP+)",
    "keep": "nothing is moved, but everything passes through the hooks",
}
POLICIES = ("raw", "static", "auto", "keep")
#: Not one of all ways, since its losses differ.
LOSSY = "lossy"
LOSSY_TEXT = "activations lose bits (zfp), at a rate that slides down over the epochs"
SCHEDULES = ("sliding", "inverse", "fixed")


@dataclass(frozen=True)
class Traffic:
    """Bytes, before packing, of the saved tensors that left the device and came back."""

    down_bytes: int = 0
    up_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.down_bytes + other.down_bytes, self.up_bytes + other.up_bytes)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.down_bytes - other.down_bytes, self.up_bytes - other.up_bytes)


@dataclass(frozen=True)
class Decided:
    """What becomes of one saved tensor."""

    site: str
    action: str
    codec: str | None
    reason: str


class Kept:
    """A way in use with a model; this one leaves everything where it is."""

    lossless = True

    def begin_epoch(self, number: int) -> None:
        """Begin an epoch, from 1."""

    def step(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass with its loss."""
        return nullcontext()

    def traffic(self) -> Traffic:
        """Return the bytes moved since the beginning."""
        return Traffic()

    def decisions(self) -> list[Decided]:
        """Return what becomes of each tensor at present."""
        return []

    def notes(self) -> list[str]:
        """Return lines for the reader."""
        return []

    def close(self) -> None:
        """Leave the model as it was."""


class SavedOnCpu(Kept):
    """`save_on_cpu`, with the bytes counted that it copies."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._down_bytes = self._up_bytes = 0

    def step(self) -> AbstractContextManager[object]:
        context: Any = save_on_cpu(pin_memory=self._on_gpu)
        if self._on_gpu:  # on a CPU it copies nothing
            pack, unpack = context.pack_hook, context.unpack_hook

            def counted_pack(t: torch.Tensor) -> Any:
                self._down_bytes += t.nbytes
                return pack(t)

            def counted_unpack(packed: Any) -> torch.Tensor:
                t: torch.Tensor = unpack(packed)
                self._up_bytes += t.nbytes
                return t

            context.pack_hook, context.unpack_hook = counted_pack, counted_unpack
        opened: AbstractContextManager[object] = context
        return opened

    def traffic(self) -> Traffic:
        return Traffic(self._down_bytes, self._up_bytes)


class Offloaded(Kept):
    """A policy of `bitslab.offload_activations`; the loop and the model are not changed."""

    def __init__(self, policy: str, model: nn.Module, options: argparse.Namespace) -> None:
        self._model, self._options = model, options
        self._offload = self.attach(policy)

    def attach(self, policy: str, **more: Any) -> bitslab.ActivationOffload:
        """Attach to the model, with more options."""
        options = self._options
        given: dict[str, Any] = {
            "policy": policy,
            "codecs": options.codecs,
            "min_bytes": options.min_bytes,
            "select": conv_inputs if options.select == "conv_inputs" else None,
            "verify": options.verify,
        }
        return bitslab.offload_activations(self._model, **given | more)

    def traffic(self) -> Traffic:
        stats = self._offload.stats()
        return Traffic(stats["moved_out_bytes"], stats["moved_in_bytes"])

    def decisions(self) -> list[Decided]:
        return [
            Decided(site.unit.name, "pack" if codec else site.choice, codec, site.reason)
            for site in self._offload.report().sites
            for codec in [None if site.choice in ("keep", "raw") else site.choice]
        ]

    def notes(self) -> list[str]:
        return list(self._offload.report().notes)

    def close(self) -> None:
        self._offload.detach()


class Lossy(Offloaded):
    """Activations are packed by zfp, at the rate of each epoch; the rest leaves as it is.

    P bits cross for a block of four values, where float32 has 128. What dropout and norms save
    stays where it is, and integers lose nothing.
    """

    lossless = False

    def __init__(self, model: nn.Module, options: argparse.Namespace) -> None:
        top, bottom = options.lossy_bits
        self._schedule = LossySchedule(top, bottom, options.epochs, options.schedule)
        self._before = Traffic()
        self._model, self._options = model, options
        self._offload = self._attach_with(self._schedule.value(0))

    def _attach_with(self, block_bits: int) -> bitslab.ActivationOffload:
        return self.attach("static", lossy=ZfpCodec(block_bits), verify=0, select=self._selected)

    def _selected(self, site: Site) -> bool:
        """Return whether a site is moved."""
        if self._options.select == "conv_inputs" and not conv_inputs(site):
            return False
        kind = site.module_type
        return kind is None or not issubclass(kind, (nn.Dropout, nn.BatchNorm2d))

    def begin_epoch(self, number: int) -> None:
        self._before = self.traffic()
        self._offload.detach()
        self._offload = self._attach_with(self._schedule.value(number - 1))

    def traffic(self) -> Traffic:
        return self._before + super().traffic()

    def notes(self) -> list[str]:
        epochs = range(self._schedule.epochs)
        bits = ", ".join(str(self._schedule.value(epoch)) for epoch in epochs)
        return [*super().notes(), f"{LOSSY}: P by epoch, bits of four values: {bits}"]


@contextmanager
def keep(way: str, model: nn.Module, options: argparse.Namespace) -> Iterator[Kept]:
    """Keep a model's saved tensors in a way of WAYS, or in `LOSSY`, while the context is open."""
    kept: Kept
    if way in POLICIES:
        kept = Offloaded(way, model, options)
    elif way == LOSSY:
        kept = Lossy(model, options)
    elif way == "save_on_cpu":
        kept = SavedOnCpu(next(model.parameters()).device)
    else:
        kept = Kept()
    try:
        yield kept
    finally:
        kept.close()
