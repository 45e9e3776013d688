"""Messages that came to a GPU: cut into parts, checked on the host, and decoded there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ..engine.on_host import on_host
from ..errors import CorruptedDataError
from .device_parts import Came, Coder, Places, bytes_of
from .layout import Layout, Rows
from .messages import Array, Fields, on_device
from .wire import BY_ID_HEADER, PART_SIZE


class DeviceReader:
    """Reads the messages of an exchange of rows that are coded on their device.

    Parameters
    ----------
    tables : sequence of Rows
        Of the exchange: where rows are written.
    layout : Layout
        Of their sizes.
    pieces : int
        Of a message.
    coder : Coder
        Decodes.
    copied : int or None
        The rank whose rows do not cross: this one, or none.
    """

    def __init__(
        self,
        tables: Sequence[Rows],
        layout: Layout,
        pieces: int,
        coder: Coder,
        copied: int | None,
    ) -> None:
        self._tables, self._layout, self._pieces = tables, layout, pieces
        self._coder, self._copied = coder, copied
        self._device, self._size = tables[0].sent.device, layout.size
        self.received = [table.parts or table.received_parts() for table in tables]

    def read(
        self, piece: int, data: torch.Tensor, come: Sequence[int], by_id: Sequence[int]
    ) -> None:
        """Queue the decoding of messages, all of which are cut before a row is written.

        Parameters
        ----------
        piece : int
            Which one they are of.
        data : torch.Tensor
            uint8 on the device, rank after rank.
        come, by_id : sequence of int
            By rank the bytes of its message, and whether a part of it has rows by id.

        Raises
        ------
        CorruptedDataError
            When a message is cut, or its fields are damaged.
        """
        came = self._cut(piece, data, come)
        fields: dict[int, Places] = {}
        spread: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        if any(by_id):
            fields = self._fields(came, by_id)
        if fields:
            given = _end_to_end([f.places for f in fields.values()], np.int64)
            places = on_device(given, self._device)
        bodies: list[tuple[torch.Tensor, torch.Tensor]] = []
        at = 0
        for number, each in enumerate(came):
            body, out = each.data, each.out
            if number in fields:
                of_part = fields[number]
                body = body[of_part.fields.nbytes :]
                rows = len(of_part.places)
                shape = (of_part.fields.sent_rows, out.shape[1])
                out = torch.empty(shape, dtype=out.dtype, device=self._device)
                spread.append((out, places[at : at + rows], each.out))
                at += rows
                table = self._tables[each.table]
                table.places = table.places or [None] * self._size
                table.places[each.source] = of_part.places
            if body.shape[0] == out.nbytes:
                bytes_of(out).copy_(body)
            else:
                bodies.append((body, out))
        self.decode(bodies)
        for crossed, of_rows, out in spread:
            torch.index_select(crossed, 0, of_rows, out=out)

    def _cut(self, piece: int, data: torch.Tensor, come: Sequence[int]) -> list[Came]:
        """Return the parts of messages; their sizes are read by one copy, where there are some."""
        spans = self._layout.received_spans(piece, self._pieces)
        heads = [PART_SIZE.size * max(0, len(of_rank) - 1) for of_rank in spans]
        for source, n_bytes in enumerate(come):
            if heads[source] > n_bytes and source != self._copied:
                raise self._damaged(source, n_bytes, len(spans[source]))
        numbers: list[int] = []
        if any(heads):
            begins = accumulate(come, initial=0)
            read = [data[at : at + n] for at, n in zip(begins, heads, strict=False) if n]
            numbers = self._on_host(read).view("<u4").tolist()
        cuts: list[int] = []
        at = 0
        for source, (of_rank, n_bytes) in enumerate(zip(spans, come, strict=True)):
            sizes = numbers[at : at + len(of_rank) - 1] if of_rank else []
            at += len(sizes)
            rest = n_bytes - heads[source] - sum(sizes)
            if source != self._copied and (rest < 0 or (not of_rank and rest)):
                raise self._damaged(source, n_bytes, len(of_rank))
            cuts += [heads[source], *sizes, rest]
        found, pieces = [], iter(data.split_with_sizes(cuts))
        for source, of_rank in enumerate(spans):
            next(pieces)  # the sizes of its parts
            for number, _, first, rows in of_rank:
                if self._pieces == 1:
                    out = self.received[number][source]
                else:
                    out = self._tables[number].received[first : first + rows]
                found.append(Came(source, number, next(pieces), out))
            if not of_rank:
                next(pieces)  # what this rank would send itself
        return found

    def _damaged(self, source: int, n_bytes: int, parts: int) -> CorruptedDataError:
        return CorruptedDataError(
            f"message of rank {source} of the group: {n_bytes} bytes, expected {parts} parts"
        )

    def _on_host(self, pieces: Sequence[torch.Tensor]) -> Array:
        """Return bytes on the device one behind the other on the host; waits for them."""
        if not pieces:
            return np.empty(0, np.uint8)
        joined = torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]
        found: Array = on_host(joined).numpy()
        return found

    def _fields(self, came: Sequence[Came], by_id: Sequence[int]) -> dict[int, Places]:
        """Return by number the fields of parts whose rows cross once for each id.

        Two copies move headers and fields of all of them to the host, where they are checked: a
        kernel that reads rows by a wrong place would end the process.
        """
        flagged = [
            (number, each)
            for number, each in enumerate(came)
            if by_id[each.source] and len(each.data) != each.out.nbytes
        ]
        read = [each.data[: BY_ID_HEADER.size] for _, each in flagged]
        heads, at, known = self._on_host(read).tobytes(), 0, []
        for (number, each), part in zip(flagged, read, strict=True):
            fields = Fields.of(heads[at : at + len(part)], len(each.out), len(each.data))
            at += len(part)
            if fields is not None:
                known.append((number, fields))
        read = [came[number].data[BY_ID_HEADER.size : f.nbytes] for number, f in known]
        data, at, found = self._on_host(read), 0, {}
        for (number, fields), part in zip(known, read, strict=True):
            found[number] = Places(fields, fields.places(data[at : at + len(part)]))
            at += len(part)
        return found

    def decode(self, bodies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Decode bodies of all dtypes, each dtype's by one pipeline."""
        by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for data, out in bodies:
            if out.dtype not in by_dtype:
                by_dtype[out.dtype] = [], []
            data_of, outs = by_dtype[out.dtype]
            # A part behind rows of odd bytes begins at no word.
            data_of.append(data if data.data_ptr() % PART_SIZE.size == 0 else data.clone())
            outs.append(out)
        for data_of, outs in by_dtype.values():
            self._coder.decode_vectors(data_of, outs, [True] * len(outs))


def _end_to_end(arrays: Sequence[Array], dtype: Any) -> Array:
    return np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype)
