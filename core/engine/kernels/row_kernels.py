"""RowKernels: what tables, caches, histories and streams of weights ask of a row codec.

Packed rows are runs of little-endian 32-bit words, of any number of rows back to back. A row that
would not become shorter is kept raw, in exactly its bytes, padded to whole words among packed rows;
its length is then stored as 0. Where rows lie is the same for all codecs: see `RowStorage`,
`TableStorage` and `CacheStorage`. What the words of a packed row mean is the codec's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from ...errors import ArgumentTypeError
from .format import (
    CacheStorage,
    RowFormat,
    RowLayout,
    RowStorage,
    TableStorage,
    bases_of_rows,
    words_of_rows,
)
from .packed_products import MAX_WORDS, PackedLinear, is_multiplied_packed
from .rewriting import MAX_REWRITTEN_ROW_BYTES, LeavingRows, OverflowPlaces
from .typed_products import PackedRows


class PreparedRows(Protocol):
    """A table on the CPU that was made ready for many gathers; see `RowKernels.prepare_table`."""

    def gather(self, ids: torch.Tensor, out: torch.Tensor) -> tuple[int, int]:
        """Decode items; return the number of a damaged one, or -1, and the words that were read."""
        ...


class RowKernels(ABC):
    """A row codec on one device: measures, packs and unpacks rows, and gathers them by id.

    Made by `RowCodec.kernels`. It holds the tables that the codec's kernels read, so it is made
    once and kept. Threads may share one.

    Parameters
    ----------
    row_bytes : int
        Bytes of a row before packing.
    device : torch.device
        Where rows are packed and unpacked.
    clusters : int
        Number of profiles that rows choose from, 1 to 256.

    Attributes
    ----------
    row_bytes, clusters, device
        As above.
    row_words : int
        Words of a row that is kept raw among packed ones. Packed rows are shorter.
    length_dtype : torch.dtype
        Dtype of lengths: the smallest that holds the words of a packed row, read as unsigned.
    row_period : int
        1 where rows are packed alike whatever their numbers. Else those whose numbers differ by it
        are: who packs or unpacks a part of the rows alone begins it at a multiple.
    """

    row_period = 1

    def __init__(self, row_bytes: int, device: torch.device, clusters: int = 1) -> None:
        plain = RowFormat(row_bytes, 1, 1, grouped=False, uniform=True, clusters=clusters)
        self.row_bytes = row_bytes
        self.device = device
        self.clusters = clusters
        self.row_words = plain.row_words
        self.length_dtype = plain.length_dtype

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the kernels read on the device besides rows, for streams that use it to record."""
        return ()

    @abstractmethod
    def measure(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return how long rows are when packed.

        Parameters
        ----------
        rows : torch.Tensor
            uint8 ``[N, row_bytes]``, contiguous.

        Returns
        -------
        lengths : torch.Tensor
            ``[N]`` of `length_dtype`: words of the packed row, fewer than `row_words`; 0 for a row
            that is kept raw.
        row_clusters : torch.Tensor
            uint8 ``[N]``: the cluster that packs the row best; ``[0]`` when there is only one.
        """

    @abstractmethod
    def encode(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        row_clusters: torch.Tensor,
        bases: torch.Tensor,
        n_words: int,
    ) -> torch.Tensor:
        """Return rows packed, and raw where their length is 0, back to back.

        Parameters
        ----------
        rows, lengths, row_clusters : torch.Tensor
            What `measure` took and returned.
        bases : torch.Tensor
            int64 ``[ceil(N / 32) + 1]``, the first word of each block of 32 rows, and the end.
        n_words : int
            Words of all rows together, or more.

        Returns
        -------
        torch.Tensor
            int32 ``[n_words + PAD_WORDS]``, the last ones 0.
        """

    def pack_rows(self, rows: torch.Tensor) -> RowStorage:
        """Return rows packed; on a GPU without waiting for it.

        This measures and encodes; codecs that find lengths as they pack do both at once.

        Parameters
        ----------
        rows : torch.Tensor
            uint8 ``[N, row_bytes]``, contiguous.

        Returns
        -------
        RowStorage
            What `measure` and `encode` return. On a GPU there are more words than the rows take,
            as many as they take at the most: those behind the first PAD_WORDS are undefined.
        """
        lengths, row_clusters = self.measure(rows)
        bases, _ = bases_of_rows(words_of_rows(lengths, self.row_words))
        # On the CPU the exact size is known; on a GPU asking for it would wait.
        on_host = rows.device.type == "cpu"
        n_words = int(bases[-1]) if on_host else rows.shape[0] * self.row_words
        words = self.encode(rows, lengths, row_clusters, bases, n_words)
        return RowStorage(words, bases, lengths, row_clusters)

    @abstractmethod
    def decode(
        self,
        storage: RowStorage,
        ids: torch.Tensor | None,
        row_begin: int,
        out: torch.Tensor,
        facts: Mapping[str, int],
        sm_budget: int | None = None,
    ) -> int:
        """Unpack rows; on a GPU without waiting for it.

        Parameters
        ----------
        storage : RowStorage
            Packed rows. On a GPU their words may lie in page-locked host memory.
        ids : torch.Tensor or None
            int64 ``[n]`` rows, negative ones counted from the end; checked before on the CPU. None
            for the rows from `row_begin` on.
        row_begin : int
            First row when `ids` is None.
        out : torch.Tensor
            uint8 ``[n, row_bytes]``, contiguous.
        facts : mapping of str to int
            ``max_row_words`` and ``max_block_words``: the longest row, and 32 rows, of `storage`.
        sm_budget : int, optional
            Multiprocessors that decoding may use; all when left out.

        Returns
        -------
        int
            -1, or the number of a damaged row; then nothing was written.
        """

    @abstractmethod
    def gather(
        self,
        table: TableStorage,
        ids: torch.Tensor,
        out: torch.Tensor,
        *,
        cache: CacheStorage | None = None,
        counters: torch.Tensor | None = None,
        first_bad: torch.Tensor | None = None,
        lowest: int | None = None,
        order: torch.Tensor | None = None,
        sm_budget: int | None = None,
    ) -> int:
        """Unpack items chosen by id; on a GPU without waiting for it.

        Parameters
        ----------
        table : TableStorage
            Compact, in place or raw. On a GPU its words and overflow may lie in page-locked host
            memory. A packed row may be shorter than its length says, and in place it may have up to
            ``row_words - 1`` words, so its own words say where it ends.
        ids : torch.Tensor
            int32 or int64 ``[n]``, negative ones counted from the end.
        out : torch.Tensor
            ``[n, ...]``, contiguous, items of as many bytes as the table's.
        cache : CacheStorage, optional
            Rows that its map holds are taken from its slabs.
        counters : torch.Tensor, optional
            int64 ``[2 * (MAX_SLABS + 1)]``, added to: rows from each slab, rows from the table,
            words of the rows from each slab, words of those from the table.
        first_bad : torch.Tensor, optional
            int64 ``[1]``; nothing is gathered unless it is -1.
        lowest : int, optional
            On a GPU without `first_bad`: the lowest good id, 0 or ``-N``; left out where ids are
            known to be good. On the CPU they are checked before.
        order : torch.Tensor, optional
            int32 ``[n]`` on a GPU, read as unsigned: the sequence in which rows are fetched.
        sm_budget : int, optional
            Multiprocessors that the gather may use; all when left out.

        Returns
        -------
        int
            -1, or the number of the first item of a damaged row; then what `out` holds is
            undefined.
        """

    @property
    def rewrites(self) -> bool:
        """Whether `rewrite` is there for these rows; else they are packed first, and then moved."""
        return False

    def rewrite(self, table: TableStorage, places: OverflowPlaces, batch: LeavingRows) -> None:
        """Pack rows that leave a cache into their table; on a GPU without waiting for it.

        Where `rewrites`. See `kernels.cpu.rewrite_rows`; on a GPU the table's words and overflow
        may lie in page-locked host memory.
        """
        raise NotImplementedError(f"{type(self).__qualname__} does not rewrite rows")

    def for_products(
        self,
        table: TableStorage,
        dtype: torch.dtype,
        cache: CacheStorage | None,
        counters: torch.Tensor | None,
    ) -> PackedRows | None:
        """Return rows as typed products read them; None where they are gathered first.

        `table`, `cache` and `counters` are those of `gather`, `dtype` that of the elements.
        """
        return None

    def prepare_linear(
        self, storage: RowStorage, dtype: torch.dtype, facts: Mapping[str, int]
    ) -> PackedLinear | None:
        """Return what multiplies by a weight whose rows are packed; None where it is decoded first.

        Parameters
        ----------
        storage, facts
            As for `decode`: the weight ``[N, K]``, row by row.
        dtype : torch.dtype
            Of its elements.
        """
        return None

    @abstractmethod
    def locate(
        self, table: TableStorage, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return where rows of a table on the CPU lie; see `kernels.cpu.locate_rows`.

        Returns
        -------
        at : torch.Tensor
            int64 ``[n]``: the first word of each row.
        words : torch.Tensor
            int32 ``[n]``: its words when it is packed, or more where a row may be shorter than what
            finds it says; 0 when it is raw.
        kind : torch.Tensor
            uint8 ``[n]``: 0 for a row in ``table.words``, 1 for one in ``table.overflow``.

        Raises
        ------
        CorruptedDataError
            When a row is damaged.
        """

    @abstractmethod
    def check(self, storage: RowStorage) -> int:
        """Return the first damaged row of `storage` on the CPU, which may hold anything, or -1."""

    def prepare_decode(
        self,
        storage: RowStorage,
        out: torch.Tensor,
        facts: Mapping[str, int],
        sm_budget: int | None = None,
    ) -> Callable[[], Any]:
        """Return what unpacks all rows when called, on the stream that is current then."""
        return partial(self.decode, storage, None, 0, out, facts, sm_budget)

    def prepare_gather(
        self,
        table: TableStorage,
        ids: torch.Tensor,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> Callable[[], Any]:
        """Return what gathers good ids when called, on the stream that is current then."""
        return partial(self.gather, table, ids, out, sm_budget=sm_budget)

    def prepare_table(self, table: TableStorage) -> PreparedRows | None:
        """Return a table on the CPU made ready for many gathers; None where that gains nothing.

        It holds the tensors of the table; what these hold may change.
        """
        return None


class LayoutKernels(RowKernels):
    """RowKernels of rows that a `RowLayout` describes: the kernels of this package.

    Parameters
    ----------
    layout : RowLayout
        On the device.
    """

    def __init__(self, layout: RowLayout) -> None:
        f = layout.format
        super().__init__(f.row_bytes, layout.tables.device, f.clusters)
        self.layout = layout
        self._kernels = _backend(layout.tables.device)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The layout's tables."""
        return self.layout.tables, self.layout.starts

    def measure(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `kernels.cpu.packed_words`."""
        measured: tuple[torch.Tensor, torch.Tensor] = self._kernels.packed_words(rows, self.layout)
        return measured

    def encode(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        row_clusters: torch.Tensor,
        bases: torch.Tensor,
        n_words: int,
    ) -> torch.Tensor:
        """See `kernels.cpu.encode_rows`."""
        words: torch.Tensor = self._kernels.encode_rows(
            rows, self.layout, lengths, row_clusters, bases, n_words
        )
        return words

    def decode(
        self,
        storage: RowStorage,
        ids: torch.Tensor | None,
        row_begin: int,
        out: torch.Tensor,
        facts: Mapping[str, int],
        sm_budget: int | None = None,
    ) -> int:
        """See `kernels.cpu.decode_rows`; on a GPU damaged rows and bad ids are in the mailbox."""
        bad: int = self._kernels.decode_rows(
            storage, self.layout, ids, row_begin, out, facts, sm_budget
        )
        return bad

    def gather(
        self,
        table: TableStorage,
        ids: torch.Tensor,
        out: torch.Tensor,
        *,
        cache: CacheStorage | None = None,
        counters: torch.Tensor | None = None,
        first_bad: torch.Tensor | None = None,
        lowest: int | None = None,
        order: torch.Tensor | None = None,
        sm_budget: int | None = None,
    ) -> int:
        """See `kernels.cpu.gather_rows`; on a GPU damaged rows and bad ids are in the mailbox."""
        # Each option by its name: passing them on as a dict takes a microsecond.
        if lowest is None:
            return self._kernels.gather_rows(  # type: ignore[no-any-return]
                table,
                self.layout,
                ids,
                out,
                cache=cache,
                counters=counters,
                first_bad=first_bad,
                order=order,
                sm_budget=sm_budget,
            )
        return self._kernels.gather_rows(  # type: ignore[no-any-return]
            table,
            self.layout,
            ids,
            out,
            cache=cache,
            counters=counters,
            first_bad=first_bad,
            lowest=lowest,
            order=order,
            sm_budget=sm_budget,
        )

    def for_products(
        self,
        table: TableStorage,
        dtype: torch.dtype,
        cache: CacheStorage | None,
        counters: torch.Tensor | None,
    ) -> PackedRows | None:
        """Return the rows with their layout."""
        return PackedRows(table, self.layout, dtype, cache, counters)

    def prepare_linear(
        self, storage: RowStorage, dtype: torch.dtype, facts: Mapping[str, int]
    ) -> PackedLinear | None:
        """See `kernels.cpu.prepare_linear`."""
        if not is_multiplied_packed(self.layout, dtype) or storage.words.numel() > MAX_WORDS:
            return None
        linear: PackedLinear = self._kernels.prepare_linear(storage, self.layout, facts)
        return linear

    @property
    def rewrites(self) -> bool:
        """Whether a packed row fits where it is put together."""
        return self.row_bytes <= MAX_REWRITTEN_ROW_BYTES

    def rewrite(self, table: TableStorage, places: OverflowPlaces, batch: LeavingRows) -> None:
        """See `kernels.cpu.rewrite_rows`."""
        self._kernels.rewrite_rows(table, self.layout, places, batch)

    def locate(
        self, table: TableStorage, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `kernels.cpu.locate_rows`."""
        from . import cpu

        return cpu.locate_rows(table, self.layout, ids)

    def check(self, storage: RowStorage) -> int:
        """See `kernels.cpu.check_rows`."""
        from . import cpu

        return cpu.check_rows(storage, self.layout)

    def prepare_decode(
        self,
        storage: RowStorage,
        out: torch.Tensor,
        facts: Mapping[str, int],
        sm_budget: int | None = None,
    ) -> Callable[[], Any]:
        """Return a launch of which all is known."""
        if self.device.type == "cpu":
            return super().prepare_decode(storage, out, facts, sm_budget)
        decode: Callable[[], None] = self._kernels.prepare_decode(
            storage, self.layout, out, facts, sm_budget
        )
        return decode

    def prepare_gather(
        self,
        table: TableStorage,
        ids: torch.Tensor,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> Callable[[], Any]:
        """Return a launch of which all is known."""
        if self.device.type == "cpu":
            return super().prepare_gather(table, ids, out, sm_budget)
        gather: Callable[[], None] = self._kernels.prepare_gather(
            table, self.layout, ids, out, sm_budget
        )
        return gather

    def prepare_table(self, table: TableStorage) -> PreparedRows | None:
        """Return the table with all that its kernels read in one place."""
        from .cpu.items import PreparedItems
        from .cpu.prepared import PreparedTable

        if table.items_per_row > 1:
            return PreparedItems(table, self.layout)
        if PreparedTable.serves(table, self.layout):
            return PreparedTable(table, self.layout)
        return None

    def __reduce__(self) -> Any:
        """Take the layout along; a device's kernels are found again."""
        return type(self), (self.layout,)


def _backend(device: torch.device) -> Any:
    """Return the functions for a device. An error of an earlier call there is left to others."""
    if device.type == "cpu":
        from . import cpu

        return cpu
    if device.type == "cuda":
        from .cuda import kernels_on

        return kernels_on(device, raise_errors=False)
    raise ArgumentTypeError(f"device: {device}, accepted are cpu and cuda")
