"""What a token costs the host in a cache: calls of Python functions, and launches, of a layer.

Calls vary with nothing, unlike times; one takes 0.1 to 0.2 us. On the code path of a GPU, whose
kernels run on the CPU.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bitslab.integrations.transformers.attention import attention
from bitslab.kvcache import attending, joining
from bitslab.kvcache.segment import Segment
from tests.integrations.transformers.test_cache_offload import (  # noqa: F401
    DIM,
    HEADS,
    cache_of,
    crossing,
)
from tests.integrations.transformers.test_kvcomp_cache import Module
from tests.integrations.transformers.test_kvcomp_staged import gpu_path  # noqa: F401
from tests.simt.runner import SimtRunner, simt_kernels

pytestmark = pytest.mark.usefixtures("one_thread")

#: By cache and place: the most calls of a layer, and its kernels.
MOST: dict[tuple[str, Any], tuple[int, int]] = {
    ("lossless", True): (62, 1),
    ("lossless", False): (37, 1),
    ("kvcomp", True): (91, 3),
    ("kvcomp", False): (66, 3),
}
LAYERS = 6
#: Of torch, what launches nothing.
NO_LAUNCH = (
    "empty",
    "new_empty",
    "slice",
    "view",
    "detach",
    "alias",
    "as_strided",
    "permute",
    "transpose",
)
#: Hashes of kernels' variants, by which the tests find what they have compiled.
NOT_COUNTED = "bitslab.engine.kernels.cuda.source"


class Launches(TorchDispatchMode):
    """Counts what torch launches: copies from the host, and all else."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NO_LAUNCH:
            # Words are int32; tokens are not.
            words = name == "copy_" and args[0].dtype == torch.int32
            self.kinds["link" if words else "kernels"] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def kernels(crossing: None, monkeypatch: pytest.MonkeyPatch) -> SimtRunner:  # noqa: F811
    """Decode by the GPU's kernels, as attention does."""
    found, runner = simt_kernels()
    for module in (attending, joining):
        monkeypatch.setattr(module, "_gpu_kernels", lambda device: found)

    def decoding(segment: Any, words: Any, ids: Any, out: Any, budget: int | None) -> Any:
        target = out.view(-1, segment.rows.row_bytes)
        table = segment.new_table(words)
        return found.prepare_gather(table, segment.kernels.layout, ids, target, budget)

    monkeypatch.setattr(Segment, "decoding", decoding)
    return runner


def steps(cache: Any, kind: str, n: int = 1) -> Iterator[None]:
    """Run a pass; stop before and after what a layer does with its tokens.

    Of the same values each time: others may be packed by one codec more.
    """
    module, generator = Module(), torch.Generator().manual_seed(n)
    for layer in range(LAYERS):
        k, v = (torch.randn(1, HEADS, n, DIM, generator=generator) for _ in "kv")
        query = torch.randn(1, 2 * HEADS, n, DIM, generator=generator)
        yield
        keys, values = cache.update(k, v, layer)
        if kind == "kvcomp":
            attention(module, query, keys, values, None, scaling=0.3)
        yield


@pytest.mark.parametrize(("kind", "offload"), MOST, ids=str)
def test_calls_and_launches_of_a_token(kind: str, offload: bool, kernels: SimtRunner) -> None:
    most_calls, most_launches = MOST[kind, offload]
    cache = cache_of(kind, offload, window=16, block_tokens=64)
    if kind == "kvcomp":
        cache._hands._config._attn_implementation = "bitslab"
    for n in (150, *[1] * 12):  # the next block is packed later
        for _ in steps(cache, kind, n):
            pass
    segments = [len(history.segments) for x in cache.layers for history in x.histories]
    assert segments == [1] * 2 * LAYERS
    gc.collect()  # what earlier tests have left calls as it is freed
    gc.disable()
    try:
        counts = [calls_of(cache, kind) for _ in range(3)]
    finally:
        gc.enable()
    # The least: attention makes launches of other sizes ready every 16 tokens.
    fewest = min(counts, key=lambda calls: sum(calls.values()))
    assert 0 < sum(fewest.values()) <= most_calls * LAYERS, fewest.most_common(20)
    packed, before = cache.stats()["packed_tokens"], len(kernels.launched)
    step, launched = steps(cache, kind), Counter[str]()
    for _ in range(LAYERS):
        next(step)
        with Launches() as counted:
            next(step)
        launched += counted.kinds
    assert cache.stats()["packed_tokens"] == packed
    assert launched["kernels"] + len(kernels.launched) - before == most_launches * LAYERS
    # One copy of K and one of V, where their words lie in one piece of memory.
    words = [history.words for layer in cache.layers for history in layer.histories]
    pieces = [len(w.transfers(torch.empty(w.n_words))) for w in words if w.crosses]
    assert launched["link"] == sum(pieces)
    assert len(pieces) == (2 * LAYERS if offload else 0)


def calls_of(cache: Any, kind: str) -> Counter[str]:
    """Return the calls of a pass."""
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        module = str(frame.f_globals.get("__name__"))
        if event == "call" and module.startswith("bitslab.") and module != NOT_COUNTED:
            calls[f"{module}.{frame.f_code.co_name}"] += 1

    step, before = steps(cache, kind), sys.getprofile()
    for _ in range(LAYERS):
        next(step)
        sys.setprofile(count)
        try:
            next(step)
        finally:
            sys.setprofile(before)
    return calls
