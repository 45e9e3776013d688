"""The `bitslab` command."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from . import __version__
from .container import is_compressed, read_file, replacing, write_file
from .dtypes import flat_bytes
from .errors import ArgumentError, BitslabError, CorruptedDataError, load_optional
from .files import READABLE, SAFETENSORS, WRITABLE, checked_extension, read_tensors, write_tensors
from .registry import get_codec
from .report.measure import DECODE_GBPS, LINK_GBPS
from .tensor import CompressedTensor, compress

T = TypeVar("T", torch.Tensor, CompressedTensor, torch.Tensor | CompressedTensor)

OK, DAMAGED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130

#: Work on fewer bytes than this is over before a progress bar is read.
LONG_WORK_BYTES = 64 << 20
#: Width of a table that goes to a file or a program.
PLAIN_WIDTH = 160
PLOT_EXTENSIONS = (".png", ".svg", ".pdf")

DESCRIPTION = "Compress tensors that cross slow links, without loss."
EPILOG = """\
examples:
  bitslab inspect model.safetensors                   what would compressing save?
  bitslab inspect a.npy b.pt --json --link-gbps 25    the same for programs, PCIe 4 x16
  bitslab inspect model.safetensors --plot bits.png   which bits are equal (bitslab[report])
  bitslab compress model.safetensors model.bitslab --verify
  bitslab decompress model.bitslab model.safetensors

exit status:
  0  done
  1  a compressed file is damaged, or --verify found a difference
  2  wrong usage, or a file that cannot be read or written
"""
INSPECT_EPILOG = """\
examples:
  bitslab inspect model.safetensors
  bitslab inspect weights.bitslab features.npy checkpoint.pt
  bitslab inspect model.safetensors --json | jq '.total.ratio'
  bitslab inspect model.safetensors --plot bits.png --link-gbps 25

columns:
  plan       the codec and its options, for example "ibp 2B k3 uniform": invariant bit packing
             of 2-byte chunks with 3-bit codes and one mask for all positions; "raw" is kept as
             it is, because packing would not make it smaller
  ratio      raw bytes over packed bytes, all metadata included
  invariant  share of a row's bit positions on which at least 80 % of the rows agree
  speed-up   raw over packed transfer time; packed, the slower of link and decoding counts
"""
COMPRESS_EPILOG = """\
examples:
  bitslab compress model.safetensors model.bitslab --verify
  bitslab compress features.npy features.bitslab --codec ibp --clusters 16
  bitslab compress checkpoint.pt checkpoint.safetensors

OUT is a safetensors file, whatever of the two extensions it has; bitslab.load_file reads it.
OUT appears when it is complete and, with --verify, checked; else it stays what it was.
"""
DECOMPRESS_EPILOG = """\
examples:
  bitslab decompress model.bitslab model.safetensors
  bitslab decompress features.bitslab features.npy --verify

The extension of OUT says the format: .safetensors (every dtype but complex128, and the metadata of
the original), .npy (one tensor), .npz, or .pt, .pth, .bin. numpy has no bfloat16 and no float8.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the command's name; those of the process when left out.

    Returns
    -------
    int
        Exit status: 0 done, 1 damaged data or a failed verification, 2 a file that cannot be read
        or written. Wrong usage exits with 2 by SystemExit, as argparse does.
    """
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except BrokenPipeError:
        # The reader has seen enough. Python flushes stdout once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except CorruptedDataError as error:
        return _fail(error, DAMAGED)
    except (BitslabError, OSError) as error:
        return _fail(error, WRONG_USAGE)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _parser(argparse.ArgumentParser, "bitslab", DESCRIPTION, EPILOG)
    parser.add_argument("--version", action="version", version=f"bitslab {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    readable = ", ".join(READABLE)

    inspect = _parser(
        commands.add_parser, "inspect", "show what compressing would save", INSPECT_EPILOG
    )
    inspect.set_defaults(run=_inspect)
    inspect.add_argument("files", nargs="+", metavar="FILE", help=f"one of {readable}")
    inspect.add_argument("--json", action="store_true", help="print JSON instead of a table")
    inspect.add_argument(
        "--plot", metavar="OUT", help="draw the share of equal bits by bit position (png, svg, pdf)"
    )
    inspect.add_argument(
        "--link-gbps",
        type=_rate,
        default=LINK_GBPS,
        metavar="RATE",
        help="rate of the link in GB/s (default %(default)g, the copy engine over PCIe 5 x16)",
    )
    inspect.add_argument(
        "--decode-gbps",
        type=_rate,
        default=DECODE_GBPS,
        metavar="RATE",
        help="rate of decoding in GB/s of output (default %(default)g)",
    )
    _add_codec_arguments(inspect)

    compress_ = _parser(commands.add_parser, "compress", "compress a tensor file", COMPRESS_EPILOG)
    compress_.set_defaults(run=_compress)
    compress_.add_argument("input", metavar="IN", help=f"one of {readable}")
    compress_.add_argument("output", metavar="OUT", help=f"one of {', '.join(SAFETENSORS)}")
    compress_.add_argument(
        "--verify", action="store_true", help="read the file again and compare every bit"
    )
    _add_codec_arguments(compress_)

    restore = _parser(commands.add_parser, "decompress", "restore a tensor file", DECOMPRESS_EPILOG)
    restore.set_defaults(run=_decompress)
    restore.add_argument("input", metavar="IN", help="a file of `bitslab compress`")
    restore.add_argument("output", metavar="OUT", help=f"one of {', '.join(WRITABLE)}")
    restore.add_argument(
        "--verify", action="store_true", help="read the file again and compare every bit"
    )
    return parser


def _parser(
    make: Callable[..., argparse.ArgumentParser], name: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    named = {"prog": name} if make is argparse.ArgumentParser else {"help": description}
    first = () if make is argparse.ArgumentParser else (name,)
    return make(
        *first,
        **named,
        description=description[0].upper() + description[1:],
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_codec_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--codec",
        default="auto",
        metavar="NAME",
        help="auto (default: ibp, or raw where that is not smaller), ibp, raw, or an installed one",
    )
    parser.add_argument(
        "--clusters",
        type=int,
        default=None,
        metavar="N",
        help="group rows by up to N profiles, 1 to 256, where that makes the result smaller",
    )


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return rate


# Commands


def _inspect(arguments: argparse.Namespace) -> int:
    from .report import Link, as_json, build_table, inspect_tensor

    options = _codec_options(arguments)
    plot_format = ""
    if arguments.plot:
        plot_format = checked_extension(arguments.plot, PLOT_EXTENSIONS)[1:]
        _refuse_missing_folder(arguments.plot)
        load_optional("matplotlib", extra="report", purpose="--plot")
        for path in arguments.files:
            _refuse_same(path, arguments.plot)
    link = Link(arguments.link_gbps, arguments.decode_gbps)
    reports, files = [], []
    for path in arguments.files:
        if (arguments.codec != "auto" or options) and _is_compressed(path):
            raise ArgumentError(
                f"{path}: is compressed already; --codec and --clusters are for plain tensors"
            )
        tensors: Mapping[str, torch.Tensor | CompressedTensor] = (
            read_file(path).tensors if _is_compressed(path) else _read_plain(path)[0]
        )
        prefix = f"{Path(path).name}: " if len(arguments.files) > 1 and not arguments.json else ""
        for name, t in _with_progress(f"inspecting {path}", tensors):
            with _naming(path, name):
                reports.append(inspect_tensor(prefix + name, t, arguments.codec, link, **options))
            files.append(path)
    if arguments.plot:
        from .report import save_plot

        image = io.BytesIO()  # first, so that a failure leaves nothing
        save_plot(reports, image, plot_format)
        with replacing(arguments.plot) as temporary:
            temporary.write_bytes(image.getvalue())
    if arguments.json:
        content = as_json(reports, link)
        for entry, path in zip(content["tensors"], files, strict=True):
            entry["file"] = path
        print(json.dumps(content, indent=2))
        return OK
    load_optional("rich", extra=None, purpose="printing a table")
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    Console(file=sys.stdout, width=width).print(build_table(reports, link))
    return OK


def _compress(arguments: argparse.Namespace) -> int:
    checked_extension(arguments.output, SAFETENSORS)
    _refuse_same(arguments.input, arguments.output)
    _refuse_missing_folder(arguments.output)
    options = _codec_options(arguments)
    if _is_compressed(arguments.input):
        raise ArgumentError(f"{arguments.input}: is compressed by bitslab already")
    tensors, metadata = _read_plain(arguments.input)
    packed = {}
    for name, t in _with_progress(f"compressing {arguments.input}", tensors):
        with _naming(arguments.input, name):
            packed[name] = compress(t, arguments.codec, **options)
    with replacing(arguments.output) as temporary:
        write_file(packed, temporary, metadata)
        if arguments.verify:
            written = read_file(temporary).tensors
            found = _with_progress(f"verifying {arguments.output}", written)
            _verify(arguments.output, tensors, ((k, ct.decompress()) for k, ct in found))
    raw_bytes = sum(ct.raw_nbytes for ct in packed.values())
    packed_bytes = sum(ct.nbytes for ct in packed.values())
    ratio = raw_bytes / packed_bytes if packed_bytes else 1.0
    _say_done(
        arguments,
        len(packed),
        f"{raw_bytes / 1e6:,.2f} MB -> {packed_bytes / 1e6:,.2f} MB ({ratio:.2f}x)",
    )
    return OK


def _decompress(arguments: argparse.Namespace) -> int:
    extension = checked_extension(arguments.output, WRITABLE)
    _refuse_same(arguments.input, arguments.output)
    _refuse_missing_folder(arguments.output)
    content = read_file(arguments.input)
    tensors = {
        name: ct.decompress()
        for name, ct in _with_progress(f"decompressing {arguments.input}", content.tensors)
    }
    if content.metadata and extension != ".safetensors":
        _note(f"{arguments.output}: {extension} has no place for the metadata, it is left out")
    with replacing(arguments.output) as temporary:
        try:
            write_tensors(tensors, temporary, extension, content.metadata)
        except ArgumentError as error:
            raise ArgumentError(f"{arguments.output}: {error}") from error
        if arguments.verify:
            # Readers go by the extension, which the temporary file does not have.
            with _linked(temporary, extension) as readable:
                written = read_tensors(readable).tensors
                if extension == ".npy":
                    written = dict(zip(tensors, written.values(), strict=True))
                found = _with_progress(f"verifying {arguments.output}", written)
                _verify(arguments.output, tensors, found)
    raw_bytes = sum(t.nbytes for t in tensors.values())
    _say_done(arguments, len(tensors), f"{raw_bytes / 1e6:,.2f} MB")
    return OK


# Their parts


def _codec_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options for `compress`, and refuse a codec that does not exist."""
    if arguments.codec != "auto":
        get_codec(arguments.codec)
    return {} if arguments.clusters is None else {"clusters": arguments.clusters}


def _is_compressed(path: str) -> bool:
    extension = checked_extension(path, READABLE)
    # What is named as bitslab's own is held to that: damaged, it is not an unreadable input.
    return (extension == ".bitslab" and os.path.exists(path)) or (
        extension in SAFETENSORS and is_compressed(path)
    )


def _read_plain(path: str) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    """Return the tensors of a file and its metadata; say what is left out."""
    content = read_tensors(path)
    for what in content.left_out:
        _note(f"{path}: left out, because it is no tensor: {what}")
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


def _refuse_missing_folder(target: str) -> None:
    """Say so before the work, not after it."""
    folder = Path(target).resolve().parent
    if not folder.is_dir():
        raise ArgumentError(f"{target}: the folder {folder} does not exist")


def _refuse_same(source: str, target: str) -> None:
    same = os.path.realpath(source) == os.path.realpath(target)
    if not same and os.path.exists(source) and os.path.exists(target):
        same = os.path.samefile(source, target)
    if same:
        raise ArgumentError(f"{target}: would overwrite the input")


@contextlib.contextmanager
def _linked(path: Path, extension: str) -> Iterator[Path]:
    """Give a file a second name, with an extension, while the block runs."""
    link = path.with_name(path.name + extension)
    link.symlink_to(path.name)
    try:
        yield link
    finally:
        link.unlink()


def _verify(
    path: str,
    expected: Mapping[str, torch.Tensor],
    found: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Compare tensors bit for bit."""
    missing = set(expected)
    for name, t in found:
        original = expected[name]
        if t.dtype != original.dtype or t.shape != original.shape or not _equal_bits(t, original):
            raise CorruptedDataError(f"{path}: verification failed: {name} is not what it was")
        missing.discard(name)
    if missing:
        raise CorruptedDataError(f"{path}: verification failed: {sorted(missing)} are missing")


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(flat_bytes(a), flat_bytes(b))


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
    plural = "" if count == 1 else "s"
    print(f"{arguments.output}: {count} tensor{plural}, {figures}{verified}")


def _note(message: str) -> None:
    print(f"bitslab: {message}", file=sys.stderr)


def _fail(error: Exception, status: int) -> int:
    """Say what went wrong in one line."""
    _note(f"error: {' '.join(str(error).split())}")
    return status


if __name__ == "__main__":
    sys.exit(main())
