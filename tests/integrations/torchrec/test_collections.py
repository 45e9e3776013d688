"""Packed collections give and learn what TorchRec's own do, bit for bit."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchrec", reason="torchrec is not installed")

from tensordict import TensorDict
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.modules.embedding_configs import DataType, PoolingType

from bitslab import ArgumentError, ArgumentTypeError, BitslabError, IndexRangeError
from bitslab.embedding import EvictionStrategy
from bitslab.engine.kernels.cuda.runner import INDEX_ERROR
from bitslab.integrations.torchrec import (
    CompressedEmbeddingBagCollection,
    CompressedEmbeddingCollection,
)
from tests.embedding.on_device import on_simulated_gpu
from tests.integrations.torchrec.batches import KEYS, bag_configs, batch, configs, same_state

SGD: dict[str, Any] = {"cls": torch.optim.SGD, "lr": 0.1}
ADAGRAD: dict[str, Any] = {"cls": torch.optim.Adagrad, "lr": 0.1}
OPTIMIZERS = pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=["sgd", "adagrad"])


def bags(make=bag_configs, seed=0, is_weighted=False, **options):
    """Make TorchRec's collection and ours, with one seed."""
    torch.manual_seed(seed)
    theirs = EmbeddingBagCollection(tables=make(), is_weighted=is_weighted)
    torch.manual_seed(seed)
    options = {"device": "cpu", "cache_ratio": 0.05, **options}
    return theirs, CompressedEmbeddingBagCollection(make(), is_weighted, **options)


def sequences(make=configs, seed=0, **options):
    torch.manual_seed(seed)
    theirs = EmbeddingCollection(tables=make(), need_indices=True)
    torch.manual_seed(seed)
    options = {"device": "cpu", "cache_ratio": 0.05, **options}
    return theirs, CompressedEmbeddingCollection(make(), need_indices=True, **options)


def make_optimizer(module, cls, **options):
    return cls(module.parameters(), **options)


def assert_same_output(theirs, ours) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Compare two outputs; return their tensors in pairs."""
    if isinstance(theirs, dict):
        assert list(theirs) == list(ours)
        pairs = []
        for name in theirs:
            assert torch.equal(theirs[name].lengths(), ours[name].lengths())
            assert torch.equal(theirs[name].weights(), ours[name].weights())
            pairs.append((theirs[name].values(), ours[name].values()))
    else:
        assert theirs.keys() == ours.keys()
        assert theirs.length_per_key() == ours.length_per_key()
        pairs = [(theirs.values(), ours.values())]
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    return pairs


def train(theirs, ours, optimizer, steps=6, **drawn):
    optimizers = [make_optimizer(module, **optimizer) for module in (theirs, ours)]
    for step in range(steps):
        features = batch(step, **drawn)
        pairs = assert_same_output(theirs(features), ours(features))
        for number, (a, b) in enumerate(pairs):
            generator = torch.Generator().manual_seed(100 * step + number)
            grad = torch.randn(a.shape, generator=generator)
            # One backward pass for each of several outputs: gradients add up.
            (a * grad).sum().backward(retain_graph=True)
            (b * grad).sum().backward(retain_graph=True)
        for o in optimizers:
            o.step()
            o.zero_grad()
    assert same_state(theirs, ours)


def test_one_seed_gives_the_rows_of_torchrec() -> None:
    assert same_state(*bags())
    assert same_state(*sequences())
    theirs, ours = bags()
    torch.manual_seed(5)
    theirs.reset_parameters()
    torch.manual_seed(5)
    ours.reset_parameters()
    assert same_state(theirs, ours)


@OPTIMIZERS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_ratio": 1.0},
        {"min_rows": 400, "layout": "inplace"},
        {"evict": EvictionStrategy.LRU, "codec": "ibp"},
        {"cache": "packed"},
    ],
    ids=["default", "resident", "small-resident", "lru-ibp", "packed-cache"],
)
def test_pooled_training_is_that_of_torchrec(optimizer, options) -> None:
    theirs, ours = bags(**options)
    train(theirs, ours, optimizer)


@OPTIMIZERS
def test_sequence_training_is_that_of_torchrec(optimizer) -> None:
    theirs, ours = sequences()
    train(theirs, ours, optimizer)


@OPTIMIZERS
def test_weighted_training_is_that_of_torchrec(optimizer) -> None:
    def make():
        return bag_configs(pooling=PoolingType.SUM)

    theirs, ours = bags(make, is_weighted=True)
    train(theirs, ours, optimizer, weighted=True)


def test_gradients_reach_the_weights_of_features() -> None:
    theirs, ours = bags(lambda: bag_configs(pooling=PoolingType.SUM), is_weighted=True)
    grads = []
    for module in (theirs, ours):
        features = batch(weighted=True)
        features._weights = features.weights().requires_grad_()
        module(features).values().square().sum().backward()
        grads.append(features.weights().grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16], ids=["float16", "bfloat16"])
def test_half_tables_give_float_outputs(data_type) -> None:
    def make():
        return [
            EmbeddingBagConfig(
                name="t", num_embeddings=300, embedding_dim=64, feature_names=["c"],
                data_type=data_type,
            )
        ]  # fmt: skip

    theirs, ours = bags(make)
    expected = {DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}[data_type]
    assert ours.state_dict()["embedding_bags.t.weight"].dtype is expected
    if data_type is DataType.BF16:
        # TorchRec's own makes a float16 table of these.
        theirs.to(torch.bfloat16).load_state_dict(ours.state_dict())
    train(theirs, ours, SGD)


def test_rows_that_come_many_times_learn_the_same() -> None:
    """The order in which torch sums gradients of a row depends on all indices of a call."""
    theirs, ours = bags()
    train(theirs, ours, SGD, steps=4, bags=50, most=20)
    theirs, ours = sequences()
    train(theirs, ours, ADAGRAD, steps=4, bags=50, most=20)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_values_of_both_dtypes(dtype) -> None:
    for make in (bags, sequences):
        theirs, ours = make()
        assert_same_output(theirs(batch(dtype=dtype)), ours(batch(dtype=dtype)))


@pytest.mark.parametrize(
    "keys", [("a", "b", "c"), ("c", "b", "a"), KEYS], ids=["in-order", "reversed", "more"]
)
def test_keys_in_any_order(keys) -> None:
    for make in (bags, sequences):
        theirs, ours = make()
        assert_same_output(theirs(batch(keys=keys)), ours(batch(keys=keys)))
        assert_same_output(theirs(batch(1)), ours(batch(1)))


def test_empty_bags_and_batches() -> None:
    for make in (bags, sequences):
        theirs, ours = make()
        assert_same_output(theirs(batch(most=0)), ours(batch(most=0)))
    # TorchRec itself fails with no bag at all.
    assert ours(batch(bags=0))["c"].values().shape == (0, 64)
    assert bags()[1](batch(bags=0)).values().shape == (0, 8 + 8 + 8 + 64)


def test_features_of_different_batch_sizes() -> None:
    """As TorchRec's own: bags that examples share, spread by the inverse indices."""
    keys = ["a", "b", "c"]
    inverse = torch.tensor([[0, 1, 0, 1], [2, 1, 0, 0], [0, 0, 0, 0]])
    lengths = torch.tensor([2, 0, 1, 1, 3, 2])

    def features():
        return KeyedJaggedTensor(
            keys,
            torch.tensor([3, 40, 500, 7, 8, 9, 10, 299, 5]),
            lengths=lengths,
            stride_per_key_per_rank=[[2], [3], [1]],
            inverse_indices=(keys, inverse),
        )

    theirs, ours = bags()
    out = assert_same_output(theirs(features()), ours(features()))
    assert out[0][1].shape[0] == 4


def test_a_tensordict_is_accepted() -> None:
    features = batch()
    nested = TensorDict(
        {
            key: torch.nested.nested_tensor_from_jagged(j.values(), j.offsets())
            for key, j in features.to_dict().items()
        }
    )
    theirs, ours = bags()
    assert_same_output(theirs(nested), ours(nested))


def test_evaluation_writes_nothing_back() -> None:
    theirs, ours = bags()
    train(theirs, ours, SGD)
    ours.flush()
    theirs.eval()
    ours.eval()
    before = ours.stats()["written_back"]
    with torch.no_grad():
        for step in range(4):
            assert_same_output(theirs(batch(step)), ours(batch(step)))
    assert ours.stats()["written_back"] == before


def test_frozen_tables_take_no_gradient() -> None:
    theirs, ours = bags(freeze=True)
    assert not any(p.requires_grad for p in ours.parameters())
    assert_same_output(theirs(batch()), ours(batch()))
    assert not ours(batch()).values().requires_grad
    ours.requires_grad_(True)
    with pytest.raises(BitslabError, match="frozen"):
        ours(batch())


def test_some_tables_may_be_frozen() -> None:
    theirs, ours = bags(freeze={"t2": True})
    theirs.embedding_bags["t2"].weight.requires_grad_(False)
    train(theirs, ours, ADAGRAD)


def test_given_rows_are_packed() -> None:
    rows = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)
    theirs, ours = bags(weights={"t2": rows, "t3": torch.ones(41, 64)})
    state = ours.state_dict()
    assert torch.equal(state["embedding_bags.t2.weight"], torch.from_numpy(rows))
    assert torch.equal(state["embedding_bags.t3.weight"], torch.ones(41, 64))


def test_an_init_fn_is_called_once() -> None:
    calls = []

    def fill(rows):
        calls.append(rows.shape)
        with torch.no_grad():
            rows.fill_(len(calls))

    tables = bag_configs(init_fn=fill)
    ours = CompressedEmbeddingBagCollection(tables, device="cpu")
    assert calls == [(501, 8), (300, 8), (41, 64)]
    assert ours.embedding_bags["t3"].weight.eq(3).all()


def test_state_dicts_are_exchanged_with_torchrec() -> None:
    for make in (bags, sequences):
        theirs, ours = make()
        others = make(seed=1)
        assert not same_state(theirs, others[1])
        assert not any(others[1].load_state_dict(theirs.state_dict()))
        assert same_state(theirs, others[1])
        assert not any(others[0].load_state_dict(ours.state_dict()))
        assert same_state(others[0], ours)


def test_state_of_another_shape_is_refused_and_nothing_changes() -> None:
    theirs, ours = bags()
    state = ours.state_dict()
    wrong = {**state, "embedding_bags.t2.weight": torch.zeros(299, 8)}
    wrong["embedding_bags.t1.weight"] = torch.zeros(501, 8)
    with pytest.raises(RuntimeError, match=r"embedding_bags\.t2\.weight.*299"):
        ours.load_state_dict(wrong)
    assert same_state(state, ours)
    del wrong["embedding_bags.t2.weight"]
    with pytest.raises(RuntimeError, match=r"[Mm]issing.*t2"):
        ours.load_state_dict(wrong)
    with pytest.raises(RuntimeError, match=r"[Uu]nexpected.*t9"):
        ours.load_state_dict({**state, "embedding_bags.t9.weight": torch.zeros(2, 2)})


def written_in_place(ours: CompressedEmbeddingBagCollection) -> int:
    """Train, then write to all resident rows; return in how many groups rows are refused now."""
    optimizer = make_optimizer(ours, **ADAGRAD)
    ours(batch()).values().square().sum().backward()
    optimizer.step()
    for parameter in ours.parameters():
        torch.nn.init.ones_(parameter)
    refused = 0
    for group in ours.groups:
        with pytest.raises(BitslabError, match="changed in place"):
            group.rows.whole()
        refused += 1
    return refused


@pytest.mark.parametrize("how", ["state-dict", "views"])
def test_loading_all_tables_makes_refused_writes_good(how) -> None:
    theirs, ours = bags()
    assert max(len(group.tables) for group in ours.groups) > 1
    assert written_in_place(ours) == len(ours.groups)
    if how == "state-dict":
        assert not any(ours.load_state_dict(theirs.state_dict()))
    else:
        for name, view in ours.embedding_bags.items():
            view.load(theirs.embedding_bags[name].weight.detach())
    assert same_state(theirs, ours)
    ours.zero_grad()  # gradients stand from before
    train(theirs, ours, ADAGRAD, steps=3)
    assert same_state(theirs, ours)


def test_rows_that_were_not_loaded_are_still_refused() -> None:
    theirs, ours = bags()
    written_in_place(ours)
    group = next(group for group in ours.groups if len(group.tables) > 1)
    first, *others = [ours.specs[table].name for table in group.tables]
    ours.embedding_bags[first].load(theirs.embedding_bags[first].weight.detach())
    with pytest.raises(BitslabError, match="changed in place"):
        ours(batch())
    for parameter in ours.parameters():
        torch.nn.init.zeros_(parameter)  # the rows that were loaded too
    for name in others:
        ours.embedding_bags[name].load(theirs.embedding_bags[name].weight.detach())
    with pytest.raises(BitslabError, match="changed in place"):
        ours(batch())
    ours.load_state_dict(theirs.state_dict())
    assert same_state(theirs, ours)


def test_a_load_that_fails_changes_no_table() -> None:
    theirs, ours = bags()
    written_in_place(ours)
    before = [group.rows.table.decoded(0, len(group.rows)) for group in ours.groups]
    state = theirs.state_dict()
    group = next(group for group in ours.groups if len(group.tables) > 1)
    missing = f"embedding_bags.{ours.specs[group.tables[-1]].name}.weight"
    part = {key: value for key, value in state.items() if key != missing}
    with pytest.raises(BitslabError, match="changed in place"):
        ours.load_state_dict(part, strict=False)
    with pytest.raises(RuntimeError, match="size mismatch"):
        ours.load_state_dict({**state, missing: torch.zeros(2, 2)})
    after = [group.rows.table.decoded(0, len(group.rows)) for group in ours.groups]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    ours.load_state_dict(state)
    assert same_state(theirs, ours)


def test_optimizer_state_is_that_of_all_rows() -> None:
    """Adagrad goes on from a checkpoint as it does in TorchRec's own."""
    theirs, ours = bags()
    train(theirs, ours, ADAGRAD, steps=3)
    others = bags(seed=1)
    for old, new in zip((theirs, ours), others, strict=True):
        new.load_state_dict(old.state_dict())
    optimizers = [make_optimizer(m, **ADAGRAD) for m in (theirs, ours, *others)]
    for step in range(3):
        for module, o in zip((theirs, ours), optimizers, strict=False):
            module(batch(step)).values().square().sum().backward()
            o.step()
            o.zero_grad()
    for module, o, old, had in zip(
        others, optimizers[2:], (theirs, ours), optimizers, strict=False
    ):
        module.load_state_dict(old.state_dict())
        o.load_state_dict(had.state_dict())
        for step in range(3, 5):
            module(batch(step)).values().square().sum().backward()
            o.step()
            o.zero_grad()
    assert same_state(*others)


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
def test_copies_in_the_middle_of_training_go_their_own_way(copied) -> None:
    theirs, ours = bags()
    train(theirs, ours, ADAGRAD, steps=3)
    before = ours.state_dict()
    twin = copy.deepcopy(ours) if copied == "deepcopy" else pickle.loads(pickle.dumps(ours))
    assert same_state(ours, twin)
    train(copy.deepcopy(theirs), twin, SGD, steps=3)
    assert same_state(before, ours)
    assert not same_state(ours, twin)


def test_prefetch_changes_no_result() -> None:
    theirs, ours = bags()
    for step in range(4):
        ours.prefetch(batch(step + 1))
        assert_same_output(theirs(batch(step)), ours(batch(step)))


def test_what_users_of_torchrec_ask_for() -> None:
    _, ours = bags()
    assert [config.name for config in ours.embedding_bag_configs()] == ["t1", "t2", "t3"]
    assert not ours.is_weighted()
    assert ours.device == torch.device("cpu")
    table = ours.embedding_bags["t3"]
    assert (table.num_embeddings, table.embedding_dim) == (41, 64)
    assert torch.equal(table.weight, ours.state_dict()["embedding_bags.t3.weight"])
    table.load(torch.ones(41, 64))
    assert table.weight.eq(1).all()
    assert "t3" in repr(table)
    _, ours = sequences()
    assert [config.name for config in ours.embedding_configs()] == ["t1", "t2", "t3"]
    assert ours.need_indices()
    assert ours.embedding_dim() == 64
    assert ours.embedding_names_by_table() == [["a@t1", "b"], ["c"], ["a@t3"]]
    assert ours.embeddings["t1"].num_embeddings == 501


def test_stats_say_what_each_table_takes() -> None:
    rows = torch.randn(500, 64).mul(0.02)
    noise = torch.randint(-(2**31), 2**31 - 1, (500, 64), dtype=torch.int32).view(torch.float32)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=500, embedding_dim=64)
        for name in ("packs", "too", "noise")
    ]
    ours = CompressedEmbeddingBagCollection(
        tables, device="cpu", weights={"packs": rows, "too": rows + 1e-3, "noise": noise}
    )
    stats = ours.stats()
    tables_stats = stats["tables"]
    assert tables_stats["noise"]["codec"] == "raw"
    assert tables_stats["packs"]["group"] == tables_stats["too"]["group"]
    assert tables_stats["packs"]["ratio"] > 1.1
    assert 0.99 < tables_stats["noise"]["ratio"] <= 1
    taken = sum(t["host_bytes"] for t in tables_stats.values())
    assert taken == pytest.approx(stats["host_bytes"], abs=len(tables))
    assert stats["raw_bytes"] == 3 * 500 * 64 * 4
    assert len(stats["groups"]) == len(list(ours.parameters())) == 2


# Bad input


def features_with(feature: str, value: int) -> KeyedJaggedTensor:
    jagged = {key: JaggedTensor.from_dense([torch.tensor([1, 2])]) for key in ("a", "b", "c")}
    jagged[feature] = JaggedTensor.from_dense([torch.tensor([1, value])])
    return KeyedJaggedTensor.from_jt_dict(jagged)


@pytest.mark.parametrize(
    ("feature", "value", "text"),
    [
        ("a", 41, "value 41 at position 1 of feature 'a'.*'t3' has rows 0 to 40"),
        ("b", 501, "value 501 .*'t1' has rows 0 to 500"),
        ("c", -1, "value -1 .*'t2' has rows 0 to 299"),
    ],
)
@pytest.mark.parametrize("make", [bags, sequences], ids=["bags", "sequences"])
def test_a_value_out_of_range_is_refused_and_nothing_changes(make, feature, value, text) -> None:
    """A table's last row is followed by the next table's first, which must not show."""
    _, ours = make()
    resident = [p.detach().clone() for p in ours.parameters()]
    with pytest.raises(IndexRangeError, match=text):
        ours(features_with(feature, value))
    assert all(torch.equal(a, b) for a, b in zip(resident, ours.parameters(), strict=True))
    assert ours.stats()["lookups"] == 0


@pytest.mark.parametrize("cache_ratio", [0.05, 1.0], ids=["cached", "resident"])
def test_on_a_gpu_the_host_does_not_look_at_values(cache_ratio) -> None:
    """Rows are found by the device, and a value out of range is reported by it."""
    theirs, ours = bags(lambda: bag_configs(pooling=PoolingType.SUM), cache_ratio=cache_ratio)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.5) for module in (theirs, ours)]
    with on_simulated_gpu() as runner:
        for step in range(4):
            features = batch(step)
            grad = torch.randint(-4, 5, (13, 3 * 8 + 64), generator=torch.manual_seed(step))
            for module, optimizer in zip((theirs, ours), optimizers, strict=True):
                optimizer.zero_grad()
                (module(features).values() * grad).sum().backward()
                optimizer.step()
        launched = [kernel for _, kernel in runner.launched if kernel == "rows_of_keys"]
        assert len(launched) == 4 * len(ours.groups)
        assert not runner.mailbox.any()
        assert same_state(theirs, ours)
        ours(features_with("a", 41))
        assert runner.mailbox.tolist()[0] == INDEX_ERROR
        assert runner.mailbox.tolist()[2:] == [41, 41]
        runner.mailbox.zero_()
        assert same_state(theirs, ours)


def test_features_that_do_not_fit_are_refused() -> None:
    _, ours = bags()
    with pytest.raises(ArgumentError, match="no key 'c'.*'b'"):
        ours(batch(keys=("a", "b")))
    with pytest.raises(ArgumentTypeError, match="values are torch.float32"):
        ours(batch(dtype=torch.float32))
    with pytest.raises(ArgumentTypeError, match="expected a torchrec KeyedJaggedTensor"):
        ours(torch.zeros(3))
    _, weighted = bags(lambda: bag_configs(pooling=PoolingType.SUM), is_weighted=True)
    with pytest.raises(ArgumentError, match="no weights"):
        weighted(batch())


def one(**changed):
    return [EmbeddingBagConfig(**{"name": "t", "num_embeddings": 9, "embedding_dim": 4, **changed})]


@pytest.mark.parametrize(
    ("tables", "options", "text"),
    [
        (one() * 2, {}, "two are named 't'"),
        (one(pooling=PoolingType.NONE), {}, "pooling NONE"),
        (one(pooling=PoolingType.MEAN), {"is_weighted": True}, "is_weighted"),
        (one(data_type=DataType.INT8), {}, "t.*accepted are float32"),
        (one(use_virtual_table=True), {}, "virtual"),
        (one(), {"cache_ratio": 0}, "cache_ratio: 0"),
        (one(), {"cache_ratio": 1.5}, "cache_ratio: 1.5"),
        (one(), {"cache": "some"}, "cache: 'some'"),
        (one(), {"layout": "loose"}, "layout: 'loose'"),
        (one(), {"weights": {"u": torch.zeros(9, 4)}}, "no table 'u'"),
        (one(), {"weights": {"t": torch.zeros(8, 4)}}, r"'t' has shape \[8, 4\]"),
        (one(), {"freeze": {"u": True}}, "freeze: there is no table 'u'"),
    ],
)
def test_bad_arguments_are_refused(tables, options, text) -> None:
    with pytest.raises(ArgumentError, match=text):
        CompressedEmbeddingBagCollection(tables, **{"device": "cpu", **options})


@pytest.mark.parametrize(
    ("tables", "options", "text"),
    [
        (["t"], {}, "expected TorchRec's"),
        (one(), {"weights": {"t": [[0.0]]}}, "'t' is list"),
        (one(), {"evict": "lfu"}, "evict"),
    ],
)
def test_arguments_of_other_types_are_refused(tables, options, text) -> None:
    with pytest.raises(ArgumentTypeError, match=text):
        CompressedEmbeddingBagCollection(tables, **{"device": "cpu", **options})


def test_tables_of_a_collection_have_one_width() -> None:
    tables = configs()
    tables[1].embedding_dim = 8
    with pytest.raises(ArgumentError, match="one embedding_dim"):
        CompressedEmbeddingCollection(tables, device="cpu")
