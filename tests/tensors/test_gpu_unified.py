"""Unified tensors on a real GPU: page-locking, gathers, and every line of the placement rules."""

from __future__ import annotations

import gc
import multiprocessing
import os
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import bitslab
from bitslab.engine.memory import page_locking
from bitslab.engine.memory.host import HostBuffer
from bitslab.tensors.unified_tensor import UnifiedTensor
from bitslab.tensors.unified_tensor import unified as make
from tests.helpers import dtype_id, random_bits, same_bits
from tests.tables.support import buffer_of

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

LARGE = (1024, 1100)


@pytest.fixture
def already_locked(monkeypatch):
    """Make the system refuse to page-lock: someone else has done so with the same memory."""
    monkeypatch.setattr(page_locking, "_warned_of_refusal", False)
    locked: list[int] = []

    class Refusing(page_locking.CudaRegistrar):
        def register(self, address, nbytes):
            if not locked or locked[-1] != address:
                assert super().register(address, nbytes) == ""
                locked.append(address)
            return super().register(address, nbytes)

    registrar = Refusing()
    monkeypatch.setattr(page_locking, "registrar", registrar)
    kept: list[UnifiedTensor] = []  # the memory remains mapped until it is given up below
    yield kept
    for address in locked:
        registrar.unregister(address)


# Page-locking.


@pytest.mark.parametrize("nbytes", [1, 4097, 3 << 20])
def test_memory_is_page_locked_until_its_last_view_goes(nbytes):
    buffer = HostBuffer.allocate(nbytes)
    assert buffer.pinned and buffer.tensor.is_pinned()
    view = buffer.tensor[nbytes // 2 :]
    del buffer
    gc.collect()
    assert view.is_pinned()
    address = view.data_ptr()
    del view
    gc.collect()
    again = HostBuffer.allocate(nbytes, pin=False)
    assert address and not again.tensor.is_pinned() and not again.ensure_pinned()


def test_closing_ends_page_locking_and_keeps_views():
    buffer = HostBuffer.allocate(5000)
    view = buffer.tensor[:]
    view.fill_(7)
    on_gpu = view.to("cuda", non_blocking=True)
    buffer.close()
    assert not view.is_pinned() and view.eq(7).all() and on_gpu.eq(7).all()


def test_a_refusal_is_one_warning_and_leaves_cuda_in_order(already_locked):
    t = torch.randn(100, 6)
    with pytest.warns(UserWarning, match="ulimit -l") as reported:
        u = make(t)
    already_locked.append(u)
    assert len(reported) == 1 and not buffer_of(u).pinned
    torch.ones(3, device="cuda").add_(1)  # would report the refusal, had it been left behind
    ids = torch.tensor([[3, -1], [99, 3]], device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = u[ids]
        out = torch.empty(2, 6, device="cuda")
        assert torch.index_select(u, 0, ids[1], out=out) is out
    assert rows.is_cuda and torch.equal(rows.cpu(), t[ids.cpu()]) and torch.equal(out, rows[1])
    kept = out.clone()
    with pytest.raises(IndexError, match="index"):
        torch.index_select(u, 0, torch.tensor([3, 100], device="cuda"), out=out)
    assert torch.equal(out, kept)


def test_release_and_page_locking_keep_away_from_a_capture():
    stream = torch.cuda.Stream()
    x = torch.ones(8, device="cuda")
    held, lazily = HostBuffer.allocate(5000), HostBuffer.allocate(5000, pin="lazily")
    view = held.tensor[:]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        x.add_(1)
        held.close()
        with pytest.raises(bitslab.BitslabError, match="while a graph is captured"):
            lazily.ensure_pinned()
    assert view.is_pinned()
    HostBuffer.allocate(1, pin=False)
    assert not view.is_pinned()
    graph.replay()
    assert lazily.ensure_pinned() and x.eq(2).all()


@pytest.mark.usefixtures("forks")
def test_a_forked_child_reads_it_and_leaves_page_locking_alone():
    u = make(torch.arange(6000.0).view(100, 60))
    assert buffer_of(u).pinned
    child = os.fork()
    if not child:
        status = 1
        try:
            fine = not buffer_of(u).pinned and not buffer_of(u).ensure_pinned()
            fine = fine and u.numpy()[99, 59] == 5999
            u.numpy()[0, 0] = 77
            buffer_of(u).close()
            del u
            gc.collect()
            status = 0 if fine else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert buffer_of(u).pinned and u[torch.tensor([0], device="cuda")][0, 0] == 77


def gather_there(u: UnifiedTensor, answers) -> None:
    before = buffer_of(u).pinned
    rows = u[torch.tensor([5, 2], device="cuda")]
    answers.send((before, buffer_of(u).pinned, rows.cpu().numpy().tolist()))


def test_a_spawned_process_page_locks_for_itself():
    u = make(torch.arange(60.0).view(10, 6))
    context = multiprocessing.get_context("spawn")
    answers, theirs = context.Pipe()
    process = context.Process(target=gather_there, args=(u, theirs))
    process.start()
    assert answers.recv() == (False, True, u[[5, 2]].tolist())
    process.join()
    assert process.exitcode == 0 and buffer_of(u).pinned


# Rows by index.

VIEWS = {
    "whole": lambda t: t,
    "slice": lambda t: t[7:200],
    "step": lambda t: t[3::5],
    "columns": lambda t: t[:, 5:24],
    "both": lambda t: t[2::3, 9:],
    "one-column": lambda t: t[:, 3],
    "three-dimensions": lambda t: t.view(301, 2, 12),
    "column-step": lambda t: t[:, ::2],
    "transposed": lambda t: t.t(),
    "expanded": lambda t: t[4].expand(20, -1),
    "one-row": lambda t: t[8:9],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.complex128], ids=dtype_id)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_cuda_index_gives_rows_on_its_gpu(view, dtype):
    t = random_bits(dtype, (301, 24))
    seen, expected = view(make(t)), view(t)
    for id_dtype in (torch.int64, torch.int32):
        for shape in ((50,), (3, 4), (), (0,)):
            ids = torch.randint(-len(expected), len(expected), shape, dtype=id_dtype)
            rows = seen[ids.cuda()]
            assert type(rows) is torch.Tensor and rows.is_cuda
            assert same_bits(rows.cpu(), expected[ids])
    mask = torch.rand(len(expected)) < 0.4
    assert same_bits(seen[mask.cuda()].cpu(), expected[mask])


@pytest.mark.parametrize("affinity", ["host", "device"])
def test_every_way_of_indexing_follows_the_index(affinity):
    t = torch.randn(30, 7)
    u = make(t, affinity=affinity)
    ids = torch.tensor([4, 0, 29, 4])
    on_gpu = ids.cuda()
    out = torch.empty(4, 7, device="cuda")
    strided = torch.empty(7, 4, device="cuda").t()
    for rows in (
        u[on_gpu],
        u[(on_gpu,)],
        u[on_gpu, :],
        torch.index_select(u, 0, on_gpu),
        u.index_select(-2, on_gpu),
        torch.nn.functional.embedding(on_gpu, u),
        torch.index_select(u, 0, on_gpu, out=out),
        torch.index_select(u, 0, on_gpu, out=strided),
    ):
        assert rows.is_cuda and type(rows) is torch.Tensor and torch.equal(rows.cpu(), t[ids])
    assert torch.equal(u.index_select(1, on_gpu % 7).cpu(), t[:, ids % 7])
    assert torch.equal(u[on_gpu, on_gpu % 7].cpu(), t[ids, ids % 7])
    assert torch.equal(u[u.cuda() > 0].cpu(), t[t > 0])
    on_cpu = u[ids]
    assert not on_cpu.is_cuda and torch.equal(on_cpu, t[ids])
    assert type(on_cpu) is (UnifiedTensor if affinity == "host" else torch.Tensor)
    u[on_gpu] = torch.zeros(4, 7, device="cuda")
    assert not u[ids].any() and u.numpy()[1].any()


def test_gradients_of_a_gather_come_back_to_the_host():
    t = torch.randn(30, 7)
    u = make(t).requires_grad_()
    (u[torch.tensor([4, 4, 2], device="cuda")] * 3).sum().backward()
    expected = torch.zeros(30, 7)
    expected[4], expected[2] = 6, 3
    assert u.grad is not None and torch.equal(u.grad, expected)


def test_an_id_out_of_range_is_reported_later_and_the_output_is_untouched():
    u = make(torch.randn(30, 7))
    out = torch.full((2, 7), 5.0, device="cuda")
    torch.index_select(u, 0, torch.tensor([3, 30], device="cuda"), out=out)
    with pytest.raises(bitslab.IndexRangeError, match="30 at position 1, .* for 30 rows"):
        bitslab.raise_pending_errors()
    assert out.eq(5).all()


def test_what_cannot_be_gathered_is_refused():
    u = make(torch.randn(30, 7))
    ids = torch.tensor([1, 2], device="cuda")
    cases = [
        (lambda: u[ids.to(torch.int16)], bitslab.ArgumentTypeError, "index: expected int32, int64"),
        (lambda: u.index_select(0, ids > 1), bitslab.ArgumentTypeError, "index: expected int32"),
        (lambda: u[torch.ones(9, dtype=torch.bool, device="cuda")], IndexError, "mask of 9 for 30"),
        (lambda: make(torch.tensor(1.0))[ids], IndexError, "without dimensions"),
        (
            lambda: torch.index_select(u, 0, ids, out=torch.empty(2, 7)),
            bitslab.ArgumentTypeError,
            "out: expected torch.float32 on cuda:0",
        ),
        (
            lambda: torch.index_select(u, 0, ids, out=torch.empty(3, 7, device="cuda")),
            bitslab.ArgumentError,
            r"out: expected shape \[2, 7\], got \[3, 7\]",
        ),
    ]
    for use, error, says in cases:
        with pytest.raises(error, match=says):
            use()


def test_results_are_gathered_from_too():
    t = torch.randn(LARGE)
    result, small = make(t) * 2, make(t[:5]) * 2
    ids = torch.tensor([4, 0], device="cuda")
    assert not buffer_of(result).pinned and not buffer_of(make(t) * 2).pinned
    assert torch.equal(result[ids].cpu(), t[[4, 0]] * 2) and buffer_of(result).pinned
    assert torch.equal(small[ids].cpu(), t[[4, 0]] * 2)


def test_a_gather_waits_for_nothing_and_can_be_captured(no_waiting):
    t = torch.randn(1000, 33)
    u = make(t)
    ids = torch.randint(1000, (200,), device="cuda")
    out = torch.empty(200, 33, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.index_select(u, 0, ids, out=out)
    torch.cuda.current_stream().wait_stream(stream)
    with no_waiting():
        torch.index_select(u, 0, ids, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        torch.index_select(u, 0, ids, out=out)
    ids.copy_(torch.randint(1000, (200,)))
    graph.replay()
    assert torch.equal(out.cpu(), t[ids.cpu()])


# The rules of placement, line by line.


def test_a_cuda_tensor_that_is_no_scalar_decides():
    t, other = torch.randn(5, 6), torch.randn(5, 6)
    on_gpu = other.cuda()
    for affinity in ("host", "device"):
        u = make(t, affinity=affinity)
        for result, expected in (
            (u + on_gpu, t + other),
            (on_gpu * u, other * t),
            (torch.cat([u, on_gpu]), torch.cat([t, other])),
            (torch.where(on_gpu > 0, u, other), torch.where(other > 0, t, other)),
            (torch.addcmul(other, u, on_gpu), torch.addcmul(other, t, other)),
            (on_gpu[make(torch.tensor([2, 0]))], other[[2, 0]]),
        ):
            assert type(result) is torch.Tensor and result.device == on_gpu.device
            torch.testing.assert_close(result.cpu(), expected)


def test_else_a_unified_tensor_in_device_affinity_decides():
    t = torch.randn(5, 6)
    u, other = make(t, affinity="device"), make(t)
    assert u.affinity == "device" and u.cuda_device == torch.device("cuda", 0)
    for result, expected in (
        (u * 2, t * 2),
        (u + other, t + t),
        (u + t, t + t),
        (u + torch.tensor(1.0), t + 1),
        (u + torch.tensor(1.0, device="cuda"), t + 1),
        (u.sum(0), t.sum(0)),
        (u.to(torch.float64), t.double()),
        (torch.nn.functional.linear(u, t), t @ t.t()),
        (u.t().reshape(-1), t.t().reshape(-1)),
        (torch.zeros_like(u), torch.zeros(5, 6)),
    ):
        assert type(result) is torch.Tensor and result.is_cuda
        torch.testing.assert_close(result.cpu(), expected)


def test_else_the_host_computes():
    t = torch.randn(5, 6)
    u = make(t)
    for result, expected in (
        (u * 2, t * 2),
        (u + t, t + t),
        (u + torch.tensor(1.0), t + 1),
        (u + torch.tensor(1.0, device="cuda"), t + 1),
        (torch.tensor(1.0, device="cuda") - u, 1 - t),
    ):
        assert type(result) is UnifiedTensor and not result.is_cuda
        assert torch.equal(result, expected)


def test_operands_changed_in_place_are_changed_where_they_lie():
    t = torch.randn(5, 6)
    for affinity in ("host", "device"):
        u = make(t, affinity=affinity)
        assert u.add_(torch.ones(5, 6, device="cuda")) is u
        torch.testing.assert_close(u.as_subclass(torch.Tensor), t + 1)
        assert u.mul_(2) is u
        torch.testing.assert_close(u.as_subclass(torch.Tensor), 2 * (t + 1))
        out = torch.empty(5, 6, device="cuda")
        assert torch.mul(u, 2, out=out) is out
        torch.testing.assert_close(out.cpu(), 4 * (t + 1))
        with torch.inference_mode():
            assert u.sub_(out) is u
        torch.testing.assert_close(u.as_subclass(torch.Tensor), -2 * (t + 1))


def test_views_and_requests_do_not_depend_on_affinity():
    t = torch.randn(5, 6)
    u = make(t, affinity="device")
    for view in (u[2:], u.t(), u.view(-1), u.detach(), u[0], u.cpu(), next(iter(u))):
        assert type(view) is UnifiedTensor and view.affinity == "device"
        assert view.untyped_storage().data_ptr() == u.untyped_storage().data_ptr()
    assert u.numpy().tolist() == u.tolist() == t.tolist() and u.shape == (5, 6) and u.is_pinned()
    assert u.cuda().is_cuda and u.to("cuda:0").is_cuda and not u.to("cpu", torch.float64).is_cuda
    assert t.copy_(u) is t and u.copy_(u.cuda() + 1) is u
    torch.testing.assert_close(u.as_subclass(torch.Tensor), t + 1)


def test_affinity_is_switched_without_moving_data():
    u = make(torch.randn(5, 6))
    address = u.data_ptr()
    other = u.with_affinity("device", "cuda:0")
    assert other.data_ptr() == address
    assert (str((other * 1).device), str((u * 1).device)) == ("cuda:0", "cpu")
    assert u.set_affinity("device") is u and u.data_ptr() == address
    assert str((u * 1).device) == "cuda:0"
    assert str((u.set_affinity("host") * 1).device) == "cpu"
    assert u.cuda_device is None and u.data_ptr() == address
    with pytest.raises(bitslab.ArgumentError, match="device: cuda:99, but torch sees"):
        u.set_affinity("device", 99)
    with pytest.raises(bitslab.ArgumentError, match="device: expected a CUDA GPU, got cpu"):
        u.set_affinity("device", "cpu")


def test_a_tensor_on_a_gpu_is_taken_over_bit_for_bit():
    for dtype in (torch.float16, torch.float32, torch.complex64, torch.bool):
        t = random_bits(dtype, (40, 6))
        u = make(t.cuda().t(), affinity="device")
        assert u.cuda_device == torch.device("cuda", 0)
        assert same_bits(u.as_subclass(torch.Tensor), t.t().contiguous())


class Rows(Dataset[Any]):
    def __init__(self, x: torch.Tensor):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("affinity", ["host", "device"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_it_and_batches_are_page_locked(method, affinity):
    t = torch.randn(12, 5)
    u = make(t, affinity=affinity)
    loader = DataLoader(
        Rows(u), batch_size=4, num_workers=2, multiprocessing_context=method, pin_memory=True
    )
    batches = list(loader)
    assert all(batch.is_pinned() for batch in batches) and torch.equal(torch.cat(batches), t)
