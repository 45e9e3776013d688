"""Attention that is prepared: what its launches take, but for what changes from token to token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..spans import OwnTokens, Span
from .runner import Launch


class Run(NamedTuple):
    """Tokens that are not coded, as the kernel takes them: addresses, strides in values, and which.

    Addresses are multiples of 4, as are strides in bytes; that of values of a token is 1.
    """

    keys: int
    values: int
    batch: int
    head: int
    token: int
    first: int
    tokens: int

    @classmethod
    def of(
        cls, first: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[Run, tuple[torch.Tensor, torch.Tensor]]:
        """Return the run of keys and values, and what it points to: these or copies of them."""
        keys, values = (keys, values) if cls.serves(keys, values) else _aligned(keys, values)
        batch, head, token, _ = keys.stride()
        run = cls(keys.data_ptr(), values.data_ptr(), batch, head, token, first, keys.shape[2])
        return run, (keys, values)

    def of_tokens(self, tokens: int) -> Run:
        """Return a run of so many of the tokens, from the first on."""
        return self._replace(tokens=tokens)

    @staticmethod
    def serves(keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Return whether keys and values have the same strides, by which words can be loaded."""
        size, strides = keys.element_size(), keys.stride()
        return (
            strides == values.stride()
            and strides[3] == 1
            and not any(size * stride % 4 for stride in strides[:3])
            and not keys.data_ptr() % 4
            and not values.data_ptr() % 4
        )


_NO_RUN = Run(0, 0, 0, 0, 0, 0, 0)


class PreparedOwn:
    """Tokens that begin elsewhere in each sequence, as the kernel takes them; it holds them."""

    __slots__ = ("numbers", "run", "tensors")

    def __init__(self, own: OwnTokens) -> None:
        positions = own.positions.contiguous()
        self.run, tensors = Run.of(*own.run)
        self.numbers = positions.data_ptr(), self.run.tokens, own.end
        self.tensors = positions, *tensors


_NO_OWN = 0, 0, 0


class Cut(NamedTuple):
    """A span's tiles and parameters, and the launch and the splits of each number of items."""

    tiles: int
    numbers: tuple[int, ...]
    how_of: Callable[[int], tuple[Launch, int]]
    known: dict[int, tuple[Launch, int]]

    def how(self, first: Run, second: Run) -> tuple[Launch, int]:
        """Return what serves it with these runs, and how many blocks share the tokens of a head."""
        items = self.tiles + (first.tokens + 15) // 16 + (second.tokens + 15) // 16
        found = self.known.get(items)
        if found is None:
            found = self.known[items] = self.how_of(items)
        return found


class Chunk(NamedTuple):
    """Query tokens that the kernel serves at once, and how."""

    begin: int
    tokens: int
    cuts: list[Cut]
    rest: Cut  # of runs that no span takes along


class PreparedAttention:
    """Attention to spans that do not change; see `AttendKernels.prepare`.

    The blocks of a call count those of a head that have come, in memory of this object: calls on
    several streams wait for each other, as they do for the memory of what they read.

    Parameters
    ----------
    query : torch.Tensor
        Like those to come.
    heads : (int, int)
        K/V heads, and query heads of each.
    chunks : list of Chunk
        What is launched.
    spans : sequence of Span
        What is read.
    score_bits : (int, int)
        Scaling and softcap.

    Attributes
    ----------
    arrived : torch.Tensor
        int32, these counts.
    """

    __slots__ = (
        "_chunks",
        "_dim",
        "_group",
        "_heads",
        "_like",
        "_pairs",
        "_score_bits",
        "_spans",
        "arrived",
    )

    def __init__(
        self,
        query: torch.Tensor,
        heads: tuple[int, int],
        chunks: list[Chunk],
        spans: Sequence[Span],
        score_bits: tuple[int, int],
    ) -> None:
        batch, query_heads, n, self._dim = query.shape
        self._heads, self._group = heads
        self._pairs = batch * self._heads
        self._like = (batch, n, query_heads, self._dim)
        # Zero between launches: the block that comes last makes it so.
        self.arrived = torch.zeros(self._pairs, dtype=torch.int32, device=query.device)
        self._chunks, self._spans, self._score_bits = chunks, spans, score_bits

    def __call__(
        self,
        query: torch.Tensor,
        runs: Sequence[Run],
        length: int,
        sinks: torch.Tensor | None = None,
        first_valid: torch.Tensor | None = None,
        own: PreparedOwn | None = None,
        short_by: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what `AttendKernels.attend` returns; nothing is checked.

        Parameters
        ----------
        query, length, sinks, first_valid, own, short_by
            As there, of the shapes and dtypes that this was prepared for.
        runs : sequence of Run
            The tokens that are not coded.
        """
        out = torch.empty(self._like, dtype=query.dtype, device=query.device)
        if not self._pairs:
            return out
        batch, head, token, value = query.stride()
        if value != 1:
            query = query.contiguous()
            batch, head, token, _ = query.stride()
        if sinks is not None:
            sinks = sinks.to(torch.float32).contiguous()
        for run in runs:
            if not run.tokens:
                runs = [run for run in runs if run.tokens]
                break
        _, n, query_heads, dim = self._like
        at, to, itemsize = query.data_ptr(), out.data_ptr(), query.element_size()
        first = 0 if first_valid is None else first_valid.data_ptr()
        of_own = _NO_OWN
        if own is not None:
            of_own, runs = own.numbers, [own.run, *runs]
        if short_by is not None and len(runs) % 2:
            runs = [*runs[:-1], _NO_RUN, runs[-1]]  # the last one as the kernel's second
        for chunk in self._chunks:
            begin = chunk.begin
            rows = (
                *(at + begin * token * itemsize, batch, head, token),
                *(self._heads, self._group, chunk.tokens, dim, length - n + begin),
                *(first, *of_own, *self._score_bits),
            )
            there = to + begin * query_heads * dim * itemsize, n * query_heads * dim
            to_rows = *there, query_heads * dim
            self._serve(chunk, rows, runs, sinks, short_by, out.device, to_rows)
        return out

    def _serve(
        self,
        chunk: Chunk,
        rows: tuple[int, ...],
        runs: Sequence[Run],
        sinks: torch.Tensor | None,
        short_by: torch.Tensor | None,
        device: torch.device,
        to: tuple[int, int, int],
    ) -> None:
        """Launch what serves a chunk."""
        slots = 0
        launches = []
        for i in range(max(len(chunk.cuts), (len(runs) + 1) // 2, 1)):
            cut = chunk.cuts[i] if i < len(chunk.cuts) else chunk.rest
            first = runs[2 * i] if 2 * i < len(runs) else _NO_RUN
            second = runs[2 * i + 1] if 2 * i + 1 < len(runs) else _NO_RUN
            launch, splits = cut.how(first, second)
            last = short_by is not None and 2 * i + 2 == len(runs)
            missing = short_by.data_ptr() if short_by is not None and last else 0
            launches.append((launch, cut, first, second, missing, splits, slots))
            slots += splits
        pairs, group, dim = self._pairs, self._group, self._dim
        values = slots * pairs * group * chunk.tokens * dim
        space = torch.empty(values + values // dim * 2, dtype=torch.float32, device=device)
        parts = space.data_ptr()
        stats = parts + 4 * values
        behind = (
            *(slots, parts, stats, self.arrived.data_ptr()),
            *(0 if sinks is None else sinks.data_ptr(), *to),
        )
        for launch, cut, first, second, missing, splits, slot in launches:
            launch(
                splits * pairs, *rows, *cut.numbers, *first, *second, missing, splits, slot, *behind
            )


def _aligned(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of keys and values, where they are no such already, that `Run` takes."""
    keys, values = keys.contiguous(), values.contiguous()
    # A view that begins at an odd value.
    keys, values = (x.clone() if x.data_ptr() % 4 else x for x in (keys, values))
    return keys, values
