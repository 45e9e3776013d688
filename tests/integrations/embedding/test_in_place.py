"""What others do to parameters() outside of lookups and steps: taken, or refused, never lost."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from bitslab.embedding import CachedRows
from bitslab.errors import BitslabError
from tests.embedding.on_device import on_simulated_gpu
from tests.integrations.embedding.support import (
    D,
    N,
    assert_same,
    bags,
    lookup,
    loss_of,
    singles,
    step,
    whole,
)

BOTH = pytest.mark.parametrize("make", [bags, singles])
IDS = torch.tensor([3, 7, 3, 11, 0, N - 1])
EVERY_ID = torch.arange(N)


def parameter_of(module: torch.nn.Module) -> torch.nn.Parameter:
    (parameter,) = module.parameters()
    return parameter


def from_other(module: torch.nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(module.parameters()) * 2 + 1, module.parameters())


@torch.no_grad()
def copied(module: torch.nn.Module) -> None:
    parameter = parameter_of(module)
    parameter.copy_(torch.linspace(0, 1, parameter.numel()).view_as(parameter))


WRITES: dict[str, Any] = {
    "fill_": lambda m: torch.no_grad()(parameter_of(m).fill_)(1.0),
    "init": lambda m: torch.nn.init.constant_(parameter_of(m), 0.5),
    "clamp_": lambda m: torch.no_grad()(parameter_of(m).clamp_)(-0.01, 0.01),
    "copy_": copied,
    "vector_to_parameters": from_other,
}
UNSEEN: dict[str, Any] = {
    "data.fill_": lambda m: parameter_of(m).data.fill_(1.0),
    "data.copy_": lambda m: parameter_of(m).data.copy_(parameter_of(m).data.flip(0)),
    "strided": lambda m: setattr(parameter_of(m), "data", parameter_of(m).data.t().clone().t()),
}
READS: dict[str, Any] = {
    "state_dict": lambda m: m.state_dict()["weight"],
    "weight": lambda m: m.weight.detach().clone(),
    "flush": lambda m: (m.flush(), m.rows.table.decoded(0, N))[1],
    "deepcopy": lambda m: whole(copy.deepcopy(m)),
    "pickle": lambda m: whole(pickle.loads(pickle.dumps(m))),
    "to_module": lambda m: m.to_module().weight.detach(),
    "double": lambda m: whole(m.double()).float(),
    "forward": lambda m: m.eval()(EVERY_ID.view(-1, 1)).detach().view(N, D),
}


@pytest.mark.drawn(32)
@pytest.mark.pairwise
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.parametrize("write", [*WRITES.values(), *UNSEEN.values()], ids=[*WRITES, *UNSEEN])
@BOTH
def test_writes_to_a_parameter_of_all_rows_are_read_everywhere(make, write, read):
    pair = make(cache_ratio=1.0)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in pair]
    for module, optimizer in zip(pair, optimizers, strict=True):
        step(module, optimizer, IDS)
        write(module)
    plain, ours = pair
    assert_same(read(ours), plain.weight.detach())
    if read is not READS["double"]:
        for module, optimizer in zip(pair, optimizers, strict=True):
            step(module.train(), optimizer, IDS)
        assert_same(whole(ours), plain.weight.detach())


def test_frozen_rows_are_read_as_they_were_written():
    plain, ours = bags(cache_ratio=1.0, freeze=True)
    for module in (plain.requires_grad_(False), ours):
        WRITES["fill_"](module)
    # Not flush: it writes nothing back, since the table may be that of others too.
    for name in ("state_dict", "weight", "deepcopy", "pickle", "to_module", "forward", "double"):
        assert_same(READS[name](ours), plain.weight.detach(), name)


def test_flush_packs_only_the_rows_that_differ():
    _, ours = bags(cache_ratio=1.0)
    parameter_of(ours).data[[4, 9]] += 1
    ours.flush()
    ours.flush()
    assert ours.stats()["written_back"] == 2


@BOTH
def test_a_penalty_over_all_rows_trains_all_rows(make):
    pair = make(cache_ratio=1.0)
    for module in pair:
        optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (loss_of(lookup(module, IDS)) + parameter_of(module).square().sum()).backward()
            optimizer.step()
    assert_same(pair[1].state_dict()["weight"], pair[0].weight.detach())


SOME = pytest.mark.parametrize(
    "options", [{"cache_ratio": 0.2}, {"cache": "packed"}], ids=["rows", "packed"]
)
USES: dict[str, Any] = {
    "forward": lambda m: m(IDS.view(1, -1)),
    "eval": lambda m: m.eval()(IDS.view(1, -1)),
    "inference": lambda m: torch.no_grad()(m.eval())(IDS, torch.arange(len(IDS))),
    "prepare_ids": lambda m: m.cache_weight_mgr.prepare_ids(IDS),
    "state_dict": lambda m: m.state_dict(),
    "weight": lambda m: m.weight,
    "flush": lambda m: m.flush(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "double": lambda m: m.double(),
    "step": lambda m: torch.optim.SGD(m.parameters(), lr=0.1).step(),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("freeze", [False, True], ids=["trains", "frozen"])
@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_writes_to_the_resident_rows_alone_are_refused(write, use, freeze):
    if freeze and use is USES["step"]:
        return  # it does nothing to a parameter without gradient
    _, ours = bags(freeze=freeze, cache_ratio=0.2)
    if not freeze:
        step(ours, torch.optim.SGD(ours.parameters(), lr=0.1), IDS)
    write(ours)
    for _ in range(2):
        with pytest.raises(BitslabError, match="changed in place"):
            use(ours)


def test_loading_the_table_makes_refused_writes_good():
    plain, ours = bags(cache_ratio=0.2)
    WRITES["fill_"](ours)
    ours.load_state_dict(plain.state_dict())
    assert_same(lookup(ours, IDS), lookup(plain, IDS))
    assert_same(ours.state_dict()["weight"], plain.weight.detach())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_clamp_around_a_step_is_refused(when):
    _, ours = bags(cache_ratio=0.4)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    loss_of(lookup(ours, IDS)).backward()
    with pytest.raises(BitslabError, match="changed in place"):
        if when == "before":
            WRITES["clamp_"](ours)
            optimizer.step()
        else:
            optimizer.register_step_post_hook(lambda *_: WRITES["clamp_"](ours))
            optimizer.step()
            ours.flush()


@SOME
@BOTH
def test_steps_by_hand_are_steps(make, options):
    pair = make(**options)
    for n in range(12):
        for module in pair:
            loss_of(lookup(module, (IDS + 5 * n) % N)).backward()
            for parameter in module.parameters():
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None
    assert_same(whole(pair[1]), whole(pair[0]))


PENALTIES: dict[str, Any] = {
    "alone": lambda m: parameter_of(m).square().sum(),
    "one-lookup": lambda m: loss_of(lookup(m, IDS)) + parameter_of(m).square().sum(),
    "first": lambda m: parameter_of(m).square().sum() + loss_of(lookup(m, IDS)),
    "two-lookups": lambda m: (
        loss_of(lookup(m, IDS)) + loss_of(lookup(m, IDS[:3])) + parameter_of(m).square().sum()
    ),
    "too-many-rows": lambda m: loss_of(lookup(m, EVERY_ID)) + parameter_of(m).square().sum(),
    # Lookups that take all resident rows leave none to detect a penalty by.
    "all-resident-rows": lambda m: (
        loss_of(lookup(m, EVERY_ID[:6]))
        + loss_of(lookup(m, EVERY_ID[6:10]))
        + parameter_of(m).square().sum()
    ),
    "zero-one-lookup": lambda m: loss_of(lookup(m, IDS)) + 0 * parameter_of(m).sum(),
    "zero-two-lookups": lambda m: (
        loss_of(lookup(m, IDS)) + loss_of(lookup(m, IDS[:3])) + 0 * parameter_of(m).sum()
    ),
}


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES.keys())
@SOME
def test_gradients_that_no_lookup_made_are_refused(options, penalty, sparse):
    plain, ours = bags(sparse=sparse, **options)
    with pytest.raises(BitslabError, match="no lookup made"):
        penalty(ours).backward()
    # Nothing is left behind.
    ours.zero_grad()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (plain, ours)]
    for module, optimizer in zip((plain, ours), optimizers, strict=True):
        step(module, optimizer, IDS)
    assert_same(whole(ours), whole(plain))


@pytest.mark.parametrize("lookups", [1, 2, 3])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_gradients_of_lookups_on_a_gpu_are_distinguished_from_others(lookups, sparse):
    weight = torch.randn(40, 4)
    with on_simulated_gpu(twins=True):
        rows = CachedRows.from_tensor(weight, cache_rows=8, device="cpu")
        optimizer = torch.optim.SGD([rows.parameter], lr=0.1)

        def found(n: int) -> torch.Tensor:
            matrix, index = rows.lookup(torch.arange(n, n + 5), train=True, sparse=sparse)
            return F.embedding(index, matrix, sparse=sparse).sum()

        for n in range(6):
            torch.stack([found(n + k) for k in range(lookups)]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert rows.owned_by_device
        with pytest.raises(BitslabError, match="no lookup made"):
            (found(20) + rows.parameter.square().sum()).backward()


def test_torch_autograd_grad_of_a_parameter_is_no_gradient_to_add():
    _, ours = bags(cache_ratio=0.2)
    parameter = parameter_of(ours)
    (grad,) = torch.autograd.grad(parameter.square().sum(), [parameter])
    assert_same(grad, 2 * parameter.detach())


def noise(parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad + torch.ones_like(parameter)


def added(parameter: torch.nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.add_(torch.ones_like(parameter))


def assigned(parameter: torch.nn.Parameter) -> None:
    parameter.grad = torch.ones_like(parameter)


def unscaled(parameter: torch.nn.Parameter) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD([parameter], lr=0.1))


BY_HAND: dict[str, Any] = {"assigned": assigned, "add_": added, "noise": noise}
SCALED: dict[str, Any] = {
    "mul_": lambda p: p.grad.mul_(0.5),
    "assigned": lambda p: setattr(p, "grad", p.grad * 0.5),
    "clip_grad_norm_": lambda p: torch.nn.utils.clip_grad_norm_([p], 1e9),
    "clip_grad_value_": lambda p: torch.nn.utils.clip_grad_value_([p], 0.01),
    "unscale_": unscaled,
}
BATCHES = pytest.mark.parametrize(
    "ids", [IDS, EVERY_ID[:10], EVERY_ID], ids=["some", "all-slots", "too-many-rows"]
)


@pytest.mark.pairwise
@pytest.mark.parametrize("change", BY_HAND.values(), ids=BY_HAND.keys())
@pytest.mark.parametrize("when", ["before-step", "before-backward", "without-backward"])
@BATCHES
@SOME
@BOTH
def test_a_gradient_that_is_changed_by_hand_is_refused_at_the_step(
    make, options, ids, when, change
):
    plain, ours = make(**options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, ours)]
    before = whole(plain).clone()
    parameter = parameter_of(ours)
    if when == "without-backward":
        if options == {"cache": "packed"}:
            return  # there are no resident rows
        assigned(parameter)
    else:
        loss_of(lookup(ours, ids)).backward()
        change(parameter)
        if when == "before-backward":
            loss_of(lookup(ours, ids)).backward()
    for _ in range(2):
        with pytest.raises(BitslabError, match="gradient of the module's parameter was changed"):
            optimizers[1].step()
    assert_same(whole(ours), before)
    ours.zero_grad()
    for module, optimizer in zip((plain, ours), optimizers, strict=True):
        step(module, optimizer, ids)
    assert_same(whole(ours), whole(plain))


@pytest.mark.pairwise
@pytest.mark.parametrize("scale", SCALED.values(), ids=SCALED.keys())
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
@BATCHES
@SOME
@BOTH
def test_a_gradient_may_be_scaled_by_hand(make, options, ids, set_to_none, scale):
    pair = make(**options)
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.1) for m in pair]
    for n in range(4):
        for module, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad(set_to_none)
            loss_of(lookup(module, (ids + 5 * n) % N)).backward()
            scale(parameter_of(module))
            optimizer.step()
    assert_same(whole(pair[1]), whole(pair[0]))


def test_a_gradient_may_be_changed_by_hand_where_all_rows_are_resident():
    pair = bags(cache_ratio=1.0)
    for module in pair:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loss_of(lookup(module, IDS)).backward()
        added(parameter_of(module))
        optimizer.step()
    assert_same(pair[1].state_dict()["weight"], pair[0].weight.detach())


@pytest.mark.parametrize("change", ["scaled", "add_"])
def test_gradients_of_sparse_lookups_are_looked_at_too(change):
    plain, ours = bags(sparse=True, cache_ratio=0.2)
    for module in (plain, ours):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loss_of(lookup(module, IDS)).backward()
        parameter = parameter_of(module)
        assert parameter.grad is not None
        if change == "add_":
            parameter.grad = torch.ones_like(parameter) + parameter.grad
        else:
            parameter.grad.mul_(0.5)
        if change == "add_" and module is ours:
            with pytest.raises(BitslabError, match="changed by hand"):
                optimizer.step()
            return
        optimizer.step()
    assert_same(whole(ours), whole(plain))


def test_a_hook_that_changes_the_gradient_of_the_resident_rows_is_seen():
    _, ours = bags(cache_ratio=0.2)
    parameter_of(ours).register_hook(lambda grad: grad + 1)
    loss_of(lookup(ours, IDS)).backward()
    with pytest.raises(BitslabError, match="changed by hand"):
        torch.optim.SGD(ours.parameters(), lr=0.1).step()


def test_a_gradient_of_lookups_on_a_gpu_is_looked_at_in_the_slots_that_they_hold():
    with on_simulated_gpu(twins=True):
        rows = CachedRows.from_tensor(torch.randn(40, 4), cache_rows=8, device="cpu")
        optimizer = torch.optim.SGD([rows.parameter], lr=0.1)
        for n in range(4):
            matrix, index = rows.lookup(torch.arange(n, n + 5), train=True)
            matrix[index].sum().backward()
            torch.nn.utils.clip_grad_norm_([rows.parameter], 0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert rows.owned_by_device
        matrix, index = rows.lookup(torch.arange(20, 25), train=True)
        matrix[index].sum().backward()
        added(rows.parameter)
        with pytest.raises(BitslabError, match="changed by hand"):
            optimizer.step()


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_gradient_that_is_changed_by_hand_on_a_gpu_is_reported_later(where, run_ahead):
    weight = torch.randn(400, 8)
    rows = CachedRows.from_tensor(weight, cache_rows=40, device="cuda")
    optimizer = torch.optim.SGD([rows.parameter], lr=0.1)

    def looked_up() -> None:
        optimizer.zero_grad()
        matrix, index = rows.lookup(torch.arange(5, device=where), train=True)
        F.embedding(index, matrix).sum().backward()

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_([rows.parameter], 1e9, foreach=True)
        optimizer.step()

    for _ in range(3):
        looked_up()
        clipped()
    looked_up()
    run_ahead(clipped)
    looked_up()
    added(rows.parameter)
    optimizer.step()
    torch.cuda.synchronize()
    with pytest.raises(BitslabError, match="changed by hand"):
        looked_up()
    # Rows that no lookup holds have not moved.
    assert_same(rows.whole()[5:], weight[5:])
    looked_up()
    clipped()


REPLACED: dict[str, Any] = {
    "parameter": lambda m: setattr(m, "weight", torch.nn.Parameter(torch.zeros(N, D))),
    "resident": lambda m: setattr(m, "weight", torch.nn.Parameter(parameter_of(m).data)),
    "tensor": lambda m: setattr(m, "weight", torch.zeros(N, D)),
    "none": lambda m: setattr(m, "weight", None),
    "register_parameter": lambda m: m.register_parameter("weight", None),
    "delete": lambda m: delattr(m, "weight"),
    "parametrize": lambda m: torch.nn.utils.parametrize.register_parametrization(
        m, "weight", torch.nn.Identity(), unsafe=True
    ),
    "functional_call": lambda m: torch.func.functional_call(
        m, {"weight": torch.zeros(N, D)}, (IDS.view(1, -1),)
    ),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED.keys())
@pytest.mark.parametrize("cache_ratio", [0.2, 1.0])
@BOTH
def test_another_parameter_in_the_place_of_the_rows_is_refused(make, cache_ratio, replace):
    plain, ours = make(cache_ratio=cache_ratio)
    with pytest.raises(BitslabError, match="weight"):
        replace(ours)
    assert parameter_of(ours) is ours.rows.parameter
    assert_same(lookup(ours, IDS), lookup(plain, IDS))


def test_functional_call_with_the_modules_own_parameters_works():
    plain, ours = bags(cache_ratio=0.2)
    found = torch.func.functional_call(ours, dict(ours.named_parameters()), (IDS.view(2, 3),))
    assert_same(found, plain(IDS.view(2, 3)))
