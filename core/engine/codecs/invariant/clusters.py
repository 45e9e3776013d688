"""Several profiles for one table: rows are grouped by k-means in Hamming distance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ....errors import load_optional
from ...kernels import cpu
from ...kernels.cpu.compiling import call
from .layout import build_layout
from .planner import Options, Plan, choose_plan, fit_profile
from .profile import Profile
from .sample import Sample

ITERATIONS = 10
KMEANS_BYTES = 1 << 20  # rows that the centers are learnt from


def group_rows(sample: Sample, k: int, seed: int) -> np.ndarray:
    """Return each sample row's cluster by k-means on its bits.

    A center is the majority of its rows' bits. Centers start at distinct rows drawn at random; an
    empty cluster keeps its center.

    Parameters
    ----------
    sample : Sample
        Rows to group.
    k : int
        Number of clusters.
    seed : int
        Seed of the first centers.

    Returns
    -------
    numpy.ndarray
        int64 ``[n]``, 0 to k - 1.
    """
    load_optional("numba", extra=None, purpose="grouping rows")
    from ...kernels.cpu import plan

    width = next(w for w in (8, 4, 2, 1) if sample.row_bytes % w == 0)
    rows = sample.chunks(width)
    learn = sample.part(max(4 * k, KMEANS_BYTES // sample.row_bytes)).chunks(width)
    distinct = np.unique(learn, axis=0)
    rng = np.random.default_rng(seed)
    centers = distinct[rng.choice(len(distinct), min(k, len(distinct)), replace=False)].copy()
    nearest = np.zeros(len(learn), np.int64)
    before = -1
    for _ in range(ITERATIONS):
        distance = call(plan.nearest_centers, learn, centers, nearest)
        if distance == before:
            break
        before = distance
        for c in range(len(centers)):
            members = learn[nearest == c]
            if len(members):
                bits = np.unpackbits(members.view(np.uint8), axis=1)
                centers[c] = np.packbits(bits.mean(axis=0) >= 0.5).view(learn.dtype)
    groups = np.zeros(len(rows), np.int64)
    call(plan.nearest_centers, rows, centers, groups)
    return groups


def fit_clusters(
    sample: Sample,
    dtype: torch.dtype,
    plan: Plan,
    clusters: int,
    seed: int,
    n_rows: int,
) -> Profile | None:
    """Fit one profile a cluster, or return None when that costs more than it saves.

    All clusters share the plan's chunk width, code width, grouping and positional or uniform
    masks; each has masks and values of its own. A row later takes the cluster that packs it best.
    """
    single = fit_profile(sample, plan)
    options = Options(
        plan.candidate.chunk_bytes,
        plan.code_bits,
        plan.grouped,
        plan.candidate.uniform,
        plan.candidate.threshold,
    )
    groups = group_rows(sample, clusters, seed)
    profiles = []
    for c in range(clusters):
        members = np.flatnonzero(groups == c)
        if len(members):
            part = Sample(sample.rows[torch.from_numpy(members)].contiguous())
            share = round(n_rows * len(members) / len(sample))
            profiles.append(fit_profile(part, choose_plan(part, dtype, options, share)))
    if len(profiles) < 2:
        return None
    fmt = replace(single.format, clusters=len(profiles))
    clustered = Profile(
        fmt,
        np.concatenate([p.masks for p in profiles]),
        np.concatenate([p.values for p in profiles]),
    )
    cost = {p: packed_cost(sample, p, n_rows) for p in (single, clustered)}
    return clustered if cost[clustered] < cost[single] else None


def packed_cost(sample: Sample, profile: Profile, n_rows: int) -> float:
    """Return the bytes of `n_rows` rows like the sample's: rows, their metadata and the profile."""
    fmt = profile.format
    lengths, _ = cpu.packed_words(sample.rows, build_layout(fmt, profile.masks, profile.values))
    words = lengths.to(torch.int64) % (1 << 8 * lengths.element_size())
    words = torch.where(words == 0, fmt.row_words, words)
    packed = 4 * float(words.sum()) * n_rows / len(sample)
    return packed + fmt.row_metadata_bytes(n_rows) + profile.nbytes
