"""Policies: what is done with the tensors of a site."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import torch

from ..engine.codecs.blob import BlobCodec
from ..engine.codecs.registry import codec_names, get_codec, is_codec_name
from ..errors import ArgumentError, ArgumentTypeError
from .fitting import SampleFits
from .host_packing import PACKED_ABOVE
from .lossy import MEASURED_RATES, RATE_OPTION, Lossy, LossyRate
from .pass_record import PassRecord
from .sites import Site
from .traffic import Observed

#: What becomes of a tensor: it is kept, or crosses as it is, to be packed by the CPU then or not;
#: else a codec encodes it.
KEEP: Final = "keep"
RAW: Final = "raw"
HOST: Final = "host"
#: It is computed again, alone or with its module.
REPLAY: Final = "replay"
CHECKPOINT: Final = "checkpoint"

#: Where a tensor waits: on the device, in host memory, or on an SSD behind that.
Place = Literal["device", "host", "disk"]


#: Name of a codec, name of a site, and dtype.
FitKey = tuple[str, str, torch.dtype]


class Choice(NamedTuple):
    """What is done with the tensors of a site.

    Parameters
    ----------
    what : str
        `KEEP`, `RAW`, `HOST`, `REPLAY`, `CHECKPOINT` or the name of a codec.
    reason : str
        Why.
    tier : str, optional
        Where those go that are neither kept nor computed again: packed tensors may remain on the
        device. None leaves it open.
    """

    what: str
    reason: str
    tier: Place | None = None


POLICIES = ("auto", "raw", "static", "host", "keep")
#: Codecs that are looked for where none are named, the best for most tensors first.
USUAL_CODECS = ("zvc+ibp", "zvc", "ibp-blob")


class Codecs:
    """The codecs that may be used, fitted to each site.

    Parameters
    ----------
    codecs : sequence of str or BlobCodec, optional
        Names or codecs; the usual ones that are registered when left out.
    lossy : str, BlobCodec or Lossy, optional
        One that is lossy, or one with a schedule of rates.

    Attributes
    ----------
    names : tuple of str
        Those that return every bit.
    lossy : str or None
        The one that does not.
    rate : LossyRate or None
        What its rate follows.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For names that are unknown, codecs that are lossy in `codecs`, or lossless as `lossy`.
    """

    def __init__(
        self,
        codecs: Sequence[str | BlobCodec] | str | BlobCodec | None,
        lossy: str | BlobCodec | Lossy | None,
    ) -> None:
        if codecs is None:
            given: list[str | BlobCodec] = [name for name in USUAL_CODECS if is_codec_name(name)]
        elif isinstance(codecs, (str, BlobCodec)):
            given = [codecs]
        elif isinstance(codecs, Iterable):
            given = list(codecs)
        else:
            raise ArgumentTypeError(f"codecs: expected codecs or names of them, got {codecs!r:.60}")
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
        self.rate: LossyRate | None = None
        if isinstance(lossy, Lossy):
            self.rate = LossyRate(lossy)
            lossy = lossy.codec
        if lossy is not None:
            self.lossy, found = _checked("lossy", lossy)
            if found.error_bound is None:
                raise ArgumentError(f"lossy: {self.lossy!r} is lossless, name it in codecs=")
            self._known[self.lossy] = found
        self._fitted: dict[FitKey, BlobCodec] = {}
        #: Of those, what is to be fitted anew.
        self._outdated: set[FitKey] = set()
        self._fits = SampleFits()
        #: Set where a codec was asked for that was not fitted yet.
        self.was_fitting = False
        #: Whether whoever asks for a codec waits for its fit on a GPU, too.
        self.waits_for_fits = False
        self._at_rate: dict[int, BlobCodec] = {}
        self._lock = threading.Lock()

    def for_site(self, name: str, site: Site, flat: torch.Tensor) -> BlobCodec | None:
        """Return a codec fitted to a site by its first tensor; None if it takes no such tensors.

        On a GPU the host waits for nothing, and it is None until the fit is there (`is_fitting`),
        unless `waits_for_fits` is set.

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
        if codec is None or key in self._outdated:
            found = self._known[name]
            if name == self.lossy and self.rate is not None:
                codec = self._rated(self.rate.block_bits)
                if codec is None:
                    return None
            else:
                codec = self._fit(key, found, flat)
                if codec is None:
                    return None
        if not codec.takes(flat.dtype) or flat.device.type not in codec.device_types:
            return None
        return codec

    def _fit(
        self, key: FitKey, found: type[BlobCodec] | BlobCodec, flat: torch.Tensor
    ) -> BlobCodec | None:
        """Return what is fitted to a tensor: on a GPU later, and what there was until then."""
        made: BlobCodec | None
        if isinstance(found, BlobCodec):
            made = found
        elif found.learns and flat.device.type == "cuda" and not self.waits_for_fits:
            made = self._fits.fit(key, found, flat)
            if made is None:
                self.was_fitting = True
                return self._fitted.get(key)
        else:
            made = found.fit(flat)
        with self._lock:
            if key in self._outdated:
                self._outdated.discard(key)
                self._fitted[key] = made
            return self._fitted.setdefault(key, made)

    @property
    def fitting(self) -> int:
        """Number of fits to tensors of GPUs that are under way."""
        return self._fits.under_way

    def is_fitting(self, name: str, site: Site, dtype: torch.dtype) -> bool:
        """Return whether a codec is being fitted to a site, whose tensors cross raw until then."""
        return self._fits.knows((name, site.name, dtype))

    def close(self) -> None:
        """End threads."""
        self._fits.close()

    def _rated(self, block_bits: int | None) -> BlobCodec | None:
        """Return the lossy codec at a rate: one object for each, whatever the site."""
        if block_bits is None:
            return None
        codec = self._at_rate.get(block_bits)
        if codec is None:
            assert self.lossy is not None
            found = self._known[self.lossy]
            made = found.fit(torch.empty(0), **{RATE_OPTION: block_bits})
            with self._lock:
                codec = self._at_rate.setdefault(block_bits, made)
        return codec

    def candidates(self, site: Site) -> tuple[str, ...]:
        """Return the names of the codecs that may encode a site, the lossy one at the end."""
        if self.lossy is None or site.is_exact:
            return self.names
        if self.rate is not None and self.rate.block_bits is None:
            return self.names
        return (*self.names, self.lossy)

    def all(self) -> list[type[BlobCodec] | BlobCodec]:
        """Return the codecs that were named, or their classes; with a schedule at several rates."""
        found = [self._known[name] for name in self.names]
        if self.lossy is not None:
            lossy = self._known[self.lossy]
            if self.rate is None:
                found.append(lossy)
            else:
                one = torch.empty(0)
                found += [lossy.fit(one, **{RATE_OPTION: bits}) for bits in MEASURED_RATES]
        return found

    def most_bytes(self, names: Iterable[str], site: Site, flat: torch.Tensor) -> dict[str, int]:
        """Return by codec that is fitted to a site the bytes that a tensor of it takes at most."""
        found = {name: self.for_site(name, site, flat) for name in names}
        return {
            name: codec.max_encoded_bytes(flat.shape, flat.dtype)
            for name, codec in found.items()
            if codec is not None
        }

    def refit(self, site: Site) -> None:
        """Have codecs learn from the next tensor of a site what they have learnt of it."""
        with self._lock:
            self._outdated.update(key for key in self._fitted if key[1] == site.name)


class Policy(Protocol):
    """Decides what is done with the tensors of each site."""

    def decide(self, site: Site) -> Choice:
        """Return what is done with the tensors of a site, and why."""

    def begin(self, entered: PassRecord) -> bool:
        """Begin a pass; return whether sites are to be decided anew."""

    def ended_forward(self, left: PassRecord) -> None:
        """End the forward part of a pass, in the thread that it ran in."""

    def notes(self) -> list[str]:
        """Return what is to be known of the decisions."""

    def packed_bytes(self, site: str) -> float:
        """Return the bytes that a site's tensor is expected to be packed to on the device."""

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which the first pass is profiled where passes are."""

    def sm_budget(self, name: str, site: Site) -> int | None:
        """Return the multiprocessors that a codec may take; None for all."""

    @property
    def observed(self) -> Observed | None:
        """What takes times of real swaps; None where nobody wants them."""

    def rows(self) -> list[dict[str, Any]]:
        """Return what was decided at each profile, and from what."""


class FixedPolicy:
    """Decides once for all.

    Parameters
    ----------
    policy : {"raw", "static", "host", "keep"}
        What.
    codecs : Codecs
        For "static", which packs all, and "host", whose CPU packs what has many zeros.

    Raises
    ------
    ArgumentError
        When there is no codec to pack with, or no range for a schedule of lossy rates.
    """

    observed = None

    def __init__(self, policy: str, codecs: Codecs) -> None:
        self._policy, self._codecs = policy, codecs
        if policy == "static" and not codecs.names and codecs.lossy is None:
            raise ArgumentError("codecs: policy 'static' packs all tensors, and no codec is named")
        if policy == "host" and not codecs.names:
            raise ArgumentError("codecs: policy 'host' packs on the CPU, and no codec is named")
        if policy == "static" and codecs.rate is not None and codecs.rate.range is None:
            raise ArgumentError(
                "lossy: policy 'static' measures nothing that a range of P could be found from; "
                "give top and bottom, or policy 'auto'"
            )

    def decide(self, site: Site) -> Choice:
        """Return what is done with the tensors of a site, and why."""
        what = self._policy
        if what == "static":
            names = self._codecs.candidates(site)
            what = names[-1] if self._codecs.lossy in names else (*names, RAW)[0]
        by = ", ".join(self._codecs.names[:1])
        verb = {
            KEEP: "Kept",
            RAW: "Raw",
            HOST: f"Raw, packed by the CPU ({by}) above {PACKED_ABOVE:.0%} zeros",
        }.get(what, f"Packed by {what}")
        return Choice(what, f"{verb}: policy {self._policy!r}.")

    def begin(self, entered: PassRecord) -> bool:
        """Return False: nothing is decided anew."""
        return False

    def ended_forward(self, left: PassRecord) -> None:
        """Do nothing."""

    def notes(self) -> list[str]:
        """Return nothing: the policy says all."""
        return []

    def packed_bytes(self, site: str) -> float:
        """Return 0: nothing is packed on the device."""
        return 0.0

    def begin_epoch(self, epoch: int) -> None:
        """Do nothing: there are no profiles."""

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
    if not is_codec_name(codec):
        known = ", ".join(blob_codec_names())
        raise ArgumentError(f"{argument}: {codec!r} is not known; known are {known}")
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
