"""Decompressing the tensors of a file, piece by piece: on a GPU, or by several threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..compressed import AnyCompressed, CompressedFile, CompressedTensor
from ..compressed_blob import CompressedBlob
from ..container_parts import PartCheck, crc32_of
from ..dtypes import flat_bytes
from ..engine.codecs import RawCodec, WordRowCodec
from ..engine.codecs.base import gathered_by_kernels
from ..engine.files.checksums import combined_crc32
from ..engine.files.safetensors_writer import SafetensorsLayout
from ..engine.files.writeback import PieceWriter
from ..engine.kernels.format import BLOCK_ROWS, PAD_WORDS, RowStorage, ceil_div
from ..engine.kernels.row_kernels import RowKernels
from ..engine.progress import Progress
from ..errors import BitslabError, CorruptedDataError
from .files import check_storable
from .pack_file import LEAST_DEVICE_BYTES
from .tensor_rows import row_ranges
from .workers import Workers

#: Bytes that one task computes the checksum of.
SUMMED_BYTES = 8 << 20


@dataclass(frozen=True)
class Unpacked:
    """Bytes of a tensor.

    Parameters
    ----------
    name : str
        The tensor.
    begin : int
        Where they begin in it.
    data : torch.Tensor
        uint8 ``[n]`` on the CPU; the thread's next piece may take their place.
    """

    name: str
    begin: int
    data: torch.Tensor


def each_unpacked(
    tensors: Mapping[str, AnyCompressed],
    use: Callable[[Unpacked], object],
    workers: Workers,
    progress: Progress,
    checks: Mapping[str, Sequence[PartCheck]] | None = None,
) -> None:
    """Unpack tensors piece by piece, in any order.

    Parameters
    ----------
    tensors : mapping of str to CompressedTensor or CompressedBlob
        On the CPU.
    use : callable
        Called with each piece, in the thread that unpacked it; what it made of pieces is worth
        nothing when this raises.
    workers : Workers
        What unpacks, and where.
    progress : Progress
        Advanced by the bytes of the tensors.
    checks : mapping of str to sequence of PartCheck, optional
        For each tensor, checksums to compare meanwhile.

    Raises
    ------
    CorruptedDataError
        When packed rows are damaged.
    """
    checks = checks or {}
    # The checksums of a tensor come before it: threads that do not wait to write compute them.
    items: list[_Summed | _Piece | _WholeTensor] = []
    for name, ct in tensors.items():
        for check in checks.get(name, ()):
            items += _summed(check)
        if isinstance(ct, CompressedBlob):
            items.append(_WholeTensor(name, ct))
        else:
            items += _Packed(name, ct, workers.device).pieces()

    def work(item: _Summed | _Piece | _WholeTensor) -> int | None:
        if isinstance(item, _Summed):
            return crc32_of(item.data)
        use(item.unpacked(workers))
        return None

    sums: list[tuple[int, int]] = []

    def done(item: _Summed | _Piece | _WholeTensor, crc32: int | None) -> None:
        if isinstance(item, _Summed):
            assert crc32 is not None
            sums.append((crc32, item.data.shape[0]))
            if item.last:
                item.check.compare(combined_crc32(sums))
                sums.clear()
        else:
            progress.advance(item.n_bytes)

    workers.settle()
    try:
        workers.each(work, items, done, key=lambda item: item.key)
        _raise_pending(workers.device)
    except CorruptedDataError:
        with contextlib.suppress(BitslabError):
            _raise_pending(workers.device)  # of the same rows: no later call is to raise it
        # Rows of bytes that are damaged may be found to be so first; the checksum says more.
        for each in checks.values():
            for check in each:
                check.run()
        raise


def write_plain(
    path: str | os.PathLike[str],
    content: CompressedFile,
    checks: Mapping[str, Sequence[PartCheck]],
    workers: Workers,
    progress: Progress,
) -> None:
    """Write tensors, unpacked, to an existing file in the format of safetensors; not atomic.

    See `each_unpacked` for `checks`.

    Raises
    ------
    ArgumentError
        When safetensors cannot hold a dtype or a name.
    CorruptedDataError
        When packed rows are damaged.
    OSError
        When the file cannot be written.
    """
    tensors, metadata = content.tensors, content.metadata
    shapes = {
        name: torch.empty(ct.shape, dtype=ct.dtype, device="meta") for name, ct in tensors.items()
    }
    check_storable(shapes)
    layout = SafetensorsLayout(shapes)
    header = layout.header(metadata)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    pieces = PieceWriter(fd)
    try:
        os.ftruncate(fd, 0)
        os.ftruncate(fd, len(header) + layout.data_bytes)
        pieces.write(0, torch.frombuffer(bytearray(header), dtype=torch.uint8))

        def write(piece: Unpacked) -> None:
            pieces.write(len(header) + layout.offsets[piece.name] + piece.begin, piece.data)

        each_unpacked(tensors, write, workers, progress, checks)
    finally:
        pieces.close()


def unpacked_tensors(
    tensors: Mapping[str, AnyCompressed],
    checks: Mapping[str, Sequence[PartCheck]],
    workers: Workers,
    progress: Progress,
) -> dict[str, torch.Tensor]:
    """Return tensors in memory, unpacked; see `each_unpacked`."""
    made = {name: torch.empty(ct.shape, dtype=ct.dtype) for name, ct in tensors.items()}
    data = {name: flat_bytes(t) for name, t in made.items()}

    def keep(piece: Unpacked) -> None:
        target = data[piece.name][piece.begin : piece.begin + piece.data.shape[0]]
        target.numpy()[:] = piece.data.numpy()

    each_unpacked(tensors, keep, workers, progress, checks)
    return made


def _raise_pending(device: torch.device) -> None:
    """Raise what kernels on a GPU have reported; waits for it."""
    if device.type == "cuda":
        from ..engine.kernels.cuda import raise_pending_errors

        raise_pending_errors(device)


@dataclass(frozen=True)
class _Summed:
    """Bytes of a part whose checksum is compared, `last` the last ones of it."""

    check: PartCheck
    data: torch.Tensor
    last: bool

    @property
    def key(self) -> object:
        """Equal for all: they use no kernel."""
        return "checksum"


def _summed(check: PartCheck) -> list[_Summed]:
    pieces = list(check.pieces(SUMMED_BYTES))
    return [_Summed(check, data, i == len(pieces)) for i, data in enumerate(pieces, 1)]


class _Packed:
    """A packed tensor with what unpacks it."""

    def __init__(self, name: str, ct: CompressedTensor, device: torch.device) -> None:
        self.name = name
        self.ct = ct
        codec = ct.codec
        self.kernels: RowKernels | None = None
        if (
            device.type == "cuda"
            and device.type in codec.device_types
            and isinstance(codec, WordRowCodec)
            and gathered_by_kernels(type(codec))
            and ct.raw_nbytes >= LEAST_DEVICE_BYTES
        ):
            kernels = codec.kernels(device)
            # Pieces are unpacked as if they were all rows.
            self.kernels = kernels if kernels.row_period == 1 else None
        self.key = (self.kernels is None, codec.describe(), codec.row_bytes)

    def pieces(self) -> Iterator[_Piece]:
        """Yield what is unpacked together."""
        n_rows, row_bytes = self.ct.packed.n_rows, self.ct.codec.row_bytes
        for begin, end in row_ranges(n_rows, row_bytes) if row_bytes else ():
            first = begin * row_bytes
            yield _Piece(self, begin, end, min(end * row_bytes, self.ct.raw_nbytes) - first)


@dataclass(frozen=True)
class _Piece:
    """A range of rows, whole blocks of them; `n_bytes` of the tensor."""

    its: _Packed
    begin: int
    end: int
    n_bytes: int

    @property
    def key(self) -> object:
        """Equal for pieces that use the same kernels."""
        return self.its.key

    def unpacked(self, workers: Workers) -> Unpacked:
        """Return the bytes of the tensor."""
        ct = self.its.ct
        first_byte = self.begin * ct.codec.row_bytes
        if type(ct.codec) is RawCodec:
            data = flat_bytes(ct.packed.parts["rows"])[first_byte : first_byte + self.n_bytes]
        elif self.its.kernels is not None:
            data = self._by_device(self.its.kernels, workers)[: self.n_bytes]
        else:
            data = self._by_host(workers)[: self.n_bytes]
        return Unpacked(self.its.name, first_byte, data)

    def _by_host(self, workers: Workers) -> torch.Tensor:
        codec, count = self.its.ct.codec, self.end - self.begin
        data = workers.scratch(count * codec.row_bytes)
        out = data.view(codec.dtype).view(count, *codec.row_shape)
        try:
            codec.decode(self.its.ct.packed, out=out, start=self.begin, stop=self.end)
        except CorruptedDataError as error:
            raise CorruptedDataError(f"tensor {self.its.name!r}: {error}") from error
        return data

    def _by_device(self, kernels: RowKernels, workers: Workers) -> torch.Tensor:
        packed, device = self.its.ct.packed, workers.device
        parts = packed.parts
        first, last = self.begin // BLOCK_ROWS, ceil_div(self.end, BLOCK_ROWS)
        first_word, end_word = int(parts["bases"][first]), int(parts["bases"][last])
        words = parts["words"][first_word : end_word + PAD_WORDS]
        clusters = parts.get("row_clusters")
        link = workers.link()
        with link.lane.on():
            # Before the words: copies from pageable memory wait for what is queued.
            bases = (parts["bases"][first : last + 1] - first_word).to(device)
            lengths = parts["lengths"][self.begin : self.end].to(device)
            empty = torch.empty(0, dtype=torch.uint8)
            chosen = (empty if clusters is None else clusters[self.begin : self.end]).to(device)
            on_device = link.to_device(words.view(torch.uint8)).view(torch.int32)
            storage = RowStorage(on_device, bases, lengths, chosen)
            shape = (self.end - self.begin, kernels.row_bytes)
            out = torch.empty(shape, dtype=torch.uint8, device=device)
            kernels.decode(storage, None, 0, out, packed.facts)
            return link.to_host(out.view(-1))


@dataclass(frozen=True)
class _WholeTensor:
    """A tensor that can only be decoded as a whole; by the host."""

    name: str
    ct: CompressedBlob

    @property
    def key(self) -> object:
        """Equal for pieces that use the same kernels."""
        return self.ct.codec.name

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.ct.raw_nbytes

    def unpacked(self, workers: Workers) -> Unpacked:
        """Return the bytes of the tensor."""
        return Unpacked(self.name, 0, flat_bytes(self.ct.decompress()))
