"""Units on their way to a GPU: what waits for what, and reads from a file in a thread."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from bitslab import InvariantCodec
from bitslab.errors import BitslabError
from bitslab.offload import PackedWeights, WeightPacker, WeightStream, device_engine
from bitslab.offload.images import HostImage, MappedFile
from bitslab.offload.plans import UnitPlan, plan_unit
from bitslab.offload.staging import FileReader
from tests.streams import Recorder, Step, recorded

CPU = torch.device("cpu")
UNITS = [f"unit{n}" for n in range(5)]


class Kernels:
    """Kernels that record the launches they would start."""

    def __init__(self, recorder: Recorder, row_bytes: int) -> None:
        self.recorder = recorder
        self.row_bytes = row_bytes

    def prepare_decode(self, storage: Any, rows: torch.Tensor, *_: Any) -> Any:
        return lambda: self.recorder.work("decodes")


def weights_of(path: str | None = None) -> PackedWeights:
    generator = torch.Generator().manual_seed(1)
    options: dict[str, Any] = {"disk": path} if path else {}
    with WeightPacker({unit: [unit] for unit in UNITS}, **options) as packer:
        for unit in UNITS:
            packer.add(unit, torch.randn(64, 64, generator=generator).bfloat16())
        return packer.finish()


def steps_of(use: int, depth: int, computed: int) -> list[Step]:
    """Return what the streams do for one use of a unit, when all have been used.

    Parameters
    ----------
    use : int
        Number of the use: that of its transfer and its decode too, since each use has one.
    depth : int
        0 (one staging buffer and one of decoded tensors) or 2 (two each).
    computed : int
        Uses before it that have computed.
    """
    copies, decodes = "stream1", "stream0"

    def decoded(unit: int, computed: int) -> list[Step]:
        waits = [(decodes, f"after current:{computed}")] if computed > 0 else []
        return [(decodes, f"after {copies}:{unit}"), *waits, (decodes, "works")]

    if depth == 0:
        return [
            (copies, f"after {decodes}:{use - 1}"),  # the staging buffer was decoded
            (copies, "works"),
            *decoded(use, computed),
            ("current", f"after {decodes}:{use}"),
            ("current", "works"),
        ]
    return [
        ("current", f"after {decodes}:{use}"),
        *decoded(use + 1, computed),  # to the buffer of the use before
        (copies, f"after {decodes}:{use}"),
        (copies, "works"),  # of use + 2
        ("current", "works"),
    ]


@pytest.mark.parametrize("depth", [0, 2])
def test_streams_wait_for_each_other_and_the_host_for_none(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_of()
    monkeypatch.setattr(HostImage, "pinned", True)
    with recorded(monkeypatch) as record:
        stream = WeightStream(weights, depth=depth)
        monkeypatch.setattr(device_engine, "kernels_on", lambda device: None)
        monkeypatch.setattr(
            InvariantCodec, "kernels", lambda codec, device: Kernels(record, codec.row_bytes)
        )
        plans = [stream.plan(unit) for unit in UNITS]
        stream._engine = device_engine.DeviceEngine(weights, plans, CPU, depth, None)
        for unit in 4 * UNITS:  # each in both buffers: all marks and views are made
            stream.acquire(unit)
            stream.release(unit)
        made = record.made
        record.take()
        for n, unit in enumerate(2 * UNITS):
            stream.acquire(unit)
            record.work("computes")
            stream.release(unit)
            steps = [(who, what if "after" in what else "works") for who, what in record.take()]
            assert steps == steps_of(4 * len(UNITS) + 1 + n, depth, n)
        assert record.made == made, "events are used again"


@pytest.fixture
def reader(tmp_path: Any) -> Any:
    weights = weights_of(os.fspath(tmp_path / "weights"))
    plans = {unit: plan_unit(weights, unit, [unit]) for unit in UNITS}
    made = FileReader(weights, max(plan.staged_nbytes for plan in plans.values()), 2)
    yield made, plans, weights
    made.close()
    assert not [t for t in threading.enumerate() if t.name == "bitslab-weights"]


def content(reader: FileReader, plan: UnitPlan) -> torch.Tensor:
    [piece] = plan.pieces
    return reader.take(plan).data[piece.staged :][: piece.end - piece.begin]


def stored(weights: PackedWeights, plan: UnitPlan) -> torch.Tensor:
    [piece] = plan.pieces
    return weights.unit(piece.stored_in).image.tensor()[piece.begin : piece.end]


def wait_for(reader: FileReader) -> None:
    reader._lane.submit(int).wait()


def test_units_are_read_ahead_and_taken_in_any_order(reader: Any) -> None:
    files, plans, weights = reader
    window = UNITS[:2]
    for unit in UNITS[:3]:
        files.start(plans[unit], window)
    wait_for(files)
    assert [files.ready(plans[unit]) for unit in UNITS[:3]] == [True, True, False]
    for unit in ("unit4", "unit1", "unit0", "unit3"):  # the first was not expected
        assert torch.equal(content(files, plans[unit]), stored(weights, plans[unit]))
        assert not files.ready(plans[unit])


def test_a_unit_that_was_not_expected_takes_the_place_of_one_that_is_read(
    reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, plans, weights = reader
    held, read = threading.Event(), MappedFile.read

    def slow(self: MappedFile, offset: int, out: torch.Tensor) -> None:
        assert held.wait(20)
        read(self, offset, out)

    monkeypatch.setattr(MappedFile, "read", slow)
    for unit in UNITS[:2]:
        files.start(plans[unit], UNITS)
    threading.Timer(0.05, held.set).start()
    assert torch.equal(content(files, plans["unit3"]), stored(weights, plans["unit3"]))
    assert torch.equal(content(files, plans["unit1"]), stored(weights, plans["unit1"]))


def test_an_error_is_that_of_its_unit_and_the_next_try_succeeds(
    reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, plans, weights = reader

    def fails(self: MappedFile, offset: int, out: torch.Tensor) -> None:
        raise BitslabError("a file that cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(MappedFile, "read", fails)
        files.start(plans["unit0"], UNITS)
        wait_for(files)
    assert not files.ready(plans["unit0"])
    files.start(plans["unit1"], UNITS)
    with pytest.raises(BitslabError, match="a file that cannot be read"):
        files.take(plans["unit0"])
    for unit in UNITS[:2]:
        assert torch.equal(content(files, plans[unit]), stored(weights, plans[unit]))


def test_a_read_waits_for_what_crosses_from_its_buffer(
    reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, plans, _ = reader
    with recorded(monkeypatch) as record:
        for turn, unit in enumerate(UNITS):
            read = files.take(plans[unit])
            record.work("crosses")
            read.release(record.current)
            waits = [step for step in record.take() if step[0] == "host"]
            assert waits == ([("host", f"after current:{turn - 1}")] if turn > 1 else [])
