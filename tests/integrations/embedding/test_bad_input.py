"""Bad input raises a clear error and changes nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import bitslab.engine.memory.host as host
from bitslab import ArgumentError, ArgumentTypeError, BitslabError, CompressedTable, IndexRangeError
from bitslab.embedding import CachedRows
from bitslab.engine.memory import page_locking
from bitslab.integrations.embedding import (
    CachedEmbedding,
    CachedEmbeddingBag,
    compress_embeddings,
)
from tests.integrations.embedding.support import (
    D,
    N,
    assert_same,
    bags,
    batches,
    lookup,
    singles,
    step,
    table,
    train_both,
    whole,
)
from tests.tables.support import Recorder

IDS = torch.tensor([3, 1, 4, 1])
IDS_2D = IDS.view(2, 2)
START = torch.tensor([0, 2])


def state_of(module: Any) -> list[Any]:
    """Return what an error must leave as it is."""
    rows: CachedRows = module.rows
    held = rows.slot_table
    copied = (held.slot_of, held.id_of, held.keys, held.dirty, held.pinned, held._free)
    stats = {k: v for k, v in module.stats().items() if k not in ("lookups",)}
    return [whole(module), [a.tolist() for a in copied], list(rows.parameter.shape), stats]


def assert_unchanged(module: Any, before: list[Any]) -> None:
    after = state_of(module)
    assert_same(after[0], before[0])
    assert after[1:] == before[1:]


BAD_IDS: dict[str, tuple[Any, type[BitslabError], str]] = {
    "too-large": (torch.tensor([3, N]), IndexRangeError, f"input: index {N} at position 1"),
    "negative": (torch.tensor([-1, 3]), IndexRangeError, "input: index -1 at position 0"),
    "huge": (torch.tensor([0, 1 << 40]), IndexRangeError, "input: index 1099511627776"),
    "floats": (torch.tensor([1.0]), ArgumentTypeError, "input: torch.float32, accepted are"),
    "bytes": (torch.tensor([1], dtype=torch.uint8), ArgumentTypeError, "input: torch.uint8"),
    "list": ([1, 2], ArgumentTypeError, "input: expected "),
    "none": (None, ArgumentTypeError, "input: expected "),
}


@pytest.mark.drawn(21)
@pytest.mark.parametrize("phase", ["train", "eval", "no-grad"])
@pytest.mark.parametrize("kind", ["rows", "packed", "frozen"])
@pytest.mark.parametrize("case", BAD_IDS)
def test_bad_ids(case, kind, phase):
    ids, error, says = BAD_IDS[case]
    options: dict[str, Any] = {"freeze": True} if kind == "frozen" else {"cache": kind}
    for ours in (bags(mode="sum", **options)[1], singles(**options)[1]):
        ours.train(phase == "train")
        if kind != "frozen":
            step(ours, torch.optim.SGD(ours.parameters(), lr=0.1), IDS)
            ours.zero_grad()
            with torch.no_grad():
                lookup(ours, IDS)  # releases what the step needed
        before = state_of(ours)
        with torch.set_grad_enabled(phase != "no-grad"), pytest.raises(error, match=says):
            if isinstance(ours, CachedEmbeddingBag):
                ours(ids, torch.tensor([0]))
            else:
                ours(ids)
        with pytest.raises(error, match=says):
            ours.prefetch(ids)
        assert_unchanged(ours, before)


BAD_BAGS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "not-sorted": ((IDS, torch.tensor([0, 3, 2])), {}, "offsets: falls from 3 to 2 at position 2"),
    "beyond": ((IDS, torch.tensor([0, 9])), {}, "offsets: reaches 9, but there are 4 ids"),
    "negative": ((IDS, torch.tensor([0, -2, 3])), {}, "offsets: falls from 0 to -2"),
    "late": ((IDS, torch.tensor([1, 2])), {}, "offsets: begins with 1, expected 0"),
    "floats": ((IDS, torch.tensor([0.0])), {}, "offsets: torch.float32, accepted are"),
    "two-dim": ((IDS, torch.tensor([[0]])), {}, "offsets: expected a 1-D torch.Tensor"),
    "list": ((IDS, [0, 2]), {}, "offsets: expected a 1-D torch.Tensor"),
    "missing": ((IDS,), {}, "offsets: expected a 1-D torch.Tensor"),
    "not-wanted": ((IDS_2D, START), {}, r"offsets: given with input \[B, n\]"),
    "three-dim": ((IDS_2D[None],), {}, r"input: expected ids \[n\] or \[B, n\]"),
    "no-end": ((IDS, START), {"include_last_offset": True}, "offsets: ends with 2, expected 4"),
    "no-offsets": (
        (IDS, START[:0]),
        {"include_last_offset": True},
        "offsets: is empty, expected the end",
    ),
    "weights-in-mean": ((IDS, START, torch.ones(4)), {"mode": "mean"}, "accepted with 'sum'"),
    "weights-shape": (
        (IDS, START, torch.ones(3)),
        {},
        r"per_sample_weights: \[3\], expected \[4\]",
    ),
    "weights-dtype": (
        (IDS, START, torch.ones(4).double()),
        {},
        "per_sample_weights: torch.float64",
    ),
    "weights-list": ((IDS, START, [1.0] * 4), {}, "per_sample_weights: expected a torch.Tensor"),
}


@pytest.mark.parametrize("case", BAD_BAGS)
def test_bad_bags(case):
    args, options, says = BAD_BAGS[case]
    _, ours = bags(**{"mode": "sum", **options})
    step(ours, torch.optim.SGD(ours.parameters(), lr=0.1), torch.arange(9)) if not options else None
    ours.zero_grad()
    before = state_of(ours)
    with pytest.raises(BitslabError, match=says):
        ours(*args)
    assert_unchanged(ours, before)


BAD_OPTIONS: dict[str, tuple[dict[str, Any], type[BitslabError], str]] = {
    "no-rows": ({"num_embeddings": 0}, ArgumentError, "num_embeddings: 0, accepted are 1"),
    "no-columns": ({"embedding_dim": 0}, ArgumentError, "embedding_dim: 0, accepted are 1"),
    "half-a-row": ({"num_embeddings": 1.5}, ArgumentTypeError, "num_embeddings: expected an int"),
    "padding": ({"padding_idx": N}, ArgumentError, f"padding_idx: {N}, accepted are -50 to 49"),
    "padding-text": ({"padding_idx": "0"}, ArgumentTypeError, "padding_idx: expected an int"),
    "shape": ({"_weight": table(N + 1)}, ArgumentError, r"_weight: \[51, 8\], expected"),
    "integers": ({"_weight": table().int()}, ArgumentTypeError, "_weight: torch.int32"),
    "no-ratio": ({"cache_ratio": 0}, ArgumentError, "cache_ratio: 0, accepted are more than 0"),
    "large-ratio": ({"cache_ratio": 1.01}, ArgumentError, "cache_ratio: 1.01"),
    "nan-ratio": ({"cache_ratio": float("nan")}, ArgumentError, "cache_ratio: nan"),
    "text-ratio": ({"cache_ratio": "1"}, ArgumentError, "cache_ratio: '1'"),
    "counts": ({"ids_freq_mapping": [1, 2]}, ArgumentError, r"counts: \[2\]"),
    "warm-up": ({"warmup_ratio": 2}, ArgumentError, "warmup_ratio: 2, accepted are 0 to 1"),
    "buffer": ({"buffer_size": -1}, ArgumentError, "buffer_rows: -1, accepted are 0 and more"),
    "strategy": ({"evict_strategy": "LFU"}, ArgumentTypeError, "evict: expected an EvictionStra"),
    "cache": ({"cache": "slabs"}, ArgumentError, "cache: 'slabs', accepted are"),
    "codec": ({"codec": "zip"}, ArgumentError, "zip"),
    "layout": ({"layout": "sparse"}, ArgumentError, "layout: 'sparse'"),
    "rows": ({"rows": "rows"}, ArgumentTypeError, "rows: expected CachedRows, got str"),
    "device": ({"device": "meta"}, BitslabError, "device"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
@pytest.mark.parametrize("kind", [CachedEmbedding, CachedEmbeddingBag])
def test_bad_options(kind, case):
    options, error, says = BAD_OPTIONS[case]
    with pytest.raises(error, match=says):
        kind(**{"num_embeddings": N, "embedding_dim": D, "device": "cpu", **options})


def test_bad_options_of_bags_alone():
    with pytest.raises(ArgumentError, match="mode: 'median', accepted are"):
        CachedEmbeddingBag(N, D, mode="median", device="cpu")
    for sparse in (True, False):
        with pytest.raises(ArgumentError, match="mode: 'max' goes with neither"):
            CachedEmbeddingBag(
                N, D, mode="max", device="cpu", sparse=sparse, scale_grad_by_freq=not sparse
            )


@pytest.mark.parametrize("kind", [CachedEmbedding, CachedEmbeddingBag])
def test_pretrained_tables_are_matrices(kind):
    for t, shape in (
        (torch.zeros(3), r"\[3\]"),
        (torch.zeros(3, 2, 2), r"\[3, 2, 2\]"),
        (7, r"\[\]"),
    ):
        with pytest.raises(ArgumentError, match=rf"embeddings: {shape}, expected \[N, D\]"):
            kind.from_pretrained(t)


def test_rows_of_another_shape_or_with_no_place_for_the_row_that_pads():
    _, ours = singles(cache_ratio=0.2)
    with pytest.raises(ArgumentError, match=r"rows: \[50, 8\], expected .* = \[51, 8\]"):
        CachedEmbedding(N + 1, D, rows=ours.rows)
    with pytest.raises(ArgumentError, match=r"rows: made with pinned_ids=\(\), expected padding_i"):
        CachedEmbedding(N, D, padding_idx=3, rows=ours.rows)
    assert_same(whole(ours), table())


def test_the_table_given_is_open_after_an_error():
    packed = CompressedTable.from_tensor(table())
    with pytest.raises(ArgumentError, match="_weight"):
        CachedEmbedding(N + 1, D, _weight=packed, device="cpu")
    with pytest.raises(ArgumentTypeError, match="_weight: torch.float32, expected torch.float16"):
        CachedEmbedding(N, D, _weight=packed, dtype=torch.float16, device="cpu")
    with pytest.raises(ArgumentError, match="cache"):
        CachedEmbedding(N, D, _weight=packed, device="cpu", cache="slabs")  # type: ignore[arg-type]
    assert_same(packed.decoded(0, N), table())


@pytest.mark.parametrize("n", [1, 50, 99])
def test_a_ratio_that_gives_no_row_takes_one_and_says_so(n):
    says = f"cache_ratio=0.01 of {n} rows is less than one row; one is resident, the fewest"
    for kind in (CachedEmbedding, CachedEmbeddingBag):
        with pytest.warns(UserWarning, match=f"bitslab: {says}") as caught:
            ours = kind(n, D, device="cpu")
        assert len(caught) == 1 and caught[0].filename == __file__
        assert ours.rows.cache_rows == 1
        (note,) = (note for note in ours.stats()["notes"] if "cache_ratio" in note)
        assert says in note


@pytest.mark.filterwarnings("error:.*cache_ratio:UserWarning")
def test_a_ratio_that_gives_a_row_says_nothing_and_a_compressed_model_says_it_in_its_report():
    for n in (1, 3, 49, 100):
        ours = CachedEmbedding(n, D, cache_ratio=1 / n, device="cpu")
        assert ours.rows.cache_rows == 1
        assert not any("cache_ratio" in note for note in ours.stats()["notes"])
    report = compress_embeddings(torch.nn.Sequential(torch.nn.Embedding(N, D)), min_rows=1)
    assert any("cache_ratio=0.01 of 50 rows" in note for note in report.compressed["0"]["notes"])


# Memory


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    monkeypatch.setattr(page_locking, "registrar", recorder)
    monkeypatch.setattr(page_locking, "_warned_of_refusal", False)
    yield recorder
    gc.collect()


def test_a_table_beyond_the_pin_limit_is_one_warning_and_works(recorder):
    recorder.refusal = "out of memory"
    plain = torch.nn.Embedding(3000, D, _weight=table(3000))
    with pytest.warns(UserWarning, match="ulimit -l") as caught:
        ours = CachedEmbedding.from_module(plain)
        again = CachedEmbedding.from_module(plain)
    assert len(caught) == 1
    ids = batches(1, n=3000)[0]
    assert_same(ours(ids).detach(), plain(ids).detach())
    assert_same(again(ids).detach(), plain(ids).detach())
    del ours, again


def test_pages_are_locked_only_when_wanted(recorder):
    plain = torch.nn.Embedding(3000, D, _weight=table(3000))
    unpinned = CachedEmbedding.from_module(plain, pin_weight=False)
    assert "register" not in recorder.names()
    pinned = CachedEmbedding.from_module(plain)
    assert "register" in recorder.names()
    del unpinned, pinned


def test_a_table_that_memory_has_no_room_for_leaves_all_as_it_was(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Embedding(3000, D))
    kept = model[0]
    _, ours = singles()
    with monkeypatch.context() as patched:
        patched.setattr(host, "available_bytes", lambda: 100)
        with pytest.raises(BitslabError, match="host memory"):
            compress_embeddings(model, min_rows=1)
        assert model[0] is kept
        with pytest.raises(BitslabError, match="host memory"):
            ours.load_state_dict({"weight": table() * 2})
        assert_same(whole(ours), table())
        with pytest.raises(BitslabError, match="host memory"):
            ours.half()
    assert ours.rows.parameter.dtype == ours.rows.dtype == torch.float32
    assert_same(whole(ours), table())
    plain = torch.nn.Embedding(N, D, _weight=table())
    train_both(plain, ours, lambda p: torch.optim.Adagrad(p), batches(4))


def refuses_to_average() -> None:
    bag = CachedEmbeddingBag(100, 8, cache_ratio=0.1, device="cpu")
    model = torch.nn.parallel.DistributedDataParallel(bag)
    ids = torch.randint(100, (4, 5))
    with pytest.raises(BitslabError, match="DistributedDataParallel.*torchrec"):
        model(ids)
    with torch.no_grad():
        assert torch.equal(model(ids), bag(ids))


def test_gradients_are_not_averaged_with_those_of_other_rows(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        # In a function, so that the model goes before the group: a group that its last model frees
        # joins its threads with the interpreter's lock held, for which they may wait.
        refuses_to_average()
    finally:
        torch.distributed.destroy_process_group()
