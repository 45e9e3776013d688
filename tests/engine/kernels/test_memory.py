"""Memory of compiled code by its address."""

from __future__ import annotations

from numba import njit

from bitslab.engine.kernels.cpu.memory import load_signed, stack_memory, store_signed


def test_memory_of_the_stack_is_written_by_its_user_alone() -> None:
    memory = stack_memory(1 << 12)

    @njit  # type: ignore[untyped-decorator]
    def kept(place: int, number: int) -> int:
        at = memory()
        store_signed(at + 8 * place, number)
        return load_signed(at + 8 * place) + (at & 63)

    assert [kept(place, 7) for place in (0, 1, 511)] == [7, 7, 7]
    (code,) = kept.inspect_llvm().values()
    assert "[4096 x i8]" in code and "memset" not in code
