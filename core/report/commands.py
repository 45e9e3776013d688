"""What the commands of `bitslab` do, each with its parsed arguments."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ..compressed import AnyCompressed, read_file
from ..container import is_compressed
from ..container_parts import PartCheck
from ..devices import checked_device, device_or_default
from ..dtypes import flat_bytes
from ..engine.codecs.registry import get_codec
from ..engine.files.new_file import NewFile
from ..engine.progress import Progress
from ..errors import ArgumentError, BitslabError, CorruptedDataError, load_optional
from ..options import (
    PLOT_EXTENSIONS,
    READABLE,
    SAFETENSORS,
    WRITABLE,
    checked_extension,
    note,
)
from .files import read_tensors, write_tensors
from .pack_file import PASSES, FilePacker
from .unpack_file import Unpacked, each_unpacked, unpacked_tensors, write_plain
from .workers import Workers

T = TypeVar("T", bound=torch.Tensor | AnyCompressed)

#: Work on fewer bytes than this is over before a progress bar is read.
LONG_WORK_BYTES = 64 << 20
#: Width of a table that goes to a file or a program.
PLAIN_WIDTH = 160


def inspect(arguments: argparse.Namespace) -> None:
    """Print what compressing the tensors of files would save, and draw it if that is asked for."""
    from . import Link, as_json, build_table, inspect_tensor

    if arguments.codecs:
        _inspect_codecs(arguments)
        return
    options = _codec_options(arguments)
    plot_format = ""
    if arguments.plot:
        plot_format = checked_extension(arguments.plot, PLOT_EXTENSIONS)[1:]
        _check_output(arguments.plot, arguments.files, arguments.force)
        load_optional("matplotlib", extra="report", purpose="--plot")
    link = Link(arguments.link_gbps, arguments.decode_gbps)
    reports, files = [], []
    for path in arguments.files:
        if (arguments.codec != "auto" or options) and _holds_compressed(path):
            raise ArgumentError(
                f"{path}: is compressed already; --codec and --clusters are for plain tensors"
            )
        tensors: Mapping[str, torch.Tensor | AnyCompressed] = (
            read_file(path).tensors if _is_compressed(path) else _read_plain(path)[0]
        )
        prefix = f"{Path(path).name}: " if len(arguments.files) > 1 and not arguments.json else ""
        for name, t in _with_progress(f"inspecting {path}", tensors):
            with _naming(path, name):
                reports.append(inspect_tensor(prefix + name, t, arguments.codec, link, **options))
            files.append(path)
    if arguments.plot:
        from . import save_plot

        image = io.BytesIO()  # first, so that a failure leaves nothing
        save_plot(reports, image, plot_format)
        with NewFile(arguments.plot) as arguments.new:
            arguments.new.temporary.write_bytes(image.getvalue())
        note(f"{arguments.plot}: drawn, {_counted(len(reports))}")
    if arguments.json:
        content = as_json(reports, link)
        for entry, path in zip(content["tensors"], files, strict=True):
            entry["file"] = path
        print(json.dumps(content, indent=2))
        return
    _print_table(lambda: build_table(reports, link))


def _print_table(make: Callable[[], Any]) -> None:
    load_optional("rich", extra=None, purpose="printing a table")
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    Console(file=sys.stdout, width=width).print(make())


def _inspect_codecs(arguments: argparse.Namespace) -> None:
    """Print what each codec of whole tensors makes of the tensors of files."""
    from . import CodecInspector, Link, codecs_json, codecs_table

    given = {"--plot": arguments.plot, "--clusters": arguments.clusters}
    given["--codec"] = None if arguments.codec == "auto" else arguments.codec
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise ArgumentError(f"--codecs: tries every codec; leave out {' and '.join(wrong)}")
    device = device_or_default("cuda" if _gpu_is_there() else "cpu")
    inspector = CodecInspector(device, Link(arguments.link_gbps, arguments.decode_gbps))
    reports, files = [], []
    for path in arguments.files:
        tensors: Mapping[str, torch.Tensor | AnyCompressed] = (
            read_file(path).tensors if _is_compressed(path) else _read_plain(path)[0]
        )
        prefix = f"{Path(path).name}: " if len(arguments.files) > 1 and not arguments.json else ""
        for name, t in _with_progress(f"inspecting {path}", tensors):
            with _naming(path, name):
                plain = t if isinstance(t, torch.Tensor) else t.decompress()
                reports.append(inspector.inspect(prefix + name, plain))
            files.append(path)
    if not arguments.json:
        _print_table(lambda: codecs_table(reports, inspector))
        return
    content = codecs_json(reports, inspector)
    for entry, path in zip(content["tensors"], files, strict=True):
        entry["file"] = path
    print(json.dumps(content, indent=2))


def pack(arguments: argparse.Namespace) -> None:
    """Write the compressed form of a file."""
    checked_extension(arguments.output, SAFETENSORS)
    _check_output(arguments.output, [arguments.input], arguments.force)
    options = _codec_options(arguments)
    if _holds_compressed(arguments.input):
        raise ArgumentError(f"{arguments.input}: is compressed by bitslab already")
    if arguments.verify and arguments.codec != "auto":
        bound = get_codec(arguments.codec).error_bound
        if bound is not None:
            raise ArgumentError(f"--verify: codec {arguments.codec!r} is lossy, no bits to compare")
    with Workers(_device(arguments)) as workers, contextlib.ExitStack() as output:
        tensors, metadata = _read_plain(arguments.input)
        # Not `nbytes`, which sparse tensors do not have.
        raw_bytes = sum(t.numel() * t.dtype.itemsize for t in tensors.values())
        title, total = f"compressing {arguments.input}", PASSES * raw_bytes
        with Progress(title, total, None) as progress:
            packer = FilePacker(
                tensors,
                arguments.codec,
                options,
                workers,
                lambda name: _naming(arguments.input, name),
                progress,
            )
            packer.measure()
            arguments.new = output.enter_context(NewFile(arguments.output))
            output.enter_context(_naming_output(arguments.new))
            packer.write(arguments.new.temporary, metadata)
        if arguments.verify:
            written = read_file(arguments.new.temporary, workers.map).tensors
            _verify_packed(arguments.output, tensors, written, workers)
    packed_bytes = sum(outline.nbytes for outline in packer.outlines.values())
    ratio = raw_bytes / packed_bytes if packed_bytes else 1.0
    figures = f"{raw_bytes / 1e6:,.2f} MB -> {packed_bytes / 1e6:,.2f} MB ({ratio:.2f}x)"
    _say_done(arguments, len(tensors), figures)


def restore(arguments: argparse.Namespace) -> None:
    """Write the plain form of a compressed file."""
    extension = checked_extension(arguments.output, WRITABLE)
    _check_output(arguments.output, [arguments.input], arguments.force)
    with Workers(_device(arguments)) as workers:
        checks: dict[str, list[PartCheck]] = {}
        content = read_file(arguments.input, workers.map, checks)
        if content.metadata and extension != ".safetensors":
            note(f"{arguments.output}: {extension} has no place for the metadata, it is left out")
        raw_bytes = sum(ct.raw_nbytes for ct in content.tensors.values())
        title = f"decompressing {arguments.input}"
        with NewFile(arguments.output) as arguments.new, _naming_output(arguments.new):
            temporary = arguments.new.temporary
            try:
                with Progress(title, raw_bytes, None) as progress:
                    if extension == ".safetensors":
                        write_plain(temporary, content, checks, workers, progress)
                    else:
                        tensors = unpacked_tensors(content.tensors, checks, workers, progress)
                        write_tensors(tensors, temporary, extension)
            except ArgumentError as error:
                raise ArgumentError(f"{arguments.output}: {error}") from error
            if arguments.verify:
                written = read_tensors(temporary, extension).tensors
                if extension == ".npy":
                    written = dict(zip(content.tensors, written.values(), strict=True))
                _verify_packed(arguments.output, written, content.tensors, workers)
    _say_done(arguments, len(content.tensors), f"{raw_bytes / 1e6:,.2f} MB")


def endurance(arguments: argparse.Namespace) -> None:
    """Print what the activations of a training ask of drives, and how long these last."""
    from .endurance import print_endurance

    print_endurance(arguments)


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "endurance": endurance,
    "inspect": inspect,
    "compress": pack,
    "decompress": restore,
}


# Their parts


def _codec_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options for `compress`, and refuse a codec that does not exist."""
    if arguments.codec != "auto":
        get_codec(arguments.codec)
    return {} if arguments.clusters is None else {"clusters": arguments.clusters}


def _holds_compressed(path: str) -> bool:
    """Return whether a file is a compressed one by what is in it."""
    return checked_extension(path, READABLE) in SAFETENSORS and is_compressed(path)


def _is_compressed(path: str) -> bool:
    # What is named as bitslab's own is held to that: damaged, it is not an unreadable input.
    named = checked_extension(path, READABLE) == ".bitslab" and os.path.exists(path)
    return named or _holds_compressed(path)


def _read_plain(path: str) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    """Return the tensors of a file and its metadata; say what is left out."""
    content = read_tensors(path)
    for what in content.left_out:
        note(f"{path}: left out, because it is no tensor: {what}")
    if not content.tensors:
        raise ArgumentError(f"{path}: holds no tensors")
    return content.tensors, content.metadata


@contextlib.contextmanager
def _naming(path: str, name: str) -> Iterator[None]:
    """Put the file and the tensor before the message of an error about an argument."""
    try:
        yield
    except (BitslabError, TypeError) as error:
        if isinstance(error, CorruptedDataError):
            raise
        raise ArgumentError(f"{path}: {name}: {error}") from error


def _check_output(target: str, sources: Iterable[str], force: bool) -> None:
    """Refuse an output that cannot be written or may not be replaced: before the work, not after.

    Raises
    ------
    ArgumentError
        When it is an input, or exists and `force` is False, or its folder does not exist.
    OSError
        When its folder cannot be written to.
    """
    for source in sources:
        _refuse_same(source, target)
    folder = Path(os.path.realpath(target)).parent
    if not folder.is_dir():
        raise ArgumentError(f"{target}: the folder {folder} does not exist")
    if Path(target).is_dir():
        raise ArgumentError(f"{target}: is a folder, expected the name of a file")
    if os.path.exists(target) and not force:
        raise ArgumentError(f"{target}: exists already; --force replaces it")
    NewFile(target).close()


def _refuse_same(source: str, target: str) -> None:
    same = os.path.realpath(source) == os.path.realpath(target)
    if not same and os.path.exists(source) and os.path.exists(target):
        same = os.path.samefile(source, target)
    if same:
        raise ArgumentError(f"{target}: would overwrite the input")


@contextlib.contextmanager
def _naming_output(new: NewFile) -> Iterator[None]:
    """Make errors name the output, not the temporary file that is read again."""
    try:
        yield
    except BitslabError as error:
        text = str(error).replace(str(new.temporary), new.requested)
        raise type(error)(text) from error


def _verify_packed(
    path: str,
    plain: Mapping[str, torch.Tensor],
    packed: Mapping[str, AnyCompressed],
    workers: Workers,
) -> None:
    """Compare packed tensors with plain ones, bit for bit."""
    for name in plain.keys() | packed.keys():
        if name not in plain or name not in packed:
            raise CorruptedDataError(f"{path}: verification failed: {name!r} is in one of the two")
    data = {name: flat_bytes(t) for name, t in plain.items()}

    def differs(name: str) -> CorruptedDataError:
        return CorruptedDataError(f"{path}: verification failed: {name} is not what it was")

    for name, t in plain.items():
        if t.dtype != packed[name].dtype or t.shape != packed[name].shape:
            raise differs(name)

    def compare(piece: Unpacked) -> None:
        expected = data[piece.name][piece.begin : piece.begin + piece.data.shape[0]]
        if not np.array_equal(piece.data.numpy(), expected.numpy()):
            raise differs(piece.name)

    total = sum(t.nbytes for t in plain.values())
    with Progress(f"verifying {path}", total, None) as progress:
        each_unpacked(packed, compare, workers, progress)


def _device(arguments: argparse.Namespace) -> torch.device:
    """Return the device of the work."""
    if arguments.device != "auto":
        return checked_device(arguments.device, "--device")
    return device_or_default("cuda" if _gpu_is_there() else "cpu")


def _gpu_is_there() -> bool:
    """Return whether there is a GPU, and the package that starts the kernels."""
    return torch.cuda.is_available() and importlib.util.find_spec("cupy") is not None


def _with_progress(what: str, items: Mapping[str, T]) -> Iterator[tuple[str, T]]:
    """Yield the items; on a terminal show a progress bar when there are many bytes."""
    sizes = {name: math.prod(t.shape) * t.dtype.itemsize for name, t in items.items()}
    if not sys.stderr.isatty() or sum(sizes.values()) < LONG_WORK_BYTES:
        yield from items.items()
        return
    load_optional("rich", extra=None, purpose="showing progress")
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(file=sys.stderr), transient=True
    ) as progress:
        task = progress.add_task(what, total=sum(sizes.values()))
        for name, t in items.items():
            yield name, t
            progress.advance(task, sizes[name])


def _say_done(arguments: argparse.Namespace, count: int, figures: str) -> None:
    verified = ", verified" if arguments.verify else ""
    print(f"{arguments.output}: {_counted(count)}, {figures}{verified}")


def _counted(n: int) -> str:
    return f"{n} tensor{'' if n == 1 else 's'}"
