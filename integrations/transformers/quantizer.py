"""BitslabQuantizer: compresses weights while `from_pretrained` loads them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.logging import is_progress_bar_enabled

from bitslab.devices import checked_device
from bitslab.engine import ProgressFunction
from bitslab.engine.files import check_free
from bitslab.errors import ArgumentError, BitslabError
from bitslab.integrations.transformers.config import METHOD, BitslabConfig
from bitslab.integrations.transformers.loading import WeightLoader, representatives
from bitslab.integrations.transformers.placement import (
    device_of,
    execution_device,
    is_gpu,
    unit_places,
    unpack_while_room,
)
from bitslab.integrations.transformers.sizes import SizeEstimate, estimate
from bitslab.offload import (
    MIN_PACKED_BYTES,
    MIN_UNIT_BYTES,
    PackedWeights,
    Unit,
    attach_weights,
    bring_inputs,
    choose_tiers,
    cut_units,
    deferred_state_dict,
    move_unpacked,
    restore_weights,
)

#: Of the free memory of a GPU that a caller named without a budget, the share for weights.
FREE_SHARE = 0.9


@dataclass(frozen=True)
class LoadReport:
    """What loading did; sizes in bytes.

    Attributes
    ----------
    device : torch.device
        Where the model runs.
    places : dict of str to str
        "device", "packed" or "host" for each unit; "host" is the file where `disk` was given.
    raw_bytes, packed_bytes : int
        Of all packed tensors, uncompressed, and packed with all metadata.
    planned_bytes : int or None
        What `device_map` was planned with; None where nothing was planned.
    planned_with : str
        Where the sizes of that plan came from.
    """

    device: torch.device
    places: dict[str, str]
    raw_bytes: int
    packed_bytes: int
    planned_bytes: int | None = None
    planned_with: str = ""

    @property
    def ratio(self) -> float:
        """`raw_bytes` over `packed_bytes`; 1.0 when nothing is packed."""
        return self.raw_bytes / self.packed_bytes if self.packed_bytes else 1.0


@dataclass
class _Plan:
    """The device map: the caller's own, or the one that transformers planned."""

    device_map: dict[str, Any] | None = None
    asked_for: str | None = None  # "auto" and the like, until it is planned
    budget: dict[Any, float] = field(default_factory=dict)
    gpu: Any = None  # that it was planned for; the model runs there even if it holds no unit

    @property
    def divides(self) -> bool:
        return len({str(place) for place in (self.device_map or {}).values()}) > 1


# Once for each process, as transformers asks: it refuses a second class of this name.
register_quantization_config(METHOD)(BitslabConfig)


@register_quantizer(METHOD)  # type: ignore[untyped-decorator, unused-ignore]
class BitslabQuantizer(HfQuantizer):  # type: ignore[misc, unused-ignore]
    """Packs weights as they are read from a checkpoint, and streams them while the model runs.

    transformers makes one for a `BitslabConfig`; it is ``model.hf_quantizer`` afterwards.

    Notes
    -----
    Weights come one by one, sorted by name, on the CPU. Each is packed at once and the model gets
    a tensor without data instead, so that in addition to the packed weights memory is needed for
    the largest unit. A tied weight that the checkpoint has several times is packed last, when it is
    known whether its copies are the same.

    The checkpoint is not changed: `save_pretrained` writes the plain weights, the same bytes as
    for the plain model, and a ``config.json`` that does not name this method. In addition to the
    packed weights it needs memory for one shard (its ``max_shard_size``), and for weights that
    transformers stores in another form than it computes with. How weights are kept
    is a matter of the machine that loads them, and a configuration that names it would keep all
    who do not have bitslab from loading the file. A ``config.json`` that has
    ``"quantization_config": {"quant_method": "bitslab", ...}``, written by hand, is obeyed.
    """

    requires_calibration = False

    def __init__(self, quantization_config: BitslabConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # Whether or not the checkpoint names this method, its weights are plain.
        self.pre_quantized = False
        self.config: BitslabConfig = quantization_config
        self.report: LoadReport | None = None
        self._plan = _Plan()
        self._model: Any = None
        self._dtype: torch.dtype = torch.get_default_dtype()
        self._files: Sequence[str] | None = None
        self._units: dict[str, list[str]] = {}
        self._sizes: SizeEstimate | None = None
        self._in_checkpoint: set[str] = set()
        self._misshapen: set[str] = set()
        self._skipped: set[str] = set()
        self._loader: WeightLoader | None = None
        self._together: set[str] = set()
        self._aliases: dict[str, str] = {}
        self._failure: Exception | None = None
        self._planned_bytes: int | None = None

    # Called by transformers with the caller's arguments

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Record the dtype that weights are loaded in: transformers passes it nowhere else."""
        self._dtype = dtype
        return dtype

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Take the planned device map, once there is one."""
        if self._plan.asked_for is None or not isinstance(device_map, dict):
            return
        self._plan.device_map = dict(device_map)
        # Weights are loaded to the CPU, packed, and moved from there. The map is changed in place
        # because it is the one that transformers loads by, and dispatches with accelerate's
        # hooks by, which these weights do not need.
        device_map.clear()
        device_map[""] = "cpu"

    def update_device_map(self, device_map: Any) -> Any:
        """Record a device map; transformers plans one for "auto" and the like."""
        if isinstance(device_map, str):
            self._plan.asked_for = device_map
            if self.config.keep is not None:
                raise ArgumentError(
                    f"keep: {self.config.keep!r} together with device_map={device_map!r}, which "
                    "plans what is kept; accepted is one of them"
                )
            return device_map
        if device_map is not None:
            self._plan.device_map = dict(device_map)
        # Here, before anything is read.
        self._execution_device()
        if self.config.keep is not None and self._plan.divides:
            raise ArgumentError(
                f"keep: {self.config.keep!r} together with a device_map that divides the model; "
                "accepted is one of them"
            )
        return {"": "cpu"}

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """Leave one GPU in the plan, and room there for what is decoded on it."""
        max_memory = dict(max_memory)
        gpus = [place for place in max_memory if is_gpu(place)]
        if gpus:
            asked = self.config.execution_device
            chosen = max(gpus, key=lambda gpu: max_memory[gpu])
            if asked is not None:
                here = [gpu for gpu in gpus if device_of(gpu) == device_of(asked)]
                chosen = here[0] if here else None
            if chosen is not None and max_memory[chosen] > 0:
                self._plan.gpu = chosen
            for gpu in gpus:
                if gpu != chosen:
                    del max_memory[gpu]
            # The planner leaves room for the largest module in addition to what it places.
            if chosen is not None and self._raw_bytes() + self._largest() > max_memory[chosen]:
                max_memory[chosen] = max(0, max_memory[chosen] - self._working_bytes())
        self._plan.budget = dict(max_memory)
        return max_memory

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Return the bytes that an element is expected to take, packed where it will be."""
        size = float(param.element_size())
        if param.dim() < 2 or param.nbytes < MIN_PACKED_BYTES or not param.is_floating_point():
            return size
        if self._is_skipped(param_name) or not isinstance(param, nn.Parameter):
            return size
        if self._sizes is None:
            self._sizes = estimate(self._files, self._dtype)
        return size * self._sizes.share(param_name)

    # Loading

    def _process_model_before_weight_loading(
        self,
        model: Any,
        checkpoint_files: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        if getattr(model.config, "distributed_config", None) is not None:
            raise ArgumentError(
                "distributed_config, tp_plan: weights that are divided between processes cannot be "
                "packed by BitslabConfig; accepted is a model on one device"
            )
        if self.config.disk is not None:
            _check_target(self.config.disk)
        self._model, self._files = model, checkpoint_files
        for name in self.config.skip_modules or ():
            if name and not _has_module(model, name):
                raise ArgumentError(
                    f"skip_modules: the model has no module {name!r}; accepted are names as in "
                    "model.named_modules()"
                )
        for pair in _tied(model).items():
            # What is tied to a skipped weight is that weight, and skipped.
            if any(map(self._is_skipped, pair)):
                self._skipped.update(pair)
        units = cut_units(model, lambda name, parameter: not self._is_skipped(name))
        self._units = {unit.name: [ref.name for ref in unit.refs] for unit in units}
        if not isinstance(self.config.keep, str):
            choose_tiers(units, self.config.keep, 0)  # refuses units that there are not
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Return whether a parameter is packed as it is read."""
        # Nothing more after loading: adapters that are loaded on top have this quantizer too.
        if param_name in self._misshapen or self._model is None:
            return False
        self._in_checkpoint.add(param_name)
        try:
            parameter = model.get_parameter(param_name)
        except AttributeError:  # a buffer
            return False
        # What has another dtype than the model is cast by other rules, and packed at the end.
        return bool(parameter.dtype == self._dtype)

    def get_quantize_ops(self) -> _Pack:
        """Return the operation that packs a parameter."""
        return _Pack(self)

    def take(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Pack a weight that was read; return what replaces it in the model."""
        if self._failure is None:
            try:
                return self._taken(name, tensor)
            except Exception as error:
                # Raised when loading is over: transformers would wrap it in a RuntimeError of all
                # weights that could not be converted.
                self._failure = error
                if self._loader is not None:
                    self._loader.abandon()
        return torch.empty_like(tensor, device="meta")

    def _taken(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self._loader is None:
            self._begin()
        assert self._loader is not None
        if name not in self._loader or name in self._together:
            return tensor
        if tensor.shape != self._model.get_parameter(name).shape:
            # transformers reports it, or makes a new one, as it does for a plain model.
            self._misshapen.add(name)
            return tensor
        return self._loader.add(name, tensor)

    def _begin(self) -> None:
        """Place all units, once it is known which weights the checkpoint has."""
        self._aliases, self._together = representatives(_tied(self._model), self._in_checkpoint)
        stored = {
            unit: [name for name in names if name not in self._aliases]
            for unit, names in self._units.items()
        }
        stored = {unit: names for unit, names in stored.items() if names}
        device = self._execution_device()
        places = self._places(stored, device)
        sizes = self._raw_sizes()
        if self._sizes is not None:
            self._planned_bytes = round(sum(map(self._packed_bytes, stored.values())))
        self._loader = WeightLoader(
            stored,
            places,
            device,
            disk=self.config.disk,
            sizes={name: sizes[name] for names in stored.values() for name in names},
            progress=self._progress(),
        )

    def _execution_device(self) -> torch.device:
        """Return where the model runs, after a check that it is there."""
        asked = self.config.execution_device
        if asked is None and self._plan.gpu is not None:
            asked = str(device_of(self._plan.gpu))
        return checked_device(execution_device(self._plan.device_map, asked))

    def _progress(self) -> ProgressFunction | bool | None:
        """Return the progress option of packing; False where transformers shows a bar already."""
        if self.config.progress is None and is_progress_bar_enabled():
            return False
        return self.config.progress

    def _places(self, units: Mapping[str, Sequence[str]], device: torch.device) -> dict[str, str]:
        """Return where each unit lies."""
        keep, device_map = self.config.keep, self._plan.device_map
        if keep is None and device_map is not None:
            keep = self._planned_places(units, device, device_map)
        elif isinstance(keep, Mapping):
            keep = self._stored_places(units, keep)
        least = MIN_UNIT_BYTES if self.config.min_bytes is None else self.config.min_bytes
        cut = [
            Unit(u.name, u.module, [ref for ref in u.refs if ref.name in units[u.name]])
            for u in cut_units(self._model)
            if u.name in units
        ]
        return dict(choose_tiers(cut, keep, least))

    def _stored_places(
        self, units: Mapping[str, Sequence[str]], keep: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the places of units that store tensors, also when given for a unit tied to one."""
        unit_of = {name: unit for unit, names in units.items() for name in names}
        found = {unit: place for unit, place in keep.items() if unit in units}
        for unit in keep.keys() - found.keys():
            for name in self._units[unit]:
                found.setdefault(unit_of[self._aliases[name]], keep[unit])
        return found

    def _planned_places(
        self,
        units: Mapping[str, Sequence[str]],
        device: torch.device,
        device_map: Mapping[str, Any],
    ) -> dict[str, str]:
        """Return where a device map puts units."""
        raw = {u: sum(self._raw_sizes()[n] for n in names) for u, names in units.items()}
        planned = unit_places(units, device_map)
        on_disk = [unit for unit, place in planned.items() if place == "disk"]
        if on_disk and self.config.disk is None:
            raise ArgumentError(
                f"device_map: {len(on_disk)} of {len(units)} units are on disk ({on_disk[0]} is "
                "the first); BitslabConfig(disk=FILE) says in which file, or max_memory gives the "
                "CPU more"
            )
        on_gpu = [unit for unit, place in planned.items() if place == "gpu"]
        packed = {u: self._packed_bytes(names) for u, names in units.items()}
        unpacked = unpack_while_room(on_gpu, raw, packed, self._room(device))
        return {
            unit: "host" if unit not in on_gpu else "device" if unit in unpacked else "packed"
            for unit in units
        }

    def _room(self, device: torch.device) -> float:
        """Return the bytes that weights may take on the device."""
        for place, budget in self._plan.budget.items():
            if is_gpu(place) and device_of(place) == device:
                return budget
        if device.type != "cuda":
            return float("inf")
        return FREE_SHARE * torch.cuda.mem_get_info(device)[0]

    # After loading

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        # The configuration says how this machine keeps the weights, not what the file is.
        del model.config.quantization_config
        try:
            if self._failure is not None:
                raise self._failure
            if self._loader is None:
                self._begin()
            loader = self._loader
            assert loader is not None
            weights = self._packed(model, loader)
        except BaseException:
            if self._loader is not None:
                self._loader.abandon()
            raise
        self.report = LoadReport(
            loader.device,
            loader.places,
            weights.raw_nbytes,
            weights.nbytes,
            self._planned_bytes,
            self._sizes.source if self._sizes else "",
        )
        if len(weights):
            try:
                attach_weights(
                    model,
                    weights,
                    execution_device=loader.device,
                    keep={u: "packed" for u in weights.units if loader.places.get(u) == "packed"},
                    depth=self.config.depth,
                    sm_budget=self.config.sm_budget,
                    fused=self.config.fused,
                )
            except BaseException:
                weights.close()
                raise
        else:
            move_unpacked(model, loader.device)
            if self._plan.asked_for is not None and not _is_current(loader.device):
                bring_inputs(model)  # of several GPUs the plan chose another than the caller's
        self._model = self._loader = None
        return model

    def _packed(self, model: Any, loader: WeightLoader) -> PackedWeights:
        """Pack what is left, and find what is tied, now that the model is complete."""
        aliases: dict[str, str] = {}
        untied: dict[str, torch.Tensor] = {}
        for name, kept in self._aliases.items():
            own = model.get_parameter(name)
            if name in self._skipped:
                continue
            if own is not model.get_parameter(kept):
                untied[name] = own.detach()
            elif loader.is_packed(kept):
                aliases[name] = kept
        for name in loader.missing():
            parameter = model.get_parameter(name)
            if parameter.is_meta:
                raise BitslabError(f"{name}: the checkpoint gave no data for this weight")
            stands = nn.Parameter(loader.add(name, parameter.detach()), parameter.requires_grad)
            for other in (name, *(a for a, kept in self._aliases.items() if kept == name)):
                if other not in untied:
                    _put(model, other, stands)
        return loader.finish(aliases, untied)

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Give a model its ordinary parameters back, bit for bit.

        Parameters
        ----------
        model : PreTrainedModel
            One that this quantizer loaded.
        dtype : torch.dtype, optional
            To cast it to; each parameter keeps its own when left out.
        """
        if self.report is not None and self.report.raw_bytes:
            restore_weights(model, self.report.device)
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call, unused-ignore]
        return model if dtype is None else model.to(dtype)

    # Called by transformers on the loaded model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what `save_pretrained` writes: weights that are decoded shard by shard."""
        return deferred_state_dict(model), {}

    def is_serializable(self) -> bool:
        """Return True: plain weights are saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters such as LoRA train on top of weights that do not change."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Return False: `generate` must not capture a whole step in one graph by itself.

        Weights are fetched between layers, outside of graphs; ``torch.compile`` of the model or of
        its layers by the caller works. Deep models then need a higher ``recompile_limit``; see
        `bitslab.integrations.accelerate.offload_compressed`.
        """
        return False

    # Sizes

    def _is_skipped(self, name: str) -> bool:
        skipped = self.config.skip_modules or ()
        return name in self._skipped or any(
            not module or f"{name}.".startswith(f"{module}.") for module in skipped
        )

    def _raw_sizes(self) -> dict[str, int]:
        """Return the raw bytes of every parameter, by name."""
        named = self._model.named_parameters(remove_duplicate=False)
        return {name: parameter.nbytes for name, parameter in named}

    def _raw_bytes(self) -> int:
        tied = _tied(self._model)
        return sum(size for name, size in self._raw_sizes().items() if name not in tied)

    def _packed_bytes(self, names: Sequence[str]) -> float:
        found = 0.0
        for name in names:
            parameter = self._model.get_parameter(name)
            found += parameter.numel() * self.param_element_size(self._model, name, parameter)
        return found

    def _working_bytes(self) -> float:
        """Return what streaming needs on a device: two decoded units, and packed ones in flight."""
        sizes = self._raw_sizes()
        raw = max((sum(sizes[n] for n in names) for names in self._units.values()), default=0)
        return 2 * raw + (self.config.depth + 1) * self._largest()

    def _largest(self) -> float:
        """Return the packed bytes of the largest unit."""
        return max(map(self._packed_bytes, self._units.values()), default=0.0)


class _Pack(ConversionOps):  # type: ignore[misc, unused-ignore]
    """The last operation on a weight that was read: the quantizer packs it."""

    def __init__(self, quantizer: BitslabQuantizer) -> None:
        self._quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str] | None = None,
        target_patterns: list[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Pack the tensors of one or several parameters; return what replaces them."""
        found = {}
        for name, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            found[name] = self._quantizer.take(name, tensor)
        return found


def _check_target(path: str) -> None:
    """Refuse to write over a file of another kind, or of a model that uses it."""
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise ArgumentError(f"disk: {path}, but there is no folder {folder}")
    if not os.path.lexists(path):
        return
    try:
        PackedWeights.open(path, verify=False).close()
    except (BitslabError, OSError) as error:
        raise ArgumentError(
            f"disk: {path} exists and holds no packed weights ({error}); accepted is a new file, "
            "or one that bitslab wrote"
        ) from error
    check_free(path, "disk")


def _tied(model: Any) -> dict[str, str]:
    """Return names of parameters to the one that they are tied to."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def _has_module(model: Any, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True


def _put(model: Any, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, parameter)


def _is_current(device: torch.device) -> bool:
    """Return whether a device is that of ``tensor.cuda()``, or no GPU."""
    return device.type != "cuda" or device.index == torch.cuda.current_device()
