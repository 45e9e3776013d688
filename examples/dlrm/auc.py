"""The area under the ROC curve, to the last pair."""

from __future__ import annotations

import math

import numpy as np
import torch


def auc(labels: torch.Tensor, scores: torch.Tensor) -> float:
    """Return the share of (clicked, not clicked) pairs where the clicked one has the higher score.

    Equal scores count half. By scikit-learn where it is installed.

    Parameters
    ----------
    labels : torch.Tensor
        ``[N]``, 0 and 1.
    scores : torch.Tensor
        float ``[N]``.

    Returns
    -------
    float
        NaN when all labels are alike, or a score is not finite.
    """
    if labels.min() == labels.max() or not scores.isfinite().all():
        return math.nan
    try:
        from sklearn.metrics import roc_auc_score
    except ModuleNotFoundError:
        return rank_auc(labels, scores)
    return float(roc_auc_score(labels.numpy(), scores.numpy()))


def rank_auc(labels: torch.Tensor, scores: torch.Tensor) -> float:
    """Compute it from ranks (Mann and Whitney's U), in whole numbers."""
    clicked = labels.numpy() > 0
    _, which, counts = np.unique(scores.numpy(), return_inverse=True, return_counts=True)
    # Twice the mean rank among those of one score, so that halves are whole.
    ranks = (2 * counts.cumsum() - counts + 1)[which]
    n_clicked = int(clicked.sum())
    u = int(ranks[clicked].sum()) - n_clicked * (n_clicked + 1)
    return u / (2 * n_clicked * (len(clicked) - n_clicked))
