"""The decisions: packed or raw, sort or not, by zero-copy or by the copy engine.

The rule: rows are kept packed when gathering them is predicted to be faster than gathering raw
ones, or as fast while the table takes less host memory; never when it is slower. Decoding runs
while the next bytes cross, so that a packed gather takes the longer of the two. On the CPU nothing
crosses a link: packing there is for memory, and the seconds predicted say what it costs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...devices import checked_device
from ...errors import ArgumentError, ArgumentTypeError
from ..codecs.base import RowCodec
from .decoding import Sample, decode_bytes_per_s
from .link import LINE_BYTES, LinkModel, measure_link

Via = Literal["zero-copy", "copy-engine"]

#: Ids of a gather up to which ordering them takes longer than it could save.
MIN_SORTED_IDS = 1024

_lock = threading.Lock()
_advisors: dict[torch.device, Advisor] = {}


@dataclass(frozen=True)
class Advice:
    """What to do with a table, and why.

    Parameters
    ----------
    packed : bool
        Keep the rows packed.
    sort : bool
        Sort a batch's ids on the device before the gather.
    via : {"zero-copy", "copy-engine"}
        How the bytes cross.
    seconds : mapping of str to float
        Predicted for one batch: ``raw`` and ``packed`` each at their best, ``decode`` where the
        rate is known; for the form that was chosen ``unsorted`` and ``sorted`` (scattered rows
        only), ``zero-copy`` and ``copy-engine``.
    packed_reasons, sort_reasons, via_reasons : tuple of str
        Plain sentences with the figures used.
    """

    packed: bool
    sort: bool
    via: Via
    seconds: Mapping[str, float]
    packed_reasons: tuple[str, ...]
    sort_reasons: tuple[str, ...]
    via_reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values, for `stats`."""
        return {
            "packed": self.packed,
            "sort": self.sort,
            "via": self.via,
            "seconds": dict(self.seconds),
            "reasons": {
                "packed": list(self.packed_reasons),
                "sort": list(self.sort_reasons),
                "via": list(self.via_reasons),
            },
        }


def advise(
    link: LinkModel,
    *,
    n_rows: int,
    row_bytes: int,
    packed_bytes: int,
    batch_rows: int,
    packed_span_bytes: int | None = None,
    rows_per_packed_row: int = 1,
    decode_bytes_per_s: float | None = None,
    contiguous: bool = False,
    crosses_link: bool = True,
) -> Advice:
    """Decide for one table and one size of batches.

    Parameters
    ----------
    link : LinkModel
        What the bytes cross.
    n_rows, row_bytes : int
        Rows of the table and bytes of a raw row.
    packed_bytes : int
        Bytes of all packed rows, which is what would cross.
    batch_rows : int
        Rows of a batch.
    packed_span_bytes : int, optional
        Host memory that the packed table takes: `packed_bytes` when left out (compact); in place
        the raw bytes.
    rows_per_packed_row : int
        Rows that are packed as one, which a gather by id reads and decodes whole.
    decode_bytes_per_s : float, optional
        Rate of decoding, in bytes of output; taken to keep up with the link when left out.
    contiguous : bool
        Batches are ranges of rows; else rows by id.
    crosses_link : bool
        False when the rows are wanted on the CPU.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When a size is no int or negative, or a row has no bytes.
    """
    span = packed_bytes if packed_span_bytes is None else packed_span_bytes
    for name, size, least in (
        ("n_rows", n_rows, 0),
        ("row_bytes", row_bytes, 1),
        ("packed_bytes", packed_bytes, 0),
        ("packed_span_bytes", span, 0),
        ("rows_per_packed_row", rows_per_packed_row, 1),
        ("batch_rows", batch_rows, 0),
    ):
        if not isinstance(size, int) or isinstance(size, bool):
            raise ArgumentTypeError(f"{name}: expected an int, got {size!r:.60}")
        if size < least:
            raise ArgumentError(f"{name}: {size}, accepted are numbers from {least} on")
    if decode_bytes_per_s is not None and not decode_bytes_per_s > 0:
        raise ArgumentError(
            f"decode_bytes_per_s: {decode_bytes_per_s}, accepted are numbers above 0"
        )
    raw_bytes = n_rows * row_bytes
    each = 1 if contiguous else rows_per_packed_row
    raw = _Gather(link, raw_bytes, row_bytes, batch_rows, contiguous, row_bytes % LINE_BYTES != 0)
    # In place rows begin where raw ones do; compact ones begin anywhere.
    packed = _Gather(
        link,
        span,
        packed_bytes * each / max(1, n_rows),
        batch_rows,
        contiguous,
        span < raw_bytes or row_bytes % LINE_BYTES != 0,
    )
    decode = None
    if decode_bytes_per_s is not None:
        decode = batch_rows * row_bytes * each / decode_bytes_per_s
    packed_seconds = max(packed.best, decode or 0.0)

    saved = raw_bytes - span
    reasons = [
        f"Packed rows are {_size(packed_bytes)} of {_size(raw_bytes)} raw "
        f"and take {_size(span)} of host memory."
    ]
    if not crosses_link:
        pack = saved > 0
        reasons.append("Rows are used on the CPU: packing is decided by memory alone.")
    else:
        pack = packed_seconds < raw.best or (saved > 0 and packed_seconds <= raw.best)
        reasons.append(
            f"A batch of {batch_rows} rows takes {_time(packed_seconds)} packed, "
            f"{_time(raw.best)} raw."
        )
        if decode is None:
            reasons.append("The decoder's rate is not known; it is taken to keep up with the link.")
        else:
            limit = "decoder" if decode > packed.best else "link"
            reasons.append(f"Decoding takes {_time(decode)} of it; the {limit} is the limit.")
    chosen = packed if pack else raw
    return Advice(
        packed=pack,
        sort=chosen.sort,
        via=chosen.via,
        seconds={
            "raw": raw.best,
            "packed": packed_seconds,
            **({} if decode is None else {"decode": decode}),
            **chosen.seconds,
        },
        packed_reasons=tuple(reasons),
        sort_reasons=chosen.sort_reasons(),
        via_reasons=chosen.via_reasons(),
    )


MAX_REMEMBERED = 4096  # decisions of an advisor


class _Gather:
    """Predictions for one form of a table."""

    def __init__(
        self,
        link: LinkModel,
        span: float,
        row_bytes: float,
        n: int,
        contiguous: bool,
        straddles: bool,
    ) -> None:
        self.link, self.span, self.row_bytes, self.n = link, span, row_bytes, n
        self.contiguous = contiguous
        moved = n * row_bytes
        self.seconds: dict[str, float] = {}
        self.sort = False
        if contiguous:
            zero_copy = moved / link.zero_copy_bytes_per_s
            engine = link.copy_time(moved)
        else:
            self.sort = link.pays_to_sort(span, row_bytes, n)
            both = [
                link.gather_seconds(span, row_bytes, n, sorted=s, straddles=straddles)
                for s in (False, True)
            ]
            self.seconds.update(unsorted=both[0], sorted=both[1])
            zero_copy = both[self.sort]
            engine = moved / link.host_gather_bytes_per_s + link.copy_time(moved)
        self.seconds.update({"zero-copy": zero_copy, "copy-engine": engine})
        self.via: Via = "copy-engine" if engine < zero_copy else "zero-copy"
        self.sort = self.sort and self.via == "zero-copy"
        self.best = min(zero_copy, engine)

    def sort_reasons(self) -> tuple[str, ...]:
        if self.contiguous:
            return ("Ranges of rows are in order already.",)
        if self.via == "copy-engine":
            return ("The host collects the rows, which needs no sorting on the device.",)
        plain, ordered = self.seconds["unsorted"], self.seconds["sorted"]
        lookups = self.link.lookups_per_s(self.span)
        limit = "no limit of" if lookups == math.inf else f"at most {lookups / 1e6:.3g} million"
        return (
            f"Random rows out of {_size(self.span)}: {limit} address lookups a second.",
            f"{self.n} rows of {self.row_bytes:.4g} B take {_time(plain)} as they come and "
            f"{_time(ordered)} sorted, the sort included.",
        )

    def via_reasons(self) -> tuple[str, ...]:
        zero_copy, engine = self.seconds["zero-copy"], self.seconds["copy-engine"]
        how = "" if self.contiguous else ", after the host has collected the rows"
        return (
            f"A kernel that reads host memory moves "
            f"{self.link.zero_copy_bytes_per_s / 1e9:.3g} GB/s at most: {_time(zero_copy)}.",
            f"The copy engine moves {self.link.host_to_device_bytes_per_s / 1e9:.3g} GB/s"
            f"{how}: {_time(engine)}.",
            f"Link: {self.link.source}.",
        )


def _size(n_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.4g} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.4g} GiB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


class Advisor:
    """The decisions of one device, remembered, for use at every gather.

    Parameters
    ----------
    device : torch.device or str
        A GPU or the CPU.
    given : LinkModel or mapping, optional
        As in `measure_link`.

    Notes
    -----
    The link is measured at the first decision, not when this is made. Threads may share it.

    Examples
    --------
    >>> from bitslab.engine.advisor import Advisor, LinkModel
    >>> advisor = Advisor("cpu", given=LinkModel())
    >>> advisor.sort(table_bytes=8 << 30, row_bytes=512, n_rows=1_000_000)
    True
    >>> advisor.sort(table_bytes=8 << 30, row_bytes=512, n_rows=100)
    False
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        given: LinkModel | Mapping[str, Any] | None = None,
    ) -> None:
        self.device = checked_device(device)
        self._given = given
        self._link: LinkModel | None = given if isinstance(given, LinkModel) else None
        self._sort: dict[tuple[int, float, int], bool] = {}

    @property
    def link(self) -> LinkModel:
        """The link's model; measured when it is first asked for.

        While a CUDA graph is captured nothing can be measured: the default model is returned then,
        and not remembered.
        """
        if self._link is None:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return LinkModel()
            self._link = measure_link(self.device, given=self._given)
        return self._link

    def sort(self, table_bytes: int, row_bytes: float, n_rows: int) -> bool:
        """Return whether to sort the ids of a batch; see `LinkModel.gather_seconds`.

        Decided once for batches of like size (same power of two), by the middle of the range, so
        that it costs a look into a dict.
        """
        power = n_rows.bit_length()
        key = (table_bytes, row_bytes, power)
        found = self._sort.get(key)
        if found is None:
            link = self.link
            found = link.pays_to_sort(table_bytes, row_bytes, (3 << power) >> 2)
            if link is self._link:
                if len(self._sort) >= MAX_REMEMBERED:
                    self._sort.clear()
                self._sort[key] = found
        return found

    def advise(
        self, *, codec: RowCodec | None = None, sample: Sample | None = None, **facts: Any
    ) -> Advice:
        """Decide for a table on this device; `facts` are those of `advise`.

        Parameters
        ----------
        codec : RowCodec, optional
            Its decoding rate is looked up, and measured on `sample` when it is not known.
        sample : torch.Tensor or callable, optional
            Rows of the table, ``[N, *row_shape]``, or a function that returns them.
        **facts
            As in `advise`.
        """
        if codec is not None and "decode_bytes_per_s" not in facts:
            facts["decode_bytes_per_s"] = decode_bytes_per_s(codec, self.device, sample)
        return advise(self.link, crosses_link=self.device.type != "cpu", **facts)


def advisor_for(device: torch.device) -> Advisor:
    """Return the advisor of a device that all of a process share, by the link as measured."""
    found = _advisors.get(device)
    if found is not None:
        return found
    where = checked_device(device)
    with _lock:
        if where not in _advisors:
            _advisors[where] = Advisor(where)
        return _advisors[where]


def pays_to_sort(device: torch.device, table_bytes: int, row_bytes: int, n_ids: int) -> bool:
    """Return whether the model of the link says that ordering the ids saves more than it costs.

    Parameters
    ----------
    device : torch.device
        The GPU that gathers over its link.
    table_bytes : int
        Bytes of host memory that the rows lie in.
    row_bytes : int
        Bytes read for a row.
    n_ids : int
        Ids of the gather.
    """
    return n_ids > MIN_SORTED_IDS and advisor_for(device).sort(table_bytes, row_bytes, n_ids)


def pays_to_sort_rows(device: torch.device, rows: torch.Tensor, n_rows: int, n_ids: int) -> bool:
    """Return `pays_to_sort` of rows that lie in a tensor, or False where no link is crossed.

    Parameters
    ----------
    device : torch.device
        The GPU that gathers.
    rows : torch.Tensor
        What holds the rows, packed or raw, of any shape and dtype.
    n_rows : int
        Rows in it.
    n_ids : int
        Ids of the gather.
    """
    if rows.device.type != "cpu" or n_ids <= MIN_SORTED_IDS:
        return False
    row_bytes = max(1, rows.nbytes // max(1, n_rows))
    return pays_to_sort(device, rows.nbytes, row_bytes, n_ids)
