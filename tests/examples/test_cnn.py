"""CNNs are trained offline with saved tensors kept in every way, with the same losses."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cnn import ways
from cnn.images import load_images
from cnn.models import ACTIVATIONS, MODELS, SIDES, make_model
from cnn.saved import saved_tensors
from cnn.ways import WAYS, Offloaded

from bitslab.activations.policies import Codecs
from tests.helpers import same_bits

TINY = "--images 40 --batch-size 8 --epochs 2 --width 0.05 --min-bytes 256".split()

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def script() -> Any:
    return importlib.import_module("train_cnn_swapped")


#: Parameters for ImageNet's 1,000 classes, and for CIFAR's 10, with the channels as published.
PARAMETERS = {
    "alexnet": (61_100_840, 23_272_266),
    "vgg16": (138_357_544, 14_719_818),
    # Without the biases that batch norm makes useless: torchvision has 4,224 more.
    "vgg16_bn": (138_361_768, 14_724_042),
    "mobilenet": (4_231_976, 3_217_226),
    "plain20": (334_072, 269_722),
    "resnet": (11_689_512, 11_173_962),
    "squeezenet": (1_235_496, 727_626),
}


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_published(name: str) -> None:
    with torch.device("meta"):
        for shape, classes, n in zip(SIDES, (10, 1000), PARAMETERS[name][::-1], strict=True):
            model = make_model(name, shape, classes)
            assert sum(p.numel() for p in model.parameters()) == n
            images = torch.empty(2, 3, SIDES[shape], SIDES[shape])
            activation = list(ACTIVATIONS)[len(name) % len(ACTIVATIONS)]
            narrow = make_model(name, shape, 7, activation, width=0.1)
            assert narrow(images).shape == (2, 7)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "options",
    [["--model", "alexnet"], ["--model", "plain20", "--activation", "elu", "--data", "drawn"]],
    ids=lambda options: str(options[1]),
)
def test_losses_are_equal_in_every_way(
    script: Any,
    train: Any,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    quick_measuring: None,
) -> None:
    status, report = train(script, *TINY, *options)
    assert status == 0 and report["all_equal"] is True
    runs = {run["way"]: run for run in report["runs"]}
    assert list(runs) == list(WAYS)
    plain = runs.pop("plain")
    losses = [epoch["losses"] for epoch in plain["epochs"]]
    assert len(losses[0]) == 4 and losses[0] != losses[1]
    for run in runs.values():
        assert run["losses_equal_first"] is True
        assert [epoch["losses"] for epoch in run["epochs"]] == losses
        assert run["exposed_swap_seconds"] == run["step_seconds"] - plain["step_seconds"]
    for way in ("raw", "static", "host", "auto"):
        assert runs[way]["down_bytes_per_step"] > 0
    assert runs["raw"]["crossed_down_bytes_per_step"] == runs["raw"]["down_bytes_per_step"]
    for way in ("plain", "save_on_cpu", "keep"):
        assert ({"plain": plain} | runs)[way]["down_bytes_per_step"] == 0
    packed = [d for d in runs["static"]["epochs"][0]["decisions"] if d["action"] == "pack"]
    assert packed and all(d["codec"] for d in packed)
    for row in report["sparsity"]:
        assert len(row["zeros"]) == 3 and all(0 <= share <= 1 for share in row["zeros"])
    out = capsys.readouterr().out
    assert "the losses of 8 batches, 7 ways: equal to the last bit" in out


def test_losses_of_lossy_rates_are_not_compared(
    script: Any, train: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "--ways plain lossy --activation leaky_relu --lossy-bits 64 16".split()
    status, report = train(script, *TINY, *given)
    assert status == 0
    plain, lossy = report["runs"]
    assert lossy["lossless"] is False and lossy["losses_equal_first"] is False
    assert 0 < lossy["crossed_down_bytes_per_step"] < 0.6 * lossy["down_bytes_per_step"]
    last = [d for d in lossy["epochs"][1]["decisions"] if d["codec"] == "zfp"]
    assert last and any("P = 40 of 128: sliding" in note for note in lossy["notes"])
    assert plain["epochs"][0]["losses"] != lossy["epochs"][0]["losses"]
    assert "equal to the last bit" not in capsys.readouterr().out


def test_a_loss_that_differs_is_reported(
    script: Any, train: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = Offloaded.begin_epoch

    def begin_epoch(self: Any, number: int) -> None:
        honest(self, number)
        torch.rand(())  # another mask of dropout

    monkeypatch.setattr(Offloaded, "begin_epoch", begin_epoch)
    status, report = train(script, *TINY, "--ways", "plain", "raw")
    assert status == 1 and report["runs"][1]["losses_equal_first"] is False
    assert "2 ways: DIFFERENT" in capsys.readouterr().out


def test_a_peer_that_differs_is_named_and_the_ways_of_bitslab_stand(
    script: Any, train: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ways, "save_on_cpu", SpoilsWhatItSaves)
    status, report = train(script, *TINY, "--ways", "plain", "save_on_cpu", "raw")
    equal = {run["way"]: run["losses_equal_first"] for run in report["runs"]}
    assert status == 0 and equal == {"plain": None, "save_on_cpu": False, "raw": True}
    out = " ".join(capsys.readouterr().out.split())
    assert "2 ways: equal to the last bit; those of torch's save_on_cpu differ" in out


class SpoilsWhatItSaves(torch.autograd.graph.saved_tensors_hooks):
    """As torch's `save_on_cpu`, but what comes back is another tensor where it holds floats."""

    def __init__(self, pin_memory: bool = False) -> None:
        super().__init__(lambda t: t * 2 if t.is_floating_point() else t, lambda t: t)


def test_saved_tensors_are_found_once_and_nothing_changes() -> None:
    images = load_images("drawn", 20, 32, 0, torch.device("cpu"))
    model = make_model("vgg16_bn", "cifar", 10, width=0.05).train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    drawn = torch.get_rng_state()
    x, y = images.batch(images.trained[:8])
    found = saved_tensors(model, x, y)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(same_bits(t, before[name]) for name, t in model.state_dict().items())
    assert len({s.values.data_ptr() for s in found}) == len(found)
    kinds = [s.kind for s in found if s.layer]
    assert kinds.count("activation") == kinds.count("convolution") == 13
    assert kinds.count("pool indices") == 5 and kinds.count("input") == 1
    for s in found:
        if s.kind == "activation":
            zeros = (s.values == 0).sum() / s.values.numel()
            assert s.zeros == pytest.approx(float(zeros), abs=1e-6)
            assert 0.2 < s.zeros < 0.8
        if s.kind == "pool indices":
            assert s.values.dtype == torch.int64


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--batch-size", "900"], "argument --batch-size: 900, but 800 of --images 1000"),
        (["--lossy-bits", "32", "96"], "argument --lossy-bits: lossy: bottom 96 is above top 32"),
        (["--lossy-bits", "96", "8"], "block_bits: 8, accepted are 12 to 128"),
        (["--width", "2"], "argument --width: 2, accepted are numbers above 0 and up to 1"),
        (["--device", "abc"], "argument --device: abc, accepted are cpu and cuda"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_that_are_refused(script: Any, options: list[str], text: str, refused: Any) -> None:
    refused(script.main, ["--device", "cpu", *options], text)


def test_unknown_codec_is_refused(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*TINY, "--device", "cpu", "--ways", "static", "--codecs", "none"]
    assert script.main(options) == 2
    assert "codecs: 'none' is not known" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["alexnet", "resnet"])
def test_losses_are_equal_on_a_gpu(
    script: Any,
    model: str,
    tmp_path: Path,
    quick_measuring: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A thread that has no processor to itself may not be done with its fit in these few steps.
    waiting = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(Codecs, "waits_for_fits", waiting, raising=False)
    json_file = tmp_path / "report.json"
    options = ["--device", "cuda", "--model", model, "--json", str(json_file)]
    assert script.main([*TINY, *options]) == 0
    report = json.loads(json_file.read_text())
    assert report["all_equal"] is True and report["device"] != "cpu"
    runs = {run["way"]: run for run in report["runs"]}
    assert runs["save_on_cpu"]["down_bytes_per_step"] > 0
    for way in ("raw", "static", "host", "auto"):
        assert runs[way]["losses_equal_first"] is True and runs[way]["down_bytes_per_step"] > 0
    static = runs["static"]
    assert 0 < static["crossed_down_bytes_per_step"] < static["down_bytes_per_step"]
