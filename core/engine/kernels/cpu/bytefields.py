"""Decoding rows whose field is one byte, with no branch that depends on data.

The field of float32 and bfloat16 rows mostly is their exponent: eight bits, next to a payload of
whole bytes. On such a row `decode_byte_row` does what `fields.decode_field_row` does, with the same
bytes out, but puts all exceptions of 32 chunks in at once: the codes become bytes, these bytes look
up the values, and an instruction of AVX-512 (VBMI2) spreads the exceptions over the places whose
code is 0. `serves` says for which rows, `available` on which processors; all others are decoded
by fields.py.

Nothing behind a row is read. What is read is asked for well ahead of its turn, and a line of the
cache that nobody has asked for costs more time than all the rest of a short row.

As with bits.py, whoever changes this file has to clear ``__pycache__``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ..format import GROUP_CHUNKS, RowFormat
from .bits import GROUP, bits_of
from .fields import FIELD_BITS, FIRST_FIELD_RUN, FIRST_RUN, FIXED, KIND
from .groups import WHOLE_BYTES, concatenated, shuffle, splat, vector, zero
from .jit import compiles_for, njit
from .memory import load, load_signed

VALUES_BYTES = 16  # of what the codes of a cluster stand for
_AT_ONCE = 8  # exceptions in one read
_FEATURES = ("avx512bw", "avx512vl", "avx512vbmi", "avx512vbmi2")

_BYTE = ir.IntType(8)
_INT = ir.IntType(32)
_LONG = ir.IntType(64)


def available() -> bool:
    """Return whether Numba compiles for a processor that has the instructions used here."""
    return compiles_for(*_FEATURES)


def serves(numbers: np.ndarray[Any, Any], row: RowFormat) -> bool:
    """Return whether rows are of this kind; see `constants.Field.numbers`.

    That is rows of whole groups, whose codes are all stored: more would have to be looked at in
    each of them. Shorter ones there are none, so what is read before the end of a part lies inside.
    """
    if row.grouped or row.chunks % GROUP_CHUNKS:
        return False
    wanted = {
        KIND: WHOLE_BYTES,
        FIRST_RUN: 0,
        FIELD_BITS: 8,
        FIRST_FIELD_RUN: 255,
        FIRST_FIELD_RUN + 2: 0,
    }
    return all(bool((numbers[:, place] == number).all()) for place, number in wanted.items())


def values_of(by_code: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return what `decode_byte_row` reads for values ``[K, values]``: uint8 ``[K, VALUES_BYTES]``.

    By code, with 0 for code 0.
    """
    values = np.zeros((len(by_code), VALUES_BYTES), np.uint8)
    shifts = numbers[:, FIRST_FIELD_RUN + 1].astype(by_code.dtype)
    values[:, 1 : 1 + by_code.shape[1]] = by_code >> shifts[:, None]
    return values


def _call(builder: Any, name: str, *arguments: Any) -> Any:
    """Call an intrinsic of LLVM that returns what its first argument is."""
    kind = ir.FunctionType(arguments[0].type, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _read_payload(builder: Any, at: Any, width: int) -> Any:
    """Return payloads of all bytes but one, their last byte once more above them."""
    chunks = vector(width, GROUP_CHUNKS)
    if width == 16:
        block = load(builder, at, vector(8, GROUP_CHUNKS))
        places = [j // 2 for j in range(2 * GROUP_CHUNKS)]
        return builder.bitcast(shuffle(builder, block, block, places), chunks)
    halves = []
    # Of 96 bytes the first 64 and the last 64.
    for first, skipped in ((0, 0), (32, 16)):
        block = load(builder, at, vector(8, 64), first)
        places = []
        for j in range(GROUP_CHUNKS // 2):
            places += [skipped + 3 * j + byte for byte in (0, 1, 2, 2)]
        halves.append(shuffle(builder, block, block, places))
    return builder.bitcast(concatenated(builder, halves), chunks)


def _ways_to_read_codes() -> bytearray:
    """Return three vectors for codes of each number of bits from 0 to 3.

    Where the bytes of 8 codes go, all of which end with byte 15, one to 64 bits; how far each code
    is shifted there; and a mask of the bits that are kept of it.
    """
    found = []
    for bits in range(4):
        first = 16 - 4 * bits
        places = [first + j // 8 * bits + j % 8 for j in range(GROUP_CHUNKS)]
        # What stands above the 8 codes is not looked at.
        found += [min(15, place) for place in places]
        found += [j % 8 * bits for j in range(GROUP_CHUNKS)]
        found += [(1 << bits) - 1] * GROUP_CHUNKS
    return bytearray(found)


def _read_codes(builder: Any, end: Any, code_bits: Any) -> Any:
    """Return the 32 codes that end at an address as bytes."""
    some = vector(8, GROUP_CHUNKS)
    found = _ways_to_read_codes()
    text = ir.Constant(ir.ArrayType(_BYTE, len(found)), found)
    ways = builder.ptrtoint(cgutils.global_constant(builder, ".ways_to_read_codes", text), _LONG)
    way = builder.add(ways, builder.mul(code_bits, _LONG(3 * GROUP_CHUNKS)))
    places, shifts, fixed = (load(builder, way, some, GROUP_CHUNKS * i) for i in range(3))
    block = load(builder, end, vector(8, 16), -16)
    block = shuffle(builder, block, block, 2 * list(range(16)))
    x = _call(builder, "llvm.x86.avx2.pshuf.b", block, places)
    x = _call(builder, "llvm.x86.avx512.pmultishift.qb.256", shifts, x)
    return builder.and_(x, fixed)


def _put_in(builder: Any, x: Any, missing: Any, exceptions: Any, end: Any) -> Any:
    """Return bytes with exceptions in the places that a word of 32 bits names.

    The 8 bytes at hand go to the lowest of these places; where there are more places, that is done
    again for the next 8, and so on.
    """
    before = builder.block
    loop = builder.append_basic_block("exceptions")
    more = builder.append_basic_block("more_exceptions")
    done = builder.append_basic_block("no_more_exceptions")
    last = builder.sub(end, _LONG(_AT_ONCE))
    builder.branch(loop)
    builder.position_at_end(loop)
    old, rest, at = builder.phi(x.type), builder.phi(_INT), builder.phi(_LONG)
    inside = builder.icmp_signed("<", at, last)
    read_at = builder.select(inside, at, last)
    passed = builder.and_(builder.mul(builder.sub(at, read_at), _LONG(8)), _LONG(63))
    word = builder.lshr(load(builder, read_at, _LONG), passed)
    words = builder.insert_element(zero(vector(64, 4)), word, _INT(0))
    places = builder.bitcast(rest, vector(1, GROUP_CHUNKS))
    name = "llvm.x86.avx512.mask.expand.v32i8"
    new = _call(builder, name, builder.bitcast(words, x.type), old, places)
    many = builder.icmp_unsigned(">", builder.ctpop(rest), _INT(_AT_ONCE))
    builder.cbranch(many, more, done)
    builder.position_at_end(more)
    fewer = rest
    for _ in range(_AT_ONCE):
        fewer = builder.and_(fewer, builder.sub(fewer, _INT(1)))
    following = builder.add(at, _LONG(_AT_ONCE))
    builder.branch(loop)
    for phi, first, again in ((old, x, new), (rest, missing, fewer), (at, exceptions, following)):
        phi.add_incoming(first, before)
        phi.add_incoming(again, more)
    builder.position_at_end(done)
    return new


@intrinsic  # type: ignore[untyped-decorator]
def decode_byte_group(
    typing_context: Any,
    like: Any,
    payload_at: Any,
    fixed: Any,
    shift: Any,
    codes_end: Any,
    code_bits: Any,
    values: Any,
    exceptions: Any,
    end: Any,
    target: Any,
) -> Any:
    """Decode 32 chunks; return how many of them are exceptions.

    Parameters
    ----------
    like : integer
        Any number as wide as a chunk, 16 or 32 bits.
    payload_at : int64
        Address of the payload: 32 or 96 bytes.
    fixed : int64
        The mask of the bits that are in place once they are read.
    shift : int64
        Where the field's lowest bit goes.
    codes_end : int64
        Address of the end of the codes, with 16 readable bytes before it.
    code_bits : int64
        1 to 3.
    values : int64
        Address of VALUES_BYTES bytes, by code.
    exceptions, end : int64
        Addresses of the first exception and of the row's end, with 8 readable bytes before that.
        Exceptions behind the end show in what is returned; what is written is then undefined.
    target : int64
        Address of 32 chunks.
    """
    width = like.bitwidth

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, payload_at, fixed, shift, codes_end, code_bits, values, exceptions, end, target = args
        x = _read_payload(builder, payload_at, width)
        kind = ir.IntType(width)
        x = builder.and_(x, splat(builder, builder.trunc(fixed, kind), GROUP_CHUNKS))
        codes = _read_codes(builder, codes_end, code_bits)
        missing = builder.icmp_unsigned("==", codes, zero(codes.type))
        missing = builder.bitcast(missing, _INT)
        table = load(builder, values, vector(8, VALUES_BYTES))
        table = shuffle(builder, table, table, 2 * list(range(VALUES_BYTES)))
        field = _call(builder, "llvm.x86.avx2.pshuf.b", table, codes)
        field = _put_in(builder, field, missing, exceptions, end)
        moved = splat(builder, builder.trunc(shift, kind), GROUP_CHUNKS)
        x = builder.or_(x, builder.shl(builder.zext(field, x.type), moved))
        builder.store(x, builder.inttoptr(target, x.type.as_pointer()), align=1)
        return builder.zext(builder.ctpop(missing), _LONG)

    i = types.int64
    return i(like, i, i, i, i, i, i, i, i, i), build


@njit(nogil=True, cache=True, forceinline=True)
def decode_byte_row(like, row, most, field, values, code_bits, chunks, target):
    """Rebuild a row that starts at an address and has `most` words at most.

    All but the first of these are addresses or numbers: `like` any number as wide as a chunk,
    `field` as for `fields.decode_field_row`, `values` the row of `values_of`, `target` where the
    row goes.

    Returns the row's words, or -1 when its codes ask for more than `most`.
    """
    fixed = load_signed(field + 8 * FIXED)
    shift = load_signed(field + 8 * (FIRST_FIELD_RUN + 1))
    chunk_bytes = bits_of(like) >> 3
    groups = chunks >> 5
    end = row + 4 * most
    codes_at = row + GROUP * (chunk_bytes - 1) * groups
    exception = codes_at + 4 * code_bits * groups
    if exception > end:
        return np.int64(-1)
    read_at = row
    for _ in range(groups):
        codes_at += 4 * code_bits
        exception += decode_byte_group(
            like,
            read_at,
            fixed,
            shift,
            codes_at,
            code_bits,
            values,
            exception,
            end,
            target,
        )
        read_at += GROUP * (chunk_bytes - 1)
        target += GROUP * chunk_bytes
    return (exception + 3 - row) >> 2 if exception <= end else np.int64(-1)
