"""Memory of compiled code by its address."""

from __future__ import annotations

from typing import Any

from numba import njit

from bitslab.engine.kernels.cpu.memory import load_signed, stack_memory, store_signed


def test_memory_of_the_stack_is_written_by_its_user_alone() -> None:
    memory: Any = stack_memory(1 << 12)
    store: Any = store_signed
    load: Any = load_signed

    def written(place: Any, number: Any) -> Any:
        at = memory()
        store(at + 8 * place, number)
        # Of any place, so that a compiler cannot drop zeros as never read.
        return at & 63, load(at + 8 * number)

    kept: Any = njit(written)
    assert [kept(place, place) for place in (0, 1, 511)] == [(0, 0), (0, 1), (0, 511)]
    (code,) = kept.inspect_llvm().values()
    assert "[4096 x i8]" in code and "memset" not in code
