"""Segments: blocks of tokens that one codec packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ..engine.codecs import RowCodec
from ..engine.kernels import kernels_for
from ..engine.kernels.cuda import kernels_on
from ..engine.kernels.format import (
    BLOCK_ROWS,
    TableStorage,
    bases_of_rows,
    ceil_div,
    words_of_rows,
)
from ..engine.kernels.uploads import in_stream_order
from ..errors import ArgumentError, CorruptedDataError
from .arena import GROWTH
from .packing import Packed, TokenRows
from .words import grown


@dataclass
class Sequences:
    """Sequences of a block; they may change between its packing and its commit.

    Parameters
    ----------
    packed : int
        Sequences that were packed.
    index : torch.Tensor
        int32 ``[B]`` on the device: which of them each sequence is.
    plain : bool
        Whether that is still 0, 1, 2 ...
    """

    packed: int
    index: torch.Tensor
    plain: bool = True


#: Words that are copied at once where sequences that are gone are left out.
PIECE_WORDS = 4 << 20


class RowsThere(NamedTuple):
    """Rows of the sequences that are there: their lengths, and where they begin from word 0 on."""

    lengths: torch.Tensor
    bases: torch.Tensor


class Segment:
    """The blocks of a history from one fit of its codec to the next.

    Parameters
    ----------
    rows : TokenRows
        What a row is.
    codec : RowCodec or None
        What packs the rows; None keeps them raw.
    device : torch.device
        Where the metadata lies.
    first_word : int
        Where the words of its first row lie among the history's words.
    batch : int
        Sequences.

    Attributes
    ----------
    kernels : RowKernels or None
        The codec's, on the device; None where rows are kept raw.
    batch : int
        Sequences.
    cut_tokens : int
        Tokens at the end of the last block that have been removed. More than 0 of a lossy codec
        alone, and then no block is added: what is left would be quantised twice if it were packed
        again.
    origin : torch.Tensor or None
        int32 ``[n_blocks, B]`` on the device: the row at which head 0 of a sequence starts in a
        block. Sequences are reordered, repeated and chosen by changing nothing but this. It is
        never written to, only replaced. None while sequences are as they were packed: then blocks
        lie one after the other, and sequences in them.
    """

    def __init__(
        self,
        rows: TokenRows,
        codec: RowCodec | None,
        device: torch.device,
        first_word: int,
        batch: int,
    ) -> None:
        self.rows = rows
        self.codec = codec
        with in_stream_order():  # `PackedTokens.ready` is recorded behind the tables
            self.kernels = None if codec is None else codec.kernels(device)
        if self.kernels is not None and self.kernels.clusters != 1:
            raise ArgumentError(
                f"plans: a codec with {self.kernels.clusters} clusters, histories take one cluster"
            )
        self.first_word = first_word
        self.batch = batch
        self.cut_tokens = 0
        self.origin: torch.Tensor | None = None
        dtype = torch.uint8 if self.kernels is None else self.kernels.length_dtype
        self._lengths = torch.empty(0, dtype=dtype, device=device)
        self._bases = torch.empty(0, dtype=torch.int64, device=device)
        self._block_rows: list[int] = []  # the row at which each block starts
        self._raw_bytes: list[int] = []  # that the tokens of each block took when it was packed
        self._tables: dict[int, TableStorage] = {}  # by the address of the words
        self.n_rows = 0
        self.max_words = 0  # of a packed row
        self.expected_words = 0.0  # mean of a row in the first blocks: the baseline of drift
        row = torch.arange(rows.head_rows, dtype=torch.int32, device=device)
        head = torch.arange(rows.heads, dtype=torch.int32, device=device) * rows.head_rows
        self._within = (head[:, None] + row)[None, :, None]  # [1, H, 1, R]

    @property
    def n_blocks(self) -> int:
        """Blocks that it holds."""
        return len(self._block_rows)

    @property
    def tokens(self) -> int:
        """Tokens of a sequence."""
        return self.n_blocks * self.rows.block_tokens - self.cut_tokens

    @property
    def lossy(self) -> bool:
        """Whether decoded tokens may not be the bits that were packed, as of all tiles."""
        return self.codec is not None and self.codec.error_bound is not None

    @property
    def token_bytes(self) -> int:
        """Bytes of the tokens of all sequences as they are now, unpacked."""
        return self.tokens * self.rows.heads * self.rows.token_bytes * self.batch

    @property
    def raw_bytes(self) -> int:
        """Bytes that the tokens of all blocks took before packing."""
        return sum(self._raw_bytes)

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all blocks of all sequences as they are now, decoded."""
        tokens = self.n_blocks * self.rows.block_tokens
        return tokens * self.rows.heads * self.rows.token_bytes * self.batch

    @property
    def metadata_bytes(self) -> int:
        """Bytes that find and decode the rows, as much of them as is used."""
        origin = 0 if self.origin is None else self.origin.nbytes
        if self.kernels is None:
            return origin
        entries = ceil_div(self.n_rows, BLOCK_ROWS) + 1
        tables = sum(t.nbytes for t in self.kernels.tensors)
        if self.codec is not None and self.lossy:  # tables of codes are made of their lengths
            tables = self.codec.profile_bytes
        rows = self.n_rows * self._lengths.itemsize + 8 * entries
        return rows + tables + origin

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of all metadata, with room ahead."""
        origin = 0 if self.origin is None else self.origin.nbytes
        if self.kernels is None:
            return origin + self._within.nbytes
        tables = sum(t.nbytes for t in self.kernels.tensors)
        return origin + self._within.nbytes + tables + self._lengths.nbytes + self._bases.nbytes

    def metadata_bytes_of(self, n_rows: int) -> int:
        """Return the bytes on the device that so many rows more take at the most."""
        if self.kernels is None:
            return 0
        entries = ceil_div(n_rows, BLOCK_ROWS) + 1
        nbytes = n_rows * self._lengths.itemsize + entries * self._bases.itemsize
        return nbytes + nbytes // GROWTH

    @property
    def in_order(self) -> bool:
        """Whether rows are raw and lie as they were packed: no row is to be looked up."""
        return self.kernels is None and self.origin is None

    @property
    def key(self) -> tuple[int, ...] | None:
        """Key that segments with equal `ids` share, as those of most layers do; or None."""
        rows = self.rows
        if self.origin is not None or self.in_order:
            return None
        return self.n_blocks, self.batch, rows.heads, rows.head_rows

    def ids(self) -> torch.Tensor:
        """Return the rows of all tokens, int32 ``[B * H * rows]``, in the order of `decoding`.

        There are none where rows are `in_order`.
        """
        if self.in_order:
            return self._within.new_empty(0)
        origin = self._plain_origin() if self.origin is None else self.origin
        return (origin.t()[:, None, :, None] + self._within).flatten()

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that decoding reads, besides the words."""
        found = [self._within, self._lengths, self._bases]
        if self.origin is not None:
            found.append(self.origin)
        return found if self.kernels is None else [*found, *self.kernels.tensors]

    def _plain_origin(self) -> torch.Tensor:
        each = self.rows.heads * self.rows.head_rows
        n = self.n_blocks * self.batch
        starts = torch.arange(0, n * each, each, dtype=torch.int32, device=self._within.device)
        return starts.view(self.n_blocks, self.batch)

    def commit(
        self, packed: Packed, sizes: tuple[int, int], n_blocks: int, sequences: Sequences, at: int
    ) -> None:
        """Take the rows of whole blocks, whose words start at word `at` of the history.

        Parameters
        ----------
        packed : Packed
            Rows of whole blocks.
        sizes : (int, int)
            The values of `packed.sizes`.
        n_blocks : int
            Blocks.
        sequences : Sequences
            Which of the packed sequences are there now.
        at : int
            Words of the history before.
        """
        n_words, max_words = sizes
        n = packed.lengths.shape[0]
        each, begin = n // n_blocks, self.n_rows
        end = begin + n
        # Everything that may run out of memory comes before the first change.
        origin = self.origin
        if origin is not None or not sequences.plain:
            starts = torch.arange(begin, end, each, dtype=torch.int32, device=self._bases.device)
            first_rows = sequences.index * (self.rows.heads * self.rows.head_rows)
            before = self._plain_origin() if origin is None else origin
            origin = torch.cat([before, starts[:, None] + first_rows])
        if self.kernels is not None:
            first, last = ceil_div(begin, BLOCK_ROWS), ceil_div(end, BLOCK_ROWS) + 1
            bases = packed.bases
            if begin % BLOCK_ROWS:
                bases = self._bases_behind(begin, packed.lengths)
            lengths = grown(self._lengths, end, begin)
            self._bases = grown(self._bases, last, first)
            self._lengths = lengths
            self._lengths[begin:end].copy_(packed.lengths)
            torch.add(bases, at, out=self._bases[first:last])
        block_rows = range(begin, end, each)
        token_bytes = self.rows.heads * self.rows.token_bytes
        raw_bytes = [sequences.packed * token_bytes * self.rows.block_tokens] * n_blocks
        most_words = max(self.max_words, max_words)
        # Nothing is called from here on, so that an interrupt finds all of it or nothing.
        self.origin = origin
        self.n_rows = end
        self._block_rows += block_rows
        self._tables = {}
        self._raw_bytes += raw_bytes
        self.max_words = most_words
        if not self.expected_words:
            self.expected_words = n_words / n

    def _bases_behind(self, begin: int, lengths: torch.Tensor) -> torch.Tensor:
        """Return the entries of `bases` for rows of which the first share the entry before."""
        ends = torch.nn.functional.pad(self._words_of(lengths).cumsum(0), (1, 0))
        bases = ends[-begin % BLOCK_ROWS :: BLOCK_ROWS]
        if (begin + lengths.shape[0]) % BLOCK_ROWS:
            bases = torch.cat([bases, ends[-1:]])
        return bases

    def _words_of(self, lengths: torch.Tensor) -> torch.Tensor:
        assert self.kernels is not None
        return words_of_rows(lengths, self.kernels.row_words)

    def taken(self, take: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
        """Return the `origin` of other sequences; `take` indexes a dimension of a tensor."""
        return take(self._plain_origin() if self.origin is None else self.origin, 1)

    def set_origin(self, origin: torch.Tensor) -> None:
        """Replace the sequences by those that `taken` returned."""
        self.origin = origin
        self.batch = origin.shape[1]

    def words_end(self, n_blocks: int) -> int:
        """Return the word at which the first `n_blocks` blocks end; there are more blocks.

        On a GPU this waits once.
        """
        row = self._block_rows[n_blocks]
        if self.kernels is None:
            return self.first_word + row * self.rows.row_bytes // 4
        # Where the rows before it in its entry of `bases` end.
        first = row // BLOCK_ROWS
        words = self._words_of(self._lengths[first * BLOCK_ROWS : row])
        return int(self._bases[first] + words.sum())

    def truncate(self, tokens: int) -> None:
        """Remove all but the first tokens, whole blocks where the codec is lossless."""
        n_blocks = ceil_div(tokens, self.rows.block_tokens)
        self.cut_tokens = n_blocks * self.rows.block_tokens - tokens
        if n_blocks < self.n_blocks:
            self.n_rows = self._block_rows[n_blocks]
            del self._block_rows[n_blocks:], self._raw_bytes[n_blocks:]
            if self.origin is not None:
                self.origin = self.origin[:n_blocks]
        self._tables = {}

    def rows_there(self, words: torch.Tensor) -> tuple[torch.Tensor, RowsThere]:
        """Return the rows of the sequences that are there, as they are packed, without the others.

        Parameters
        ----------
        words : torch.Tensor
            int32, the history's words, on the device.

        Returns
        -------
        words : torch.Tensor
            int32 ``[n]`` on the device, of memory of its own.
        rows : RowsThere
            What `replace_rows` takes once they lie in the store.
        """
        origin = self._plain_origin() if self.origin is None else self.origin
        # Blocks, sequences in them, heads: as they are packed.
        numbers = (origin[:, :, None, None] + self._within[0, :, 0]).flatten().long()
        if self.kernels is None:
            row_words = self.rows.row_bytes // 4
            starts = self.first_word + numbers * row_words
            mine = torch.full_like(numbers, row_words)
            lengths = self._lengths
        else:
            each = self._words_of(self._lengths[: self.n_rows])
            ends = torch.nn.functional.pad(each.cumsum(0), (1, 0))
            groups = numbers // BLOCK_ROWS
            starts = self._bases[groups] + ends[numbers] - ends[groups * BLOCK_ROWS]
            lengths, mine = self._lengths[numbers], each[numbers]
        behind = mine.cumsum(0)
        found = [words.new_empty(0)]
        # A place of eight bytes for each word of a piece.
        step = max(1, PIECE_WORDS * len(numbers) // max(1, int(behind[-1]) if len(behind) else 1))
        for begin in range(0, len(numbers), step):
            part = mine[begin : begin + step]
            first = starts[begin : begin + step] - (part.cumsum(0) - part)
            places = first.repeat_interleave(part)
            places += torch.arange(len(places), device=places.device)
            found.append(words[places])
        return torch.cat(found), RowsThere(lengths, bases_of_rows(mine)[0])

    def replace_rows(self, rows: RowsThere, at: int) -> None:
        """Take the rows of `rows_there`, whose words begin at word `at` of the history."""
        each = self.batch * self.rows.heads * self.rows.head_rows
        if self.kernels is not None:
            self._bases = rows.bases.add_(at)
        self._lengths = rows.lengths
        self.first_word = at
        self.n_rows = self.n_blocks * each
        self._block_rows = [*range(0, self.n_rows, each)] if each else [0] * self.n_blocks
        raw_bytes = self.batch * self.rows.heads * self.rows.token_bytes * self.rows.block_tokens
        self._raw_bytes = [raw_bytes] * self.n_blocks
        self.origin = None
        self._tables = {}

    def _copy_rows(self, words: torch.Tensor, out: torch.Tensor) -> None:
        """Copy raw rows that are in order: blocks of each head behind one another."""
        rows = self.rows
        raw = words[self.first_word : self.first_word + self.n_rows * rows.row_bytes // 4]
        blocks = raw.view(self.n_blocks, self.batch, rows.heads, -1).permute(1, 2, 0, 3)
        out.view(torch.int32).view(blocks.shape).copy_(blocks)

    def tokens_in(self, out: torch.Tensor) -> torch.Tensor:
        """View what `decoding` writes as ``[B, H, tokens, D]``."""
        rows = self.rows
        tokens = self.n_blocks * rows.block_tokens
        blocks = out.view(rows.dtype).view(self.batch, rows.heads, tokens, rows.dim)
        return blocks[:, :, : self.tokens] if self.cut_tokens else blocks

    def decoding(
        self, words: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, sm_budget: int | None
    ) -> Callable[[], None]:
        """Return what decodes all blocks, on the stream that is current then.

        It holds as long as no block is added and no sequence moved.

        Parameters
        ----------
        words : torch.Tensor
            int32, the history's words and PAD_WORDS behind them, on the device.
        ids : torch.Tensor
            What `ids` returns, or a segment of the same `key`.
        out : torch.Tensor
            uint8 ``[decoded_bytes]``, starting at a multiple of 16 bytes.
        sm_budget : int, optional
            Multiprocessors that decoding may use.
        """
        if self.in_order:
            return partial(self._copy_rows, words, out)
        target = out.view(-1, self.rows.row_bytes)
        if self.kernels is None or out.device.type == "cpu":
            return partial(self.decode_rows, words, ids, target, sm_budget)
        kernels_on(out.device)  # raises the error of an earlier decode there
        return self.kernels.prepare_gather(self.new_table(words), ids, target, sm_budget)

    def row_ids(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the numbers of rows for `decode_rows`.

        Parameters
        ----------
        positions : torch.Tensor
            Integers ``[B, H, n]`` on the device: rows of each head of each sequence, counted from
            the segment's first token.

        Returns
        -------
        torch.Tensor
            int32 ``[B, H, n]``.
        """
        batch, heads, _ = positions.shape
        sequence = torch.arange(batch, device=positions.device)[:, None, None]
        head = torch.arange(heads, dtype=torch.int32, device=positions.device)[:, None]
        blocks, rows = positions // self.rows.head_rows, positions % self.rows.head_rows
        if self.origin is None:
            first = ((blocks * batch + sequence) * heads + head) * self.rows.head_rows
            return (first + rows).to(torch.int32)
        first = self.origin[blocks, sequence] + head * self.rows.head_rows
        return first + rows.to(torch.int32)

    def decode_rows(
        self,
        words: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor,
        sm_budget: int | None,
        counters: torch.Tensor | None = None,
    ) -> None:
        """Decode rows, on the current stream.

        Parameters
        ----------
        words : torch.Tensor
            As for `decoding`, or in page-locked host memory, whose rows a GPU reads over the link.
        ids : torch.Tensor
            int32 ``[n]`` on the device, in range; not checked.
        out : torch.Tensor
            uint8 ``[n, row_bytes]`` on the device, contiguous.
        sm_budget : int, optional
            Multiprocessors that decoding may use.
        counters : torch.Tensor, optional
            int64 on the device, added to as `RowKernels.gather` says.
        """
        kernels: Any = kernels_for(out.device)  # raises the error of an earlier decode there
        row_bytes = self.rows.row_bytes
        if self.kernels is None:
            begin = self.first_word
            raw = words[begin : begin + self.n_rows * row_bytes // 4].view(torch.uint8)
            kernels.copy_rows(raw.view(-1, row_bytes), row_bytes, ids, out, sm_budget=sm_budget)
            return
        bad = self.kernels.gather(
            self.table(words), ids, out, counters=counters, sm_budget=sm_budget
        )
        if bad >= 0:
            raise CorruptedDataError(f"K/V history: packed row {bad} is damaged")

    def table(self, words: torch.Tensor) -> TableStorage:
        """Return the rows as kernels read them; cached, because kernels keep what they prepared."""
        table = self._tables.get(words.data_ptr())
        if table is None or table.words.shape != words.shape:
            table = self._tables[words.data_ptr()] = self.new_table(words)
        return table

    def new_table(self, words: torch.Tensor) -> TableStorage:
        """Return what `table` does, for whoever keeps it until the rows change."""
        return TableStorage(
            n_rows=self.n_rows,
            words=words,
            bases=self._bases,
            lengths=self._lengths,
            max_words=self.max_words,
        )

    def forget_tables(self) -> None:
        """Drop cached tables, which hold words."""
        self._tables = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave the words out, which the history pickles, and the kernels, made again."""
        return {**self.__dict__, "_tables": {}, "kernels": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"cut_tokens": 0, **state})
        if self.codec is not None:
            self.kernels = self.codec.kernels(self._lengths.device)
