"""CompressedTable: rows packed in host memory, gathered by id to a CPU or a GPU."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..compressed import CompressedTensor
from ..dtypes import dtype_name
from ..engine.codecs import RowCodec
from ..engine.files.new_file import PathLike
from ..engine.kernels.typed_products import PackedRows
from ..engine.progress import Progress, ProgressFunction
from ..errors import BitslabError
from . import making
from .build import Rows, build_parts, check_layout
from .cache import Cache
from .changes import fitted_again
from .files import parts_of_file
from .host_table import HostTable
from .parts import Layout, TableParts
from .sharing import handle_of, parts_of_handle


class CompressedTable(HostTable):
    """A table of packed rows in host memory; any rows are gathered by id, decoded.

    On a GPU one kernel reads the packed rows over the link (zero-copy) and decodes them: only
    packed bytes cross. On the CPU Numba kernels decode the same rows.

    Make one with `from_tensor`, `from_file` or `attach`.

    Attributes
    ----------
    shape : torch.Size
        ``[N, *row_shape]``.
    dtype : torch.dtype
        Dtype of the rows' elements.
    layout : {"compact", "inplace"}
        ``"compact"``: packed rows back to back; host memory shrinks, and a GPU keeps 1.25 bytes a
        row to find them (2.25 for rows over 1 KiB, 4.25 over 256 KiB; one more for a codec with
        clusters). ``"inplace"``: row i is at i * row_bytes
        (rounded up to 4), host memory does not shrink, and a GPU keeps one bit a row (IBP,
        section 5).
    rows_per_packed_row : int
        Rows shorter than 64 bytes that pack far less each alone are packed by as many as make about
        256 bytes, and the sizes above are those of such a packed row. A gather reads and decodes it
        whole for each id, an update repacks it. 1 for other rows, and where packing gains
        nothing.
    codec : RowCodec
        Codec of the packed rows, each of `rows_per_packed_row` rows; RawCodec when packing saves
        nothing: rows then take exactly their raw bytes, and gathers copy them.

    Notes
    -----
    Threads: any number may gather at once. `update` and `compact` wait for gathers under way, those
    on GPUs included, and block new ones, so that a gather sees the old or the new value of a
    row, never a mix. Replays of a CUDA graph that captured a gather are not seen: no update may run
    during one, and after an update or `compact` the graph must be captured again.

    Processes: a table reaches a worker process (fork, spawn, ``torch.multiprocessing``) as the same
    memory, and an unrelated process of the same user by `handle` and `attach`; each page-locks it
    for its own GPUs. A table that was shared this way is read-only from then on. Forked children
    share the memory too: they cannot change it, and must not read rows that their parent updates
    after the fork. Plain pickling and the `copy` module copy.

    Examples
    --------
    >>> import torch, bitslab
    >>> features = torch.randn(1000, 64).round()
    >>> table = bitslab.CompressedTable.from_tensor(features)
    >>> torch.equal(table[[3, 1, 3]], features[[3, 1, 3]])
    True
    >>> table.stats()["ratio"] > 2
    True
    """

    # Construction

    @classmethod
    def from_tensor(
        cls,
        t: Rows | Iterable[Rows],
        layout: Layout = "compact",
        codec: str | RowCodec = "auto",
        pin: bool = True,
        *,
        device: torch.device | str | None = None,
        seed: int = 0,
        progress: ProgressFunction | bool | None = None,
        **options: Any,
    ) -> CompressedTable:
        """Pack a table.

        Parameters
        ----------
        t : torch.Tensor, numpy.ndarray, or iterable of them
            ``[N, *row_shape]`` of any dtype, on a CPU or GPU; a memory-mapped array is read piece
            by piece. An iterable gives batches ``[n, *row_shape]`` of any number of rows each; the
            codec is fitted on the first of them, up to 8 MiB of rows.
        layout : {"compact", "inplace"}
            How rows are stored; see `CompressedTable`.
        codec : str or RowCodec
            ``"auto"``: invariant bit packing with a plan for these rows, or raw where packing does
            not make them smaller. ``"ibp"`` or ``"raw"``: that codec, fitted to these rows. A
            codec of these two classes: that one, fitted to rows or, in one dimension, to some of
            them together. Registered codecs are refused.
        pin : bool
            Whether the packed rows are page-locked, as a GPU needs to read them itself. Without a
            GPU nothing is locked until one is used.
        device : torch.device or str, optional
            Where rows are packed: a GPU packs at the link's rate. The device of `t` when left out.
        seed : int
            Seed of the choice of sample rows, and of the codec's `fit`.
        progress : callable, bool, optional
            Called with the rows done and all rows (or None) after each batch. When left out, a bar
            is shown on a terminal after two seconds; False for none. Where packing turns out to
            gain nothing, rows are counted from 0 again while they are kept raw.
        **options
            For the codec's `fit`.

        Returns
        -------
        CompressedTable

        Raises
        ------
        ArgumentTypeError, ArgumentError
            When an argument is not accepted. A table that could not be finished is freed.

        Notes
        -----
        Extra memory: a few times 32 MiB, or 32 rows if those are more, for any size of the
        table.
        """
        parts = making.parts_of_rows(
            t, layout, codec, options, pin=pin, device=device, seed=seed, progress=progress
        )
        return cls(parts, pin=pin)

    @classmethod
    def from_file(
        cls, path: PathLike, layout: Layout = "compact", pin: bool = True
    ) -> CompressedTable:
        """Open a table that `save` wrote.

        Parameters
        ----------
        path : str or os.PathLike
            A file of one compressed tensor whose rows are the items of its first dimension, or
            several of them where they are narrow.
        layout : {"compact", "inplace"}
            How rows are stored.
        pin : bool
            With a GPU: read the packed rows into page-locked memory. Without a GPU, or when False,
            a compact table of packed rows is memory-mapped and read as it is used: the file
            may be replaced, but must not be written to.

        Raises
        ------
        CorruptedDataError
            When the file is truncated, altered, or not by bitslab.
        ArgumentError
            When the file holds anything but one table.
        OSError
            When the file cannot be read.
        """
        check_layout(layout)
        parts, file = parts_of_file(path, layout, pin=pin)
        return cls(parts, pin=pin and file is None, file=file)

    def save(self, path: PathLike) -> None:
        """Write the table to a file that `from_file` and `bitslab.load` read.

        Parameters
        ----------
        path : str or os.PathLike
            The file appears whole or not at all: a crash or a full disk leaves an old one as is.

        Raises
        ------
        OSError
            When the file cannot be written.

        Notes
        -----
        Readers run on, updates wait. A table in place, or one with updated rows, is repacked for
        the file, which takes memory for one more compact copy.
        """
        with self.unchanging():
            parts, fresh = self._parts, None
            if not parts.raw and (parts.layout == "inplace" or self._rows.dirty):
                fresh = parts = self._repacked("compact", parts.codec, pin=False)
            try:
                with self._reading():
                    packed = parts.as_packed()
                CompressedTensor(parts.codec, packed, self.shape).save(path)
            finally:
                if fresh is not None:
                    fresh.close()

    def _repacked(
        self,
        layout: Layout,
        codec: RowCodec,
        *,
        pin: bool,
        progress: ProgressFunction | bool | None = None,
    ) -> TableParts:
        """Return the current rows, packed by a codec; the caller blocks updates."""
        with Progress("packing", len(self), progress) as shown:
            return build_parts(
                self.batches(), codec, self._parts.item_shape, layout, pin=pin, progress=shown
            )

    # Updates

    def compact(
        self, progress: ProgressFunction | bool | None = None, *, refit: bool = False
    ) -> None:
        """Repack the table, which empties the overflow area.

        Readers use the old copy while the new one is made; updates wait. Both take memory
        meanwhile.

        Parameters
        ----------
        progress : callable, bool, optional
            As in `from_tensor`. The callback may gather from the table and save it, not change it.
        refit : bool
            Whether to fit the codec to the current rows, or to keep them raw if packing saves
            nothing any more. A cache over the table then has to be filled again.

        Raises
        ------
        BitslabError
            As in `update`.
        """
        self._check_open()
        if self._parts.raw or not self._rows.dirty:
            return
        with self._ownership.changing("compact"):
            self._ownership.check("compact", self._parts)
            codec = fitted_again(self.packed_rows_of, self._parts) if refit else self.codec
            self._replace(self._repacked(self.layout, codec, pin=self._rows.pin, progress=progress))

    @contextlib.contextmanager
    def read_by_products(
        self, device: torch.device, cache: Cache | None = None
    ) -> Iterator[PackedRows | torch.Tensor | None]:
        """Give the rows as kernels of typed products read them on a GPU.

        The kernels are started inside the context, on torch's current stream; no update runs
        meanwhile. It gives None for rows that are to be gathered instead: on a CPU, of several
        dimensions, not page-locked, or of a codec without such kernels.

        Parameters
        ----------
        device : torch.device
            Where the product is made.
        cache : Cache, optional
            Holds copies of some rows, which are read from there.
        """
        with self._reading():
            rows = None if device.type == "cpu" else self._gathers.for_products(device, cache)
            try:
                yield rows
            finally:
                if rows is not None:
                    self._lock.mark_gpu_read(device)

    # Other processes

    def handle(self) -> str:
        """Return a text by which another process of this user on this machine can `attach`.

        For processes that are no children of this one, such as the ranks of torchrun. This process
        must live, and keep the table, until the others have attached. The table is read-only from
        now on.
        """
        with self._reading():
            if self._ownership.file is not None:
                raise BitslabError(
                    "handle: this table is memory-mapped; open the file in each process"
                )
            if self._rows.overflow is not None:
                raise BitslabError("handle: rows have moved; call compact() first")
            self._rows.settle()
            return handle_of(self._parts)

    @classmethod
    def attach(cls, handle: str, pin: bool = True) -> CompressedTable:
        """Open a table of another process by its `handle`: the same memory, read-only.

        Raises
        ------
        ArgumentError
            When the handle is not valid, or the process that gave it is gone.
        """
        return cls(parts_of_handle(handle), pin=pin, read_only=True)

    def __getstate__(self) -> dict[str, Any]:
        """Describe the table for another process; plain pickle copies its memory."""
        with self._reading():
            if (file := self._ownership.file) is not None:
                return {"path": file.path, "checksum": file.checksum}
            if self._rows.overflow is not None:
                raise BitslabError("pickle: rows have moved; call compact() first")
            self._rows.settle()
            state = self._parts.describe()
            return state | {"buffers": dict(self._parts.buffers), "pin": self._rows.pin}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "path" in state:
            parts, file = parts_of_file(state["path"], "compact", pin=False)
            if file is None or file.checksum != state["checksum"]:
                raise BitslabError(f"{state['path']}: holds another table than when it was opened")
            super().__init__(parts, pin=False, file=file)
            return
        buffers = state["buffers"]
        read_only = any(buffer.shared for buffer in buffers.values())
        parts = TableParts.from_description(state, buffers)
        super().__init__(parts, pin=state["pin"], read_only=read_only)

    def __copy__(self) -> CompressedTable:
        """Copy the memory too: two tables over one memory would not see each other's updates."""
        return copy.deepcopy(self)

    # Representation and end

    def __repr__(self) -> str:
        """Return shape, dtype, layout, plan and ratio as text."""
        if self._closed:
            return "CompressedTable(closed)"
        return (
            f"CompressedTable({list(self.shape)}, {dtype_name(self.dtype)}, {self.layout}, "
            f"{self.codec.describe()}, {self.ratio:.2f}x)"
        )

    def __enter__(self) -> CompressedTable:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
