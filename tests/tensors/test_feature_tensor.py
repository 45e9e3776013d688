"""FeatureTensor: rows without the rest, everything else as on the tensor, and no writes."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from bitslab import (
    ArgumentTypeError,
    BitslabError,
    CompressedFeature,
    IndexRangeError,
)
from bitslab.engine.memory.readonly import ReadOnlyTensor
from bitslab.tensors.feature_tensor import FeatureTensor
from tests import spawned

N = 50
DLPACK: Any = torch.utils.dlpack
IDS = torch.tensor([3, 1, 7])
MASK = torch.arange(N) % 3 == 1
F = torch.nn.functional


@pytest.fixture(scope="module")
def x():
    return torch.randn(N, 4, generator=torch.Generator().manual_seed(0)).round()


@pytest.fixture(scope="module")
def feature(x):
    return CompressedFeature.from_tensor(x, device="cpu")


@pytest.fixture
def t(feature):
    feature.forget_whole()
    return FeatureTensor(feature)


def decoded_whole(t):
    return t.feature.stats()["materialised_bytes"] > 0


def same(a, b):
    if isinstance(b, (tuple, list)) and b and isinstance(b[0], torch.Tensor):
        return len(a) == len(b) and all(same(p, q) for p, q in zip(a, b, strict=True))
    if isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return bool(np.all(a == b))


ROWS = {
    "ids": lambda t: t[IDS],
    "int32": lambda t: t[IDS.int()],
    "negative": lambda t: t[torch.tensor([-1, -N])],
    "mask": lambda t: t[MASK],
    "list": lambda t: t[[1, 2]],
    "list of bools": lambda t: t[MASK.tolist()],
    "empty list": lambda t: t[[]],
    "numpy": lambda t: t[np.array([4, 4])],
    "two dimensions": lambda t: t[IDS.view(1, 3)],
    "with columns": lambda t: t[IDS, torch.tensor([0, 1, 2])],
    "with more": lambda t: t[IDS.view(3, 1), :, None],
    "with a slice": lambda t: t[IDS, 1:],
    "with a number": lambda t: t[IDS, 2],
    "no ids": lambda t: t[torch.zeros(0, dtype=torch.int64)],
    "index_select": lambda t: torch.index_select(t, 0, IDS),
    "index_select from the end": lambda t: t.index_select(-2, IDS),
    "index_select of one": lambda t: t.index_select(0, torch.tensor(5)),
    "out": lambda t: torch.index_select(t, 0, IDS, out=torch.empty(3, 4)),
    "out resized": lambda t: torch.index_select(t, 0, IDS, out=torch.empty(0)),
    "out with strides": lambda t: torch.index_select(t, 0, IDS, out=torch.empty(4, 3).t()),
    "embedding": lambda t: F.embedding(IDS.view(3, 1), t),
    "embedding, padded": lambda t: F.embedding(IDS, t, 0),
}
VIEWS = {
    "number": lambda t: t[3],
    "last": lambda t: t[-1],
    "scalar tensor": lambda t: t[torch.tensor(3)],
    "slice": lambda t: t[2:5],
    "step": lambda t: t[40:2:3],
    "slice with more": lambda t: t[2:30:3, 1:],
    "element": lambda t: t[3, 1],
    "narrow": lambda t: t.narrow(0, 2, 4),
    "narrow from the end": lambda t: torch.narrow(t, -2, -3, 2),
    "select": lambda t: t.select(0, 2),
}


@pytest.mark.parametrize("choose", ROWS.values(), ids=ROWS)
def test_a_choice_of_rows_decodes_only_those(t, x, choose):
    rows = choose(t)
    assert type(rows) is torch.Tensor and same(rows, choose(x))
    assert not decoded_whole(t)


@pytest.mark.parametrize("choose", VIEWS.values(), ids=VIEWS)
def test_what_would_be_a_view_is_a_read_only_copy_of_those_rows(t, x, choose):
    rows = choose(t)
    assert type(rows) is ReadOnlyTensor and same(rows, choose(x))
    assert not decoded_whole(t)
    with pytest.raises(BitslabError, match="read-only"):
        rows.zero_()


def test_an_operator_cannot_write_through_a_list_of_tensors(t, x):
    with pytest.raises(BitslabError, match="read-only"):
        torch.ops.aten._foreach_add_.Scalar([t], 1)
    assert torch.equal(t.feature.whole(), x)


FACTS = {
    "shape": lambda t: (t.shape, t.size(), t.size(-1), t.dim(), t.ndim, len(t), t.numel()),
    "dtype": lambda t: (t.dtype, t.element_size(), t.itemsize, t.nbytes, t.type()),
    "device": lambda t: (t.device, t.is_cuda, t.get_device(), t.layout, t.is_sparse),
    "strides": lambda t: (t.stride(), t.storage_offset(), t.is_contiguous(), t.dim_order()),
    "kind": lambda t: (t.is_floating_point(), torch.is_complex(t), torch.is_tensor(t)),
    "gradient": lambda t: (t.requires_grad, t.is_leaf, t.grad, t.grad_fn, t._base),
    "promotion": lambda t: torch.result_type(t, 1),
    "as it is": lambda t: [
        f is t for f in (t.cpu(), t.contiguous(), t.float(), t.to("cpu"), t.requires_grad_(False))
    ],
    "made like it": lambda t: (t.new_zeros(3, 2), torch.ones_like(t), t.new_tensor([1.0])),
    "pinned": lambda t: t.is_pinned(),
}


@pytest.mark.parametrize("ask", FACTS.values(), ids=FACTS)
def test_facts_need_no_row(t, x, ask):
    answer, expected = ask(t), ask(x)
    assert same(answer, expected) if isinstance(answer, tuple) else answer == expected
    assert not decoded_whole(t)


def test_it_is_hashed_shown_and_shared_without_a_row(t):
    assert {t: 1}[t] == 1
    assert "[50, 4], float32" in repr(t) and f"{t:>5}" == repr(t)
    assert t.is_shared() and t.share_memory_() is t
    assert t.untyped_storage().nbytes() == 0
    for alias in (t.detach(), t.data, copy.copy(t)):
        assert isinstance(alias, FeatureTensor) and alias is not t
        assert alias.feature is t.feature
    assert not decoded_whole(t)


WHOLE = {
    "add": lambda t: t + 1,
    "subtract from": lambda t: 1 - t,
    "linear": lambda t: F.linear(t, torch.ones(2, 4)),
    "transposed product": lambda t: t @ t.t(),
    "T": lambda t: t.T,
    "columns": lambda t: t[:, 1],
    "ellipsis": lambda t: t[..., 0],
    "new dimension": lambda t: t[None],
    "lists for a tuple": lambda t: t[[[0, 5], [1, 2]]],
    "list of tensors": lambda t: t[[torch.tensor(0), torch.tensor(1)]],
    "list of lists": lambda t: t[[[i, i] for i in range(40)]],
    "list with a slice": lambda t: t[[slice(2, 4), 1]],
    "all": lambda t: t[:],
    "other dimension": lambda t: torch.index_select(t, 1, torch.tensor([1])),
    "cat": lambda t: torch.cat([t, t]),
    "stack in a tuple": lambda t: torch.stack((t, t)),
    "split": lambda t: t.split(20),
    "iteration": lambda t: list(t)[3],
    "max": lambda t: tuple(t.max(dim=0)),
    "masked_select": lambda t: t.masked_select(MASK[:, None]),
    "equal": lambda t: torch.equal(t, t),
    "list": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "array": lambda t: np.asarray(t),
    "dlpack": lambda t: torch.utils.dlpack.from_dlpack(t).clone(),
    "half": lambda t: t.half(),
    "double": lambda t: t.to(torch.float64),
    "copied": lambda t: t.to("cpu", copy=True),
    "source of a copy": lambda t: torch.empty(N, 4).copy_(t),
    "more ids than rows": lambda t: t[torch.arange(80) % N],
    "wide mask": lambda t: t[MASK[:, None].expand(N, 4)],
}


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # torch 2 takes lists for tuples
@pytest.mark.parametrize("use", WHOLE.values(), ids=WHOLE)
def test_everything_else_works_on_the_whole(t, x, use):
    assert same(use(t), use(x))
    assert decoded_whole(t)
    assert any("materialised" in note for note in t.feature.stats()["notes"])


def test_gradients_flow_past_it(t, x):
    weight, other = (torch.ones(2, 4, requires_grad=True) for _ in range(2))
    F.linear(t, weight).square().sum().backward()
    F.linear(x, other).square().sum().backward()
    assert weight.grad is not None and other.grad is not None
    assert torch.equal(weight.grad, other.grad)


FUNCTIONAL = {
    "grad": lambda t: torch.func.grad(lambda w: (t @ w).sum())(torch.ones(4)),
    "grad of rows": lambda t: torch.func.grad(lambda w: (t[IDS] @ w).sum())(torch.ones(4)),
    "jacobian of a row": lambda t: torch.func.jacrev(lambda w: t[3] * w)(torch.ones(4)),
    "grad of a copy": lambda t: torch.func.grad(lambda w: (t.clone() @ w).sum())(torch.ones(4)),
    "rows of ids in a vmap": lambda t: torch.func.vmap(lambda i: t[i])(IDS),
    "vmap over rows": lambda t: torch.func.vmap(lambda row: row.sum())(t),
}


@pytest.mark.parametrize("use", FUNCTIONAL.values(), ids=FUNCTIONAL)
def test_functions_of_torch_func_take_it(t, x, use):
    assert not decoded_whole(t)
    try:
        expected = use(x)
    except RuntimeError as error:  # older versions of torch cannot do all of it
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            use(t)
        return
    assert same(use(t), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch, where a graph breaks
@pytest.mark.parametrize(
    "part", [lambda t: t, lambda t: t[:], lambda t: t[2:9]], ids=["itself", "whole", "slice"]
)
def test_a_compiled_model_takes_it(t, x, part):
    pytest.importorskip("torch._dynamo")
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda t: model(t)[:2] + t[torch.tensor([1, 0])].sum(), backend="eager"
    )
    for _ in range(2):
        assert same(compiled(part(t)), compiled(part(x)))
    assert same(compiled(part(t)), model(part(x))[:2] + part(x)[torch.tensor([1, 0])].sum())


def test_copies_are_plain_tensors_of_their_own(t, x):
    for copied in (t.clone(), torch.clone(t, memory_format=torch.contiguous_format)):
        assert type(copied) is torch.Tensor and same(copied, x)
        copied.zero_()
    assert same(t.clone(), x) and not decoded_whole(t)


def assign(t, value):
    t[2:3] = value


WRITES = {
    "item": lambda t: assign(t, 1.0),
    "add_": lambda t: t.add_(1),
    "iadd": lambda t: t.__iadd__(1),
    "detached": lambda t: t.detach().zero_(),
    "data": lambda t: t.data.fill_(1),
    "set data": lambda t: setattr(t, "data", torch.zeros(N, 4)),
    "set_": lambda t: t.set_(torch.zeros(N, 4)),
    "copy_": lambda t: t.copy_(torch.zeros(N, 4)),
    "out": lambda t: torch.add(torch.zeros(N, 4), 1, out=t),
    "out of index_select": lambda t: torch.index_select(t.clone(), 0, torch.arange(N), out=t),
    "inplace": lambda t: F.relu(t, inplace=True),
    "init": lambda t: torch.nn.init.zeros_(t),
    "resize_": lambda t: t.resize_(3),
    "max_norm": lambda t: F.embedding(IDS, t, max_norm=1.0),
    "below functions": lambda t: torch.ops.aten.add_.Tensor(t, torch.ones(4)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_raise_before_anything_is_decoded(t, x, write):
    with pytest.raises(BitslabError, match="read-only"):
        write(t)
    assert not decoded_whole(t) and same(t, x)


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.requires_grad_(),
        lambda t: setattr(t, "requires_grad", True),
        lambda t: setattr(t, "grad", torch.zeros(N, 4)),
        torch.nn.Parameter,
    ],
)
def test_gradients_are_refused(t, ask):
    with pytest.raises(BitslabError, match="gradient"):
        ask(t)
    t.requires_grad = False
    t.grad = None
    assert not t.requires_grad


@pytest.mark.parametrize(
    ("choose", "error"),
    [
        (lambda t: t[torch.tensor([N])], IndexRangeError),
        (lambda t: t[N], IndexRangeError),
        (lambda t: t.select(0, -N - 1), IndexRangeError),
        (lambda t: t.index_select(0, torch.tensor([-1])), IndexRangeError),
        (lambda t: torch.index_select(t, 0, IDS - 2, out=torch.empty(3, 4)), IndexRangeError),
        (lambda t: F.embedding(torch.tensor([-1]), t), IndexRangeError),
        (lambda t: t[torch.arange(2 * N)], IndexRangeError),
        (lambda t: t[torch.tensor([1.0])], IndexError),
        (lambda t: t[1.5], IndexError),
        (lambda t: t[::-1], ValueError),
        (lambda t: t.narrow(0, 40, 20), RuntimeError),
        (lambda t: torch.index_select(t, 0, IDS, out=torch.empty(3, 4).half()), RuntimeError),
    ],
)
def test_bad_indices_raise_what_torch_raises(t, x, choose, error):
    with pytest.raises(error):
        choose(t)
    with pytest.raises((IndexError, ValueError, RuntimeError)):
        choose(x)


def test_only_a_compressed_feature_is_held(x):
    with pytest.raises(ArgumentTypeError, match="feature: expected a CompressedFeature"):
        FeatureTensor(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64, torch.int16])
@pytest.mark.parametrize("shape", [(6,), (6, 2, 3), (0, 4), (6, 0)], ids=str)
def test_any_dtype_and_shape(dtype, shape):
    x = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    t = FeatureTensor(CompressedFeature.from_tensor(x, device="cpu", codec="raw"))
    ids = torch.arange(len(x)).flip(0)
    assert t.shape == x.shape and t.dtype == dtype
    assert same(t[ids], x[ids]) and same(t[1:3], x[1:3]) and same(t, x)


def test_files_hold_the_plain_tensor(t, x):
    file = io.BytesIO()
    torch.save({"x": t}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["x"]
    for restored in (loaded, pickle.loads(pickle.dumps(t))):
        assert type(restored) is torch.Tensor and same(restored, x)
    assert not decoded_whole(t)


def test_deep_copies_have_a_table_of_their_own(t, x):
    copied = copy.deepcopy([t, t])
    assert copied[0] is copied[1] and isinstance(copied[0], FeatureTensor)
    assert copied[0].feature.table is not t.feature.table
    assert same(copied[0][IDS], x[IDS]) and not decoded_whole(t)


class Rows(Dataset):  # type: ignore[type-arg]
    def __init__(self, t):
        self.t = t

    def __len__(self):
        return len(self.t)

    def __getitem__(self, i):
        return self.t[i], self.t.is_shared(), type(self.t).__name__


@pytest.mark.parametrize("method", ["fork", spawned.METHOD])
def test_worker_processes_share_the_table(t, x, method):
    loader = DataLoader(Rows(t), batch_size=N, num_workers=1, multiprocessing_context=method)
    ((rows, shared, names),) = loader
    assert same(rows, x) and bool(shared.all()) and set(names) == {"FeatureTensor"}


@pytest.mark.gpu
def test_rows_go_to_the_gpu_of_their_ids(t, x):
    ids = IDS.cuda()
    for rows in (t[ids], t.index_select(0, ids), F.embedding(ids, t)):
        assert rows.is_cuda and same(rows.cpu(), x[IDS])
    out = torch.empty(3, 4, device="cuda")
    assert torch.index_select(t, 0, ids, out=out) is out and same(out.cpu(), x[IDS])
    for moved in (t.cuda(), t.to("cuda"), t.to("cuda", torch.float64)):
        assert type(moved) is torch.Tensor and moved.is_cuda
        assert same(moved.cpu(), x.to(moved.dtype))
    mask = MASK.cuda()
    assert same(t[mask].cpu(), x[MASK])
    assert not decoded_whole(t)
    assert t.pin_memory().is_pinned()


def test_there_is_no_address_before_rows_are_decoded(t, x):
    try:
        capsule = DLPACK.to_dlpack(t)  # which torch lets nobody intercept
    except RuntimeError as error:
        assert "Cannot access data pointer" in str(error)
        assert not decoded_whole(t)
    else:
        # Torch 2.8 and older ones take a strided view first, which decodes.
        assert torch.equal(DLPACK.from_dlpack(capsule), x)
        assert decoded_whole(t)
    assert torch.equal(DLPACK.from_dlpack(t), x)


def test_the_view_that_older_torch_exports_is_of_decoded_rows(t, x):
    """Their ``to_dlpack`` takes this view of any tensor, and then its address."""
    with torch._C.DisableTorchFunctionSubclass():
        view = torch.ops.aten.as_strided.default(t, t.shape, t.stride(), t.storage_offset())
    assert view.data_ptr() == t.feature.whole().data_ptr() and torch.equal(view, x)


@pytest.mark.parametrize("bad", [-1, N], ids=["-1", "N"])
@pytest.mark.parametrize("out", [False, True], ids=["new", "out"])
def test_ids_that_do_not_count_from_the_end_have_one_range(t, bad, out):
    ids = torch.tensor([2, bad])
    accepted = rf"^index: index {bad} at position 1 is out of range.*\(accepted are 0 to {N - 1}\)$"
    options = {"out": torch.empty(2, 4)} if out else {}
    with pytest.raises(IndexRangeError, match=accepted):
        torch.index_select(t, 0, ids, **options)
    with pytest.raises(IndexRangeError, match=accepted):
        F.embedding(ids, t)


@pytest.mark.parametrize("bad", [-N - 1, N], ids=["-N-1", "N"])
def test_ids_that_count_from_the_end_have_one_range(t, bad):
    for index in (bad, [bad], torch.tensor([bad])):
        with pytest.raises(IndexRangeError, match=rf"\(accepted are -{N} to {N - 1}\)$"):
            t[index]
    assert torch.equal(t[[-1]], t[[N - 1]])
