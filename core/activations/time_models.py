"""How long codecs take on the devices that a training uses: measured once, corrected by swaps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from ..engine.advisor import TimeModel, fit_time_model
from .policies import Codecs
from .sites import Site
from .traffic import SentBlob

#: Seconds in which the codecs of a device are measured, once on a machine.
MEASURE_SECONDS = {"cpu": 6.0, "cuda": 30.0}
#: By bytes of an element, what stands for all such dtypes; others are taken as the nearest.
MEASURED_DTYPES = {2: torch.bfloat16, 4: torch.float32}


class TimeModels:
    """Models of the times of codecs, by device and sizes of elements.

    Parameters
    ----------
    codecs : Codecs
        Whose times are wanted.
    """

    def __init__(self, codecs: Codecs) -> None:
        self._codecs = codecs
        self._models: dict[tuple[torch.device, tuple[int, ...]], TimeModel] = {}

    def of(self, device: torch.device, element_bytes: Iterable[int]) -> TimeModel:
        """Return the model of a device, measured at its first use there."""
        sizes = tuple(sorted(set(element_bytes) & set(MEASURED_DTYPES))) or (4,)
        found = self._models.get((device, sizes))
        if found is None:
            found = self._models[device, sizes] = fit_time_model(
                device,
                self._codecs.all(),
                dtypes=[MEASURED_DTYPES[size] for size in sizes],
                budget_s=MEASURE_SECONDS[device.type],
            )
        return found

    def values(self) -> list[TimeModel]:
        """Return all models."""
        return list(self._models.values())

    def observed(self, blob: SentBlob, decodes: bool, seconds: float) -> None:
        """Correct the models of a device by what a real swap took there."""
        assert blob.used_bytes is not None
        given = {"decode_s" if decodes else "encode_s": seconds}
        for (measured, _), model in list(self._models.items()):
            if measured == blob.device:
                with contextlib.suppress(KeyError):  # of a codec that is not modelled
                    model.observe(
                        blob.codec_name,
                        blob.nbytes,
                        blob.used_bytes / blob.nbytes,
                        element_bytes=blob.element_bytes,
                        **given,
                    )

    def sm_budget(self, name: str, site: Site) -> int | None:
        """Return the multiprocessors that a codec was measured to need; None for all."""
        for (device, _), model in self._models.items():
            if device == site.device:
                with contextlib.suppress(KeyError):
                    return model.sm_budget(name, site.dtype.itemsize)
        return None
