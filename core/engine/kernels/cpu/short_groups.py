"""A group of 32 chunks of one or two bytes encoded at once, in SIMD registers.

What `groups.decode_group` is for decoding, for the chunks that `shorts` encodes: a group of 32 has
whole words of payload and of codes, so that groups do not touch each other's words. Addresses are
integers, of any alignment; nothing is checked, so callers have to know what they may touch.

As with bits.py, whoever changes this file has to clear ``__pycache__``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..format import CODE_BITS, GROUP_CHUNKS
from .groups import splat, vector, zero
from .memory import load

#: Runs of bits, as `constants.runs_of` returns them, that a payload may have.
MAX_RUNS = 3
#: Values that have a code at the most; absent ones repeat the first.
MOST_VALUES = (1 << max(CODE_BITS)) - 1
# What `encode_short_group` writes, int64 each: the codes, then the payloads of four chunks each.
CODES, PAYLOADS = 0, 2
RESULT_NUMBERS = PAYLOADS + GROUP_CHUNKS // 4

_INT = ir.IntType(32)
_LONG = ir.IntType(64)
_SHORT = ir.IntType(16)


def _joined(builder: Any, x: Any, bits: Any) -> Any:
    """Join neighbours of a vector, each of so many bits, to one number of twice the width."""
    half, count = x.type.element.width, x.type.count // 2
    x = builder.bitcast(x, vector(2 * half, count))
    kind = x.type.element
    low = builder.and_(x, splat(builder, kind((1 << half) - 1), count))
    high = builder.lshr(x, splat(builder, kind(half), count))
    shift = bits if kind.width == 64 else builder.trunc(bits, kind)
    return builder.or_(low, builder.shl(high, splat(builder, shift, count)))


def _codes_of(builder: Any, x: Any, mask: Any, values: Any) -> Any:
    """Return the code of each chunk: the first value that its masked bits equal, from 1, or 0."""
    masked = builder.and_(x, splat(builder, builder.trunc(mask, _SHORT), GROUP_CHUNKS))
    codes = zero(x.type)
    # The last one that is put in is kept: that of the first of equal values.
    for code in range(MOST_VALUES, 0, -1):
        value = splat(builder, load(builder, values, _SHORT, 2 * (code - 1)), GROUP_CHUNKS)
        equal = builder.icmp_unsigned("==", masked, value)
        codes = builder.select(equal, splat(builder, _SHORT(code), GROUP_CHUNKS), codes)
    return codes


def _load_group(builder: Any, at: Any, width: int) -> Any:
    """Return 32 chunks as numbers of 16 bits."""
    x = load(builder, at, vector(width, GROUP_CHUNKS))
    return x if width == 16 else builder.zext(x, vector(16, GROUP_CHUNKS))


def _missing(builder: Any, codes: Any) -> Any:
    """Return a word with a bit set for each chunk of code 0."""
    found = builder.icmp_unsigned("==", codes, zero(codes.type))
    return builder.zext(builder.bitcast(found, _INT), _LONG)


@intrinsic
def find_exceptions(typing_context: Any, like: Any, at: Any, mask: Any, values: Any) -> Any:
    """Return a word with a bit set for each of 32 chunks that has no code.

    Parameters are those of `encode_short_group`.
    """
    width = like.bitwidth

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, at, mask, values = args
        return _missing(builder, _codes_of(builder, _load_group(builder, at, width), mask, values))

    i = types.int64
    return types.uint64(like, i, i, i), build


@intrinsic
def encode_short_group(
    typing_context: Any,
    like: Any,
    at: Any,
    mask: Any,
    values: Any,
    runs: Any,
    payload_bits: Any,
    code_bits: Any,
    result: Any,
) -> Any:
    """Encode 32 chunks; return a word with a bit set for each that has no code.

    Parameters
    ----------
    like : integer
        Any number as wide as a chunk, 8 or 16 bits.
    at : int64
        Address of the chunks.
    mask : int64
        The mask.
    values : int64
        Address of MOST_VALUES values, 16 bits each.
    runs : int64
        Address of MAX_RUNS pairs of int64: where a run of the payload's bits goes, as a mask, and
        how far it is moved there. A mask of 0 stands for no run.
    payload_bits, code_bits : int64
        Bits of the payload of a chunk, and of a code.
    result : int64
        Address of RESULT_NUMBERS numbers of 64 bits: the bits of all codes, then those of the
        payloads of four chunks in each.
    """
    width = like.bitwidth

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, at, mask, values, runs, payload_bits, code_bits, result = args
        x = _load_group(builder, at, width)
        codes = _codes_of(builder, x, mask, values)

        def put(place: int, value: Any) -> None:
            address = builder.add(result, _LONG(8 * place))
            builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=8)

        payload = zero(x.type)
        for run in range(MAX_RUNS):
            kept, shift = (
                splat(builder, load(builder, runs, _SHORT, 16 * run + 8 * i), GROUP_CHUNKS)
                for i in range(2)
            )
            payload = builder.or_(payload, builder.and_(builder.lshr(x, shift), kept))
        twice = builder.add(payload_bits, payload_bits)
        put(PAYLOADS, _joined(builder, _joined(builder, payload, payload_bits), twice))

        joined = builder.trunc(codes, vector(8, GROUP_CHUNKS))
        bits = code_bits
        for _ in range(3):
            joined = _joined(builder, joined, bits)
            bits = builder.add(bits, bits)
        eighths = [builder.extract_element(joined, _INT(i)) for i in range(4)]
        low, high = (builder.or_(eighths[i], builder.shl(eighths[i + 1], bits)) for i in (0, 2))
        half = builder.add(bits, bits)
        put(CODES, builder.or_(low, builder.shl(high, half)))
        # Of 96 bits the last 32; of fewer there is nothing behind the first 64.
        put(CODES + 1, builder.lshr(high, builder.sub(_LONG(64), half)))
        return _missing(builder, codes)

    i = types.int64
    return types.uint64(like, i, i, i, i, i, i, i), build


@intrinsic
def store_byte_payloads(typing_context: Any, result: Any, target: Any) -> Any:
    """Write the payloads of a group, of 8 bits each, from what `encode_short_group` wrote."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fours = load(builder, args[0], vector(64, GROUP_CHUNKS // 4), 8 * PAYLOADS)
        x = builder.trunc(fours, vector(32, GROUP_CHUNKS // 4))
        builder.store(x, builder.inttoptr(args[1], x.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build
