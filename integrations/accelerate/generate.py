"""FlexGen's block schedule: several batches pass each layer while it is on the device.

FlexGen (ICML'23, section 4.2) computes a block of batches layer by layer, so that a layer's weights
cross once for all of them. Here each batch runs an unmodified ``model.generate`` in a thread of its
own. One thread runs at a time; when it is about to enter a unit of the streamed weights it
hands over, and those that wait for the same unit go first.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.integrations.accelerate.dispatched import streamed_model
from bitslab.offload import OffloadedModel

THREAD_NAME = "bitslab-generate"
#: Arguments that every batch changes, so that they cannot be shared.
_OWN = ("past_key_values", "streamer", "assistant_model", "negative_prompt_ids")


def generate_blocks(
    model: nn.Module,
    prompts: Sequence[torch.Tensor | Mapping[str, Any]],
    *,
    seeds: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Generate for several batches together, with one transfer of each layer for all of them.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers whose weights stream (`compress_offloaded`, `offload_compressed`).
    prompts : sequence
        The batches: token ids ``[B, T]``, or mappings of arguments of `generate`
        (``input_ids``, ``attention_mask``, and whatever a batch has of its own, as
        ``past_key_values``). Their shapes may differ.
    seeds : int or sequence of int, optional
        Seed of each batch's random numbers, or one for all; the present state of torch's
        generators when left out.
    **kwargs
        Arguments of `generate` for all batches.

    Returns
    -------
    list
        What ``model.generate`` returns for each batch: the same as alone, with the same seed.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When there are no batches, the model's weights do not stream, or an argument would be shared
        that every batch changes.

    Notes
    -----
    The caches of all batches are in memory together. When a batch fails, the others stop and its
    error is raised. After the call torch's generators are where the last batch left them.
    """
    attached = streamed_model(model)
    inputs = _checked_prompts(prompts)
    shared = [name for name in _OWN if kwargs.get(name) is not None]
    if shared:
        raise ArgumentError(
            f"{shared[0]}: every batch changes it; give each batch its own, in the mappings of "
            "prompts"
        )
    if kwargs.get("cache_implementation") == "static":
        raise ArgumentError("cache_implementation: 'static' keeps one cache in the model for all")
    generate: Callable[..., Any] = _generate_of(model)
    batches = [
        _Batch(number, seed, functools.partial(generate, **{**kwargs, **given}))
        for number, (given, seed) in enumerate(
            zip(inputs, _checked_seeds(seeds, len(inputs)), strict=True)
        )
    ]
    return _Schedule(attached, batches).run()


def _generate_of(model: nn.Module) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(model, "generate", None)
    if not callable(found):
        raise ArgumentTypeError(f"model: {type(model).__name__} has no generate()")
    return found


def _checked_prompts(prompts: Sequence[Any]) -> list[dict[str, Any]]:
    if isinstance(prompts, (torch.Tensor, Mapping, str)) or not isinstance(prompts, Sequence):
        raise ArgumentTypeError(
            f"prompts: expected a sequence of batches, got {type(prompts).__name__}"
        )
    if not prompts:
        raise ArgumentError("prompts: no batches")
    found: list[dict[str, Any]] = []
    for number, batch in enumerate(prompts):
        if isinstance(batch, torch.Tensor):
            found.append({"input_ids": batch})
        elif isinstance(batch, Mapping):
            found.append(dict(batch))
        else:
            raise ArgumentTypeError(
                f"prompts: batch {number} is a {type(batch).__name__}, expected token ids or a "
                "mapping of arguments"
            )
    return found


def _checked_seeds(seeds: int | Sequence[int] | None, count: int) -> list[int | None]:
    if seeds is None or isinstance(seeds, int):
        return [seeds] * count
    found: list[int | None] = list(seeds)
    if len(found) != count or not all(isinstance(seed, int) for seed in found):
        raise ArgumentError(f"seeds: {seeds!r:.60}; expected one int for each of {count} batches")
    return found


class _Stopped(Exception):
    """Ends the thread of a batch when another one has failed."""


class _Batch:
    """A batch that generates in a thread of its own.

    Parameters
    ----------
    number : int
        Its index among the batches.
    seed : int or None
        Seed of its random numbers.
    call : callable
        Generates.
    """

    def __init__(self, number: int, seed: int | None, call: Callable[[], Any]) -> None:
        self.number = number
        self.seed = seed
        self.call = call
        self.thread: threading.Thread | None = None
        #: The unit that it is about to enter, and how many it has entered.
        self.unit: str | None = None
        self.entered = 0
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.random: _Random | None = None


class _Random:
    """The states of torch's generators, of the CPU and of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self._cpu)
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu, self._device)


class _Schedule:
    """Decides which batch runs.

    Parameters
    ----------
    attached : OffloadedModel
        The model's streamed weights.
    batches : list of _Batch
        The batches.
    """

    def __init__(self, attached: OffloadedModel, batches: list[_Batch]) -> None:
        self._attached = attached
        self._batches = batches
        # Entered by itself: an interrupt inside the condition's own code would leave it taken.
        self._mutex = threading.RLock()
        self._change = threading.Condition(self._mutex)
        self._running: _Batch | None = None
        self._held_unit: str | None = None
        self._failed = False
        self._local = threading.local()

    def run(self) -> list[Any]:
        """Run all batches and return their results."""
        modes = _Modes(self._attached.device)
        start = _Random(self._attached.device)
        for batch in self._batches:
            start.put()
            if batch.seed is not None:
                torch.manual_seed(batch.seed)
            batch.random = _Random(self._attached.device)
            context = contextvars.copy_context()
            batch.thread = threading.Thread(
                target=context.run,
                args=(self._work, batch, modes),
                name=f"{THREAD_NAME}-{batch.number}",
                daemon=True,
            )
        self._attached.set_enter_callback(self._on_enter)
        try:
            for batch in self._batches:
                assert batch.thread is not None
                batch.thread.start()
            with self._mutex:
                self._choose()
            for batch in self._batches:
                assert batch.thread is not None
                batch.thread.join()
        finally:
            with self._mutex:
                self._failed = self._failed or not all(batch.done for batch in self._batches)
                self._change.notify_all()
            for batch in self._batches:
                if batch.thread is not None and batch.thread.ident is not None:
                    batch.thread.join()
            self._attached.set_enter_callback(None)
            self._hold(None)
        for batch in self._batches:
            if batch.error is not None and not isinstance(batch.error, _Stopped):
                raise batch.error
        return [batch.result for batch in self._batches]

    # In the threads of the batches

    def _work(self, batch: _Batch, modes: _Modes) -> None:
        self._local.batch = batch
        try:
            self._wait(batch)
            with modes.entered():
                batch.result = batch.call()
        except BaseException as error:  # raised by `run`
            batch.error = error
            with self._mutex:
                self._failed = True
        finally:
            with self._mutex:
                batch.done = True
                self._choose()

    def _on_enter(self, unit: str) -> None:
        """Enter callback: yield to another batch, and wait until this one is chosen again."""
        batch = getattr(self._local, "batch", None)
        if batch is None:
            return  # a thread that this schedule does not run
        batch.random = _Random(self._attached.device)
        batch.unit = unit
        batch.entered += 1
        with self._mutex:
            self._choose()
        self._wait(batch)
        if self._held_unit != unit:
            self._hold(unit)

    def _wait(self, batch: _Batch) -> None:
        with self._mutex:
            self._change.wait_for(lambda: self._running is batch or self._failed)
            if self._failed:
                raise _Stopped
        assert batch.random is not None
        batch.random.put()

    # Under the lock, or by the one that runs

    def _choose(self) -> None:
        """Choose a batch that waits for the present unit, or else the one furthest behind."""
        waiting = [batch for batch in self._batches if not batch.done]
        here = [
            batch for batch in waiting if batch.unit is not None and batch.unit == self._held_unit
        ]
        self._running = min(here or waiting, key=lambda b: (b.entered, b.number), default=None)
        self._change.notify_all()

    def _hold(self, unit: str | None) -> None:
        """Acquire a unit until another one is held; None releases the last."""
        held, self._held_unit = self._held_unit, None
        if held is not None:
            self._attached.stream.release(held)
        if unit is not None:
            self._attached.stream.acquire(unit)
        self._held_unit = unit


class _Modes:
    """The thread-local modes of torch of the calling thread, to be entered in others.

    Parameters
    ----------
    device : torch.device
        The device that the model runs on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", device.type}
        ]
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter these modes."""
        with contextlib.ExitStack() as stack:
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self._device))
                stack.enter_context(torch.cuda.stream(self._stream))
            yield
