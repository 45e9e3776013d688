"""Tensors of any strides and offsets in every API that reads tensors as bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitslab import CompressedTable, InvariantCodec, RawCodec, compress, load, unified
from bitslab.dtypes import dense, flat_bytes
from bitslab.offload import WeightPacker
from tests.helpers import DTYPES, bits_of, dtype_id, traits

MEMORY_BYTES = 4096


def cut(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Cut a tensor out of memory of its own with bytes of all kinds."""
    data = torch.arange(MEMORY_BYTES).mul(37).remainder(251).to(torch.uint8)
    if dtype == torch.bool:
        data = data % 2
    return data.view(dtype).as_strided(shape, strides, offset)


ONE_ELEMENT = {
    "every-second": ((1,), (2,), 0),
    "expanded": ((1,), (0,), 3),
    "two-dimensions": ((1, 1), (5, 3), 7),
    "three-dimensions": ((1, 1, 1), (7, 5, 3), 11),
    "one-row-of-a-wide-one": ((1, 4), (5, 1), 1),
    "one-column": ((6, 1), (1, 9), 1),
    "no-rows": ((0,), (2,), 0),
    "rows-of-nothing": ((3, 0), (7, 3), 0),
    "no-dimension": ((), (), 5),
}


def space(t: torch.Tensor) -> torch.Tensor:
    """Make a target of a tensor's shape: three elements apart, those of one element by any."""
    strides = [3 * stride for stride in torch.empty(t.shape, device="meta").stride()]
    return cut(t.dtype, tuple(t.shape), tuple(strides), 1)


def by_compress(t: torch.Tensor, folder: Path) -> list[torch.Tensor]:
    ct = compress(t)
    ct.save(folder / "t.bitslab")
    found = [ct.decompress(), ct.decompress(out=space(t)), load(folder / "t.bitslab").decompress()]
    return [*found, ct[:]] if t.dim() else found


def by_codec(codec: type[Any], t: torch.Tensor, folder: Path) -> list[torch.Tensor]:
    if not t.dim() or (codec is InvariantCodec and not t.numel()):
        return []  # nothing to learn from
    fitted = codec.fit(t)
    packed = fitted.encode(t)
    assert fitted.packed_bytes(t).shape == (len(t),)
    return [fitted.decode(packed), fitted.decode(packed, out=space(t))]


def by_table(layout: Any, t: torch.Tensor, folder: Path) -> list[torch.Tensor]:
    if not t.dim():
        return []
    ids = torch.arange(2 * len(t))[::2] // 2
    table = CompressedTable.from_tensor(t, layout=layout)
    found = [table.gather(ids), table.gather(ids, out=space(t))]
    zeros = torch.zeros(40, *t.shape[1:], dtype=t.dtype)
    packed = CompressedTable.from_tensor(zeros, layout=layout)
    packed.update(ids, t)
    assert not flat_bytes(packed.gather(torch.arange(len(t), 40))).any()
    table.update(ids, t)
    return [*found, packed.gather(ids), table.gather(ids)]


def by_packer(t: torch.Tensor, folder: Path) -> list[torch.Tensor]:
    packer = WeightPacker({"unit": ["t"]})
    packer.add("t", t)
    return [packer.finish().read("t")]


WAYS = {
    "compress": by_compress,
    "InvariantCodec": lambda t, folder: by_codec(InvariantCodec, t, folder),
    "RawCodec": lambda t, folder: by_codec(RawCodec, t, folder),
    "compact-table": lambda t, folder: by_table("compact", t, folder),
    "inplace-table": lambda t, folder: by_table("inplace", t, folder),
    "unified": lambda t, folder: [unified(t).detach().cpu()],
    "WeightPacker": by_packer,
    "dense": lambda t, folder: [dense(t)],
}


def check(way: Any, t: torch.Tensor, folder: Path) -> None:
    before = bits_of(t)
    for found in way(t, folder):
        assert found.dtype == t.dtype and found.shape == t.shape
        assert torch.equal(bits_of(found), before)
    assert torch.equal(bits_of(t), before)


@pytest.mark.pairwise(dtype=traits)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_few_elements_with_any_strides(way, dtype, tmp_path):
    for shape, strides, offset in ONE_ELEMENT.values():
        check(way, cut(dtype, shape, strides, offset), tmp_path)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@settings(max_examples=25)
@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=0, max_size=3),
    offset=st.integers(0, 13),
)
def test_any_shape_strides_and_offset(way, dtype, sizes, offset, tmp_path_factory):
    shape, strides = tuple(size for size, _ in sizes), tuple(stride for _, stride in sizes)
    t = cut(dtype, shape, strides, offset)
    check(way, t, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("layout", ["compact", "inplace"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8], ids=dtype_id)
@pytest.mark.parametrize("n", [1, 2], ids=["one-row", "two-rows"])
def test_rows_that_are_cut_from_odd_ones_update_a_table(layout, dtype, n):
    for width in range(1, 9):
        rows = torch.arange(n * (width + 1)).to(dtype).view(n, width + 1)[:, :width]
        table = CompressedTable.from_tensor(torch.zeros(300, width, dtype=dtype), layout=layout)
        expected = table.gather(torch.arange(300))
        table.update(torch.arange(n), rows)
        expected[:n] = rows
        assert torch.equal(table.gather(torch.arange(300)), expected)


def test_a_view_of_row_major_bits_and_a_copy_of_others():
    t = cut(torch.float32, (1, 1), (5, 3), 7)
    assert dense(t).data_ptr() == t.data_ptr() and dense(t).stride() == (1, 1)
    plain = torch.randn(3, 4)
    assert dense(plain).data_ptr() == plain.data_ptr() == flat_bytes(plain).data_ptr()
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    assert (
        torch.equal(dense(conjugate), conjugate.resolve_conj()) and not dense(conjugate).is_conj()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_few_elements_with_any_strides_on_a_gpu(dtype):
    for shape, strides, offset in ONE_ELEMENT.values():
        data = cut(torch.uint8, (MEMORY_BYTES,), (1,), 0).cuda()
        data = data % 2 if dtype == torch.bool else data
        t = data.view(dtype).as_strided(shape, strides, offset)
        ct = compress(t)
        out = torch.empty_strided(shape, [3 * s for s in strides], dtype=dtype, device="cuda")
        assert torch.equal(bits_of(ct.decompress()), bits_of(t))
        if t.numel() <= 1:
            assert torch.equal(bits_of(ct.decompress(out=out)), bits_of(t))
        if t.dim() and t.numel():
            codec = InvariantCodec.fit(t)
            assert torch.equal(bits_of(codec.decode(codec.encode(t))), bits_of(t))
            table = CompressedTable.from_tensor(t.cpu())
            ids = torch.arange(len(t), device="cuda")
            assert torch.equal(bits_of(table.gather(ids)), bits_of(t))
            table.update(ids.cpu(), t.cpu())
            assert torch.equal(bits_of(table.gather(ids)), bits_of(t))
