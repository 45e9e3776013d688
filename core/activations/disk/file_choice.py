"""Which file a folder gets, the system's calls or kvikio's: both are timed, the faster is taken.

kvikio is timed in a process of its own, which is ended when it takes too long: what its import and
its threads do is none of this process's business unless it is chosen.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ...errors import BitslabError
from .kvikio_file import KvikioFile, why_unusable
from .posix_file import PosixFile
from .rates import CLOSE_ENOUGH, SECONDS, DiskRates, measure_files, measure_rates
from .tensor_file import DiskError, TensorFile

#: How long the other process may take: to import torch and kvikio, and to measure both files.
PROCESS_SECONDS = 60 + 2 * SECONDS
_MEASURE = "from bitslab.activations.disk import file_choice; file_choice.print_rates()"


def measure_and_choose(folder: str | os.PathLike[str], **options: Any) -> DiskRates:
    """Measure what a folder's device carries, with the file that carries more.

    Parameters
    ----------
    folder : str or os.PathLike
        A folder that can be written to.
    **options
        As for `measure_rates`, for each file.

    Raises
    ------
    DiskError
        When the folder cannot be written to, or has no space for a few requests.
    """
    why = why_unusable() or _why_not_direct(folder)
    if why is None:
        found = _measure_both(folder, options)
        if not isinstance(found, str):
            return faster(*found)
        why = found
    return dataclasses.replace(measure_rates(folder, **options), file_reason=why)


def faster(posix: DiskRates, kvikio: DiskRates) -> DiskRates:
    """Return the rates of the file that is taken, with those of both.

    kvikio's is taken where bytes that are written and read again take it at most 95 % of the time:
    what is as fast is no reason to load it.
    """
    ours, its = posix.own, kvikio.own
    taken = kvikio if its.seconds_per_byte <= CLOSE_ENOUGH * ours.seconds_per_byte else posix
    reason = (
        f"a GB written and read again takes kvikio {its.seconds_per_byte * 1e9:.3g} s and POSIX "
        f"calls {ours.seconds_per_byte * 1e9:.3g} s"
    )
    return dataclasses.replace(taken, files=(ours, its), file_reason=reason)


def open_measured(folder: str, rates: DiskRates) -> tuple[TensorFile, str]:
    """Open the file that was chosen for a folder, or the system's; return it, and why that one.

    Raises
    ------
    DiskError
        When the folder cannot be written to.
    """
    if rates.file != "kvikio":
        return PosixFile(folder), rates.file_reason
    try:
        return KvikioFile(folder), rates.file_reason
    except DiskError as error:
        return PosixFile(folder), str(error)


def _why_not_direct(folder: str | os.PathLike[str]) -> str | None:
    file = PosixFile(folder)
    file.close()
    if file.direct:
        return None
    return f"{os.fspath(folder)} takes no O_DIRECT, without which kvikio's calls are the same"


def _measure_both(
    folder: str | os.PathLike[str], options: Mapping[str, Any]
) -> tuple[DiskRates, DiskRates] | str:
    """Return the rates of both files, or why there are none of kvikio's."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, os.path.abspath(folder), json.dumps(options)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROCESS_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"kvikio was not measured in {PROCESS_SECONDS:g} s"
    except OSError as error:
        return f"kvikio was not measured: {sys.executable} cannot be run: {error.strerror}"
    if done.returncode:
        if done.returncode < 0:
            return f"kvikio was not measured: its process ended by signal {-done.returncode}"
        return f"kvikio was not measured: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
    try:
        posix, kvikio = map(DiskRates.from_json, json.loads(done.stdout.splitlines()[-1]))
    except (LookupError, TypeError, ValueError) as error:
        return f"kvikio was not measured: its process printed something else: {error}"
    return posix, kvikio


def print_rates() -> None:
    """Print the rates of both files in a folder; that and options are the process's arguments."""
    _, folder, options = sys.argv
    try:
        rates = measure_files(folder, (PosixFile, KvikioFile), **json.loads(options))
    except BitslabError as error:
        sys.exit(str(error))
    print(json.dumps([dataclasses.asdict(each) for each in rates]), flush=True)
