"""Cached modules are copied, pickled, moved, cast and compiled in the middle of training."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bitslab import BitslabError
from bitslab.integrations.embedding import CachedEmbeddingBag, EvictionStrategy
from tests.helpers import dtype_id
from tests.integrations.embedding.support import (
    D,
    N,
    assert_same,
    bags,
    batches,
    lookup,
    loss_of,
    singles,
    step,
    table,
    whole,
)


def saved(module: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    read: torch.nn.Module = torch.load(file, weights_only=False)
    return read


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved,
}


@pytest.mark.drawn(6)
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("make", [bags, singles])
def test_copies_go_on_by_themselves(make, sparse, how):
    plain, ours = make(sparse=sparse, cache_ratio=0.3)
    theirs, mine = (torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (plain, ours))
    given = batches(12)
    for ids in given[:5]:
        step(plain, theirs, ids), step(ours, mine, ids)
    # Between backward and step, where rows wait.
    for module, optimizer in ((plain, theirs), (ours, mine)):
        optimizer.zero_grad()
        loss_of(lookup(module, given[5])).backward()
    twin, plain_twin = COPIES[how](ours), COPIES[how](plain)
    assert type(twin) is type(ours) and twin.extra_repr() == ours.extra_repr()
    assert twin.rows is not ours.rows and twin.rows.parameter is not ours.rows.parameter
    assert twin._parameters["weight"] is twin.rows.parameter
    theirs.step(), mine.step()
    for ids in given[6:]:
        assert_same(step(ours, mine, ids), step(plain, theirs, ids))
    assert_same(whole(ours), whole(plain))
    # The copy is what it was, and trains by itself.
    assert_same(whole(twin), whole(plain_twin))
    of_plain, of_twin = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain_twin, twin))
    for ids in given[6:]:
        assert_same(step(twin, of_twin, ids), step(plain_twin, of_plain, ids))
    assert_same(whole(twin), whole(plain_twin))
    assert_same(whole(ours), whole(plain))


@pytest.mark.parametrize("how", COPIES)
def test_a_module_and_its_optimizer_go_on_from_a_copy_of_both(how):
    plain, ours = bags(mode="sum", cache_ratio=0.3)
    theirs, mine = (torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (plain, ours))
    given = batches(12)
    for ids in given[:6]:
        step(plain, theirs, ids), step(ours, mine, ids)
    state = COPIES[how](mine.state_dict())
    ours = COPIES[how](ours)
    mine = torch.optim.Adagrad(ours.parameters(), lr=0.1)
    mine.load_state_dict(state)
    for ids in given[6:]:
        assert_same(step(ours, mine, ids), step(plain, theirs, ids))
    assert_same(whole(ours), whole(plain))


@pytest.mark.parametrize("cache", ["rows", "packed"])
@pytest.mark.parametrize("how", COPIES)
def test_frozen_modules_are_copied(how, cache):
    _, ours = bags(cache=cache, freeze=True, evict_strategy=EvictionStrategy.LRU, padding_idx=2)
    twin = COPIES[how](ours)
    ours.close()
    ids = torch.arange(12)
    assert_same(lookup(twin, ids), lookup(bags(padding_idx=2)[0], ids).detach())
    assert not twin.rows.trainable and twin.evict_strategy is EvictionStrategy.LRU
    with pytest.raises(BitslabError, match="closed"):
        lookup(ours, ids)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("cache", ["rows", "packed"])
def test_casts_cast_the_table(dtype, cache):
    plain, ours = singles(cache=cache, cache_ratio=0.3)
    sgd = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, ours)]
    for ids in batches(3):
        step(plain, sgd[0], ids), step(ours, sgd[1], ids)
    plain.to(dtype)
    assert ours.to(dtype) is ours
    assert ours.rows.dtype == dtype and ours.rows.table.dtype == dtype
    assert_same(whole(ours), whole(plain))
    assert_same(lookup(ours, batches(1)[0]).detach(), lookup(plain, batches(1)[0]).detach())
    assert ours.half().rows.dtype == torch.float16
    assert_same(whole(ours), whole(plain.half()))


def test_an_optimizer_goes_on_after_a_cast():
    plain, ours = bags(mode="sum", cache_ratio=0.3)
    theirs, mine = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, ours))
    for number, ids in enumerate(batches(9)):
        if number % 3 == 0:
            for module in (plain, ours):
                module.zero_grad()
                module.to(torch.float64 if number == 3 else torch.float32)
        assert_same(step(ours, mine, ids), step(plain, theirs, ids))
    assert_same(whole(ours), whole(plain))


def test_moving_to_where_it_is_changes_nothing():
    plain, ours = bags(mode="sum", cache_ratio=0.3)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    parameter, packed = ours.rows.parameter, ours.rows.table
    assert ours.cpu() is ours and ours.to("cpu") is ours and ours.float() is ours
    assert ours.rows.parameter is parameter and ours.rows.table is packed
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for ids in batches(4):
        assert_same(step(ours, optimizer, ids), step(plain, theirs, ids))


def test_tables_cannot_go_to_the_meta_device():
    _, ours = bags()
    with pytest.raises(BitslabError, match="meta"):
        ours.to("meta")


def test_parameters_are_the_resident_rows_by_the_name_weight():
    _, ours = bags(cache_ratio=0.2)
    assert [name for name, _ in ours.named_parameters()] == ["weight"]
    (parameter,) = ours.parameters()
    assert parameter is ours.rows.parameter and list(parameter.shape) == [N // 5, D]
    assert list(ours.state_dict()) == ["weight"] and len(ours.state_dict()["weight"]) == N
    assert str(ours).startswith("CachedEmbeddingBag(50, 8, cache_rows=10")


class Model(torch.nn.Module):
    def __init__(self, bag: torch.nn.Module, single: torch.nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.single, self.top = bag, single, torch.nn.Linear(D, 1)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        both = self.bag(ids, offsets) + self.single(ids[: len(offsets)])
        out: torch.Tensor = self.top(torch.relu(both))
        return out


# torch.compile itself looks at the grad of what comes from a part that it did not trace.
@pytest.mark.drawn(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_give_the_same(backend):
    torch._dynamo.reset()  # or what was compiled for another backend counts for how often is enough
    models = []
    for i in (0, 1):
        model = Model(bags(mode="sum", cache_ratio=0.3)[i], singles(cache_ratio=0.3)[i])
        compiled = torch.compile(model, backend=backend)
        models.append((model, compiled, torch.optim.SGD(model.parameters(), lr=0.1)))
    for ids in batches(5):
        outs = []
        for _, compiled, optimizer in models:
            optimizer.zero_grad()
            out = compiled(ids, torch.tensor([0, 4, 8]))
            loss_of(out).backward()
            optimizer.step()
            outs.append(out.detach())
        assert_same(*outs)
    assert_same(whole(models[0][0].bag), whole(models[1][0].bag))
    with torch.no_grad():
        for n_ids in (6, 9):
            ids = torch.arange(n_ids)
            args = (ids, torch.tensor([0, 3]))
            assert_same(models[0][1](*args), models[1][1](*args))


class Small(torch.nn.Module):
    """A bag, and products of matrices: inductor takes them from torch and has no C++ to compile."""

    def __init__(self, bag: torch.nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.top = bag, torch.nn.Linear(D, 3, bias=False)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.bag(ids, offsets))
        return out


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
# Parts of torch that inductor imports are written for TorchScript.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_model_that_inductor_compiles_gives_the_same():
    from torch._dynamo.utils import counters
    from torch._inductor import config

    torch._dynamo.reset()
    counters.clear()
    plain, ours = (Small(bag) for bag in bags(mode="sum", cache_ratio=0.3))
    # No processes of its own, and no trial of what the CPU can do.
    with config.patch({"compile_threads": 1, "cpp.simdlen": 1}):
        compiled: Any = torch.compile(ours, backend="inductor")
        optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (plain, ours)]
        offsets = torch.tensor([0, 4, 8])
        for ids in batches(4):
            outs = []
            for module, optimizer in zip((plain, compiled), optimizers, strict=True):
                optimizer.zero_grad()
                outs.append(module(ids, offsets))
                loss_of(outs[-1]).backward()
                optimizer.step()
            assert_same(outs[1].detach(), outs[0].detach())
        assert_same(whole(ours.bag), whole(plain.bag))
        plain.eval(), ours.eval()
        with torch.no_grad():
            for ids in batches(2, seed=3):
                assert_same(compiled(ids, offsets), plain(ids, offsets))
    assert counters["inductor"]["extern_calls"] >= 3  # forward, backward, and without a gradient


def test_a_module_that_is_gone_leaves_its_copy_alone():
    _, ours = bags(mode="sum")
    twin = copy.deepcopy(ours)
    ours.close()
    ours.close()
    del ours
    assert_same(whole(twin), table())
    assert isinstance(twin, CachedEmbeddingBag)
