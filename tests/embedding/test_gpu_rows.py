"""Cached rows on a real GPU: the same results as nn.EmbeddingBag, with no hidden wait."""

from __future__ import annotations

import copy

import pytest
import torch

import bitslab
from bitslab.embedding.resident_cache import FIRST_LOOKS, LOOK_EVERY, MissRate
from bitslab.errors import BitslabError
from bitslab.integrations.embedding import CachedEmbedding, CachedEmbeddingBag, EvictionStrategy
from bitslab.tables.counters import HOST, Counters
from tests.gpu import kernels_of
from tests.helpers import dtype_id, same_bits

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

N_ROWS = 4000
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def pair(dim=32, dtype=torch.float32, mode="sum", **options):
    """Return an nn.EmbeddingBag on the GPU and a cached one over the same values."""
    weight = torch.randn(N_ROWS, dim).mul_(0.05).to(dtype)
    names = ("padding_idx", "max_norm", "sparse", "include_last_offset")
    shared = {name: options[name] for name in names if name in options}
    freeze = options.get("freeze", False)
    plain = torch.nn.EmbeddingBag.from_pretrained(weight.cuda(), freeze, mode=mode, **shared)
    options = {"cache_ratio": 0.05, "device": "cuda", "freeze": freeze, "codec": "ibp"} | options
    return plain, CachedEmbeddingBag.from_pretrained(weight, mode=mode, **options)


def batch(n=600, device="cuda", bag=3):
    """Return ids, a quarter of them of hot rows, and offsets."""
    ids = torch.randint(N_ROWS, (n,))
    ids[::4] = torch.randint(150, (len(ids[::4]),))
    return ids.to(device), torch.arange(0, n, bag, device=device)


@pytest.mark.parametrize("cache", ["rows", "packed"])
@pytest.mark.parametrize("device", ["cuda", "cpu"], ids=["ids-on-gpu", "ids-on-cpu"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dim", [1, 7, 32, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_inference_gives_the_same_bits(dtype, dim, mode, device, cache):
    plain, cached = pair(dim, dtype, mode, cache=cache, freeze=True)
    with torch.no_grad():
        for bag in (1, 2, 3):
            ids, offsets = batch(device=device, bag=bag)
            assert same_bits(cached(ids, offsets), plain(ids.cuda(), offsets.cuda()))


@pytest.mark.parametrize("cache", ["rows", "packed"])
def test_a_padded_row_counts_for_nothing_on_a_gpu(cache):
    plain, cached = pair(padding_idx=5, cache=cache, freeze=True)
    ids, offsets = batch()
    ids[::3] = 5
    with torch.no_grad():
        assert same_bits(cached(ids, offsets), plain(ids, offsets))


@pytest.mark.parametrize("cache", ["rows", "packed"])
def test_inference_never_waits_for_the_gpu(no_waiting, cache):
    _, cached = pair(cache=cache, freeze=True)
    batches = [batch() for _ in range(4)]
    with torch.no_grad():
        cached(*batches[0])
        with no_waiting():
            for ids, offsets in batches[1:]:
                cached(ids, offsets)


@pytest.mark.parametrize("cache", ["rows", "packed"])
def test_misses_and_hits_come_by_one_gather(cache, profiled):
    _, cached = pair(cache=cache, freeze=True)
    batches = [batch(bag=2) for _ in range(3)]
    with torch.no_grad():
        for ids, offsets in batches[:2]:
            cached(ids, offsets)
        kernels = kernels_of(profiled(lambda: cached(*batches[2])))
    assert [name.split("_")[0] for name in kernels] == ["gather", "pool"], kernels


def test_training_does_not_wait_when_all_rows_hit(no_waiting):
    plain, cached = pair(cache_ratio=0.5)
    del plain
    optimizer = torch.optim.SGD(cached.parameters(), lr=0.1)
    batches = [(torch.randint(500, (600,)), torch.arange(0, 600, 3)) for _ in range(4)]

    def step(ids, offsets):
        optimizer.zero_grad()
        cached(ids, offsets).sum().backward()
        optimizer.step()

    step(*batches[0])
    with no_waiting():
        for some in batches[1:]:
            step(*some)


def test_rows_that_would_come_more_slowly_are_kept_raw_with_a_note():
    _, short = pair(dim=32, codec="auto", freeze=True)
    _, long = pair(dim=2048, codec="auto", freeze=True)
    assert short.stats()["codec"] == "raw"
    assert any("kept raw" in note for note in short.stats()["notes"])
    assert long.stats()["codec"] != "raw"


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "trainable"])
@pytest.mark.parametrize("dim", [32, 2048], ids=["short", "long"])
def test_a_table_loaded_anew_is_packed_only_where_that_pays(dim, freeze):
    """Rows that are trained come and go faster raw, unless they pack very well."""
    packed = dim > 32 and freeze
    _, cached = pair(dim=dim, codec="auto", freeze=freeze)
    fresh = torch.randn(N_ROWS, dim).mul_(0.05)
    cached.load_state_dict({"weight": fresh})
    assert (cached.stats()["codec"] != "raw") == packed
    assert any("more slowly" in note for note in cached.stats()["notes"]) != packed
    assert same_bits(cached.rows.whole(), fresh)
    ids, offsets = batch()
    with torch.no_grad():
        wanted = torch.nn.functional.embedding_bag(ids, fresh.cuda(), offsets, mode="sum")
        assert same_bits(cached.eval()(ids, offsets), wanted)
    cached.reset_parameters()
    assert (cached.stats()["codec"] != "raw") == packed


@pytest.mark.parametrize("codec", ["ibp", "raw"])
def test_a_codec_that_was_named_is_kept_when_a_table_is_loaded_anew_on_a_gpu(codec):
    _, cached = pair(codec=codec, freeze=True)
    fresh = torch.randn(N_ROWS, 32).mul_(0.05)
    cached.load_state_dict({"weight": fresh})
    assert (cached.stats()["codec"] == "raw") == (codec == "raw")
    assert same_bits(cached.rows.whole(), fresh)


def test_resident_rows_are_counted_as_hits_on_a_gpu():
    _, cached = pair(freeze=True, warmup_ratio=1.0)
    before = cached.stats()["moved_bytes"]
    with torch.no_grad():
        cached(torch.arange(400, device="cuda"), torch.arange(0, 400, 4, device="cuda"))
    stats = cached.stats()
    assert (stats["hits"], stats["misses"]) == (200, 200)
    assert 0 < stats["moved_bytes"] - before < 200 * stats["row_bytes"]


def test_a_bad_id_on_the_gpu_is_reported_later():
    _, cached = pair(freeze=True)
    ids = torch.tensor([1, N_ROWS], device="cuda")
    # By the second call, or by the first, where the GPU is done with the gather before the pooling.
    with torch.no_grad(), pytest.raises(bitslab.errors.IndexRangeError):
        cached(ids, torch.tensor([0], device="cuda"))
        bitslab.raise_pending_errors()


@pytest.mark.parametrize("cache", ["rows", "packed"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=dtype_id)
@pytest.mark.parametrize("bad", [-1, -N_ROWS, N_ROWS])
def test_an_id_out_of_range_on_the_gpu_is_refused_in_inference(bad, dtype, cache):
    _, bag = pair(freeze=True, cache=cache)
    single = CachedEmbedding(N_ROWS, 32, rows=bag.rows)
    ids = torch.tensor([1, 3000, bad], device="cuda", dtype=dtype)
    offsets = torch.tensor([0], device="cuda", dtype=dtype)
    for look_up in (lambda: bag(ids, offsets), lambda: single(ids), lambda: bag.rows.read(ids)):
        with torch.no_grad(), pytest.raises(bitslab.errors.IndexRangeError):
            look_up()
            bitslab.raise_pending_errors()
    with torch.no_grad():  # good ones go on working
        ids, offsets = batch()
        assert same_bits(single(ids), bag.weight[ids.cpu()].cuda())


BAD_OFFSETS = {
    "begins-late": [1, 5, 6],
    "falls": [0, 9, 8],
    "negative": [0, -3, 5],
    "beyond": [0, 5, 13],
}


@pytest.mark.parametrize("n", [6, 12], ids=["short-bags", "long-bags"])
@pytest.mark.parametrize("cache_ratio", [0.05, 1.0])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("bad", BAD_OFFSETS)
def test_bad_offsets_on_the_gpu_are_refused(bad, dtype, train, cache_ratio, n):
    _, bag = pair(dtype=dtype, cache_ratio=cache_ratio)
    bag.train(train)
    ids = torch.arange(n, device="cuda")
    before = bag.weight.clone()
    offsets = torch.tensor(BAD_OFFSETS[bad], device="cuda")
    with torch.set_grad_enabled(train):
        # In training other launches follow, which may know by then.
        with pytest.raises(bitslab.ArgumentError, match=f"offsets: .* lookup of {n} ids"):
            bag(ids, offsets)
            bitslab.raise_pending_errors()
    assert same_bits(bag.weight, before)
    with torch.no_grad():  # good ones go on working
        ids, offsets = batch()
        wanted = torch.nn.functional.embedding_bag(ids, before.cuda(), offsets, mode="sum")
        assert same_bits(bag.eval()(ids, offsets), wanted)


@pytest.mark.parametrize("cache", ["rows", "packed"])
def test_no_id_at_all_gives_empty_bags_on_a_gpu(cache):
    plain, bag = pair(padding_idx=5, cache=cache, sparse=True)
    ids, offsets = torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    for device in ("cpu", "cuda"):
        for train in (True, False):
            found = bag.train(train)(ids.to(device), offsets.to(device))
            assert same_bits(found, plain(ids.cuda(), offsets.cuda()))


def test_the_rate_of_misses_is_what_the_gpu_counted_of_late():
    device = torch.device("cuda", torch.cuda.current_device())
    counters, rate = Counters(), MissRate(0.9)

    def shares(calls):
        torch.cuda.synchronize()
        return [rate.update(counters, device) for _ in range(calls)]

    first, second = FIRST_LOOKS
    counters.on(device)[0] += 25
    counters.on(device)[3] += 5  # of another slab
    counters.on(device)[HOST] += 10
    assert shares(first) == [0.9] * first  # the last one asks
    assert shares(1) == [0.25]
    counters.on(device)[HOST] += 20
    asked = shares(second - first - 1)
    assert asked == [0.25] * len(asked)
    assert shares(1) == [1.0]  # of the rows since
    # Where nothing was looked up since, the share is unchanged.
    kept = shares(LOOK_EVERY - second - 1)
    assert kept == [1.0] * len(kept)
    assert shares(1) == [1.0]
    counters.on(device)[0] += 1000
    assert shares(1) == [1.0]


def test_the_rate_of_misses_does_not_wait_for_the_gpu(no_waiting):
    device = torch.device("cuda", torch.cuda.current_device())
    counters, rate = Counters(), MissRate(0.5)
    counters.on(device)[HOST] += 10
    with no_waiting():
        for _ in range(LOOK_EVERY):
            rate.update(counters, device)
    torch.cuda.synchronize()
    assert rate.update(counters, device) == 1.0


OPTIMIZERS = {
    "sgd": (False, lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (False, lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "sparse-sgd": (True, lambda p: torch.optim.SGD(p, lr=0.1)),
    "sparse-adagrad": (True, lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "sparse-adam": (True, lambda p: torch.optim.SparseAdam(list(p), lr=0.1)),
}


@pytest.mark.parametrize("evict", EvictionStrategy, ids=lambda e: e.name)
@pytest.mark.parametrize("cache_ratio", [0.01, 0.2, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_follows_nn_embedding_bag(name, cache_ratio, evict):
    sparse, make = OPTIMIZERS[name]
    plain, cached = pair(sparse=sparse, cache_ratio=cache_ratio, evict_strategy=evict)
    optimizers = [make(plain.parameters()), make(cached.parameters())]
    for number in range(6):
        ids, offsets = batch(device="cpu" if number % 2 else "cuda")
        if number == 3:
            cached.prefetch(ids, offsets)
        outs = [plain(ids.cuda(), offsets.cuda()), cached(ids, offsets)]
        torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)
        grad = torch.randn_like(outs[0])
        for out, optimizer in zip(outs, optimizers, strict=True):
            out.backward(grad)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(cached.weight, plain.weight.detach().cpu(), rtol=1e-4, atol=1e-5)


def test_evaluation_in_the_middle_of_training_sees_the_newest_rows():
    plain, cached = pair(cache_ratio=0.1)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (cached, plain))
    for _ in range(3):
        ids, offsets = batch()
        for module, o in ((cached, optimizer), (plain, other)):
            module.train()
            module(ids, offsets).square().sum().backward()
            o.step()
            o.zero_grad()
        cached.eval()
        with torch.no_grad():
            ids, offsets = batch()
            got, wanted = cached(ids, offsets), plain(ids, offsets)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", ["rows", "packed"])
def test_moving_to_a_gpu_and_back_keeps_every_row(cache):
    plain, cached = pair(device="cpu", cache=cache, freeze=True)
    ids, offsets = batch(device="cpu")
    with torch.no_grad():
        wanted = cached(ids, offsets)
        on_gpu = copy.deepcopy(cached).cuda()
        got = on_gpu(ids.cuda(), offsets.cuda())
        assert got.device.type == "cuda"
        torch.testing.assert_close(got.cpu(), wanted)
        assert same_bits(on_gpu.cpu()(ids, offsets), wanted)
    assert same_bits(on_gpu.weight, plain.weight.cpu())


def test_max_norm_scales_the_same_rows_on_a_gpu():
    plain, cached = pair(max_norm=0.2, cache_ratio=0.1)
    for _ in range(2):
        ids, offsets = batch()
        torch.testing.assert_close(cached(ids, offsets), plain(ids, offsets))
    torch.testing.assert_close(cached.weight, plain.weight.detach().cpu())


@pytest.mark.parametrize("ids_on", ["cpu", "cuda"])
def test_writes_to_a_parameter_on_the_gpu_are_taken_or_refused(ids_on):
    ids = torch.tensor([[3, 7, 11]], device=ids_on)
    plain = torch.nn.EmbeddingBag(40, 8, mode="sum", device="cuda")
    taken = CachedEmbeddingBag.from_module(plain, cache_ratio=1.0)
    for module in (plain, taken):
        (parameter,) = module.parameters()
        vector = torch.linspace(-1, 1, 40 * 8, device="cuda")
        torch.nn.utils.vector_to_parameters(vector, [parameter])
        with torch.no_grad():
            parameter.clamp_(-0.5, 0.5)
    assert same_bits(taken.weight, plain.weight.cpu())
    taken.flush()
    assert same_bits(taken.rows.table.decoded(0, 40), plain.weight.cpu())
    assert same_bits(taken(ids), plain(ids.cuda()))
    refused = CachedEmbeddingBag.from_module(plain, cache_ratio=0.5)
    (parameter,) = refused.parameters()
    (refused(ids).sum() + refused(ids + 1).sum()).backward()
    torch.optim.SGD([parameter], lr=0.1).step()
    refused.zero_grad()
    looked_up = refused(ids).sum() + refused(ids + 1).sum()
    with pytest.raises(BitslabError, match="no lookup made"):
        (looked_up + parameter.square().sum()).backward()
    refused.zero_grad()
    torch.nn.init.zeros_(parameter)
    for use in (lambda: refused(ids), refused.state_dict, refused.flush):
        with pytest.raises(BitslabError, match="changed in place"):
            use()
