"""Rows times the weight of their type on a GPU, plain or packed; see typed_gemm.cu."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ..format import ceil_div
from ..typed_products import (
    CHUNK_TILES,
    GRADIENT_DEPTH,
    PRODUCT_DTYPES,
    SCHEDULES,
    TILE_COLUMNS,
    TILE_ROWS,
    Ints,
    PackedRows,
    pieces_of_types,
    schedules_of,
)
from ..uploads import Uploads
from .parameters import Address, Int64, Parameters, Value, in_order
from .product_source import RowSource, SharedMemory, SourceParameters, staged
from .runner import Launch, Runner
from .source import AnyVariant
from .tiles import THREADS, has_byte_field

#: Of a multiprocessor's shared memory what blocks cannot have: static arrays, the driver's part.
RESERVED_BYTES = 4 << 10


@dataclass(init=False)
class MultiplyRows(SourceParameters):
    """Parameters of `multiply_rows`.

    Those of the rows that are read; `bias` of the rows' dtype, int64 `scatter` ``[rows]``, and
    `scale` of the rows' dtype, or None.
    """

    kernel = "multiply_rows"

    n_tiles: Int64
    weight: Address
    weight_stride: Int64
    bias: Address
    bias_stride: Int64
    scatter: Address
    scale: Address
    out: Address
    out_stride: Int64


@dataclass(init=False)
class MultiplyGradient(SourceParameters):
    """Parameters of `multiply_gradient`: as `multiply_rows`, with int64 chunks ``[n, 2]`` of tiles.

    `g` has the gradient's rows, in the order of the tiles; `out` is float32
    ``[n, depth, width]``.
    """

    kernel = "multiply_gradient"

    chunk_tiles: Address
    g: Address
    g_stride: Int64
    out: Address


class TypedTiles:
    """How rows that are sorted by type are cut for typed products, on their device.

    Parameters
    ----------
    bounds : sequence of int
        The first row of each type, and the end.
    device : torch.device
        Where the rows are.
    uploads : Uploads, optional
        What brings tables there; one of its own when left out.
    tiles : torch.Tensor, optional
        The attribute, and more behind it, where that is on the device.

    Attributes
    ----------
    tiles : torch.Tensor
        int64 ``[tiles, 3]``: type, first row, and the end of the type's rows, of TILE_ROWS each.
    """

    def __init__(
        self,
        bounds: Sequence[int],
        device: torch.device,
        uploads: Uploads | None = None,
        tiles: torch.Tensor | None = None,
    ) -> None:
        self._bounds = bounds
        self._uploads = uploads or Uploads(device)
        if tiles is None:
            (self.tiles,) = self._uploads.of([torch.from_numpy(_tiles(self._ends, TILE_ROWS)[0])])
        else:
            n = sum([ceil_div(end - begin, TILE_ROWS) for begin, end in pairwise(bounds)])
            self.tiles = tiles.narrow(0, 0, n)
        self._chunks: tuple[torch.Tensor, torch.Tensor] | None = None

    @functools.cached_property
    def _ends(self) -> Ints:
        return np.array(self._bounds, np.int64)

    def chunks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what gradients of weights are summed by.

        Returns
        -------
        chunks : torch.Tensor
            int64 ``[chunks, 2]``: first tile of each, all of one type, and the end of its tiles.
            Each type has one or more; one without rows has one of no tile.
        starts : torch.Tensor
            int64 ``[types + 1]``: the first chunk of each type.
        """
        with self._uploads:  # another thread's may not be copied yet
            if self._chunks is None:
                _, first_tile = _tiles(self._ends, TILE_ROWS)
                kinds, begins, starts = pieces_of_types(first_tile, CHUNK_TILES, least=1)
                ends = np.minimum(begins + CHUNK_TILES, first_tile[1:][kinds])
                tables = [np.stack([begins, ends], 1), starts]
                chunks, first = self._uploads.of([torch.from_numpy(each) for each in tables])
                self._chunks = chunks, first
            return self._chunks

    @functools.cached_property
    def coarse(self) -> torch.Tensor:
        """int64 ``[tiles, 3]``: as `tiles`, of twice as many rows each; few products use them."""
        return torch.from_numpy(_tiles(self._ends, 2 * TILE_ROWS)[0]).to(self.tiles.device)


def _tiles(ends: Ints, rows: int) -> tuple[Ints, Ints]:
    """Return tiles of up to so many rows, and the first one of each type."""
    kinds, begins, first_tile = pieces_of_types(ends, rows, least=0)
    tiles = np.empty((len(kinds), 3), np.int64)
    tiles[:, 0] = kinds
    tiles[:, 1] = begins
    tiles[:, 2] = ends[1:][kinds]
    return tiles, first_tile


class TypedGemmKernels:
    """The kernels of typed_gemm.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launches: dict[tuple[AnyVariant, int, type[Parameters]], Launch] = {}
        self._plain: dict[Any, Launch] = {}

    def takes(self, x: torch.Tensor | PackedRows, depth: int, schedule: int = 0) -> bool:
        """Return whether there are kernels for rows of `depth` elements.

        Rows must fit shared memory, and be of PRODUCT_DTYPES. Packed ones are to have chunks of one
        element, in one cluster, and rows of whole 16 bytes. Which schedules take rows says
        `schedules_of`; of packed ones, another than the usual takes those whose mask is a byte.
        """
        if x.dtype not in PRODUCT_DTYPES:
            return False
        size = x.dtype.itemsize
        stage_words = 0
        if schedule not in schedules_of(size, isinstance(x, PackedRows)):
            return False
        if isinstance(x, PackedRows):
            shape = staged(x, schedule)
            if shape is None or (schedule and not has_byte_field(x.layout)):
                return False
            stage_words = shape.stage_words
        return self._fits(SharedMemory(depth, size, stage_words, schedule))

    def _fits(self, memory: SharedMemory) -> bool:
        most = self._runner.shared_bytes_per_multiprocessor - RESERVED_BYTES
        return memory.shared_bytes <= most

    def product(
        self,
        x: torch.Tensor | PackedRows,
        weight: torch.Tensor,
        tiles: TypedTiles,
        out: torch.Tensor,
        *,
        index: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        scatter: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        schedule: int = 0,
    ) -> None:
        """Multiply rows by the weight of their type; see `cpu.typed_products.multiply_rows`.

        ``out[scatter] = scale * (x[index] weight[type] + bias[type])``.

        Parameters
        ----------
        x : torch.Tensor or PackedRows
            ``[N, K]`` of one of PRODUCT_DTYPES, rows contiguous; what `takes` accepts.
        weight : torch.Tensor
            ``[types, K, M]`` of x's dtype, each contiguous.
        tiles : TypedTiles
            Of the rows that are multiplied, sorted by type.
        out : torch.Tensor
            ``[rows, M]`` of x's dtype, rows contiguous.
        index, scatter : torch.Tensor, optional
            int64 ``[rows]``, contiguous and in range: the row of x, and of `out`, of each row.
        bias : torch.Tensor, optional
            ``[types, M]`` of x's dtype, rows contiguous: what products are added to, as float32.
        scale : torch.Tensor, optional
            ``[rows]`` of x's dtype, contiguous: what each row of the product is multiplied by.
        schedule : int
            The number of one of SCHEDULES, which `takes` accepts for these rows.
        """
        cut = _cut_for(tiles, schedule)
        n_tiles, depth = cut.shape[0], weight.shape[1]
        if not n_tiles or not out.numel():
            return
        source = RowSource(x, depth, index, schedule)
        at_once = self._runner.multiprocessors * SCHEDULES[schedule].blocks
        values: dict[str, Value] = {
            "tiles": cut,
            "n_tiles": n_tiles,
            "weight": weight,
            "weight_stride": weight.stride(0),
            "bias": bias,
            "bias_stride": 0 if bias is None else bias.stride(0),
            "scatter": scatter,
            "scale": scale,
            "out": out,
            "out_stride": out.stride(0),
        }
        self._start(MultiplyRows, min(n_tiles, at_once), source, weight.shape[2], values)

    def gradient(
        self,
        x: torch.Tensor | PackedRows,
        g: torch.Tensor,
        tiles: TypedTiles,
        depth: int,
        *,
        index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the gradient of the weights of `product`, summed in float32 and without atomics.

        Parameters
        ----------
        x, tiles, index
            As for `product`.
        g : torch.Tensor
            ``[rows, M]`` of x's dtype, rows contiguous: the gradient of the product.
        depth : int
            K.

        Returns
        -------
        torch.Tensor
            ``[types, K, M]`` of x's dtype; zeros for a type without rows.
        """
        chunks, starts = tiles.chunks()
        n_chunks, width = len(chunks), g.shape[1]
        parts = torch.empty(n_chunks, depth, width, dtype=torch.float32, device=g.device)
        if parts.numel():
            grid = (n_chunks, ceil_div(depth, GRADIENT_DEPTH), ceil_div(width, TILE_COLUMNS))
            values: dict[str, Value] = {"chunk_tiles": chunks, "g": g, "out": parts}
            values |= {"g_stride": g.stride(0), "tiles": tiles.tiles}
            self._start(MultiplyGradient, grid, RowSource(x, depth, index), width, values)
        return _total(parts, starts).to(g.dtype)

    def prepare_product(
        self,
        tiles: TypedTiles,
        n_rows: int,
        shape: tuple[int, ...],
        width: int,
        dtype: torch.dtype,
        index: torch.Tensor | None = None,
        schedule: int = 0,
    ) -> Callable[..., torch.Tensor]:
        """Return `product` of plain rows as ``run(x, weight, bias=None)``, bound but for addresses.

        Parameters
        ----------
        tiles, index, schedule
            As for `product`.
        n_rows : int
            Rows of the result.
        shape : tuple of int
            Of a row of x: ``[K]``, or ``[H, K]`` with weights ``[types, H, K, M]`` and bias rows
            ``[types, H, M]``.
        width : int
            M.
        dtype : torch.dtype
            Of x, weight and result.
        """
        *heads, depth = shape
        n, of_result = math.prod(heads), (n_rows, *heads, width)
        cut = _cut_for(tiles, schedule)
        n_tiles, device, size = cut.shape[0], cut.device, dtype.itemsize
        start = None
        if n_tiles and math.prod(of_result):
            grid = min(n_tiles, self._runner.multiprocessors * SCHEDULES[schedule].blocks)
            launch = self._of_plain(MultiplyRows, shape, width, dtype, schedule)
            start = functools.partial(launch, grid)

        def run(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            out = torch.empty(of_result, dtype=dtype, device=device)
            if start is not None:
                x, weight = x.contiguous(), weight.contiguous()
                bias = None if bias is None else bias.contiguous()
                bias_at = 0 if bias is None else bias.data_ptr()
                x_at, weight_at, out_at = x.data_ptr(), weight.data_ptr(), out.data_ptr()
                rows = (0 if index is None else index.data_ptr(), cut.data_ptr(), n_tiles)
                for _ in range(n):
                    start(x_at, *rows, weight_at, bias_at, out_at)
                    x_at += depth * size
                    weight_at += depth * width * size
                    bias_at += width * size if bias_at else 0
                    out_at += width * size
            return out

        return run

    def prepare_gradient(
        self,
        tiles: TypedTiles,
        shape: tuple[int, ...],
        width: int,
        dtype: torch.dtype,
        index: torch.Tensor | None = None,
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return `gradient` of plain rows as ``run(x, g)``, as `prepare_product` does."""
        *heads, depth = shape
        chunks, starts = tiles.chunks()
        n, of_parts = math.prod(heads), (len(chunks), depth, width)
        device, size = tiles.tiles.device, dtype.itemsize
        of_result = (*heads, *of_parts)
        start = None
        if math.prod(of_result):
            grid = (of_parts[0], ceil_div(depth, GRADIENT_DEPTH), ceil_div(width, TILE_COLUMNS))
            launch = self._of_plain(MultiplyGradient, shape, width, dtype)
            start = functools.partial(launch, grid)
        part_bytes = 4 * math.prod(of_parts)

        def run(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
            parts = torch.empty(of_result, dtype=torch.float32, device=device)
            if start is not None:
                x, g = x.contiguous(), g.contiguous()
                x_at, g_at, part_at = x.data_ptr(), g.data_ptr(), parts.data_ptr()
                rows = (0 if index is None else index.data_ptr(), tiles.tiles.data_ptr())
                chunks_at = chunks.data_ptr()
                for _ in range(n):
                    start(x_at, *rows, chunks_at, g_at, part_at)
                    x_at += depth * size
                    g_at += width * size
                    part_at += part_bytes
            found = _total(parts.transpose(0, 1) if heads else parts, starts)
            return found if dtype is torch.float32 else found.to(dtype)

        return run

    def _of_plain(
        self,
        parameters: type[Parameters],
        shape: tuple[int, ...],
        width: int,
        dtype: torch.dtype,
        schedule: int = 0,
    ) -> Launch:
        """Return a kernel for plain rows of a shape, which takes what belongs to a graph.

        That are the addresses of tensors, of the rows' index among them, and of a product the
        number of tiles.
        """
        key = (parameters, shape, width, dtype, schedule)
        found = self._plain.get(key)
        if found is not None:
            return found
        *heads, depth = shape
        n = math.prod(heads)
        source = RowSource(
            torch.empty(1, n * depth, dtype=dtype, device="meta"), depth, None, schedule
        )
        fixed = {**source.values, "mailbox": self._runner.mailbox, "width": width}
        if parameters is MultiplyRows:
            fixed |= {
                "weight_stride": n * depth * width, "bias_stride": n * width,
                "out_stride": n * width, "scatter": None, "scale": None,
            }  # fmt: skip
        else:
            fixed["g_stride"] = n * width
        for name in ("words", "index", "tiles"):
            del fixed[name]
        memory = source.memory.shared_bytes
        found = self._runner.bind(source.variant, parameters, THREADS, memory, **fixed)
        return self._plain.setdefault(key, found)

    def _start(
        self,
        parameters: type[Parameters],
        grid: int | tuple[int, int, int],
        source: RowSource,
        width: int,
        values: dict[str, Value],
    ) -> None:
        memory = source.memory
        key = (source.variant, memory.shared_bytes, parameters)
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = self._runner.bind(
                source.variant, parameters, THREADS, memory.shared_bytes
            )
        common: dict[str, Value] = {"mailbox": self._runner.mailbox, "width": width}
        launch(grid, *in_order(parameters, {**source.values, **common, **values}))


def _cut_for(tiles: TypedTiles, schedule: int) -> torch.Tensor:
    """Return the tiles of a schedule."""
    return tiles.tiles if SCHEDULES[schedule].coarsening == 1 else tiles.coarse


def _total(parts: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return the gradients ``[types, ...]`` of which chunks have parts ``[chunks, ...]``."""
    types = len(starts) - 1
    if len(parts) == types:  # each has one, as none has fewer
        return parts.contiguous()
    flat = parts.reshape(len(parts), -1)
    summed = torch.segment_reduce(flat, "sum", offsets=starts, axis=0, unsafe=True, initial=0)
    return summed.view(types, *parts.shape[1:])
