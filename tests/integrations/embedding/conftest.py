"""What holds for the tests of embedding modules."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def small_tables(one_thread: None) -> None:
    """Let torch work alone."""
