"""Compressing the tensors of a file, piece by piece: on a GPU, or by several threads.

A file says at its beginning how long everything is, so all tensors are measured before the first is
packed. Both goes over the pieces of a tensor, some megabytes each, in any order: at no time more
than a few of them are in memory, beyond what the tensors themselves take (nothing where they are
mapped from a file).
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..compressed import AnyCompressed, compress
from ..container import StreamedFile
from ..engine.codecs import (
    InvariantCodec,
    PackedRows,
    PlanCache,
    RawCodec,
    RowCodec,
    WordRowCodec,
)
from ..engine.codecs.base import elements, gathered_by_kernels
from ..engine.codecs.registry import fit_codec, get_codec
from ..engine.kernels.format import (
    BLOCK_ROWS,
    MAX_ROW_BYTES,
    PAD_WORDS,
    bases_of_rows,
    ceil_div,
    words_of_rows,
)
from ..engine.kernels.row_kernels import RowKernels
from ..engine.progress import Progress
from ..engine.row_map import row_map
from .tensor_rows import PIECE_BYTES, TensorRows
from .workers import Workers

#: Tensors of fewer bytes are packed on the CPU before a GPU has them.
LEAST_DEVICE_BYTES = 1 << 20

#: How often a tensor's bytes count as progress.
PASSES = 3

#: Puts file and tensor before the message of an error: called with the name of the tensor.
Naming = Callable[[str], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Outline:
    """A packed tensor of which parts are on the meta device: their content comes later."""

    codec: RowCodec
    packed: PackedRows
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Bytes of everything, as `CompressedTensor.nbytes`."""
        return self.packed.nbytes + self.codec.profile_bytes


class FilePacker:
    """Packs tensors to a file.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        On the CPU, dense.
    codec : str
        A name, or ``"auto"``; see `bitslab.compress`.
    options : mapping
        Options of the codec's `fit`.
    workers : Workers
        What packs, and where.
    naming : callable
        Names the tensor in errors.
    progress : Progress
        Advanced by the bytes of the tensors PASSES times: planned, measured, and written.

    Attributes
    ----------
    outlines : dict of str to Outline, CompressedTensor or CompressedBlob
        What becomes of each tensor, once it is measured.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        codec: str,
        options: Mapping[str, Any],
        workers: Workers,
        naming: Naming,
        progress: Progress,
    ) -> None:
        self._tensors = tensors
        self._codec = codec
        self._options = dict(options)
        self._workers = workers
        self._naming = naming
        self._progress = progress
        self._pieces: list[_Piece] = []
        self.outlines: dict[str, Outline | AnyCompressed] = {}

    def measure(self) -> None:
        """Choose codecs, and find out how long everything becomes: `outlines`."""
        cls = InvariantCodec if self._codec == "auto" else get_codec(self._codec)
        streamed = issubclass(cls, WordRowCodec) and gathered_by_kernels(cls)
        planned: dict[str, TensorRows] = {}
        found: dict[str, Outline | AnyCompressed] = {}
        for name, t in self._tensors.items():
            with self._naming(name):
                if not _is_plain(t) or not (streamed or cls is RawCodec):
                    found[name] = compress(t, self._codec, **self._options)
                    self._progress.advance(PASSES * t.nbytes)
                    continue
                rows = TensorRows(t)
                too_long = self._codec == "auto" and rows.row_bytes > MAX_ROW_BYTES
                if cls is RawCodec or t.numel() == 0 or too_long:
                    found[name] = self._raw(t, name)
                    self._progress.advance((PASSES - 1) * t.nbytes)
                else:
                    planned[name] = rows
        chosen = self._chosen(cls, planned) if issubclass(cls, RowCodec) else []
        measured = self._measured(planned, chosen)
        for name, t in self._tensors.items():
            if name in planned:
                outline, pieces = measured[name]
                if self._codec == "auto" and outline.nbytes >= t.nbytes:
                    found[name] = self._raw(t, name)
                else:
                    found[name] = outline
                    self._pieces += pieces
            self.outlines[name] = found[name]

    def write(self, path: str | os.PathLike[str], metadata: Mapping[str, str] | None) -> None:
        """Pack the tensors and write the file, in place."""
        file = StreamedFile(path, self.outlines, metadata)
        try:
            self._workers.each(
                lambda piece: piece.write(file, self._workers),
                self._pieces,
                lambda piece, _: self._progress.advance(piece.raw_bytes),
                key=lambda piece: piece.key,
            )
            file.finish()
        finally:
            file.close()

    def _raw(self, t: torch.Tensor, name: str) -> Outline:
        """Describe a tensor that is kept raw, and plan its pieces."""
        items = t if t.dim() else t.reshape(1)
        options = self._options if self._codec == RawCodec.name else {}
        codec = RawCodec.fit(items, **options)
        data = TensorRows(t).data
        n_rows = row_map(t.shape, elements(codec.row_shape)).n_rows
        part = torch.empty((n_rows, *codec.row_shape), dtype=t.dtype, device="meta")
        for begin in range(0, data.shape[0], PIECE_BYTES):
            self._pieces.append(_RawPiece(name, data[begin : begin + PIECE_BYTES], begin))
        return Outline(codec, PackedRows(n_rows, {"rows": part}), t.shape)

    def _chosen(self, cls: type[RowCodec], planned: Mapping[str, TensorRows]) -> list[RowCodec]:
        """Plan the codecs; tensors of one dtype and row size may share a plan.

        What is chosen depends on the tensors and their order alone, not on the threads.
        """
        share = cls is InvariantCodec and self._options.get("clusters", 1) == 1
        plans = PlanCache()
        chosen: dict[str, RowCodec] = {}
        made: list[PlanCache] = []

        def fit(name: str) -> tuple[RowCodec, PlanCache]:
            rows, known = planned[name], plans.copy()
            with self._naming(name):
                given = {"seed": 0, "n_rows": rows.n_rows, "plans": known if share else None}
                sample = rows.typed(0, rows.n_rows)
                return fit_codec(cls, sample, self._options, **given), known

        def give(name: str, found: tuple[RowCodec, PlanCache]) -> None:
            chosen[name], known = found
            made.append(known)
            self._progress.advance(planned[name].data.shape[0])

        for wave in _waves(planned) if share else [list(planned)]:
            self._workers.each(fit, wave, give)
            for known in made:  # not before: the others of the wave would know them or not
                plans.update(known)
            made.clear()
        return [chosen[name] for name in planned]

    def _measured(
        self, planned: Mapping[str, TensorRows], codecs: Sequence[RowCodec]
    ) -> dict[str, tuple[Outline, list[_Piece]]]:
        """Measure all rows; return what becomes of each tensor, and the pieces to pack."""
        work = [
            _Rows(name, rows, codec, self._workers.device)
            for (name, rows), codec in zip(planned.items(), codecs, strict=True)
        ]
        self._workers.settle()
        ranges = [(its, begin, end) for its in work for begin, end in its.rows.ranges()]
        lengths: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {its.name: [] for its in work}

        def add(piece: tuple[_Rows, int, int], found: tuple[torch.Tensor, torch.Tensor]) -> None:
            its, begin, end = piece
            lengths[its.name].append(found)
            self._progress.advance(its.rows.bytes_of(begin, end))

        self._workers.each(
            lambda piece: piece[0].measure(piece[1], piece[2], self._workers),
            ranges,
            add,
            key=lambda piece: piece[0].key,
        )
        return {its.name: its.outlined(self._tensors[its.name], lengths[its.name]) for its in work}


def _waves(planned: Mapping[str, TensorRows]) -> list[list[str]]:
    """Return the names of tensors by when they are planned: those of a wave all at once.

    Of one dtype and row size the first goes alone, then one, two, four: each knows the plans of the
    waves before, and few are planned in vain where a tensor is of a kind that is new.
    """
    alike: dict[object, list[str]] = {}
    for name, rows in planned.items():
        alike.setdefault((rows.dtype, rows.row_bytes), []).append(name)
    waves: list[list[str]] = []
    begin, end = 0, 1
    while any(len(names) > begin for names in alike.values()):
        waves.append([name for names in alike.values() for name in names[begin:end]])
        begin, end = end, 2 * end
    return waves


def _is_plain(t: torch.Tensor) -> bool:
    """Return whether a tensor is dense and has data."""
    return t.layout == torch.strided and not t.is_quantized and not t.is_meta


class _Rows:
    """The rows of a tensor, with the codec that packs them and its kernels."""

    def __init__(self, name: str, rows: TensorRows, codec: RowCodec, device: torch.device) -> None:
        self.name = name
        self.rows = rows
        self.codec = codec
        on_device = device.type in codec.device_types and rows.data.shape[0] >= LEAST_DEVICE_BYTES
        self.device = device if on_device else torch.device("cpu")
        self.kernels: RowKernels = codec.kernels(self.device)
        #: Pieces of one key are packed by the same compiled kernels.
        self.key = (self.device, codec.describe(), rows.row_bytes)

    def measure(self, begin: int, end: int, workers: Workers) -> tuple[torch.Tensor, torch.Tensor]:
        """Return lengths and clusters of a range of rows, on the CPU."""
        data = self.rows.rows(begin, end)
        if self.device.type == "cpu":
            return self.kernels.measure(data)
        link = workers.link()
        on_device = link.to_device(data.view(-1)).view(data.shape)
        with link.lane.on():
            lengths, row_clusters = self.kernels.measure(on_device)
            return lengths.cpu(), row_clusters.cpu()

    def outlined(
        self, t: torch.Tensor, found: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[Outline, list[_Piece]]:
        """Return the packed tensor without its words, and the pieces that are to be packed."""
        lengths = torch.cat([each for each, _ in found])
        row_clusters = torch.cat([each for _, each in found])
        bases, _ = bases_of_rows(words_of_rows(lengths, self.kernels.row_words))
        n_words = int(bases[-1]) + PAD_WORDS
        words = torch.empty(n_words, dtype=torch.int32, device="meta")
        parts = {"words": words, "bases": bases, "lengths": lengths}
        if self.kernels.clusters > 1:
            parts["row_clusters"] = row_clusters
        packed = PackedRows(self.rows.n_rows, parts)
        pieces: list[_Piece] = [
            _WordsPiece(self, begin, end, bases, lengths[begin:end], row_clusters[begin:end])
            for begin, end in self.rows.ranges()
        ]
        return Outline(self.codec, packed, t.shape), pieces


class _Piece(ABC):
    """A part of a tensor that is written at once."""

    key: object = None
    raw_bytes: int

    @abstractmethod
    def write(self, file: StreamedFile, workers: Workers) -> None:
        """Pack it and write it."""


class _RawPiece(_Piece):
    """Bytes of a tensor that is kept raw."""

    def __init__(self, name: str, data: torch.Tensor, begin: int) -> None:
        self._name = name
        self._data = data
        self._begin = begin
        self.raw_bytes = data.shape[0]

    def write(self, file: StreamedFile, workers: Workers) -> None:
        file.write(self._name, "rows", self._begin, self._data)


class _WordsPiece(_Piece):
    """A range of rows to be packed, whole blocks of them."""

    def __init__(
        self,
        its: _Rows,
        begin: int,
        end: int,
        bases: torch.Tensor,
        lengths: torch.Tensor,
        row_clusters: torch.Tensor,
    ) -> None:
        self.key = its.key
        self.raw_bytes = its.rows.bytes_of(begin, end)
        self._its = its
        self._begin = begin
        self._end = end
        self._bases = bases
        self._lengths = lengths
        self._row_clusters = row_clusters

    def write(self, file: StreamedFile, workers: Workers) -> None:
        its = self._its
        first, last = self._begin // BLOCK_ROWS, ceil_div(self._end, BLOCK_ROWS)
        first_word, n_words = int(self._bases[first]), int(self._bases[last] - self._bases[first])
        bases = self._bases[first : last + 1] - first_word
        data = its.rows.rows(self._begin, self._end)
        # Behind the last row of all, and only there, is the filler.
        kept_words = n_words + (PAD_WORDS if self._end == its.rows.n_rows else 0)
        lengths, row_clusters = self._lengths, self._row_clusters
        if its.device.type == "cpu":
            words = its.kernels.encode(data, lengths, row_clusters, bases, n_words)
            packed = words[:kept_words].view(torch.uint8)
        else:
            link = workers.link()
            on_device = link.to_device(data.view(-1)).view(data.shape)
            with link.lane.on():
                lengths, row_clusters, bases = (
                    t.to(its.device) for t in (lengths, row_clusters, bases)
                )
                words = its.kernels.encode(on_device, lengths, row_clusters, bases, n_words)
                packed = link.to_host(words[:kept_words].view(torch.uint8))
        file.write(its.name, "words", 4 * first_word, packed)
