"""Codec names and their classes.

Built in are, of rows, ``"ibp"``, ``"raw"`` and, lossy, ``"tiles"``; of whole tensors ``"csr"``,
``"ibp-blob"``, ``"lz4"``, ``"rle"``, ``"vlz"``, ``"zvc"``, ``"zvc+ibp"`` and, lossy,
``"vlzq"`` and ``"zfp"``. A package adds its own by the entry point group
``bitslab.codecs``, where the name of the entry point is the name of the codec; a program adds one
by `register_codec`. A name means the same bytes for ever, so none can be given another class.

Every codec serves `bitslab.compress`, files and the command. Those of rows that have kernels (see
`WordRowCodec`) serve tables, their caches and embeddings too, which refuse others by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import metadata
from typing import Any, TypeAlias, TypeVar

import torch

from ...errors import ArgumentError, ArgumentTypeError, BitslabError
from .base import RowCodec
from .blob import BlobCodec
from .chain import ChainCodec
from .csr import CsrCodec
from .invariant import InvariantCodec
from .lz4 import Lz4Codec
from .packed_blob import InvariantBlobCodec
from .quantized import TileCodec
from .raw import RawCodec
from .rle import RleCodec
from .vectors import BoundedVectorCodec, VectorLzCodec
from .zfp import ZfpCodec
from .zvc import ZvcCodec

ENTRY_POINTS = "bitslab.codecs"

AnyCodecClass: TypeAlias = type[RowCodec] | type[BlobCodec]
_Class = TypeVar("_Class", type[RowCodec], type[BlobCodec])

_BUILT_IN: tuple[AnyCodecClass, ...] = (
    InvariantCodec,
    RawCodec,
    TileCodec,
    InvariantBlobCodec,
    ZvcCodec,
    ChainCodec,
    CsrCodec,
    RleCodec,
    ZfpCodec,
    Lz4Codec,
    VectorLzCodec,
    BoundedVectorCodec,
)
_classes: dict[str, AnyCodecClass] = {c.name: c for c in _BUILT_IN}


def register_codec(cls: _Class) -> _Class:
    """Make a codec known by its ``name``; usable as a class decorator.

    It serves `bitslab.compress` and files; one of rows, if it has kernels, tables and embeddings;
    one of whole tensors what swaps them.

    Parameters
    ----------
    cls : type
        A subclass of `RowCodec` or `BlobCodec` with a ``name`` of its own.

    Returns
    -------
    type
        `cls`, unchanged.

    Raises
    ------
    ArgumentTypeError
        When `cls` is no subclass of `RowCodec` or `BlobCodec`, of both, or has no name.
    ArgumentError
        When another class has the name.
    """
    name = _checked_name(cls)
    known = _classes.setdefault(name, cls)
    if known is not cls:
        raise ArgumentError(
            f"codec name {name!r}: taken by {_full_name(known)}, so {_full_name(cls)} needs "
            "another name"
        )
    return cls


def get_codec(name: str) -> AnyCodecClass:
    """Return the codec class of a name.

    Parameters
    ----------
    name : str
        As listed by `codec_names`.

    Returns
    -------
    type
        A subclass of `RowCodec` or `BlobCodec`.

    Raises
    ------
    ArgumentError
        When no codec has the name; the message lists those that there are.
    BitslabError
        When the package that offers the codec fails to load.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"codec: expected a name, got {type(name).__name__}")
    if name in _classes:
        return _classes[name]
    entry = _entry_points().get(name)
    if entry is None:
        raise ArgumentError(f"codec: {name!r} is not known; known are {', '.join(codec_names())}")
    try:
        cls = entry.load()
    except Exception as error:
        raise BitslabError(
            f"codec {name!r}: {entry.value!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if _checked_name(cls) != name:
        raise ArgumentError(f"codec {name!r}: {entry.value!r} calls itself {cls.name!r}")
    register_codec(cls)
    return _classes[name]


def codec_class(name: str) -> type[RowCodec]:
    """Return the class of a codec of rows, or for ``"auto"`` the one that plans are made with.

    Raises
    ------
    ArgumentError
        When no codec has the name, or one of whole tensors.
    """
    return InvariantCodec if name == "auto" else row_codec_class(name)


def row_codec_class(name: str) -> type[RowCodec]:
    """Return the class of a codec of rows.

    Raises
    ------
    ArgumentError
        When no codec has the name, or one of whole tensors.
    """
    cls = get_codec(name)
    if not issubclass(cls, RowCodec):
        raise ArgumentError(f"codec: {name!r} packs whole tensors, a codec of rows is needed here")
    return cls


def blob_codec_class(name: str) -> type[BlobCodec]:
    """Return the class of a codec of whole tensors.

    Raises
    ------
    ArgumentError
        When no codec has the name, or one of rows.
    """
    cls = get_codec(name)
    if not issubclass(cls, BlobCodec):
        raise ArgumentError(f"codec: {name!r} packs rows, one of whole tensors is needed here")
    return cls


_Codec = TypeVar("_Codec", RowCodec, BlobCodec)


def fit_codec(
    cls: type[_Codec], sample: torch.Tensor, options: Mapping[str, Any], **given: Any
) -> _Codec:
    """Return a codec fitted to sample rows, or to a whole tensor.

    Parameters
    ----------
    cls : type
        The codec's class.
    sample : torch.Tensor
        As for its `fit`.
    options : mapping
        The user's options, which the `fit` of the class must accept.
    **given
        Further ones, left out where it has no option of that name; None where not known.
    """
    accepted = inspect.signature(cls.fit).parameters
    known = {k: v for k, v in given.items() if k in accepted and v is not None}
    return cls.fit(sample, **known | dict(options))


def codec_names() -> list[str]:
    """Return the names of all codecs, built in, registered and offered by installed packages."""
    return sorted({*_classes, *_entry_points()})


def is_codec_name(name: object) -> bool:
    """Return whether a codec has this name.

    Of known ones that takes no time; `codec_names` reads what is installed, for milliseconds.
    """
    return isinstance(name, str) and (name in _classes or name in _entry_points())


def _entry_points() -> dict[str, metadata.EntryPoint]:
    """Return what installed packages offer, by name, without importing it."""
    found: dict[str, metadata.EntryPoint] = {}
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        known = _classes.get(entry.name)
        holder = found.setdefault(entry.name, entry).value if known is None else _full_name(known)
        # An installation seen twice on the path offers the same value twice, which is harmless.
        if holder != entry.value:
            raise ArgumentError(
                f"codec name {entry.name!r}: taken by {holder}, so {entry.value} needs another name"
            )
    return found


def _checked_name(cls: object) -> str:
    if not isinstance(cls, type) or issubclass(cls, RowCodec) == issubclass(cls, BlobCodec):
        raise ArgumentTypeError(
            f"codec: expected a subclass of BlobCodec or a subclass of RowCodec, got {cls!r}"
        )
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name or name == "auto":
        raise ArgumentTypeError(f"codec: {_full_name(cls)} needs a name, got {name!r}")
    return name


def _full_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
