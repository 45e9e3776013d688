"""What tests of cached rows share as fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.embedding.on_device import on_simulated_gpu
from tests.simt.runner import SimtRunner


@pytest.fixture
def runner() -> Iterator[SimtRunner]:
    """Run training lookups on the code path of ids on a GPU; return the runner of its kernels."""
    with on_simulated_gpu() as runner:
        yield runner
