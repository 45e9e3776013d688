"""TokenJoin: all tokens of a layer, its new ones behind them, decoded and copied by one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch

from ..engine.kernels.cuda import CudaKernels, kernels_on
from ..engine.kernels.cuda.join import JoinKernels, PreparedJoin
from ..engine.kernels.joins import PackedRun, Sides, SideTokens
from ..engine.kernels.row_kernels import LayoutKernels
from ..errors import CorruptedDataError
from .fetching import Crossing
from .history import PackedHistory
from .packed_tokens import Revision
from .reader import HistoryReader
from .segment import Segment

#: Of K, and of V.
Pair = tuple[torch.Tensor, torch.Tensor]


class TokenJoin:
    """The tokens of one layer, K's and V's, where they are packed as the kernel decodes them.

    Unlike what `HistoryReader.read` returns, they are decoded when they are asked for, on the
    current stream, into tensors that nothing else is ever written to.

    Parameters
    ----------
    reader : HistoryReader
        That of the histories.
    histories : sequence of PackedHistory
        Of K and V.

    Notes
    -----
    What is worked out of packed tokens is dropped as soon as those of K or of V change, in whatever
    way. Torch's current stream may be another one at each call: it waits for the one before, and no
    memory that it reads is used again before it has read it.
    """

    def __init__(self, reader: HistoryReader, histories: Sequence[PackedHistory]) -> None:
        self._reader = reader
        self._histories = histories
        self._plan: _Plan | None = None

    @property
    def serves(self) -> bool:
        """Whether `join` serves tokens without gradients.

        Some are packed, in rows that the kernel knows, and there are no first ones that never are.
        """
        plan, (of_keys, of_values) = self._plan, self._histories
        # Whoever keeps a revision keeps `forget` from being called.
        if (
            plan is None
            or plan.revisions[0]() is not of_keys.packed.revision
            or plan.revisions[1]() is not of_values.packed.revision
        ):
            plan = self._plan = _Plan(self._reader, self._histories, WeakMethod(self.forget))
        return plan.served

    def join(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[Pair, Pair] | None:
        """Return all tokens and new ones behind them, on the current stream, where it `serves`.

        On a GPU words of the host are those that `HistoryReader.prefetch_words` has fetched, or
        they are fetched now.

        Parameters
        ----------
        keys, values : torch.Tensor
            ``[B, H, n, D]``, which the histories have checked.

        Returns
        -------
        tokens : (torch.Tensor, torch.Tensor)
            K and V ``[B, H, T, D]``, contiguous, of memory of their own.
        memory : (torch.Tensor, torch.Tensor)
            What `PackedHistory.append` takes, with the new tokens written behind the tail.

        Raises
        ------
        CorruptedDataError
            When a packed row is damaged; on a GPU a later call raises it.
        """
        reader, histories = self._reader, self._histories
        stream = reader.take_turn(histories)
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            return None
        if not self.serves:
            return None
        plan = self._plan
        assert plan is not None
        if not plan.crosses:
            return self._join(plan, plan.here(), stream, keys, values)
        crossing = reader.stage_crossing(histories)
        try:
            return self._join(plan, plan.there(crossing), stream, keys, values)
        finally:
            reader.done_words(histories)

    def forget(self) -> None:
        """Drop what was worked out of packed tokens; called whenever they change."""
        self._plan = None

    def _join(
        self,
        plan: _Plan,
        there: _Staged,
        stream: int,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> tuple[Pair, Pair]:
        of_keys, of_values = self._histories
        k = _side(of_keys, plan.packed_tokens[0], keys)
        v = _side(of_values, plan.packed_tokens[1], values)
        kernels = _gpu_kernels(keys.device)  # raises the error of an earlier call there
        if kernels is None:
            from ..engine.kernels.cpu.join import join_rows

            for runs, side in zip(there.runs, (k, v), strict=True):
                bad = join_rows(runs, side)
                if bad >= 0:
                    raise CorruptedDataError(f"K/V history: packed row {bad} is damaged")
        else:
            if there.prepared is None:
                there.prepared = kernels.prepare_join(
                    there.runs, keys.shape[0], keys.shape[1], (_token_bytes(k), _token_bytes(v))
                )
            if stream not in there.streams:
                self._reader.link.keep_for_turn(*there.tensors())
                there.streams.add(stream)
            there.prepared(k, v)
        return (k.out, v.out), (k.memory, v.memory)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_plan": None}


class _Plan:
    """What a join reads between two changes of the packed tokens, wherever their words lie.

    Parameters
    ----------
    reader : HistoryReader
        That of the histories.
    histories : sequence of PackedHistory
        Of K and V.
    forget : reference to a method
        Called when the packed tokens of either change.

    Attributes
    ----------
    revisions : list of references to Revision
        Of K and of V.
    served : bool
        Whether the kernel serves them.
    crosses : bool
        Whether their words are copied to the device to be read.
    packed_tokens : tuple of int
        Packed tokens of a sequence, of K and of V.
    """

    def __init__(
        self,
        reader: HistoryReader,
        histories: Sequence[PackedHistory],
        forget: WeakMethod[Callable[[], None]],
    ) -> None:
        self._histories = histories
        self._reader = reader

        def changed(_: ref[Revision]) -> None:
            found = forget()
            if found is not None:
                found()

        self.revisions = [ref(history.packed.revision, changed) for history in histories]
        segments = [_segments(history) for history in histories]
        self.served = (
            any(segments)
            and not any(history.unpacked.head.shape[2] for history in histories)
            and all(_served(segment) for both in segments for segment in both)
        )
        self.crosses = histories[0].words.crosses
        self._on_host = any(history.words.on_host for history in histories)
        self.packed_tokens = tuple(history.packed_tokens for history in histories)
        self._staged: WeakKeyDictionary[Crossing, _Staged] = WeakKeyDictionary()
        self._here: _Staged | None = None
        self._here_at: list[int] = []  # the addresses of its words

    def here(self) -> _Staged:
        """Return what is read, with words where they are kept; those of a host are counted."""
        if self._here is None or self._on_host:
            words = [history.words.fetch() for history in self._histories]
            at = [there.data_ptr() for there in words]
            if self._here is None or at != self._here_at:
                self._here, self._here_at = self._read_from(words), at
        return self._here

    def there(self, crossing: Crossing) -> _Staged:
        """Return what is read, with words where they have crossed to."""
        found = self._staged.get(crossing)
        if found is None:
            found = self._staged[crossing] = self._read_from(crossing.words)
        return found

    def _read_from(self, words: Sequence[torch.Tensor]) -> _Staged:
        keys, values = (
            _runs_of(self._reader, history, there)
            for history, there in zip(self._histories, words, strict=True)
        )
        return _Staged((keys, values))


class _Staged:
    """What a join reads, with the words in one place.

    Attributes
    ----------
    prepared : PreparedJoin or None
        The kernel, once it was needed.
    streams : set of int
        Which the allocator knows to read it.
    """

    def __init__(self, runs: Sides) -> None:
        self.runs = runs
        self.prepared: PreparedJoin | None = None
        self.streams: set[int] = set()

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors that are read, packed."""
        found = [
            t
            for run in (*self.runs[0], *self.runs[1])
            for t in (
                *(run.table.words, run.table.bases, run.table.lengths, run.ids),
                *(run.layout.tables, run.layout.starts),
            )
        ]
        return [t for t in found if t is not None]


def _segments(history: PackedHistory) -> list[Segment]:
    return [segment for segment in history.segments if segment.n_blocks]


def _served(segment: Segment) -> bool:
    """Return whether the kernel decodes the rows of a segment, which are whole ones."""
    kernels = segment.kernels
    if not isinstance(kernels, LayoutKernels) or segment.cut_tokens:
        return False
    return JoinKernels.serves(kernels.layout, segment.rows.token_bytes)


def _runs_of(reader: HistoryReader, history: PackedHistory, words: torch.Tensor) -> list[PackedRun]:
    found, first = [], 0
    for segment in _segments(history):
        assert isinstance(segment.kernels, LayoutKernels)
        found.append(
            PackedRun(
                segment.new_table(words),
                segment.kernels.layout,
                reader.row_numbers(segment),
                first,
                segment.tokens,
                segment.rows.tokens_per_row,
            )
        )
        first += segment.tokens
    return found


def _side(history: PackedHistory, packed: int, new: torch.Tensor) -> SideTokens:
    """Return the tokens of a history that are not packed, new ones, and memory for all."""
    batch, heads, n, dim = new.shape
    tail, tokens, memory = history.memory_for(n)
    out = new.new_empty((batch, heads, packed + tokens + n, dim))
    return SideTokens(tail, tokens, new, memory, out)


def _token_bytes(side: SideTokens) -> int:
    return side.new.shape[3] * side.new.element_size()


def _gpu_kernels(device: torch.device) -> CudaKernels | None:
    """Return the kernels of a GPU; None for the CPU."""
    return None if device.type == "cpu" else kernels_on(device)
