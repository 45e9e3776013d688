"""Weights packed by nvCOMP and by DFloat11, on a GPU, where these can be imported."""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from llm_workload import Row, Rows, Workload, left_out, pass_seconds, show, wait
from safetensors.torch import load_file, save_file

from bitslab.errors import ArgumentError

#: DFloat11 packs with a loop in Python, about one million values a second.
MOST_DFLOAT11_VALUES = 100_000_000


def run(work: Workload, rate: float) -> Rows:
    """Measure the installed peers, at a link of `rate` bytes/s; print why one is left out."""
    found: Rows = []
    ways: dict[str, tuple[str, Callable[[Any], Row]]] = {
        "nvCOMP": ("nvidia.nvcomp", lambda nvcomp: _nvcomp(work, nvcomp, rate)),
        "DFloat11": ("dfloat11", lambda dfloat11: dfloat11_row(work, dfloat11)),
    }
    for name, (module, measure) in ways.items():
        try:
            # What they print is no part of the tables; one keeps the stdout of its import.
            with work.steps.step(name), contextlib.redirect_stdout(sys.stderr):
                found.append(show(measure(importlib.import_module(module))))
        except (ImportError, ArgumentError) as error:
            left_out(name, error)
        except Exception as error:
            # A failing peer must not lose the rows that were measured before.
            traceback.print_exc()
            left_out(name, repr(error))
        work.free()
    return found


@dataclass(frozen=True)
class _Packed:
    """A matrix that nvCOMP packed, in page-locked memory, and what it needs to decode it."""

    data: torch.Tensor
    raw_bytes: int
    config: Any


def _nvcomp(work: Workload, nvcomp: Any, rate: float) -> Row:
    """Decode every matrix of the model with nvCOMP's ANS after a copy from page-locked memory.

    The copies run ahead of the decoding in a stream of their own, and nothing is computed, so this
    is the least that a pass with nvCOMP would take.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(work.folder, dtype=work.dtype)
    matrices = [p.detach() for p in model.parameters() if p.dim() > 1]
    decoding = torch.cuda.Stream(work.device)  # type: ignore[no-untyped-call]
    copying = torch.cuda.Stream(work.device)  # type: ignore[no-untyped-call]
    # Its types are float16 and float32: the first splits bfloat16 at the same byte.
    kind = "<f4" if work.dtype == torch.float32 else "<f2"
    codec = nvcomp.Codec(algorithm="ANS", data_type=kind, cuda_stream=decoding.cuda_stream)

    def array(data: torch.Tensor) -> Any:
        return nvcomp.as_array(data, cuda_stream=decoding.cuda_stream)

    def pack(matrix: torch.Tensor) -> _Packed:
        integers = torch.int32 if work.dtype == torch.float32 else torch.int16
        raw = matrix.to(work.device).view(integers).flatten()
        wait(work.device)
        packing = codec.compression_config(raw.nbytes)
        encoded = codec.encode(array(raw), compression_config=packing)
        wait(work.device)
        data = torch.utils.dlpack.from_dlpack(encoded.to_dlpack()).view(torch.uint8)[
            : encoded.buffer_size
        ]
        return _Packed(data.cpu().pin_memory(), raw.nbytes, codec.decompression_config(packing))

    packed = [pack(matrix) for matrix in matrices]
    target = torch.empty(max(p.raw_bytes for p in packed), dtype=torch.uint8, device=work.device)

    def one_pass() -> None:
        for part in packed:
            with torch.cuda.stream(copying):
                staged = part.data.to(work.device, non_blocking=True)
            decoding.wait_stream(copying)
            staged.record_stream(decoding)
            out = array(target[: part.raw_bytes])
            codec.decode(array(staged), out=out, decompression_config=part.config)

    times = []
    for i in range(2 + work.arguments.repetitions):
        wait(work.device)
        begin = time.perf_counter()
        one_pass()
        wait(work.device)
        if i >= 2:
            times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    last = matrices[-1].view(torch.uint8).flatten()
    moved = sum(part.data.nbytes for part in packed)
    return {
        "way": "nvCOMP ANS, streamed: nothing computed",
        "pass ms": 1e3 * seconds,
        "moved MB": moved / 1e6,
        "ideal ms": 1e3 * moved / rate,
        "of the link": f"{100 * moved / rate / seconds:.0f} %",
        "values": "equal" if torch.equal(target[: last.nbytes].cpu(), last) else "DIFFER",
    }


@torch.no_grad()
def dfloat11_row(work: Workload, dfloat11: Any) -> Row:
    """Measure a pass with DFloat11, which keeps packed weights on the device.

    It packs the linear modules of the first layer, and every layer gets these; the embeddings and
    the head are left unpacked. The logits are compared with those of the same weights unpacked.

    Parameters
    ----------
    work : Workload
        The workload with the model.
    dfloat11 : module
        The package.
    """
    if work.dtype != torch.bfloat16:
        raise ArgumentError(f"--dtype: {work.arguments.dtype}; DFloat11 packs bfloat16 only")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(work.folder, dtype=work.dtype)
    prefix, layers = next(
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
    )
    first = layers[0]
    linear = {
        name: part.weight.numel()
        for name, part in first.named_modules()
        if isinstance(part, torch.nn.Linear)
    }
    n_values = sum(linear.values())
    if n_values > MOST_DFLOAT11_VALUES:
        raise ArgumentError(
            f"--size: {work.arguments.size}, with {n_values} values in a layer; DFloat11 packs "
            f"about one million a second, so at most {MOST_DFLOAT11_VALUES} are packed here"
        )
    for layer in layers[1:]:
        layer.load_state_dict(first.state_dict())
    ids = work.prompt(0).ids[:1].to(work.device)
    expected = model.to(work.device)(input_ids=ids, use_cache=False).logits
    model.to("cpu")
    pattern = re.escape(prefix) + r"\.\d+"
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        _pack_layer(dfloat11, first, f"{prefix}.0", {pattern: [*linear]}, folder, work.device)
        seconds = time.perf_counter() - begin
        _repeat_layer(Path(folder), prefix, len(layers))
        packed = dfloat11.DFloat11Model.from_pretrained(
            folder, device=str(work.device), bfloat16_model=model
        )
    row: Row = {
        "way": "DFloat11, layers packed on the device, all as the first",
        "pass ms": 1e3 * pass_seconds(work, packed),
        "moved MB": 0.0,
        "s to pack a layer": seconds,
    }
    found = packed(input_ids=ids, use_cache=False).logits
    return row | {"values": "equal" if torch.equal(found, expected) else "DIFFER"}


def _pack_layer(
    dfloat11: Any,
    layer: torch.nn.Module,
    name: str,
    patterns: dict[str, list[str]],
    folder: str,
    device: torch.device,
) -> None:
    """Write a layer to a folder as DFloat11 packs it, as part of a model that has only this one."""
    model = parent = torch.nn.Module()
    *path, last = name.split(".")
    for part in path:
        parent.add_module(part, torch.nn.Module())
        parent = parent.get_submodule(part)
    # It deletes the weights that it packs.
    parent.add_module(last, copy.deepcopy(layer))
    dfloat11.compress_model(
        model=model,
        pattern_dict=patterns,
        save_path=folder,
        save_single_file=True,
        check_correctness=device.type == "cuda",
    )


def _repeat_layer(folder: Path, prefix: str, n_layers: int) -> None:
    """Write the files of the other layers, with the tensors of the first."""
    first = f"{prefix}.0."
    (file,) = folder.glob("*.safetensors")
    tensors = {
        name.removeprefix(first): tensor
        for name, tensor in load_file(file).items()
        if name.startswith(first)
    }
    for i in range(1, n_layers):
        named = {f"{prefix}.{i}.{name}": tensor for name, tensor in tensors.items()}
        save_file(named, folder / f"layer-{i}.safetensors")
