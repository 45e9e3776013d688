"""Attention over coded tiles on a GPU; see attend.cu."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from ....errors import ArgumentError
from ..format import PAD_WORDS, TableStorage, ceil_div
from ..spans import MAX_ROWS, OwnTokens, RawRun, Span, group_of
from ..tile_format import TILE_BLOCK, TileTables
from .parameters import Address, Int32, Int64, Parameters
from .prepared_attention import Chunk, Cut, PreparedAttention, PreparedOwn, Run
from .runner import Launch, Runner
from .source import VALUE_KINDS, PlainVariant, attend_variant
from .tiles import WORDS_ALIGN_BYTES

#: Warps of a block: the more, the fewer lookup tables a multiprocessor holds.
BLOCK_WARPS = (8, 12, 16, 20, 24, 28, 32, 4, 2, 1)
#: Bytes of a warp's ring, with their mirror and what is looked at behind it.
RING_BYTES = 4 * 512 + 16
#: What tables, queries and the merge of a block take, in tiles of a warp.
BLOCK_TILES = 0.2
#: Warps of a multiprocessor with which tiles take a quarter longer: with fewer, each waits for its
#: own look-ups alone; with many more, for those of the others.
BUSY_WARPS = 26
#: Shared memory of a block that is the driver's.
RESERVED_BYTES = 1 << 10
#: Cuts that are kept: a context that grows needs others.
MAX_CUTS = 4096
#: Warps of a block that take a tile each, while as many decode V for them: of short contexts, in
#: which a multiprocessor has no more tiles than that.
STAGES = (4, 8, 10)
#: The most splits of one launch.
MAX_SPLITS = 256


@dataclass(init=False)
class AttendTiles(Parameters):
    """Parameters of `attend_tiles`.

    Strides in values; floats by their bits. int32 `first_valid`, `own_first` and `short_by` or
    None; `k_` and `v_` a `Span`'s tables and ids; `a_` and `b_` runs of tokens that are not coded;
    `parts`, `stats` and `sinks` float32, the latter or None; int32 `arrived`.
    """

    kernel = "attend_tiles"

    query: Address
    query_batch: Int64
    query_head: Int64
    query_token: Int64
    heads: Int32
    group: Int32
    n: Int32
    dim: Int32
    query_position: Int32
    first_valid: Address
    own_first: Address
    own_tokens: Int32
    own_end: Int32
    scaling_bits: Int32
    softcap_bits: Int32
    tiles: Int32
    first_token: Int32
    tokens: Int32
    k_words: Address
    k_n_words: Int64
    k_bases: Address
    k_lengths: Address
    k_length_bytes: Int32
    k_n_rows: Int64
    k_ids: Address
    k_heads: Int32
    k_order: Address
    k_steps: Address
    k_centers: Address
    k_codes: Address
    k_blocks: Address
    k_entries: Int32
    v_words: Address
    v_n_words: Int64
    v_bases: Address
    v_lengths: Address
    v_length_bytes: Int32
    v_n_rows: Int64
    v_ids: Address
    v_heads: Int32
    v_order: Address
    v_codes: Address
    v_blocks: Address
    v_entries: Int32
    v_table: Int32
    a_keys: Address
    a_values: Address
    a_batch: Int64
    a_head: Int64
    a_token: Int64
    a_first: Int32
    a_tokens: Int32
    b_keys: Address
    b_values: Address
    b_batch: Int64
    b_head: Int64
    b_token: Int64
    b_first: Int32
    b_tokens: Int32
    short_by: Address
    splits: Int32
    first_slot: Int32
    slots: Int32
    parts: Address
    stats: Address
    arrived: Address
    sinks: Address
    out: Address
    out_batch: Int64
    out_token: Int64
    mailbox: Address
    stages: Int32


_NO_TILES = (0,) * 30


class _Shape(NamedTuple):
    """How a launch is cut."""

    warps: int
    shared_bytes: int
    blocks: int  # of a multiprocessor
    stages: int = 0  # warps whose V others decode


class AttendKernels:
    """The kernels of attend.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._spans: WeakKeyDictionary[Span, tuple[int, ...]] = WeakKeyDictionary()
        self._cuts: dict[tuple[int, int, int, int, int | None], int] = {}
        self._shapes: dict[tuple[PlainVariant, int, int], list[_Shape]] = {}
        self._launches: dict[tuple[PlainVariant, _Shape], Launch] = {}

    def attend(
        self,
        query: torch.Tensor,
        spans: Sequence[Span],
        raw: Sequence[RawRun] = (),
        *,
        length: int,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        first_valid: torch.Tensor | None = None,
        own: OwnTokens | None = None,
        short_by: torch.Tensor | None = None,
        sm_budget: int | None = None,
    ) -> torch.Tensor:
        """Return the attention of the last tokens of sequences to all of their tokens.

        Parameters
        ----------
        query : torch.Tensor
            ``[B, Hq, n, D]`` on the device, of the last n of `length` positions; D a multiple of 16
            up to 256.
        spans : sequence of Span
            Coded tokens; words on the device.
        raw : sequence of RawRun
            Other tokens, on the device, of the dtype of the query.
        length : int
            Tokens of a sequence.
        scaling : float
            What products are multiplied by.
        softcap : float, optional
            Scores are softcap * tanh(score / softcap).
        sinks : torch.Tensor, optional
            ``[Hq]``: scores that take weight and have no value.
        first_valid : torch.Tensor, optional
            int32 ``[B]`` on the device: the first position of each sequence that is no padding.
        own : OwnTokens, optional
            Tokens that count in the place of those of `spans` and `raw` at the same positions.
        short_by : torch.Tensor, optional
            int32 ``[1]`` on the device: how many tokens of the last run are not there yet, of which
            the kernel reads nothing, and by how many `length` is too large. Values below 0 count
            as 0. Queries are among the tokens of that run.
        sm_budget : int, optional
            Multiprocessors that the kernels may use; all when left out.

        Returns
        -------
        torch.Tensor
            ``[B, n, Hq, D]`` of the dtype of the query. Rows that see no token are zeros. Damaged
            tiles are reported in the mailbox, and the output is then not to be used.

        Raises
        ------
        ArgumentError
            For shapes, dtypes and granularities that do not fit together.
        """
        prepared = self.prepare(
            query,
            spans,
            raw,
            length=length,
            scaling=scaling,
            softcap=softcap,
            sinks=sinks,
            first_valid=first_valid,
            own=own,
            sm_budget=sm_budget,
        )
        runs = [Run.of(*each) for each in raw]
        prepared_own = None if own is None else PreparedOwn(own)
        of_raw = [run for run, _ in runs]
        return prepared(query, of_raw, length, sinks, first_valid, prepared_own, short_by)

    def prepare(
        self,
        query: torch.Tensor,
        spans: Sequence[Span],
        raw: Sequence[RawRun] = (),
        *,
        length: int,
        scaling: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        first_valid: torch.Tensor | None = None,
        own: OwnTokens | None = None,
        sm_budget: int | None = None,
    ) -> PreparedAttention:
        """Return what does what `attend` does, for these spans and all such queries and runs.

        It holds the spans. Parameters and errors are those of `attend`.
        """
        heads, group = group_of(
            query, spans, raw, length=length, sinks=sinks, first_valid=first_valid, own=own
        )
        dim = query.shape[3]
        if query.dtype not in VALUE_KINDS:
            raise ArgumentError(f"query: {query.dtype}, accepted are {[*VALUE_KINDS]}")
        if dim % TILE_BLOCK or not TILE_BLOCK <= dim <= 256:
            raise ArgumentError(f"query: dim {dim}, accepted are multiples of 16 up to 256")
        chunks = []
        most = MAX_ROWS // group
        spans = [span for span in spans if span.tiles]
        for begin in range(0, query.shape[2], most):
            tokens = min(most, query.shape[2] - begin)
            row_groups = ceil_div(group * tokens, 4)
            row_groups = 4 if row_groups > 2 else row_groups
            variants = [
                attend_variant(
                    span.k_tables.format.tokens // TILE_BLOCK,
                    row_groups,
                    query.dtype,
                    lossless=span.k_tables.format.lossless,
                )
                for span in spans
            ] or [attend_variant(4, row_groups, query.dtype)]
            cut = partial(self._cut, query.shape[0] * heads, dim, sm_budget)
            cuts = [*map(cut, variants, spans)]
            rest = cut(variants[0], None)
            chunks.append(Chunk(begin, tokens, cuts, rest))
        return PreparedAttention(
            query, (heads, group), chunks, spans, (_bits(scaling), _bits(softcap or 0.0))
        )

    def _cut(
        self, pairs: int, dim: int, sm_budget: int | None, variant: PlainVariant, span: Span | None
    ) -> Cut:
        """Return how a span, or runs alone, are served."""
        entries = 0 if span is None else _entries_before(span) + _entries(span.v_tables)
        shapes = self._shapes_of(variant, dim, entries)
        how = partial(self._how, pairs, variant=variant, shapes=shapes, sm_budget=sm_budget)
        if span is None:
            return Cut(0, _NO_TILES, how, {})
        return Cut(span.tiles, self._numbers(span), how, {})

    def _how(
        self,
        pairs: int,
        items: int,
        variant: PlainVariant,
        shapes: list[_Shape],
        sm_budget: int | None,
    ) -> tuple[Launch, int]:
        """Return what serves so many tiles and parts of runs of a head, and in how many splits."""
        multiprocessors = self._multiprocessors(sm_budget)
        for shape in shapes[1:]:
            # Each warp takes one of them at the most: then latency decides, not throughput.
            most = min(items, multiprocessors // pairs)
            if most and ceil_div(items, most) <= shape.stages:
                return self._bound(variant, shape), ceil_div(items, ceil_div(items, most))
        splits = self._splits(pairs, items, shapes[0], sm_budget)
        return self._bound(variant, shapes[0]), splits

    def _numbers(self, span: Span) -> tuple[int, ...]:
        """Return the parameters of a span, in the order of the kernel."""
        found = self._spans.get(span)
        if found is not None:
            return found
        k, v = span.k_tables, span.v_tables
        found = self._spans[span] = (
            *(span.tiles, span.first_token, span.tokens),
            *_table(span.k, "k"),
            *(span.k_ids.data_ptr(), k.heads),
            *(each.data_ptr() for each in (k.order, k.steps, k.centers)),
            *_coder(k),
            *_table(span.v, "v"),
            *(span.v_ids.data_ptr(), v.heads, v.order.data_ptr()),
            *_coder(v),
            4 * _entries_before(span),
        )
        return found

    def _shapes_of(self, variant: PlainVariant, dim: int, entries: int) -> list[_Shape]:
        """Return the shape that has the most warps at once, then those in which each takes a tile.

        Of the latter the one of the fewest warps first.
        """
        found = self._shapes.get((variant, dim, entries))
        if found is None:
            settings = dict(variant.settings)
            row_groups, sets = int(settings["NT"]), int(settings["SETS"])
            threads = int(settings["MAX_THREADS"])
            resident = threads // 32
            room = self._runner.shared_bytes_per_multiprocessor
            shapes = []
            for warps in BLOCK_WARPS:
                shared = shared_bytes(dim, entries, row_groups, sets, warps)
                blocks = min(resident // warps, room // (shared + RESERVED_BYTES))
                if 32 * warps <= threads and blocks:
                    shapes.append(_Shape(warps, shared, blocks))
            if not shapes:
                raise ArgumentError(
                    f"spans: lookup tables of {4 * entries} bytes, which do not fit into "
                    f"{room} bytes of shared memory"
                )
            best = [max(shapes, key=lambda shape: shape.warps * shape.blocks)]
            tokens = TILE_BLOCK * int(settings["GROUPS"])
            for stages in STAGES if entries else ():
                warps = 2 * stages
                shared = shared_bytes(dim, entries, row_groups, sets, warps)
                shared += stages * (tokens * dim + 4) + 16
                if 32 * warps <= threads and shared + RESERVED_BYTES <= room:
                    best.append(_Shape(warps, shared, 1, stages))
            found = self._shapes[variant, dim, entries] = best
        return found

    def _bound(self, variant: PlainVariant, shape: _Shape) -> Launch:
        """Return the launch of a shape."""
        found = self._launches.get((variant, shape))
        if found is None:
            found = self._launches[variant, shape] = self._runner.bind(
                variant,
                AttendTiles,
                32 * shape.warps,
                shape.shared_bytes,
                mailbox=self._runner.mailbox,
                stages=shape.stages,
            )
        return found

    def _multiprocessors(self, sm_budget: int | None) -> int:
        """Return how many multiprocessors kernels may use."""
        there = self._runner.multiprocessors
        return there if sm_budget is None else max(1, min(sm_budget, there))

    def _splits(self, pairs: int, items: int, shape: _Shape, sm_budget: int | None) -> int:
        """Return how many blocks share the tokens of a head."""
        # Not its shared memory, in which layers differ: the search takes some 50 microseconds.
        key = pairs, items, shape.warps, shape.blocks, sm_budget
        found = self._cuts.get(key)
        if found is not None:
            return found
        multiprocessors = self._multiprocessors(sm_budget)
        at_once = multiprocessors * shape.blocks

        def cost(splits: int) -> tuple[float, int]:
            blocks, here = pairs * splits, ceil_div(items, splits)
            at_work = min(shape.blocks, ceil_div(blocks, multiprocessors))
            crowding = (1 + (at_work * min(shape.warps, here) / BUSY_WARPS) ** 3) ** (1 / 3)
            tiles = ceil_div(here, shape.warps) * crowding
            return ceil_div(blocks, at_once) * (tiles + BLOCK_TILES), splits

        if len(self._cuts) >= MAX_CUTS:
            self._cuts.clear()
        most = max(1, min(items, MAX_SPLITS))
        sizes = {-(-items // splits) or 1 for splits in range(1, most + 1)}
        # More splits of the same size take no less time.
        found = self._cuts[key] = min({-(-items // size) or 1 for size in sizes}, key=cost)
        return found


def shared_bytes(dim: int, entries: int, row_groups: int, sets: int, warps: int) -> int:
    """Return the shared memory of a block, as attend.cu cuts it."""
    blocks, rows = dim // TILE_BLOCK, 4 * row_groups
    # What comes behind the entries begins on 16 bytes.
    fixed = 2 * 16 * blocks + 4 * entries + 16 + 4 * rows * dim + 3 * 4 * dim + 8 * rows
    by_warp = 8 * rows + RING_BYTES + 256 * blocks * row_groups
    return fixed + 256 * blocks * sets + by_warp * warps


def _bits(x: float) -> int:
    """Return the bits of a float32 as an integer."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


def _table(table: TableStorage, name: str) -> tuple[int, ...]:
    """Return the parameters of a compact table."""
    assert table.bases is not None and table.lengths is not None
    address = table.words.data_ptr()
    if address % WORDS_ALIGN_BYTES:
        raise ArgumentError(
            f"spans: {name}: words at address {address}, accepted are multiples of "
            f"{WORDS_ALIGN_BYTES}"
        )
    return (
        address,
        table.words.numel() - PAD_WORDS,
        table.bases.data_ptr(),
        table.lengths.data_ptr(),
        table.lengths.element_size(),
        table.n_rows,
    )


def _coder(tables: TileTables) -> tuple[int, int, int]:
    """Return the parameters of the codes of symbols."""
    return tables.attend_codes.data_ptr(), tables.attend_blocks.data_ptr(), _entries(tables)


def _entries(tables: TileTables) -> int:
    """Return the entries of the lookup tables of all classes."""
    return tables.attend_codes.shape[0]


def _entries_before(span: Span) -> int:
    """Return the entries of K, filled up to a multiple of V's largest table."""
    largest: int = 1 << max(span.v_tables.longest_codes)
    return ceil_div(_entries(span.k_tables), largest) * largest
