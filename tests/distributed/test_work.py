"""What torch's `Work` of an exchange offers: results, futures, hooks, callbacks."""

from __future__ import annotations

import pickle
from typing import Any, cast
from unittest import mock

import pytest
import torch

from bitslab import BitslabError, CorruptedDataError
from bitslab.distributed.faults import ExchangeError, Faults
from bitslab.distributed.work import ExchangeWork, OfTorch, Over
from tests.distributed.ranks import run_checks

two_and_three = pytest.mark.parametrize("ranks", [2, 3])
CHECKS = (
    *("futures", "own_rows", "in_callbacks", "refused_in_callbacks", "hook_of_ddp"),
    "plain_asynchronous",
)


@pytest.fixture(scope="module")
def seen_by(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list[Any]]]:
    """What two ranks saw, and three."""
    return {n: run_checks(CHECKS, n, tmp_path_factory.mktemp("ranks")) for n in (2, 3)}


@two_and_three
@pytest.mark.parametrize("check", CHECKS)
def test_works_are_those_of_torch(
    check: str, ranks: int, seen_by: dict[int, dict[str, list[Any]]]
) -> None:
    for seen in seen_by[ranks][check]:
        assert seen and all(seen.values()), seen


class OnGpu:
    """What is asked of an output on a GPU."""

    is_cuda = True
    device = torch.device("cuda", 3)


class Failed(Over):
    """An exchange that failed."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def exception(self) -> Exception:  # type: ignore[override]
        return self._error


def test_the_future_of_an_output_on_a_gpu_is_of_its_device() -> None:
    output = OnGpu()
    with mock.patch("torch.futures.Future") as future:
        ExchangeWork(cast(torch.Tensor, output), Over()).get_future()
    future.assert_called_once_with(devices=[torch.device("cuda", 3)])
    future.return_value.set_result.assert_called_once_with([output])


class Unpicklable(Exception):
    """An error that no pickle holds."""

    def __reduce__(self) -> Any:
        raise TypeError("no pickle")


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (ExchangeError("gone"), ExchangeError),
        (CorruptedDataError("gone"), CorruptedDataError),
        (Unpicklable("gone"), ExchangeError),
    ],
)
def test_the_future_of_a_gpu_gets_errors_that_it_can_search_for_tensors(
    error: Exception, kept: type[Exception]
) -> None:
    with mock.patch("torch.futures.Future") as future:
        ExchangeWork(cast(torch.Tensor, OnGpu()), Failed(error)).get_future()
    (found,) = future.return_value.set_exception.call_args.args
    assert type(found) is kept and "gone" in str(found)
    assert type(pickle.loads(pickle.dumps(found))) is kept


def test_a_stream_waits_for_an_output_on_a_gpu_behind_the_host() -> None:
    exchange = mock.MagicMock()
    ExchangeWork(cast(torch.Tensor, OnGpu()), exchange).block_current_stream()
    exchange.finish.assert_called_once_with(None)


def test_there_is_no_result_of_what_goes_on() -> None:
    exchange = mock.MagicMock()
    exchange.done.return_value = False
    work = ExchangeWork(torch.zeros(1), exchange)
    with pytest.raises(BitslabError, match="result: the exchange goes on"):
        work.result()


def test_what_was_not_written_is_written_in_no_later_wait() -> None:
    for error in (MemoryError("none left"), KeyboardInterrupt()):
        then = mock.Mock(side_effect=error)
        work = OfTorch(mock.MagicMock(), Faults(lasting=True), then)
        with pytest.raises(type(error)):
            work.finish()
        for _ in range(2):
            with pytest.raises((MemoryError, ExchangeError), match="none left|was not written"):
                work.finish()
        assert work.exception() is not None
        then.assert_called_once_with()


def test_a_collective_that_failed_fails_each_wait() -> None:
    torchs, then = mock.MagicMock(), mock.Mock()
    torchs.wait.side_effect = [RuntimeError("gone"), True]
    work = OfTorch(torchs, Faults(lasting=True), then)
    for _ in range(2):
        with pytest.raises(ExchangeError, match="payload stage: gone"):
            work.finish()
    then.assert_not_called()


def test_an_output_is_written_once() -> None:
    then = mock.Mock()
    work = OfTorch(mock.MagicMock(), Faults(lasting=True), then)
    work.finish()
    work.finish()
    then.assert_called_once_with()
