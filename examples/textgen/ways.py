"""The ways to keep a model's weights and its K/V cache, and what each moves for a token.

What needs transformers imports it: a script's ``--help`` does not wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bitslab.errors import ArgumentError
from bitslab.kvcache import Offload
from bitslab.offload import OffloadedModel, find_offloaded

WEIGHTS = {
    "device": "on the device, as they are",
    "offload": "in host memory as they are, copied for each pass (accelerate's cpu_offload)",
    "compressed": "packed in host memory, streamed and decoded while the layer before computes",
    "packed": "packed on the device, decoded just in time",
}
CACHES = {
    "dynamic": "on the device (transformers' DynamicCache)",
    "offloaded": "in host memory, all of it fetched and written back for each token",
    "compressed": "packed; on a GPU in host memory, new blocks appended (CompressedCache)",
    "kvcomp": "the same, quantised too: within --error, other tokens may follow (KVCompCache)",
}


@dataclass(frozen=True)
class WeightOptions:
    """Options of packed weights."""

    keep: float | None = None
    disk: str | None = None
    depth: int = 2
    sm_budget: int = 64


@dataclass(frozen=True)
class CacheOptions:
    """Options of a packed cache; `error` is that of KVCompCache."""

    window: int = 128
    block_tokens: int = 64
    offload: Offload = True
    error: float = 0.055


@dataclass(frozen=True)
class Traffic:
    """Bytes of weights and of the cache that crossed the link one way."""

    weights: float = 0
    cache: float = 0

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.weights - other.weights, self.cache - other.cache)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.weights + other.weights, self.cache + other.cache)

    def __truediv__(self, n: int) -> Traffic:
        return Traffic(self.weights / n, self.cache / n)

    def as_dict(self) -> dict[str, float]:
        return {"weights": self.weights, "cache": self.cache}


@dataclass(frozen=True)
class Size:
    """Bytes of a layer's weights or of its K and V, packed, and of these in host memory."""

    name: str
    raw_bytes: int
    packed_bytes: int
    host_bytes: int | None = None

    @property
    def ratio(self) -> float | None:
        return self.raw_bytes / self.packed_bytes if self.packed_bytes else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "raw_bytes": self.raw_bytes,
            "packed_bytes": self.packed_bytes,
            "host_bytes": self.host_bytes,
            "ratio": self.ratio,
        }


def load(
    path: str,
    dtype: torch.dtype,
    way: str,
    device: torch.device,
    options: WeightOptions,
    report: Any = None,
) -> Any:
    """Load a model whose weights are kept in a way of WEIGHTS.

    Parameters
    ----------
    path : str
        A folder, or a name on the hub.
    dtype : torch.dtype
        Of the weights.
    way : str
        A key of WEIGHTS.
    device : torch.device
        Where it computes.
    options : WeightOptions
        For those that are packed.
    report : Report, optional
        Called with the bytes that are packed, and the bytes in all.
    """
    import transformers

    from bitslab.integrations.transformers import BitslabConfig

    if way in ("device", "offload"):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        if way == "device":
            return model.to(device)
        from accelerate import cpu_offload

        return cpu_offload(model, execution_device=device)
    config = BitslabConfig(
        execution_device=device,
        keep="packed" if way == "packed" else options.keep,
        disk=options.disk if way == "compressed" else None,
        depth=options.depth,
        sm_budget=options.sm_budget,
        progress=report,
    )
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, quantization_config=config
    )


def make_cache(way: str, model: Any, device: torch.device, options: CacheOptions) -> Any:
    """Make an empty cache of CACHES for a model."""
    import transformers

    from bitslab.integrations.transformers import CompressedCache, KVCompCache

    if way == "kvcomp":
        model.set_attn_implementation("bitslab")
        return KVCompCache(
            model.config,
            error=options.error,
            offload=options.offload,
            device=device,
            window=options.window,
            block_tokens=options.block_tokens,
        )
    if way == "compressed":
        return CompressedCache(
            model.config,
            offload=options.offload,
            device=device,
            window=options.window,
            block_tokens=options.block_tokens,
        )
    return transformers.DynamicCache(config=model.config, offloading=way == "offloaded")


def weight_sizes(model: Any) -> list[Size]:
    """Return the size of each unit of a model's packed weights; empty where none are packed."""
    streamed = _streamed(model)
    if streamed is None:
        return []
    return [
        Size(unit.name or "(model)", unit.raw_bytes, unit.packed_bytes)
        for unit in streamed.report().units
        if not unit.shared
    ]


def cache_sizes(cache: Any) -> list[Size]:
    """Return the size of each layer's packed keys and values; empty where none are packed."""
    if not _packs(cache):
        return []
    found = []
    for i, layer in enumerate(cache.layers):
        stats = [history.stats() for history in getattr(layer, "histories", ())]
        raw, packed = (sum(s[name] for s in stats) for name in ("packed_raw_bytes", "packed_bytes"))
        words = [history.words for history in getattr(layer, "histories", ())]
        on_host = sum(4 * each.n_words for each in words if each.on_host)
        found.append(Size(f"layer {i}", int(raw), int(packed), on_host))
    return found


def traffic(weights_way: str, model: Any, cache: Any) -> tuple[Traffic, Traffic]:
    """Return what has crossed to the device and to the host so far, where that is counted.

    On a CPU, where nothing crosses: the packed bytes that were decoded or stored.
    """
    up = down = weights = 0.0
    if _packs(cache):
        stats = cache.stats()
        up, down = stats["moved_to_device_bytes"], stats["moved_to_host_bytes"]
    # What is packed on the device crosses no link.
    streamed = None if weights_way == "packed" else _streamed(model)
    if streamed is not None:
        stream, stats = streamed.stream, streamed.stream.stats()
        weights = stats["moved_bytes"]
        if stream.device.type == "cpu" and stream.units:
            one_pass = sum(stream.plan(unit).crossing_nbytes for unit in stream.units)
            weights = stats["loads"] * one_pass / len(stream.units)
    return Traffic(weights, up), Traffic(0, down)


def known_traffic(
    weights_way: str, model: Any, cache_way: str, cache: Any
) -> tuple[Traffic, Traffic]:
    """Return what crosses for a token in the ways that count nothing, from their sizes.

    cpu_offload copies every parameter for each pass; transformers' offloaded cache copies all keys
    and values there and back for each token.
    """
    weights = kept = 0
    if weights_way == "offload":
        named = model.named_parameters(remove_duplicate=False)
        weights = sum(parameter.nbytes for _, parameter in named)
    if cache_way == "offloaded":
        kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return Traffic(weights, kept), Traffic(0, kept)


def _packs(cache: Any) -> bool:
    from bitslab.integrations.transformers import CompressedCache, KVCompCache

    return isinstance(cache, CompressedCache | KVCompCache)


def _streamed(model: Any) -> OffloadedModel | None:
    try:
        return find_offloaded(model)
    except ArgumentError:  # none of its weights are packed
        return None
