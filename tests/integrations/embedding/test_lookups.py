"""Outputs and gradients of cached modules are those of torch.nn's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bitslab.integrations.embedding.table as table_module
from bitslab import BitslabError, CompressedTable
from bitslab.integrations.embedding import CachedEmbedding, CachedEmbeddingBag, EvictionStrategy
from tests.helpers import dtype_id
from tests.integrations.embedding.support import (
    FLOATS,
    D,
    N,
    assert_same,
    bags,
    loss_of,
    singles,
    table,
    whole,
)

IDS = torch.tensor([3, 1, 49, 3, 0, 7, 7, 20, 33, 5, 3, 48])
#: Arguments of forward besides the module's options.
INPUTS: dict[str, tuple[Any, ...]] = {
    "offsets": (IDS, torch.tensor([0, 4, 5, 9])),
    "empty-bags": (IDS, torch.tensor([0, 0, 4, 4, 12, 12])),
    "bags-at-the-end": (IDS, torch.tensor([0, 12])),
    "int32": (IDS.int(), torch.tensor([0, 4, 5, 9], dtype=torch.int32)),
    "mixed-integers": (IDS.int(), torch.tensor([0, 4, 5, 9])),
    "two-dim": (IDS.view(3, 4),),
    "two-dim-turned": (IDS.view(4, 3).t(),),
    "no-bags": (IDS[:0], torch.empty(0, dtype=torch.int64)),
    "no-ids": (IDS[:0], torch.tensor([0, 0])),
    "no-rows": (IDS[:0].view(0, 4),),
}
PHASES = ("train", "train-no-grad", "eval", "eval-no-grad", "inference")
SHAPES: dict[str, torch.Tensor] = {
    "one": torch.tensor(7),
    "1-dim": IDS,
    "3-dim": IDS.view(2, 2, 3),
    "turned": IDS.view(3, 4).t(),
    "int32": IDS.int().view(3, 4),
    "all-different": torch.randperm(N, generator=torch.Generator().manual_seed(0)),
    "none": IDS[:0],
    "no-columns": IDS[:0].view(3, 0),
}


def run(phase: str, module: torch.nn.Module, *args: Any) -> torch.Tensor:
    """Call a module in a phase of its life; where there is a gradient, send one back."""
    module.train(phase.startswith("train"))
    if phase == "inference":
        with torch.inference_mode():
            found: torch.Tensor = module(*args)
        return found
    with torch.set_grad_enabled("no-grad" not in phase):
        found = module(*args)
    module.zero_grad()
    if found.requires_grad:
        loss_of(found).backward()
    return found.detach()


def grads(module: torch.nn.Module) -> torch.Tensor:
    """Return the gradient of the whole table; of cached rows, as one step of SGD shows it."""
    before = whole(module).clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return whole(module) - before


@pytest.mark.pairwise
@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 3], ids=["plain", "padding"])
def test_bags_give_what_torch_gives_in_every_phase(mode, given, padding_idx):
    plain, ours = bags(mode=mode, padding_idx=padding_idx)
    for phase in PHASES:
        assert_same(run(phase, ours, *INPUTS[given]), run(phase, plain, *INPUTS[given]), phase)
        assert_same(grads(ours), grads(plain), phase)


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_every_dtype(dtype, mode):
    plain, ours = bags(dtype, mode=mode)
    for phase in PHASES:
        for args in (INPUTS["offsets"], INPUTS["two-dim"]):
            assert_same(run(phase, ours, *args), run(phase, plain, *args), phase)


@pytest.mark.parametrize("shape", ["offsets", "two-dim", "empty-bags"])
def test_weights_of_samples_and_their_gradients(shape):
    plain, ours = bags(mode="sum", padding_idx=-1)
    args = INPUTS[shape]
    offsets = args[1] if len(args) > 1 else None
    for phase in PHASES:
        weights = torch.randn(args[0].shape, generator=torch.Generator().manual_seed(1))
        mine, theirs = (weights.clone().requires_grad_(phase != "inference") for _ in range(2))
        assert_same(
            run(phase, ours, args[0], offsets, mine), run(phase, plain, args[0], offsets, theirs)
        )
        if mine.grad is not None:
            assert theirs.grad is not None
            assert_same(mine.grad, theirs.grad)
        assert_same(grads(ours), grads(plain), phase)


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_options_of_gradients(mode, options):
    plain, ours = bags(mode=mode, **options)
    for given in ("offsets", "two-dim", "empty-bags"):
        assert_same(run("train", ours, *INPUTS[given]), run("train", plain, *INPUTS[given]))
        assert ours.rows.parameter.grad is not None
        assert ours.rows.parameter.grad.is_sparse == ours.sparse
        assert_same(grads(ours), grads(plain))


def test_the_last_offset_may_be_the_end():
    plain, ours = bags(mode="mean", include_last_offset=True)
    for offsets in ([0, 4, 12], [0, 0, 12, 12], [0, 12]):
        args = (IDS, torch.tensor(offsets))
        for phase in PHASES:
            assert_same(run(phase, ours, *args), run(phase, plain, *args))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")], ids=str)
@pytest.mark.parametrize("make", [bags, singles])
def test_long_rows_are_scaled_down_for_good(make, norm_type):
    plain, ours = make(max_norm=0.11, norm_type=norm_type)
    args = (IDS, torch.tensor([0, 4, 5])) if make is bags else (IDS,)
    for phase in PHASES:
        plain.train(phase.startswith("train")), ours.train(phase.startswith("train"))
        with torch.set_grad_enabled("no-grad" not in phase):
            assert_same(ours(*args).detach(), plain(*args).detach(), phase)
            assert_same(whole(ours), whole(plain), phase)
    assert not torch.equal(whole(ours), table())


@pytest.mark.pairwise
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padding_idx", [None, 7, -1], ids=str)
@pytest.mark.parametrize("cache_ratio", [0.001, 0.2, 1.0], ids=["one-row", "some", "all"])
def test_ids_of_every_shape(shape, padding_idx, cache_ratio):
    plain, ours = singles(padding_idx=padding_idx, cache_ratio=cache_ratio)
    assert ours.padding_idx == plain.padding_idx
    for phase in PHASES:
        assert_same(run(phase, ours, SHAPES[shape]), run(phase, plain, SHAPES[shape]), phase)
        assert_same(grads(ours), grads(plain), phase)


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("options", [{}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
def test_single_rows_of_every_dtype(dtype, options):
    plain, ours = singles(dtype, **options)
    for phase in PHASES:
        assert_same(run(phase, ours, IDS), run(phase, plain, IDS), phase)


@pytest.mark.drawn(8)
@pytest.mark.parametrize("cache", ["rows", "packed"])
@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "trainable"])
@pytest.mark.parametrize("padding_idx", [None, 3], ids=["plain", "padding"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_every_kind_of_cache(sparse, cache, freeze, padding_idx):
    options: dict[str, Any] = {"cache": cache, "freeze": freeze, "padding_idx": padding_idx}
    plain, ours = bags(mode="sum", sparse=sparse, **options)
    plain.weight.requires_grad_(not freeze)
    one, mine = singles(sparse=sparse, **options)
    one.weight.requires_grad_(not freeze)
    for given in INPUTS.values():
        for phase in PHASES:
            assert_same(run(phase, ours, *given), run(phase, plain, *given), phase)
            assert_same(run(phase, mine, given[0]), run(phase, one, given[0]), phase)
    if not freeze:
        assert_same(grads(ours), grads(plain))
        assert_same(grads(mine), grads(one))


def test_every_kind_of_table():
    for codec in ("auto", "raw"):
        for layout in ("compact", "inplace"):
            plain, ours = singles(codec=codec, layout=layout, buffer_size=3)
            assert ours.rows.table.layout == layout
            assert_same(run("train", ours, IDS), run("train", plain, IDS))
            assert_same(grads(ours), grads(plain))


@pytest.mark.parametrize(
    "ids", [range(10, N), range(9), range(5, 20)], ids=["away", "here", "both"]
)
def test_what_is_looked_up_in_inference_is_not_copied_once_more(ids):
    _, ours = singles(freeze=True, cache_ratio=0.2, warmup_ratio=1.0)
    ids = torch.tensor(ids).view(-1, 3) if len(ids) % 3 == 0 else torch.tensor(ids)
    out = ours(ids)
    assert out.untyped_storage().nbytes() == ids.numel() * D * 4
    assert_same(out, table()[ids])


def test_two_lookups_in_one_graph_sum_their_gradients():
    for make in (bags, singles):
        plain, ours = make(cache_ratio=0.1, sparse=make is singles)
        for module in (plain, ours):
            first = module(IDS.view(3, 4))
            (loss_of(first) + loss_of(module(IDS.view(6, 2)) * 2)).backward()
        assert_same(grads(ours), grads(plain))


def test_autocast_changes_what_it_changes_for_torch():
    plain, ours = singles()
    linear = torch.nn.Linear(D, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(ours(IDS), plain(IDS))
        assert_same(linear(ours(IDS)), linear(plain(IDS)))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("cache", ["rows", "packed"])
def test_autocast_changes_bags_as_it_changes_torchs(mode, cache):
    plain, ours = bags(mode=mode, cache=cache)
    linear = torch.nn.Linear(D, 2)
    args = INPUTS["empty-bags"]
    for phase in PHASES:
        outs = []
        for module in (plain, ours):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outs.append(run(phase, module, *args))
                outs.append(linear(outs[-1]).detach())
        assert_same(outs[2], outs[0], phase)
        assert_same(outs[3], outs[1], phase)
        assert outs[1].dtype == torch.bfloat16
        assert_same(grads(ours), grads(plain), phase)
    weights = torch.randn(args[0].shape, generator=torch.Generator().manual_seed(1))
    if mode == "sum":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_same(run("train", ours, *args, weights), run("train", plain, *args, weights))
        assert_same(grads(ours), grads(plain))


def test_a_hook_of_shapes_gets_the_result():
    plain, ours = bags()
    args = INPUTS["offsets"]
    assert_same(ours(*args, shape_hook=lambda t: t.reshape(2, -1)), plain(*args).reshape(2, -1))


@pytest.mark.parametrize("kind", [CachedEmbedding, CachedEmbeddingBag])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_new_tables_are_drawn_as_torch_draws_them(kind, dtype):
    plain_kind: Any = torch.nn.Embedding if kind is CachedEmbedding else torch.nn.EmbeddingBag
    options: dict[str, Any] = {"dtype": dtype, "padding_idx": 17}
    for shape in ((N, D), (40_003, 3)):
        torch.manual_seed(4)
        plain = plain_kind(*shape, **options)
        torch.manual_seed(4)
        ours = kind(*shape, device="cpu", **options)
        assert_same(ours.weight.detach().clone(), plain.weight.detach())
        torch.manual_seed(5), plain.reset_parameters()
        torch.manual_seed(5), ours.reset_parameters()
        assert_same(ours.weight.detach().clone(), plain.weight.detach())


@pytest.mark.parametrize("cache_ratio", [0.1, 1.0])
def test_drawing_anew_packs_the_whole_table_anew(cache_ratio, monkeypatch):
    n = 5003
    plain = torch.nn.Embedding(n, D, padding_idx=17)
    ours = CachedEmbedding.from_module(plain, cache_ratio=cache_ratio)
    packed = ours.rows.table
    # In pieces, the last of which has fewer than 16 rows more than a whole one.
    monkeypatch.setattr(table_module, "rows_per_batch", lambda row_bytes: 1000)
    drawn_next = []
    for module in (plain, ours):
        torch.manual_seed(5)
        module.reset_parameters()
        drawn_next.append(torch.rand(1))
    assert torch.equal(*drawn_next)
    assert_same(ours.weight.detach().clone(), plain.weight.detach())
    assert_same(ours(IDS).detach(), plain(IDS).detach())
    assert ours.rows.table is not packed
    assert ours.stats()["overflow_bytes"] == 0


@pytest.mark.parametrize("freeze", [True, False])
def test_pretrained_tables_by_torchs_own_arguments(freeze):
    plain = torch.nn.Embedding.from_pretrained(table(), freeze, 2, 0.2, 1.5, True, False)
    ours = CachedEmbedding.from_pretrained(
        table(), freeze, 2, 0.2, 1.5, True, False, cache_ratio=0.1, device="cpu"
    )
    options = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    assert [getattr(ours, o) for o in options] == [getattr(plain, o) for o in options]
    assert ours.rows.parameter.requires_grad is not freeze
    assert_same(ours(IDS).detach(), plain(IDS).detach())
    packed = CompressedTable.from_tensor(table())
    again = CachedEmbedding.from_pretrained(packed, freeze, cache_ratio=0.1, device="cpu")
    assert again.rows.table is packed
    assert_same(again(IDS).detach(), table()[IDS])
    back = ours.to_module()
    assert [getattr(back, o) for o in options] == [getattr(plain, o) for o in options]
    assert back.weight.requires_grad is not freeze
    assert_same(back.weight.detach(), plain.weight.detach())
    sums = torch.nn.EmbeddingBag.from_pretrained(table(), freeze, 0.2, 1.5, False, "max")
    mine = CachedEmbeddingBag.from_pretrained(table(), freeze, 0.2, 1.5, False, "max", device="cpu")
    assert_same(mine(IDS.view(3, 4)).detach(), sums(IDS.view(3, 4)).detach())
    assert mine.to_module().mode == "max"


def test_modules_may_share_rows():
    _, bag = bags(padding_idx=3)
    single = CachedEmbedding(N, D, padding_idx=3, rows=bag.rows)
    assert single.rows is bag.rows
    torch.optim.SGD(bag.parameters(), lr=1.0)
    single(IDS).sum().backward()
    torch.optim.SGD(bag.parameters(), lr=1.0).step()
    assert_same(single.rows.whole(), bag.rows.whole())
    assert not torch.equal(bag.rows.whole(), table())


@pytest.mark.parametrize("strategy", EvictionStrategy, ids=lambda s: s.name)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "eval"])
def test_inference_writes_nothing_back(strategy, frozen):
    _, ours = bags(mode="sum", freeze=frozen, evict_strategy=strategy)
    ours.train(False)
    with torch.no_grad():
        for seed in range(5):
            ids = torch.randint(N, (8, 4), generator=torch.Generator().manual_seed(seed))
            ours(ids)
    ours.flush()
    stats = ours.stats()
    assert stats["written_back"] == 0 and stats["overflow_bytes"] == 0
    assert stats["misses"] > 0


def test_a_copy_of_the_table_can_be_read_only():
    plain, ours = singles()
    assert_same(ours.weight.detach().clone(), plain.weight.detach())
    for write in (
        lambda w: torch.nn.init.zeros_(w),
        lambda w: w.data.zero_(),
        lambda w: w[3].add_(1),
        lambda w: w.__setitem__(3, 0),
        lambda w: w.detach().zero_(),
        lambda w: w.detach()[3].zero_(),
        lambda w: w.data.uniform_(),
    ):
        with pytest.raises(BitslabError, match="read-only"):
            write(ours.weight)
    with pytest.raises(BitslabError, match="takes no gradient"):
        (ours(IDS) @ ours.weight.t()).sum().backward()
    with torch.no_grad():
        assert_same(ours(IDS) @ ours.weight.t(), plain(IDS) @ plain.weight.t())
    assert not singles(freeze=True)[1].weight.requires_grad
    array = ours.weight.detach().numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[3] = 0
    for view in (ours.weight, ours.weight.detach(), ours.weight.data):
        for taken in (view.cpu(), view.to("cpu"), view.clone()):
            assert type(taken) is torch.Tensor
    assert_same(whole(ours), plain.weight.detach())
