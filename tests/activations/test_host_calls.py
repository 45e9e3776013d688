"""What a saved tensor costs the host, in calls of Python functions: these vary with nothing.

Times are in `benchmarks/activation_hooks.py`. A call takes 0.1 to 0.2 us.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import pytest
import torch

import bitslab
from bitslab.activations.copies import Pass, StoredCopy
from bitslab.activations.executor import Executor
from bitslab.activations.identity import span_of
from bitslab.engine.memory.locks import current_process
from tests.activations.delayed_streams import Mark, delayed
from tests.activations.immediate_streams import immediate
from tests.driver import FakeEvent
from tests.forked import run_forked

TENSORS = 40

#: Counts the calls that saving and reading a tensor takes in the thread that computes. In a process
#: of its own: what other tests have attached to torch would be counted.
COUNT = f"""
import gc, json, sys, torch, bitslab

def calls_of(offload):
    x = torch.randn(256).requires_grad_()
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("bitslab."):
            calls += 1

    sys.setprofile(count)
    try:
        with offload:
            y = x
            for _ in range({TENSORS}):
                y = y.sin()
        y.sum().backward()
    finally:
        sys.setprofile(None)
    return calls / {TENSORS}

gc.disable()
found = []
for policy, codec, min_bytes in json.loads(sys.argv[1]):
    # Originals of packed ones are given up at once, so that all are decoded.
    more = dict(codecs=codec, in_flight_bytes=0) if codec else dict()
    offload = bitslab.ActivationOffload(policy, min_bytes=min_bytes, **more)
    # The first passes take memory, and learn.
    found.append(min(calls_of(offload) for _ in range(6)))
    offload.detach()
print(json.dumps(found))
"""

#: By name: policy, codec, bytes from which on tensors are moved, and the most calls. Those of tasks
#: of threads are counted, which are of the library: 17 of Python and C for one that is waited for.
MOST_CALLS = {
    "kept, too small": ("raw", None, 1 << 20, 3),
    "kept by policy": ("keep", None, 1, 9),
    "moved raw": ("raw", None, 1, 58),
    "moved, packed by zvc": ("static", "zvc", 1, 127),
    "moved, packed by zvc+ibp": ("static", "zvc+ibp", 1, 267),
}


def test_calls_of_a_saved_tensor() -> None:
    given = [row[:-1] for row in MOST_CALLS.values()]
    done = run_forked(["-c", COUNT, json.dumps(given)])
    assert done.returncode == 0, done.stderr
    found = dict(zip(MOST_CALLS, json.loads(done.stdout), strict=True))
    assert all(0 < found[name] <= row[-1] for name, row in MOST_CALLS.items()), found


#: On a GPU, by name: policy, codec, most calls (without those of codecs, for which see
#: `tests/engine/cuda/test_launch_calls.py`), and what the driver is asked to do.
MOST_ON_GPU: dict[str, tuple[str, str | None, int, dict[str, int]]] = {
    "moved raw": ("raw", None, 52, {"copy": 2, "record": 4, "wait": 3, "query": 1}),
    "moved, packed by zvc": ("static", "zvc", 92, {"copy": 2, "record": 5, "wait": 4, "query": 2}),
    "kept by policy": ("keep", None, 9, {}),
}


#: Counts calls as COUNT does, on a GPU whose driver is simulated.
COUNT_ON_GPU = f"""
import gc, json, sys, torch, bitslab, pytest
from collections import Counter
from tests.activations.immediate_streams import immediate
from tests.host_calls import calls_of

parts = "bitslab.activations", "bitslab.engine.transfer", "bitslab.engine.memory"
gc.disable()
found = []
with pytest.MonkeyPatch.context() as patch:
    driver = immediate(patch)
    for policy, codec in json.loads(sys.argv[1]):
        offload = bitslab.ActivationOffload(policy, codecs=codec, min_bytes=1)

        def step():
            x = torch.ones(1024).requires_grad_()
            with offload:
                y = x
                for _ in range({TENSORS}):
                    y = y.sin()
            y.sum().backward()

        for _ in range(6):  # the first steps take memory, make events and learn
            driver.take()
            calls = calls_of(step, parts) / {TENSORS}
        asked = Counter(call[0] for call in driver.take())
        found.append((calls, {{what: number / {TENSORS} for what, number in asked.items()}}))
        offload.detach()
print(json.dumps(found))
"""


def test_calls_of_a_tensor_of_a_gpu() -> None:
    """Of the library, and of the driver by address."""
    done = run_forked(["-c", COUNT_ON_GPU, json.dumps([row[:2] for row in MOST_ON_GPU.values()])])
    assert done.returncode == 0, done.stderr
    found = dict(zip(MOST_ON_GPU, json.loads(done.stdout), strict=True))
    for name, (_, _, most, of_driver) in MOST_ON_GPU.items():
        calls, asked = found[name]
        assert 0 < calls <= most, found
        assert all(asked[what] <= number for what, number in of_driver.items()), found


def test_events_are_used_again_while_host_memory_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reservation is cut for thousands of small tensors: none of late makes an event."""
    immediate(monkeypatch)
    made = [0]  # by step
    init = FakeEvent.__init__

    def counted(event: FakeEvent, *args: Any, **options: Any) -> None:
        made[-1] += 1
        init(event, *args, **options)

    monkeypatch.setattr(FakeEvent, "__init__", counted)
    offload = bitslab.ActivationOffload("raw", min_bytes=1)
    for _ in range(16):
        made.append(0)
        y = torch.ones(64).requires_grad_()
        with offload:
            for _ in range(TENSORS):
                y = y.sin()
        y.sum().backward()
    offload.detach()
    assert made[1] >= TENSORS and not any(made[8:]), made


def test_events_of_a_copy_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is on the host, and when it is back; not when its memory may be used."""
    streams, _ = delayed(monkeypatch, 0)
    made: Counter[str] = Counter()
    init = Mark.__init__

    def counted(mark: Mark, *args: Any) -> None:
        made["events"] += 1
        init(mark, *args)

    monkeypatch.setattr(Mark, "__init__", counted)
    executor = Executor(torch.device("cpu"), 0, lambda *_: None, lambda *_: None)
    for step in range(2):
        made.clear()
        tensors = [torch.randn(300) for _ in range(8)]
        copies = [StoredCopy("0:0", t, span_of(t), t, 0, Pass(0, set())) for t in tensors]
        for copy in copies:
            assert executor.store(copy, None)
        for copy, t in zip(copies, tensors, strict=True):
            found = executor.bytes_of(copy, False)
            streams.drain()
            assert torch.equal(found, t)
        assert made["events"] <= 2 * len(tensors) + (step == 0)
    executor.close()


@pytest.mark.parametrize("seed", range(3))
def test_events_of_a_gpu_are_asked_for_seldom(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that follow each other on one stream are not each asked whether they are over."""
    streams, codec = delayed(monkeypatch, seed)
    asked = Counter[str]()
    query = Mark.query

    def counted(mark: Mark) -> bool:
        asked["events"] += 1
        return query(mark)

    monkeypatch.setattr(Mark, "query", counted)
    executor = Executor(torch.device("cpu"), 1 << 20, lambda *_: None, lambda *_: None)
    for step in range(3):
        asked.clear()
        tensors = [torch.randn(3000).relu() for _ in range(16)]
        copies = [
            StoredCopy(f"{i}:0", t, span_of(t), t, 0, Pass(0, set())) for i, t in enumerate(tensors)
        ]
        for copy in copies:
            assert executor.store(copy, codec)
        # In the first step sizes are not known, and more memory is on its way.
        assert step == 0 or asked["events"] <= 3 * len(tensors)
        streams.drain()
        for copy, t in zip(copies, tensors, strict=True):
            found = executor.bytes_of(copy, False)
            streams.drain()
            assert torch.equal(found, t)
    executor.close()


def test_the_process_is_known_in_a_forked_child() -> None:
    assert current_process() == os.getpid()
    if (child := os.fork()) == 0:
        os._exit(current_process() != os.getpid())
    assert os.waitpid(child, 0)[1] == 0
