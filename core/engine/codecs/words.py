"""WordRowCodec: a row codec whose packed rows are runs of words, which all systems store."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import torch

from ...errors import ArgumentError, ArgumentTypeError, CorruptedDataError
from ..kernels import kernels_for
from ..kernels.format import (
    BLOCK_ROWS,
    PAD_WORDS,
    RowFormat,
    RowStorage,
    bases_of_rows,
    ceil_div,
    unsigned_lengths,
    words_of_rows,
)
from ..kernels.row_kernels import RowKernels
from ..transfer.across import Via, decode_across
from .base import (
    PackedRows,
    RowCodec,
    bits_in_order,
    check_in_range,
    check_indices_argument,
    check_integer,
    check_out_argument,
    check_packed_argument,
    check_range_argument,
    check_rows_argument,
    check_tensor_argument,
    rows_as_bytes,
)

CPU = torch.device("cpu")


class WordRowCodec(RowCodec):
    """A row codec made of its `kernels`: these say what packed rows are, all else is here.

    A subclass has `fit`, `kernels`, `profile_bytes`, `to_config` and `from_config`. Its rows can be
    packed and unpacked here, lie in files, and be stored by tables, their caches, histories of K
    and V, and weights that stream.
    """

    @abstractmethod
    def kernels(self, device: torch.device) -> RowKernels:
        """Return what measures, packs, unpacks and gathers rows on a device; keep it.

        Raises
        ------
        ArgumentTypeError
            For a device that is not of `device_types`.
        """

    @property
    def clusters(self) -> int:
        """Number of profiles that rows choose from."""
        return self._kept(CPU).clusters

    def row_metadata_bytes(self, n_rows: int) -> int:
        """Return the bytes of offsets, lengths and cluster ids of `n_rows` rows."""
        fmt = RowFormat(self.row_bytes, 1, 1, grouped=False, uniform=True, clusters=self.clusters)
        return fmt.row_metadata_bytes(n_rows)

    # Encoding and decoding

    def encode(self, rows: torch.Tensor) -> PackedRows:
        """Pack rows; those that would not shrink are kept raw.

        Parameters
        ----------
        rows : torch.Tensor
            ``[N, *row_shape]`` of the codec's dtype, on any device; the result is on the same.

        Returns
        -------
        PackedRows
            Parts ``words``, ``bases``, ``lengths`` and, with clusters, ``row_clusters`` (see
            `bitslab.engine.kernels.format.RowStorage`).

        Notes
        -----
        On a GPU this waits for the packed size once, to allocate the result.
        """
        check_rows_argument(self, rows)
        return self._encoded(rows_as_bytes(rows, self.row_bytes))

    def encode_pieces(self, pieces: Iterable[torch.Tensor]) -> PackedRows:
        """Pack rows that come piece by piece, as `encode` would all of them at once.

        Parameters
        ----------
        pieces : iterable of torch.Tensor
            uint8 ``[n, row_bytes]``, contiguous, on one device; n a multiple of 32 but for the
            last. A piece is asked for when the one before has been packed, on a GPU: when that was
            queued.

        Returns
        -------
        PackedRows
            Of all rows, equal to what `encode` returns.

        Raises
        ------
        ArgumentError
            When there are no pieces, or one that is not the last has another number of rows.
        """
        packed: list[PackedRows] = []
        for piece in pieces:
            if packed and packed[-1].n_rows % BLOCK_ROWS:
                raise ArgumentError(
                    f"pieces: {packed[-1].n_rows} rows in piece {len(packed) - 1} of several, "
                    f"accepted are multiples of {BLOCK_ROWS}"
                )
            period = self._kept(CPU).row_period
            if packed and packed[-1].n_rows % period:
                raise ArgumentError(
                    f"pieces: {packed[-1].n_rows} rows in piece {len(packed) - 1} of several, "
                    f"accepted are multiples of {period}, the rows of all heads"
                )
            packed.append(self._encoded(piece))
        if not packed:
            raise ArgumentError("pieces: there are none")
        return packed[0] if len(packed) == 1 else _joined(packed)

    def decode(
        self,
        packed: PackedRows,
        indices: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
        via: Via = "auto",
        sm_budget: int | None = None,
    ) -> torch.Tensor:
        """Unpack rows.

        Parameters
        ----------
        packed : PackedRows
            What this codec's `encode` returned, on a CPU or GPU.
        indices : torch.Tensor, optional
            Integers ``[n]``, the rows wanted; negative ones count from the end. All rows, or
            those from `start` to `stop`, when left out.
        out : torch.Tensor, optional
            ``[n, *row_shape]`` of the codec's dtype to write to, on the device of `packed`, or on
            a GPU when `packed` is in host memory: then the packed bytes cross the link and are
            unpacked there.
        start, stop : int
            Range of rows, when `indices` is left out.
        via : {"auto", "copy-engine", "zero-copy"}
            How packed rows in host memory reach a GPU: copied by the copy engine and decoded piece
            by piece, or read by the decoding kernel itself. "auto" copies, except rows chosen by
            index.
        sm_budget : int, optional
            Decoding on a GPU starts no more blocks than this many multiprocessors hold; all when
            left out.

        Returns
        -------
        torch.Tensor
            `out`, or a new tensor.

        Raises
        ------
        IndexRangeError
            When an index is out of range; `out` is untouched. With indices on a GPU the error
            comes from the next call, or from `bitslab.raise_pending_errors`, because decoding
            never waits for the GPU.
        CorruptedDataError
            When packed data is damaged; `out` is untouched on the CPU.
        """
        storage = self._storage(packed)
        n_rows = packed.n_rows
        target = packed.device
        if out is not None:
            check_tensor_argument("out", out)
            target = out.device
        if via not in get_args(Via):
            raise ArgumentError(f"via: {via!r}, accepted are {', '.join(get_args(Via))}")
        if sm_budget is not None:
            check_integer("sm_budget", sm_budget, range(1, 1 << 31))
        if target != packed.device and packed.device.type != "cpu":
            raise ArgumentTypeError(f"out: on {target}, expected {packed.device}")
        wanted = None
        if indices is None:
            n = check_range_argument(start, stop, n_rows) - start
        else:
            if start != 0 or stop is not None:
                raise ArgumentError("start, stop: not together with indices")
            wanted = check_indices_argument(indices)
            n = wanted.shape[0]
        if out is not None:
            sources = [*packed.parts.values(), *([] if indices is None else [indices])]
            check_out_argument(out, (n, *self.row_shape), self.dtype, target, sources)
        if wanted is not None and target.type == "cpu":
            wanted = wanted.cpu()
        if wanted is not None and wanted.device.type == "cpu":
            check_in_range(wanted, n_rows, "indices")
        result = out
        if result is None or not bits_in_order(result):
            result = torch.empty((n, *self.row_shape), dtype=self.dtype, device=target)
        data = rows_as_bytes(result, self.row_bytes)
        if n:
            kernels = self._on(target)
            facts = packed.facts
            if "max_block_words" not in facts:  # put together by hand
                facts = _offsets(packed.parts["lengths"], kernels.row_words)[1]
            if target != packed.device:
                decode_across(kernels, storage, facts, wanted, start, data, via, sm_budget)
            else:
                ids = None if wanted is None else wanted.to(target)
                bad = kernels.decode(storage, ids, start, data, facts, sm_budget)
                if bad >= 0:
                    raise CorruptedDataError(f"packed: row {bad} is damaged; nothing was decoded")
        return result if out is None or out is result else out.copy_(result)

    def packed_bytes(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the bytes that each row takes packed, its per-row metadata not counted.

        Parameters
        ----------
        rows : torch.Tensor
            ``[N, *row_shape]`` of the codec's dtype, on any device.

        Returns
        -------
        torch.Tensor
            int64 ``[N]`` on the same device; row_bytes for a row kept raw.
        """
        check_rows_argument(self, rows)
        lengths, _ = self._on(rows.device).measure(rows_as_bytes(rows, self.row_bytes))
        return torch.where(lengths == 0, self.row_bytes, 4 * unsigned_lengths(lengths))

    def adopt(self, n_rows: int, parts: Mapping[str, torch.Tensor]) -> PackedRows:
        """Check parts that came from outside and return them as packed rows.

        Parameters
        ----------
        n_rows : int
            Number of rows that they should hold.
        parts : mapping of str to torch.Tensor
            On the CPU, as `encode` names them; contents may be anything.

        Raises
        ------
        ArgumentTypeError
            When a part is not on the CPU, where rows are checked.
        CorruptedDataError
            When a part is missing, has another dtype or shape, or any row is damaged.
        """
        packed = self.adopt_unread(n_rows, parts)
        bad = self._kept(CPU).check(self._storage(packed))
        if bad >= 0:
            raise CorruptedDataError(f"packed rows: row {bad} is damaged")
        return packed

    def adopt_unread(self, n_rows: int, parts: Mapping[str, torch.Tensor]) -> PackedRows:
        """Check that lengths, offsets and words fit together; `decode` checks the rows it reads.

        Parameters, returned value and errors are those of `adopt`.
        """
        kernels = self._kept(CPU)
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and part.device.type != "cpu":
                raise ArgumentTypeError(f"parts: {name} on {part.device}, expected cpu")
        try:
            self._storage(PackedRows(n_rows, dict(parts)))
        except (ArgumentError, ArgumentTypeError) as error:
            raise CorruptedDataError(str(error)) from None
        if n_rows and int(unsigned_lengths(parts["lengths"]).max()) >= kernels.row_words:
            raise CorruptedDataError("packed rows: a packed row is as long as a raw one")
        bases, facts = _offsets(parts["lengths"], kernels.row_words)
        n_words = parts["words"].shape[0] - PAD_WORDS
        if not torch.equal(bases, parts["bases"]) or facts["n_words"] != n_words:
            raise CorruptedDataError("packed rows: offsets, lengths and words do not fit together")
        return PackedRows(n_rows, dict(parts), facts)

    # Inside

    def _encoded(self, data: torch.Tensor) -> PackedRows:
        """Pack uint8 ``[N, row_bytes]``, contiguous."""
        kernels = self._on(data.device)
        lengths, row_clusters = kernels.measure(data)
        bases, facts = _offsets(lengths, kernels.row_words)
        words = kernels.encode(data, lengths, row_clusters, bases, facts["n_words"])
        parts = {"words": words, "bases": bases, "lengths": lengths}
        if kernels.clusters > 1:
            parts["row_clusters"] = row_clusters
        return PackedRows(data.shape[0], parts, facts)

    def _kept(self, device: torch.device) -> RowKernels:
        """Return the kernels for a device, made at the first use."""
        kept: dict[torch.device, RowKernels] = self.__dict__.setdefault("_kernels_on", {})
        kernels = kept.get(device)
        if kernels is None:
            kernels = kept[device] = self.kernels(device)
        return kernels

    def _on(self, device: torch.device) -> RowKernels:
        """Return the kernels for a device; raise the error of an earlier call there, if any."""
        kernels_for(device)
        kernels = self._kept(device)
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            # Callers cannot see the tables: tell the allocator itself which streams read them.
            stream = torch.cuda.current_stream(device)
            for t in kernels.tensors:
                t.record_stream(stream)
        return kernels

    def _expected_parts(
        self, n_rows: int | None
    ) -> dict[str, tuple[torch.dtype, tuple[int | None, ...]]]:
        """Dtypes and shapes of the parts of `n_rows` packed rows."""
        kernels = self._kept(CPU)
        bases = None if n_rows is None else ceil_div(n_rows, BLOCK_ROWS) + 1
        expected: dict[str, tuple[torch.dtype, tuple[int | None, ...]]] = {
            "words": (torch.int32, (None,)),
            "bases": (torch.int64, (bases,)),
            "lengths": (kernels.length_dtype, (n_rows,)),
        }
        if kernels.clusters > 1:
            expected["row_clusters"] = (torch.uint8, (n_rows,))
        return expected

    def _storage(self, packed: PackedRows) -> RowStorage:
        check_packed_argument(packed, self._expected_parts(getattr(packed, "n_rows", None)))
        p = packed.parts
        if p["words"].shape[0] < PAD_WORDS:
            raise ArgumentError(
                f"packed: {p['words'].shape[0]} words, expected {PAD_WORDS} or more"
            )
        empty = torch.empty(0, dtype=torch.uint8, device=packed.device)
        return RowStorage(p["words"], p["bases"], p["lengths"], p.get("row_clusters", empty))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the kernels, which are made again."""
        return {name: value for name, value in self.__dict__.items() if name != "_kernels_on"}


def _offsets(lengths: torch.Tensor, row_words: int) -> tuple[torch.Tensor, dict[str, int]]:
    """Return the bases of the blocks of rows, and the sizes that decode needs on the host.

    On a GPU this waits once.
    """
    words = words_of_rows(lengths, row_words)
    bases, by_block = bases_of_rows(words)
    totals = [0, 0, 0]
    if len(words):
        totals = torch.stack([bases[-1], words.max(), by_block.max()]).tolist()
    names = ("n_words", "max_row_words", "max_block_words")
    return bases, dict(zip(names, totals, strict=True))


def _joined(packed: Sequence[PackedRows]) -> PackedRows:
    """Return rows that were packed in pieces of whole blocks as one."""
    words, bases = [], []
    at = 0
    for piece in packed[:-1]:
        words.append(piece.parts["words"][: piece.facts["n_words"]])
        bases.append(piece.parts["bases"][:-1] + at)
        at += piece.facts["n_words"]
    last = packed[-1]
    words.append(last.parts["words"])  # with what pads the end
    bases.append(last.parts["bases"] + at)
    parts = {"words": torch.cat(words), "bases": torch.cat(bases)}
    for name in last.parts:
        if name not in parts:  # one element a row
            parts[name] = torch.cat([piece.parts[name] for piece in packed])
    facts = {
        name: max(piece.facts[name] for piece in packed)
        for name in ("max_row_words", "max_block_words")
    }
    n_rows = sum(piece.n_rows for piece in packed)
    return PackedRows(n_rows, parts, {"n_words": at + last.facts["n_words"], **facts})
