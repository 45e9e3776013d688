"""Pairs of a plain module and the cached one that must do the same, and comparison bit for bit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bitslab.embedding import CachedRows
from bitslab.integrations.embedding import CachedEmbedding, CachedEmbeddingBag
from tests.helpers import same_bits

N, D = 50, 8
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
Optimizers = Callable[[Any], torch.optim.Optimizer]


def table(n: int = N, width: int = D, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draw rows of no two alike; trained tables look like that."""
    rows = torch.randn(n, width, generator=torch.Generator().manual_seed(n + width))
    return (rows / 20).to(dtype)


def bags(
    dtype: torch.dtype = torch.float32, cache_ratio: float = 0.2, n: int = N, **options: Any
) -> tuple[torch.nn.EmbeddingBag, CachedEmbeddingBag]:
    """Make an nn.EmbeddingBag and what stands for it; options of the cache are known by name."""
    cached = _cache_options(options)
    plain = torch.nn.EmbeddingBag(n, D, _weight=table(n, dtype=dtype), **options)
    ours = CachedEmbeddingBag.from_module(plain, cache_ratio=cache_ratio, **cached)
    return plain, ours


def singles(
    dtype: torch.dtype = torch.float32, cache_ratio: float = 0.2, n: int = N, **options: Any
) -> tuple[torch.nn.Embedding, CachedEmbedding]:
    """Make an nn.Embedding and what stands for it."""
    cached = _cache_options(options)
    plain = torch.nn.Embedding(n, D, _weight=table(n, dtype=dtype), **options)
    return plain, CachedEmbedding.from_module(plain, cache_ratio=cache_ratio, **cached)


def _cache_options(options: dict[str, Any]) -> dict[str, Any]:
    names = (
        "evict_strategy",
        "cache",
        "freeze",
        "layout",
        "codec",
        "ids_freq_mapping",
        "buffer_size",
        "warmup_ratio",
    )
    return {name: options.pop(name) for name in names if name in options}


def batches(count: int, n_ids: int = 12, n: int = N, seed: int = 0) -> list[torch.Tensor]:
    """Draw ids, low ones more often, with repetitions."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(count, n_ids, generator=generator)
    return list((drawn**2 * n).long())


def whole(module: torch.nn.Module) -> torch.Tensor:
    """Return the table of a plain or a cached module."""
    rows = getattr(module, "rows", None)
    if isinstance(rows, CachedRows):
        return rows.whole()
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach()


def assert_same(a: torch.Tensor, b: torch.Tensor, what: object = "") -> None:
    """Compare dtype, shape and bits."""
    assert a.dtype == b.dtype and a.shape == b.shape, (what, a.dtype, b.dtype, a.shape, b.shape)
    assert same_bits(a, b), (what, (a.double() - b.double()).abs().max().item())


def step(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor
) -> torch.Tensor:
    """Take a step on a loss with another gradient for every element; return the output."""
    optimizer.zero_grad()
    out = lookup(module, ids)
    loss_of(out).backward()
    optimizer.step()
    return out.detach()


def lookup(module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Look ids up, three to a bag where there are bags."""
    if isinstance(module, (torch.nn.EmbeddingBag, CachedEmbeddingBag)):
        found: torch.Tensor = module(ids, torch.arange(0, len(ids), 3))
    else:
        found = module(ids)
    return found


def loss_of(out: torch.Tensor) -> torch.Tensor:
    """Weigh elements of an output differently."""
    scale = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
    return (out.double() * scale).square().sum() + (out.double() * scale).sum()


def train_both(
    plain: torch.nn.Module,
    ours: torch.nn.Module,
    make: Optimizers,
    given: Sequence[torch.Tensor],
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Train both modules on the same batches; every output must be the same."""
    theirs, mine = make(plain.parameters()), make(ours.parameters())
    for number, ids in enumerate(given):
        assert_same(step(ours, mine, ids), step(plain, theirs, ids), number)
    assert_same(whole(ours), whole(plain), "table")
    return theirs, mine


class Peak:
    """The most private memory of this process while a block runs, beyond that before it."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.bytes, self._began, self._over = 0, _private_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self._look()

    def _look(self) -> None:
        self.bytes = max(self.bytes, _private_bytes() - self._began)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()  # the thread may not have run beside what holds the interpreter


def _private_bytes() -> int:
    # Not the peak of all, which has the packed table and the mapped file in it.
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon"):
                return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")
