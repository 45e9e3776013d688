"""What an asynchronous exchange returns: torch's `Work`, with what its users ask of one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..engine.tasks import ThreadTask
from ..errors import BitslabError
from .faults import ExchangeError, Faults
from .modes import mode_of_thread

#: Of a future: what torch's own collectives have there.
Outputs = list[torch.Tensor]


class UnderWay(Protocol):
    """An exchange that was begun. On a GPU it is over when all of it is queued."""

    def finish(self, timeout_s: float | None = None) -> object:
        """Wait until it is over, and raise its error; torch's current stream waits, too."""

    def done(self) -> bool:
        """Return whether it is over, well or not."""

    def exception(self) -> BaseException | None:
        """Return its error, or None; waits until it is over."""

    def call_when_over(self, call: Callable[[], object]) -> None:
        """Have ``call()`` called once it is over, where torch's current stream is behind it."""


class ExchangeWork(dist.Work):
    """What an asynchronous all-to-all returns: a `Work`, by which type some of its users go on.

    Parameters
    ----------
    output : torch.Tensor
        What is written.
    exchange : UnderWay
        What writes it.
    """

    def __init__(self, output: torch.Tensor, exchange: UnderWay) -> None:
        super().__init__()
        self._output, self._exchange = output, exchange

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the output is written; return True.

        Of tensors on a GPU torch's current stream waits, the host until all is queued.

        Parameters
        ----------
        timeout : timedelta, optional
            At most so long; without a limit when left out or 0, as torch has it.

        Raises
        ------
        ExchangeError, CorruptedDataError
            Of the exchange; the output is as it was.
        TimeoutError
            When it takes longer; the exchange goes on.
        BitslabError
            In a callback of another exchange's future, while this one goes on: its thread calls it.
        """
        seconds = timeout.total_seconds() if timeout else None
        try:
            self._exchange.finish(seconds)
        except TimeoutError:
            if self._exchange.done():
                raise
            raise TimeoutError(f"timeout: the exchange takes longer than {seconds} s") from None
        return True

    def synchronize(self) -> None:
        """Wait as `wait` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Have torch's current stream of a GPU wait until the output is written.

        Of an output on a GPU as `wait` does it. Of one on the CPU the host goes on.
        """
        if self._output.is_cuda:
            self.wait()
        else:
            super().block_current_stream()

    def is_completed(self) -> bool:
        """Return whether the exchange ended, well or not; on a GPU, whether all is queued."""
        return self._exchange.done()

    def is_success(self) -> bool:
        """Return whether the exchange ended well; False while it goes on."""
        return self._exchange.done() and self._exchange.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of an exchange that failed; None while it goes on."""
        return self._exchange.exception() if self._exchange.done() else None

    def result(self) -> list[torch.Tensor]:
        """Return the output of an exchange that ended, as the one tensor of a list; see `wait`.

        Raises
        ------
        BitslabError
            While the exchange goes on.
        ExchangeError, CorruptedDataError
            Of the exchange; the output is as it was.
        """
        if not self._exchange.done():
            raise BitslabError("result: the exchange goes on; call wait() first")
        self.wait()
        return [self._output]

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that is done when `wait` would return, as hooks of DDP want it.

        Returns
        -------
        torch.futures.Future
            Of the output, as the one tensor of a list; with the error of an exchange that failed.
            Of tensors on a GPU its `wait` and the streams of its callbacks wait for the output.
            Callbacks run in the thread that exchanges, in the order of the exchanges: what comes
            later waits for them, and they may not wait for it.
        """
        on_gpu = self._output.is_cuda
        future: torch.futures.Future[Outputs] = torch.futures.Future(
            devices=[self._output.device] if on_gpu else None
        )
        self._exchange.call_when_over(partial(_complete, future, self._output, self._exchange))
        return future


def _complete(future: Any, output: torch.Tensor, exchange: UnderWay) -> None:
    """Give a future what an exchange that is over has."""
    error = exchange.exception()
    before, this_thread.completes = this_thread.completes, True
    try:
        if error is None:
            future.set_result([output])
        elif isinstance(error, Exception) and not output.is_cuda:
            future.set_exception(error)
        else:
            # That of a GPU pickles what it holds to find tensors, which not all errors let it do.
            kept = error if isinstance(error, BitslabError) else ExchangeError(f"{error!r:.200}")
            future.set_exception(kept)
    finally:
        this_thread.completes = before


class _ThisThread(threading.local):
    """Whether the calling thread is that of an exchange, in callbacks of a future."""

    completes = False


this_thread = _ThisThread()


def refuse_to_wait() -> None:
    """Raise in a callback, where ``this_thread.completes``: its thread would wait for itself."""
    raise BitslabError(
        "wait: in a callback of an exchange's future, which runs in the thread that exchanges; "
        "wait elsewhere for what is under way"
    )


def error_of(task: ThreadTask[Any]) -> BaseException | None:
    """Return the error of a task of a helper's thread, or None; waits until it is over."""
    try:
        return task.exception()
    except CancelledError:
        return not_begun()


def not_begun() -> ExchangeError:
    """Return the error of an exchange whose task was cancelled."""
    return ExchangeError("exchange: not begun, its group was destroyed before")


class OfThread:
    """An exchange over gloo in a helper's thread.

    Parameters
    ----------
    task : ThreadTask
        Which does it.
    """

    def __init__(self, task: ThreadTask[Any]) -> None:
        self._task = task

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait until it is over, and raise its error."""
        if this_thread.completes and not self._task.done():
            refuse_to_wait()
        try:
            self._task.result(timeout_s)
        except CancelledError:
            raise not_begun() from None

    def done(self) -> bool:
        """Return whether it is over."""
        return self._task.done()

    def exception(self) -> BaseException | None:
        """Return its error, or None; waits until it is over."""
        return error_of(self._task)

    def call_when_over(self, call: Callable[[], object]) -> None:
        """Have ``call()`` called in the helper's thread; here where it is over."""
        self._task.add_done_callback(lambda _: call())


class OfTorch:
    """An exchange by torch's own collective.

    Parameters
    ----------
    work : dist.Work
        What that returned.
    faults : Faults
        Of the caller.
    then : callable, optional
        ``then()`` writes the output where that is not what the collective wrote. It is called once,
        by the first `finish`, behind the collective on torch's current stream, in the mode of
        autograd of whoever began.
    """

    def __init__(
        self, work: dist.Work, faults: Faults, then: Callable[[], object] | None = None
    ) -> None:
        self._work, self._faults, self._then = work, faults, then
        self._future, self._mode = work.get_future(), mode_of_thread()
        self._failed: Exception | None = None

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait until it is over, and raise its error, each time; torch's current stream waits, too.

        What was not written in the first call is written in no later one.
        """
        if self._failed is not None:
            raise self._failed
        limit = () if timeout_s is None else (timedelta(seconds=timeout_s),)
        try:
            self._faults.stage("payload", lambda: self._work.wait(*limit))
        except ExchangeError as error:
            self._failed = error
            raise
        if self._then is None:
            return
        # Before it begins: whatever ends it, even an interrupt, later calls raise.
        self._failed = ExchangeError("payload stage: what came was not written, wait() was ended")
        try:
            with self._mode():
                self._then()
        except Exception as error:
            self._failed = error
            raise
        self._then = None
        self._failed = None

    def done(self) -> bool:
        """Return whether it is over."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """Return its error, or None; waits until it is over."""
        if self._failed is not None:
            return self._failed
        try:
            # Not by the work, which over gloo is over behind the callbacks of its future.
            self._faults.stage("payload", self._future.wait)
        except ExchangeError as error:
            return error
        return None

    def call_when_over(self, call: Callable[[], object]) -> None:
        """Have ``call()`` called by torch's future, with streams that are behind it."""

        def over(future: object) -> None:
            call()

        self._future.add_done_callback(over)


class Over:
    """An exchange of nothing."""

    def finish(self, timeout_s: float | None = None) -> None:
        """Return: it is over."""

    def done(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> None:
        """Return None."""

    def call_when_over(self, call: Callable[[], object]) -> None:
        """Call it."""
        call()


#: One serves all: it has no state.
OVER = Over()
