"""What every codec of whole tensors makes of a tensor, and its times: `inspect --codecs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..dtypes import dtype_name
from ..engine.advisor import TimeModel, fit_time_model
from ..engine.codecs import BlobCodec, count_zeros
from ..engine.codecs.registry import codec_names, get_codec
from ..errors import MissingExtraError, load_optional
from .measure import Link

if TYPE_CHECKING:
    from rich.table import Table

#: What stands for all dtypes of as many bytes when codecs are measured.
MEASURED_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class CodecRow:
    """What one codec makes of a tensor.

    Parameters
    ----------
    codec : str
        Its name.
    plan : str
        The codec and what it chose, `BlobCodec.describe`.
    lossless : bool
        Whether every bit comes back.
    packed_bytes : int
        Bytes of the encoded tensor, and of what the codec learnt.
    ratio : float
        Raw over packed bytes; 1.0 for an empty tensor.
    encode_ms, decode_ms : float or None
        Predicted times of encoding and decoding; None for a codec that is not modelled.
    cross_ms : float
        Time of the packed bytes over the link, one way.
    outside : str
        What of the prediction lies outside of what was measured, in words, or "".
    """

    codec: str
    plan: str
    lossless: bool
    packed_bytes: int
    ratio: float
    encode_ms: float | None
    decode_ms: float | None
    cross_ms: float
    outside: str


@dataclass(frozen=True)
class CodecReport:
    """What all codecs make of a tensor.

    Parameters
    ----------
    name, dtype : str
        Of the tensor.
    shape : tuple of int
        Its shape.
    raw_bytes : int
        Its bytes.
    zeros : float
        Share of elements that are zero; 0.0 for an empty tensor.
    cross_ms : float
        Time of the raw bytes over the link, one way.
    codecs : tuple of CodecRow
        The largest ratio first.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    raw_bytes: int
    zeros: float
    cross_ms: float
    codecs: tuple[CodecRow, ...]


class CodecInspector:
    """Encodes tensors by all codecs of whole tensors that there are.

    Parameters
    ----------
    device : torch.device
        Where, and whose times are predicted: measured first, once on a machine.
    link : Link
        What encoded tensors cross.
    """

    def __init__(self, device: torch.device, link: Link) -> None:
        self.device, self.link = device, link
        self._codecs = [cls for cls in blob_codecs() if device.type in cls.device_types]
        self._model: TimeModel | None = None

    def inspect(self, name: str, tensor: torch.Tensor) -> CodecReport:
        """Return the figures of one tensor."""
        t = tensor.to(self.device)
        rows = []
        for cls in self._codecs:
            try:
                codec = cls.fit(t)
                if not codec.takes(t.dtype):
                    continue
                nbytes = codec.encode(t).nbytes + codec.profile_bytes
            except MissingExtraError:  # lz4 is where its package is
                continue
            rows.append(self._row(codec, t, nbytes))
        rows.sort(key=lambda row: row.packed_bytes)
        return CodecReport(
            name=name,
            shape=tuple(t.shape),
            dtype=dtype_name(t.dtype),
            raw_bytes=t.nbytes,
            zeros=int(count_zeros(t)) / t.numel() if t.numel() else 0.0,
            cross_ms=self._cross_ms(t.nbytes),
            codecs=tuple(rows),
        )

    def _row(self, codec: BlobCodec, t: torch.Tensor, nbytes: int) -> CodecRow:
        encode_ms = decode_ms = None
        outside = ""
        if t.numel():
            given = codec.name, t.nbytes, nbytes / t.nbytes, t.dtype.itemsize
            try:
                encode_s, decode_s = self._times().predict(*given)
            except KeyError:  # of dtypes that are not measured
                pass
            else:
                encode_ms, decode_ms = 1e3 * encode_s, 1e3 * decode_s
                outside = self._times().outside(*given)
        return CodecRow(
            codec=codec.name,
            plan=codec.describe(),
            lossless=codec.error_bound is None,
            packed_bytes=nbytes,
            ratio=t.nbytes / nbytes if t.numel() else 1.0,
            encode_ms=encode_ms,
            decode_ms=decode_ms,
            cross_ms=self._cross_ms(nbytes),
            outside=outside,
        )

    def _cross_ms(self, nbytes: int) -> float:
        return nbytes / self.link.link_gbps / 1e6

    def _times(self) -> TimeModel:
        if self._model is None:
            codecs = [cls for cls in self._codecs if _is_there(cls)]
            self._model = fit_time_model(self.device, codecs, dtypes=MEASURED_DTYPES)
        return self._model


def blob_codecs() -> list[type[BlobCodec]]:
    """Return the classes of the codecs of whole tensors, by name."""
    found: list[Any] = [get_codec(name) for name in codec_names()]
    return [cls for cls in found if issubclass(cls, BlobCodec)]


def _is_there(cls: type[BlobCodec]) -> bool:
    """Return whether what a codec needs is installed."""
    try:
        one = torch.ones(16)
        cls.fit(one).encode(one)
    except MissingExtraError:
        return False
    return True


def codecs_json(reports: Sequence[CodecReport], inspector: CodecInspector) -> dict[str, Any]:
    """Return reports as JSON-able values.

    Returns
    -------
    dict
        ``device``; ``link_gbps``, 10**9 bytes a second; ``tensors``, a list with the fields of
        `CodecReport`, of which ``codecs`` is a list with those of `CodecRow`.
    """
    return {
        "device": str(inspector.device),
        "link_gbps": inspector.link.link_gbps,
        "tensors": [asdict(report) for report in reports],
    }


def codecs_table(reports: Sequence[CodecReport], inspector: CodecInspector) -> Table:
    """Return a rich table of reports, a row for each tensor and codec, of 80 columns.

    Raises
    ------
    MissingExtraError
        When rich is not installed.
    """
    load_optional("rich", extra=None, purpose="printing a table")
    from rich.table import Table
    from rich.text import Text

    notes = {row.outside for report in reports for row in report.codecs} - {""}
    table = Table(
        caption=(
            f"MB = 10^6 bytes. Times in ms on {inspector.device}, predicted from measured ones; "
            f"link: one way at {inspector.link.link_gbps:g} GB/s."
            + (" ~: outside of the sizes and shares that were measured." if notes else "")
        ),
        caption_justify="left",
    )
    table.add_column("tensor", overflow="fold")
    table.add_column("codec", no_wrap=True)
    for heading in ("ratio", "encode", "decode", "link"):
        table.add_column(heading, justify="right", no_wrap=True)
    for report in reports:
        shape = " x ".join(map(str, report.shape)) or "0-d"
        # One above the other, since a terminal has 80 columns.
        about = [
            report.name,
            f"{shape} {report.dtype}",
            f"{report.raw_bytes / 1e6:,.2f} MB, {report.zeros:.0%} zeros",
        ]
        rows = [("raw", "1.00x", "", "", f"{report.cross_ms:.3g}")]
        for row in report.codecs:
            plan = row.codec if row.lossless else f"{row.plan}, lossy"
            times = [_time(ms, row.outside) for ms in (row.encode_ms, row.decode_ms)]
            rows.append((plan, f"{row.ratio:.2f}x", times[0], times[1], f"{row.cross_ms:.3g}"))
        rows += [("",) * 5] * (len(about) - len(rows))
        about += [""] * (len(rows) - len(about))
        for text, (plan, *figures) in zip(about, rows, strict=True):
            # As text, because rich takes square brackets for markup.
            table.add_row(Text(text), Text(plan), *figures)
        table.add_section()
    return table


def _time(ms: float | None, outside: str) -> str:
    return "" if ms is None else f"{'~' if outside else ''}{ms:.3g}"
