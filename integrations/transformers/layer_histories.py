"""LayerHistories: opens the histories of a cache's layers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

from bitslab.errors import ArgumentTypeError
from bitslab.kvcache import (
    CodecPlans,
    HistoryReader,
    PackedHistory,
    TileOptions,
    TilePlans,
    codecs_of_model,
)


class LayerHistories:
    """Opens the histories of a cache's layers; those of one device share a reader."""

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        offload: bool,
        device: torch.device | None,
        sm_budget: int | None,
        options: dict[str, Any],
    ) -> None:
        self._model = type(config).__name__, repr(config.to_dict())
        self._offload = offload
        self.device = device
        self._sm_budget = sm_budget
        self._options = options
        self._plans = CodecPlans()
        self._expected = 1
        self.readers: dict[torch.device, HistoryReader] = {}
        if device is not None:  # so that its errors are raised by the constructor of the cache
            self._reader(device)

    def expect(self, histories: int) -> None:
        """Set the number of histories expected in all."""
        self._expected = histories
        for reader in self.readers.values():
            reader.expect(histories)

    def open(self, layer: int, device: torch.device) -> tuple[HistoryReader, list[PackedHistory]]:
        """Return the reader of a device and two new histories, the K's and V's of a layer."""
        self._check_device(device)
        reader = self._reader(device)
        # The CPU plans where it packs: nothing would be saved by codecs of another cache. A
        # selector's results depend on what is packed, which those must not change.
        takes = device.type == "cuda" and not self._options["at_once"]
        codecs = codecs_of_model(self._model) if takes else None
        found = [
            PackedHistory(
                reader.new_words(),
                self._plans,
                kind,
                kept=None if codecs is None else codecs.of(layer, kind),
                **self._options,
            )
            for kind in "kv"
        ]
        return reader, found

    def open_tiles(
        self, plans: TilePlans, device: torch.device
    ) -> tuple[HistoryReader, list[PackedHistory]]:
        """Return the reader of a device and two new histories of tiles."""
        self._check_device(device)
        reader = self._reader(device)
        o = plans.options
        options = {
            **self._options,
            "sinks": o.sinks,
            "tile_tokens": o.tile_tokens,
            "tail_room_tokens": o.block_tokens,
        }
        found = [
            PackedHistory(reader.new_words(), plans, kind, kept=plans.of(kind), **options)
            for kind in "kv"
        ]
        return reader, found

    def tile_plans(self, options: TileOptions, layer: int) -> TilePlans:
        """Return new plans of the tiles of a layer."""
        return TilePlans(options, self._plans, f"layer {layer}")

    def learn_ahead(self) -> None:
        """Learn codecs from a prompt while GPUs compute; see `LearningQueue.advance`."""
        for reader in self.readers.values():
            reader.learning.advance()

    def finish_learning(self) -> None:
        """Learn the codecs that are to be learnt from a prompt."""
        for reader in self.readers.values():
            reader.learning.finish()

    def _check_device(self, device: torch.device) -> None:
        if self.device is not None and device != self.device:
            raise ArgumentTypeError(
                f"key_states: on {device}, this cache was made for {self.device}"
            )

    def _reader(self, device: torch.device) -> HistoryReader:
        if device not in self.readers:
            self.readers[device] = HistoryReader(
                device,
                offload=self._offload,
                sm_budget=self._sm_budget,
                histories=self._expected,
            )
        return self.readers[device]
