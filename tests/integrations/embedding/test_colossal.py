"""What ColossalAI's class promises by its own tests, of hits, flushes and what leaves first."""

from __future__ import annotations

import copy

import pytest
import torch

from bitslab import ArgumentError, ArgumentTypeError
from bitslab.integrations.embedding import CachedEmbeddingBag, EvictionStrategy
from tests.integrations.embedding.support import D, N, assert_same, bags, lookup, step, table


def resident_ids(bag: CachedEmbeddingBag) -> list[int]:
    """Return the ids that are resident."""
    ranks = bag.cache_weight_mgr.idx_map.tolist()
    id_of = {rank: row for row, rank in enumerate(ranks)}
    held = bag.cache_weight_mgr.cached_idx_map.tolist()
    return sorted(id_of[rank] for rank in held if rank >= 0)


def bag_of(n: int, rows: int, strategy: EvictionStrategy, **options) -> CachedEmbeddingBag:
    return CachedEmbeddingBag(
        n,
        D,
        mode="sum",
        _weight=table(n),
        cache_ratio=rows / n,
        evict_strategy=strategy,
        warmup_ratio=options.pop("warmup_ratio", 0.0),
        device="cpu",
        **options,
    )


def look_up(bag: CachedEmbeddingBag, ids: list[int]) -> None:
    with torch.no_grad():
        bag(torch.tensor(ids), torch.tensor([0]))


def test_the_order_of_arguments_is_theirs():
    counts = torch.arange(N)
    bag = CachedEmbeddingBag(
        N,
        D,
        -1,  # padding_idx
        0.5,  # max_norm
        1.0,  # norm_type
        False,  # scale_grad_by_freq
        True,  # sparse
        table(dtype=torch.float16),  # _weight
        "sum",  # mode
        True,  # include_last_offset
        torch.float16,
        "cpu",
        0.2,  # cache_ratio
        counts,  # ids_freq_mapping
        0.5,  # warmup_ratio
        7,  # buffer_size
        False,  # pin_weight
        EvictionStrategy.DATASET,
    )
    assert (bag.padding_idx, bag.max_norm, bag.norm_type, bag.sparse) == (N - 1, 0.5, 1.0, True)
    assert (bag.mode, bag.include_last_offset, bag.rows.dtype) == ("sum", True, torch.float16)
    assert bag.cache_weight_mgr.cuda_row_num == N // 5
    assert bag.rows.buffer_rows == 7 and bag.evict_strategy is EvictionStrategy.DATASET
    # The row that pads is there besides the half of the others that are used most.
    assert resident_ids(bag) == list(range(N - 1 - N // 10, N))


def test_hits_of_each_batch():
    bag = bag_of(6, 5, EvictionStrategy.LFU)
    bag.cache_weight_mgr.flush()
    assert bag.cache_weight_mgr.cuda_available_row_num == 5
    for ids in ([0, 1, 2], [3, 4], [0], [5], [0], [5]):
        look_up(bag, ids)
    assert bag.num_hits_history == [0, 0, 1, 0, 1, 1]
    assert bag.num_miss_history == [3, 2, 0, 1, 0, 0]
    assert bag.num_write_back_history == [0] * 6
    bag = bag_of(6, 5, EvictionStrategy.LFU, warmup_ratio=1.0)
    for ids in ([0, 1, 2], [5], [0], [5], [2], [5]):
        look_up(bag, ids)
    assert bag.num_hits_history == [3, 0, 1, 1, 1, 1]
    assert bag.cache_weight_mgr.num_hits_history == bag.num_hits_history
    assert bag.cache_weight_mgr.num_miss_history == bag.num_miss_history
    assert bag.cache_weight_mgr.num_write_back_history == bag.num_write_back_history


def test_the_least_often_used_leave_first():
    bag = bag_of(8, 3, EvictionStrategy.LFU)
    for ids in ([0, 1, 2], [0, 2], [0, 2], [1]):
        look_up(bag, ids)
    assert dict(zip(resident_ids(bag), [3, 2, 3], strict=True)) == {0: 3, 1: 2, 2: 3}
    assert sorted(bag.cache_weight_mgr.freq_cnter.tolist()) == [2, 3, 3]
    look_up(bag, [5])
    assert resident_ids(bag) == [0, 2, 5]
    look_up(bag, [6])  # 5 was used once, which is less than the others
    assert resident_ids(bag) == [0, 2, 6]


def test_the_least_used_in_the_data_set_leave_first():
    counts = [1, 9, 2, 8, 3, 7, 4, 6]
    bag = bag_of(8, 4, EvictionStrategy.DATASET, ids_freq_mapping=counts, warmup_ratio=1.0)
    assert resident_ids(bag) == [1, 3, 5, 7]
    look_up(bag, [0, 0, 0])
    assert resident_ids(bag) == [0, 1, 3, 5]
    look_up(bag, [2])
    assert resident_ids(bag) == [1, 2, 3, 5]
    look_up(bag, [6, 4])
    assert resident_ids(bag) == [1, 3, 4, 6]


def test_what_was_not_used_for_longest_leaves_first():
    bag = bag_of(8, 3, EvictionStrategy.LRU)
    for ids in ([0, 0, 0], [1], [2], [0], [5]):
        look_up(bag, ids)
    assert resident_ids(bag) == [0, 2, 5]
    look_up(bag, [7])
    assert resident_ids(bag) == [0, 5, 7]


def test_reordering_ranks_ids_by_use():
    counts = torch.tensor([3, 9, 1, 7, 5, 0, 8, 2])
    bag = bag_of(8, 4, EvictionStrategy.DATASET, ids_freq_mapping=counts, warmup_ratio=1.0)
    manager = bag.cache_weight_mgr
    ranks = torch.argsort(torch.argsort(counts, descending=True))
    assert_same(manager.idx_map, ranks)
    for rank, slot in enumerate(manager.inverted_cached_idx.tolist()):
        if slot >= 0:
            assert manager.cached_idx_map[slot] == rank
    row = int(manager.cached_idx_map[0])
    original = int((ranks == row).nonzero())
    assert_same(manager.cuda_cached_weight[0].detach(), table(8)[original])
    assert_same(bag(torch.tensor([[4], [2]])).detach(), table(8)[[4, 2]])
    manager.reorder(counts.flip(0), 0.5)
    assert torch.equal(manager.idx_map, ranks.flip(0))
    assert resident_ids(bag) == sorted((7 - torch.argsort(counts, descending=True)[:2]).tolist())
    assert_same(bag.rows.whole(), table(8))


@pytest.mark.parametrize("kind", [list, torch.Tensor], ids=["list", "tensor"])
@pytest.mark.parametrize("when", ["made", "later"])
def test_ids_used_equally_often_are_ranked_as_in_their_class(kind, when):
    torch.manual_seed(0)
    differ = 0
    for _ in range(20):
        counts = torch.randint(20, (100,))
        given = counts.tolist() if kind is list else counts
        bag = bag_of(
            100,
            10,
            EvictionStrategy.DATASET,
            ids_freq_mapping=given if when == "made" else None,
        )
        if when == "later":
            bag.cache_weight_mgr.reorder(given)
        ranks = torch.argsort(torch.argsort(counts, descending=True))
        assert_same(bag.cache_weight_mgr.idx_map, ranks)
        differ += not torch.equal(ranks.argsort(), counts.argsort(descending=True, stable=True))
    assert differ  # from the order of ids


def test_those_of_equal_use_that_are_resident_first_are_those_of_their_class():
    torch.manual_seed(0)
    for _ in range(20):
        counts = torch.randint(5, (100,))
        bag = bag_of(100, 10, EvictionStrategy.LFU, ids_freq_mapping=counts, warmup_ratio=0.7)
        assert resident_ids(bag) == sorted(torch.topk(counts, 7).indices.tolist())
        assert_same(bag.cache_weight_mgr.cached_idx_map[:7], torch.topk(counts, 7).indices)


def test_rows_that_may_not_leave_are_reported():
    _, ours = bags(mode="sum", evict_strategy=EvictionStrategy.DATASET, ids_freq_mapping=range(N))
    manager = ours.cache_weight_mgr
    assert manager.evict_backlist.tolist() == []
    out = lookup(ours, torch.tensor([4, 40, 4]))
    assert sorted(manager.evict_backlist.tolist()) == sorted(manager.idx_map[[4, 40]].tolist())
    out.sum().backward()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    assert len(manager.evict_backlist) == 2
    optimizer.step()
    optimizer.zero_grad()
    del out
    assert manager.evict_backlist.dtype is torch.int64 and not len(manager.evict_backlist)


def test_blocks_are_timed_by_name(capsys):
    _, ours = bags(mode="sum")
    with ours.cache_weight_mgr.timer("lookup"):
        lookup(ours, torch.arange(6))
    with ours.cache_weight_mgr.timer("lookup"):
        pass
    with pytest.raises(KeyError), ours.cache_weight_mgr.timer("failed"):
        raise KeyError
    ours.print_comm_stats()
    shown = capsys.readouterr().out.splitlines()
    (line,) = (line for line in shown if line.startswith("lookup: "))
    assert float(line.removeprefix("lookup: ")) > 0
    assert not any(line.startswith("failed") for line in shown)
    copied = copy.deepcopy(ours)
    assert copied.cache_weight_mgr is not ours.cache_weight_mgr
    copied.rows.load(table() * 2)
    assert_same(copied.cache_weight_mgr.weight, table() * 2)
    assert_same(ours.cache_weight_mgr.weight, table())


def test_names_of_their_class_that_say_what_is_set():
    plain, ours = bags(torch.float16, mode="sum", buffer_size=3)
    manager = ours.cache_weight_mgr
    assert (manager.buffer_size, manager.elem_size_in_byte) == (3, 2)
    for flag in (True, False):
        ours.set_cache_mgr_async_copy(flag)
        assert_same(lookup(ours, torch.arange(9)), lookup(plain, torch.arange(9)))
    with pytest.raises(ArgumentTypeError, match="flag: expected a bool, got 'yes'"):
        ours.set_cache_mgr_async_copy("yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", EvictionStrategy, ids=lambda s: s.name)
def test_a_flush_leaves_what_a_plain_table_has(strategy):
    plain, ours = bags(mode="mean", evict_strategy=strategy, ids_freq_mapping=list(range(N)))
    theirs, mine = (torch.optim.SGD(m.parameters(), lr=1e-1) for m in (plain, ours))
    generator = torch.Generator().manual_seed(2)
    for _ in range(10):
        ids = torch.randint(N, (9,), generator=generator)
        assert_same(step(ours, mine, ids), step(plain, theirs, ids))
    ours.cache_weight_mgr.flush()
    manager = ours.cache_weight_mgr
    assert manager.cuda_available_row_num == manager.cuda_row_num
    assert_same(manager.weight, plain.weight.detach())
    for row in (0, 17, N - 1):  # the host has them itself
        assert_same(manager.cpu_weight_data(row)[0], plain.weight.detach()[row])
    assert sum(ours.num_write_back_history) > 0
    ids = torch.arange(9)
    assert_same(step(ours, mine, ids), step(plain, theirs, ids))


def test_a_plain_module_made_of_the_weight_trains_independently():
    ours = bag_of(6, 5, EvictionStrategy.LFU)
    plain = torch.nn.EmbeddingBag.from_pretrained(
        ours.weight.detach().to("cpu"), freeze=False, mode="sum"
    )
    theirs, mine = (torch.optim.SGD(m.parameters(), lr=1e-1) for m in (plain, ours))
    for ids in ([0, 1, 2], [1, 3, 5], [4, 2, 0]):
        given = torch.tensor(ids)
        assert_same(step(ours, mine, given), step(plain, theirs, given))
    ours.cache_weight_mgr.flush()
    assert torch.allclose(ours.weight, plain.weight, rtol=0, atol=0)


def test_only_changed_rows_are_written_back():
    plain, ours = bags(mode="sum", cache_ratio=0.5)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    step(ours, optimizer, torch.tensor([0, 1, 2]))
    optimizer.zero_grad()
    with torch.no_grad():
        lookup(ours, torch.arange(3, 24))
    before = ours.stats()["written_back"]
    ours.flush()
    assert ours.stats()["written_back"] - before == 3
    ours.flush()
    assert ours.stats()["written_back"] - before == 3


def test_slots_may_be_prepared_by_oneself():
    plain, ours = bags(mode="sum", cache_ratio=0.4, padding_idx=3)
    theirs, mine = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, ours))
    ours.set_cache_op(False)
    offsets = torch.tensor([0, 2, 2])
    for ids in ([3, 1, 40, 1], [17, 3, 3, 9], [44, 45, 46, 40]):
        given = torch.tensor(ids)
        slots = ours.cache_weight_mgr.prepare_ids(given)
        assert slots.dtype == torch.int64 and slots.shape == given.shape
        for module, optimizer, index in ((ours, mine, slots), (plain, theirs, given)):
            optimizer.zero_grad()
            module(index, offsets).square().sum().backward()
            optimizer.step()
        assert_same(ours.rows.whole(), plain.weight.detach())
    ours.set_cache_op(True)
    assert_same(ours(given, offsets).detach(), plain(given, offsets).detach())


def test_slots_that_hold_nothing_are_refused():
    _, ours = bags(mode="sum", warmup_ratio=0.0)
    ours.set_cache_op(False)
    for slots in ([10], [-1], [0]):
        with pytest.raises(ArgumentError, match="input"):
            ours(torch.tensor(slots), torch.tensor([0]))
    with pytest.raises(ArgumentError, match="more different rows than the 10"):
        ours.cache_weight_mgr.prepare_ids(torch.arange(20))
    assert ours.cache_weight_mgr.cuda_available_row_num == 10


def test_what_moved_is_printed(capsys):
    _, ours = bags(mode="sum", warmup_ratio=0.0)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    step(ours, optimizer, torch.arange(6))
    ours.flush()
    ours.print_comm_stats()
    shown = capsys.readouterr().out
    assert "host to device: 6 rows" in shown and "device to host: 6 rows" in shown
    assert "cache miss ratio 1.0000" in shown
    manager = ours.cache_weight_mgr
    assert (manager.num_embeddings, manager.embedding_dim) == (N, D)


def test_bandwidths_and_buffers_bound_what_comes_at_once():
    plain, ours = bags(mode="sum", buffer_size=2, cache_ratio=0.5)
    theirs, mine = (torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (plain, ours))
    for begin in range(0, 40, 10):
        ids = torch.arange(begin, begin + 9)
        assert_same(step(ours, mine, ids), step(plain, theirs, ids))
    assert_same(ours.rows.whole(), plain.weight.detach())


# State dicts

KEY = "cache_weight_mgr.cuda_cached_weight"


def test_a_table_next_to_their_cache_is_loaded():
    _, ours = bags()
    state = {"weight": table() * 2, KEY: torch.zeros(10, D)}
    assert not any(ours.load_state_dict(state))
    assert_same(ours.rows.whole(), table() * 2)
    model = torch.nn.Sequential(bags()[1])
    assert not any(model.load_state_dict({f"0.{key}": value for key, value in state.items()}))


@pytest.mark.parametrize("rows", [10, N], ids=["some-rows", "all-rows"])
@pytest.mark.parametrize("strict", [True, False])
def test_their_cache_alone_is_refused_with_what_to_save_instead(rows, strict):
    _, ours = bags()
    with pytest.raises(RuntimeError, match=r"weight = cache_weight_mgr.weight\[.*idx_map"):
        ours.load_state_dict({KEY: torch.zeros(rows, D)}, strict=strict)
    assert_same(ours.rows.whole(), table())
