"""ReadOnlyTensor: what reads works as on any tensor, what writes is refused."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch

import bitslab
from bitslab.engine.memory.readonly import ReadOnlyTensor, plain, read_only

WRITES = {
    "setitem": lambda t: t.__setitem__(0, 1),
    "method": lambda t: t.add_(1),
    "augmented": lambda t: t.__iadd__(1),
    "copy_": lambda t: t.copy_(torch.ones(4, 3)),
    "out": lambda t: torch.add(torch.ones(4, 3), 1, out=t),
    "out-pair": lambda t: torch.max(t, 0, out=(t[0], torch.zeros(3, dtype=torch.int64))),
    "view": lambda t: t[1:3].zero_(),
    "view-of-view": lambda t: t.view(-1)[2:].t().fill_(3),
    "split": lambda t: t.split(2)[0].zero_(),
    "unbind": lambda t: t.unbind()[1].zero_(),
    "detached": lambda t: t.detach().zero_(),
    "data": lambda t: t.data.zero_(),
    "set-data": lambda t: setattr(t, "data", torch.ones(4, 3)),
    "shape": lambda t: t.t_(),
    "resize": lambda t: t.resize_(2, 3),
    "functional": lambda t: torch.nn.functional.relu(t, inplace=True),
    "functional-by-position": lambda t: torch.nn.functional.dropout(t, 0.5, True, True),
    "init": lambda t: torch.nn.init.uniform_(t),
    "foreach": lambda t: torch._foreach_add_([t], 1),
    "index_put": lambda t: t.index_put_((torch.tensor([1]),), torch.tensor(1.0)),
    "overload": lambda t: torch.ops.aten.add_.Tensor(t, torch.ones(4, 3)),
    "optimizer": lambda t: torch.optim.SGD([with_grad(t)], 0.1).step(),
}


def with_grad(t):
    parameter = torch.nn.Parameter(t)
    parameter.grad = torch.ones(4, 3)
    return parameter


@pytest.fixture
def rows():
    return torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_is_refused_and_changes_nothing(rows, write):
    before = rows.clone()
    with pytest.raises(bitslab.BitslabError, match=r"read-only.*clone\(\)"):
        write(read_only(rows))
    assert torch.equal(rows, before) and rows.shape == before.shape


def test_numpy_views_cannot_be_written_to(rows):
    t = read_only(rows)
    for array in (t.numpy(), np.asarray(t)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert np.array(t, copy=True).flags.writeable
    assert np.asarray(t, dtype=np.float64).dtype == np.float64


def test_operators_give_plain_tensors(rows):
    t = read_only(rows)
    for result in (t + 1, t @ rows.T, t[[0, 2]], t.clone(), t.double(), torch.cat([t, t])):
        assert type(result) is torch.Tensor
    assert torch.equal(torch.empty(4, 3).copy_(t), rows)
    assert isinstance(t[1:], ReadOnlyTensor) and torch.equal(t[1:], rows[1:])
    assert torch.equal(t.max(0).values, rows.max(0).values)
    assert repr(t) == repr(rows)


def test_it_trains_as_the_plain_tensor_does(rows):
    weight = torch.ones(3, 2, requires_grad=True)
    plainly, guarded = (
        torch.autograd.grad((features @ weight).sum(), weight)
        for features in (rows, read_only(rows))
    )
    assert torch.equal(*plainly, *guarded)
    leaf = read_only(rows).requires_grad_()
    (gradient,) = torch.autograd.grad((leaf * 2).sum(), leaf)
    assert gradient.tolist() == [[2.0] * 3] * 4 and not rows.requires_grad


def test_copies_are_plain_and_of_their_own(rows):
    t = read_only(rows)
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    for copied in (copy.deepcopy(t), pickle.loads(pickle.dumps(t)), torch.load(file), t.clone()):
        assert type(copied) is torch.Tensor and torch.equal(copied, rows)
        copied.zero_()
    assert rows.sum() == 66


def test_one_element_is_formatted_as_a_number():
    x = torch.tensor([[1.25, -0.0]])
    t = read_only(x)
    assert f"{t[0, 0]:.3f} {t[0, 1]}" == f"{x[0, 0]:.3f} {x[0, 1]}" == "1.250 -0.0"


def test_functions_of_torch_func_read_it(rows):
    weights = torch.ones(3)
    for transform in (torch.func.grad, torch.func.jacrev):
        result = transform(lambda w: (rows @ w).sum())(weights)
        assert torch.equal(result, plain(rows).sum(0))
