"""Bad options, and what goes wrong while a step runs."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import bitslab
from bitslab import ArgumentError, ArgumentTypeError, CorruptedDataError
from bitslab.activations import crossing, executor, host_room, limits
from bitslab.engine.codecs import ZvcCodec
from bitslab.engine.kernels.cpu.blob_copy import copy_blob
from bitslab.engine.memory import Arena, host_arena, page_locking
from bitslab.errors import BitslabError
from tests.activations.bitmap_codec import BitmapCodec

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy": "best"}, ArgumentError, "policy: 'best', accepted are auto, raw"),
        ({"policy": "host", "codecs": []}, ArgumentError, "codecs: policy 'host' packs on the CPU"),
        ({"policy": 3}, ArgumentError, "policy: 3, accepted are auto, raw, static, host, keep"),
        ({"codecs": "zip"}, ArgumentError, "codecs: 'zip' is not known; known are csr, ibp-blob"),
        ({"lossy": "zip"}, ArgumentError, "lossy: 'zip' is not known; known are csr, ibp-blob"),
        ({"codecs": "ibp"}, ArgumentError, "codecs: 'ibp' is a codec of rows"),
        ({"codecs": [7]}, ArgumentTypeError, "codecs: expected the name of a codec"),
        ({"codecs": 5}, ArgumentTypeError, "codecs: expected codecs or names of them, got 5"),
        ({"recompute": "yes"}, ArgumentTypeError, "recompute: expected a bool, got 'yes'"),
        ({"codecs": "zfp"}, ArgumentError, "codecs: 'zfp' is lossy"),
        ({"lossy": "zvc"}, ArgumentError, "lossy: 'zvc' is lossless"),
        ({"policy": "static", "codecs": []}, ArgumentError, "codecs: policy 'static' packs all"),
        ({"min_bytes": 1.5}, ArgumentTypeError, "min_bytes: expected an int, got 1.5"),
        ({"min_bytes": True}, ArgumentTypeError, "min_bytes: expected an int, got True"),
        ({"min_bytes": -1}, ArgumentError, "min_bytes: -1, accepted are numbers from 0"),
        ({"depth": -2}, ArgumentError, "depth: -2"),
        ({"in_flight_bytes": "1"}, ArgumentTypeError, "in_flight_bytes: expected an int"),
        ({"verify": "yes"}, ArgumentTypeError, "verify: expected an int"),
        ({"profile_every": 0}, ArgumentError, "profile_every: 0, accepted are numbers from 1"),
        ({"sm_budget": 0}, ArgumentError, "sm_budget: 0, accepted are numbers from 1"),
        ({"sm_budget": "8"}, ArgumentTypeError, "sm_budget: expected an int"),
        ({"select": "convs"}, ArgumentTypeError, "select: 'convs', expected a function"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        bitslab.ActivationOffload(**options)
    assert message in str(caught.value)


def small() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(64, 64), nn.Tanh())))


def gradients(model: nn.Module, steps: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(8)
    model.zero_grad()
    device = next(model.parameters()).device
    for _ in range(steps):
        model(torch.randn(32, 64).to(device)).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def attach(model: nn.Module, **options: Any) -> bitslab.ActivationOffload:
    given = {"policy": "raw", "min_bytes": 64, "in_flight_bytes": 0, **options}
    return bitslab.offload_activations(model, **given)


def test_attaching_twice() -> None:
    model = small()
    offload = attach(model)
    with pytest.raises(ArgumentError, match="model: it has its activations offloaded already"):
        attach(model)
    with pytest.raises(ArgumentError, match="model: its module '0' has"):
        attach(nn.Sequential(model))
    with pytest.raises(ArgumentError, match="is attached to a model already"):
        offload.attach(small())
    offload.detach()
    attach(model).detach()
    with pytest.raises(ArgumentTypeError, match="model: expected a torch.nn.Module, got int"):
        bitslab.offload_activations(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("work", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_offload_is_not_copied(work: Any) -> None:
    with pytest.raises(BitslabError, match="cannot be pickled or copied"):
        work(bitslab.ActivationOffload(policy="raw"))


def test_a_codec_that_fails_is_reported_once() -> None:
    class Failing(BitmapCodec):
        name = "test-failing"

        def encode(
            self, t: torch.Tensor, out: torch.Tensor | None = None, *, sm_budget: int | None = None
        ) -> Any:
            raise ValueError("on purpose")

    model = small()
    plain = gradients(model, 3)
    offload = attach(model, policy="static", codecs=Failing())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = gradients(model, 3)
    messages = [str(w.message) for w in caught]
    assert len(messages) == 1 and "could not be packed (ValueError: on purpose)" in messages[0]
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    notes = offload.report().notes
    assert any("Tensors of 4 sites could not be packed" in note for note in notes)
    offload.detach()


def test_a_copy_that_fails_keeps_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError("on purpose")

    model = small()
    plain = gradients(model)
    monkeypatch.setattr(crossing, "copy_on_host", fail)
    offload = attach(model)
    with pytest.warns(UserWarning, match="could not be packed"):
        found = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    offload.detach()


class NoMemory:
    """An arena that has a number of reservations left."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.real = host_arena()

    def reserve(self, *args: Any) -> Any:
        if not self.left:
            raise BitslabError("host memory is used up")
        self.left -= 1
        return self.real.reserve(*args)


@pytest.mark.parametrize("left", [0, 1])
def test_host_memory_that_runs_out(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    model = small()
    plain = gradients(model, 2)
    arena = NoMemory(left)
    monkeypatch.setattr(host_room, "host_arena", lambda: arena)
    monkeypatch.setattr(limits, "RESERVED_BYTES", 16 << 10)  # two copies of 8 KiB
    offload = attach(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = gradients(model, 2)
    assert len(caught) == 1 and "host memory is used up" in str(caught[0].message)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert offload.stats()["moved_tensors"] == 2 * left
    offload.detach()


def test_page_locking_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    room = host_room.HostRoom(on_gpu=True)  # where memory that is not page-locked is of no use
    with pytest.raises(host_room.HostMemoryError, match="refused to page-lock"):
        room.cut(64, [])


@pytest.mark.parametrize("policy", ["raw", "static", "host"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_steps_when_page_locking_is_refused(
    device: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go on with tensors kept, each warning comes once; tensors are moved when it is not."""
    model = small().to(device)
    plain = gradients(model, 3)
    expected = ["host memory for '0:0' cannot be had (the system refused to page-lock"]
    if device == "cuda":
        expected.insert(0, "the system refused to page-lock 67108864 bytes of host memory (on ")
        # Of the class: what monkeypatch puts back into an instance hides the class's from then on.
        monkeypatch.setattr(page_locking.CudaRegistrar, "register", lambda *memory: "on purpose")
        monkeypatch.setattr(page_locking, "_warned_of_refusal", False)
        arena = Arena()  # which has nothing page-locked yet
        monkeypatch.setattr(host_room, "host_arena", lambda: arena)
    else:  # where there is nothing to page-lock memory
        make = host_room.HostRoom.__init__
        monkeypatch.setattr(
            host_room.HostRoom, "__init__", lambda room, _, *rest: make(room, True, *rest)
        )
    offload = attach(model, policy=policy, codecs="zvc")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = gradients(model, 3)
    messages = [str(w.message) for w in caught if "bitslab: " in str(w.message)]
    assert len(messages) == len(expected)
    assert all(part in message for part, message in zip(expected, messages, strict=True))
    assert all(map(torch.equal, found, plain))
    assert offload.stats()["moved_tensors"] == 0
    offload.detach()
    monkeypatch.undo()
    offload = attach(model, policy=policy, codecs="zvc")
    assert all(map(torch.equal, gradients(model, 3), plain))
    assert offload.stats()["moved_tensors"] == 12
    offload.detach()


@pytest.mark.parametrize("where", [0, 9, 20, 32, 200, -1])
def test_a_damaged_blob(monkeypatch: pytest.MonkeyPatch, where: int) -> None:
    """It is refused, or gives wrong values of that call alone, which `verify` tells of."""
    real = copy_blob

    def send(data: torch.Tensor, host: torch.Tensor) -> None:
        real(data, host)
        used = int(host[:8].view(torch.int64)[0])
        host[where % used] ^= 0x55

    model = small()
    plain = gradients(model)
    monkeypatch.setattr(crossing, "copy_blob", send)
    offload = attach(model, policy="static", codecs=ZvcCodec(), verify=True)
    with pytest.raises(BitslabError) as caught:
        gradients(model)
    assert isinstance(caught.value, (CorruptedDataError, bitslab.activations.VerifyError))
    offload.detach()
    monkeypatch.undo()
    offload = attach(model, policy="static", codecs=ZvcCodec(), verify=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), plain, strict=True))
    offload.detach()


def test_hooks_that_are_turned_off_are_named() -> None:
    model = small()
    offload = attach(model)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        gradients(model)
    assert any("hooks are turned off" in note for note in offload.report().notes)
    assert "hooks are turned off" in str(offload.report())
    offload.detach()


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_parts_are_named(when: str) -> None:
    model = small()
    if when == "before":
        model[2].compile(backend="eager")
    offload = attach(model)
    if when == "after":
        model[2].compile(backend="eager")
    for _ in range(2):
        assert [n for n in offload.report().notes if n.startswith("Compiled by torch.compile: 2.")]
    offload.detach()


def test_gradients_of_a_compiled_model() -> None:
    model = small()
    plain = gradients(model)
    offload = attach(model, policy="static", codecs="zvc", verify=True)
    model.compile(backend="aot_eager")
    found = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert offload.stats()["moved_tensors"]
    offload.detach()


def test_a_forked_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains by itself; what its parent has saved it does not have."""
    model = small()
    plain = gradients(model)
    offload = attach(model)
    mine = model(torch.randn(32, 64)).sum()
    child = os.fork()
    if child == 0:  # which must not return into the test
        status = 1
        try:
            same = all(map(torch.equal, gradients(model), plain))
            refused = ""
            try:
                mine.backward()
            except BitslabError as error:
                refused = str(error)
            moved = offload.stats()["moved_in_bytes"] > 0
            status = 0 if same and moved and "saved by process" in refused else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0) == (child, 0)
    mine.backward()  # the parent's are what they were
    assert all(map(torch.equal, gradients(model), plain))
    offload.detach()


def test_no_device_memory_to_encode_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step goes on with tensors kept, reported once."""
    model = small()
    plain = gradients(model, 2)

    def store(*args: Any) -> None:
        raise torch.OutOfMemoryError("on purpose\nand more")

    monkeypatch.setattr(executor.Executor, "_store_encoded", store)
    offload = attach(model, policy="static", codecs="zvc")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = gradients(model, 2)
    (message,) = [str(w.message) for w in caught]
    assert "device memory to pack '0:0' in cannot be had (on purpose)" in message
    assert all(map(torch.equal, found, plain))
    assert offload.stats()["moved_tensors"] == 0
    offload.detach()


def test_a_pickled_model_has_nothing_attached() -> None:
    model = small()
    plain = gradients(model)
    offload = attach(model)
    for made in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert all(map(torch.equal, gradients(made), plain))
        again = attach(made)  # or it would be refused
        again.detach()
    assert offload.stats()["moved_tensors"] == 0
    assert all(map(torch.equal, gradients(model), plain))
    assert offload.stats()["moved_tensors"] == 4
    offload.detach()
