"""Joining the tokens of a layer of a K/V cache on a GPU, K's and V's in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....errors import ArgumentError
from ..format import PAD_WORDS, RowLayout, ceil_div
from ..joins import PackedRun, Sides, SideTokens
from .ids import check_ids_count
from .parameters import Address, Int32, Int64, Parameters, Value
from .runner import Launch, Runner
from .source import MIN_SHORT_VECTOR, Variant
from .tiles import (
    SHORT_ROW_BYTES,
    THREADS,
    WORDS_ALIGN_BYTES,
    Grid,
    TileShape,
    chosen_shape,
    decode_variant,
)

UNIT_BYTES = 16  # that a thread copies at once
COPIED_UNITS = 4  # of a thread, one after another
MAX_COPY_BLOCKS = 1 << 12


#: Of K and of V.
Pair = tuple[int, int]
Runs = tuple[PackedRun | None, PackedRun | None]


@dataclass(init=False)
class JoinRows(Parameters):
    """Parameters of `join_rows`: packed tokens of K and of V, and what `SideTokens` says of each.

    Strides of tokens are in bytes; `length`, `memory_tokens` and `first` count tokens of a head.
    """

    kernel = "join_rows"

    k_words: Address
    k_n_words: Int64
    k_bases: Address
    k_lengths: Address
    k_length_bytes: Int32
    k_ids: Address
    k_n: Int64
    k_tables: Address
    k_starts: Address
    k_n_rows: Int64
    k_chunks: Int32
    k_row_words: Int32
    k_row_bytes: Int32
    k_tile_rows: Int32
    k_stride_words: Int32
    k_stage_words: Int32
    k_longest_words: Int32
    k_token_bytes: Int32
    k_row_tokens: Int32
    k_head_rows: Int32
    k_first: Int32
    k_blocks: Int32
    v_words: Address
    v_n_words: Int64
    v_bases: Address
    v_lengths: Address
    v_length_bytes: Int32
    v_ids: Address
    v_n: Int64
    v_tables: Address
    v_starts: Address
    v_n_rows: Int64
    v_chunks: Int32
    v_row_words: Int32
    v_row_bytes: Int32
    v_tile_rows: Int32
    v_stride_words: Int32
    v_stage_words: Int32
    v_longest_words: Int32
    v_token_bytes: Int32
    v_row_tokens: Int32
    v_head_rows: Int32
    v_first: Int32
    v_blocks: Int32
    heads: Int32
    pairs: Int64
    mailbox: Address
    copy_blocks: Int32
    k_out: Address
    k_length: Int64
    k_tail: Address
    k_tail_batch: Int64
    k_tail_head: Int64
    k_tail_token: Int64
    k_tail_tokens: Int32
    k_memory: Address
    k_memory_tokens: Int64
    k_new: Address
    k_new_batch: Int64
    k_new_head: Int64
    k_new_token: Int64
    k_new_tokens: Int32
    v_out: Address
    v_length: Int64
    v_tail: Address
    v_tail_batch: Int64
    v_tail_head: Int64
    v_tail_token: Int64
    v_tail_tokens: Int32
    v_memory: Address
    v_memory_tokens: Int64
    v_new: Address
    v_new_batch: Int64
    v_new_head: Int64
    v_new_token: Int64
    v_new_tokens: Int32


class JoinKernels:
    """The kernel of join.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @staticmethod
    def serves(layout: RowLayout, token_bytes: int) -> bool:
        """Return whether the kernel decodes rows of so many bytes a token."""
        f = layout.format
        if f.clusters > 1 or f.row_bytes > SHORT_ROW_BYTES or token_bytes % UNIT_BYTES:
            return False
        return _variant(layout).vector >= MIN_SHORT_VECTOR

    def prepare(self, sides: Sides, batch: int, heads: int, token_bytes: Pair) -> PreparedJoin:
        """Return what joins the tokens of K and V, as they are then, on torch's current stream.

        Parameters
        ----------
        sides : (sequence of PackedRun, sequence of PackedRun)
            Of K and of V, such as it `serves`; one run at least.
        batch, heads : int
            Of the tokens.
        token_bytes : (int, int)
            Bytes of a token of a head, of K and of V; multiples of UNIT_BYTES.

        Raises
        ------
        ArgumentError
            When there are too many rows, or words lie where the kernel cannot load them.
        """
        return PreparedJoin(self._runner, sides, batch, heads, token_bytes)


class PreparedJoin:
    """Joins of packed tokens that do not change; see `JoinKernels.prepare`."""

    __slots__ = ("_launches", "_owners", "_pairs")

    def __init__(
        self, runner: Runner, sides: Sides, batch: int, heads: int, token_bytes: Pair
    ) -> None:
        self._pairs = batch * heads
        self._owners = sides  # of the memory that is read
        self._launches: list[tuple[int, Launch]] = []
        for variant, runs in _paired(sides):
            for run in runs:
                if run is not None:
                    check_ids_count(run.ids.shape[0])
            self._launches.append(_bound(runner, variant, runs, heads, self._pairs, token_bytes))

    def __call__(self, keys: SideTokens, values: SideTokens) -> None:
        """Join the tokens of K and V, of which nothing is checked."""
        k_units, of_keys, *kept = _numbers(keys)  # until the kernel has been started
        v_units, of_values, *others = _numbers(values)
        units = max(k_units, v_units) * self._pairs
        copies = min(-(-units // (COPIED_UNITS * THREADS)), MAX_COPY_BLOCKS)
        for blocks, launch in self._launches:
            if copies + blocks:  # else no sequence is there
                launch(copies + blocks, copies, *of_keys, *of_values)
            copies = 0  # by the first alone


def _numbers(side: SideTokens) -> tuple[int, tuple[int, ...], torch.Tensor, torch.Tensor]:
    """Return the units that are copied of a head, and what the kernel takes of a side.

    Behind those the tail and the new tokens that it points to: these, or copies.
    """
    tail, t, new, memory, out = side
    size, to = out.element_size(), memory.data_ptr()
    _, _, n, dim = new.shape
    at, (batch, head, token, value) = new.data_ptr(), new.stride()
    if value != 1 or (at | size * batch | size * head | size * token) % UNIT_BYTES:
        new = new.clone(memory_format=torch.contiguous_format)
        at, (batch, head, token, _) = new.data_ptr(), new.stride()
    there, (in_batch, in_head, in_token, value) = tail.data_ptr(), tail.stride()
    if value != 1 or (there | size * in_batch | size * in_head | size * in_token) % UNIT_BYTES:
        tail = tail[:, :, :t].clone(memory_format=torch.contiguous_format)
        there, (in_batch, in_head, in_token, _) = tail.data_ptr(), tail.stride()
    numbers = (
        *(out.data_ptr(), out.shape[2]),
        *(there, size * in_batch, size * in_head, size * in_token, t),
        *(to, memory.shape[2]),
        *(at, size * batch, size * head, size * token, n),
    )
    return (t + n) * size * dim // UNIT_BYTES, numbers, tail, new


def _variant(layout: RowLayout) -> Variant:
    return decode_variant("join", layout, 0)


def _paired(sides: Sides) -> list[tuple[Variant, Runs]]:
    """Return runs of K and V that one launch decodes, as far as they are packed alike."""
    keys, values = (list(side) for side in sides)
    found: list[tuple[Variant, Runs]] = []
    for run in keys:
        variant = _variant(run.layout)
        other = next((each for each in values if _variant(each.layout) == variant), None)
        if other is not None:
            values.remove(other)
        found.append((variant, (run, other)))
    return found + [(_variant(run.layout), (None, run)) for run in values]


def _bound(
    runner: Runner, variant: Variant, runs: Runs, heads: int, pairs: int, token_bytes: Pair
) -> tuple[int, Launch]:
    """Return the blocks that decode, and the launch."""
    shapes = [TileShape(1, 0, 0) if r is None else chosen_shape(r.table.max_words) for r in runs]
    grid = Grid(runner, variant, max(shapes, key=lambda shape: shape.stage_words))
    tiles = [
        0 if run is None else ceil_div(run.ids.shape[0], shape.tile_rows)
        for run, shape in zip(runs, shapes, strict=True)
    ]
    # On all multiprocessors: the computation waits for it, unlike for what is decoded ahead.
    most = grid.blocks(None)
    blocks = [min(n, ceil_div(most * n, sum(tiles))) if n else 0 for n in tiles]
    fixed: dict[str, Value] = {}
    for side, run, shape, n, nbytes in zip("kv", runs, shapes, blocks, token_bytes, strict=True):
        values = _NOTHING if run is None else _packed(run, shape)
        fixed |= {f"{side}_{name}": value for name, value in values.items()}
        fixed |= {f"{side}_blocks": n, f"{side}_token_bytes": nbytes}
    launch = runner.bind(
        variant,
        JoinRows,
        THREADS,
        grid.shared_bytes,
        **fixed,
        heads=heads,
        pairs=pairs,
        mailbox=runner.mailbox,
    )
    return sum(blocks), launch


def _packed(run: PackedRun, shape: TileShape) -> dict[str, Value]:
    """Return what the kernel takes of packed tokens."""
    table, layout = run.table, run.layout
    lengths = table.lengths
    assert lengths is not None
    if table.words.data_ptr() % WORDS_ALIGN_BYTES:
        raise ArgumentError(f"table: words start at no multiple of {WORDS_ALIGN_BYTES} bytes")
    return {
        "words": table.words,
        "n_words": table.words.shape[0] - PAD_WORDS,
        "bases": table.bases,
        "lengths": lengths,
        "length_bytes": lengths.element_size(),
        "ids": run.ids,
        "n": run.ids.shape[0],
        "tables": layout.tables,
        "starts": layout.starts,
        "n_rows": table.n_rows,
        "chunks": layout.format.chunks,
        "row_words": layout.format.row_words,
        "tile_rows": shape.tile_rows,
        "stride_words": shape.stride_words,
        "stage_words": shape.stage_words,
        "longest_words": table.max_words,
        "row_bytes": layout.format.row_bytes,
        "row_tokens": run.row_tokens,
        "head_rows": run.tokens // run.row_tokens,
        "first": run.first_token,
    }


#: The same where a side has none.
_NOTHING: dict[str, Value] = dict.fromkeys(
    (
        *("words", "n_words", "bases", "lengths", "length_bytes", "ids", "n", "tables", "starts"),
        *("n_rows", "chunks", "row_words", "tile_rows", "stride_words", "stage_words"),
        *("longest_words", "row_bytes", "row_tokens", "head_rows", "first"),
    ),
    0,
)
