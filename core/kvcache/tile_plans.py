"""TilePlans: codecs of tiles for the K and V of one layer, fitted to an error, or lossless."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..engine.codecs import RowCodec
from ..engine.codecs.quantized import (
    AttentionFit,
    Measured,
    NothingSeenError,
    TileCodec,
    fit_error,
    fit_lossless,
    fit_tiles,
)
from ..engine.kernels.tile_format import Granularity
from ..errors import ArgumentError, ArgumentTypeError
from .model_codecs import KeptCodec
from .packing import LEAST_GAIN, Plans, TokenRows, draw_rows

#: Where the steps of K and V come from, by the name of an option.
GRANULARITIES = {
    "weighted": (Granularity.CHANNEL, Granularity.TOKEN_LEVEL),
    "block": (Granularity.BLOCK_RANGE, Granularity.TOKEN_RANGE),
    "channel": (Granularity.CHANNEL_RANGE, Granularity.TOKEN_RANGE),
    "token": (Granularity.TOKEN_RANGE, Granularity.TOKEN_RANGE),
}
#: Step over range, for an error of 1, where no queries tell what a step does: on SmolLM2 they cause
#: about that error up to 0.15.
RANGE_SCALES = {
    Granularity.BLOCK_RANGE: 0.45,
    Granularity.CHANNEL_RANGE: 2.0,
    Granularity.TOKEN_RANGE: 1.5,
}
CODERS = ("huffman", "fixed", "lossless")
#: Tokens of a tile, where blocks have as many.
TILE_TOKENS = 64
#: The last queries of a prompt that are kept for the fit.
QUERIES = 64
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class TileOptions:
    """How K and V are quantised and coded.

    Parameters
    ----------
    error : float
        Relative error of the outputs of attention that is aimed at; 0 for lossless codecs.
    key_scale, value_scale : float, optional
        Steps that are taken instead, in the units of `granularity`.
    granularity : str
        A key of GRANULARITIES.
    coder : {"huffman", "fixed", "lossless"}
        How codes are written; ``"lossless"``: tiles are lossless, and `error` is not used.
    sinks, window, block_tokens : int
        As in `PackedHistory`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For options out of range, and of another type.
    """

    error: float = 0.055
    key_scale: float | None = None
    value_scale: float | None = None
    granularity: str = "weighted"
    coder: str = "huffman"
    sinks: int = 4
    window: int = 128
    block_tokens: int = 64

    def __post_init__(self) -> None:
        _check_number("error", self.error, 0.0, 1.0, zero=True)
        for name in ("key_scale", "value_scale"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), 0.0, 64.0)
        if self.granularity not in GRANULARITIES:
            raise ArgumentError(
                f"granularity: {self.granularity!r:.60}, accepted are "
                f"{', '.join(map(repr, GRANULARITIES))}"
            )
        if self.coder not in CODERS:
            raise ArgumentError(
                f"coder: {self.coder!r:.60}, accepted are {', '.join(map(repr, CODERS))}"
            )
        steps = self.granularity, self.key_scale, self.value_scale
        if self.lossless_tiles and steps != ("weighted", None, None):
            raise ArgumentError(
                "granularity, key_scale, value_scale: lossless tiles have no steps; accepted are "
                "those of other coders"
            )
        if not self.error and (self.key_scale is None) != (self.value_scale is None):
            raise ArgumentError(
                "error: 0 keeps all tokens lossless; accepted with key_scale and value_scale, or "
                "with neither"
            )
        if not self.lossless and self.block_tokens < 16:
            raise ArgumentError(
                f"block_tokens: {self.block_tokens}, accepted are powers of two from 16 to 4096"
            )

    @property
    def lossless(self) -> bool:
        """Whether there are no tiles, as nothing is quantised."""
        scales = self.key_scale, self.value_scale
        return not self.error and scales == (None, None) and not self.lossless_tiles

    @property
    def lossless_tiles(self) -> bool:
        """Whether tiles are lossless."""
        return self.coder == "lossless"

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return min(TILE_TOKENS, self.block_tokens)

    @property
    def tiles_per_block(self) -> int:
        """Tiles of one head in a block."""
        return self.block_tokens // self.tile_tokens

    def unfit(self, keys: torch.Tensor, values: torch.Tensor) -> str:
        """Return why K and V ``[B, H, n, D]`` cannot be tiles, or nothing."""
        dim = keys.shape[-1]
        if keys.dtype not in DTYPES or values.dtype != keys.dtype:
            return f"dtype {keys.dtype} and {values.dtype}: tiles are bfloat16, float16 or float32"
        if self.lossless_tiles and keys.dtype.itemsize != 2:
            return f"dtype {keys.dtype}: lossless tiles are bfloat16 or float16"
        if values.shape[-1] != dim:
            return f"head_dim {dim} of K and {values.shape[-1]} of V: tiles of both are alike"
        if dim % 16 or not 16 <= dim <= 256:
            return f"head_dim {dim}: tiles have multiples of 16 up to 256"
        return ""


def _check_number(
    name: str, value: object, least: float, most: float, *, zero: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(f"{name}: expected a number, got {value!r:.60}")
    if not (least < value <= most or (zero and value == 0)):
        first = f"{least:g} to" if zero else f"numbers above {least:g} up to"
        raise ArgumentError(f"{name}: {value}, accepted are {first} {most:g}")


class TilePlans:
    """Fits the codecs of the K and V of one layer.

    With `learn` both are fitted together to an error of attention, before the first tokens are
    packed; those of lossless tiles, which take no queries, with `learn_lossless`. Without it, as
    without queries, steps are by range. Where tokens become larger, codecs are fitted again with
    the same scales.

    Parameters
    ----------
    options : TileOptions
        How they are quantised.
    lossless : Plans
        Fits the codecs of a layer whose error cannot be met.
    name : str
        The layer, for messages.

    Attributes
    ----------
    options, name
        As given.
    heads, dim : int
        H and D, to be set before the first fit.
    measured : Measured or None
        What was measured when the codecs were learnt.
    why_lossless : str
        Why tokens are kept lossless; "" where they are quantised.
    why_unmeasured : str
        Why nothing was learnt from the queries that were given.
    """

    why_unmeasured = ""  # of plans that were pickled without it
    _sampled = False  # whether lossless tiles were fitted to a prompt

    def __init__(self, options: TileOptions, lossless: Plans, name: str) -> None:
        self.options = options
        self._lossless = lossless
        self.name = name
        self.heads = self.dim = 0
        self.reset()

    def reset(self) -> None:
        """Forget what was learnt."""
        self.measured: Measured | None = None
        self.why_lossless = self.why_unmeasured = ""
        self._learnt: dict[str, KeptCodec] = {}
        self._sampled = False
        self._weights: torch.Tensor | None = None

    @property
    def learns(self) -> bool:
        """Whether `learn`, of lossless tiles `learn_lossless`, has not been called yet."""
        if self._learnt or self._sampled:
            return False
        return not self.why_lossless and not self.why_unmeasured

    @property
    def takes_queries(self) -> bool:
        """Whether codecs are learnt by `learn`, which takes queries."""
        return self.options.coder != "lossless"

    def learn_lossless(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fit the codecs of K and V of lossless tiles, but for what these do not pack.

        Parameters
        ----------
        keys, values : torch.Tensor
            ``[B, H, T, D]``, a block or more of tokens that are to be packed, and others.
        """
        o = self.options
        rows = TokenRows(self.heads, self.dim, keys.dtype, o.block_tokens, o.tile_tokens)
        for kind, tokens in (("k", keys), ("v", values)):
            whole = tokens.shape[2] // o.block_tokens * o.block_tokens
            sample = draw_rows(rows, tokens[:, :, :whole])
            codec = self.fit(kind, sample)
            share = float(codec.packed_bytes(sample).sum()) / sample.nbytes
            if share < 1 - LEAST_GAIN:
                self._learnt[kind] = KeptCodec(codec, share)
        self._sampled = True

    def learn(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        queries: torch.Tensor,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        first_valid: torch.Tensor | None = None,
        sink_logits: torch.Tensor | None = None,
    ) -> None:
        """Fit the codecs of K and V.

        Where padding hides all tokens that are to be coded from all queries nothing is learnt, and
        steps are those of a layer without queries.

        Parameters
        ----------
        keys, values : torch.Tensor
            ``[B, H, T, D]``, all tokens so far, as they came.
        queries : torch.Tensor
            ``[B, query heads, n, D]`` of the last tokens.
        scaling, softcap : float, optional
            As attention has them.
        first_valid : torch.Tensor, optional
            ``[B]``: the first token of each sequence that is no padding.
        sink_logits : torch.Tensor, optional
            ``[query heads]``: as attention has them.
        """
        o = self.options
        of_keys, of_values = GRANULARITIES[o.granularity]
        try:
            found: AttentionFit | None = fit_error(
                keys,
                values,
                queries,
                error=o.error or 1.0,  # both scales are given then
                key_scale=o.key_scale,
                value_scale=o.value_scale,
                tile_tokens=o.tile_tokens,
                key_granularity=of_keys,
                value_granularity=of_values,
                sinks=o.sinks,
                window=o.window,
                scaling=scaling,
                softcap=softcap,
                first_valid=first_valid,
                sink_logits=sink_logits,
                rows_per_head=o.tiles_per_block,
                coder=o.coder,
            )
        except NothingSeenError:
            self.why_unmeasured = "no query of the prompt sees a token that is packed, for padding"
            return
        if found is None:
            sound = [torch.isfinite(t).all() for t in (keys, values, queries)]
            if sink_logits is not None:  # -inf is one that takes no share
                sound.append((sink_logits < math.inf).all())
            if all(map(bool, sound)):
                self.why_lossless = f"no steps kept the error of attention under {o.error:g}"
            else:
                self.why_lossless = "a NaN or an infinity in what the steps were to be learnt from"
            return
        self.measured = found.measured
        self._weights = found.weights
        values_of_tile = o.tile_tokens * keys.shape[3]
        bits = 8 * keys.itemsize
        for kind, plan, expected in (
            ("k", found.keys, found.measured.key_bits),
            ("v", found.values, found.measured.value_bits),
        ):
            codec = TileCodec(plan, (values_of_tile,))
            self._learnt[kind] = KeptCodec(codec, min(1.0, expected / bits))

    def fit(self, kind: str, sample: torch.Tensor, *, search_all: bool = False) -> RowCodec:
        """Return a codec for tiles like those of a sample.

        Parameters
        ----------
        kind : str
            ``"k"`` or ``"v"``.
        sample : torch.Tensor
            ``[n, tokens * D]``, all tiles of some blocks.
        search_all : bool
            Of lossless codecs.
        """
        if self.why_lossless:
            return self._lossless.fit(kind, sample, search_all=search_all)
        o = self.options
        tiles = sample.view(-1, self.heads, o.block_tokens, self.dim)
        if o.lossless_tiles:
            plan = fit_lossless(
                tiles,
                tile_tokens=o.tile_tokens,
                token_pairs=kind == "v",
                rows_per_head=o.tiles_per_block,
            )
            return TileCodec(plan, (sample.shape[1],))
        granularity, scale = self._steps(kind)
        weighted = granularity is Granularity.CHANNEL and kind == "k"
        plan = fit_tiles(
            tiles,
            tile_tokens=o.tile_tokens,
            granularity=granularity,
            token_pairs=kind == "v",
            scale=scale,
            weights=self._weights if weighted else None,
            rows_per_head=o.tiles_per_block,
            coder=o.coder,
        )
        return TileCodec(plan, (sample.shape[1],))

    def _steps(self, kind: str) -> tuple[Granularity, float]:
        """Return granularity and scale of a codec that is fitted without queries, or again."""
        learnt = self._learnt.get(kind)
        if learnt is not None:
            assert isinstance(learnt.codec, TileCodec)
            return learnt.codec.plan.format.granularity, learnt.codec.plan.scale
        o, which = self.options, "kv".index(kind)
        granularity = GRANULARITIES[o.granularity][which]
        given = (o.key_scale, o.value_scale)[which]
        if given is not None:
            return granularity, given
        if granularity not in RANGE_SCALES:
            granularity = GRANULARITIES["channel"][which]
        return granularity, RANGE_SCALES[granularity] * o.error

    def of(self, kind: str) -> LearntCodec:
        """Return what gives a history of a kind the codec that was learnt."""
        return LearntCodec(self, kind)

    def learnt(self, kind: str) -> KeptCodec | None:
        """Return the codec that was learnt, and the share that tiles are expected to take."""
        return self._learnt.get(kind)


@dataclass(frozen=True)
class LearntCodec:
    """The first codec of a history, as `TilePlans` has learnt it."""

    plans: TilePlans
    kind: str
    tells = False

    @property
    def name(self) -> str:
        """The layer and kind."""
        return f"{self.plans.name}, {self.kind}"

    def get(self, dtype: torch.dtype, row_bytes: int) -> KeptCodec | None:
        """Return the codec that was learnt, if any."""
        found = self.plans.learnt(self.kind)
        if found is None or found.codec.dtype != dtype or found.codec.row_bytes != row_bytes:
            return None
        return found

    def put(self, dtype: torch.dtype, row_bytes: int, codec: RowCodec, share: float) -> None:
        """Keep what was learnt."""

    def drop(self, dtype: torch.dtype, row_bytes: int) -> None:
        """Keep what was learnt."""
