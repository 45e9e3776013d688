"""Arguments that several examples take, checked alike."""

from __future__ import annotations

import argparse

import torch


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}, accepted are numbers from 1 on")
    return number


def share(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text}, accepted are numbers above 0 and up to 1")
    return number


def device_named(parser: argparse.ArgumentParser, name: str | None) -> torch.device:
    """Return a CPU or GPU by name, a GPU where there is one when left out; it may not be there."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        parser.error(f"argument --device: {name}, accepted are cpu and cuda")
    if device.type not in ("cpu", "cuda"):
        parser.error(f"argument --device: {name}, accepted are cpu and cuda")
    return device
