"""Gradients of cached rows: what autograd and users do with them gives what a whole table gives."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from bitslab import BitslabError
from tests.embedding.support import Pair, check_map
from tests.helpers import same_bits

# torch.optim.Adagrad makes sparse tensors without saying whether they are to be checked.

FITS = (1, 2, 3)
TOO_MANY = tuple(range(5, 25))  # more than the cache has room for
BOTH = pytest.mark.parametrize("ids", [FITS, TOO_MANY], ids=["fits", "too-many"])


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "sgd-sparse", "adagrad-sparse"])
@pytest.mark.parametrize(
    "batches",
    [
        (FITS, FITS),
        (FITS, TOO_MANY),
        (TOO_MANY, FITS),
        (TOO_MANY, TOO_MANY),
        (FITS, TOO_MANY, FITS),
    ],
    ids=["two-fit", "then-too-many", "too-many-first", "two-too-many", "in-the-middle"],
)
def test_several_lookups_of_one_pass_are_summed_as_autograd_does(optimizer, batches):
    for seed in range(2):
        pair = Pair(optimizer=optimizer, seed=seed)
        for _ in range(2):
            pair.backward(*batches, (1, 2, 5, 6, 1))
        pair.step()
        pair.check()


@BOTH
def test_backward_twice_through_one_graph(ids):
    pair = Pair()
    for loss in pair.loss(ids):
        loss.backward(retain_graph=True)
        loss.backward()
    pair.step()
    pair.check()


def test_a_second_backward_whose_rows_have_left_is_refused():
    pair = Pair()
    plain, ours = pair.loss(FITS)
    plain.backward()
    ours.backward(retain_graph=True)
    pair.step()
    pair.evict()
    with pytest.raises(BitslabError, match="have left the cache"):
        ours.backward()
    pair.check()
    pair.train(FITS, TOO_MANY)
    pair.check()


@BOTH
def test_a_graph_that_is_kept_while_other_steps_are_taken(ids):
    pair = Pair()
    plain, ours = pair.loss(ids)
    pair.train(TOO_MANY, FITS, (1, 30, 31), TOO_MANY)
    plain.backward()
    ours.backward()
    pair.step()
    pair.check()


def test_rows_that_changed_since_the_lookup_are_not_undone():
    pair = Pair()
    plain, ours = pair.loss(TOO_MANY)
    pair.train(TOO_MANY)
    pair.evict()
    weight = torch.randn(3, 4)
    with torch.no_grad():
        pair.plain[6:9] = weight
    pair.rows.load(weight, 6)
    plain.backward()
    ours.backward()
    pair.step()
    pair.check()


def test_outputs_that_are_kept_for_long_do_not_let_the_parameter_grow():
    pair = Pair()
    kept = [pair.loss((n,)) for n in range(3)]
    for first in range(4, 30):
        pair.train(range(first, first + 9))
        assert pair.rows.parameter.shape[0] <= 8 + 9
    assert len(kept) == 3
    pair.check()


def test_a_graph_that_is_dropped_holds_nothing():
    pair = Pair()
    for first in range(0, 40, 8):
        pair.loss(range(first, first + 8))
    gc.collect()
    assert not pair.rows.training.live
    pair.loss(range(20, 28))
    assert pair.rows.parameter.shape[0] == 8


@pytest.mark.parametrize("what", ["flush", "load", "deepcopy-state", "decoded"])
@BOTH
def test_what_happens_between_backward_and_step_loses_no_row(what, ids):
    pair = Pair()
    pair.train((1, 6, 30))
    pair.backward(ids)
    if what == "flush":
        pair.rows.flush()
    elif what == "load":
        weight = torch.randn(40, 4)
        pair.plain.data.copy_(weight)
        pair.rows.load(weight)
    elif what == "deepcopy-state":
        pair.rows.__getstate__()
    else:
        pair.rows.whole()
    pair.step(clear=ids == TOO_MANY)
    pair.rows.flush()
    pair.step()  # where the rows are still there, the same gradient once more
    pair.evict()
    pair.check()


@pytest.mark.parametrize("clip", [False, True], ids=["as-they-were", "clipped"])
@pytest.mark.parametrize("optimizer", ["sgd", "sgd-sparse"])
@BOTH
def test_gradients_that_were_not_cleared_raise_where_their_rows_have_left(ids, clip, optimizer):
    pair = Pair(optimizer=optimizer)
    pair.backward(ids)
    pair.step(clear=False)
    pair.evict()
    if clip and not pair.sparse:
        torch.nn.utils.clip_grad_norm_([pair.rows.parameter], 0.01)
    before = pair.rows.whole()
    with pytest.raises(BitslabError, match="optimizer: gradients of an earlier step"):
        pair.optimizers[1].step()
    _, ours = pair.loss((30, 31))
    with pytest.raises(BitslabError, match="backward: gradients of an earlier step"):
        ours.backward()
    assert same_bits(pair.rows.whole(), before)
    pair.zero_grad()
    pair.train(FITS, TOO_MANY)
    pair.check()


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
def test_gradients_may_be_cleared_after_the_lookup(set_to_none):
    pair = Pair()
    for first in range(20):
        losses = pair.loss(range(first, first + 12 + first % 3))
        pair.zero_grad(set_to_none)
        for loss in losses:
            loss.backward()
        pair.step(clear=False)
    pair.check()


def test_a_step_that_is_not_taken_leaves_nothing_behind():
    pair = Pair()
    kept = pair.loss(FITS)
    pair.backward(TOO_MANY)
    assert pair.rows.parameter.grad is not None
    pair.zero_grad()
    pair.train((1, 2))
    assert len(kept) == 2
    pair.check()


def test_gradients_are_there_when_the_pass_has_ended():
    pair = Pair()
    kept = pair.loss(FITS)
    pair.backward(TOO_MANY)
    norms = [torch.nn.utils.clip_grad_norm_([p], 0.1) for p in (pair.plain, pair.rows.parameter)]
    torch.testing.assert_close(*norms)
    assert len(kept) == 2


@pytest.mark.parametrize("zero", ["none", "zero_"])
@BOTH
def test_updates_by_hand(ids, zero):
    pair = Pair()
    for n in range(40):
        pair.backward([(i + 7 * n) % 40 for i in ids])
        for p in (pair.plain, pair.rows.parameter):
            assert p.grad is not None
            p.data -= 0.1 * p.grad
            if zero == "none":
                p.grad = None
            else:
                p.grad.zero_()
    assert len(pair.rows.training._pending) < 40
    assert pair.rows.parameter.shape[0] <= 40
    pair.check()


def test_a_failed_backward_leaves_nothing_behind():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError

    pair = Pair()
    early = torch.nn.Parameter(torch.ones(()))
    scale = Fails.apply(early)
    _, ours = pair.loss(TOO_MANY)
    with pytest.raises(ArithmeticError):
        (ours * scale).backward()
    pair.zero_grad()
    pair.train(TOO_MANY, FITS)
    pair.check()


@BOTH
def test_autograd_grad(ids):
    pair = Pair()
    plain, ours = pair.loss(ids)
    if ids == FITS:
        found = torch.autograd.grad(ours, [pair.rows.parameter])[0]
        slots = pair.rows.slot_table.slot_of[list(ids)]
        expected = torch.autograd.grad(plain, [pair.plain])[0]
        assert same_bits(found[slots], expected[list(ids)])
    else:
        with pytest.raises(BitslabError, match=r"torch\.autograd\.grad"):
            torch.autograd.grad(ours, [pair.rows.parameter])
    assert pair.rows.parameter.grad is None
    check_map(pair.rows)


@BOTH
def test_second_derivatives_are_right_or_refused(ids):
    pair = Pair()
    t = torch.tensor(ids)
    weight, index = pair.rows.lookup(t, train=True)
    ours = (F.embedding(index, weight) ** 3).sum()
    if ids == TOO_MANY:
        with warnings.catch_warnings(), pytest.raises(BitslabError, match="create_graph"):
            warnings.simplefilter("ignore", UserWarning)
            ours.backward(create_graph=True)
        return
    first = torch.autograd.grad(ours, [pair.rows.parameter], create_graph=True)[0]
    (first**2).sum().backward()
    plain = (F.embedding(t, pair.plain) ** 3).sum()
    first = torch.autograd.grad(plain, [pair.plain], create_graph=True)[0]
    (first**2).sum().backward()
    slots = pair.rows.slot_table.slot_of[list(ids)]
    got, wanted = pair.rows.parameter.grad, pair.plain.grad
    assert got is not None and wanted is not None
    assert same_bits(got[slots], wanted[list(ids)])


@BOTH
def test_a_hook_on_the_parameter_is_called_or_refused(ids):
    pair = Pair()
    for p in (pair.plain, pair.rows.parameter):
        p.register_hook(lambda grad: grad * 2)
    plain, ours = pair.loss(ids)
    plain.backward()
    if ids == TOO_MANY:
        with pytest.raises(BitslabError, match="a hook on the parameter"):
            ours.backward()
        return
    ours.backward()
    pair.step()
    pair.check()


@BOTH
def test_an_optimizer_that_steps_within_backward(ids):
    pair = Pair(optimizer="adagrad")

    def step_with(optimizer):
        def hook(parameter):
            optimizer.step()
            optimizer.zero_grad()

        return hook

    for p, optimizer in zip((pair.plain, pair.rows.parameter), pair.optimizers, strict=True):
        p.register_post_accumulate_grad_hook(step_with(optimizer))
    for n in range(4):
        pair.backward(ids, [(i + n) % 40 for i in ids])
    pair.check()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensors", "reentrant"])
@BOTH
def test_checkpointed_lookups(ids, reentrant, sparse):
    pair = Pair(optimizer="sgd-sparse" if sparse else "sgd")
    others = torch.tensor([30, 31, 1])

    def plain(one, ids):
        return (F.embedding(ids, pair.plain, sparse=sparse) * one).sum()

    def ours(one, ids):
        weight, index = pair.rows.lookup(ids, train=True, sparse=sparse)
        return (F.embedding(index, weight, sparse=sparse) * one).sum()

    for n in range(3):
        for model in (plain, ours):
            one = torch.full((), 1.5, requires_grad=True)
            parts = [
                checkpoint(model, one, part, use_reentrant=reentrant)
                for part in (torch.tensor(ids) + n, others)
            ]
            sum(parts).backward()
        pair.step()
    pair.check()


def test_a_lookup_within_backward_moves_no_row_whose_gradient_is_on_its_way():
    pair = Pair()

    class LooksUp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            with torch.no_grad():
                pair.rows.lookup(torch.arange(30, 38), train=True)
            return grad

    start = torch.ones((), requires_grad=True)
    plain_first, ours_first = pair.loss(FITS)
    scale = LooksUp.apply(start)
    plain_second, ours_second = pair.loss((6, 7))
    (plain_first + plain_second).backward()
    # The second lookup's gradient has reached it when the others come, that of the first has not.
    (ours_first * scale + ours_second).backward()
    pair.step()
    pair.check()


def test_frozen_rows_take_no_gradient():
    pair = Pair(trainable=False)
    pair.rows.parameter.requires_grad_(True)
    with pytest.raises(BitslabError, match="is frozen, but requires a gradient"):
        pair.rows.lookup(torch.tensor([1]), train=True)
