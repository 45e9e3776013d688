"""A GraphBolt feature whose rows are packed in host memory.

Importing this module needs a DGL with a GraphBolt that loads; otherwise it raises
MissingExtraError, which lists the versions that have one.
"""

from __future__ import annotations

from typing import Any

from bitslab.integrations.dgl.feature_reads import FeatureReads, load_graphbolt

__all__ = ["GraphBoltFeature"]

_Feature: Any = load_graphbolt().Feature


class GraphBoltFeature(FeatureReads, _Feature):  # type: ignore[misc]
    """A ``dgl.graphbolt.Feature`` over a `CompressedFeature`.

    Use it like a ``TorchBasedFeature``: in a ``BasicFeatureStore``, and under GraphBolt's own
    caches. `FeatureReads` has its methods.

    Parameters
    ----------
    feature : CompressedFeature or torch.Tensor
        The rows, or a tensor ``[N, ...]`` of any dtype to pack.
    metadata : dict, optional
        The dict that `metadata` returns.
    **options
        With a tensor: those of `CompressedFeature.from_tensor`.

    Notes
    -----
    In a pipeline of GraphBolt::

        feature = GraphBoltFeature(x, cache_ratio=0.01)
        store = graphbolt.BasicFeatureStore({("node", None, "feat"): feature})
        batches = sampled.fetch_feature(store, node_feature_keys=["feat"])
    """
