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
from bitslab.activations import Lossy, conv_inputs

#: By name: what is done. The last ones are policies of `bitslab.offload_activations`.
WAYS = {
    "plain": "nothing is moved",
    "save_on_cpu": "torch.autograd.graph.save_on_cpu: everything, raw, the step waits",
    "raw": "everything, raw, beside the computation (vDNN)",
    "static": "everything, packed on the device (the paper's SC)",
    "host": "everything, raw; the CPU packs what is more than 60 % zeros (vDNN++)",
    "auto": "everything; for each tensor raw or a codec, by measured times (CSWAP+)",
    "keep": "nothing is moved, but everything passes through the hooks",
}
POLICIES = ("raw", "static", "host", "auto", "keep")
#: The way that is torch's own, whose losses say nothing of the others'.
PEER = "save_on_cpu"
#: Not one of all ways, since its losses differ.
LOSSY = "lossy"
LOSSY_TEXT = "activations lose bits (zfp), at a rate that slides down over the epochs"
SCHEDULES = ("sliding", "inverse", "fixed")


@dataclass(frozen=True)
class Traffic:
    """Bytes of the saved tensors that left the device and came back: as they were, and packed."""

    down_bytes: int = 0
    up_bytes: int = 0
    crossed_down_bytes: int = 0
    crossed_up_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(self.figures, other.figures, strict=True)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*(a - b for a, b in zip(self.figures, other.figures, strict=True)))

    @property
    def figures(self) -> tuple[int, ...]:
        """All of them."""
        return self.down_bytes, self.up_bytes, self.crossed_down_bytes, self.crossed_up_bytes


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
        down, up = self._down_bytes, self._up_bytes
        return Traffic(down, up, down, up)


class Offloaded(Kept):
    """A policy of `bitslab.offload_activations`; the loop and the model are not changed."""

    def __init__(
        self, policy: str, model: nn.Module, options: argparse.Namespace, lossy: Lossy | None = None
    ) -> None:
        self.lossless = lossy is None
        # Else what is read before its copy is complete would be exact, and no run like the other.
        more: dict[str, Any] = {} if lossy is None else {"lossy": lossy, "in_flight_bytes": 0}
        self._offload = bitslab.offload_activations(
            model,
            policy=policy,
            codecs=options.codecs,
            min_bytes=options.min_bytes,
            select=conv_inputs if options.select == "conv_inputs" else None,
            verify=options.verify,
            **more,
        )

    def begin_epoch(self, number: int) -> None:
        self._offload.begin_epoch(number - 1)

    def traffic(self) -> Traffic:
        stats = self._offload.stats()
        names = "moved_out_bytes", "moved_in_bytes", "crossed_out_bytes", "crossed_in_bytes"
        return Traffic(*(stats[name] for name in names))

    def decisions(self) -> list[Decided]:
        return [
            Decided(site.unit.name, "pack" if codec else site.choice, codec, site.reason)
            for site in self._offload.report().sites
            for codec in [None if site.choice in ("keep", "raw", "host") else site.choice]
        ]

    def notes(self) -> list[str]:
        return list(self._offload.report().notes)

    def close(self) -> None:
        self._offload.detach()


def lossy_of(options: argparse.Namespace) -> Lossy:
    """Return what `LOSSY` packs activations with."""
    top, bottom = options.lossy_bits
    return Lossy(schedule=options.schedule, epochs=options.epochs, top=top, bottom=bottom)


@contextmanager
def keep(way: str, model: nn.Module, options: argparse.Namespace) -> Iterator[Kept]:
    """Keep a model's saved tensors in a way of WAYS, or in `LOSSY`, while the context is open."""
    kept: Kept
    if way in POLICIES:
        kept = Offloaded(way, model, options)
    elif way == LOSSY:
        kept = Offloaded("static", model, options, lossy_of(options))
    elif way == PEER:
        kept = SavedOnCpu(next(model.parameters()).device)
    else:
        kept = Kept()
    try:
        yield kept
    finally:
        kept.close()
