"""What a caller asks of weights that are compressed while they are loaded."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import torch
from transformers.utils.quantization_config import QuantizationConfigMixin

from bitslab.devices import named_device
from bitslab.engine import ProgressFunction
from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.offload import Fused, JsonKeep, Tier, check_fused

#: The name in a ``config.json``, and of the quantizer.
METHOD = "bitslab"


class BitslabConfig(QuantizationConfigMixin):  # type: ignore[misc, unused-ignore]
    """Ask `from_pretrained` to keep weights losslessly compressed and to stream them.

    ``AutoModelForCausalLM.from_pretrained(path, quantization_config=BitslabConfig())`` packs each
    unit (a layer, an embedding, a head) as soon as its weights are read. Every result is that of
    the plain model, bit for bit, unless `fused` asks for others.

    Where weights lie and where the model runs:

    ==================================  ===========================  ==============================
    ``device_map``                      weights                      the model runs on
    ==================================  ===========================  ==============================
    left out                            packed in host memory        a GPU where there is one
    ``"cpu"``, ``{"": "cpu"}``          packed in host memory        the CPU
    ``"cuda"``, ``0``, ``{"": 0}``      on the GPU, see `keep`       that GPU
    ``"auto"``, ``"sequential"``, ...   as planned with compressed   the GPU of the plan
                                        sizes: on the GPU as far as
                                        they fit, the rest packed
                                        in host memory, or on disk
    a dict of modules                   as it says                   the GPU that it names
    ==================================  ===========================  ==============================

    Of several GPUs a plan takes the one with most room, mostly the last one where transformers
    balances; inputs may be on any.

    Parameters
    ----------
    execution_device : str, int or torch.device, optional
        Where the model runs, when that is not what the table says.
    keep : None, "all", "packed", float or mapping, optional
        What lies on the device on which the model runs: nothing ("host" streaming), all of it
        uncompressed, all of it packed and decoded just in time, a share of the raw bytes (0 to 1)
        uncompressed, or a mapping of unit names (``model.layers.3``) to "device", "packed" or
        "host". When left out `device_map` decides: units that it places on the GPU lie there
        uncompressed as far as there is room for all of them, packed otherwise. Not together with
        a `device_map` that divides the model.
    disk : str or os.PathLike, optional
        File for packed weights, instead of host memory: for those that are streamed. It must not be
        removed while the model is used. One that bitslab wrote before is written anew; any other,
        and one that a model is using, in any process, is refused.
    depth : int, default 2
        Units that are fetched ahead of the one that computes.
    sm_budget : int or None, default 64
        Multiprocessors that decoding may use while a layer computes; all for None.
    fused : bool or "auto", default False
        Whether linear layers of units that are kept "packed" multiply while they decode, for 1 to
        16 rows of input: "auto" where that was measured to be faster, True wherever they can. Sums
        are in another order then, so tokens may differ; see `bitslab.offload.offload_weights`.
    min_bytes : int, optional
        Units of fewer raw bytes are kept on the device; 64 KiB when left out.
    skip_modules : sequence of str, optional
        Modules by name whose weights are kept on the device uncompressed; a name stands for all
        modules below it (``["lm_head", "model.layers.0"]``). What is tied to such a weight is kept
        with it.
    progress : callable or bool, optional
        Called as ``progress(done_bytes, total_bytes)`` while weights are packed; True for a bar on
        the terminal, False for none. When left out there is a bar unless transformers shows its
        own, which counts the same weights. Is not part of `to_dict`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When an argument is not accepted.

    Examples
    --------
    >>> from bitslab.integrations.transformers import BitslabConfig
    >>> BitslabConfig(depth=3).to_dict()["depth"]
    3
    """

    def __init__(
        self,
        *,
        execution_device: str | int | torch.device | None = None,
        keep: JsonKeep = None,
        disk: str | os.PathLike[str] | None = None,
        depth: int = 2,
        sm_budget: int | None = 64,
        fused: Fused = False,
        min_bytes: int | None = None,
        skip_modules: Sequence[str] | None = None,
        progress: ProgressFunction | bool | None = None,
        quant_method: str = METHOD,
    ) -> None:
        if quant_method != METHOD:
            raise ArgumentError(f"quant_method: {quant_method!r}, accepted is {METHOD!r}")
        self.quant_method: Any = METHOD
        self.execution_device = _device_name(execution_device)
        self.keep: Any = _checked_keep(keep)
        self.disk = _checked_path(disk)
        self.depth = _at_least("depth", depth, 0)
        self.sm_budget = None if sm_budget is None else _at_least("sm_budget", sm_budget, 1)
        check_fused(fused)
        self.fused: Any = fused
        self.min_bytes = None if min_bytes is None else _at_least("min_bytes", min_bytes, 0)
        self.skip_modules = _checked_names(skip_modules)
        if not (progress is None or isinstance(progress, bool) or callable(progress)):
            raise ArgumentTypeError(
                f"progress: {type(progress).__name__}, accepted are a function, a bool and None"
            )
        self._progress = progress

    @property
    def progress(self) -> ProgressFunction | bool | None:
        """The function that is called with the progress of packing, or whether to show a bar."""
        return self._progress

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold: all but `progress`."""
        return {
            name: copy.deepcopy(value)
            for name, value in vars(self).items()
            if not name.startswith("_")
        }

    def __eq__(self, other: object) -> bool:
        """Compare what JSON can hold of two configurations."""
        return isinstance(other, BitslabConfig) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(self.to_json_string())

    def __deepcopy__(self, memo: dict[int, Any]) -> BitslabConfig:
        # transformers copies configurations; a function that shows progress may not be copied.
        return BitslabConfig(**self.to_dict(), progress=self._progress)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.to_dict(),)


def _restored(settings: dict[str, Any]) -> BitslabConfig:
    # With a configuration comes what transformers looks up for it.
    importlib.import_module("bitslab.integrations.transformers.quantizer")
    return BitslabConfig(**settings)


def _at_least(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(
            f"{name}: {type(value).__name__}, accepted are integers from {least} on"
        )
    if value < least:
        raise ArgumentError(f"{name}: {value}, accepted are integers from {least} on")
    return value


def _device_name(device: Any) -> str | None:
    # By name alone: a configuration may be written where there is no such GPU.
    return None if device is None else str(named_device(device, "execution_device"))


def _checked_keep(keep: object) -> JsonKeep:
    accepted = "None, 'all', 'packed', a number from 0 to 1, or a mapping of unit names"
    if keep is None:
        return None
    if isinstance(keep, str):
        if keep not in ("all", "packed"):
            raise ArgumentError(f"keep: {keep!r}, accepted are {accepted}")
        return cast(JsonKeep, keep)
    if isinstance(keep, Mapping):
        for name, place in keep.items():
            if not isinstance(name, str) or place not in get_args(Tier):
                raise ArgumentError(
                    f"keep: {name!r} -> {place!r}, accepted are unit names and one of "
                    f"{', '.join(map(repr, get_args(Tier)))}"
                )
        return cast(JsonKeep, dict(keep))
    if isinstance(keep, bool) or not isinstance(keep, (int, float)):
        raise ArgumentTypeError(f"keep: {type(keep).__name__}, accepted are {accepted}")
    if not 0 <= keep <= 1:
        raise ArgumentError(f"keep: {keep}, accepted are {accepted}")
    return float(keep)


def _checked_path(disk: object) -> str | None:
    if disk is None:
        return None
    if not isinstance(disk, (str, os.PathLike)):
        raise ArgumentTypeError(f"disk: {type(disk).__name__}, accepted is the name of a file")
    return str(os.fspath(disk))


def _checked_names(names: object) -> list[str] | None:
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ArgumentTypeError(
            f"skip_modules: {type(names).__name__}, accepted is a list of module names"
        )
    for name in names:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"skip_modules: {name!r}, accepted are names of modules")
    return list(names)
