"""TileCodec: tiles of entropy-coded values, quantised or lossless."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch

from ....errors import ArgumentError, CorruptedDataError
from ...kernels.row_kernels import RowKernels
from ...kernels.tile_format import MAX_CODE_BITS, Granularity, TileTables
from ...kernels.tile_rows import tile_kernels
from ..base import check_integer, check_rows_argument, check_tensor_argument
from ..words import WordRowCodec
from .config import MAX_HEADS, plan_from_config, plan_problem, plan_to_config
from .fit import fit_tiles
from .lossless import fit_lossless
from .plan import TilePlan, symbols_of
from .quantise import ranges, token_steps

#: By dtype: half a unit in the last place of 1, and the least normal number.
_ROUNDING = {
    torch.bfloat16: (2.0**-8, 2.0**-126),
    torch.float16: (2.0**-11, 2.0**-14),
    torch.float32: (2.0**-24, 2.0**-126),
}
#: What float32 may be off when a coder compares a distance with its bound, relative to the bound.
_COMPARISON = 2.0**-20


class TileCodec(WordRowCodec):
    """Entropy-coded tiles of K or V: quantised within a bound, or lossless.

    A row is a tile, some tokens of one head (KVComp, arXiv 2509.00579, section 3.1). Row i of what
    is packed together is of head ``(i // rows_per_head) % heads``; parts of it are packed from
    multiples of ``heads * rows_per_head`` on. See `bitslab.engine.kernels.tile_format` for the
    bytes. Make one with `TileCodec.fit`, or of a plan.

    The bound of an element is ``(step / 2 + u * max(|x|, m)) / (1 - u)``, where `step` is that of
    its channel, token or tile, `u` half a unit in the last place of 1 and `m` the least normal
    number of the dtype: half a step, and the rounding of what is delivered. Lossless tiles bring
    every value back bit for bit: their bound is 0. See `bounds`.

    Parameters
    ----------
    plan : TilePlan
        Steps, order of channels, classes and codes.
    row_shape : tuple of int, optional
        Shape of a row, ``(tokens, dim)`` or ``(tokens * dim,)``; the first when left out.

    Raises
    ------
    ArgumentError
        For a plan that is none, and another shape.

    Notes
    -----
    Immutable; threads may share it.
    """

    name: ClassVar[str] = "tiles"
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    error_bound: ClassVar[str | None] = "(step / 2 + u * max(|x|, m)) / (1 - u), lossless tiles 0"

    def __init__(self, plan: TilePlan, row_shape: tuple[int, ...] | None = None) -> None:
        problem = plan_problem(plan)
        if problem:
            raise ArgumentError(f"plan: {problem}")
        fmt = plan.format
        accepted = (fmt.tokens, fmt.dim), (fmt.values,)
        self.row_shape = accepted[0] if row_shape is None else tuple(row_shape)
        if self.row_shape not in accepted:
            raise ArgumentError(
                f"row_shape: {list(self.row_shape)}, accepted are {list(accepted[0])} and "
                f"{list(accepted[1])} for this plan"
            )
        self.plan = plan
        self.dtype = fmt.dtype

    @classmethod
    def fit(
        cls,
        sample: torch.Tensor,
        *,
        granularity: str = "token_level",
        scale: float = 0.5,
        heads: int = 1,
        rows_per_head: int = 1,
        token_pairs: bool = False,
        weights: torch.Tensor | None = None,
        coder: str = "huffman",
        code_bits: int = MAX_CODE_BITS,
    ) -> TileCodec:
        """Learn from sample tiles; see `fit_tiles` for tokens that are no tiles yet.

        Parameters
        ----------
        sample : torch.Tensor
            ``[N, tokens, dim]``, bfloat16, float16 or float32, on any device; N a multiple of
            ``heads * rows_per_head``, rows in the order in which they will be packed.
        granularity : str
            Where steps come from: ``"channel"``, ``"token_level"``, ``"block_range"``,
            ``"channel_range"``, ``"token_range"``, or ``"lossless"`` (see `Granularity`).
        scale : float
            Step: over the rms of a token (``"token_level"``), over the range (ranges), of a
            channel of weight 1, or over the rms of all where there are no weights (``"channel"``).
            Not used by lossless tiles, which have no `weights` and ``coder="huffman"``.
        heads, rows_per_head : int
            Row i is of head ``(i // rows_per_head) % heads``.
        token_pairs : bool
            Whether pairs are two tokens of a channel (V) or two channels of a token (K).
        weights : torch.Tensor, optional
            ``[heads, dim]``, for ``"channel"``: what an error of 1 in a channel does.
        coder : {"huffman", "fixed"}
            How codes are written.
        code_bits : int
            Bits of the longest code, 1 to 10.

        Raises
        ------
        ArgumentError
            For options out of range, and samples that are no such tiles.
        ArgumentTypeError
            When `sample` is no tensor, or an option of another type.
        """
        check_tensor_argument("sample", sample)
        check_integer("heads", heads, range(1, MAX_HEADS + 1))
        check_integer("rows_per_head", rows_per_head, range(1, MAX_HEADS + 1))
        names = {known.name.lower(): known for known in Granularity}
        if granularity not in names:
            raise ArgumentError(
                f"granularity: {granularity!r:.60}, accepted are {', '.join(map(repr, names))}"
            )
        period = heads * rows_per_head
        if sample.dim() != 3 or not sample.shape[0] or sample.shape[0] % period:
            raise ArgumentError(
                f"sample: {list(sample.shape)}, expected [N, tokens, dim] with N a multiple of "
                f"{period}, the rows of all heads"
            )
        tokens, dim = sample.shape[1:]
        tiles = sample.detach().reshape(-1, heads, rows_per_head * tokens, dim)
        if names[granularity] is Granularity.LOSSLESS:
            if weights is not None or coder != "huffman":
                raise ArgumentError(
                    f"coder: {coder!r:.60}, weights: {'none' if weights is None else 'given'}, "
                    "accepted for lossless tiles are 'huffman' and none"
                )
            return cls(
                fit_lossless(
                    tiles,
                    tile_tokens=tokens,
                    token_pairs=token_pairs,
                    rows_per_head=rows_per_head,
                    code_bits=code_bits,
                )
            )
        plan = fit_tiles(
            tiles,
            tile_tokens=tokens,
            granularity=names[granularity],
            token_pairs=token_pairs,
            scale=scale,
            weights=weights,
            rows_per_head=rows_per_head,
            coder=coder,
            code_bits=code_bits,
        )
        return cls(plan)

    # Properties

    @property
    def profile_bytes(self) -> int:
        """Bytes of what was learnt: steps and centers, order and classes, lengths of codes."""
        p = self.plan
        arrays = (p.order, p.steps, p.centers, p.block_class, p.radius)
        return sum(a.nbytes for a in arrays) + sum(symbols_of(int(r)) for r in p.radius)

    def describe(self) -> str:
        """Return the plan in a few words: ``tiles 64x128 token_level k10 8 classes``."""
        fmt = self.plan.format
        words = [self.name, f"{fmt.tokens}x{fmt.dim}", fmt.granularity.name.lower()]
        words += [f"k{fmt.code_bits}", f"{len(self.plan.radius)} classes"]
        return " ".join(words)

    def bounds(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the bound of each element; see the class.

        Parameters
        ----------
        rows : torch.Tensor
            ``[N, *row_shape]`` of the codec's dtype, on any device.

        Returns
        -------
        torch.Tensor
            float64 ``[N, *row_shape]`` on their device; 0 where an element is not finite, and of
            lossless tiles.
        """
        check_rows_argument(self, rows)
        fmt = self.plan.format
        if fmt.lossless:
            return torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
        given = rows.detach().cpu().reshape(-1, fmt.tokens, fmt.dim)
        step = _steps(given, self._tables)
        x = given.double()
        rounding, least = _ROUNDING[self.dtype]
        bound = 0.5 * step + rounding * x.abs().clamp(min=least)
        bound *= (1 + _COMPARISON) / (1 - rounding)
        return torch.where(x.isfinite(), bound, 0.0).view(rows.shape).to(rows.device)

    # Files and wires

    def to_config(self) -> dict[str, Any]:
        """Return row shape and plan as JSON-able values."""
        return {"row_shape": list(self.row_shape), **plan_to_config(self.plan)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TileCodec:
        """Build the codec that `to_config` described.

        Raises
        ------
        CorruptedDataError
            When the configuration is damaged.
        """
        if not isinstance(config, Mapping):
            raise CorruptedDataError(f"tiles: configuration is {config!r:.60}, expected a mapping")
        plan = plan_from_config(config)
        shape = config.get("row_shape")
        fmt = plan.format
        if shape not in ([fmt.tokens, fmt.dim], [fmt.values]):
            raise CorruptedDataError(
                f"tiles: row_shape is {shape!r:.60}, expected {[fmt.tokens, fmt.dim]} or "
                f"{[fmt.values]}"
            )
        return cls(plan, tuple(shape))

    @cached_property
    def _tables(self) -> TileTables:
        return self.plan.tables()

    def tables(self) -> TileTables:
        """Return the tables that the kernels read, on the CPU."""
        return self._tables

    def kernels(self, device: torch.device) -> RowKernels:
        """Return this package's kernels of tiles, with the codec's tables on a device."""
        return tile_kernels(self._tables, device)


def _steps(given: torch.Tensor, tables: TileTables) -> torch.Tensor:
    """Return the steps of tiles ``[N, tokens, dim]``, float64, of a shape that broadcasts."""
    fmt = tables.format
    if fmt.granularity is Granularity.CHANNEL:
        by_channel = tables.steps.gather(1, tables.order.long().argsort(dim=1))
        head = torch.arange(len(given)) // tables.rows_per_head % tables.heads
        steps = by_channel[head][:, None]
    elif fmt.granularity is Granularity.TOKEN_LEVEL:
        steps, _ = token_steps(given, tables.scale, tables.level_steps, tables.level_squares)
    else:
        steps = ranges(given[:, None], fmt, tables.scale)[0][:, 0]
    return steps.double()
