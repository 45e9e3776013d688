"""Look-ups as a GPU makes them, by the kernels' own text run on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitslab.engine.kernels.cuda.ids import CHECKED_BY_ALL
from bitslab.engine.kernels.cuda.runner import INDEX_ERROR
from bitslab.engine.kernels.row_kernels import LayoutKernels
from bitslab.errors import IndexRangeError
from bitslab.offload import PackedUnit, PackedWeights, WeightPacker, device_rows
from bitslab.offload.device_rows import DeviceRows
from bitslab.offload.images import DeviceImage
from tests.helpers import packable, same_bits
from tests.simt.runner import SimtRunner, simt_kernels

ROWS = 200
CODECS = ["auto", "raw"]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> SimtRunner:
    kernels, runner = simt_kernels()

    def gather(bound: LayoutKernels, table: Any, ids: Any, out: Any, **options: Any) -> int:
        return kernels.gather_rows(table, bound.layout, ids, out, **options)

    monkeypatch.setattr(device_rows, "kernels_on", lambda device: kernels)
    monkeypatch.setattr(LayoutKernels, "gather", gather)
    return runner


def resident(table: torch.Tensor, codec: str) -> PackedWeights:
    """Pack a table into an image that counts as one on the device."""
    with WeightPacker({"unit": ["table"]}, codec=codec) as packer:  # type: ignore[arg-type]
        packer.add("table", table)
        unit = packer.take()["unit"]
    return PackedWeights({"unit": PackedUnit(DeviceImage(unit.image.tensor()), unit.records)})


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_rows_are_those_of_the_table(runner, dtype, codec):
    table = packable(dtype, (ROWS, 64))
    weights = resident(table, codec)
    assert weights.record("table").raw == (codec == "raw")
    reader = DeviceRows(weights, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for shape in [(), (7,), (2, 3), (0,), (CHECKED_BY_ALL + 1,)]:
        for kind in (torch.int64, torch.int32):
            ids = torch.randint(ROWS, shape, generator=generator).to(kind)
            assert same_bits(reader.rows("table", ids, None), table[ids.long()]), (shape, kind)
    assert not runner.mailbox.any()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", [5, CHECKED_BY_ALL + 1])
@pytest.mark.parametrize("bad", [-1, -ROWS, -ROWS - 1, ROWS, 1 << 40])
def test_ids_out_of_range_are_reported_and_nothing_is_decoded(
    runner, monkeypatch, bad, count, codec
):
    table = packable(torch.bfloat16, (ROWS, 64))
    reader = DeviceRows(resident(table, codec), torch.device("cpu"))
    ids = torch.arange(count) % ROWS
    ids[3] = bad
    empty = torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(7))
        found = reader.rows("table", ids, None)
    assert (found == 7).all()
    assert runner.mailbox.tolist() == [INDEX_ERROR, 3, bad, ROWS]
    runner.mailbox.zero_()
    ids[3] = 0
    assert same_bits(reader.rows("table", ids, None), table[ids])
    assert not runner.mailbox.any()


@pytest.mark.parametrize("bad", [-1, -64, 64])
def test_ids_of_a_transposed_table_are_looked_at_before(runner, bad):
    table = packable(torch.bfloat16, (ROWS, 64)).T
    reader = DeviceRows(resident(table, "auto"), torch.device("cpu"))
    with pytest.raises(IndexRangeError, match=f"ids: {bad} for 'table', accepted are 0 to 63"):
        reader.rows("table", torch.tensor([2, bad]), None)
    ids = torch.tensor([[2, 63]])
    assert same_bits(reader.rows("table", ids, None), table[ids])
    assert not runner.launched
