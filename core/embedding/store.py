"""Row store: the table on the host, a slab of packed rows on a GPU, and prefetched rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..engine.codecs import RowCodec
from ..engine.memory.host import available_bytes
from ..engine.progress import ProgressFunction
from ..tables.build import Rows
from ..tables.parts import Layout
from ..tables.slabs import SlabCache, raw_bytes_in_slab
from ..tables.table import CompressedTable
from .gradients import Array
from .prefetch import Prefetched

#: A packed table is packed again when rows that outgrew their place take this share of its bytes;
REPACK_SHARE = 0.25
#: between steps, as before a checkpoint, this share,
TIDY_SHARE = REPACK_SHARE / 4
#: while training at least so many bytes,
REPACK_BYTES = 1 << 20
#: and this share of its rows was written since, or packing would take longer than training.
REWRITTEN_SHARE = 0.25
#: Rows that a GPU trains are kept raw unless packing makes them smaller by this factor: raw ones
#: cross the link both ways at once, and take no second place when they outgrow the first.
LEAST_TRAINED_RATIO = 2.0
#: Slabs are filled again when this share of their rows has changed, which they do not hold then.
REFILL_SHARE = 0.25
PIECE_ROWS = 1 << 16


class RowStore:
    """All rows of a table, in host memory. Callers hold the owner's lock.

    Parameters
    ----------
    table : CompressedTable
        The rows.
    device : torch.device
        Where they are looked up.
    packed_rows : int
        Raw rows whose bytes a slab on the device takes, full of packed ones; 0 for no slab.
    codec : str or RowCodec
        How all rows are packed when they are replaced.
    pin : bool
        Whether they are page-locked then.
    hot : numpy.ndarray
        int64, rows for the slab, the hottest first.
    notes : sequence of str
        Remarks on how they were packed, for `stats`.
    trained_slots : int, optional
        As in `packed_table`.
    """

    def __init__(
        self,
        table: CompressedTable,
        device: torch.device,
        packed_rows: int,
        codec: str | RowCodec,
        pin: bool,
        hot: Array,
        notes: Sequence[str] = (),
        trained_slots: int | None = None,
    ) -> None:
        self.table = table
        self.device = device
        self.packed_rows = packed_rows
        self.codec = codec
        self.pin = pin
        self.hot = hot
        self.notes = notes
        self.trained_slots = trained_slots
        self.slabs: SlabCache | None = None
        self.prefetched: Prefetched | None = None
        #: Counts calls that changed rows.
        self.changes = 0
        self.written_back = 0
        self._stale_rows = 0
        self._rewritten_rows = 0
        if len(hot):
            self.fill(hot)

    def packed_as(
        self, codec: str | RowCodec, pin: bool, notes: Sequence[str], trained_slots: int | None
    ) -> None:
        """Record how the rows were packed: arguments and remarks of `packed_table`."""
        self.codec, self.pin, self.notes = codec, pin, notes
        self.trained_slots = trained_slots

    def description(self) -> dict[str, Any]:
        """Return the arguments that make another one, but for the device."""
        names = ("table", "packed_rows", "codec", "pin", "hot", "notes", "trained_slots")
        return {name: getattr(self, name) for name in names}

    # To the device

    def gather(self, ids: Array, out: torch.Tensor | None = None) -> torch.Tensor:
        """Decode rows int64 ``[n]`` to the device."""
        source = self.table if self.slabs is None else self.slabs
        if self.prefetched is not None:
            return self.prefetched.gather(source, ids, out, self.device)
        return source.gather(torch.from_numpy(ids), out, self.device)

    def decode(self, ids: Array, out: torch.Tensor) -> None:
        """Decode rows int64 ``[n]``, in range, to ``[n, D]`` on the device."""
        if self.prefetched is None and self.slabs is None and self.device.type == "cpu":
            self.table.gather_checked(None, torch.from_numpy(ids), out)
        else:
            self.gather(ids, out)

    def prefetch(self, ids: Array) -> None:
        """Start to decode rows int64 ``[n]``, ascending; those asked for before are dropped."""
        source = self.table if self.slabs is None else self.slabs
        self.prefetched = Prefetched(source, ids, self.device) if len(ids) else None

    def fill(self, hot: Array) -> None:
        """Pack rows into the slab, if there is to be one: int64, the hottest first."""
        self.hot = hot
        self._stale_rows = 0
        if self.slabs is None:
            capacity_bytes = self.packed_rows * max(1, self.table.row_bytes)
            if not capacity_bytes:
                return
            capacity_bytes = max(capacity_bytes, raw_bytes_in_slab(self.table))
            self.slabs = SlabCache(self.table, capacity_bytes, [self.device])
        self.slabs.fill(torch.from_numpy(hot))

    def move(self, device: torch.device) -> None:
        """Decode to another device from now on."""
        if device == self.device:
            return
        self.device = device
        self.prefetched = None
        self._make_slabs_anew()

    def _make_slabs_anew(self) -> None:
        if self.slabs is not None:
            self.slabs.close()
            self.slabs = None
            self.fill(self.hot)

    # To the host

    def update(self, ids: Array, rows: torch.Tensor, *, counted: bool = True) -> None:
        """Give rows int64 ``[n]`` new values ``[n, D]``; `counted`: as rows written back."""
        if not len(ids):
            return
        if self.prefetched is not None:
            self.prefetched.forget(ids)
        self.changes += 1
        self.table.update(torch.from_numpy(ids), rows)
        self.written_back += len(ids) if counted else 0
        self._rewritten_rows += len(ids)
        if self._enough_rewritten and self._many_outgrown(self.table.outgrown_bytes):
            self._pack_anew()
        elif self.slabs is not None:
            each = self.table.rows_per_packed_row  # rows that leave the slab together
            self._stale_rows += len(ids) if each == 1 else each * len(np.unique(ids // each))
            if self._stale_rows > REFILL_SHARE * self.packed_rows:
                self.fill(self.hot)

    def record_rewritten(self, n_rows: int, outgrown_bytes: int) -> None:
        """Record that a GPU has given rows new values; pack the table again where memory is short.

        That stops a step of training for seconds. So long as there is memory for a second table and
        for twice the rows that have moved, these remain where they are until `tidy`: at most all.
        Without memory for a second table they remain as well.

        Parameters
        ----------
        n_rows : int
            Rows since the last call.
        outgrown_bytes : int
            Bytes of all rows that outgrew their place, about.
        """
        self._rewritten_rows += n_rows
        if not self._enough_rewritten or not self._many_outgrown(outgrown_bytes):
            return
        self._rewritten_rows = 0  # it is looked at again after as many
        nbytes = self.table.nbytes
        if nbytes <= available_bytes() < nbytes + 2 * outgrown_bytes:
            self._pack_anew()

    @property
    def _enough_rewritten(self) -> bool:
        return self._rewritten_rows > REWRITTEN_SHARE * len(self.table)

    def _many_outgrown(self, outgrown_bytes: int) -> bool:
        return outgrown_bytes > max(REPACK_BYTES, REPACK_SHARE * self.table.nbytes)

    def tidy(self) -> None:
        """Pack the table again if rows that outgrew their place take more than they should."""
        if self.table.outgrown_bytes > TIDY_SHARE * self.table.nbytes:
            self._pack_anew()

    def _pack_anew(self) -> None:
        # Training moves values away from what the codec was fitted to; a codec that was given is
        # kept.
        self.table.compact(progress=False, refit=self.codec in ("auto", "ibp"))
        self._rewritten_rows = 0
        self._make_slabs_anew()

    def replace(self, batches: Iterable[torch.Tensor]) -> None:
        """Pack all rows again from batches, in order."""
        how = self.table.layout, self.codec, self.pin, self.device, None, self.trained_slots
        fresh, notes = packed_table(batches, *how)
        old, self.table = self.table, fresh
        self.notes = notes
        self.changes += 1
        self._rewritten_rows = 0
        self.prefetched = None
        try:
            self._make_slabs_anew()
        finally:
            old.close()

    def close(self) -> None:
        """Free the memory."""
        self.prefetched = None
        if self.slabs is not None:
            self.slabs.close()
        self.table.close()


def packed_table(
    rows: Rows | Iterable[Rows],
    layout: Layout,
    codec: str | RowCodec,
    pin: bool,
    device: torch.device,
    progress: ProgressFunction | bool | None = None,
    trained_slots: int | None = None,
) -> tuple[CompressedTable, list[str]]:
    """Return a table of rows, and remarks; raw where a GPU would be slower with packed rows.

    Parameters
    ----------
    rows, layout, codec, pin, progress
        As in `CompressedTable.from_tensor`. Only with ``codec="auto"`` there is a choice.
    device : torch.device
        Where the rows are wanted.
    trained_slots : int, optional
        Rows that are there at a time, to be trained; None where none are trained. Fewer than all
        come and go all the time.
    """
    table = CompressedTable.from_tensor(rows, layout, codec, pin, progress=progress)
    if codec != "auto" or table.codec.keeps_raw or device.type != "cuda":
        return table, []
    comes_and_goes = trained_slots is not None and trained_slots != len(table)
    if comes_and_goes and table.ratio < LEAST_TRAINED_RATIO:
        why = f"packed {table.ratio:.2f}x, rows would be trained on {device} more slowly"
    elif not table.advice(device).packed:
        why = f"packed rows would reach {device} more slowly"
    else:
        return table, []
    with table:
        pieces = range(0, len(table), PIECE_ROWS)
        batches = (table.decoded(at, min(at + PIECE_ROWS, len(table))) for at in pieces)
        raw = CompressedTable.from_tensor(batches, layout, "raw", pin, progress=False)
    return raw, [f"kept raw: {why}; codec='ibp' packs anyway"]
