"""Exchanges that failed: what a rank knows of them, and what others have still to learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..errors import BitslabError

T = TypeVar("T")


class ExchangeError(BitslabError, RuntimeError):
    """An exchange between ranks failed, or they disagree; the message names stage and ranks."""


class Faults:
    """The failed exchanges of one caller: an object, or the function on one communicator.

    A rank that cannot encode says so in the sizes stage, and one that raised while others went on
    in that of its next call; all ranks then raise: nobody waits for a rank that gave up.

    Parameters
    ----------
    lasting : bool
        Whether every later call raises, too. A collective of torch that failed or was interrupted
        always lasts: ranks may be anywhere in it.
    """

    def __init__(self, *, lasting: bool) -> None:
        self._lasting = lasting
        self._reason: str | None = None
        self._unreported = False

    @property
    def to_report(self) -> bool:
        """Whether other ranks have still to learn of a failure."""
        return self._unreported

    def check(self) -> None:
        """Raise where an earlier exchange failed, and all ranks know.

        Raises
        ------
        ExchangeError
            With the reason of the first failure.
        """
        if self._reason is not None and not self._unreported:
            raise ExchangeError(f"an earlier exchange failed: {self._reason}")

    def reported(self) -> ExchangeError:
        """Note that all ranks know; return the error to raise."""
        reason, self._unreported = self._reason, False
        if not self._lasting:
            self._reason = None
        return ExchangeError(f"an earlier exchange failed: {reason}")

    def broken(self, reason: str) -> None:
        """Note that a collective failed: every later call raises at once."""
        self._reason, self._unreported = self._reason or reason, False

    def failed(self, reason: str, *, known_to_all: bool) -> None:
        """Note that an exchange was finished, but not as this rank wanted."""
        if known_to_all and not self._lasting:
            return
        self._reason, self._unreported = self._reason or reason, not known_to_all

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
