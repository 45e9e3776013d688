"""Models that are trained on from one state in many ways, and those ways."""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from cnn.images import draw_gratings
from cnn.models import SIDES, make_model
from cnn.saved import loss_of
from torch.autograd.graph import save_on_cpu
from torch.nn import functional

import bitslab
from bitslab.activations import ActivationReport, conv_inputs
from bitslab.activations.offload import DEPTH
from bitslab.engine.advisor import SwapLimits
from bitslab.engine.codecs import ZfpCodec

MODELS = ("alexnet", "vgg16", "mobilenet", "plain20", "resnet", "squeezenet")
#: Of the activations of `cnn.models`: the first leaves zeros, the second is dense.
SPARSE, DENSE = "relu", "leaky_relu"
#: Images of a step on a GPU, so that each saves some 4 GB: 70 ms each way over PCIe 5.
BATCHES = {
    "imagenet": dict(zip(MODELS, (1024, 64, 96, 48, 160, 192), strict=True)),
    "cifar": dict.fromkeys(MODELS, 2560),  # as the paper
}
CPU_BATCH = 64
CPU_WIDTH = 0.25
#: Smaller tensors are left where they are: on a GPU as is usual, on a CPU all are small.
GPU_MIN_BYTES, CPU_MIN_BYTES = 256 << 10, 16 << 10
#: Ways besides policies, and policies in the order in which they are measured when time is short.
PEERS = ("save_on_cpu", "torchtune")
POLICIES = ("raw", "static", "auto", "host", "lossy")
SELECTS = {"conv_inputs": conv_inputs, "all": None}
#: SC of the paper packs all by ZVC.
STATIC_CODEC = "zvc"
LOSSY_BITS = 32
CLASSES = 10
#: Threads of a CPU are waited for until they have counted nothing for so long.
QUIET_SECONDS, SETTLED_SECONDS = 0.1, 20.0


class Job:
    """A model with images, trained a little, to be trained on from there in many ways.

    Parameters
    ----------
    model : str
        One of MODELS.
    activation : str
        Of `cnn.models.ACTIVATIONS`.
    arguments : argparse.Namespace
        The options of the script.
    device : torch.device
        Where it trains.
    """

    def __init__(
        self, model: str, activation: str, arguments: argparse.Namespace, device: torch.device
    ) -> None:
        self.device, self.arguments = device, arguments
        self.dtype = getattr(torch, arguments.dtype)
        self.on_gpu = device.type == "cuda"
        self.batch_size = arguments.train_batch or (
            BATCHES[arguments.shape][model] if self.on_gpu else CPU_BATCH
        )
        self.min_bytes = GPU_MIN_BYTES if self.on_gpu else CPU_MIN_BYTES
        self.in_flight_bytes = arguments.in_flight_mb << 20
        self.side = SIDES[arguments.shape]
        self.width = 1.0 if self.on_gpu else CPU_WIDTH
        torch.manual_seed(0)
        with device:
            self.model = make_model(model, arguments.shape, CLASSES, activation, self.width)
        images, labels = draw_gratings(4 * self.batch_size, 0)
        self._images, self._labels = images.to(device), labels.to(device)
        self._drawn = 0
        self.optimizer = self._new_optimizer()
        for _ in range(arguments.train_steps):
            self.step(contextlib.nullcontext())
        self._state = copy.deepcopy(self.model.state_dict())
        self._optimizer_state = copy.deepcopy(self.optimizer.state_dict())

    @property
    def limits(self) -> SwapLimits:
        """What may be under way, and how many copies come back ahead."""
        return SwapLimits(self.in_flight_bytes, DEPTH)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=1e-4)

    def restore(self) -> None:
        """Go back to the weights after the first steps, and draw the same images again."""
        self.model.load_state_dict(self._state)
        self.optimizer = self._new_optimizer()
        self.optimizer.load_state_dict(copy.deepcopy(self._optimizer_state))
        self._drawn = 0
        torch.manual_seed(1)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next images ``[B, 3, side, side]``, others in each step, and labels."""
        self._drawn += 1
        generator = torch.Generator().manual_seed(self._drawn)
        ids = torch.randperm(len(self._labels), generator=generator)[: self.batch_size]
        ids = ids.to(self.device)
        images = self._images[ids]
        if images.shape[-1] != self.side:
            size = (self.side, self.side)
            images = functional.interpolate(images, size, mode="bilinear", align_corners=False)
        return images, self._labels[ids]

    def wait(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def step(self, context: Any, between: Callable[[], None] | None = None) -> dict[str, float]:
        """Train on a batch; return seconds of its parts, and the loss.

        Parameters
        ----------
        context : context manager
            Of the forward pass.
        between : callable, optional
            Called between forward and backward pass.
        """
        images, labels = self.batch()
        self.optimizer.zero_grad(set_to_none=True)
        self.wait()
        marks = [self._mark()]
        begin = time.perf_counter()
        with context:
            loss = loss_of(self.model, images, labels, self.dtype)
        marks.append(self._mark())
        forward = time.perf_counter()
        if between is not None:
            between()
        loss.backward()
        marks.append(self._mark())
        self.optimizer.step()
        queued = time.perf_counter()
        self.wait()
        end = time.perf_counter()
        return {
            "step_s": end - begin,
            "forward_s": _between(marks[0], marks[1]),
            "backward_s": _between(marks[1], marks[2]),
            "host_s": queued - begin,
            "host_forward_s": forward - begin,
            "loss": loss.item(),
        }

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(begin: Any, end: Any) -> float:
    seconds = end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3
    return float(seconds)


class Way:
    """A way to keep saved tensors, in use with a model; this one leaves them where they are."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def context(self) -> Any:
        """Return the context of a forward pass."""
        return contextlib.nullcontext()

    def counts(self) -> dict[str, float]:
        """Return what was moved since the beginning."""
        return {}

    def report(self) -> ActivationReport | None:
        """Return what was done with each tensor; None where nobody knows."""
        return None

    def close(self) -> None:
        """Leave the model as it was."""


class Peer(Way):
    """A context manager of another package."""

    def __init__(self, job: Job, name: str) -> None:
        super().__init__(job)
        self._context: Any = None
        if name == "torchtune":
            self._context = torchtune_offload()(use_pin_memory=job.on_gpu)

    def context(self) -> Any:
        return self._context or save_on_cpu(pin_memory=self._job.on_gpu)


def torchtune_offload() -> Any:
    """Return torchtune's OffloadActivations; ImportError where it is not installed."""
    from torchtune.training import OffloadActivations

    return OffloadActivations


class Offloaded(Way):
    """A policy of `bitslab.offload_activations`."""

    def __init__(self, job: Job, way: str, select: str) -> None:
        super().__init__(job)
        policy, _, codecs = way.partition(":")
        options: dict[str, Any] = {}
        if policy == "static":
            codecs = codecs or STATIC_CODEC
        elif policy == "lossy":
            policy, options["lossy"] = "auto", ZfpCodec(LOSSY_BITS)
        if codecs:
            options["codecs"] = codecs.split(",")
        self._offload = bitslab.offload_activations(
            job.model,
            policy=policy,
            select=SELECTS[select],
            min_bytes=job.min_bytes,
            in_flight_bytes=job.in_flight_bytes,
            **options,
        )

    def counts(self) -> dict[str, float]:
        stats = self._settled()
        return {
            "out": stats["moved_out_bytes"],
            "crossed out": stats["crossed_out_bytes"],
            "crossed in": stats["crossed_in_bytes"],
            "tensors": stats["moved_tensors"],
        }

    def _settled(self) -> dict[str, int]:
        """Return the counts when nothing is under way; on a CPU threads pack behind the steps."""
        stats = self._offload.stats()
        until = time.monotonic() + SETTLED_SECONDS
        while not self._job.on_gpu and time.monotonic() < until:
            time.sleep(QUIET_SECONDS)
            before, stats = stats, self._offload.stats()
            if stats == before and (stats["crossed_out_bytes"] or not stats["moved_out_bytes"]):
                break
        return stats

    def report(self) -> ActivationReport:
        return self._offload.report()

    def close(self) -> None:
        self._offload.detach()


def make_way(job: Job, way: str, select: str) -> Way:
    """Return a way, in use with the job's model."""
    if way == "plain":
        return Way(job)
    return Peer(job, way) if way in PEERS else Offloaded(job, way, select)
