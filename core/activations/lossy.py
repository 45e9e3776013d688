"""Lossy codecs: which tensors may lose bits, at which rate, and how far they are off."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.advisor import LossyRange, LossySchedule, SiteRecord, SwapLink, Times, lossy_range
from ..engine.advisor.lossy_range import BLOCK_VALUES, MAX_P, SCHEDULES, ScheduleKind
from ..engine.codecs.blob import HEADER_BYTES, BlobCodec
from ..engine.codecs.registry import blob_codec_class
from ..errors import ArgumentError, ArgumentTypeError

#: The option of a codec's `fit` that is P.
RATE_OPTION = "block_bits"
#: Rates of a codec whose times are measured for a schedule.
MEASURED_RATES = (12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Lossy:
    """A lossy codec whose rate follows the epochs: the sliding-down schedule and its rivals.

    P is the codec's bits for a block of four values; of float32 P / 128 of the bytes cross. Early
    epochs suffer more from errors than late ones, so that "sliding" goes from Top down to Bottom
    (CSWAP+, equations 1 and 2).

    Parameters
    ----------
    codec : str
        Name of a lossy codec whose `fit` takes ``block_bits``.
    schedule : {"sliding", "inverse", "fixed"}
        From Top down to Bottom, from Bottom up to Top, or always Bottom.
    epochs : int
        Epochs of the training.
    epoch_passes : int, optional
        Forward passes of an epoch that record a graph (those that a checkpoint around the model
        computes again, too), by which epochs are counted; when left out,
        `ActivationOffload.begin_epoch` says when one begins.
    top, bottom : int, optional
        The range of P. When left out, policy "auto" finds it by bisection (algorithm 1) from the
        profiles of the first epoch, and uses no lossy codec where none pays; other policies measure
        nothing and need both ("fixed" only `bottom`).

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For values that are not accepted.

    Examples
    --------
    >>> import bitslab
    >>> from bitslab.activations import Lossy
    >>> offload = bitslab.ActivationOffload(lossy=Lossy(epochs=90, epoch_passes=391))
    """

    codec: str = "zfp"
    schedule: ScheduleKind = "sliding"
    epochs: int = 1
    epoch_passes: int | None = None
    top: int | None = None
    bottom: int | None = None

    def __post_init__(self) -> None:
        found = blob_codec_class(self.codec)
        if found.error_bound is None or RATE_OPTION not in inspect.signature(found.fit).parameters:
            raise ArgumentError(f"lossy: codec {self.codec!r} has no rate to choose, zfp has")
        if self.schedule not in SCHEDULES:
            raise ArgumentError(
                f"lossy: schedule {self.schedule!r:.60}, accepted are {', '.join(SCHEDULES)}"
            )
        for name in ("epochs", "epoch_passes", "top", "bottom"):
            value = getattr(self, name)
            if value is None and name != "epochs":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ArgumentTypeError(f"lossy: {name}: expected an int, got {value!r:.60}")
            if value < 1:
                raise ArgumentError(f"lossy: {name}: {value}, accepted are numbers from 1")
        for name in ("top", "bottom"):
            value = getattr(self, name)
            if value is not None:
                found.fit(torch.empty(0), **{RATE_OPTION: value})  # or raises what is accepted
        if self.top is not None and self.bottom is not None and self.bottom > self.top:
            raise ArgumentError(f"lossy: bottom {self.bottom} is above top {self.top}")

    @property
    def given(self) -> tuple[int, int] | None:
        """Top and Bottom, where the caller chose all that the schedule uses."""
        if self.bottom is None or (self.top is None and self.schedule != "fixed"):
            return None
        return (self.bottom if self.top is None else self.top), self.bottom


class LossyRate:
    """The rate of the present epoch.

    Parameters
    ----------
    options : Lossy
        What follows which epochs.

    Attributes
    ----------
    epoch : int
        From 0.
    """

    def __init__(self, options: Lossy) -> None:
        self.options = options
        self.epoch = 0
        self._passes = 0
        self._found: LossyRange | None = None
        if options.given is not None:
            self._found = LossyRange(*options.given, pays=True)

    @property
    def range(self) -> LossyRange | None:
        """Top and Bottom; None as long as they are not known."""
        return self._found

    @property
    def block_bits(self) -> int | None:
        """P; None where no lossy codec is to be used."""
        found = self._found
        if found is None or not found.pays:
            return None
        options = self.options
        schedule = LossySchedule(found.top, found.bottom, options.epochs, options.schedule)
        return schedule.value(self.epoch)

    def begin_pass(self) -> None:
        """Count a forward pass."""
        passes = self.options.epoch_passes
        if passes is not None:
            self.epoch = self._passes // passes
        self._passes += 1

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, whatever was counted."""
        self.epoch = epoch
        if self.options.epoch_passes is not None:
            self._passes = epoch * self.options.epoch_passes

    def find(self, records: Iterable[SiteRecord], model: Times, link: SwapLink) -> None:
        """Find Top and Bottom for tensors, in the first epoch and where the caller gave none."""
        if self.options.given is not None or (self.epoch > 0 and self._found is not None):
            return
        found = lossy_range(records, model, link, self.options.codec)
        least = MEASURED_RATES[0]
        bottom = max(self.options.bottom or found.bottom, least)
        top = min(self.options.top or found.top, MAX_P)
        self._found = LossyRange(top, bottom, top > bottom)

    def share(self, record: SiteRecord) -> float:
        """Return the share of a tensor's bytes that cross at the present rate."""
        bits = self.block_bits
        assert bits is not None
        of_raw = bits / (8 * BLOCK_VALUES * record.dtype.itemsize)
        return of_raw + HEADER_BYTES / max(1, record.nbytes)

    def describe(self) -> str:
        """Return the schedule and where it stands, in words."""
        options, found, bits = self.options, self._found, self.block_bits
        if found is None:
            return f"{options.codec}, no range of P yet"
        if bits is None:
            return f"{options.codec}, no P pays: Top {found.top}, Bottom {found.bottom}"
        return (
            f"{options.codec}, P = {bits} of {MAX_P}: {options.schedule}, Top {found.top}, Bottom "
            f"{found.bottom}, epoch {self.epoch} of {options.epochs}"
        )


@dataclass(frozen=True)
class LossyError:
    """How far a tensor was off that a lossy codec returned.

    Parameters
    ----------
    codec : str
        The codec and its rate.
    relative : float
        Root of the mean squared error over that of the mean square of the tensor.
    largest : float
        Largest deviation of an element.
    """

    codec: str
    relative: float
    largest: float

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return dict(vars(self))

    def __str__(self) -> str:
        return f"{self.codec}, error {self.relative:.1e} of its size, {self.largest:.1e} at most"


class ErrorSample:
    """The error of a sample of a site's tensor, on its device until somebody asks.

    Parameters
    ----------
    codec : BlobCodec
        The codec.
    sample : torch.Tensor
        What it is measured on.
    """

    def __init__(self, codec: BlobCodec, sample: torch.Tensor) -> None:
        self.codec = codec
        with torch.no_grad():
            x = sample.double()
            off = codec.decode(codec.encode(sample)).double() - x
            # What is not finite comes back as it is, and its difference is no number.
            off, x = (t.where(x.isfinite(), 0) for t in (off, x))
            energy = x.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
            self._figures = torch.stack([(off.square().sum() / energy).sqrt(), off.abs().max()])

    def read(self) -> LossyError:
        """Return the error; waits for the device."""
        relative, largest = self._figures.tolist()
        return LossyError(self.codec.describe(), relative, largest)
