"""Format 1 of a coded tile: values of some tokens of one head, entropy-coded for a warp.

A tile is `tokens` tokens of one head, ``[tokens, dim]``: a row of a codec. Its values become small
integers (codes), these become symbols of canonical Huffman codes, and the bits of the symbols stand
in 32 streams, one for each lane of a warp, which hold just the values that the lane feeds to the
matrix instruction, in its order. All words are little-endian 32-bit.

Values. ``code = rint((x - center) * (1 / step))`` and ``decoded = center + step * code``, each
operation rounded to float32 on its own, `decoded` rounded to the delivered dtype (all to nearest,
ties to even). Where step and center come from is the tile's `Granularity`. A value that is not
finite, one whose code is beyond ``MAX_CODE`` or the radius of its class, one whose decoded value is
not finite, and one for which ``|decoded - x| <= 0.5 * step + u * max(|decoded|, m)`` does not hold
in float32, is an exception: its code is taken to be 0, and its bits stand raw behind the streams.
`u` is half a unit in the last place of 1 and `m` the least normal number of the dtype: 2 ** -8 and
2 ** -126 of bfloat16, 2 ** -11 and 2 ** -14 of float16, 2 ** -24 and 2 ** -126 of float32. Of a
symbol that then still has no code in its class both values (of single codes: the one) become
exceptions too; the symbol of code 0, of pairs of two of them, has a code in every class.

Of LOSSLESS tiles, whose dtype has two bytes, nothing is rounded. ``code = (bits >> 7 & 255) -
127``: of bfloat16 the exponent, of float16 the exponent and three bits of the significand. A value
that is not finite, and one whose symbol has no code, is an exception, with code -127, that of
zeros and of the smallest subnormal values, whose symbol, ESCAPE_SYMBOL, has a code in every class:
as an operand an exception is next to nothing. What is left of a value, ``(bits & 127) | (bits >> 8
& 128)``, sign and lowest bits, is its byte of the tile's plane; those of exceptions stand there
too.

Sums of TOKEN_LEVEL: the mean square of a token is that of its values in the order of channels,
those that are not finite taken as 0. Lane l sums the squares of channels l, l + 32, ... in that
order, each square and each sum rounded to float32; lanes are summed as a butterfly (each adds the
sum of lane ``l ^ 16``, then 8, 4, 2, 1), and the sum is multiplied by float32 ``1 / dim``, then by
float32 ``scale * scale`` (both worked out in float64 and rounded). Ranges: of the finite values, in
float32, ``center = 0.5 * least + 0.5 * largest`` and ``step = float32(scale) * (largest - least)``,
both rounded to bfloat16; then a step that is not positive and finite is 1, and a center that is 0
of either sign or not finite is +0. Without finite values step is 1 and center +0.

Channels. Channel ``order[head, p]`` stands at position p, so that channels that are spread alike
stand together. Sixteen positions are a block, whose symbols are those of one class,
``block_class[head, p // 16]``.

Symbols. A class has symbols for single codes (``radius == 0``; symbol ``code + 128``), or for pairs
of codes from ``-radius`` to ``radius``: symbol ``(first + radius) * (2 * radius + 1) + second +
radius``. LOSSLESS tiles have single codes alone. No code is longer than `code_bits`, nor than
``class_bits`` of its class. A stream's bits are read from the highest bit of each unit on.

Streams. With ``g = lane // 4`` and ``t = lane % 4`` a lane codes, for each block b of 16 positions,
each group j of 16 tokens and each i of 0 to 3, two values:

- pairs of channels (K): of token ``16 j + g + 8 (i % 2)`` the positions ``16 b + 2 t + 8 (i // 2)``
  and the next one: registers of the left operand of a 16 x 16 step whose rows are tokens;
- pairs of tokens (V): of position ``16 b + g + 8 (i % 2)`` the tokens ``16 j + 2 t + 8 (i // 2)``
  and the next one: rows are channels.

They are one symbol of a class of pairs, or two symbols, one after the other, of one of singles.
Lanes take their bits in units of 16. In blocks of a class of short codes, whose ``class_bits`` is
at most 8, each lane asks before every second of its symbols, the first, third, fifth, ... of a
block (of a group of 16 tokens it has 4 of pairs or 8 of singles, so that symbols read at one ask
are of one group): if it has fewer than ``2 * class_bits`` bits left, it takes the next unit of the
tile. In other blocks it asks before each symbol, and takes the next unit if it has fewer than
``class_bits`` bits left. One unit is always enough. Where several lanes take one at the same ask,
the lower one takes the first. So units stand in the order in which a warp asks for them, and
nothing says where a stream begins. Bits of a unit behind the last symbol are 0, as is the half of a
word behind the last unit. A reader finds a tile damaged that has no code where one is due, that
takes more or fewer units than its header says, that has more words than the row's length, or whose
exceptions lie outside the tile or not in ascending order.

Words of a tile: a header, units in its lower half, exceptions in its upper half; parameters (see
`Granularity`); units, two a word, the first in the lower half; the plane, of LOSSLESS tiles, in the
order in which lanes take it: for each block and group two times 32 words, ``32 * i + lane`` of
which holds the bytes of the lane's values at its steps ``2 * i`` and ``2 * i + 1``, the first one
lowest; exceptions, by position in the tile (``token * dim + channel``): of dtypes of two bytes one
word, the position in its lower half and the bits in its upper half, of float32 two words, position
and bits. A tile that would have as many words as its raw bytes is kept raw, as any row of a codec.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch

from ...errors import ArgumentError
from .format import ceil_div
from .uploads import uploaded

#: Lanes of a tile, each with a stream.
TILE_LANES = 32
#: Positions of a block, and tokens of a group: the depth and the rows of the matrix instruction.
TILE_BLOCK = 16
#: Bits of a unit of a stream.
UNIT_BITS = 16
#: A class has short codes up to that many bits: one unit is enough for two symbols.
SHORT_BITS = UNIT_BITS // 2
#: Classes of symbols of a codec, at the most.
MAX_CLASSES = 8
#: Bits of a code, at the most: a table of all of them stands in shared memory.
MAX_CODE_BITS = 10
#: Symbols of a class, at the most.
MAX_SYMBOLS = 1024
#: The symbol of a single code 0; codes of single symbols are -127 to 127.
ZERO_SYMBOL = 128
MAX_CODE = 127
#: Of lossless tiles: the lowest of the eight bits that are coded, and what code 0 stands for.
FIELD_AT = 7
FIELD_BIAS = 127
#: The symbol of lossless tiles that exceptions have: that of values whose coded bits are all 0.
ESCAPE_SYMBOL = ZERO_SYMBOL - FIELD_BIAS
#: The largest radius of pairs.
MAX_RADIUS = 15
#: Tables on a device begin at multiples of so many words.
_ALIGN_WORDS = 64
#: Steps of tokens are powers of two by eighths: step of level k is ``2 ** ((k - LEVEL_ZERO) / 8)``.
LEVELS = 256
LEVEL_ZERO = 192


class Granularity(IntEnum):
    """Where step and center of a value come from, and the parameters of a tile.

    - CHANNEL: from the codec, for each channel of a head; no parameters.
    - TOKEN_LEVEL: the step of a token is that of a level, center 0; four levels of 8 bits a word.
    - BLOCK_RANGE, CHANNEL_RANGE, TOKEN_RANGE: step and center of the tile, of each channel (by
      position) or of each token; a word each, bfloat16 center in its lower half, step in its upper.
    - LOSSLESS: there are none, codes are bits of the values; no parameters, but a plane.
    """

    CHANNEL = 0
    TOKEN_LEVEL = 1
    BLOCK_RANGE = 2
    CHANNEL_RANGE = 3
    TOKEN_RANGE = 4
    LOSSLESS = 5


@dataclass(frozen=True)
class TileFormat:
    """What kernels are compiled for.

    Parameters
    ----------
    tokens : int
        Tokens of a tile, a multiple of 16 up to 256.
    dim : int
        Channels of a head, a multiple of 16 up to 256.
    dtype : torch.dtype
        Of the values: bfloat16, float16 or float32.
    granularity : Granularity
        Where steps come from.
    token_pairs : bool
        Whether pairs are two tokens of a channel (V), or two channels of a token (K).
    code_bits : int
        Bits of the longest code, 1 to MAX_CODE_BITS.
    """

    tokens: int
    dim: int
    dtype: torch.dtype
    granularity: Granularity
    token_pairs: bool
    code_bits: int = MAX_CODE_BITS

    def __post_init__(self) -> None:
        for name in ("tokens", "dim"):
            size = getattr(self, name)
            if type(size) is not int or size % TILE_BLOCK or not TILE_BLOCK <= size <= 256:
                raise ArgumentError(f"{name}: {size!r:.60}, accepted are multiples of 16 up to 256")
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ArgumentError(
                f"dtype: {self.dtype}, accepted are torch.bfloat16, torch.float16, torch.float32"
            )
        if self.lossless and self.dtype.itemsize != 2:
            raise ArgumentError(
                f"dtype: {self.dtype}, accepted for lossless tiles are torch.bfloat16 and "
                "torch.float16"
            )
        if type(self.code_bits) is not int or not 1 <= self.code_bits <= MAX_CODE_BITS:
            raise ArgumentError(
                f"code_bits: {self.code_bits!r:.60}, accepted are 1 to {MAX_CODE_BITS}"
            )

    @property
    def lossless(self) -> bool:
        """Whether every value comes back bit for bit."""
        return self.granularity is Granularity.LOSSLESS

    @property
    def escape_symbol(self) -> int:
        """The symbol of single codes that exceptions have."""
        return ESCAPE_SYMBOL if self.lossless else ZERO_SYMBOL

    @property
    def blocks(self) -> int:
        """Blocks of 16 positions."""
        return self.dim // TILE_BLOCK

    @property
    def groups(self) -> int:
        """Groups of 16 tokens."""
        return self.tokens // TILE_BLOCK

    @property
    def values(self) -> int:
        """Values of a tile."""
        return self.tokens * self.dim

    @property
    def row_bytes(self) -> int:
        """Bytes of a raw tile."""
        return self.values * self.dtype.itemsize

    @property
    def parameter_words(self) -> int:
        """Words of the parameters of a tile."""
        return {
            Granularity.CHANNEL: 0,
            Granularity.TOKEN_LEVEL: ceil_div(self.tokens, 4),
            Granularity.BLOCK_RANGE: 1,
            Granularity.CHANNEL_RANGE: self.dim,
            Granularity.TOKEN_RANGE: self.tokens,
            Granularity.LOSSLESS: 0,
        }[self.granularity]

    @property
    def plane_words(self) -> int:
        """Words of the bytes that stand behind the units, as they are."""
        return self.values // 4 if self.lossless else 0

    @property
    def exception_words(self) -> int:
        """Words of an exception."""
        return 2 if self.dtype.itemsize == 4 else 1


@dataclass(frozen=True, eq=False)
class TileTables:
    """What kernels of tiles read besides rows, on one device.

    Row i of any storage is of head ``(i // rows_per_head) % heads``.

    Parameters
    ----------
    format : TileFormat
        Sizes.
    heads : int
        Heads, H.
    rows_per_head : int
        Consecutive rows of one head.
    scale : float
        TOKEN_LEVEL: step over root of the mean square of a token's finite values. Ranges: step over
        range. CHANNEL, LOSSLESS: not used.
    order : torch.Tensor
        int32 ``[H, dim]``: the channel at each position.
    steps, centers : torch.Tensor
        float32 ``[H, dim]`` by position, for CHANNEL; ``[0, 0]`` else.
    level_steps : torch.Tensor
        float32 ``[LEVELS]``: the step of each level, for TOKEN_LEVEL; ``[0]`` else.
    level_squares : torch.Tensor
        float32 ``[LEVELS - 1]``, ascending: a token has level k when k of them are at most
        ``scale * scale * mean square``; ``[0]`` else.
    block_class : torch.Tensor
        int32 ``[H, blocks]``: the class of each block of positions.
    radius : torch.Tensor
        int32 ``[classes]``: 0 for single codes, else the radius of pairs.
    class_bits : torch.Tensor
        int32 ``[classes]``: bits of the longest code of each class.
    codes : torch.Tensor
        int32 ``[classes, MAX_SYMBOLS]``: of each symbol its code in the lower 16 bits and the
        code's bits above; 0 for a symbol that has none.
    lookup : torch.Tensor
        int32 ``[classes, 2 ** code_bits]``: by the next bits the code's bits in the upper byte, the
        first code + 128 in the lowest byte and, of pairs, the second + 128 in the one above; 0
        where no code begins so.
    attend_codes, attend_blocks : torch.Tensor
        int32 ``[n]`` and ``[H, blocks, 4]``: the same for attention, see `attend_tables`.
    longest_codes : tuple of int
        `class_bits` on the host, which waits for no device to know them.
    """

    format: TileFormat
    heads: int
    rows_per_head: int
    scale: float
    order: torch.Tensor
    steps: torch.Tensor
    centers: torch.Tensor
    level_steps: torch.Tensor
    level_squares: torch.Tensor
    block_class: torch.Tensor
    radius: torch.Tensor
    class_bits: torch.Tensor
    codes: torch.Tensor
    lookup: torch.Tensor
    attend_codes: torch.Tensor
    attend_blocks: torch.Tensor
    longest_codes: tuple[int, ...]

    @property
    def classes(self) -> int:
        """Classes of symbols."""
        return self.radius.shape[0]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors."""
        return tuple(t for t in vars(self).values() if isinstance(t, torch.Tensor))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors)

    def to(self, device: torch.device) -> TileTables:
        """Return the tables on a device, one upload; see `uploads.in_stream_order`."""
        tables = {name: t for name, t in vars(self).items() if isinstance(t, torch.Tensor)}
        # All have elements of four bytes; each begins at a multiple of _ALIGN_WORDS of them.
        words = [ceil_div(t.numel(), _ALIGN_WORDS) * _ALIGN_WORDS for t in tables.values()]
        joined = torch.zeros(sum(words), dtype=torch.int32, device=self.order.device)
        for part, t in zip(torch.split(joined, words), tables.values(), strict=True):
            part[: t.numel()] = t.flatten().view(torch.int32)
        there = uploaded(joined, device)
        moved: dict[str, Any] = {
            name: part[: t.numel()].view(t.dtype).view(t.shape)
            for part, (name, t) in zip(torch.split(there, words), tables.items(), strict=True)
        }
        return replace(self, **moved)


#: Dtypes by the number that floats.cuh has for them.
TILE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Formats of tiles that tests compile: of each setting every value that makes a difference.
TILE_FORMATS = tuple(
    TileFormat(tokens, dim, TILE_DTYPES[kind], granularity, token_pairs, code_bits)
    for tokens, dim, kind, granularity, token_pairs, code_bits in (
        (64, 128, 0, Granularity.CHANNEL, False, 10),
        (64, 128, 0, Granularity.TOKEN_LEVEL, True, 10),
        (64, 64, 1, Granularity.CHANNEL, False, 10),
        (64, 64, 1, Granularity.TOKEN_LEVEL, True, 8),
        (64, 256, 2, Granularity.CHANNEL, False, 10),
        (64, 80, 0, Granularity.CHANNEL, True, 10),
        (64, 128, 0, Granularity.BLOCK_RANGE, False, 10),
        (64, 128, 0, Granularity.TOKEN_RANGE, True, 10),
        (32, 96, 2, Granularity.CHANNEL_RANGE, False, 9),
        (16, 16, 1, Granularity.TOKEN_RANGE, True, 10),
        (64, 128, 0, Granularity.LOSSLESS, False, 8),
        (64, 128, 0, Granularity.LOSSLESS, True, 10),
        (32, 80, 1, Granularity.LOSSLESS, True, 8),
    )
)
