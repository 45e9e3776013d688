"""What tests of cached rows share as fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.embedding.on_device import on_simulated_gpu, summed_as_on_gpu
from tests.simt.runner import SimtRunner


@pytest.fixture
def runner() -> Iterator[SimtRunner]:
    """Run training lookups on the code path of ids on a GPU; return the runner of its kernels."""
    with on_simulated_gpu() as runner:
        yield runner


@pytest.fixture
def steps_as_on_gpu() -> Iterator[None]:
    """Sum gradients as on a GPU, for tests in which only some lookups run there."""
    with pytest.MonkeyPatch.context() as patch:
        summed_as_on_gpu(patch)
        yield
