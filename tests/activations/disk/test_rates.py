"""The probe of a folder's device, and where its figures are kept."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from bitslab.activations.disk import (
    DiskError,
    DiskRates,
    FileRates,
    RatePoint,
    disk_rates,
    known_rates,
    measure_rates,
    rates,
)
from bitslab.activations.disk.rates import _best
from bitslab.engine.advisor.cache import cache_folder
from bitslab.errors import ArgumentError

KIB, MIB = 1 << 10, 1 << 20
SMALL: dict[str, Any] = {
    "seconds": 0.2,
    "requests_bytes": (64 * KIB, 256 * KIB),
    "threads": (1, 2),
    "file_bytes": 2 * MIB,
}
KNOWN = DiskRates(
    MIB,
    2,
    1,
    3e9,
    2e9,
    1e9,
    1e9,
    True,
    (RatePoint(MIB, 2, 3e9, 2e9),),
    file="kvikio",
    file_reason="is faster",
    files=(FileRates("posix", 2e9, 1e9), FileRates("kvikio", 3e9, 2e9)),
)


def test_rates_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    found = measure_rates(tmp_path, **SMALL)
    asked = {(point.request_bytes, point.threads) for point in found.points}
    assert asked == {(size, n) for size in (64 * KIB, 256 * KIB) for n in (1, 2)}
    assert (found.request_bytes, found.write_threads, found.read_threads) == _best(
        list(found.points)
    )
    assert found.write_bytes_per_s > 0 < found.read_bytes_per_s
    assert found.write_while_reading_bytes_per_s > 0 < found.read_while_writing_bytes_per_s
    assert not list(tmp_path.iterdir())


def test_least_that_is_fast_enough_is_chosen() -> None:
    def point(size: int, threads: int, write: float, read: float) -> RatePoint:
        return RatePoint(size, threads, write, read)

    some = [point(1, 1, 50, 40), point(1, 2, 60, 70), point(8, 1, 100, 60), point(8, 2, 97, 99)]
    assert _best([*some, point(8, 4, 102, 100)]) == (8, 1, 2)
    assert _best([*some, point(1, 4, 101, 97)]) == (8, 1, 2)
    assert _best([*some, point(1, 4, 110, 107)]) == (1, 4, 4)


def test_figures_are_kept_by_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITSLAB_CACHE", str(tmp_path / "cache"))
    measured = []

    def measure(folder: Path) -> DiskRates:
        measured.append(folder)
        return KNOWN

    monkeypatch.setattr(known_rates, "measure_and_choose", measure)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert disk_rates(tmp_path / "a") == KNOWN
    assert disk_rates(tmp_path / "b") == KNOWN  # of the same file system
    assert measured == [tmp_path / "a"]
    assert disk_rates(tmp_path / "b", again=True) == KNOWN
    disk_rates("/dev/shm")
    assert len(measured) == 3
    folder = cache_folder()
    assert folder is not None
    for path in folder.iterdir():
        path.write_text(path.read_text().replace("request_bytes", "request"))
    assert disk_rates(tmp_path / "a") == KNOWN
    assert len(measured) == 4  # damaged figures are measured again


def test_probe_takes_two_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own count: each measurement ends at its time, however fast the device."""
    waited: list[float] = []

    def run(probe: object, moves: list[Any], request_bytes: int, seconds: float) -> list[float]:
        waited.append(seconds)
        return [1.0] * len(moves)

    monkeypatch.setattr(rates._Probe, "run", run)
    begin = time.perf_counter()
    measure_rates(tmp_path, file_bytes=64 * MIB)
    filled = time.perf_counter() - begin
    assert len(waited) == 2 * len(rates.REQUESTS_BYTES) * len(rates.THREADS) + 3
    assert 0.99 <= sum(waited) <= 2.0 and sum(waited) >= 1.9 - filled


def test_folders_and_figures_are_checked(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="disk: /nowhere: No such file or directory"):
        disk_rates("/nowhere")
    with pytest.raises(DiskError, match="more are needed, the file system has"):
        measure_rates(tmp_path, requests_bytes=(1 << 50,))
    for field in dataclasses.fields(DiskRates)[:7]:
        with pytest.raises(ArgumentError, match=f"{field.name}: 0, expected a positive number"):
            DiskRates(**(dataclasses.asdict(KNOWN) | {field.name: 0}))
    with pytest.raises(ArgumentError, match="file: 'gds', accepted are posix, kvikio"):
        dataclasses.replace(KNOWN, file="gds")  # type: ignore[arg-type]
