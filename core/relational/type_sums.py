"""Sums of rows that stand type after type: long types piece by piece, so that many threads share.

A sum over a segment is one thread's on a CPU and one block's on a GPU, and there are few types.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..engine.kernels.typed_products import pieces_of_types
from ..engine.kernels.uploads import Uploads
from .graph import RelationalGraph

#: Rows of a piece: on a GPU a block adds it in a few steps, and a million rows still make fewer
#: pieces than rows of one.
PIECE_ROWS = 512

#: Starts of segments ``[segments + 1]`` and the row of each of their entries, both int64.
Level = tuple[torch.Tensor, torch.Tensor]


def levels(bounds: Sequence[int], piece_rows: int, uploads: Uploads) -> list[Level]:
    """Return segments whose sums are those of types, level by level.

    Parameters
    ----------
    bounds : sequence of int
        The first row of each type, and the end.
    piece_rows : int
        Rows of a piece, at most.
    uploads : Uploads
        Of the device of the result.

    Returns
    -------
    list of (torch.Tensor, torch.Tensor)
        Of pieces and then, where a type has several, of types: their rows are the pieces' sums.
    """
    ends = np.array(bounds, np.int64)
    _, begins, first = pieces_of_types(ends, piece_rows, least=1)
    starts = np.append(begins, ends[-1:])
    found = [starts] if len(starts) == len(first) else [starts, first]
    rows = [torch.arange(int(each[-1]), device=uploads.device) for each in found]
    return list(zip(uploads.of([torch.from_numpy(each) for each in found]), rows, strict=True))


def levels_of(graph: RelationalGraph, space: str) -> list[Level]:
    """Return the levels of the rows of a space, in pieces of PIECE_ROWS."""
    bounds = graph.bounds(space)
    assert bounds is not None
    return graph.once(("sums by type", space), lambda: levels(bounds, PIECE_ROWS, graph.uploads))
