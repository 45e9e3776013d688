"""The edges of a small graph in order, and their pairs, on a GPU; see survey.cu."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...on_host import on_host
from ..edge_survey import EdgeSurvey, block_length, column_length
from ..typed_products import TILE_ROWS
from .parameters import Address, Int32, Parameters
from .runner import Launch, Runner
from .source import PlainVariant

THREADS = 1024  # of the one block
#: The one compilation of it.
SURVEY = PlainVariant("survey", (("TILE_ROWS", TILE_ROWS),))

#: Most edges, sources, destinations and kinds: the kernel sorts 32-bit entries of a key and a
#: place.
MOST_ENTRIES = 1 << 15


@dataclass(init=False)
class SurveyEdges(Parameters):
    """Parameters of `survey_edges`: int64 `ends` ``[2, n]`` and `kinds` ``[n]``.

    `width` is the words of a column. int64 `block` is that of an `EdgeSurvey`; `found`
    ``[6 + 3 * (n_kinds + 1)]`` has its limits and bounds. `scratch` is 32-bit ``[2 * n]``. `tiles`
    are its `tiles`, int64 ``[3, most_tiles, 3]``.
    """

    kernel = "survey_edges"

    ends: Address
    kinds: Address
    n: Int32
    n_src: Int32
    n_dst: Int32
    n_kinds: Int32
    width: Int32
    block: Address
    found: Address
    scratch: Address
    tiles: Address
    most_tiles: Int32


class SurveyKernels:
    """The kernel of survey.cu on one GPU: one block, for graphs that it is done with at once.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launch: Launch | None = None

    def survey_edges(
        self, ends: torch.Tensor, kinds: torch.Tensor, sizes: tuple[int, int, int]
    ) -> EdgeSurvey | None:
        """Return `cpu.segment_sums.survey_edges` of edges on the device, where it is then.

        The host waits once, for limits and bounds. None where there are no edges, or more than
        MOST_ENTRIES of something.

        Parameters
        ----------
        ends, kinds, sizes
            As there; contiguous.
        """
        n, n_bounds = len(kinds), sizes[2] + 1
        if not n or max(n, *sizes) > MOST_ENTRIES:
            return None
        n_block = block_length(n, sizes[1])
        begin = n_block + 6 + 3 * n_bounds  # of tiles
        most_tiles = n // TILE_ROWS + min(n, sizes[2])
        memory = torch.empty(begin + 9 * most_tiles, dtype=torch.int64, device=kinds.device)
        scratch = torch.empty(2 * n, dtype=torch.int32, device=kinds.device)
        if self._launch is None:
            self._launch = self._runner.bind(SURVEY, SurveyEdges, THREADS)
        at = memory.data_ptr()
        self._launch(
            1, ends.data_ptr(), kinds.data_ptr(), n, *sizes, column_length(n), at,
            at + 8 * n_block, scratch.data_ptr(), at + 8 * begin, most_tiles,
        )  # fmt: skip
        found = on_host(memory[n_block:begin]).tolist()
        bounds = [found[6 + i * n_bounds : 6 + (i + 1) * n_bounds] for i in range(3)]
        tiles = memory[begin:].view(3, most_tiles, 3)
        return EdgeSurvey.of_block(memory[:n_block], n, found[:6], bounds, tiles)
