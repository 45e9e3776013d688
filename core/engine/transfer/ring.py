"""A prefetch ring: the next batches are fetched while the current one is used.

On a GPU the fetches run on a stream of their own, on the CPU in a thread of their own; both write
to buffers that are used again and again.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, cast

import torch

from ...devices import checked_device, named_device
from ...errors import ArgumentError, ArgumentTypeError, BitslabError, IndexRangeError
from .fetchers import Fetch, Gatherer, RingBuffer, StreamFetcher, ThreadFetcher


class PrefetchRing:
    """Rows of one batch of ids after the other, fetched ahead of their use.

    Iterate it over `batches`, or drive it by `put` and `get`.

    Parameters
    ----------
    source : object
        A `CompressedTable` or `SlabCache`; a tensor, on a GPU or unified for rows on a GPU; any
        object with ``gather(ids, out=None, device=None)`` that returns ``[n, *row_shape]`` rows, in
        `out` when it is given; or such a function. All batches have one row shape and dtype.
    batches : iterable, optional
        Tensors of ids ``[n]``; with `key`, anything that holds one. It is advanced in the
        consumer's thread, up to `depth` batches ahead; ids must not change until their rows
        were got. Left out: batches come by `put`.
    depth : int
        Number of buffers: one is used by the consumer, the others are fetched ahead. Each takes
        the bytes of the largest batch so far. With 1 nothing overlaps.
    device : torch.device or str, optional
        Where the rows are wanted. When left out: the first GPU of a cache, the device of a tensor,
        else the CPU. For a GPU, ids on the CPU are moved there first, so that the source sees ids
        on `device`.
    key : callable, optional
        Takes an item of `batches` and returns its ids; what comes out is then ``(item, rows)``.
    copy : bool
        Give out copies that are the consumer's to keep.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For arguments of another kind.

    Notes
    -----
    Rows are valid until the next `get` or step of the loop, which hands their buffer on: use
    ``copy=True`` to keep them. On a GPU that is counted on the stream that is current at `get`:
    it waits for the rows by an event, and the buffer is written again only when that stream has
    passed the point of the next `get`. The host never waits, and allocates nothing once the
    buffers have grown to the largest batch (torch's caches serve the ids that are moved).

    An error of the source or of `batches` is raised by the `get` whose rows it took; the batches
    behind it still come, in order. On a GPU that holds for ids on the CPU, which are checked there.
    Bad ids on the GPU and damaged rows, which only a kernel sees, are raised by one of the next
    `get`, whose own batch then comes with the one after, or by `bitslab.raise_pending_errors`; the
    rows of the batch in question are undefined.

    Leaving the loop by its end, ``break`` or an error closes the ring, as do ``with``, garbage
    collection and the interpreter's exit. Closing waits for the gather that is under way (on the
    CPU at most CLOSE_SECONDS), drops those behind it, and ends the thread.

    One thread at a time may use a ring; `close` may come from any. The source is used from the
    ring's thread (CPU) meanwhile. A ring belongs to the process that made it: in a forked child
    its `get` and `put` raise, so make one in each worker.

    Examples
    --------
    >>> import torch, bitslab
    >>> table = bitslab.CompressedTable.from_tensor(torch.arange(12).view(6, 2))
    >>> batches = [torch.tensor([0, 5]), torch.tensor([3])]
    >>> [rows.tolist() for rows in bitslab.PrefetchRing(table, batches)]
    [[[0, 1], [10, 11]], [[6, 7]]]
    """

    def __init__(
        self,
        source: Any,
        batches: Iterable[Any] | None = None,
        *,
        depth: int = 2,
        device: torch.device | str | None = None,
        key: Callable[[Any], torch.Tensor] | None = None,
        copy: bool = False,
    ) -> None:
        where = _device_of(source) if device is None else named_device(device)
        gather = _gather_of(source, where)
        where = checked_device(where)
        if key is not None and not callable(key):
            raise ArgumentTypeError(
                f"key: {key!r:.60}, expected a function that takes an item and returns its ids"
            )
        # iter() takes these two; torch's data sets have the second alone.
        ways = ("__iter__", "__getitem__")
        if batches is not None and not any(hasattr(type(batches), way) for way in ways):
            raise ArgumentTypeError(
                f"batches: {batches!r:.60}, expected an iterable of tensors of ids"
            )
        if not isinstance(depth, int) or isinstance(depth, bool):
            raise ArgumentTypeError(f"depth: expected an int, got {depth!r:.60}")
        if depth < 1:
            raise ArgumentError(f"depth: {depth}, accepted are numbers from 1")
        self._batches = None if batches is None else iter(batches)
        self._exhausted = batches is None
        self._key, self._copy, self._depth = key, copy, depth
        self._waiting: deque[Any] = deque()  # put, and no buffer free yet
        self._under_way: deque[Fetch] = deque()
        self._free = [RingBuffer() for _ in range(depth)]
        self._held: RingBuffer | None = None
        self._n_batches = self._n_rows = self._raw_bytes = 0
        self._closed = False
        self._process = os.getpid()
        self._fetcher: ThreadFetcher | StreamFetcher
        if where.type == "cpu":
            self._fetcher = ThreadFetcher(Gatherer(gather, where))
        else:
            self._fetcher = StreamFetcher(gather, where, _check_of(source))
        # Runs once: at close, when the ring is collected, or at exit. It must not hold the ring.
        self._finalize = weakref.finalize(self, self._fetcher.close)

    # Driving

    def put(self, batch: Any) -> None:
        """Ask for a batch of ids ``[n]`` (with `key`, for an item). Never waits.

        Its gather starts as soon as a buffer is free; bad ids are raised by the `get` of the batch.

        Raises
        ------
        ArgumentError
            When the ring was made with `batches`.
        BitslabError
            When it is closed or belongs to another process.
        """
        self._check_usable("put")
        if self._batches is not None:
            raise ArgumentError("put: this ring takes its batches from the iterable it was given")
        self._waiting.append(batch)
        self._fetch_ahead()

    def get(self) -> Any:
        """Return the rows ``[n, *row_shape]`` of the next batch, valid until the next `get`.

        With `key` it is ``(item, rows)``.

        Raises
        ------
        BitslabError
            When no batch is left, or the ring is closed or belongs to another process.
        Exception
            What the source or the iterable raised for this batch.
        """
        if not self._prepare():
            raise BitslabError("get: no batch is left; put one first")
        return self._take()

    def __iter__(self) -> Iterator[Any]:
        """Yield what `get` returns until no batch is left, then close the ring."""
        try:
            while self._prepare():
                yield self._take()
        finally:
            self.close()

    def _prepare(self) -> bool:
        """Release the buffer in use and start fetches; return whether a batch is in flight."""
        self._check_usable("get")
        if self._held is not None:
            self._fetcher.release(self._held)
            self._free.append(self._held)
            self._held = None
        self._fetch_ahead()
        return bool(self._under_way)

    def _fetch_ahead(self) -> None:
        # The second condition bounds an iterable that raises again and again.
        while self._free and len(self._under_way) < self._depth:
            try:
                if self._waiting:
                    batch = self._waiting.popleft()
                elif self._batches is not None and not self._exhausted:
                    batch = next(self._batches)
                else:
                    return
                fetch = Fetch(batch, self._ids_of(batch), self._free[-1])
            except StopIteration:
                self._exhausted = True
                return
            except Exception as error:
                self._under_way.append(Fetch(error=error))
                continue
            self._free.pop()
            self._under_way.append(fetch)
            self._fetcher.start(fetch)

    def _ids_of(self, batch: Any) -> torch.Tensor:
        ids = batch if self._key is None else self._key(batch)
        if not isinstance(ids, torch.Tensor):
            hint = "" if self._key else "; say by key= where they are in a batch"
            raise ArgumentTypeError(f"ids: expected a tensor, got {type(ids).__name__}{hint}")
        if ids.dim() != 1:
            raise ArgumentError(f"ids: shape {list(ids.shape)}, expected one dimension")
        return ids

    def _take(self) -> Any:
        self._fetcher.raise_errors()
        # Removed only when it is fetched: a wait that Ctrl-C interrupts can be resumed.
        fetch = self._under_way[0]
        if fetch.buffer is not None:
            self._fetcher.finish(fetch)
        self._under_way.popleft()
        if fetch.error is not None:
            if fetch.buffer is not None:
                self._free.append(fetch.buffer)
            error, fetch.error = fetch.error, None  # or its traceback would hold it in a cycle
            try:
                raise error
            finally:
                del error
        self._held = fetch.buffer
        rows = fetch.rows
        assert rows is not None  # neither rows nor an error is impossible
        self._n_batches += 1
        self._n_rows += rows.shape[0]
        self._raw_bytes += rows.nbytes
        rows = rows.clone() if self._copy else rows
        return rows if self._key is None else (fetch.batch, rows)

    # Closing

    def close(self) -> None:
        """Drop what was fetched ahead and end the thread. Again, or in a forked child: nothing."""
        self._closed = True
        self._finalize()

    def __enter__(self) -> PrefetchRing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_usable(self, what: str) -> None:
        if os.getpid() != self._process:
            raise BitslabError(
                f"{what}: this ring was made in process {self._process}, and a forked child has "
                f"neither its thread nor its GPU; make a ring in each process"
            )
        if self._closed:
            raise BitslabError(f"{what}: this ring is closed")

    def stats(self) -> dict[str, Any]:
        """Return what was got so far.

        Returns
        -------
        dict
            ``batches``, ``rows``, ``raw_bytes`` (of the rows), ``depth``, and ``wait_seconds``:
            how long the consumer was starved, which is the host's wait in `get` on the CPU and
            the stream's wait for the rows on a GPU (as far as the GPU has got).
        """
        return {
            "batches": self._n_batches,
            "rows": self._n_rows,
            "raw_bytes": self._raw_bytes,
            "wait_seconds": self._fetcher.wait_seconds(),
            "depth": self._depth,
        }

    def __repr__(self) -> str:
        """Name the depth and what was got so far."""
        state = "closed" if self._closed else f"{self._n_batches} batches got"
        return f"PrefetchRing(depth {self._depth}, {state})"


def _device_of(source: Any) -> torch.device:
    """Return the device of a ring's rows when none is given: that of the source."""
    devices = getattr(source, "devices", None)  # of a cache
    if isinstance(devices, tuple) and devices:
        return named_device(devices[0], "source.devices")
    return named_device(source.device if isinstance(source, torch.Tensor) else "cpu", "source")


def _gather_of(source: Any, device: torch.device) -> Callable[..., torch.Tensor]:
    """Return the function that gathers from a source, or refuse it."""
    if isinstance(source, torch.Tensor):
        # Of a unified tensor, for torch on the CPU, a GPU gathers by itself.
        if source.device.type != device.type and not hasattr(source, "host_buffer"):
            raise ArgumentTypeError(
                f"source: a tensor on {source.device}, and rows are wanted on {device}: move it "
                "there, or use bitslab.unified(source)"
            )

        def select(
            ids: torch.Tensor, out: torch.Tensor | None = None, device: Any = None
        ) -> torch.Tensor:
            return torch.index_select(source, 0, ids, out=out)

        return select
    gather = getattr(source, "gather", source)
    if not callable(gather):
        raise ArgumentTypeError(
            f"source: expected an object with gather(ids, out, device), such a function or a "
            f"tensor, got {type(source).__name__}"
        )
    _check_keywords(gather)
    return cast(Callable[..., torch.Tensor], gather)


def _check_keywords(gather: Callable[..., Any]) -> None:
    """Refuse a function that cannot be called as a ring does."""
    try:
        signature = inspect.signature(gather)
    except (TypeError, ValueError):  # of compiled code, which does not say
        return
    try:
        signature.bind(None, out=None, device=None)
    except TypeError as error:
        raise ArgumentTypeError(
            f"source: cannot be called as gather(ids, out=None, device=None): {error}"
        ) from error


def _check_of(source: Any) -> Callable[[torch.Tensor], None] | None:
    """Return the source's check of ids on the CPU, before they go to a GPU; None without one."""
    if isinstance(source, torch.Tensor):
        rows = len(source)

        def check(ids: torch.Tensor) -> None:
            low, high = (int(x) for x in ids.aminmax()) if len(ids) else (0, -1)
            if low < -rows or high >= rows:
                bad = ((ids < -rows) | (ids >= rows)).nonzero()[0, 0]
                raise IndexRangeError(
                    f"ids: index {int(ids[bad])} at position {int(bad)} is out of range for "
                    f"{rows} rows"
                )

        return check
    found: Callable[[torch.Tensor], None] | None = getattr(source, "check_ids", None)
    return found
