"""A pytest plug-in that compresses every float tensor that is put into a PyG graph.

``pytest -p bitslab.integrations.pyg.testing --bitslab-compress-features ...`` runs any tests that
way: each floating-point tensor with a dimension and without gradient that is set on a `Data` or
`HeteroData` becomes a `FeatureTensor`, until ``requires_grad_`` of its graph or store asks for a
gradient. Warnings of decoded copies are ignored: the tests did not choose to compress. Tests then
fail only where features differ from tensors: in-place writes to features raise, and a feature does
not share memory, strides or identity with the tensor that it was made of.

With ``--bitslab-compile-relational`` RGCNConv, FastRGCNConv, RGATConv and HGTConv of
`torch_geometric.nn` are the compiled classes for the run. PyG's own tests of these layers pass so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage

from bitslab import CompressedFeature, InvariantCodec
from bitslab.integrations.pyg import relational
from bitslab.tensors import FeatureTensor

OPTION = "--bitslab-compress-features"
RELATIONAL = "--bitslab-compile-relational"
#: Smaller tensors are packed with a fixed plan, and with the masks of the first tensor of their
#: shape and dtype: suites set thousands of tensors of a few numbers.
PLANNED_BYTES = 1 << 16
PLAN: dict[str, Any] = {"code_bits": 1, "grouped": False, "uniform": True, "threshold": 0.9}

_codecs: dict[tuple[tuple[int, ...], torch.dtype], InvariantCodec] = {}
_plain_setitem: Callable[[Any, str, Any], None] = BaseStorage.__setitem__
_plain_layers: dict[str, type] = {
    name: getattr(torch_geometric.nn, name)
    for name in ("RGCNConv", "FastRGCNConv", "RGATConv", "HGTConv")
}
_plain_requires_grad: dict[Any, Callable[..., Any]] = {
    holder: holder.requires_grad_ for holder in (BaseStorage, BaseData)
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option, which the plug-ins of other frameworks add too."""
    with contextlib.suppress(ValueError):
        parser.getgroup("bitslab").addoption(
            OPTION,
            action="store_true",
            default=False,
            help="compress every float feature of every graph",
        )
    with contextlib.suppress(ValueError):
        parser.getgroup("bitslab").addoption(
            RELATIONAL,
            action="store_true",
            default=False,
            help="compile every layer of typed edges",
        )


def pytest_configure(config: pytest.Config) -> None:
    """Compress from now on, if the option is given."""
    if config.getoption(OPTION):
        config.addinivalue_line("filterwarnings", "ignore::bitslab.DecodedCopyWarning")
        _allow_open_files()
        BaseStorage.__setitem__ = _set_compressed
        for holder, plain in _plain_requires_grad.items():
            holder.requires_grad_ = _requiring_plain(plain)
    if config.getoption(RELATIONAL):
        for name in _plain_layers:
            for module in (torch_geometric.nn, torch_geometric.nn.conv):
                setattr(module, name, getattr(relational, name))


def pytest_unconfigure() -> None:
    """Restore PyG's methods."""
    BaseStorage.__setitem__ = _plain_setitem
    for holder, plain in _plain_requires_grad.items():
        holder.requires_grad_ = plain
    for name, layer in _plain_layers.items():
        for module in (torch_geometric.nn, torch_geometric.nn.conv):
            setattr(module, name, layer)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return lines on whether features are compressed, and layers compiled."""
    state = "compressed" if config.getoption(OPTION) else "not compressed"
    layers = "compiled" if config.getoption(RELATIONAL) else "as they are"
    return [
        f"bitslab: float features of PyG graphs are {state}",
        f"bitslab: PyG's layers of typed edges are {layers}",
    ]


def _allow_open_files() -> None:
    """Raise this process's limit of open files as far as it may: a feature holds a few.

    The usual 1024 are enough for some 170 features; suites keep lists of hundreds of graphs.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))


def _set_compressed(storage: Any, key: str, value: Any) -> None:
    _plain_setitem(storage, key, wrapped(value))


def _requiring_plain(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Replace features by plain tensors before they take gradients."""

    def requires_grad_(holder: Any, *names: str, requires_grad: bool = True) -> Any:
        for storage in [holder] if isinstance(holder, BaseStorage) else holder.stores:
            for name, value in list(storage.items(*names)):
                if requires_grad and isinstance(value, FeatureTensor):
                    _plain_setitem(storage, name, value.clone())
        return plain(holder, *names, requires_grad=requires_grad)

    return requires_grad_


def wrapped(value: Any) -> Any:
    """Return a FeatureTensor for a float tensor that can be one; everything else unchanged."""
    if (
        not isinstance(value, torch.Tensor)
        or isinstance(value, (FeatureTensor, torch.nn.Parameter))
        or value.layout is not torch.strided
        or not value.is_floating_point()
        or value.dim() == 0
        or value.device.type != "cpu"
        or value.is_nested
        or value.requires_grad
    ):
        return value
    if not value.numel() or value.numel() * value.element_size() >= PLANNED_BYTES:
        return FeatureTensor(CompressedFeature.from_tensor(value, device="cpu", progress=False))
    kind = (tuple(value.shape[1:]), value.dtype)
    codec = _codecs.get(kind)
    if codec is None:
        width = min(4, value.element_size())
        codec = _codecs[kind] = InvariantCodec.fit(value, chunk_bytes=width, **PLAN)
    return FeatureTensor(CompressedFeature.from_tensor(value, device="cpu", codec=codec))
