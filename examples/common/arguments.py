"""Options that several examples take, and their checks."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is a GPU)")


def add_seed(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add `--seed` to a parser or a group of its arguments."""
    parser.add_argument(
        "--seed", type=from_zero, default=0, help="of all that is drawn (default: %(default)s)"
    )


def add_plot(parser: argparse.ArgumentParser, drawn: str) -> None:
    """Add `--plot`; `drawn` says what is drawn, and how, such as "losses to this file"."""
    parser.add_argument("--plot", type=picture, metavar="FILE", help=f"draw {drawn}")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=new_file,
        metavar="FILE",
        help="write all of it as JSON, to a file or - for the output",
    )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}, accepted are numbers from 1 on")
    return number


def from_zero(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number}, accepted are numbers from 0 on")
    return number


def above_zero(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}, accepted are numbers above 0")
    return number


def share(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text}, accepted are numbers above 0 and up to 1")
    return number


def from_zero_to_one(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text}, accepted are numbers from 0 to 1")
    return number


def new_file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: {path.parent} is no folder")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, a file is wanted")
    return path


def picture(text: str) -> Path:
    """Check before hours of training that it can be drawn afterwards."""
    path = new_file(text)
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise argparse.ArgumentTypeError(
            f'drawing needs matplotlib ({error}); pip install "bitslab[report]"'
        ) from error
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise argparse.ArgumentTypeError(f"{text}: accepted are names in .{', .'.join(known)}")
    return path


def device_named(parser: argparse.ArgumentParser, name: str | None) -> torch.device:
    """Return a CPU or GPU by name, a GPU where there is one when left out; it may not be there."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        parser.error(f"argument --device: {name}, accepted are cpu and cuda")
    if device.type not in ("cpu", "cuda"):
        parser.error(f"argument --device: {name}, accepted are cpu and cuda")
    return device


def checked_device(parser: argparse.ArgumentParser, name: str | None) -> torch.device:
    """Return the CPU, or a GPU that is there, with its number; refuse all else."""
    device = device_named(parser, name)
    if device.type == "cpu":
        return device
    index = device.index or 0
    if index >= torch.cuda.device_count():
        parser.error(
            f"argument --device: {name}, but torch sees {torch.cuda.device_count()} CUDA GPUs"
        )
    return torch.device("cuda", index)
