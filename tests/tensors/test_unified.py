"""Unified tensors without a GPU: memory, rules, other processes, PyG and DGL."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import pickle
import zipfile
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from bitslab import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.engine.memory import host, page_locking
from bitslab.tensors import unified_tensor as unified
from bitslab.tensors.unified_tensor import Operand, Placement, UnifiedTensor, placement, rows_of
from tests import spawned
from tests.helpers import DTYPES, dtype_id, random_bits, same_bits, traits
from tests.tables.support import Recorder, buffer_of, inode_at

make = unified.unified
CPU, GPU0, GPU1 = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
NOW = b"cbitslab.tensors.unified_tensor\n"
LARGE = (1024, 1100)  # of bytes even more than SMALL_RESULT_BYTES


def lies_in(t: torch.Tensor, u: UnifiedTensor) -> bool:
    return (
        isinstance(t, UnifiedTensor)
        and t.untyped_storage().data_ptr() == u.untyped_storage().data_ptr()
        and t.host_buffer is u.host_buffer is not None
    )


# The copy.


@pytest.mark.pairwise(dtype=traits)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 3), (0, 3), (4, 1, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_bits_shape_and_size_are_kept(dtype, shape):
    t = random_bits(dtype, shape)
    u = make(t)
    assert type(u) is UnifiedTensor and u.device == CPU and u.is_contiguous()
    assert same_bits(u.as_subclass(torch.Tensor), t)
    assert buffer_of(u).nbytes == t.numel() * t.element_size()
    assert u.affinity == "host" and u.cuda_device is None and not u.requires_grad


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[3:4].expand(9, -1),
        lambda t: t.flip(0),
        lambda t: torch.complex(t, t).conj().t(),
        lambda t: torch.complex(t, t).conj().imag,
        lambda t: t.clone().requires_grad_() * 2,
    ],
    ids=["transposed", "strided", "expanded", "flipped", "conjugate", "negated", "with-gradient"],
)
def test_any_strides_are_copied(view):
    t = view(random_bits(torch.float32, (6, 10)))
    u = make(t)
    assert u.is_contiguous() and same_bits(u.as_subclass(torch.Tensor), t)


def test_the_source_may_change_and_die():
    t = torch.randn(LARGE)
    expected = t.clone()
    u = make(t[:])
    t.zero_()
    del t
    gc.collect()
    rows = u[5:9]
    del u
    gc.collect()
    assert torch.equal(rows, expected[5:9])


@pytest.mark.parametrize(
    ("t", "says"),
    [
        ([1.0], "list"),
        (torch.eye(3).numpy(), "ndarray"),
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.empty(3, device="meta"), "on meta"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "nested"),
    ],
    ids=["list", "numpy", "sparse", "meta", "nested"],
)
def test_what_has_no_plain_memory_is_refused(t, says):
    with pytest.raises(ArgumentTypeError, match=f"t: expected a.*{says}"):
        make(t)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantised_tensor_is_refused():
    t = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(ArgumentTypeError, match="t: expected a.*quantised"):
        make(t)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is what it tests")
def test_device_affinity_needs_a_gpu():
    u = make(torch.ones(3))
    for use in (
        lambda: make(torch.ones(3), affinity="device"),
        lambda: u.set_affinity("device"),
        lambda: u.with_affinity("device", 0),
    ):
        with pytest.raises(ArgumentError, match="affinity: 'device' needs a GPU"):
            use()
    assert u.affinity == "host"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is what it tests")
def test_device_affinity_from_elsewhere_counts_as_host_without_a_gpu():
    t = torch.randn(5, 6)
    u = unified._restore(t, "device", GPU1, False)
    assert u.affinity == "device" and u.cuda_device == GPU1
    loaded = torch.load(save(u))
    assert loaded.affinity == "device" and loaded.cuda_device == GPU1
    for result, expected in ((u * 2, t * 2), (u.t().reshape(-1), t.t().reshape(-1))):
        assert type(result) is UnifiedTensor and result.affinity == "host"
        assert torch.equal(result, expected)
    assert type(u[torch.tensor([1])]) is torch.Tensor


def test_files_from_before_the_module_was_renamed_load():
    x = torch.arange(12.0).view(3, 4)
    renamed = io.BytesIO()
    with zipfile.ZipFile(save(make(x))) as saved, zipfile.ZipFile(renamed, "w") as old:
        for name in saved.namelist():
            data = saved.read(name)
            if name.endswith("data.pkl"):
                assert data.count(b"cbitslab.tensors.unified_tensor\n") == 1
                data = data.replace(
                    b"cbitslab.tensors.unified_tensor\n", b"cbitslab.memory.unified\n"
                )
            old.writestr(name, data)
    renamed.seek(0)
    loaded = torch.load(renamed)
    assert isinstance(loaded, UnifiedTensor) and torch.equal(loaded, x)


def test_an_unknown_affinity_is_refused():
    u = make(torch.ones(3))
    unknown: Any = "gpu"
    for use in (u.set_affinity, u.with_affinity, lambda a: make(u, affinity=a)):
        with pytest.raises(ArgumentError, match="affinity: expected 'host' or 'device', got 'gpu'"):
            use(unknown)


# The rules of placement, line by line.

CUDA, CUDA_SCALAR = Operand("cuda", device=GPU1), Operand("cuda", scalar=True, device=GPU1)
PLAIN, SCALAR = Operand("cpu"), Operand("cpu", scalar=True)
HOST, HOST_SCALAR = Operand("unified"), Operand("unified", scalar=True)
DEVICE = Operand("unified", affinity="device", device=GPU0)
ON_GPU1, ON_GPU0 = Placement(GPU1, "cuda"), Placement(GPU0, "cuda")
ON_HOST = Placement(CPU, "unified")


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        # 1. A CUDA tensor that is not a scalar decides.
        ([HOST, CUDA], ON_GPU1),
        ([CUDA, HOST, PLAIN, SCALAR], ON_GPU1),
        ([DEVICE, CUDA], ON_GPU1),
        ([CUDA, SCALAR], ON_GPU1),
        # 2. Else a unified tensor in device affinity.
        ([DEVICE], ON_GPU0),
        ([HOST, DEVICE], ON_GPU0),
        ([DEVICE, PLAIN, SCALAR], ON_GPU0),
        ([DEVICE, CUDA_SCALAR], ON_GPU0),
        # 3. Else the host.
        ([HOST], ON_HOST),
        ([HOST, HOST_SCALAR], ON_HOST),
        ([PLAIN, HOST], ON_HOST),
        ([HOST, CUDA_SCALAR], ON_HOST),
        # Scalars on the CPU never decide.
        ([HOST, SCALAR], ON_HOST),
        ([SCALAR, HOST_SCALAR], ON_HOST),
        ([PLAIN, SCALAR], Placement(CPU, "cpu")),
    ],
    ids=str,
)
def test_placement(operands, expected):
    for order in (operands, operands[::-1]):
        assert placement(order) == expected


@pytest.mark.parametrize("shape", [LARGE, (4, 5)], ids=["large", "small"])
@pytest.mark.parametrize(
    "operator",
    [
        lambda t: t * 2,
        lambda t: 1 - t,
        lambda t: torch.ones_like(t) + t,
        lambda t: t + torch.tensor(3.0),
        lambda t: t > 0,
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.cat([t, t.cpu()]),
        lambda t: torch.nn.functional.layer_norm(t, t.shape[-1:]),
        lambda t: t.t().clone(),
        lambda t: t.flip(0),
        lambda t: t.to(torch.float64),
        lambda t: t.new_zeros(t.shape),
        lambda t: t.t().reshape(-1),
    ],
)
def test_results_of_the_host_are_unified(operator, shape):
    t = torch.randn(shape)
    result, expected = operator(make(t)), operator(t)
    assert type(result) is UnifiedTensor and result.affinity == "host"
    assert same_bits(result.as_subclass(torch.Tensor), expected)
    if shape == LARGE:
        assert buffer_of(result).nbytes == expected.numel() * expected.element_size()
    else:
        assert result.host_buffer is None
        assert same_bits(make(result).as_subclass(torch.Tensor), expected)
        assert buffer_of(make(result)).nbytes == expected.numel() * expected.element_size()


def test_several_results_are_unified():
    u = make(torch.randn(8, 3))
    values, ids = u.max(1)
    assert type(values) is type(ids) is UnifiedTensor
    assert u.max(1).values.shape == (8,)
    assert [type(x) for x in u.unbind(0)] == [UnifiedTensor] * 8


def test_results_that_lie_elsewhere_remain_there():
    t = torch.randn(4, 3)
    u = make(t)
    assert u.add_(1) is u and torch.equal(u, t + 1)
    out = torch.empty(4, 3)
    assert torch.add(u, u, out=out) is out and type(out) is torch.Tensor
    into = make(torch.empty(4, 3))
    assert torch.add(t, t, out=into) is into and torch.equal(into, t + t)
    one, two = torch.broadcast_tensors(t, u[0])
    assert type(one) is torch.Tensor and lies_in(two, u)
    u[1] = 5
    u[torch.tensor([0, 2])] = t[:2]
    assert u[1].tolist() == [5, 5, 5] and torch.equal(u[2], t[1])
    assert t.copy_(u) is t and type(t) is torch.Tensor


def test_a_result_that_gets_no_buffer_remains_in_ordinary_memory(monkeypatch):
    u = make(torch.ones(LARGE))

    def refuse(*args, **kwargs):
        raise BitslabError("too many open files")

    monkeypatch.setattr(host.HostBuffer, "allocate", refuse)
    result = u + 1
    assert type(result) is UnifiedTensor and result.host_buffer is None
    assert torch.equal(result, torch.full(LARGE, 2.0))


VIEWS = {
    "slice": lambda u: u[2:5],
    "step": lambda u: u[1::2, :3],
    "row": lambda u: u[3],
    "none": lambda u: u[None, ..., 1],
    "transposed": lambda u: u.t(),
    "T": lambda u: u.T,
    "reshape": lambda u: u.reshape(-1),
    "flatten": lambda u: torch.flatten(u),
    "view": lambda u: u.view(2, -1),
    "as-bytes": lambda u: u.view(torch.uint8),
    "expand": lambda u: u[None].expand(3, -1, -1),
    "split": lambda u: u.split(3)[1],
    "iteration": lambda u: list(u)[2],
    "detach": lambda u: u.detach(),
    "data": lambda u: u.data,
    "cpu": lambda u: u.cpu(),
    "to-cpu": lambda u: u.to("cpu"),
    "contiguous": lambda u: u.contiguous(),
    "unsqueeze": lambda u: torch.unsqueeze(u, 0),
    "copy": copy.copy,
    "parameter": torch.nn.Parameter,
    "affinity": lambda u: u.with_affinity("host"),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_share_memory_and_owner(view):
    u = make(torch.randn(10, 6))
    seen = view(u)
    assert lies_in(seen, u) and seen.affinity == "host"
    u.zero_()
    assert not seen.any()


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([3, -1, 3, 0]),
        torch.tensor([[1, 2], [0, 4]], dtype=torch.int32),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([True, False, True, False, True]),
        [4, 0],
        (slice(None), torch.tensor([2, 0])),
        (torch.tensor([2, 0]), 1),
        make(torch.tensor([1, 1])),
    ],
    ids=["ids", "int32-2d", "empty", "mask", "list", "columns", "elements", "unified"],
)
def test_a_cpu_index_remains_on_the_cpu(index):
    t = torch.randn(5, 7)
    u = make(t)
    rows = u[index]
    assert type(rows) is UnifiedTensor and rows.device == CPU and rows.host_buffer is None
    assert torch.equal(rows, t[index])


def test_other_ways_of_indexing_with_the_cpu():
    t, ids = torch.randn(5, 7), torch.tensor([4, 0, 4])
    u = make(t)
    out = torch.empty(3, 7)
    for rows in (
        torch.index_select(u, 0, ids),
        torch.index_select(input=u, dim=0, index=ids),
        u.index_select(dim=-2, index=ids),
        torch.nn.functional.embedding(ids, u),
        torch.index_select(u, 0, ids, out=out),
    ):
        assert torch.equal(rows, t[ids])
        assert type(rows) is UnifiedTensor or rows is out
    assert torch.equal(u.index_select(1, ids), t[:, ids])
    with pytest.raises(IndexError):
        u[torch.tensor([5])]
    with pytest.raises((IndexError, RuntimeError)):
        u.index_select(0, torch.tensor([5]))


def test_autograd_goes_through():
    t = torch.randn(LARGE)
    u, plain = make(t).requires_grad_(), t.clone().requires_grad_()
    for x in (u, plain):
        ((x[2:9] * 2).sum() + x[torch.tensor([3, 3])].sum() + (x * x).sum()).backward()
    assert u.is_leaf and u.grad is not None and plain.grad is not None
    assert torch.equal(u.grad, plain.grad)
    optimizer = torch.optim.SGD([u], lr=0.5)
    optimizer.step()
    optimizer = torch.optim.SGD([plain], lr=0.5)
    optimizer.step()
    assert torch.equal(u, plain) and buffer_of(u).nbytes == t.numel() * 4


def test_inference_mode():
    with torch.inference_mode():
        u = make(torch.ones(LARGE))
        assert u.add_(1) is u and type(u * 2) is UnifiedTensor and u[3:].min() == 2


def test_it_answers_as_a_tensor_does():
    t = torch.randn(4, 3)
    u = make(t)
    assert u.tolist() == t.tolist() and (u.numpy() == t.numpy()).all() and u[0, 0].item() == t[0, 0]
    assert len(u) == 4 and u.shape == t.shape and u.stride() == (3, 1) and bool((u == t).all())
    assert repr(u).startswith("UnifiedTensor([[")
    assert torch.utils.dlpack.from_dlpack(u).data_ptr() == u.data_ptr()
    assert type(u.as_subclass(torch.Tensor)) is torch.Tensor


def test_memory_that_torch_exchanges_is_no_longer_the_buffers():
    u = make(torch.ones(5))
    u.data = torch.zeros(9)
    assert u.host_buffer is None and u.shape == (9,)
    v = make(torch.ones(5))
    buffer_of(v).close()
    assert v.host_buffer is None and v.sum() == 5


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t[3:8],
        lambda t: t[1::3],
        lambda t: t[:, 2:],
        lambda t: t[4:5],
        lambda t: t[:, 3],
        lambda t: t.view(10, 3, 2),
        lambda t: t.view(-1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.complex128], ids=dtype_id)
def test_rows_of_a_view_are_where_it_says(view, dtype):
    t = view(random_bits(dtype, (10, 6)))
    found = rows_of(t)
    assert found is not None
    rows, row_bytes = found
    assert rows.shape == (len(t), row_bytes) and rows.data_ptr() == t.data_ptr()
    assert same_bits(rows.contiguous().view(-1).view(dtype).view(t.shape), t)


@pytest.mark.parametrize(
    "view", [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[:1].expand(4, -1), lambda t: t[:0]]
)
def test_a_view_without_rows_has_none(view):
    assert rows_of(view(torch.randn(10, 6))) is None


# Page-locking, with a registrar that records.


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(page_locking, "registrar", recorder)
    monkeypatch.setattr(page_locking, "_warned_of_refusal", False)
    yield recorder
    gc.collect()


def test_the_memory_is_page_locked_as_long_as_any_view_lives(recorder):
    u = make(torch.randn(10, 6))
    assert recorder.calls == [("register", u.data_ptr(), 240)]
    view = u[2:].t()
    del u
    gc.collect()
    assert recorder.names() == ["register"]
    del view
    gc.collect()
    assert recorder.names() == ["register", "synchronize", "unregister"]


def test_results_are_page_locked_when_they_are_first_gathered_from(recorder):
    u = make(torch.randn(LARGE))
    result = u * 2
    assert recorder.names() == ["register"]
    assert buffer_of(result).ensure_pinned()
    assert recorder.names() == ["register", "register"]
    del result, u


def test_refused_page_locking_is_one_warning_and_all_else_works(recorder):
    recorder.refusal = "operation not permitted"
    t = torch.randn(10, 6)
    with pytest.warns(UserWarning, match="ulimit -l") as reported:
        tensors = [make(t) for _ in range(3)]
    assert len(reported) == 1
    for u in tensors:
        assert not buffer_of(u).pinned
        assert torch.equal(u[torch.tensor([3, 1])], t[[3, 1]]) and torch.equal(u * 2, t * 2)


# Copies, files and other processes.


@pytest.mark.parametrize(
    "make_copy",
    [
        lambda u: pickle.loads(pickle.dumps(u)),
        copy.deepcopy,
        lambda u: torch.load(save(u)),
        lambda u: torch.load(save({"x": [u]}), weights_only=False)["x"][0],
    ],
    ids=["pickle", "deepcopy", "torch-save", "torch-save-nested"],
)
@pytest.mark.parametrize(
    "view",
    [lambda u: u, lambda u: u[3:5], lambda u: u.t(), lambda u: u.requires_grad_(), lambda u: u + 1],
    ids=["whole", "slice", "transposed", "with-gradient", "small-result"],
)
def test_pickle_and_copy_give_a_unified_tensor_of_its_own(make_copy, view):
    u = view(make(torch.randn(10, 6)))
    expected = u.detach().as_subclass(torch.Tensor).clone()
    twin = make_copy(u)
    with torch.no_grad():
        u.zero_()
    assert type(twin) is UnifiedTensor and torch.equal(twin, expected)
    assert buffer_of(twin).nbytes == expected.numel() * 4
    assert twin.requires_grad == u.requires_grad and twin.affinity == "host"


def save(content) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


def test_a_view_writes_its_own_rows_only():
    u = make(torch.randn(LARGE))
    assert len(pickle.dumps(u[:2])) < 20_000 and len(save(u[:2]).getvalue()) < 20_000


def test_share_memory_has_nothing_to_do():
    u = make(torch.ones(5))
    address = u.data_ptr()
    assert u.is_shared() and u.share_memory_() is u and u.data_ptr() == address
    small = u + 1
    assert not small.is_shared() and small.share_memory_() is small and small.is_shared()
    assert torch.equal(small, torch.full((5,), 2.0))


class Rows(Dataset[Any]):
    """Rows of a tensor, and which file they lie in."""

    def __init__(self, x: torch.Tensor):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], inode_at(self.x.data_ptr()), type(self.x) is UnifiedTensor


@pytest.mark.parametrize("method", ["fork", spawned.METHOD])
def test_workers_see_the_same_memory(method):
    t = torch.randn(12, 5)
    whole = make(torch.cat([torch.zeros(3, 5), t]))
    u = whole[3:]
    inode = inode_at(u.data_ptr())
    loader = DataLoader(
        Rows(u),
        batch_size=4,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=True,
        prefetch_factor=2,
    )
    for turn in range(2):
        rows, inodes, unified_there = zip(*loader, strict=True)
        assert torch.equal(torch.cat(rows), t + turn)
        assert torch.cat(inodes).tolist() == [inode] * 12 and torch.cat(unified_there).all()
        whole.add_(1)  # the workers live on and see it


def add_to(u: UnifiedTensor, small: UnifiedTensor, answers) -> None:
    u.add_(1)
    answers.send((u, small + u[0], type(u), u.requires_grad, u.stride()))
    answers.recv()


def test_through_a_pipe_memory_goes_both_ways_without_a_copy():
    u = make(torch.zeros(5, 6)).t()
    context: Any = multiprocessing.get_context(spawned.METHOD)
    answers, theirs = context.Pipe()
    process = context.Process(target=add_to, args=(u, u[0] + 1, theirs))
    process.start()
    back, small, kind, requires_grad, strides = answers.recv()
    answers.send("received")
    process.join()
    assert kind is UnifiedTensor and not requires_grad and strides == u.stride()
    assert u.sum() == 30 and torch.equal(small, torch.full((5,), 2.0))
    back.add_(1)
    assert u.sum() == 60 and type(back) is type(small) is UnifiedTensor
    assert inode_at(back.data_ptr()) == inode_at(u.data_ptr())


def test_a_view_of_another_dtype_passes_on():
    u = make(torch.arange(3, dtype=torch.int32))
    view = u[:2].view(torch.int64)
    assert isinstance(view, UnifiedTensor)
    rebuild, args = unified._pass_on(view)
    assert torch.equal(rebuild(*args), view) and lies_in(rebuild(*args), u)


def test_a_tensor_with_history_goes_to_no_other_process():
    u = make(torch.zeros(5)).requires_grad_()
    for refused in (u[2:], u * 2):
        with pytest.raises(RuntimeError, match="requires_grad"):
            multiprocessing.reduction.ForkingPickler.dumps(refused)


def gather_without_end(u: UnifiedTensor, answers) -> None:
    torch.set_num_threads(1)  # as in every DataLoader worker: OpenMP does not survive a fork
    ids = torch.arange(len(u)).flip(0)
    while True:
        answers.send(u[ids].sum().item())


@pytest.mark.parametrize("method", ["fork", spawned.METHOD])
def test_a_worker_killed_in_a_gather_leaves_the_memory_usable(method):
    t = torch.ones(LARGE)
    u = make(t)
    context = multiprocessing.get_context(method)
    answers, theirs = context.Pipe()
    process = context.Process(target=gather_without_end, args=(u, theirs))
    process.start()
    assert answers.recv() == t.numel()
    process.kill()
    process.join()
    assert torch.equal(u, t) and torch.equal(u[torch.tensor([6, 2])], t[[6, 2]])
    some = Subset(Rows(u), range(0, len(u), 16))  # it looks for the file of each row
    rows = [row for row, *_ in DataLoader(some, batch_size=32, num_workers=1)]
    assert torch.equal(torch.cat(rows), t[::16])


# Frameworks.


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", ["main", "worker"])
def test_pyg_nodes_are_loaded_from_it(workers, where):
    from torch_geometric.data import Data
    from torch_geometric.loader import NodeLoader

    x, edges = torch.randn(60, 7), torch.randint(60, (2, 400))
    data = Data(x=make(x), edge_index=edges)
    loader = NodeLoader(
        data,
        node_sampler=in_neighbors(edges),
        input_nodes=torch.arange(60),
        batch_size=20,
        num_workers=workers,
        filter_per_worker=where == "worker",
    )
    batches = list(loader)
    assert len(batches) == 3
    for batch in batches:
        assert len(batch.x) > 20 and torch.equal(batch.x, x[batch.n_id])


def in_neighbors(edges):
    """Make a PyG sampler of all edges that lead to the seeds, in torch alone."""
    from torch_geometric.sampler import BaseSampler, SamplerOutput

    class InNeighbors(BaseSampler):  # type: ignore[misc]
        def sample_from_nodes(self, index, **kwargs):
            chosen = torch.isin(edges[1], index.node).nonzero().flatten()
            sources = edges[0, chosen]
            others = sources[~torch.isin(sources, index.node)].unique()
            nodes = torch.cat([index.node, others])
            local = torch.full((60,), -1)
            local[nodes] = torch.arange(len(nodes))
            return SamplerOutput(
                node=nodes,
                row=local[sources],
                col=local[edges[1, chosen]],
                edge=chosen,
                metadata=(index.input_id, None),
            )

        def sample_from_edges(self, index, **kwargs):
            raise AssertionError("nodes are sampled")

        @property
        def edge_permutation(self):
            return None

    return InNeighbors()


@pytest.mark.parametrize("workers", [None, "fork", spawned.METHOD])
def test_pyg_graphs_are_batched(workers):
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    x = torch.randn(6, 4, 7)
    edges = torch.tensor([[0, 1, 3], [1, 2, 0]])
    graphs = [Data(x=make(one), edge_index=edges) for one in x]
    n_workers = 0 if workers is None else 2 if workers == "fork" else 1  # each imports PyG
    loader = DataLoader(
        graphs, batch_size=3, num_workers=n_workers, multiprocessing_context=workers
    )
    batches = list(loader)
    assert torch.equal(torch.cat([batch.x for batch in batches]), x.view(24, 7))
    assert batches[1].edge_index.max() == 11


@pytest.fixture
def dgl(monkeypatch):
    monkeypatch.setenv("DGLBACKEND", "pytorch")  # else its import writes a file in the home folder
    return pytest.importorskip("dgl", reason="dgl is not installed")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:Dataloader CPU affinity opt is not enabled")
def test_dgl_nodes_are_loaded_from_it(dgl, workers):
    graph, x = dgl.rand_graph(60, 400), torch.randn(60, 7)
    u = make(x)
    graph.ndata["feat"] = u
    assert graph.ndata["feat"] is u
    sampler = dgl.dataloading.NeighborSampler([3, 3], prefetch_node_feats=["feat"])
    loader = dgl.dataloading.DataLoader(
        graph, torch.arange(60), sampler, batch_size=20, num_workers=workers
    )
    batches = 0
    for sources, _, blocks in loader:
        assert torch.equal(blocks[0].srcdata["feat"], x[sources])
        batches += 1
    assert batches == 3


def test_dgl_graphs_are_cut_batched_and_computed_with(dgl):
    graph, x = dgl.rand_graph(60, 400), torch.randn(60, 7)
    graph.ndata["feat"] = make(x)
    assert torch.equal(graph.subgraph([5, 3, 2]).ndata["feat"], x[[5, 3, 2]])
    assert torch.equal(dgl.batch([graph, graph]).ndata["feat"], torch.cat([x, x]))
    assert torch.equal(pickle.loads(pickle.dumps(graph)).ndata["feat"], x)
    twin = graph.clone()
    twin.ndata["feat"] = x
    for each in (graph, twin):
        each.update_all(dgl.function.copy_u("feat", "m"), dgl.function.mean("m", "mean"))
    assert torch.equal(graph.ndata["mean"], twin.ndata["mean"])
