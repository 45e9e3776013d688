"""The methods of a GraphBolt feature, and the import of GraphBolt.

This module imports without GraphBolt; `bitslab.integrations.dgl.graphbolt` needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import dgl
import torch

from bitslab import CompressedFeature
from bitslab.engine.codecs import check_tensor_argument
from bitslab.engine.transfer import StreamLane
from bitslab.errors import ArgumentError, ArgumentTypeError, BitslabError, MissingExtraError
from bitslab.tables import RowsFuture

WHERE_GRAPHBOLT_IS = (
    "GraphBolt loads with dgl 2.4.0 from https://data.dgl.ai/wheels (torch 2.4 or older; of those "
    "bitslab takes 2.4) and with dgl 2.1.0 from PyPI (torch 2.0.0 to 2.2.1, too old for bitslab); "
    "without it, bitslab.integrations.dgl.compress_features(graph) serves DGL's own loaders"
)


def load_graphbolt() -> ModuleType:
    """Return ``dgl.graphbolt``.

    Raises
    ------
    MissingExtraError
        When the installed DGL has none, or its library does not load with the installed torch.
    """
    try:
        return importlib.import_module("dgl.graphbolt")
    except ModuleNotFoundError as error:
        if error.name != "dgl.graphbolt":
            raise  # GraphBolt needs a package that is missing: the error names it
        reason = "has no GraphBolt"
        cause: Exception = error
    except (ImportError, OSError) as error:
        reason = f"has a GraphBolt that does not load ({error})"
        cause = error
    raise MissingExtraError(
        f"bitslab.integrations.dgl.graphbolt: dgl {dgl.__version__}, installed with torch "
        f"{torch.__version__}, {reason}. {WHERE_GRAPHBOLT_IS}"
    ) from cause


class FeatureReads:
    """The methods of a GraphBolt ``Feature``, over a `CompressedFeature`.

    Parameters
    ----------
    feature : CompressedFeature or torch.Tensor
        The rows, or a tensor ``[N, ...]`` of any dtype to pack.
    metadata : dict, optional
        The dict that `metadata` returns.
    **options
        With a tensor: those of `CompressedFeature.from_tensor`. They are kept for `update`.

    Raises
    ------
    ArgumentTypeError
        When `feature` is of another type, or options are given with a CompressedFeature.
    ArgumentError
        As in `CompressedFeature.from_tensor`.
    """

    def __init__(
        self,
        feature: CompressedFeature | torch.Tensor,
        metadata: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._options: dict[str, Any] | None = options
        if isinstance(feature, CompressedFeature):
            if options:
                raise ArgumentTypeError(
                    f"options: {sorted(options)} are for packing a tensor; `feature` is packed"
                )
            self._options = None
        else:
            if not isinstance(feature, torch.Tensor):
                raise ArgumentTypeError(
                    "feature: expected a CompressedFeature or a torch.Tensor, got "
                    f"{type(feature).__name__}"
                )
            feature = CompressedFeature.from_tensor(feature, **options)
        self.feature = feature
        self._metadata = metadata
        self._lanes: dict[torch.device, StreamLane] = {}

    def read(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows, decoded.

        Parameters
        ----------
        ids : torch.Tensor, optional
            int32 or int64 ``[n]`` on a CPU or GPU. All rows when left out.

        Returns
        -------
        torch.Tensor
            ``[n, *row_shape]`` on the device of `ids`. All rows: ``[N, *row_shape]`` on the CPU,
            read-only, decoded once and kept (see `CompressedFeature.whole`).

        Raises
        ------
        IndexRangeError
            When an id is out of range; see `CompressedTable.gather`.
        """
        return self.feature.whole() if ids is None else self.feature.gather(ids)

    def read_async(self, ids: torch.Tensor) -> Iterator[RowsFuture]:
        """Start to gather rows, and yield once, a future of the rows.

        Ids on a CPU: a thread gathers. Ids on a GPU: a separate stream does.

        Parameters
        ----------
        ids : torch.Tensor
            As in `read`. They must not change before ``wait()`` returned.

        Yields
        ------
        RowsFuture
            Its ``wait()`` returns ``[n, *row_shape]`` on the device of `ids`.
        """
        if not ids.is_cuda:
            yield self.feature.fetch(ids)
            return
        lane = self._lanes.get(ids.device)
        if lane is None:
            lane = self._lanes[ids.device] = StreamLane(ids.device)
        lane.follow(torch.cuda.current_stream(ids.device))
        lane.keep(ids)
        yield RowsFuture(lane.submit(self.feature.gather, ids))

    def read_async_num_stages(self, ids_device: torch.device) -> int:
        """Return the number of times that `read_async` yields: 1."""
        if ids_device.type not in ("cpu", "cuda"):
            raise ArgumentTypeError(f"ids_device: {ids_device}, accepted are cpu and cuda")
        return 1

    def size(self) -> torch.Size:
        """Return the shape of a row."""
        return self.feature.shape[1:]

    def count(self) -> int:
        """Return the number of rows."""
        return len(self.feature)

    def metadata(self) -> dict[str, Any]:
        """Return the given metadata, or an empty dict."""
        return {} if self._metadata is None else self._metadata

    def update(self, value: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """Overwrite rows, or replace the whole feature.

        Parameters
        ----------
        value : torch.Tensor
            ``[n, *row_shape]`` of the feature's dtype, on a CPU or GPU. Without `ids` the new
            feature, with any number of rows: it is packed with the options given at first.
        ids : torch.Tensor, optional
            Integers ``[n]``. Of rows with one id the last counts. Cached rows are dropped from
            the cache.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            When shape or dtype differ from the feature's.
        IndexRangeError
            When an id is out of range; nothing is changed.
        BitslabError
            With `ids`: when the table is shared with other processes or read-only. Without: when
            the feature was given with a cache, whose new content is not known.
        """
        if ids is not None:
            self.feature.table.update(ids, value)
            self.feature.forget_whole()
            return
        check_tensor_argument("value", value)
        old = self.feature
        if value.dtype != old.dtype:
            raise ArgumentTypeError(f"value: dtype {value.dtype}, the feature has {old.dtype}")
        if value.dim() < 1 or value.shape[1:] != old.shape[1:]:
            expected = ["N", *old.shape[1:]]
            raise ArgumentError(f"value: shape {list(value.shape)}, expected {expected}")
        options = self._options
        if options is None:
            if old.cache is not None:
                raise BitslabError(
                    "update: this feature was given with a cache, whose rows for other "
                    "values are not known; make a new one from the tensor: "
                    f"{type(self).__name__}(tensor, cache_bytes=...)"
                )
            options = {"layout": old.table.layout, "device": old.device}
        self.feature = CompressedFeature.from_tensor(value, **options)

    def stats(self) -> dict[str, Any]:
        """Return what `CompressedFeature.stats` returns."""
        return self.feature.stats()

    def __repr__(self) -> str:
        """Return feature and metadata as text."""
        return f"{type(self).__name__}({self.feature!r}, metadata={self.metadata()!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the streams, which belong to a process."""
        return self.__dict__ | {"_lanes": {}}
