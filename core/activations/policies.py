"""Policies: what is done with the tensors of a site."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

from ..engine.codecs.blob import BlobCodec
from ..engine.codecs.registry import codec_names, get_codec
from ..errors import ArgumentError, ArgumentTypeError
from .copies import Pass
from .sites import Site

#: What becomes of a tensor: it is kept, or crosses as it is; else a codec encodes it.
KEEP: Final = "keep"
RAW: Final = "raw"


class Choice(NamedTuple):
    """What is done with the tensors of a site: `KEEP`, `RAW` or the name of a codec; and why."""

    what: str
    reason: str


POLICIES = ("auto", "raw", "static", "keep")
#: Codecs that are looked for where none are named, the best for most tensors first.
USUAL_CODECS = ("zvc+ibp", "zvc", "ibp-blob")


class Codecs:
    """The codecs that may be used, fitted to each site.

    Parameters
    ----------
    codecs : sequence of str or BlobCodec, optional
        Names or codecs; the usual ones that are registered when left out.
    lossy : str or BlobCodec, optional
        One that is lossy.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For names that are unknown, codecs that are lossy in `codecs`, or lossless as `lossy`.
    """

    def __init__(
        self,
        codecs: Sequence[str | BlobCodec] | str | BlobCodec | None,
        lossy: str | BlobCodec | None,
    ) -> None:
        if codecs is None:
            known = codec_names()
            given: list[str | BlobCodec] = [name for name in USUAL_CODECS if name in known]
        elif isinstance(codecs, (str, BlobCodec)):
            given = [codecs]
        else:
            given = list(codecs)
        self._known: dict[str, type[BlobCodec] | BlobCodec] = {}
        for codec in given:
            name, found = _checked("codecs", codec)
            if found.error_bound is not None:
                raise ArgumentError(
                    f"codecs: {name!r} is lossy, and these are to return every bit; name it as "
                    "lossy= to have it used"
                )
            self._known[name] = found
        self.names = tuple(self._known)
        self.lossy: str | None = None
        if lossy is not None:
            self.lossy, found = _checked("lossy", lossy)
            if found.error_bound is None:
                raise ArgumentError(f"lossy: {self.lossy!r} is lossless, name it in codecs=")
            self._known[self.lossy] = found
        self._fitted: dict[tuple[str, str, torch.dtype], BlobCodec] = {}
        self._lock = threading.Lock()

    def for_site(self, name: str, site: Site, flat: torch.Tensor) -> BlobCodec | None:
        """Return a codec fitted to a site, by its first tensor; None if it takes no such tensors.

        Parameters
        ----------
        name : str
            Of the codec.
        site : Site
            The site.
        flat : torch.Tensor
            A tensor of it.
        """
        key = name, site.name, flat.dtype
        codec = self._fitted.get(key)
        if codec is None:
            found = self._known[name]
            codec = found if isinstance(found, BlobCodec) else found.fit(flat)
            with self._lock:
                codec = self._fitted.setdefault(key, codec)
        if not codec.takes(flat.dtype) or flat.device.type not in codec.device_types:
            return None
        return codec

    def candidates(self, may_be_lossy: bool) -> tuple[str, ...]:
        """Return the names of the codecs that may encode a tensor, the lossy one at the end."""
        if self.lossy is not None and may_be_lossy:
            return (*self.names, self.lossy)
        return self.names

    def all(self) -> list[type[BlobCodec] | BlobCodec]:
        """Return the codecs that were named, or their classes."""
        return list(self._known.values())

    def refit(self, site: Site) -> None:
        """Forget what codecs have learnt of a site, so that its next tensor is learnt from."""
        with self._lock:
            for key in [key for key in self._fitted if key[1] == site.name]:
                del self._fitted[key]


def may_be_lossy(site: Site) -> bool:
    """Return whether a site's tensors may lose bits: floats that are no statistics or masks."""
    return site.dtype.is_floating_point and len(site.shape) > 1


class Policy(Protocol):
    """Decides what is done with the tensors of each site."""

    def decide(self, site: Site) -> Choice:
        """Return what is done with the tensors of a site, and why."""

    def begin(self, entered: Pass) -> bool:
        """Begin a pass; return whether sites are to be decided anew."""

    def sm_budget(self, name: str, site: Site) -> int | None:
        """Return the multiprocessors that a codec may take; None for all."""

    def rows(self) -> list[dict[str, Any]]:
        """Return what was decided at each profile, and from what."""


class FixedPolicy:
    """Decides once for all.

    Parameters
    ----------
    policy : {"raw", "static", "keep"}
        What.
    codecs : Codecs
        For "static", which packs all.

    Raises
    ------
    ArgumentError
        When there is no codec to pack with.
    """

    def __init__(self, policy: str, codecs: Codecs) -> None:
        self._policy, self._codecs = policy, codecs
        if policy == "static" and not codecs.names and codecs.lossy is None:
            raise ArgumentError("codecs: policy 'static' packs all tensors, and no codec is named")

    def decide(self, site: Site) -> Choice:
        """Return what is done with the tensors of a site, and why."""
        what = self._policy
        if what == "static":
            names = self._codecs.candidates(may_be_lossy(site))
            what = names[-1] if self._codecs.lossy in names else (*names, RAW)[0]
        verb = {KEEP: "Kept", RAW: "Raw"}.get(what, f"Packed by {what}")
        return Choice(what, f"{verb}: policy {self._policy!r}.")

    def begin(self, entered: Pass) -> bool:
        """Return False: nothing is decided anew."""
        return False

    def sm_budget(self, name: str, site: Site) -> int | None:
        """Return None: all multiprocessors."""
        return None

    def rows(self) -> list[dict[str, Any]]:
        """Return nothing: there are no profiles."""
        return []


def checked_policy(policy: Any) -> str:
    """Return a policy's name, or refuse it."""
    if policy not in POLICIES:
        raise ArgumentError(f"policy: {policy!r:.60}, accepted are {', '.join(POLICIES)}")
    return str(policy)


def _checked(argument: str, codec: Any) -> tuple[str, type[BlobCodec] | BlobCodec]:
    if isinstance(codec, BlobCodec):
        return codec.name, codec
    if not isinstance(codec, str):
        raise ArgumentTypeError(
            f"{argument}: expected the name of a codec or a BlobCodec, got {codec!r:.60}"
        )
    found: Any = get_codec(codec)
    if not issubclass(found, BlobCodec):
        raise ArgumentError(
            f"{argument}: {codec!r} is a codec of rows, and whole tensors need a BlobCodec; known "
            f"are {', '.join(blob_codec_names())}"
        )
    return codec, found


def blob_codec_names() -> list[str]:
    """Return the names of the registered codecs of whole tensors."""
    found: dict[str, Any] = {name: get_codec(name) for name in codec_names()}
    return [name for name, cls in found.items() if issubclass(cls, BlobCodec)]
