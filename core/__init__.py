"""Bitslab: tensors that are cheaper to move.

If torch is not imported yet, the public names below and torch are imported on first use, so that
`bitslab --help` starts at once. Otherwise all of them are imported here.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if __name__ != "bitslab":
    raise ImportError("import bitslab, not its folder: this package is installed as 'bitslab'")

from .version import __version__  # noqa: E402

if TYPE_CHECKING:
    from .activations import ActivationOffload, offload_activations
    from .compressed import CompressedTensor, compress, decompress, load, load_file, save_file
    from .compressed_blob import CompressedBlob
    from .engine.codecs import InvariantCodec, PackedRows, RawCodec, RowCodec
    from .engine.codecs.registry import codec_names, get_codec, register_codec
    from .engine.kernels.cuda import raise_pending_errors
    from .engine.transfer.ring import PrefetchRing
    from .errors import (
        ArgumentError,
        ArgumentTypeError,
        BitslabError,
        CorruptedDataError,
        DecodedCopyWarning,
        IndexRangeError,
        MissingExtraError,
        ModifiedInPlaceError,
    )
    from .tables import hotness
    from .tables.feature import CompressedFeature
    from .tables.slabs import SlabCache
    from .tables.table import CompressedTable
    from .tensors.unified_tensor import UnifiedTensor, unified

__all__ = [
    "ActivationOffload",
    "ArgumentError",
    "ArgumentTypeError",
    "BitslabError",
    "CompressedBlob",
    "CompressedFeature",
    "CompressedTable",
    "CompressedTensor",
    "CorruptedDataError",
    "DecodedCopyWarning",
    "IndexRangeError",
    "InvariantCodec",
    "MissingExtraError",
    "ModifiedInPlaceError",
    "PackedRows",
    "PrefetchRing",
    "RawCodec",
    "RowCodec",
    "SlabCache",
    "UnifiedTensor",
    "__version__",
    "codec_names",
    "compress",
    "decompress",
    "get_codec",
    "hotness",
    "load",
    "load_file",
    "offload_activations",
    "raise_pending_errors",
    "register_codec",
    "save_file",
    "unified",
]

#: Modules that define the public names.
_MODULES = {
    "activations": ("ActivationOffload", "offload_activations"),
    "engine.codecs": ("InvariantCodec", "PackedRows", "RawCodec", "RowCodec"),
    "errors": (
        "ArgumentError",
        "ArgumentTypeError",
        "BitslabError",
        "CorruptedDataError",
        "DecodedCopyWarning",
        "IndexRangeError",
        "MissingExtraError",
        "ModifiedInPlaceError",
    ),
    "engine.kernels.cuda": ("raise_pending_errors",),
    "tables.feature": ("CompressedFeature",),
    "tables.slabs": ("SlabCache",),
    "tables.table": ("CompressedTable",),
    "tensors.unified_tensor": ("UnifiedTensor", "unified"),
    "engine.codecs.registry": ("codec_names", "get_codec", "register_codec"),
    "compressed": ("CompressedTensor", "compress", "decompress", "load", "load_file", "save_file"),
    "compressed_blob": ("CompressedBlob",),
    "engine.transfer.ring": ("PrefetchRing",),
}


def _imported(name: str) -> Any:
    """Return a public name, or a module of the package, on first use."""
    for home, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f".{home}", __name__), name)
    module = f"{__name__}.{'tables.hotness' if name == 'hotness' else name}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name.startswith("_"):  # Python's protocols look up many
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, _imported(name))

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    if "torch" in sys.modules:
        # Lazy imports would save nothing, and torch.load needs the classes registered.
        for _name in __all__:
            if _name not in globals():
                __getattr__(_name)
