"""Measuring codecs on synthetic tensors: what is made, measured, kept and stopped in time."""

from __future__ import annotations

import json
import math
from typing import Any, cast

import pytest
import torch

from bitslab import ArgumentError, ArgumentTypeError
from bitslab.engine.advisor import CodecTimes, SyntheticTensors, fit_time_model, measure_codec
from bitslab.engine.advisor import measuring as measuring_module
from bitslab.engine.advisor.measuring import fewest_multiprocessors
from bitslab.engine.codecs import ChainCodec, InvariantBlobCodec
from tests.engine.advisor.small_codecs import MaskCodec, TopBytesCodec

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Measure small tensors in little time, and keep the figures here."""
    monkeypatch.setenv("BITSLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring_module, "_known", {})
    monkeypatch.setattr(measuring_module, "MIN_BYTES", {"cpu": 4 << 10})
    monkeypatch.setattr(measuring_module, "PILOT_BYTES", {"cpu": 64 << 10})
    monkeypatch.setattr(measuring_module, "MAX_BYTES", {"cpu": 256 << 10})
    monkeypatch.setattr(measuring_module, "SAMPLES", 12)
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch):
    """Collect what is measured: codec, tensor."""
    real, calls = measuring_module._Task._sample, []

    def collected(task, codec, t, sm_budget):
        calls.append((codec.name if codec is MaskCodec else codec.describe(), t))
        return real(task, codec, t, sm_budget)

    monkeypatch.setattr(measuring_module._Task, "_sample", collected)
    return calls


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int64, torch.bool],
)
@pytest.mark.parametrize("sparsity", [0.0, 0.2, 0.8, 1.0])
def test_synthetic_tensors(dtype: torch.dtype, sparsity: float) -> None:
    tensors = SyntheticTensors(dtype, 400_000, CPU)
    t = tensors.make(tensors.max_bytes, sparsity)
    assert t.dtype == dtype and t.nbytes == 400_000 and t.is_contiguous()
    zero = t.double() == 0
    assert zero.double().mean().item() == pytest.approx(sparsity, abs=0.03)
    if 0 < sparsity < 1:  # in runs: neighbours are more often zero than others
        both = (zero[1:] & zero[:-1]).double().mean().item()
        assert both > 1.1 * sparsity**2
    assert torch.isfinite(t.double()).all() and (t.double() >= 0).all()


def test_each_tensor_is_another_and_a_seed_makes_them_again() -> None:
    tensors, again = (SyntheticTensors(torch.float32, 4000, CPU, seed=5) for _ in range(2))
    first, second = (tensors.make(1000, 0.5) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(again.make(1000, 0.5), first)
    assert not torch.equal(SyntheticTensors(torch.float32, 4000, CPU).make(1000, 0.5), first)
    assert tensors.make(4, 0.5).shape == (1,)


def test_everything_is_covered(measured) -> None:
    model = fit_time_model("cpu", [MaskCodec], cache=False)
    assert set(model.codecs) == {("mask", 4), ("mask", 2)}
    tensors = [t for _, t in measured if t.dtype == torch.float32][2:]  # the pilots come first
    assert len(tensors) == model.codecs["mask", 4].n_samples == 12
    sparsity = [(t == 0).double().mean().item() for t in tensors]
    assert min(sparsity) < 0.35 and max(sparsity) > 0.65
    sizes = [t.nbytes for t in tensors]
    assert min(sizes) < 12 << 10 and max(sizes) > 100 << 10
    encode_s, decode_s = model.predict("mask", 100 << 10, 0.6)
    assert encode_s > 0 and decode_s > 0
    low, high = model.codecs["mask", 4].share_edges[0], model.codecs["mask", 4].share_edges[-1]
    # A byte of mask for each of four, and what is not zero.
    assert 0.4 < low < 0.65 < 0.85 < high < 1.1


@pytest.mark.drawn(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_codecs_that_take_what_they_were_fitted_to_are_measured(dtype: torch.dtype) -> None:
    model = fit_time_model("cpu", [InvariantBlobCodec, ChainCodec], dtypes=[dtype], cache=False)
    size = dtype.itemsize
    assert set(model.codecs) == {("ibp-blob", size), ("zvc+ibp", size)}


def test_lossy_codecs_of_all_rates_make_one_model_of_dense_tensors(measured) -> None:
    codecs = [TopBytesCodec(n) for n in (1, 2, 3, 4)]
    model = fit_time_model("cpu", codecs, cache=False)
    assert set(model.codecs) == {("top", 4)}, "it takes no bfloat16"
    times = model.codecs["top", 4]
    assert times.share_edges[0] == pytest.approx(0.25, abs=0.02)
    assert times.share_edges[-1] == pytest.approx(1.0, abs=0.02)
    assert {name for name, _ in measured} == {f"top {n}" for n in (1, 2, 3, 4)}
    assert all((t != 0).all() for _, t in measured[8:])


def test_measured_once_and_kept_for_the_next_process(folder, measured, monkeypatch) -> None:
    first = fit_time_model("cpu", [MaskCodec])
    n = len(measured)
    assert fit_time_model("cpu", [MaskCodec]).codecs == first.codecs
    measuring_module._known.clear()  # as in another process
    again = fit_time_model("cpu", [MaskCodec])
    assert again.codecs == first.codecs and len(measured) == n
    assert len(list(folder.iterdir())) == 2
    # Another codec is measured alone, as another version is.
    both = fit_time_model("cpu", [MaskCodec, TopBytesCodec(2)])
    assert {name for name, _ in measured[n:]} == {"top 2"}
    assert both.codecs["mask", 4] == first.codecs["mask", 4]
    n = len(measured)
    monkeypatch.setattr(measuring_module, "__version__", "0.0.0")
    fit_time_model("cpu", [MaskCodec], dtypes=[torch.float32])
    assert len(measured) > n


@pytest.mark.drawn(2)
@pytest.mark.parametrize("damage", [b"", b"{}", "lines", "key"])
def test_a_damaged_file_is_measured_again(folder, measured, damage) -> None:
    first = fit_time_model("cpu", [MaskCodec], dtypes=[torch.float32])
    (path,) = folder.iterdir()
    kept = json.loads(path.read_text())
    if damage == "lines":
        kept["times"]["encode"] = kept["times"]["encode"][:0]
    elif damage == "key":
        kept["key"] = "another"
    path.write_bytes(damage if isinstance(damage, bytes) else json.dumps(kept).encode())
    n = len(measured)
    measuring_module._known.clear()
    again = fit_time_model("cpu", [MaskCodec], dtypes=[torch.float32])
    assert len(measured) > n
    kept_again = json.loads(path.read_text())["times"]
    assert CodecTimes.from_config(kept_again) == again.codecs["mask", 4]
    assert again.codecs.keys() == first.codecs.keys()


def test_without_the_cache(folder, measured) -> None:
    fit_time_model("cpu", [MaskCodec], dtypes=[torch.float32], cache=False)
    assert not folder.exists()


def test_progress_reaches_the_total_and_time_is_kept(monkeypatch) -> None:
    calls: list[tuple[int, Any]] = []
    monkeypatch.setattr(measuring_module, "SAMPLES", 100_000)
    model = fit_time_model(
        "cpu",
        [MaskCodec],
        budget_s=0.4,
        progress=lambda done, total: calls.append((done, total)),
        cache=False,
    )
    assert calls[-1] == (200_000, 200_000)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    for times in model.codecs.values():
        assert measuring_module.LEAST_SAMPLES <= times.n_samples < 100_000, "the time was not kept"


def test_samples_alone() -> None:
    samples, sm_budget = measure_codec("cpu", [MaskCodec.fit(torch.ones(1))], torch.float32)
    assert len(samples) == 60 and sm_budget is None
    assert all(sample.encode_s > 0 and 0.3 < sample.share < 1.2 for sample in samples)


@pytest.mark.parametrize("needed", [1, 10, 33, 132])
def test_the_fewest_multiprocessors(needed: int) -> None:
    tried: list[int] = []

    def seconds(multiprocessors: int) -> float:
        tried.append(multiprocessors)
        return 1e-3 * max(1.0, needed / multiprocessors)

    found = fewest_multiprocessors(seconds, 132)
    assert seconds(found) <= 1.1e-3
    assert found <= needed + 132 // 16
    assert len(tried) <= 10


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            lambda: fit_time_model("cpu", [cast(Any, torch.nn.ReLU())]),
            ArgumentTypeError,
            "codecs: expected c",
        ),
        (lambda: fit_time_model("cpu", [], budget_s=0), ArgumentError, "budget_s: 0, accepted"),
        (lambda: fit_time_model("cpu", [], budget_s=math.inf), ArgumentError, "budget_s: inf"),
        (
            lambda: fit_time_model("cpu", [], dtypes=[torch.bfloat16, torch.float16]),
            ArgumentError,
            "dtypes: elements of [2, 2] B, expected one dtype for each size",
        ),
        (lambda: measure_codec("cpu", [], torch.float32), ArgumentError, "codecs: [], expected"),
        (
            lambda: measure_codec("cpu", [TopBytesCodec(2)], torch.bfloat16),
            ArgumentError,
            "codecs: ['top'], expected one that takes torch.bfloat16 on cpu",
        ),
        (
            lambda: SyntheticTensors(torch.complex64, 100, CPU),
            ArgumentTypeError,
            "dtype: torch.complex64, accepted are real numbers and bool",
        ),
        (lambda: SyntheticTensors(torch.float32, 3, CPU), ArgumentError, "max_bytes: 3"),
        (
            lambda: SyntheticTensors(torch.float32, 400, CPU).make(404, 0.5),
            ArgumentError,
            "nbytes: 404, accepted are 4 to 400",
        ),
        (
            lambda: SyntheticTensors(torch.float32, 400, CPU).make(40, 1.5),
            ArgumentError,
            "sparsity: 1.5",
        ),
    ],
)
def test_bad_arguments(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        wrong()
    assert message in str(caught.value)
