"""What the examples share: options and their checks, JSON, seeds, the switches of torch."""

from __future__ import annotations

import argparse
import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from common.arguments import add_device, add_json, add_plot, add_seed, checked_device
from common.report import OUTPUT, describe, same_bits, write_json
from common.reproducible import drawn_seed, reproducible

OPTION_MODULES = {
    "cnn.options": (),
    "lm.options": (),
    "textgen.options": (),
    "graphsage.options": ("script.py", "line"),
}


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="script.py")
    for add in (add_device, add_seed, add_json):
        add(parser)
    add_plot(parser, "results to this file, such as it.png")
    return parser


def test_options_that_are_left_out_are_the_defaults(parser: argparse.ArgumentParser) -> None:
    assert vars(parser.parse_args([])) == {"device": None, "seed": 0, "json": None, "plot": None}
    assert parser.parse_args(["--json", "-"]).json == OUTPUT


@pytest.mark.parametrize(
    "option", ["--seed -1", "--json /nowhere/x.json", "--json /", "--plot x.nonsense"]
)
def test_an_option_that_cannot_be_meant_is_refused(
    parser: argparse.ArgumentParser, option: str, refused: Any
) -> None:
    refused(parser.parse_args, option.split(), f"argument {option.split()[0]}: ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tpu", "tpu, accepted are cpu and cuda"),
        ("meta", "meta, accepted are cpu and cuda"),
        ("cuda:99", "cuda:99, but torch sees"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    parser: argparse.ArgumentParser, name: str, text: str, refused: Any
) -> None:
    refused(partial(checked_device, parser), name, f"argument --device: {text}")


def test_a_gpu_gets_its_number(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert checked_device(parser, "cuda") == torch.device("cuda", 0)
    assert describe(checked_device(parser, "cuda:1")) == "cuda:1 (Some GPU)"
    assert describe(checked_device(parser, "cpu")) == "cpu"


@pytest.mark.parametrize("name", OPTION_MODULES)
def test_scripts_describe_the_shared_options_alike(
    parser: argparse.ArgumentParser, name: str
) -> None:
    module = importlib.import_module(name)
    made = module.make_parser("What it does.", *OPTION_MODULES[name])
    for option in ("--device", "--seed", "--json"):
        wanted, came = (p._option_string_actions[option] for p in (parser, made))
        assert (came.help, came.type, came.default) == (wanted.help, wanted.type, wanted.default)


class Result:
    def as_dict(self) -> dict[str, Any]:
        return {"loss": float("nan"), "losses": [1.0, float("inf")]}


def test_json_has_null_for_what_it_cannot_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    write_json(file, {"seed": 3}, [Result()])
    assert json.loads(file.read_text()) == {
        "seed": 3,
        "runs": [{"loss": None, "losses": [1.0, None]}],
    }
    write_json(OUTPUT, {"seed": 3}, [Result()])
    assert capsys.readouterr().out == file.read_text()


def test_losses_are_compared_to_the_last_bit() -> None:
    nan = float("nan")
    assert same_bits([0.1, nan], [0.1, nan])
    assert not same_bits([0.0], [-0.0])
    assert not same_bits([0.3], [0.1 + 0.2])


def test_seeds_are_mixed() -> None:
    seeds = {drawn_seed(a, b, c) for a in range(5) for b in range(5) for c in range(5)}
    assert len(seeds) == 125
    assert all(0 <= seed < 1 << 31 for seed in seeds)


def settings() -> tuple[Any, ...]:
    deterministic: Any = torch.utils.deterministic
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
    )


@pytest.mark.parametrize("before", [False, True])
def test_what_reproducible_sets_is_as_it_was_afterwards(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of it needs a GPU: these are switches of the process."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    torch.use_deterministic_algorithms(before, warn_only=before)
    try:
        found = settings()
        with pytest.raises(KeyError), reproducible(torch.device("cuda", 0)):
            assert settings() == (True, False, False, False)
            raise KeyError
        assert settings() == found
        with reproducible(torch.device("cpu")):
            assert settings() == found
    finally:
        torch.use_deterministic_algorithms(False)
