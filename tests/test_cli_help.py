"""What the `bitslab` command says before any work: help, version, what is missing."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

import bitslab
from bitslab import cli
from tests.forked import run_forked
from tests.test_cli import model, run

__all__ = ["model"]


@pytest.mark.parametrize(
    ("hidden", "arguments", "message"),
    [
        ("rich", ["inspect", "{model}"], "pip install rich"),
        ("safetensors", ["inspect", "{model}"], "pip install safetensors"),
        ("numba", ["inspect", "{model}"], "pip install numba"),
        ("matplotlib", ["inspect", "{model}", "--plot", "p.png"], 'install "bitslab[report]"'),
    ],
    ids=["rich", "safetensors", "numba", "matplotlib"],
)
def test_missing_package_is_named(
    hidden: str, arguments: list[str], message: str, model: Path, tmp_path: Path
) -> None:
    code = (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] == {hidden!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        f"for name in [name for name in sys.modules if name.split('.')[0] == {hidden!r}]:\n"
        "    del sys.modules[name]\n"
        "from bitslab import cli\n"
        # The process that this one is forked from may have planned something with Numba.
        "from bitslab.engine.kernels.cpu import loading\n"
        "for load in vars(loading).values():\n"
        "    getattr(load, 'cache_clear', lambda: None)()\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    given = [a.format(model=model) for a in arguments]
    done = run_forked(["-c", code, *given], cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


# Help


@pytest.mark.parametrize("command", ["", "inspect", "compress", "decompress", "endurance"])
def test_help_teaches_by_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*command.split(), "--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "examples:\n  bitslab " in text
    assert f"usage: bitslab {command}".rstrip() in text


def test_examples_of_the_help_are_accepted_by_the_parser() -> None:
    parser = cli.build_parser()
    epilogs = [
        *(cli.EPILOG, cli.INSPECT_EPILOG, cli.COMPRESS_EPILOG, cli.DECOMPRESS_EPILOG),
        cli.ENDURANCE_EPILOG,
    ]
    examples = [
        line.split("  ")[1].split(" | ")[0].split()
        for epilog in epilogs
        for line in epilog.replace("\n      --", " --").splitlines()
        if line.startswith("  bitslab ")
    ]
    assert len(examples) > 10
    for example in examples:
        with contextlib.redirect_stderr(io.StringIO()):
            parser.parse_args(example[1:])


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"bitslab {bitslab.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [["inspect", "{m}", "--plot", "{t}/no/p.png"], ["compress", "{m}", "{t}/no/x.bitslab"]],
    ids=["plot", "compress"],
)
def test_missing_output_folder_is_reported_before_the_work(
    arguments: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [a.format(m=model, t=tmp_path) for a in arguments]
    assert cli.main(given) == 2
    assert "does not exist" in capsys.readouterr().err
