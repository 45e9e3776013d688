"""Device arguments: one check for all functions that take one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bitslab
from bitslab.devices import checked_device, device_or_default, named_device
from bitslab.embedding import CachedRows
from bitslab.engine.advisor import measure_link
from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.integrations.embedding import CachedEmbedding, CachedEmbeddingBag
from bitslab.offload import offload_weights, restore_weights

ROWS = torch.arange(64.0).reshape(16, 4)
IDS = torch.tensor([3, 1])


def a_table() -> bitslab.CompressedTable:
    return bitslab.CompressedTable.from_tensor(ROWS)


def a_feature() -> bitslab.CompressedFeature:
    return bitslab.CompressedFeature.from_tensor(ROWS, device="cpu")


def an_offloaded_model() -> nn.Module:
    model = nn.Linear(64, 64)
    offload_weights(model, execution_device="cpu", min_bytes=0)
    return model


def a_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(num_hidden_layers=1)


#: Everything of core/ that takes a device, by what it calls the argument.
TAKERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "CompressedTensor.to": ("device", lambda d: bitslab.compress(ROWS).to(d)),
    "unified": ("device", lambda d: bitslab.unified(ROWS, device=d)),
    "UnifiedTensor.set_affinity": (
        "device",
        lambda d: bitslab.unified(ROWS).set_affinity("host", d),
    ),
    "CompressedTable.from_tensor": (
        "device",
        lambda d: bitslab.CompressedTable.from_tensor(ROWS, device=d),
    ),
    "CompressedTable.gather": ("device", lambda d: a_table().gather(IDS, device=d)),
    "CompressedTable.advice": ("device", lambda d: a_table().advice(d)),
    "SlabCache": ("devices", lambda d: bitslab.SlabCache(a_table(), 4096, devices=[d])),
    "SlabCache of one": ("devices", lambda d: bitslab.SlabCache(a_table(), 4096, devices=d)),
    "SlabCache.gather": (
        "device",
        lambda d: bitslab.SlabCache(a_table(), 4096, devices="cpu").gather(IDS, device=d),
    ),
    "CompressedFeature": ("device", lambda d: bitslab.CompressedFeature(a_table(), device=d)),
    "CompressedFeature.from_tensor": (
        "device",
        lambda d: bitslab.CompressedFeature.from_tensor(ROWS, device=d),
    ),
    "CompressedFeature.gather": ("device", lambda d: a_feature().gather(IDS, device=d)),
    "CompressedFeature.fetch": ("device", lambda d: a_feature().fetch(IDS, device=d)),
    "PrefetchRing": ("device", lambda d: bitslab.PrefetchRing(a_table(), device=d)),
    "CachedRows": ("device", lambda d: CachedRows(a_table(), cache_rows=8, device=d)),
    "CachedEmbeddingBag": (
        "device",
        lambda d: CachedEmbeddingBag(16, 4, cache_ratio=1.0, device=d),
    ),
    "CachedEmbedding": ("device", lambda d: CachedEmbedding(16, 4, cache_ratio=1.0, device=d)),
    "offload_weights": (
        "execution_device",
        lambda d: offload_weights(nn.Linear(4, 4), execution_device=d),
    ),
    "restore_weights": ("device", lambda d: restore_weights(an_offloaded_model(), d)),
    "measure_link": ("device", lambda d: measure_link(d)),
    "raise_pending_errors": ("device", lambda d: bitslab.raise_pending_errors(d)),
}

#: What an integration adds, by the framework that it needs.
FRAMEWORK_TAKERS: dict[str, tuple[str, str, Callable[[Any, Any], Any]]] = {
    "CompressedCache": (
        "transformers",
        "device",
        lambda plugin, d: plugin.CompressedCache(a_config(), device=d),
    ),
    "BitslabConfig": (
        "transformers",
        "execution_device",
        lambda plugin, d: plugin.BitslabConfig(execution_device=d),
    ),
    "CompressedFeatureStore": (
        "torch_geometric",
        "device",
        lambda plugin, d: plugin.CompressedFeatureStore(device=d),
    ),
}
PACKAGES = {"torch_geometric": "pyg"}

BAD: dict[str, tuple[Any, type[bitslab.BitslabError], str]] = {
    "no name": ("xyz", ArgumentError, "'xyz' names no device, accepted are 'cpu', 'cuda' and"),
    "empty": ("", ArgumentError, "'' names no device, accepted are 'cpu', 'cuda' and 'cuda:N'"),
    "another type": (1.5, ArgumentTypeError, "1.5, expected a torch.device, a name such as"),
    "a bool": (False, ArgumentTypeError, "False, expected a torch.device, a name such as"),
    "another kind": ("meta", ArgumentTypeError, "meta, accepted are cpu and cuda"),
}


@pytest.mark.parametrize(("device", "error", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize(("argument", "take"), TAKERS.values(), ids=TAKERS)
def test_bad_devices_are_named(
    argument: str,
    take: Callable[[Any], Any],
    device: Any,
    error: type[bitslab.BitslabError],
    message: str,
) -> None:
    with pytest.raises(error, match=f"^{argument}: {message}"):
        take(device)


@pytest.mark.parametrize(("device", "error", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize(
    ("framework", "argument", "take"), FRAMEWORK_TAKERS.values(), ids=FRAMEWORK_TAKERS
)
def test_bad_devices_are_named_by_plugins(
    framework: str,
    argument: str,
    take: Callable[[Any, Any], Any],
    device: Any,
    error: type[bitslab.BitslabError],
    message: str,
) -> None:
    pytest.importorskip(framework)
    plugin = importlib.import_module(f"bitslab.integrations.{PACKAGES.get(framework, framework)}")
    with pytest.raises(error, match=f"^{argument}: {message}"):
        take(plugin, device)


@pytest.mark.parametrize("device", ["cuda:99", 99, torch.device("cuda", 99)], ids=repr)
def test_a_gpu_that_is_not_there(device: Any) -> None:
    assert named_device(device) == torch.device("cuda", 99)
    with pytest.raises(ArgumentError, match=r"device: cuda:99, but torch sees (no|\d+) CUDA GPU"):
        checked_device(device)


@pytest.mark.parametrize(
    "device", [-1, 128, 256, 10**30, "cuda:256", "cuda:-1", "cuda:x"], ids=repr
)
def test_numbers_that_no_gpu_has(device: Any) -> None:
    """Torch makes cuda:0 of cuda:256."""
    with pytest.raises(ArgumentError, match="names no device"):
        named_device(device)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")], ids=repr)
def test_the_cpu_has_no_number(device: Any) -> None:
    assert checked_device(device) == device_or_default(device) == torch.device("cpu")


@pytest.mark.gpu
def test_gpus_have_a_number() -> None:
    current = torch.device("cuda", torch.cuda.current_device())
    assert checked_device("cuda") == device_or_default(None) == current
    assert device_or_default(0) == torch.device("cuda", 0)


def test_the_default_is_where_torch_computes() -> None:
    assert device_or_default(None).type == ("cuda" if torch.cuda.is_available() else "cpu")
