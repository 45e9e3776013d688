"""Exchanges that failed: what a rank knows of them, and what others have still to learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ..errors import ArgumentError, BitslabError, CorruptedDataError
from .wire import DAMAGE, DISAGREEMENT, NO_MEMORY, OTHER_CAUSE

T = TypeVar("T")


class ExchangeError(BitslabError, RuntimeError):
    """An exchange between ranks failed, or they disagree; the message names stage and ranks."""


class ContentError(ArgumentError):
    """An argument is wrong by what it holds in one call: others hear of it from the exchange."""


class Faults:
    """The failed exchanges of one caller: an object, or the function on one communicator.

    A rank that fails before it can send, or cannot encode, says so in the sizes stage, and one that
    raised while others went on in that of its next call; all ranks then raise: nobody waits for a
    rank that gave up.

    Parameters
    ----------
    lasting : bool
        Whether every later call raises, too. A collective of torch that failed or was interrupted
        always lasts: ranks may be anywhere in it.
    """

    def __init__(self, *, lasting: bool) -> None:
        self._lasting = lasting
        self._reason: str | None = None
        self._cause = OTHER_CAUSE
        self._unreported = False
        #: Whether ranks found that they differ in what all have alike, and count calls apart.
        self.parted = False

    @property
    def to_report(self) -> bool:
        """Whether other ranks have still to learn of a failure."""
        return self._unreported

    @property
    def is_known(self) -> bool:
        """Whether every call raises from now on: all ranks know of a failure, or will."""
        return self._reason is not None and not self._unreported

    @property
    def cause(self) -> int:
        """Of the failure that is to report, for a descriptor."""
        return self._cause

    def check(self) -> None:
        """Raise where an earlier exchange failed, and all ranks know.

        Raises
        ------
        ExchangeError
            With the reason of the first failure.
        """
        if self.is_known:
            raise self.pending()

    def pending(self) -> ExchangeError:
        """Return the error of the failure that is to report."""
        return ExchangeError(f"an earlier exchange failed: {self._reason}")

    def reported(self) -> None:
        """Note that all ranks know."""
        self._unreported = False
        if not self._lasting:
            self._reason = None

    def broken(self, reason: str) -> None:
        """Note that a collective failed: every later call raises at once."""
        self._reason, self._unreported = self._reason or reason, False

    def interrupted(self, error: BaseException) -> None:
        """Note an error that no `Exception` is: what it kept this rank from, others did.

        It comes between any two lines, so that nobody knows what was begun.
        """
        if not isinstance(error, Exception):
            self.broken(f"exchange: {error!r:.200}")

    def failed(self, reason: str, *, known_to_all: bool, cause: int = OTHER_CAUSE) -> None:
        """Note that an exchange was finished, but not as this rank wanted, or not begun."""
        if known_to_all and not self._lasting:
            return
        if self._reason is None:
            self._reason, self._cause = reason, cause
        elif not self._unreported:
            return  # all know of another one, and raise from there on
        self._unreported = not known_to_all

    def stage(self, name: str, work: Callable[[], T]) -> T:
        """Return ``work()``, a collective of a stage.

        Raises
        ------
        ExchangeError
            When it fails, with the stage's name.
        BaseException
            What else interrupts it; every later call raises then, too.
        """
        try:
            return work()
        except RuntimeError as error:
            reason = f"{name} stage: {error}"
            self.broken(reason)
            raise ExchangeError(reason) from error
        except BaseException as error:
            # What was posted would take the messages of the next exchange.
            self.broken(f"{name} stage: {error!r:.200}")
            raise


def cause_of(error: BaseException) -> int:
    """Return the number of an error's cause, for a descriptor."""
    # torch has an error of its own for GPUs; that of the CPU's allocator is known by its text.
    lacks_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
    if lacks_memory:
        return NO_MEMORY
    if isinstance(error, CorruptedDataError):
        return DAMAGE
    return DISAGREEMENT if isinstance(error, ExchangeError) else OTHER_CAUSE


def reason_of(error: BaseException) -> str:
    """Return what is said of an error that came before anything was sent."""
    return f"encoding: {error!r:.200}"
