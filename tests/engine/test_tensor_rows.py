"""Which calls of torch take rows by index, and what an operator writes to."""

from __future__ import annotations

import pytest
import torch

from bitslab.engine.tensor_rows import are_row_ids, is_row_dim, row_functions, written_tensors

aten = torch.ops.aten


def get_item(*args):
    return "get_item"


def index_select(*args):
    return "index_select"


def embedding(*args):
    return "embedding"


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        (torch.Tensor.__getitem__, get_item),
        (torch.Tensor.index_select, index_select),
        (torch.index_select, index_select),
        (torch.nn.functional.embedding, embedding),
    ],
    ids=["getitem", "method", "function", "embedding"],
)
def test_functions_that_take_rows_by_index(function, answer):
    table = row_functions(get_item=get_item, index_select=index_select, embedding=embedding)
    assert table[function] is answer


@pytest.mark.parametrize(
    ("dim", "is_first"), [(0, True), (-2, True), (1, False), (-1, False), (None, False)]
)
def test_the_dimension_of_rows(dim, is_first):
    assert is_row_dim(torch.empty(3, 2), dim) is is_first


@pytest.mark.parametrize(
    ("ids", "are"),
    [
        (torch.tensor([1]), True),
        (torch.tensor([1], dtype=torch.int32), True),
        (torch.tensor([1], dtype=torch.uint8), False),
        (torch.tensor([True]), False),
        ([1], False),
    ],
    ids=["int64", "int32", "uint8", "bool", "list"],
)
def test_row_numbers(ids, are):
    assert are_row_ids(ids) is are


A, B, C = torch.zeros(2), torch.ones(2), torch.ones(2)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "written"),
    [
        (aten.add.Tensor, (A, B), {}, []),
        (aten.add_.Tensor, (A, B), {}, [A]),
        (aten.add.out, (A, B), {"out": C}, [C]),
        (aten._foreach_add_.Scalar, ([A, B], 1), {}, [A, B]),
    ],
    ids=["none", "in-place", "out", "list"],
)
def test_tensors_that_an_operator_writes_to(func, args, kwargs, written):
    found = list(written_tensors(func, args, kwargs))
    assert list(map(id, found)) == list(map(id, written))
