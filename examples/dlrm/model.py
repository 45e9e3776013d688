"""DLRM (Naumov et al., 2019, arXiv:1906.00091): two perceptrons and the products of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from .clicks import Batch
from .tables import Tables


class Dlrm(torch.nn.Module):
    """Predicts clicks.

    A perceptron maps the dense features to one vector as wide as the embeddings; the dot products
    of all pairs among it and the pooled embeddings go, with itself, through a second perceptron to
    the logit of a click.

    Parameters
    ----------
    tables : Tables
        The embeddings, in any mode.
    n_dense : int
        Dense features.
    bottom, top : sequence of int
        Widths of the hidden layers of both perceptrons.
    """

    def __init__(
        self, tables: Tables, n_dense: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        self._look_up = tables.look_up
        self.tables = tables.module
        n_vectors = 1 + len(tables.names)
        self.bottom = perceptron([n_dense, *bottom, tables.width], ends_linear=False)
        n_products = n_vectors * (n_vectors - 1) // 2
        self.top = perceptron([tables.width + n_products, *top, 1], ends_linear=True)
        pairs = torch.tril_indices(n_vectors, n_vectors, offset=-1)
        self.register_buffer("_pairs", pairs, persistent=False)

    def perceptrons(self) -> list[torch.nn.Parameter]:
        """Return the parameters that are no tables."""
        return [*self.bottom.parameters(), *self.top.parameters()]

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return logits, float32 ``[B]``."""
        return self.scored(batch.dense, self._look_up(batch))

    def scored(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Return logits from dense features ``[B, F]`` and embeddings ``[B, T, D]``."""
        vector = self.bottom(dense)
        vectors = torch.cat([vector.unsqueeze(1), pooled.float()], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        i, j = self._pairs
        interacted = torch.cat([vector, products[:, i, j]], 1)
        logits: torch.Tensor = self.top(interacted)
        return logits.squeeze(1)

    # Set by register_buffer.
    _pairs: torch.Tensor


def perceptron(widths: Sequence[int], ends_linear: bool) -> torch.nn.Sequential:
    """Return linear layers with ReLU behind each, or behind all but the last."""
    layers: list[torch.nn.Module] = []
    for n_in, n_out in pairwise(widths):
        layers += [torch.nn.Linear(n_in, n_out), torch.nn.ReLU()]
    return torch.nn.Sequential(*(layers[:-1] if ends_linear else layers))
