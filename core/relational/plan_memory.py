"""What happens where memory runs out while a plan is made."""

from __future__ import annotations

import types

import torch

from ..errors import BitslabError


class PlanMemoryError(BitslabError, MemoryError):
    """There is no memory for the plan of a graph: layers run the framework's own code then."""


class planning:  # noqa: N801, as contextlib's
    """Raise PlanMemoryError where memory runs out inside; make tensors that autograd may save.

    A class, since a graph's plan enters it some fifty times.
    """

    def __enter__(self) -> None:
        self._mode = None
        if torch.is_inference_mode_enabled():
            self._mode = torch.inference_mode(False)
            self._mode.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if self._mode is not None:
            self._mode.__exit__(kind, error, trace)
        if error is None or isinstance(error, PlanMemoryError):
            return
        # torch has no class of its own for the host's memory, page-locked or not.
        texts = ("can't allocate memory", "out of memory")
        by_text = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
        if by_text or isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise PlanMemoryError(f"no memory for the plan of a graph: {error}") from error
