"""`bitslab endurance`: rates and lifespans on the command line."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bitslab import cli
from bitslab.activations import layer_sizes
from bitslab.activations.disk.endurance import DRIVES
from bitslab.activations.layer_sizes import TransformerLayer


def found(capsys: pytest.CaptureFixture[str], arguments: str) -> dict[str, Any]:
    assert cli.main(["endurance", *arguments.split(), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_figures_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main("endurance --rate-gbps 12.1 --drives 4".split()) == 0
    text = capsys.readouterr().out
    assert "4 x 12.8 TB, 3 DWPD for 5 years: 701 PB" in text
    assert re.search(r"^lifespan +3\.7 years \(1,341 days\)", text, re.M)
    relaxed = "--rate-gbps 12.1 --drives 4 --drive 980-pro --relaxed-retention"
    assert cli.main(["endurance", *relaxed.split()]) == 0
    text = capsys.readouterr().out
    assert "4 x 1 TB, 600 TBW, content kept for a day: 516 PB" in text
    assert re.search(r"^lifespan +2\.7 years \(987 days\)", text, re.M)


def test_rate_bytes_and_shape_agree(capsys: pytest.CaptureFixture[str]) -> None:
    layer = TransformerLayer(8192, 64, dropout=True)
    sizes: dict[str, Any] = {"tensor_parallel": 2, "sequence_parallel": True}
    step_bytes = 3 * 4 * 2 * layer.saved_bytes(16, 1024, **sizes) / 2
    shape = found(
        capsys,
        "--hidden 8192 --layers 4 --micro-batch 16 --micro-batches 3 --dropout "
        "--tensor-parallel 2 --sequence-parallel --step-seconds 1.5",
    )
    assert shape["step_bytes"] == pytest.approx(step_bytes)
    gigabytes = found(capsys, f"--step-gb {step_bytes / 1e9!r} --step-seconds 1.5")
    rate = found(capsys, f"--rate-gbps {step_bytes / 1e9 / 0.75!r} --step-seconds 1.5")
    for key, value in shape.items():
        assert gigabytes[key] == pytest.approx(value) == rate[key], key
    assert shape["required_bytes_per_s"] == pytest.approx(step_bytes / 0.75)
    assert shape["bytes_per_day"] == pytest.approx(step_bytes / 1.5 * 86400)


def test_ratings_replace_those_of_the_named_drive(capsys: pytest.CaptureFixture[str]) -> None:
    load = "--rate-gbps 2 "
    plain = found(capsys, load)["endurance_bytes"]
    assert found(capsys, load + "--dwpd 1.5")["endurance_bytes"] == pytest.approx(plain / 2)
    assert found(capsys, load + "--capacity-tb 6.4")["endurance_bytes"] == pytest.approx(plain / 2)
    assert found(capsys, load + "--warranty-years 10")["endurance_bytes"] == 2 * plain
    assert found(capsys, load + "--tbw 1000")["endurance_bytes"] == pytest.approx(2.5e15)
    assert found(capsys, load + "--write-amplification 2")["endurance_bytes"] == plain / 2
    assert found(capsys, load + "--drive 980-pro --dwpd 1")["endurance_bytes"] == pytest.approx(
        2.5 * 1e12 * 365 * 5
    )


def test_disk_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BITSLAB_CACHE", "/dev/null/none")
    assert cli.main(["endurance", "--rate-gbps", "1e6", "--disk", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert re.search(
        rf"^disk +{tmp_path} writes [\d.]+ GB/s, reads [\d.]+.*enough for 0 %", text, re.M
    )
    assert re.search(r"^file +(posix|kvikio): .*kvikio", text, re.M)  # which, and why
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "--rate-gbps, --step-gb, --hidden: expected one of them"),
        ("--rate-gbps 1 --step-gb 1 --step-seconds 1", "expected one of them"),
        ("--step-gb 85", "--step-seconds: is needed with --step-gb and with --hidden"),
        ("--rate-gbps 1 --drive floppy", "'floppy', accepted are d7-p5620, 980-pro"),
        ("--rate-gbps 1 --dwpd 1 --tbw 1", "--dwpd, --tbw: expected one of both"),
        ("--rate-gbps 1 --disk /nowhere", "disk: /nowhere: No such file or directory"),
    ],
)
def test_wrong_usage_is_named(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["endurance", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


@pytest.mark.parametrize("arguments", ["--drives 0", "--layers 1.5", "--rate-gbps -1"])
def test_numbers_are_checked_by_the_parser(arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["endurance", "--rate-gbps", "1", *arguments.split()])
    assert caught.value.code == 2


def test_choices_and_help_are_those_of_the_shape() -> None:
    (commands,) = (
        action.choices
        for action in cli.build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    choices = {action.dest: action.choices for action in commands["endurance"]._actions}
    assert choices["norm"] == layer_sizes.NORMS
    assert choices["activation"] == tuple(layer_sizes.MLP_TENSORS)
    assert choices["attention"] == layer_sizes.ATTENTIONS
    assert all(name in commands["endurance"].format_help() for name in DRIVES)
