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
        return load(at + 8 * place) + (at & 63)

    kept: Any = njit(written)
    assert [kept(place, 7) for place in (0, 1, 511)] == [7, 7, 7]
    (code,) = kept.inspect_llvm().values()
    assert "[4096 x i8]" in code and "memset" not in code
