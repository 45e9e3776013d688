"""Tables that share uploads, on a GPU."""

from __future__ import annotations

import threading

import pytest
import torch

from bitslab.engine.kernels.uploads import Uploads
from tests.gpu import waiting_raises

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def tables(seed: int, sizes: list[int]) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    dtypes = (torch.int64, torch.float32, torch.bfloat16, torch.uint8)
    return [
        torch.randint(100, (n, 2), generator=draw).to(dtypes[i % len(dtypes)])
        for i, n in enumerate(sizes)
    ]


@pytest.mark.parametrize("chunk_bytes", [64, 1000, 1 << 19])
@pytest.mark.parametrize("in_block", [False, True], ids=["one by one", "in a block"])
def test_tables_arrive(in_block: bool, chunk_bytes: int) -> None:
    given = tables(0, [3, 0, 7, 1, 40, 2, 0, 5])
    there = Uploads(CUDA, chunk_bytes)
    with waiting_raises():
        if in_block:
            with there, there:
                found = [there.of([table])[0] for table in given]
        else:
            found = there.of(given)
        found += there.of(given[::-1])
    for table, copy in zip([*given, *given[::-1]], found, strict=True):
        assert copy.device.type == "cuda" and copy.shape == table.shape
        assert copy.dtype is table.dtype and copy.data_ptr() % 16 == 0
        assert torch.equal(copy.cpu(), table)


def test_later_tables_change_no_earlier_one_to_autograd() -> None:
    there = Uploads(CUDA)
    (index,) = there.of([torch.tensor([1, 0])])
    x = torch.randn(2, 3, device=CUDA, requires_grad=True)
    out = x[index]
    there.of([torch.arange(5)])
    out.sum().backward()
    assert x.grad is not None and bool((x.grad == 1).all())


def test_threads_wait_for_a_block_to_end() -> None:
    there, begun = Uploads(CUDA), threading.Event()
    found: list[torch.Tensor] = []

    def other() -> None:
        begun.set()
        found.extend(t.cpu() for t in there.of([torch.arange(7)]))

    thread = threading.Thread(target=other)
    with there:
        (first,) = there.of([torch.arange(3)])
        thread.start()
        begun.wait()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join()
    assert torch.equal(first.cpu(), torch.arange(3)) and torch.equal(found[0], torch.arange(7))


def test_a_table_for_another_stream_has_other_memory() -> None:
    there = Uploads(CUDA)
    (first,) = there.of([torch.arange(3)])
    with torch.cuda.stream(torch.cuda.Stream()):
        (second,) = there.of([torch.arange(5)])
        assert torch.equal(second.cpu(), torch.arange(5))
    apart = first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert apart and torch.equal(first.cpu(), torch.arange(3))
