"""Do decisions agree with measured times? (figures 9 and 11 of CSWAP+)

The tensors of one more pass are encoded and decoded by each codec that the last profile considered,
alone on the device, and timed. These seconds, and the bytes that the whole tensors take, say for
each tensor whether packing it pays with the others as decided; a decision agrees where it did the
same. "by times" is what would have been decided from them for all together.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from cnn.saved import loss_of
from swap_job import Job
from timing import cpu_seconds, gpu_seconds

import bitslab
from bitslab.engine.advisor import (
    Decision,
    SiteRecord,
    SwapLimits,
    SwapLink,
    TimeModel,
    agreement,
    decide,
    fit_time_model,
)
from bitslab.engine.codecs import Blob, BlobCodec, ZvcCodec, blob_codec_class

Rows = list[dict[str, Any]]

REPETITIONS = 3
#: Of the table of decisions by epoch.
EPOCHS, EPOCH_STEPS = 6, 20


class Recorder(ZvcCodec):
    """Packs as zvc does, and keeps a copy of each tensor that it is given.

    Attributes
    ----------
    seen : list of torch.Tensor
        The copies, ``[n]``, in the order of the pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def encode(
        self, t: torch.Tensor, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> Blob:
        self.seen.append(t.detach().clone())
        return super().encode(t, out, sm_budget=sm_budget)


class MeasuredTimes:
    """Measured seconds in the place of a time model, by codec, bytes and share."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, float, float], tuple[float, float]] = {}

    def add(self, codec_name: str, nbytes: int, share: float, seconds: tuple[float, float]) -> None:
        """Keep what encoding and decoding one tensor took."""
        self._known[codec_name, nbytes, share] = seconds

    def predict(
        self, codec_name: str, nbytes: float, share: float, element_bytes: int = 4
    ) -> tuple[float, float]:
        """Return what was measured of that tensor."""
        return self._known[codec_name, nbytes, share]

    def outside(self, codec_name: str, nbytes: float, share: float, element_bytes: int = 4) -> str:
        """Return "": nothing is predicted."""
        return ""


def compared(
    last: Rows,
    tensors: Sequence[torch.Tensor],
    model_seconds: Callable[..., tuple[float, float]],
    limits: SwapLimits,
) -> tuple[Rows, dict[str, float]]:
    """Measure the codecs on the tensors of a pass, and compare the decisions of a profile with it.

    Parameters
    ----------
    last : list of dict
        The rows of `ActivationReport.decisions` of one profile.
    tensors : sequence of torch.Tensor
        Those of a pass, in the same order.
    model_seconds : callable
        ``predict`` of the time model that decided.
    limits : SwapLimits
        As they were for the decisions.

    Returns
    -------
    rows : list of dict
        One a site.
    shares : dict
        ``sites``, ``agreement`` and the mean relative error of the model's seconds of these
        tensors.
    """
    if [row["nbytes"] for row in last] != [t.nbytes for t in tensors]:
        raise ValueError("the pass saved other tensors than the profile has seen")
    times, records, errors = MeasuredTimes(), [], []
    for row, t in zip(last, tensors, strict=True):
        ratio = {}
        for name in row["ratio"]:
            encode_s, decode_s, nbytes = codec_seconds(blob_codec_class(name).fit(t), t)
            share = ratio[name] = nbytes / t.nbytes
            times.add(name, t.nbytes, share, (encode_s, decode_s))
            said = sum(model_seconds(name, t.nbytes, share, t.element_size()))
            errors.append(abs(said / (encode_s + decode_s) - 1))
        records.append(record_of(row, t, ratio))
    if not records:
        return [], {"sites": 0, "agreement": 1.0, "model error": 0.0}
    link = SwapLink.measured(tensors[0].device)
    measured = {d.site: d for d in decide(records, times, link, limits=limits)}
    made = [Decision(**{name: row[name] for name in DECISION}) for row in last]
    as_made = decide(records, times, link, limits=limits, previous=made, hysteresis=math.inf)
    costs = {d.site: (d.raw_s, d.packed_s) for d in as_made if d.packed_s is not None}
    rows = [row_of(row, measured[row["site"]], costs) for row in last]
    return rows, {
        "sites": len(costs),
        "agreement": agreement(made, costs),
        "model error": sum(errors) / max(1, len(errors)),
    }


DECISION = ("site", "action", "codec", "raw_s", "packed_s", "reason")


def codec_seconds(codec: BlobCodec, t: torch.Tensor) -> tuple[float, float, int]:
    """Return the seconds of encoding and decoding a tensor, and the bytes that it takes."""
    most = codec.max_encoded_bytes(t.shape, t.dtype)
    data = torch.empty(most, dtype=torch.uint8, device=t.device)
    out = torch.empty_like(t)
    blob = codec.encode(t, data)
    seconds = gpu_seconds if t.device.type == "cuda" else cpu_seconds
    encode_s = seconds(lambda i: codec.encode(t, data), REPETITIONS)
    decode_s = seconds(lambda i: codec.decode(blob, out), REPETITIONS)
    return encode_s, decode_s, blob.nbytes


def record_of(row: Mapping[str, Any], t: torch.Tensor, ratio: Mapping[str, float]) -> SiteRecord:
    """Return the record that a profile would have made with these ratios."""
    return SiteRecord(
        site=row["site"],
        shape=tuple(t.shape),
        dtype=t.dtype,
        nbytes=t.nbytes,
        operation=row["operation"],
        hidden_forward_s=row["hidden_forward_s"],
        hidden_backward_s=row["hidden_backward_s"],
        ratio=ratio,
        sparsity=row["sparsity"],
    )


def row_of(
    row: Mapping[str, Any], measured: Decision, costs: Mapping[str, tuple[float, float]]
) -> dict[str, Any]:
    """Return a row of the table of decisions."""
    raw_s, packed_s = costs.get(row["site"], (measured.raw_s, None))
    return {
        "site": row["site"],
        "MB": row["nbytes"] / 1e6,
        "zeros %": 100 * (row["sparsity"] or 0.0),
        "hidden fwd ms": row["hidden_forward_s"] * 1e3,
        "hidden bwd ms": row["hidden_backward_s"] * 1e3,
        "decided": row["codec"] or row["action"],
        "raw ms": row["raw_s"] * 1e3,
        "packed ms": "" if row["packed_s"] is None else row["packed_s"] * 1e3,
        "by times": measured.codec or measured.action,
        "raw ms, by times": raw_s * 1e3,
        "packed ms, by times": "" if packed_s is None else packed_s * 1e3,
        "agrees": ""
        if packed_s is None
        else "yes"
        if (row["action"] == "pack") == (packed_s < raw_s)
        else "NO",
    }


def tensors_of(job: Job, select: Any) -> list[torch.Tensor]:
    """Return copies of the tensors that a pass of the job's model moves, ``[n]``, in its order."""
    recorder = Recorder()
    # Of a copy, since the model may have one attached; what the copy learns is dropped with it.
    model = copy.deepcopy(job.model)
    offload = bitslab.offload_activations(
        model, policy="static", codecs=[recorder], select=select, min_bytes=job.min_bytes
    )
    loss_of(model, *job.batch(), job.dtype).backward()
    job.wait()
    offload.detach()
    return recorder.seen


def time_model(job: Job, last: Rows) -> TimeModel:
    """Return the time model that a profile decided by, which is known by now."""
    names = dict.fromkeys(name for row in last for name in row["ratio"])
    return fit_time_model(
        job.device,
        [blob_codec_class(name) for name in names],
        dtypes=[torch.float32 if job.dtype == torch.float32 else torch.bfloat16],
        progress=False,
    )


def grid(model: str, job: Job) -> dict[str, Rows]:
    """Train with policy auto, and return what was decided by layer and epoch: figures 8 and 9.

    Parameters
    ----------
    model : str
        Its name.
    job : Job
        The model, with nothing attached.
    """
    offload = bitslab.offload_activations(
        job.model, min_bytes=job.min_bytes, in_flight_bytes=job.in_flight_bytes
    )
    layers: dict[str, dict[str, Any]] = {}
    counts: Rows = []
    try:
        for epoch in range(1, EPOCHS + 1):
            offload.begin_epoch(epoch - 1)
            for _ in range(EPOCH_STEPS):
                job.step(contextlib.nullcontext())
            rows = offload.report().decisions
            last = [dict(row) for row in rows if row["profile"] == rows[-1]["profile"]]
            for row in last:
                layer = {"saved by": row["site"], "MB": row["nbytes"] / 1e6}
                what = row["codec"] or row["action"]
                zeros = f"{100 * (row['sparsity'] or 0.0):.0f} %"
                layers.setdefault(row["site"], layer)[f"epoch {epoch}"] = f"{what}, {zeros}"
            predict = time_model(job, last).predict
            _, shares = compared(last, tensors_of(job, None), predict, job.limits)
            counts.append(
                {
                    "epoch": epoch,
                    "packed": sum(row["action"] == "pack" for row in last),
                    "raw": sum(row["action"] == "raw" for row in last),
                    "changed": sum(row["changed"] for row in last),
                    "agree with measured times %": 100 * shares["agreement"],
                }
            )
    finally:
        offload.detach()
    title = f"{model}, ReLU, epochs of {EPOCH_STEPS} steps"
    return {
        f"{title}: tensors by what was decided (figure 8)": counts,
        f"{title}: what was decided, and zeros, by layer (figure 9)": list(layers.values()),
    }
