"""Free ranges beside a plain set of free bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bitslab.engine.memory.free_ranges import FreeRanges


@given(st.data())
def test_ranges_are_those_of_a_set_of_bytes(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 20))
    ranges, free = FreeRanges(size), set(range(size))
    taken: list[tuple[int, int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        kind = data.draw(st.sampled_from(["take", "give back", "grow"]))
        if kind == "take":
            n = data.draw(st.integers(1, 8))
            fits = [i for i in sorted(free) if set(range(i, i + n)) <= free]
            begin = ranges.find(n)
            assert begin == (fits[0] if fits else None)
            if begin is not None:
                ranges.take(begin, begin + n)
                free -= set(range(begin, begin + n))
                taken.append((begin, begin + n))
        elif kind == "grow":
            n = data.draw(st.integers(1, 8))
            free |= set(range(size, size + n))
            size += n
            ranges.grow(n)
        elif taken:
            begin, end = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
            ranges.give_back(begin, end)
            free |= set(range(begin, end))
        assert {i for begin, end in ranges for i in range(begin, end)} == free
        # Ascending, apart, none empty.
        edges = [edge for both in ranges for edge in both]
        assert edges == sorted(set(edges))
        assert ranges.free_bytes == len(free) and ranges.nbytes == size
        assert ranges.wholly_free == (bool(size) and len(free) == size)
