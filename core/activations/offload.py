"""`ActivationOffload`, and `offload_activations` that attaches one to a model."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..engine.advisor.planning import Plan, StepProfile
from ..engine.codecs.blob import BlobCodec
from ..engine.memory import host_arena
from ..engine.transfer.unit_report import UnitReport
from ..errors import ArgumentError, ArgumentTypeError, BitslabError
from .attached import ATTRIBUTE, LISTED_PASSES, Attachment, ModuleTensors
from .auto import AutoPolicy
from .compiled import compiled_notes, is_one_graph, whole_note
from .disk import Drive
from .hooked_pass import hooked_pass, refuse_capture
from .hooks import SavedTensorHooks
from .limits import limits_of
from .lossy import Lossy
from .planned import PlannedPolicy
from .policies import KEEP, Codecs, checked_policy
from .policy_choice import policy_of
from .report import ActivationReport, SiteReport, disk_notes, lossy_notes
from .sites import Select, module_names
from .stalls import stall_figures
from .tiers import make_tiers
from .verify import USUAL_EVERY, Verifier

#: Smaller tensors are kept: moving one costs the host as long as they would cross.
MIN_BYTES = 256 << 10
#: Copies that are fetched before they are read.
DEPTH = 3
#: What `stats` has of the disk's own figures.
DISK_FIGURES = "written_bytes", "read_bytes", "forwarded_bytes"


class ActivationOffload:
    """Moves the tensors that autograd keeps for the backward pass to the host, and back for it.

    It is a context manager in the place of ``torch.autograd.graph.save_on_cpu``;
    `bitslab.offload_activations` attaches one to a model. Gradients are those of plain training,
    bit for bit, unless `lossy` is given.

    Parameters
    ----------
    policy : {"auto", "raw", "static", "host", "keep"}
        What is done with the tensors of a site. "auto": they cross as they are, or encoded by that
        of `codecs` which a cost model finds best, from profiles of passes and measured times of
        codecs and link; codecs are measured once on a machine, in 30 s for a GPU and 6 s for a CPU.
        "raw": they cross as they are. "static": all are encoded by the first of `codecs`. "host":
        they cross as they are, and the CPU encodes those of more than 60 % zeros by the first of
        `codecs`, for which the backward pass waits (vDNN++). "keep": they are kept.
    codecs : sequence of str or BlobCodec, optional
        Codecs that may be used, which return every bit; the best of the registered ones when left
        out.
    lossy : str, BlobCodec or Lossy, optional
        A lossy codec, or one with a schedule of rates, for policies "auto" and "static". Never used
        for integers, masks, statistics of norms and scalars; with "auto" not for tensors with zeros
        that a lossless codec takes. `report` names each tensor that is lossy and its error. Such a
        tensor is always read from its packed copy: with policy "static", or a range of rates that
        is given, runs repeat bit for bit; policy "auto" decides by measured times.
    min_bytes : int
        Smaller tensors are kept on the device.
    select : callable, optional
        Takes a `Site` and returns whether its tensors are moved; `conv_inputs` is one. All when
        left out.
    verify : bool or int
        Keep a checksum of each tensor that is moved and compare it when it is read, and of every
        Nth pass the tensor itself; True for N = 16. Slow, and waits for the device.
    in_flight_bytes : int, optional
        Device memory of tensors whose copies are under way, at most; with more, what computes waits
        for the oldest. Encoded copies on a GPU that wait for the link take as much at most, two
        excepted, and tensors that are fetched before they are read as well, one excepted. When left
        out, a 32nd of a GPU's memory, and 256 MiB at least.
    depth : int
        Number of tensors that are fetched before they are read, at most.
    profile_every : int, optional
        With policy "auto", of so many forward passes one is profiled and decided from; so are the
        first, the third, and the first after `begin_epoch`. When left out, every 200th; or 400th,
        800th, 1,600th or 3,200th where those would take more than a thousandth of the host's time,
        and `report` says which. With `memory` or `slowdown` every 200th.
    sm_budget : int, optional
        Multiprocessors of a GPU that encoding takes at most, beside what computes; as measured with
        policy "auto" and all with others when left out.
    disk : str, os.PathLike or sequence of these, optional
        A folder on an SSD, or several: what is moved goes on to one preallocated file in each,
        which has no name and is gone with the process, and comes back in time. What a folder
        carries is measured once on a machine, in two seconds. Not with policy "host".
    disk_bytes : int, optional
        What the files take at most; what the file systems have to spare when left out.
    write_budget : float, optional
        Terabytes (1e12 bytes) that all ranks of the machine write a day, at most: evenly over the
        day, those of an hour may be saved up.
    drive : Drive or str, optional
        The SSDs, a `bitslab.activations.disk.Drive` or the name of a known one, for the report to
        say how long they last.
    host_bytes : int, optional
        Host memory that is taken, at most. With a disk half of it is for tensors that remain there,
        and on a GPU that half is filled first; the other half is for those on their way.
    tiers : sequence of str, optional
        Where tensors may be moved to: "host", "disk" or both; the host, and the disk where one is
        given, when left out. Without "host" those that the disk does not take remain on the device.
    memory : int, str or float, optional
        The peak that the process may have on the device: bytes, text as "60GiB", or a share of the
        device's memory. It turns the planner on, in the place of `policy`: a step is profiled, and
        a plan says of each tensor whether it is kept, computed again, packed, or moved. Of a CPU,
        whose allocator does not count, saved tensors alone are meant. A limit that cannot be met
        gives a warning with the least that can, and the plan of that is followed.
    slowdown : float, optional
        Turns the planner on with no limit: as little memory as was found that costs a step at most
        this share, 0.02 for one.
    recompute : bool
        Whether a plan may compute tensors and modules again.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For a policy or codec that is unknown, a codec that is lossy in `codecs`, a schedule of
        rates without a range where none is measured, and arguments of another kind.
    DiskError
        When a folder of `disk` is not there, or cannot be written to.

    Warns
    -----
    UserWarning
        When a folder of `disk` is in memory (tmpfs) or on another machine; at the first tensor that
        cannot be moved, packed or written.

    Notes
    -----
    What is left where it is: parameters, buffers, their views and casts; tensors that are small,
    sparse, nested or of a class of their own; in a model that is attached to, tensors on other
    devices than its parameters, and what is saved outside of its forward pass.

    Forward passes that begin within a backward pass, as a checkpoint computes them again, and what
    a reentrant checkpoint computes again within this context, are kept as they are. Under
    CUDA-graph capture a pass raises `ArgumentError`, before anything is changed.

    A tensor that is changed in place after it was saved raises `ModifiedInPlaceError`, a
    RuntimeError with torch's message, when it is read, as without hooks.

    Any thread may run forward and backward passes.

    Nothing waits for the disk where `in_flight_bytes` is not given: while it is behind, full, has
    failed or has had its bytes of the day, tensors remain in host memory, those of the CPU where
    they are. What is wanted while it waits to be written comes from memory, and is not written.
    What cannot be read raises `DiskError` in the backward pass, before there are gradients.

    Examples
    --------
    >>> import torch, bitslab
    >>> x = torch.randn(64, 4096, requires_grad=True)
    >>> with bitslab.ActivationOffload(policy="raw") as offload:
    ...     y = (x.sin() * 2).cos().sum()
    >>> y.backward()
    >>> offload.stats()["moved_out_bytes"]
    1048576
    """

    def __init__(
        self,
        policy: str = "auto",
        *,
        codecs: Sequence[str | BlobCodec] | str | BlobCodec | None = None,
        lossy: str | BlobCodec | Lossy | None = None,
        min_bytes: int = MIN_BYTES,
        select: Select | None = None,
        verify: bool | int = False,
        in_flight_bytes: int | None = None,
        depth: int = DEPTH,
        profile_every: int | None = None,
        sm_budget: int | None = None,
        disk: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        disk_bytes: int | None = None,
        write_budget: float | None = None,
        drive: Drive | str | None = None,
        host_bytes: int | None = None,
        tiers: Sequence[str] | str | None = None,
        memory: int | str | float | None = None,
        slowdown: float | None = None,
        recompute: bool = True,
    ) -> None:
        self.policy = checked_policy(policy)
        if select is not None and not callable(select):
            raise ArgumentTypeError(
                f"select: {select!r:.60}, expected a function that takes a Site, as conv_inputs"
            )
        for name, value in (
            ("min_bytes", min_bytes),
            ("verify", verify),
            ("depth", depth),
        ):
            _check_number(name, value)
        if in_flight_bytes is not None:
            _check_number("in_flight_bytes", in_flight_bytes)
        if profile_every is not None:
            _check_number("profile_every", profile_every, 1)
        if sm_budget is not None:
            _check_number("sm_budget", sm_budget, 1)
        found = Codecs(codecs, lossy)
        self._codecs = found
        self._verifier = Verifier(USUAL_EVERY if verify is True else int(verify))
        self._policy = policy_of(
            self.policy,
            found,
            profile_every=profile_every,
            limits=functools.partial(limits_of, in_flight_bytes, depth),
            memory=memory,
            slowdown=slowdown,
            recompute=recompute,
            select=select,
        )
        if isinstance(self._policy, PlannedPolicy):
            self.policy = "planned"
        if disk is not None and self.policy == "host":
            raise ArgumentError(
                "disk: policy 'host' packs what remains in host memory; accepted with a disk are "
                "auto, raw, static, keep"
            )
        self._tiers = make_tiers(
            tiers,
            host_bytes=host_bytes,
            disk=disk,
            disk_bytes=disk_bytes,
            write_budget=write_budget,
            verify=bool(verify),
            drive=drive,
        )
        if isinstance(self._policy, PlannedPolicy | AutoPolicy):
            self._policy.use_tiers(self._tiers)
        self._hooks = SavedTensorHooks(
            self._policy,
            found,
            min_bytes=max(1, min_bytes),
            select=select,
            in_flight_bytes=in_flight_bytes,
            depth=depth,
            verifier=self._verifier,
            sm_budget=sm_budget,
            tiers=self._tiers,
        )
        self._attachment: Attachment | None = None
        self._tensors: ModuleTensors | None = None
        self._outputs: Mapping[str, torch.Tensor] = {}
        self._notes: list[str] = []
        self._local = threading.local()

    # In the place of a context manager of torch

    def __enter__(self) -> ActivationOffload:
        context = hooked_pass(self._hooks, tuple, self._note)
        context.__enter__()
        self._contexts().append(context)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._contexts().pop().__exit__(None, None, None)

    def _contexts(self) -> list[contextlib.AbstractContextManager[None]]:
        found: list[Any] = self._local.__dict__.setdefault("contexts", [])
        return found

    # Attached to a model

    def attach(self, model: nn.Module) -> None:
        """Attach to a model: its forward passes run inside this context.

        Raises
        ------
        ArgumentTypeError
            When it is no ``torch.nn.Module``.
        ArgumentError
            When the model or one of its modules has one attached already, or this object has a
            model.
        """
        if not isinstance(model, nn.Module):
            raise ArgumentTypeError(
                f"model: expected a torch.nn.Module, got {type(model).__name__}"
            )
        if self._attachment is not None:
            raise ArgumentError("model: this ActivationOffload is attached to a model already")
        for name, module in model.named_modules():
            if ATTRIBUTE in module.__dict__:
                where = f"its module {name!r}" if name else "it"
                raise ArgumentError(
                    f"model: {where} has its activations offloaded already; detach() that first"
                )
        self._note_compiled(model)
        self._tensors = ModuleTensors(model)
        devices = {t.device for t in self._tensors}
        self._hooks.watch(module_names(model), devices or None)
        if isinstance(self._policy, PlannedPolicy):
            self._policy.attach(model)
        self._attachment = Attachment(model, self, self._model_pass, self._returned)

    def detach(self) -> None:
        """Take everything off the model, and end threads. Again, or without a model: nothing.

        Graphs that were made before can still run backward; the files of a disk are given up when
        none of these has tensors there.
        """
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None
            self._tensors = None
            if isinstance(self._policy, PlannedPolicy):
                self._policy.detach()
        self._hooks.close()
        if self._tiers.disk is not None:
            self._tiers.disk.rest()

    def close(self) -> None:
        """Detach, and give up the disk's files and idle host memory. Again: nothing.

        The backward pass of a graph that has tensors on the disk raises then.
        """
        self.detach()
        if self._tiers.disk is not None:
            self._tiers.disk.close()
        host_arena().trim()

    def _model_pass(self, *given: Any) -> contextlib.AbstractContextManager[Any]:
        if not torch.is_grad_enabled():
            return contextlib.nullcontext()
        if self._hooks.inside():
            refuse_capture()  # which may have begun within the context
            return contextlib.nullcontext()
        return hooked_pass(self._hooks, self._left_alone, self._note, lambda: self._rests(*given))

    def _rests(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a pass of the model needs no hooks: it saves what others did."""
        policy = self._policy
        model = None if self._attachment is None else self._attachment.model
        if not isinstance(policy, PlannedPolicy) or not policy.is_idle or model is None:
            return False
        trained = sum(t.requires_grad for t in self._tensors or ())
        return policy.resting.rests((model.training, trained), args, kwargs)

    def _left_alone(self) -> ModuleTensors:
        """Begin a pass of the model; return its parameters and buffers."""
        tensors = self._tensors
        assert tensors is not None and self._attachment is not None
        tensors.passes += 1
        if tensors.passes % LISTED_PASSES == 0:
            model = self._attachment.model
            assert model is not None  # whose pass this is
            tensors = self._tensors = ModuleTensors(model)
            self._hooks.watch(module_names(model), {t.device for t in tensors} or None)
        return tensors

    def _returned(self, result: Any) -> None:
        """Take note of outputs, of which what is saved outside of the model is made."""
        if isinstance(self._policy, PlannedPolicy):
            self._policy.resting.ended(result is not None and self._policy.is_idle)
        if self._outputs or not torch.is_grad_enabled():
            return
        values = [result]  # of which no graph is kept
        if isinstance(result, Mapping):
            values = list(result.values())
        elif isinstance(result, (tuple, list)):
            values = list(result)
        found = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]
        model = None if self._attachment is None else self._attachment.model
        if model is not None and any(map(is_one_graph, found)):
            self._note(whole_note(model))
        self._outputs = {f"output {i}": t.detach().to("meta") for i, t in enumerate(found)}

    def _note_compiled(self, model: nn.Module) -> None:
        for note in compiled_notes(model):
            self._note(note)

    def _note(self, what: str) -> None:
        if what not in self._notes:
            self._notes.append(what)

    def begin_epoch(self, epoch: int) -> None:
        """Say that an epoch begins, from 0: its first pass is profiled, and lossy rates follow it.

        Loops need not call it: profiles come by `profile_every`, and a schedule of lossy rates can
        count forward passes (`Lossy.epoch_passes`).

        Raises
        ------
        ArgumentError, ArgumentTypeError
            When it is no integer from 0 on.
        """
        _check_number("epoch", epoch)
        if self._codecs.rate is not None:
            self._codecs.rate.begin_epoch(epoch)
        self._policy.begin_epoch(epoch)

    def micro_batch(self, number: int | None) -> None:
        """Say which micro-batch this thread works at, from 0; None for no one of them.

        For schedules in which forward and backward passes of several take turns, as in pipelines:
        what `stage_begins` fetches is that micro-batch's. Loops need not call it.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            When it is no integer from 0 on.
        """
        if number is not None:
            _check_number("number", number)
        self._hooks.micro_batch = number

    def stage_begins(self, stage: str) -> None:
        """Say that the forward or backward part of the micro-batch begins.

        With "backward" those moved tensors begin to come back that are read first; else they do
        with the first read.

        Raises
        ------
        ArgumentError
            When it is neither "forward" nor "backward".
        """
        if stage not in ("forward", "backward"):
            raise ArgumentError(f"stage: {stage!r:.60}, accepted are 'forward' and 'backward'")
        if stage == "backward":
            self._hooks.begin_backward()

    # What was done

    @property
    def plan(self) -> Plan | None:
        """What is followed with `memory` or `slowdown`, once a step was profiled; else None.

        It can be saved (`Plan.save`), printed, and read again (`Plan.load`).
        """
        return self._policy.plan if isinstance(self._policy, PlannedPolicy) else None

    @property
    def step_profile(self) -> StepProfile | None:
        """What `plan` was made from; `bitslab.engine.advisor.planning.make_plan` makes others."""
        return self._policy.profile if isinstance(self._policy, PlannedPolicy) else None

    def stats(self) -> dict[str, int]:
        """Return what was done so far.

        Returns
        -------
        dict
            ``moved_out_bytes`` and ``moved_in_bytes``: raw bytes of the copies that went to the
            host and came back; ``crossed_out_bytes`` and ``crossed_in_bytes``: what crossed for
            them, as far as it is known by now; ``peak_saved_bytes``: most bytes of saved tensors
            that were on the host alone at one time; ``moved_tensors``; ``packed_on_host_tensors``:
            those that the CPU packed (policy "host"); ``verified_tensors``; ``stall_us``: how long
            passes have waited for copies, in microseconds, and ``host_stall_us`` and
            ``disk_stall_us``, by tier (of a GPU's stream one wait in 13 is timed, for all);
            ``host_bytes``: what is taken of `host_bytes`, where that is given. With a disk
            ``disk_written_bytes``, ``disk_read_bytes``, ``disk_forwarded_bytes`` (that were wanted
            before they were written) and ``disk_refused_bytes``.
        """
        executors = self._hooks.executors()
        for each in executors:
            each.poll()
        traffic = [each.traffic for each in executors]
        found = {
            "moved_out_bytes": sum(each.moved_out_bytes for each in traffic),
            "moved_in_bytes": sum(each.moved_in_bytes for each in traffic),
            "crossed_out_bytes": sum(each.crossed_out_bytes for each in traffic),
            "crossed_in_bytes": sum(n.packed_bytes for n in self._hooks.sites.values()),
            "peak_saved_bytes": sum(each.peak_away_bytes for each in traffic),
            "packed_on_host_tensors": sum(each.packed_on_host for each in executors),
            "moved_tensors": sum(n.tensors for n in self._hooks.sites.values()),
            "verified_tensors": self._verifier.compared,
        }
        found |= stall_figures(each.stalls for each in traffic)
        if self._tiers.limit is not None:
            found["host_bytes"] = self._tiers.limit.taken_bytes
        disk = self._disk_stats()
        if disk is not None:
            found |= {f"disk_{key}": disk[key] for key in DISK_FIGURES}
            found["disk_refused_bytes"] = sum(disk["refused_bytes"].values())
        return found

    def _disk_stats(self) -> dict[str, Any] | None:
        return None if self._tiers.disk is None else self._tiers.disk.stats()

    def report(self) -> ActivationReport:
        """Return what is done at each site, and what is not seen.

        Waits for the device where errors of lossy tensors are to be read.
        """
        stats = self.stats()
        rows = []
        for counts in list(self._hooks.sites.values()):
            is_left = counts.choice == KEEP or counts.tier == "device"
            tier = "device" if is_left else self._tier_of(counts.site.name)
            unit = UnitReport(counts.site.name, tier, counts.raw_bytes, counts.packed_bytes, None)
            choice, operation = counts.choice, counts.site.operation
            error = None
            if choice == self._codecs.lossy and counts.error is not None:
                error = counts.error.read()
            rows.append(SiteReport(unit, choice, operation, counts.tensors, counts.reason, error))
        model = None if self._attachment is None else self._attachment.model
        if model is not None:  # it may have been compiled since
            self._note_compiled(model)
        notes = list(self._notes)
        if self._attachment is not None and self._outputs:
            nbytes = sum(t.nbytes for t in self._outputs.values())
            notes.append(
                f"What is computed from the model's {len(self._outputs)} outputs ({nbytes:,} bytes "
                "in the first pass) outside of its forward pass, a loss for one, is not seen; "
                "bitslab.ActivationOffload() around both sees it."
            )
        notes += self._policy.notes()
        notes += lossy_notes(self._codecs, rows)
        failures = self._hooks.failures
        if failures:
            first = next(iter(failures))
            notes.append(
                f"Tensors of {len(failures)} sites could not be packed and stayed on the device, "
                f"first {first!r} ({failures[first]})."
            )
        disk = self._disk_stats()
        if disk is not None:
            on_gpu = any(each.on_gpu for each in self._hooks.executors())
            notes += disk_notes(disk, self._hooks.passes, on_gpu=on_gpu)
        devices = sorted({str(each.device) for each in self._hooks.executors()})
        return ActivationReport(
            self.policy,
            rows,
            ", ".join(devices) or "no device",
            stats,
            notes,
            self._policy.rows(),
            disk,
            self._hooks.passes,
        )

    def _tier_of(self, site: str) -> str:
        """Return where the tensors of a site were moved to, the last of them."""
        return "disk" if any(each.is_on_disk(site) for each in self._hooks.executors()) else "host"

    def __reduce__(self) -> Any:
        raise BitslabError(
            "ActivationOffload: it cannot be pickled or copied; make one for each model"
        )


def offload_activations(model: nn.Module, **options: Any) -> ActivationOffload:
    """Attach to a model what moves the tensors that its forward passes keep for the backward pass.

    The training loop remains as it is, and gradients are those of before, bit for bit.

    Parameters
    ----------
    model : torch.nn.Module
        The model, before or after it is wrapped by DDP or sharded by FSDP2. Copies and pickles of
        it are plain models.
    **options
        As for `ActivationOffload`.

    Returns
    -------
    ActivationOffload
        With ``report()``, ``stats()``, ``detach()`` and ``close()``.

    Raises
    ------
    ArgumentError, ArgumentTypeError, DiskError
        When the model has one attached already, and for options as `ActivationOffload` says.

    Examples
    --------
    >>> import torch, bitslab
    >>> layers = torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1)
    >>> model = torch.nn.Sequential(*layers)
    >>> offload = bitslab.offload_activations(model, policy="raw")
    >>> model(torch.randn(256, 64)).sum().backward()
    >>> offload.stats()["moved_tensors"]
    1
    >>> offload.detach()
    """
    offload = ActivationOffload(**options)
    offload.attach(model)
    return offload


def _check_number(name: str, value: Any, least: int = 0) -> None:
    if not isinstance(value, int) or (isinstance(value, bool) and name != "verify"):
        raise ArgumentTypeError(f"{name}: expected an int, got {value!r:.60}")
    if value < least:
        raise ArgumentError(f"{name}: {value}, accepted are numbers from {least}")
