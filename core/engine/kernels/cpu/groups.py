"""A group of 32 chunks decoded at once, in SIMD registers, and other work on 32 entries at once.

Numba has no word for vectors, so the functions here write LLVM's: vectors of any size, which LLVM
cuts to what the processor has, be that AVX-512, AVX2 or none. Addresses are integers, of any
alignment; nothing is checked, so callers have to know what they may read and write.

As with bits.py, whoever changes this file has to clear ``__pycache__``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..format import GROUP_CHUNKS
from .memory import load

# How the payload of a group is read.
NO_PAYLOAD = 0
WHOLE_BYTES = 1  # 3 of the 4 bytes of a chunk, or 1 of 2
WINDOWS = 2  # any other number of bits

# What may be read behind the end of a group's payload, its codes and an entry of `words_before`.
OVER_READ_BYTES = 16

_LONG = ir.IntType(64)
_INT = ir.IntType(32)


def vector(bits: int, count: int) -> Any:
    """Return the type of so many integers of so many bits."""
    return ir.VectorType(ir.IntType(bits), count)


def _constant(kind: Any, values: Any) -> Any:
    return ir.Constant(kind, list(values))


def zero(kind: Any) -> Any:
    """Return 0 of a type."""
    return ir.Constant(kind, None)


def shuffle(builder: Any, first: Any, second: Any, places: list[int]) -> Any:
    """Return the entries of two vectors that stand at `places`, the second behind the first."""
    return builder.shuffle_vector(first, second, _constant(vector(32, len(places)), places))


def splat(builder: Any, x: Any, count: int) -> Any:
    """Return a vector that holds `x` in all of its places."""
    one = ir.Constant(ir.VectorType(x.type, count), ir.Undefined)
    one = builder.insert_element(one, x, _INT(0))
    return shuffle(builder, one, one, [0] * count)


def concatenated(builder: Any, parts: list[Any]) -> Any:
    """Return vectors of one size, a power of two of them, as one."""
    while len(parts) > 1:
        places = list(range(2 * parts[0].type.count))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [shuffle(builder, *pair, places) for pair in pairs]
    return parts[0]


def _look_up(builder: Any, table: Any, places: Any) -> Any:
    """Return the entries of a vector that stand at `places`, a vector of numbers.

    Written for so many places as the table has entries, LLVM has one instruction for it.
    """
    count = table.type.count
    parts = []
    for first in range(0, places.type.count, count):
        some = shuffle(builder, places, places, list(range(first, first + count)))
        found = ir.Constant(table.type, ir.Undefined)
        for i in range(count):
            place = builder.zext(builder.extract_element(some, _INT(i)), _LONG)
            found = builder.insert_element(found, builder.extract_element(table, place), _INT(i))
        parts.append(found)
    return concatenated(builder, parts)


def _choose(builder: Any, key: Any, cases: dict[int, Callable[[], Any]]) -> Any:
    """Return what the case of a number gives; the last case serves any other number."""
    *known, last = cases.values()
    end = builder.append_basic_block("chosen")
    other = builder.append_basic_block("other")
    switch = builder.switch(key, other)
    blocks = [builder.append_basic_block("case") for _ in known]
    for number, block in zip(cases, blocks, strict=False):
        switch.add_case(_LONG(number), block)
    found = []
    for work, block in zip((*known, last), (*blocks, other), strict=True):
        builder.position_at_end(block)
        value = work()
        found.append((value, builder.block))
        builder.branch(end)
    builder.position_at_end(end)
    chosen = builder.phi(found[0][0].type)
    for value, block in found:
        chosen.add_incoming(value, block)
    return chosen


def _read_codes(builder: Any, at: Any, code_bits: int, width: int) -> Any:
    """Return the 32 codes at an address, one to a place of `width` bits.

    The bytes of each code go to its place, at least two of them, and are shifted there.
    """
    place = max(width, 16)
    block = load(builder, at, vector(8, 16))
    places = []
    for j in range(GROUP_CHUNKS):
        # What stands above the code is dropped below.
        first = code_bits * j // 8
        places += [first, first + 1] * (place // 16)
    x = shuffle(builder, block, block, places)
    x = builder.bitcast(x, vector(place, GROUP_CHUNKS))
    shifts = (code_bits * j % 8 for j in range(GROUP_CHUNKS))
    x = builder.lshr(x, _constant(x.type, shifts))
    x = builder.and_(x, _constant(x.type, [(1 << code_bits) - 1] * GROUP_CHUNKS))
    return x if place == width else builder.trunc(x, vector(width, GROUP_CHUNKS))


def _read_bytes(builder: Any, at: Any, width: int) -> Any:
    """Return payloads of 1 of 2 or 3 of 4 bytes, each in the low bits of its place.

    The last byte stands above them once more: moved by 8 bits, as a sign above its exponent is.
    """
    if width == 16:
        block = load(builder, at, vector(8, GROUP_CHUNKS))
        x = shuffle(builder, block, block, [j // 2 for j in range(2 * GROUP_CHUNKS)])
        return builder.bitcast(x, vector(64, GROUP_CHUNKS * width // 64))
    halves = []
    for half in range(2):
        block = load(builder, at, vector(8, 64), 48 * half)
        places = []
        for j in range(GROUP_CHUNKS // 2):
            places += [3 * j, 3 * j + 1, 3 * j + 2, 3 * j + 2]
        halves.append(shuffle(builder, block, block, places))
    x = concatenated(builder, halves)
    return builder.bitcast(x, vector(64, GROUP_CHUNKS * width // 64))


def _read_windows(builder: Any, at: Any, payload_bits: Any, width: int) -> Any:
    """Return payloads of `payload_bits` each, each in the low bits of its place.

    The chunks of 64 bits are read at once, shifted to bit 0, and then drawn apart: the upper half
    of them moves to the upper half of the 64 bits, and so on within each half.
    """
    count = GROUP_CHUNKS * width // 64
    share = builder.mul(payload_bits, _LONG(64 // width))
    x = ir.Constant(vector(64, count), ir.Undefined)
    for i in range(count):
        byte = builder.lshr(builder.mul(share, _LONG(i)), _LONG(3))
        window = load(builder, builder.add(at, byte), _LONG)
        x = builder.insert_element(x, window, _INT(i))
    bits = builder.mul(splat(builder, share, count), _constant(x.type, range(count)))
    x = builder.lshr(x, builder.and_(bits, _constant(x.type, [7] * count)))
    half = 32
    while half >= width:
        taken = builder.mul(payload_bits, _LONG(half // width))
        low = builder.sub(builder.shl(_LONG(1), taken), _LONG(1))
        low = builder.mul(low, _LONG(sum(1 << bit for bit in range(0, 64, 2 * half))))
        high = builder.shl(low, _LONG(half))
        move = splat(builder, builder.sub(_LONG(half), taken), count)
        unmoved = builder.and_(x, splat(builder, low, count))
        moves = builder.and_(builder.shl(x, move), splat(builder, high, count))
        x = builder.or_(unmoved, moves)
        half //= 2
    return x


def _deposit(builder: Any, x: Any, fixed: Any, runs: Any) -> Any:
    """Return ``x & fixed`` with runs of bits moved added: all ``(x & mask) << shift``.

    `fixed` is a mask, `runs` the address of masks and shifts, the last mask being 0.
    """
    count = x.type.count
    before = builder.block
    kept = builder.and_(x, splat(builder, fixed, count))
    head = builder.append_basic_block("run")
    loop = builder.append_basic_block("move")
    end = builder.append_basic_block("deposited")
    builder.branch(head)
    builder.position_at_end(head)
    run, done = builder.phi(_LONG), builder.phi(x.type)
    mask = load(builder, run, _LONG)
    builder.cbranch(builder.icmp_unsigned("!=", mask, _LONG(0)), loop, end)
    builder.position_at_end(loop)
    shift = splat(builder, load(builder, run, _LONG, 8), count)
    moved = builder.shl(builder.and_(x, splat(builder, mask, count)), shift)
    more = builder.or_(done, moved)
    following = builder.add(run, _LONG(16))
    builder.branch(head)
    for phi, first, again in ((run, runs, following), (done, kept, more)):
        phi.add_incoming(first, before)
        phi.add_incoming(again, loop)
    builder.position_at_end(end)
    return done


def _read_payload(builder: Any, at: Any, field: Any, width: int) -> Any:
    """Return the payload's bits of each chunk at their places."""
    kind, fixed, runs, payload_bits_at = field

    def none() -> Any:
        return zero(vector(64, GROUP_CHUNKS * width // 64))

    def whole_bytes() -> Any:
        return _deposit(builder, _read_bytes(builder, at, width), fixed, runs)

    def windows() -> Any:
        # Loaded here: LLVM would put what follows from it before the choice.
        payload_bits = load(builder, payload_bits_at, _LONG)
        x = _read_windows(builder, at, payload_bits, width)
        return _deposit(builder, x, fixed, runs)

    cases = {NO_PAYLOAD: none, WHOLE_BYTES: whole_bytes, WINDOWS: windows}
    if width not in (16, 32):
        del cases[WHOLE_BYTES]
    return builder.bitcast(_choose(builder, kind, cases), vector(width, GROUP_CHUNKS))


def _values_of_places(builder: Any, codes: Any, values: Any) -> Any:
    """Return what codes stand for; `values` is the address of a row of 32 for each code."""
    row_bytes = GROUP_CHUNKS * codes.type.element.width // 8
    none = zero(codes.type)
    chosen = [none, *(load(builder, values, codes.type, code * row_bytes) for code in range(1, 8))]
    # Of each pair of values bit 0 of the code takes one, of each pair of those bit 1, ...
    for bit in (1, 2, 4):
        set_ = builder.and_(codes, _constant(codes.type, [bit] * GROUP_CHUNKS))
        set_ = builder.icmp_unsigned("!=", set_, none)
        pairs = zip(chosen[1::2], chosen[::2], strict=True)
        chosen = [builder.select(set_, upper, lower) for upper, lower in pairs]
    return chosen[0]


def _values_of_table(builder: Any, codes: Any, values: Any) -> Any:
    """Return what codes stand for; `values` is the address of a `values_table`."""
    width = codes.type.element.width
    if width == 32:
        return _look_up(builder, load(builder, values, vector(32, 8)), codes)
    if width == 16:
        upper = builder.shl(codes, _constant(codes.type, [8] * GROUP_CHUNKS))
        codes = builder.or_(
            builder.or_(codes, upper), _constant(codes.type, [8 << 8] * GROUP_CHUNKS)
        )
    places = builder.bitcast(codes, vector(8, GROUP_CHUNKS * width // 8))
    found = _look_up(builder, load(builder, values, vector(8, 16)), places)
    return builder.bitcast(found, vector(width, GROUP_CHUNKS))


def values_table(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return eight values by code as `decode_group` looks them up.

    Of values of 16 bits the lower bytes and then the upper ones, of 8 bits twice the same: tables
    of 16 bytes are what many processors look up.
    """
    if values.itemsize == 2:
        return values.view(np.uint8).reshape(-1, 2).T.copy()
    return np.concatenate([values, values])


@intrinsic  # type: ignore[untyped-decorator]
def decode_group(
    typing_context: Any,
    like: Any,
    payload_at: Any,
    kind: Any,
    fixed: Any,
    runs: Any,
    payload_bits_at: Any,
    codes_at: Any,
    code_bits: Any,
    values: Any,
    each: Any,
    target: Any,
) -> Any:
    """Decode 32 chunks but for their exceptions; return a word with bit j set when j is one.

    Parameters
    ----------
    like : unsigned integer
        Any number of the type of a chunk.
    payload_at, codes_at : int64
        Addresses, with OVER_READ_BYTES readable behind what they hold.
    kind : int64
        How the payload is read.
    fixed, runs : int64
        Where the payload's bits go, in all chunks of 64 bits at once: the mask of those that are
        in place once they are read, and the address of masks and shifts that move the others, the
        last mask being 0.
    payload_bits_at : int64
        Address of the number of bits of a chunk's payload.
    code_bits : int64
        1 to 3; 0 where all codes are 1 and `codes_at` does not matter.
    values : int64
        Address of what codes stand for, with 0 for code 0: a `values_table`, or, with `each`,
        ``[8, 32]`` chunks, by code the value that each place takes.
    each : bool
        Whether places have values of their own; chunks of 64 bits always count as if they had.
    target : int64
        Address of 32 chunks.
    """
    width = like.bitwidth

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, payload_at, *field, codes_at, code_bits, values, each, target = args
        x = _read_payload(builder, payload_at, field, width)

        def read(bits: int) -> Callable[[], Any]:
            return lambda: _read_codes(builder, codes_at, bits, width)

        first = _constant(x.type, [1] * GROUP_CHUNKS)
        codes = _choose(builder, code_bits, {0: lambda: first, 1: read(1), 2: read(2), 3: read(3)})
        value_of = {
            1: lambda: _values_of_places(builder, codes, values),
            0: lambda: _values_of_table(builder, codes, values),
        }
        if width == 64:
            del value_of[0]
        x = builder.or_(x, _choose(builder, builder.zext(each, _LONG), value_of))
        builder.store(x, builder.inttoptr(target, x.type.as_pointer()), align=1)
        missing = builder.icmp_unsigned("==", codes, zero(codes.type))
        return builder.zext(builder.bitcast(missing, _INT), _LONG)

    i = types.int64
    return types.uint64(like, i, i, i, i, i, i, i, i, types.boolean, i), build


def _words_before(bits: int) -> Any:
    """Return the intrinsic for lengths of `bits` bits."""

    @intrinsic  # type: ignore[untyped-decorator]
    def words_before(typing_context: Any, lengths: Any, count: Any, row_words: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            at, count, row_words = args
            narrow, wide = vector(bits, GROUP_CHUNKS), vector(32, GROUP_CHUNKS)
            x = load(builder, at, narrow)
            limit = splat(builder, builder.trunc(count, ir.IntType(bits)), GROUP_CHUNKS)
            counted = builder.icmp_unsigned("<", _constant(narrow, range(GROUP_CHUNKS)), limit)
            raw = builder.and_(builder.icmp_unsigned("==", x, zero(narrow)), counted)
            raw_rows = builder.zext(builder.ctpop(builder.bitcast(raw, _INT)), _LONG)
            x = builder.zext(builder.select(counted, x, zero(narrow)), wide)
            name = f"llvm.vector.reduce.add.v{GROUP_CHUNKS}i32"
            kind = ir.FunctionType(_INT, [wide])
            add = cgutils.get_or_insert_function(builder.module, kind, name)
            packed_words = builder.zext(builder.call(add, [x]), _LONG)
            return builder.add(packed_words, builder.mul(raw_rows, row_words))

        return types.int64(types.int64, types.int64, types.int64), build

    return words_before


# Each returns the words of the first `count` of 32 rows, up to 31, whose lengths stand at an
# address: those of 8 bits or of 16 bits. A length of 0 stands for `row_words`.
words_before_8 = _words_before(8)
words_before_16 = _words_before(16)
