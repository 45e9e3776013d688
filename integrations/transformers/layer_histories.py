"""LayerHistories: opens the histories of a cache's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from bitslab.errors import ArgumentTypeError, BitslabError
from bitslab.kvcache import (
    CodecPlans,
    HistoryReader,
    Offload,
    PackedHistory,
    Placement,
    TileOptions,
    TilePlans,
    Words,
    codecs_of_model,
    crossing_seconds,
    free_bytes,
)


class LayerHistories:
    """Opens the histories of a cache's layers; those of one device share a reader."""

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        offload: Offload,
        device: torch.device | None,
        sm_budget: int | None,
        options: dict[str, Any],
    ) -> None:
        self._model = type(config).__name__, repr(config.to_dict())
        self._offload = offload
        self.placement = Placement(offload, ())
        self.device = device
        self._sm_budget = sm_budget
        self._options = options
        self._plans = CodecPlans()
        self._expected = 1
        self.readers: dict[torch.device, HistoryReader] = {}
        if device is not None:  # so that its errors are raised by the constructor of the cache
            self._reader(device)

    def place(self, layers: Sequence[int]) -> None:
        """Place the layers that are packed, before any is opened."""
        self.placement = Placement(self._offload, layers)
        self._expect(2 * max(1, len(self.placement.hosted)))

    def _expect(self, histories: int) -> None:
        """Set the number of histories expected in host memory."""
        self._expected = histories
        for reader in self.readers.values():
            reader.expect(histories)

    def rebalance(self, layers: Mapping[int, Sequence[PackedHistory]], tokens: int) -> bool:
        """Move layers where that makes crossing and computing end together; return whether any did.

        Parameters
        ----------
        layers : mapping of int to sequence of PackedHistory
            The histories of each packed layer.
        tokens : int
            Of a sequence, in the pass that begins.
        """
        placement, devices = self.placement, list(self.readers)
        if placement.balance is None or not devices:  # none before the first K and V
            return False
        if not placement.balance.begin(tokens):
            return False
        if any(reader.link.streams is None for reader in self.readers.values()):
            return False  # nothing crosses
        n = len(placement.layers)
        layer_bytes = sum(4 * h.words.n_words for both in layers.values() for h in both) / n
        chosen = placement.with_hosted(
            placement.balance.hosted(
                n,
                len(placement.hosted),
                layer_bytes,
                2 * crossing_seconds(devices[0], layer_bytes / 2),
                min(map(free_bytes, devices)) * len(devices),
            )
        )
        wanted = sorted(chosen ^ placement.hosted)
        for done, i in enumerate(wanted):
            if not self.move(i, layers[i], on_host=i in chosen):
                if not done:  # not again with every few tokens
                    placement.balance.settle()
                return done > 0
        return bool(wanted)

    def move(self, layer: int, histories: Sequence[PackedHistory], *, on_host: bool) -> bool:
        """Move the packed words of a layer; return whether there was memory for them.

        Where there was none, nothing has changed.
        """
        if histories:
            reader = self.readers[histories[0].device]
            stores = [reader.new_words(on_host=on_host) for _ in histories]
            try:
                commits = [h.prepare_move(to) for h, to in zip(histories, stores, strict=True)]
            except (BitslabError, MemoryError, torch.cuda.OutOfMemoryError):
                for store in stores:
                    store.clear()
                return False
            for commit in commits:
                commit()
            reader.drop_stale()
        self.placement.put(layer, on_host=on_host)
        self._expect(2 * max(1, len(self.placement.hosted)))
        return True

    def _new_words(self, reader: HistoryReader, layer: int) -> Words:
        return reader.new_words(on_host=layer in self.placement.hosted)

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
                self._new_words(reader, layer),
                self._plans,
                kind,
                kept=None if codecs is None else codecs.of(layer, kind),
                **self._options,
            )
            for kind in "kv"
        ]
        return reader, found

    def open_tiles(
        self, layer: int, plans: TilePlans, device: torch.device
    ) -> tuple[HistoryReader, list[PackedHistory]]:
        """Return the reader of a device and two new histories of a layer, of tiles."""
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
            PackedHistory(
                self._new_words(reader, layer), plans, kind, kept=plans.of(kind), **options
            )
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
            reader = self.readers[device] = HistoryReader(
                device,
                offload=True,  # or as `placement` has it
                sm_budget=self._sm_budget,
                histories=self._expected,
            )
            if self.placement.balance is not None and reader.link.streams is not None:
                crossing_seconds(device, 0)  # measures the link before our words cross it
        return self.readers[device]
