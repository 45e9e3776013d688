"""What holds for the tests of embedding modules."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Tables are so small here that the least cache is a usual one.
    mark = pytest.mark.filterwarnings("ignore:bitslab. cache_ratio=:UserWarning")
    for item in items:
        if __file__.removesuffix("conftest.py") in str(item.path):
            item.add_marker(mark, append=False)


@pytest.fixture(autouse=True)
def small_tables(one_thread: None) -> None:
    """Run torch on one thread."""
