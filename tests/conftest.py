"""What holds for every test: GPU tests without a GPU, and how hypothesis draws."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

import bitslab

# Asserts outside test_*.py say what differed only when pytest rewrites them.
pytest.register_assert_rewrite("tests.codecs.contract", "tests.codecs.model")

# Without a choice DGL writes one to the home folder when it is imported.
os.environ.setdefault("DGLBACKEND", "pytorch")

# The first example compiles kernels, which no deadline allows for. CI draws the same examples every
# time, so that no change is blamed for what was there before it.
settings.register_profile("bitslab", deadline=None, max_examples=60)
settings.register_profile("bitslab-ci", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("bitslab-ci" if os.environ.get("CI") else "bitslab")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="marked gpu, and torch sees no CUDA GPU on this machine")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def no_error_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test on a GPU ends with no error pending there."""
    yield
    if request.node.get_closest_marker("gpu"):
        bitslab.raise_pending_errors()


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let nothing that torch.compile has made reach a test, and none of the test's another one."""
    # What torch traces for its own tools is a third of the time where pytest keeps it as well.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch compute alone: on little work its threads wait, more so beside another worker's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
