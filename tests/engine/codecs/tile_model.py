"""Coded tiles once more, slowly, from the text of `tile_format` and nothing else of `core/`.

`encode` and `decode` take the configuration of a `TileCodec`. Numbers are numpy's, one operation at
a time; bits are strings of "0" and "1".
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

F = np.float32
LANES, BLOCK, UNIT = 32, 16, 16


class Damaged(Exception):
    """The words are no tile."""


@dataclass
class Model:
    """A configuration, read."""

    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        c = self.config
        self.tokens, self.dim = c["tokens"], c["dim"]
        self.heads, self.per_head = c["heads"], c["rows_per_head"]
        self.dtype: torch.dtype = getattr(torch, c["dtype"])
        self.wide = self.dtype.itemsize == 4
        self.kind = c["granularity"]
        self.order = self._read("order", np.uint8, self.dim)
        self.block_class = self._read("block_class", np.uint8, self.dim // BLOCK)
        self.codes = [
            canonical(np.frombuffer(base64.b64decode(text), np.uint8).tolist())
            for text in c["lengths"]
        ]
        self.longest = [max(len(code) for code in codes.values()) for codes in self.codes]
        if self.kind == "channel":
            self.steps = self._read("steps", "<f4", self.dim)
            self.centers = self._read("centers", "<f4", self.dim)
        k = np.arange(256)
        self.level_steps = (2.0 ** ((k - 192) / 8)).astype(F)
        self.level_squares = (2.0 ** ((k[1:] - 192 - 0.5) / 4)).astype(F)
        self.parameter_words = {
            "channel": 0,
            "token_level": self.tokens // 4,
            "block_range": 1,
            "channel_range": self.dim,
            "token_range": self.tokens,
            "lossless": 0,
        }[self.kind]
        self.escape = -127 if self.kind == "lossless" else 0  # the code of exceptions
        self.plane_words = self.tokens * self.dim // 4 if self.kind == "lossless" else 0

    def _read(self, key: str, dtype: Any, width: int) -> np.ndarray:
        array: np.ndarray = np.frombuffer(base64.b64decode(self.config[key]), dtype)
        return array.reshape(-1, width)

    def head(self, row: int) -> int:
        return int((row // self.per_head) % self.heads)

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Round float32 to the dtype, as float32."""
        result: np.ndarray = torch.from_numpy(values).to(self.dtype).float().numpy()
        return result

    def asked(self, head: int) -> list[tuple[int, int, int, list[tuple[int, int]]]]:
        """Return symbols in the order of a warp.

        Of each the lane, the class, how many bits must be there before it (0 where no lane asks),
        and token and position of each value.
        """
        symbols = []
        for b in range(self.dim // BLOCK):
            c = int(self.block_class[head, b])
            longest = self.longest[c]
            needs = [2 * longest, 0] if longest <= 8 else [longest, longest]
            for j in range(self.tokens // BLOCK):
                for i in range(4):
                    pairs = []
                    for lane in range(LANES):
                        g, t = divmod(lane, 4)
                        row, column = g + 8 * (i % 2), 2 * t + 8 * (i // 2)
                        if self.config["token_pairs"]:
                            position = 16 * b + row
                            token = 16 * j + column
                            pairs.append([(token, position), (token + 1, position)])
                        else:
                            token = 16 * j + row
                            position = 16 * b + column
                            pairs.append([(token, position), (token, position + 1)])
                    if self.config["radius"][c]:
                        need = needs[i % 2]
                        symbols += [(lane, c, need, pair) for lane, pair in enumerate(pairs)]
                    else:
                        for k in (0, 1):
                            symbols += [(lane, c, needs[k], [p[k]]) for lane, p in enumerate(pairs)]
        return symbols

    def symbol(self, c: int, codes: list[int]) -> int:
        radius = self.config["radius"][c]
        if not radius:
            return codes[0] + 128
        return int((codes[0] + radius) * (2 * radius + 1) + codes[1] + radius)

    def values(self, c: int, symbol: int) -> list[int]:
        radius = self.config["radius"][c]
        if not radius:
            return [symbol - 128]
        first, second = divmod(symbol, 2 * radius + 1)
        return [first - radius, second - radius]

    # Planes

    def split(self, bits: np.ndarray, head: int) -> tuple[np.ndarray, np.ndarray]:
        """Return codes and bytes of lossless values ``[tokens, dim]`` by position; 128: none."""
        placed = bits.reshape(self.tokens, self.dim)[:, self.order[head]].astype(np.int64)
        finite = torch.from_numpy(placed.astype(np.int16)).view(self.dtype).isfinite().numpy()
        codes = np.where(finite, placed // 128 % 256 - 127, 128)
        return codes, placed % 128 + placed // 32768 * 128

    def plane_places(self, head: int) -> list[tuple[int, int]]:
        """Return token and position of each byte of a plane."""
        by_lane: dict[int, list[tuple[int, int]]] = {lane: [] for lane in range(LANES)}
        for lane, _, _, places in self.asked(head):
            by_lane[lane] += places
        found = []
        for group in range(self.tokens * self.dim // 256):
            for i in (0, 1):
                for lane in range(LANES):
                    begin = 8 * group + 4 * i
                    found += by_lane[lane][begin : begin + 4]
        return found

    # Parameters

    def parameters(self, x: np.ndarray, head: int) -> list[int]:
        """Return the words of the parameters of a tile ``[tokens, dim]`` by channel."""
        if self.kind in ("channel", "lossless"):
            return []
        if self.kind == "token_level":
            levels = [self.level(token) for token in x]
            return [
                sum(level << 8 * k for k, level in enumerate(levels[w : w + 4]))
                for w in range(0, self.tokens, 4)
            ]
        if self.kind == "block_range":
            return [self.range_word(x.ravel())]
        if self.kind == "channel_range":
            return [self.range_word(x[:, channel]) for channel in self.order[head]]
        return [self.range_word(token) for token in x]

    def level(self, token: np.ndarray) -> int:
        lanes = [F(0)] * LANES
        for channel, value in enumerate(token):
            square = F(value) * F(value) if np.isfinite(value) else F(0)
            lanes[channel % LANES] = F(lanes[channel % LANES] + square)
        for across in (16, 8, 4, 2, 1):
            lanes = [F(lanes[k] + lanes[k ^ across]) for k in range(LANES)]
        scale = self.config["scale"]
        square = F(F(lanes[0] * F(1 / self.dim)) * F(scale * scale))
        return int((self.level_squares <= square).sum())

    def range_word(self, values: np.ndarray) -> int:
        finite = values[np.isfinite(values)]
        step, center = torch.tensor(1.0), torch.tensor(0.0)
        if len(finite):
            least, largest = F(finite.min()), F(finite.max())
            middle = torch.tensor(F(F(0.5) * least) + F(F(0.5) * largest)).bfloat16()
            width = torch.tensor(F(self.config["scale"]) * F(largest - least)).bfloat16()
            if width > 0 and width.isfinite():
                step = width
            if middle != 0 and middle.isfinite():
                center = middle
        bits = [int(t.bfloat16().view(torch.int16)) & 0xFFFF for t in (center, step)]
        return bits[0] | bits[1] << 16

    def scales(self, words: list[int], head: int) -> tuple[np.ndarray, np.ndarray]:
        """Return step and center of each value, ``[tokens, dim]`` by position."""
        shape = self.tokens, self.dim
        if self.kind == "channel":
            steps, centers = self.steps[head], self.centers[head]
        elif self.kind == "token_level":
            levels = [words[t // 4] >> 8 * (t % 4) & 255 for t in range(self.tokens)]
            steps, centers = self.level_steps[levels][:, None], np.zeros((1, 1), F)
        else:
            pairs = np.array(words, np.uint32)
            steps = (pairs & np.uint32(0xFFFF0000)).view(F)
            centers = (pairs << np.uint32(16)).view(F)
            if self.kind == "token_range":
                steps, centers = steps[:, None], centers[:, None]
        return np.broadcast_to(steps, shape).astype(F), np.broadcast_to(centers, shape).astype(F)

    # Tiles

    def encode(self, row: torch.Tensor, number: int) -> list[int] | None:
        """Return the words of a tile; None where it is kept raw."""
        with np.errstate(all="ignore"):
            return self._encode(row, number)

    def _encode(self, row: torch.Tensor, number: int) -> list[int] | None:
        head = self.head(number)
        bits = self.raw(row)
        if self.kind == "lossless":
            codes, low = self.split(bits, head)
            plane = [int(low[place]) for place in self.plane_places(head)]
            whole = np.where(codes < 128, codes, self.escape)
            return self.tile(whole, codes == 128, [], plane, bits, head)
        x = row.reshape(self.tokens, self.dim).float().numpy()
        words = self.parameters(x, head)
        steps, centers = self.scales(words, head)
        order = self.order[head]
        placed = x[:, order]
        radius = np.array(self.config["radius"])[self.block_class[head]]
        limits = np.repeat(np.where(radius, radius, 127), BLOCK)
        inverse = (F(1) / steps).astype(F)
        codes = np.rint((placed - centers) * inverse)
        fits = np.abs(codes) <= limits
        codes = np.where(fits, codes, 0).astype(F)
        decoded = self.rounded(centers + steps * codes)
        unit, least = {
            torch.bfloat16: (2.0**-8, 2.0**-126),
            torch.float16: (2.0**-11, 2.0**-14),
            torch.float32: (2.0**-24, 2.0**-126),
        }[self.dtype]
        allowed = F(0.5) * steps + F(unit) * np.maximum(np.abs(decoded), F(least))
        fits &= (np.abs(decoded - placed) <= allowed) & np.isfinite(decoded)
        return self.tile(np.where(fits, codes, 0).astype(int), ~fits, words, [], bits, head)

    def tile(
        self,
        whole: np.ndarray,
        missed: np.ndarray,
        words: list[int],
        plane: list[int],
        bits: np.ndarray,
        head: int,
    ) -> list[int] | None:
        """Return the words of a tile of codes, exceptions, parameters and the bytes of a plane."""
        order = self.order[head]
        exceptions = {(t, int(order[p])) for t, p in np.argwhere(missed)}
        written: list[list[str]] = [[] for _ in range(LANES)]
        given: list[list[int]] = [[] for _ in range(LANES)]  # units by lane, in their order
        left, taken = [0] * LANES, 0
        for lane, c, need, places in self.asked(head):
            symbol = self.symbol(c, [int(whole[place]) for place in places])
            if symbol not in self.codes[c]:
                exceptions |= {(t, int(order[p])) for t, p in places}
                symbol = self.symbol(c, [self.escape] * len(places))
            code = self.codes[c][symbol]
            if left[lane] < need:
                given[lane].append(taken)
                taken += 1
                left[lane] += UNIT
            left[lane] -= len(code)
            written[lane].append(code)
        units = [0] * (taken + taken % 2)
        for lane in range(LANES):
            stream = "".join(written[lane]).ljust(UNIT * len(given[lane]), "0")
            for k, unit_number in enumerate(given[lane]):
                units[unit_number] = int(stream[UNIT * k : UNIT * (k + 1)], 2)
        at = sorted(t * self.dim + channel for t, channel in exceptions)
        result = [taken | len(at) << 16, *words]
        result += [low | high << 16 for low, high in zip(units[::2], units[1::2], strict=True)]
        result += np.array(plane, np.uint8).view("<u4").tolist()
        for position in at:
            value = int(bits[position])
            result += [position, value] if self.wide else [position | value << 16]
        return result if len(result) < self.tokens * self.dim * self.dtype.itemsize // 4 else None

    def raw(self, row: torch.Tensor) -> np.ndarray:
        """Return the bits of a tile's values."""
        flat = row.contiguous().view(-1)
        return (
            flat.view(torch.int32 if self.wide else torch.int16)
            .numpy()
            .view(np.uint32 if self.wide else np.uint16)
        )

    def decode(self, words: list[int], number: int) -> np.ndarray:
        """Return the bits of a tile's values; raise `Damaged` where the words are none."""
        with np.errstate(all="ignore"):
            return self._decode(words, number)

    def _decode(self, words: list[int], number: int) -> np.ndarray:
        head = self.head(number)
        if len(words) < 1 + self.parameter_words:
            raise Damaged("no parameters")
        count, n_exceptions = words[0] & 0xFFFF, words[0] >> 16
        begin = 1 + self.parameter_words
        after_units = begin + (count + 1) // 2
        behind = after_units + self.plane_words
        size = 2 if self.wide else 1
        if behind + n_exceptions * size > len(words):
            raise Damaged("more words than there are")
        units = [u for word in words[begin:after_units] for u in (word & 0xFFFF, word >> 16)][
            :count
        ]
        symbols = [{code: symbol for symbol, code in codes.items()} for codes in self.codes]
        streams, taken = [""] * LANES, 0
        codes = np.zeros((self.tokens, self.dim), F)
        for lane, c, need, places in self.asked(head):
            if len(streams[lane]) < need:
                if taken == count:
                    raise Damaged("no unit left")
                streams[lane] += f"{units[taken]:016b}"
                taken += 1
            for length in range(1, self.longest[c] + 1):
                symbol = symbols[c].get(streams[lane][:length])
                if symbol is not None:
                    break
            else:
                raise Damaged("no code")
            streams[lane] = streams[lane][length:]
            for place, code in zip(places, self.values(c, symbol), strict=True):
                codes[place] = code
        if taken != count:
            raise Damaged("units left over")
        if self.kind == "lossless":
            plane = np.array(words[after_units:behind], "<u4").view(np.uint8)
            joined = np.zeros((self.tokens, self.dim), np.uint16)
            for byte, (t, p) in zip(plane.tolist(), self.plane_places(head), strict=True):
                value = (int(codes[t, p]) + 127) * 128 + byte % 128 + byte // 128 * 32768
                joined[t, self.order[head][p]] = value
            bits = joined.ravel()
        else:
            steps, centers = self.scales(words[1:begin], head)
            values = np.empty((self.tokens, self.dim), F)
            values[:, self.order[head]] = centers + steps * codes
            bits = self.raw(torch.from_numpy(values).to(self.dtype)).copy()
        last = -1
        for e in range(n_exceptions):
            word = words[behind + size * e]
            position = word if self.wide else word & 0xFFFF
            if not last < position < self.tokens * self.dim:
                raise Damaged("exceptions")
            last = position
            bits[position] = words[behind + size * e + 1] if self.wide else word >> 16
        return bits


def canonical(lengths: list[int]) -> dict[int, str]:
    """Return the canonical codes of symbols as strings of bits."""
    codes, code, before = {}, 0, 0
    for length, symbol in sorted((n, s) for s, n in enumerate(lengths) if n):
        code <<= length - before
        codes[symbol] = f"{code:0{length}b}"
        code, before = code + 1, length
    return codes
