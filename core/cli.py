"""The `bitslab` command: its arguments, its help and its exit status.

What the commands do stands in `commands`, which is imported when one runs: help needs no torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .engine.files.new_file import NewFile
from .errors import BitslabError, CorruptedDataError
from .options import DECODE_GBPS, LINK_GBPS, READABLE, SAFETENSORS, WRITABLE, note
from .version import __version__

OK, DAMAGED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130

DESCRIPTION = "Compress tensors that cross slow links, without loss."
EPILOG = """\
examples:
  bitslab inspect model.safetensors                   what would compressing save?
  bitslab inspect a.npy b.pt --json --link-gbps 25    the same for programs, PCIe 4 x16
  bitslab inspect model.safetensors --plot bits.png   which bits are equal (bitslab[report])
  bitslab compress model.safetensors model.bitslab --verify
  bitslab decompress model.bitslab model.safetensors
  bitslab endurance --hidden 8192 --layers 4 --micro-batch 16 --step-seconds 1.2

exit status:
  0  done
  1  a compressed file is damaged, or --verify found a difference
  2  wrong usage, or a file that cannot be read or written
  130  interrupted; a message says whether the output is complete

No command replaces a file unless --force says so.
"""
INSPECT_EPILOG = """\
examples:
  bitslab inspect model.safetensors
  bitslab inspect weights.bitslab features.npy checkpoint.pt
  bitslab inspect model.safetensors --json | jq '.total.ratio'
  bitslab inspect model.safetensors --plot bits.png --link-gbps 25
  bitslab inspect activations.pt --codecs

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
OUT appears when it is complete and, with --verify, checked; else it is left unchanged. A file that
has its name is replaced with --force only. The same IN always gives the same bytes, on a GPU too.
Tensors of one kind share a plan where that costs less than 0.3 %.
"""
DECOMPRESS_EPILOG = """\
examples:
  bitslab decompress model.bitslab model.safetensors
  bitslab decompress features.bitslab features.npy --verify

The extension of OUT says the format: .safetensors (every dtype but complex128, and the metadata of
the original), .npy (one tensor), .npz, or .pt, .pth, .bin. numpy has no bfloat16 and no float8.
"""

ENDURANCE_EPILOG = """\
examples:
  bitslab endurance --rate-gbps 12.1 --drives 4
  bitslab endurance --rate-gbps 12.1 --drives 4 --drive 980-pro --relaxed-retention
  bitslab endurance --step-gb 85 --step-seconds 10 --capacity-tb 3.84 --dwpd 1
  bitslab endurance --hidden 8192 --layers 4 --micro-batch 16 --step-seconds 1.2 --json
  bitslab endurance --hidden 4096 --layers 32 --norm rms --activation swiglu --intermediate 14336
      --kv-heads 8 --sequence 4096 --step-seconds 3 --disk /nvme/scratch

What training writes is given as a rate, as bytes of a step, or as the shape of its layers, of which
one GPU's share is computed. How it is computed:

  rate      bytes of a step / half its time: they are written in the forward pass, and while the
            backward pass begins
  drives    DWPD x capacity x days of warranty (or TBW) x 2.5: the rating assumes random writes,
            which a drive multiplies by 2.5; large sequential ones are not multiplied. Times 86 with
            --relaxed-retention: flash that keeps its content for a day takes as many more writes,
            where drives can be set so
  lifespan  what the drives take / bytes of a step x its time, without a pause

--drive d7-p5620 is one of 12.8 TB, 3 DWPD and five years; 980-pro one of 1 TB and 600 TBW. The
figures of SSDTrain (section 5.3.6) come out of the first two examples: 3.7 and 2.7 years.
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
        or written, 130 interrupted. Wrong usage exits with 2 by SystemExit, as argparse does.
    """
    arguments = build_parser().parse_args(argv)
    try:
        from .report import commands  # not before: help needs no torch, which takes long to import

        commands.COMMANDS[arguments.command](arguments)
        return OK
    except BrokenPipeError:
        # The reader has seen enough. Python flushes stdout once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        note(f"interrupted; {_outcome(arguments.new)}")
        return INTERRUPTED
    except CorruptedDataError as error:
        return _fail(error, DAMAGED)
    except (BitslabError, OSError) as error:
        return _fail(error, WRONG_USAGE)
    except (MemoryError, RuntimeError) as error:
        # What torch says where the host's memory, or that of a GPU, does not suffice.
        lacking = ("DefaultCPUAllocator", "out of memory")
        if isinstance(error, RuntimeError) and not any(text in str(error) for text in lacking):
            raise
        return _fail(f"not enough memory: {error}", WRONG_USAGE)


def _outcome(new: NewFile | None) -> str:
    """Return what became of the output of an interrupted command."""
    if new is None:
        return "nothing was written"
    return f"{new.requested} is {'complete' if new.complete else 'what it was before'}"


def _fail(error: Exception | str, status: int) -> int:
    """Print an error in one line."""
    note(f"error: {' '.join(str(error).split())}")
    return status


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _parser(argparse.ArgumentParser, "bitslab", DESCRIPTION, EPILOG)
    parser.add_argument("--version", action="version", version=f"bitslab {__version__}")
    parser.set_defaults(new=None)  # the `NewFile` that the command writes
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    readable = ", ".join(READABLE)

    inspect = _parser(
        commands.add_parser, "inspect", "show what compressing would save", INSPECT_EPILOG
    )
    inspect.set_defaults(command="inspect")
    inspect.add_argument("files", nargs="+", metavar="FILE", help=f"one of {readable}")
    inspect.add_argument("--json", action="store_true", help="print JSON instead of a table")
    inspect.add_argument(
        "--plot", metavar="OUT", help="draw the share of equal bits by bit position (png, svg, pdf)"
    )
    _add_force(inspect, "the image of --plot")
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
    inspect.add_argument(
        "--codecs",
        action="store_true",
        help="show what each codec of whole tensors makes of each tensor, and predicted times on "
        "the GPU, or the CPU without one; measures codecs once on a machine (30 s at most)",
    )
    _add_codec_arguments(inspect)

    compress_ = _parser(commands.add_parser, "compress", "compress a tensor file", COMPRESS_EPILOG)
    compress_.set_defaults(command="compress")
    compress_.add_argument("input", metavar="IN", help=f"one of {readable}")
    compress_.add_argument("output", metavar="OUT", help=f"one of {', '.join(SAFETENSORS)}")
    compress_.add_argument(
        "--verify", action="store_true", help="read the file again and compare every bit"
    )
    _add_force(compress_, "OUT")
    _add_device(compress_)
    _add_codec_arguments(compress_)

    restore = _parser(commands.add_parser, "decompress", "restore a tensor file", DECOMPRESS_EPILOG)
    restore.set_defaults(command="decompress")
    restore.add_argument("input", metavar="IN", help="a file of `bitslab compress`")
    restore.add_argument("output", metavar="OUT", help=f"one of {', '.join(WRITABLE)}")
    restore.add_argument(
        "--verify", action="store_true", help="read the file again and compare every bit"
    )
    _add_force(restore, "OUT")
    _add_device(restore)
    _add_endurance(commands)
    return parser


def _add_endurance(commands: Any) -> None:
    parser = _parser(
        commands.add_parser,
        "endurance",
        "show how fast SSDs must write the activations of a training, and how long they last",
        ENDURANCE_EPILOG,
    )
    parser.set_defaults(command="endurance")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    what = parser.add_argument_group("what is written, by each GPU: one of the first three")

    def add(name: str, kind: Callable[[str], float], text: str, default: object = None) -> None:
        shown = "" if default is None else " (default %(default)s)"
        group.add_argument(name, type=kind, default=default, metavar="N", help=text + shown)

    group = what
    add("--rate-gbps", _rate, "GB/s, while a forward pass writes")
    add("--step-gb", _rate, "GB of a step")
    add("--hidden", _count, "width of a transformer's layers")
    add("--step-seconds", _rate, "time of a step")
    group = parser.add_argument_group("shape of a transformer, with --hidden")
    add("--layers", _count, "layers of the GPU", 1)
    add("--heads", _count, "heads of attention (default: hidden / 128)")
    add("--kv-heads", _count, "heads of keys and values (default: as many)")
    add("--intermediate", _count, "width of the MLP (default: 4 x hidden)")
    add("--sequence", _count, "tokens of a sequence", 1024)
    add("--micro-batch", _count, "sequences of a micro-batch", 1)
    add("--micro-batches", _count, "micro-batches of a step", 1)
    add("--dtype-bytes", _count, "bytes of an element", 2)
    add("--tensor-parallel", _count, "GPUs that share each layer", 1)
    group.add_argument(
        "--sequence-parallel", action="store_true", help="they share norms and dropout, too"
    )
    for name, accepted in (
        ("--norm", ("layer", "rms", "t5")),
        ("--activation", ("gelu", "gelu_new", "relu", "swiglu")),
        ("--attention", ("fused", "eager")),
    ):
        group.add_argument(
            name, choices=accepted, default=accepted[0], help="of the layers (default %(default)s)"
        )
    group.add_argument("--dropout", action="store_true", help="with dropout")
    group = parser.add_argument_group("drives, for each GPU")
    add("--drives", _count, "how many", 1)
    group.add_argument(
        "--drive", default="d7-p5620", metavar="NAME", help="d7-p5620 (default) or 980-pro"
    )
    add("--capacity-tb", _rate, "TB of one (default: as --drive)")
    add("--dwpd", _rate, "times its capacity that may be written a day")
    add("--warranty-years", _rate, "for so long (default: as --drive)")
    add("--tbw", _rate, "TB that may be written in all, in place of --dwpd")
    add("--write-amplification", _rate, "bytes a drive writes for each it is given", 1.0)
    group.add_argument(
        "--relaxed-retention", action="store_true", help="content is kept for a day only"
    )
    group.add_argument(
        "--disk", metavar="FOLDER", help="measure what the disk of a folder writes, in two seconds"
    )


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
        help="auto (default: ibp, or raw where that is not smaller), ibp, raw, zvc, zvc+ibp, "
        "ibp-blob, csr, rle, lz4, or an installed one",
    )
    parser.add_argument(
        "--clusters",
        type=_clusters,
        default=None,
        metavar="N",
        help="group rows by up to N profiles, 1 to 256, where that makes the result smaller",
    )


def _add_force(parser: argparse.ArgumentParser, output: str) -> None:
    parser.add_argument("--force", action="store_true", help=f"replace {output} if it exists")


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="auto (default: the GPU, or the CPU without one), cpu, cuda, or cuda:N; OUT has the "
        "same bytes",
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def _clusters(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 256:
        raise argparse.ArgumentTypeError(f"{text!r}, accepted are 1 to 256")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return rate


if __name__ == "__main__":
    sys.exit(main())
