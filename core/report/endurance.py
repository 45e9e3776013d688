"""What `bitslab endurance` prints: the rate that drives need, and how long they last."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from ..activations.disk import disk_rates
from ..activations.disk.endurance import (
    DAY_S,
    DRIVES,
    YEAR_DAYS,
    Drive,
    lifespan_days,
    required_bytes_per_s,
)
from ..activations.layer_sizes import TransformerLayer
from ..errors import ArgumentError

GB, TB, PB = 1e9, 1e12, 1e15


def print_endurance(arguments: argparse.Namespace) -> None:
    """Print what the activations of a training ask of drives, and how long these last."""
    drive = _drive(arguments)
    step_bytes, step_seconds = _step(arguments)
    taken = drive.endurance_bytes(
        write_amplification=arguments.write_amplification,
        relaxed_retention=arguments.relaxed_retention,
    )
    found: dict[str, Any] = {
        "step_bytes": step_bytes,
        "step_seconds": step_seconds,
        "required_bytes_per_s": required_bytes_per_s(step_bytes, step_seconds),
        "bytes_per_day": step_bytes / step_seconds * DAY_S,
        "endurance_bytes": taken,
        "lifespan_days": lifespan_days(taken, step_bytes, step_seconds),
    }
    if arguments.disk is not None:
        rates = disk_rates(arguments.disk, again=True)
        found["write_bytes_per_s"] = rates.write_bytes_per_s
        found["read_bytes_per_s"] = rates.read_bytes_per_s
        found["direct"] = rates.direct
        found["file"] = rates.file
        found["file_reason"] = rates.file_reason
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    for name, text in _lines(arguments, drive, found):
        print(f"{name:<14}{text}")


def _lines(
    arguments: argparse.Namespace, drive: Drive, found: dict[str, Any]
) -> list[tuple[str, str]]:
    rate = found["required_bytes_per_s"]
    lines = []
    if arguments.rate_gbps is None:
        text = f"{_figure(found['step_bytes'] / GB)} GB in a step of {found['step_seconds']:g} s"
        lines.append(("activations", text))
    lines += [
        ("rate", f"{_figure(rate / GB)} GB/s, to write them in half a step"),
        ("a day", f"{_figure(found['bytes_per_day'] / TB)} TB"),
        ("drives", _drive_text(arguments, drive, found["endurance_bytes"])),
        (
            "lifespan",
            f"{_figure(found['lifespan_days'] / YEAR_DAYS, 2)} years "
            f"({_figure(found['lifespan_days'])} days) of training without a pause",
        ),
    ]
    if arguments.disk is not None:
        write = found["write_bytes_per_s"]
        share = min(1.0, write / rate)
        cached = "" if found["direct"] else ", the page cache included"
        text = f"writes {write / GB:.3g} GB/s, reads {found['read_bytes_per_s'] / GB:.3g}{cached}: "
        text += "enough" if share == 1.0 else f"enough for {100 * share:.0f} % of the bytes"
        lines.append(("disk", f"{arguments.disk} {text}"))
        if found["file_reason"]:
            lines.append(("file", f"{found['file']}: {found['file_reason']}"))
    return lines


def _figure(value: float, digits: int = 3) -> str:
    """Return a number with a few digits, and no exponent where it is large."""
    return f"{value:,.0f}" if value >= 10**digits else f"{value:.{digits}g}"


def _drive_text(arguments: argparse.Namespace, drive: Drive, taken: float) -> str:
    if drive.rated_bytes is not None:
        rating = f"{drive.rated_bytes / TB:g} TBW"
    else:
        rating = f"{drive.writes_per_day:g} DWPD for {drive.warranty_years:g} years"
    kept = ", content kept for a day" if arguments.relaxed_retention else ""
    drives = f"{drive.count} x {drive.capacity_bytes / TB:g} TB"
    return f"{drives}, {rating}{kept}: {_figure(taken / PB)} PB"


def _drive(arguments: argparse.Namespace) -> Drive:
    """Return the drives, by name or by their ratings."""
    known = DRIVES.get(arguments.drive)
    if known is None:
        raise ArgumentError(f"--drive: {arguments.drive!r}, accepted are {', '.join(DRIVES)}")
    figures: dict[str, Any] = {"count": arguments.drives}
    if arguments.capacity_tb is not None:
        figures["capacity_bytes"] = arguments.capacity_tb * TB
    if arguments.dwpd is not None and arguments.tbw is not None:
        raise ArgumentError("--dwpd, --tbw: expected one of both")
    if arguments.warranty_years is not None:
        figures["warranty_years"] = arguments.warranty_years
    if arguments.dwpd is not None:
        figures |= {"writes_per_day": arguments.dwpd, "rated_bytes": None}
    if arguments.tbw is not None:
        figures |= {"rated_bytes": arguments.tbw * TB, "writes_per_day": None}
    return dataclasses.replace(known, **figures)


def _step(arguments: argparse.Namespace) -> tuple[float, float]:
    """Return the bytes that a step writes and its seconds, in whatever way they are given."""
    given = [arguments.rate_gbps, arguments.step_gb, arguments.hidden]
    if sum(each is not None for each in given) != 1:
        raise ArgumentError(
            "--rate-gbps, --step-gb, --hidden: expected one of them, which says what is written"
        )
    if arguments.rate_gbps is not None:
        seconds = arguments.step_seconds or 1.0
        return arguments.rate_gbps * GB * seconds / 2, seconds
    if arguments.step_seconds is None:
        raise ArgumentError("--step-seconds: is needed with --step-gb and with --hidden")
    if arguments.step_gb is not None:
        return arguments.step_gb * GB, arguments.step_seconds
    layer = TransformerLayer(
        arguments.hidden,
        arguments.heads or max(1, arguments.hidden // 128),
        kv_heads=arguments.kv_heads,
        intermediate=arguments.intermediate,
        norm=arguments.norm,
        activation=arguments.activation,
        attention=arguments.attention,
        dropout=arguments.dropout,
        attention_dropout=arguments.dropout and arguments.attention == "eager",
    )
    each = layer.saved_bytes(
        arguments.micro_batch,
        arguments.sequence,
        dtype_bytes=arguments.dtype_bytes,
        tensor_parallel=arguments.tensor_parallel,
        sequence_parallel=arguments.sequence_parallel,
    )
    return arguments.layers * arguments.micro_batches * each, arguments.step_seconds
