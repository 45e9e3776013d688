"""What weights will take compressed, from samples of the checkpoint, before they are loaded."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from safetensors import safe_open

from bitslab.dtypes import dtype_name
from bitslab.errors import CorruptedDataError
from bitslab.offload import TensorPacker

#: Raw bytes of a sample; of each kind of tensor (layer numbers left out) one is taken.
SAMPLE_BYTES = 1 << 17
#: Samples at most: kinds of tensors with the most bytes come first.
MAX_SAMPLES = 16
#: Share of the raw bytes where there is nothing to sample (no safetensors): a little above what
#: trained weights take.
ASSUMED = {torch.bfloat16: 0.73, torch.float16: 0.90, torch.float32: 0.87}
#: What is planned for is a little more than what was sampled.
MARGIN = 1.01
_FLOATS = {"F64", "F32", "F16", "BF16"}
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass
class SizeEstimate:
    """Shares of their raw bytes that tensors are expected to take packed.

    Attributes
    ----------
    dtype : torch.dtype
        Dtype that weights are loaded in.
    shares : dict of str to float
        Packed over raw bytes by kind of tensor: its name with ``*`` for layer numbers.
    mean : float
        The share of tensors that no sample is like.
    source : str
        Where they come from, in words.
    """

    dtype: torch.dtype
    shares: dict[str, float] = field(default_factory=dict)
    mean: float = 1.0
    source: str = ""

    def share(self, name: str) -> float:
        """Return packed over raw bytes of a parameter, at most 1.

        Parameters
        ----------
        name : str
            Its name in the model, which may have another prefix than in the checkpoint.
        """
        kind = kind_of(name)
        found = self.shares.get(kind)
        if found is None:
            ends = [share for other, share in self.shares.items() if _end(other) == _end(kind)]
            found = sum(ends) / len(ends) if ends else self.mean
        return min(1.0, found * MARGIN)


def kind_of(name: str) -> str:
    """Return a tensor's name with ``*`` for numbers: ``model.layers.*.mlp.up_proj.weight``."""
    return _NUMBER.sub("*", name)


def estimate(files: Sequence[str] | None, dtype: torch.dtype) -> SizeEstimate:
    """Pack samples of a checkpoint's tensors.

    Parameters
    ----------
    files : sequence of str or None
        The files of a checkpoint; only safetensors are read.
    dtype : torch.dtype
        Dtype that weights are loaded in, which samples are cast to.

    Raises
    ------
    CorruptedDataError
        When a file is no safetensors file.
    """
    found = SizeEstimate(dtype)
    readable = [file for file in files or () if str(file).endswith(".safetensors")]
    raw_bytes, expected, numbers = 0, 0.0, 0
    packer = TensorPacker()  # plans once for each size of rows, as when the weights are packed
    for kind, count, sample in _samples(readable, dtype):
        packed, _ = packer.pack(sample)
        found.shares[kind] = packed.nbytes / packed.raw_nbytes
        raw_bytes += sample.nbytes
        expected += count * found.shares[kind]
        numbers += count
    if numbers:
        found.mean = expected / numbers
        found.source = (
            f"samples of {len(found.shares)} kinds of tensors ({raw_bytes / 1e6:.2f} MB) of the "
            f"checkpoint, as {dtype_name(dtype)}"
        )
    else:
        found.mean = ASSUMED.get(dtype, 1.0)
        found.source = f"assumed for {dtype_name(dtype)}: there are no safetensors to sample"
    return found


def _end(kind: str) -> str:
    """Return the last two parts of a name: what renaming a prefix leaves as it is."""
    return ".".join(kind.split(".")[-2:])


def _samples(files: Iterable[str], dtype: torch.dtype) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield kinds of tensors, those with the most numbers first, how many these are, and a part."""
    kinds: dict[str, list[tuple[str, str]]] = defaultdict(list)
    numbers: dict[str, int] = defaultdict(int)
    for file in files:
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                part = tensors.get_slice(name)
                shape = part.get_shape()
                if len(shape) < 2 or 0 in shape or part.get_dtype() not in _FLOATS:
                    continue
                kind = kind_of(name)
                kinds[kind].append((file, name))
                numbers[kind] += torch.Size(shape).numel()
    for kind in sorted(kinds, key=lambda kind: -numbers[kind])[:MAX_SAMPLES]:
        file, name = kinds[kind][len(kinds[kind]) // 2]
        with _opened(file) as tensors:
            part = tensors.get_slice(name)
            *first, n_rows, n_columns = part.get_shape()
            wanted = max(1, SAMPLE_BYTES // (n_columns * dtype.itemsize))
            begin = max(0, (n_rows - wanted) // 2)
            # Of more dimensions, as those of experts in one tensor, the first matrix.
            picked = (*(slice(0, 1) for _ in first), slice(begin, begin + wanted))
            yield kind, numbers[kind], part[picked].to(dtype).flatten(0, -2)


def _opened(file: str) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except Exception as error:  # safetensors has errors of its own that derive from Exception
        if isinstance(error, OSError):
            raise
        raise CorruptedDataError(f"{file}: not a safetensors file ({error})") from error
