"""What tests of cached rows share as fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.embedding.on_device import summed_as_on_gpu, told_on_device
from tests.simt.runner import SimtRunner


@pytest.fixture
def runner() -> Iterator[SimtRunner]:
    """Let lookups in training go the way of ids on a GPU; what its kernels ran on."""
    with told_on_device() as runner:
        yield runner


@pytest.fixture
def steps_as_on_gpu() -> Iterator[None]:
    """Let steps be those of a GPU, for tests in which only some lookups go the way of ids there."""
    with pytest.MonkeyPatch.context() as patch:
        summed_as_on_gpu(patch)
        yield
