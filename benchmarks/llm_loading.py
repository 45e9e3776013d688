"""Loading: weights of a model packed from a GPU, from host memory, and as a checkpoint is read.

Each way stands beside a peer that does without packing, on a model with other random weights in
each repetition:

- offload_compressed: torch brings the same weights to page-locked memory (`Tensor.cpu` and
  `pin_memory`), which raw streaming needs; on a CPU it copies them (`clone`);
- from_pretrained with BitslabConfig: the same from_pretrained without it. Where transformers leaves
  weights in the mapped file, the peer's time has a pass over them, which reads the pages once.

With ``--profile``, the last repetition of each way keeps time by stage and thread (see
loading_profile.py), which is printed as a table of its own; that repetition is not counted.

The file is in the page cache. The peak is that of the process's own memory (anonymous and shared,
files that are mapped not counted) above what it had before the load.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from common.arguments import DTYPES
from common.report import Steps
from llm_workload import Row, Rows, show
from loading_profile import StageTimes
from textgen.models import RANDOM, SIZES, Shape, write_random_model
from transformers import core_model_loading

from bitslab.integrations.accelerate import offload_compressed
from bitslab.integrations.accelerate.dispatched import offloaded_tensors
from bitslab.integrations.transformers import BitslabConfig, quantizer
from bitslab.integrations.transformers.loading import WeightLoader
from bitslab.integrations.transformers.quantizer import BitslabQuantizer
from bitslab.offload import find_offloaded, offload

AUTO: Any = transformers.AutoModelForCausalLM
WARM_UP_LAYERS = 2
POSITIONS = 2048
SAMPLE_SECONDS = 0.005
#: What a profile times beside the library's own packing.
LOADING_STAGES = (
    ("transformers: read a tensor of the file", core_model_loading, "_materialize_copy"),
    ("transformers: put a tensor in the model", core_model_loading, "set_param_for_module"),
    ("from_pretrained: place units", BitslabQuantizer, "_begin"),
    ("from_pretrained: take a weight", WeightLoader, "add"),
    ("from_pretrained: finish", WeightLoader, "finish"),
    ("from_pretrained: attach", quantizer, "attach_weights"),
    ("move what is not packed", offload, "move_unpacked"),
)


class Peak:
    """The most memory of its own that this process has, above what it had at the start."""

    def __enter__(self) -> Peak:
        gc.collect()
        self._before = self._most = _own_bytes()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            self._most = max(self._most, _own_bytes())

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
        self._most = max(self._most, _own_bytes())

    @property
    def nbytes(self) -> int:
        return self._most - self._before


def _own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
    return 1024 * (int(sizes["RssAnon"]) + int(sizes["RssShmem"]))


class Loading:
    """The models and the measurements of one run of llm.py."""

    def __init__(self, arguments: argparse.Namespace, steps: Steps) -> None:
        self.arguments = arguments
        self.steps = steps
        self.device: torch.device = arguments.device
        self.dtype = DTYPES[arguments.dtype]
        self.profiles: dict[str, Rows] = {}
        shape = SIZES[arguments.size]
        self.shape = replace(
            shape,
            layers=arguments.layers or shape.layers,
            kv_heads=arguments.kv_heads or shape.kv_heads,
        )

    # Models

    def shape_of(self, repetition: int) -> Shape:
        """Return the shape of a repetition's model; the first one warms up, and is smaller."""
        return self.shape if repetition else replace(self.shape, layers=WARM_UP_LAYERS)

    def model(self, repetition: int, place: torch.device) -> Any:
        """Return a model of other random weights, drawn where that is fast."""
        config = RANDOM[self.arguments.model](self.shape_of(repetition), POSITIONS)
        torch.manual_seed(repetition)
        with self.device:
            model = AUTO.from_config(config, dtype=self.dtype)
        return model.to(place).eval()

    def wait(self) -> None:
        """Wait for the GPU, if there is one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Free the memory of models that were deleted."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            # What torch keeps of page-locked memory would be given out again at once.
            empty = getattr(torch._C, "_host_emptyCache", None)
            if empty is not None:
                empty()

    def write(self, shape: Shape, seed: int, folder: Path) -> None:
        """Write a checkpoint, which is in the page cache afterwards."""
        kind = self.arguments.model
        write_random_model(kind, shape, self.dtype, POSITIONS, seed, folder, self.device)
        self.free()
        for file in folder.glob("*.safetensors"):
            with file.open("rb") as content:
                while content.read(1 << 24):
                    pass

    # Measurements

    def seconds(self, run: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds of a call, the GPU's included, and its result."""
        self.wait()
        begin = time.perf_counter()
        result = run()
        self.wait()
        return time.perf_counter() - begin, result

    @property
    def repetitions(self) -> int:
        """All that are run: one that warms up, and with a profile one for it, are not counted."""
        return int(self.arguments.repetitions) + 1 + bool(self.arguments.profile)

    def measured(
        self, way: str, repetition: int, run: Callable[[], Any]
    ) -> tuple[float | None, Any]:
        """Return the seconds of a call, None where they do not count, and its result."""
        if repetition <= self.arguments.repetitions:
            seconds, result = self.seconds(run)
            return (seconds if repetition else None), result
        with StageTimes(self.device, LOADING_STAGES) as times, times.stage("all else"):
            _, result = self.seconds(run)
        title = f"Profile: {way}, {1e3 * times.seconds:.0f} ms"
        self.profiles[title] = times.rows()
        return None, result

    def offload(self, place: torch.device) -> Row:
        """Measure offload_compressed of a model that lies somewhere."""
        ours, peers, peaks = [], [], []
        raw = packed = 0
        where = "the GPU" if place.type == "cuda" else "host memory"
        way = f"offload_compressed, from {where}"
        for repetition in range(self.repetitions):
            with self.steps.step(f"offload_compressed from {place.type}: repetition {repetition}"):
                model = self.model(repetition, place)
                peer_seconds, kept = self.seconds(partial(_unpacked, model))
                del kept
                self.free()
                name, last = [(n, p) for n, p in model.named_parameters() if p.dim() == 2][-1]
                last = last.detach().cpu().clone()
                pack = partial(
                    offload_compressed, model, execution_device=self.device, progress=False
                )
                with Peak() as peak:
                    seconds, report = self.measured(way, repetition, pack)
                if not torch.equal(find_offloaded(model).stream.weights.read(name), last):
                    raise RuntimeError(f"{name} has changed")
                raw, packed = report.raw_bytes, report.packed_bytes
                if seconds is not None:
                    ours.append(seconds)
                    peers.append(peer_seconds)
                    peaks.append(peak.nbytes)
                del model, pack
                self.free()
        peer = "torch: cpu(), pin_memory()" if place.type == "cuda" else "torch: pin_memory()"
        if self.device.type == "cpu":
            peer = "torch: clone()"
        return _row(way, raw, packed, ours, peer, peers, peaks)

    def from_pretrained(self, folder: Path, divided: bool) -> Row:
        """Measure loading a checkpoint, all layers on the host or half of them on the device."""
        ours, peers, peaks = [], [], []
        raw = packed = 0
        way = "from_pretrained, half of the layers on the host" if divided else "from_pretrained"
        for repetition in range(self.repetitions):
            shape = self.shape_of(repetition)
            saved = folder / f"{divided}-{repetition}"
            with self.steps.step(f"from_pretrained: repetition {repetition}"):
                self.write(shape, repetition, saved)
                load = partial(
                    AUTO.from_pretrained,
                    saved,
                    dtype=self.dtype,
                    device_map=self._device_map(shape) if divided else None,
                )
                peer_seconds, model = self.seconds(partial(_read, load))
                del model
                self.free()
                config = BitslabConfig(execution_device=str(self.device), progress=False)
                with Peak() as peak:
                    pack = partial(load, quantization_config=config)
                    seconds, model = self.measured(way, repetition, pack)
                weights = find_offloaded(model).stream.weights
                raw, packed = weights.raw_nbytes, weights.nbytes
                if seconds is not None:
                    ours.append(seconds)
                    peers.append(peer_seconds)
                    peaks.append(peak.nbytes)
                del model, weights, pack
                self.free()
                for file in saved.iterdir():
                    file.unlink()
        return _row(way, raw, packed, ours, "from_pretrained, plain", peers, peaks)

    def _device_map(self, shape: Shape) -> dict[str, Any]:
        """Return a map of the second half of the layers to the host."""
        with torch.device("meta"):
            config = RANDOM[self.arguments.model](shape, POSITIONS)
            model = AUTO.from_config(config)
        layers = [
            name for name, _ in model.named_modules() if name.endswith(f".{shape.layers - 1}")
        ]
        prefix = min(layers, key=len).rpartition(".")[0]
        gpu = self.device.index or 0
        places: dict[str, Any] = {}
        for name, module in model.named_modules():
            inside = name.startswith(f"{prefix}.")
            if inside and name.count(".") == prefix.count(".") + 1:
                number = int(name.rpartition(".")[2])
                places[name] = gpu if number < shape.layers // 2 else "cpu"
            elif not inside and not list(module.children()):
                places[name] = gpu
        return places


def run(arguments: argparse.Namespace, steps: Steps) -> dict[str, Rows]:
    """Measure all ways that this machine has."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loading = Loading(arguments, steps)
    rows: Rows = []
    if loading.device.type == "cuda":
        rows.append(show(loading.offload(loading.device)))
    rows.append(show(loading.offload(torch.device("cpu"))))
    with tempfile.TemporaryDirectory() as folder:
        rows.append(show(loading.from_pretrained(Path(folder), divided=False)))
        if loading.device.type == "cuda":
            rows.append(show(loading.from_pretrained(Path(folder), divided=True)))
    where = "cpu"
    if loading.device.type == "cuda":
        where = torch.cuda.get_device_name(loading.device)
    title = f"{arguments.model} {arguments.size} ({loading.shape.layers} layers), {arguments.dtype}"
    return {f"Loading: {title}, on {where}": rows} | loading.profiles


def _unpacked(model: Any) -> list[torch.Tensor]:
    """Bring weights to page-locked memory, as torch does; on a machine without a GPU copy them."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    if not torch.cuda.is_available():
        return [parameter.clone() for parameter in parameters]
    return [parameter.cpu().pin_memory() for parameter in parameters]


def _read(load: Callable[[], Any]) -> Any:
    """Load a model, and read every page of the weights that lie in host memory."""
    model = load()
    held = [parameter.detach() for parameter in model.parameters()]
    # Those of modules that accelerate fetches as they run.
    held += [tensor.value() for tensor in offloaded_tensors(model)]
    for tensor in held:
        if tensor.device.type == "cpu":
            tensor.reshape(-1).view(torch.uint8)[::4096].sum()
    return model


def _row(
    way: str,
    raw: int,
    packed: int,
    ours: list[float],
    peer: str,
    peers: list[float],
    peaks: list[int],
) -> Row:
    seconds, peer_seconds = statistics.median(ours), statistics.median(peers)
    return {
        "way": way,
        "raw MB": raw / 1e6,
        "packed MB": packed / 1e6,
        "seconds": seconds,
        "raw GB/s": raw / seconds / 1e9,
        "peak MB": max(peaks) / 1e6,
        "peer": peer,
        "peer seconds": peer_seconds,
        "times the peer's time": seconds / peer_seconds,
    }
