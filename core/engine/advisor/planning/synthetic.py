"""Steps to plan that were never profiled: drawn ones, to compare plans of several planners on."""

from __future__ import annotations

import random

from ..swapping import SwapLink
from .profile import DiskRates, ModuleProfile, Packing, SiteProfile, StepProfile


def drawn_profile(
    seed: int, n_sites: int, *, modules: bool = True, disk: bool = True
) -> StepProfile:
    """Return a step of layers whose tensors have drawn sizes, times and packings.

    Parameters
    ----------
    seed : int
        The same one gives the same step.
    n_sites : int
        Number of its tensors.
    modules : bool
        Whether layers of it may be checkpointed.
    disk : bool
        Whether there is an SSD.

    Returns
    -------
    StepProfile
        Of 50 to 200 ms, whose tensors take 0.5 to 4 times the seconds of the forward pass to cross
        the link.
    """
    draw = random.Random(seed)
    forward_s = draw.uniform(0.02, 0.07)
    segments = [draw.lognormvariate(0, 0.7) for _ in range(n_sites + 1)]
    scale = forward_s / sum(segments)
    times = [each * scale for each in segments]
    backward = [each * draw.uniform(1.6, 2.4) for each in times]
    sizes = [int(draw.lognormvariate(16, 0.8)) for _ in range(n_sites)]
    rate = sum(sizes) / (forward_s * draw.uniform(0.5, 4.0))
    link = SwapLink(rate, rate * draw.uniform(0.8, 1.2), draw.uniform(0, 2e-5))
    saved, now = [], 0.0
    for each in times[:-1]:
        now += each
        saved.append(now)
    turn_s = now + times[-1]
    read = [0.0] * n_sites
    now = turn_s + backward[-1]
    for i in range(n_sites - 1, -1, -1):
        read[i] = now
        now += backward[i]
    end_s = now
    n_modules = max(1, n_sites // draw.randint(4, 9)) if modules else 0
    edges = [round(m * n_sites / max(1, n_modules)) for m in range(n_modules + 1)]
    of = {i: f"layer{m}" for m in range(n_modules) for i in range(edges[m], edges[m + 1])}
    sites = []
    for i in range(n_sites):
        packings = {}
        for codec in ("fast", "small")[: draw.randint(0, 2)]:
            share = draw.uniform(0.4, 0.95) if codec == "fast" else draw.uniform(0.2, 0.8)
            device_rate = rate * (draw.uniform(8, 20) if codec == "fast" else draw.uniform(3, 10))
            encode_s = sizes[i] / device_rate
            packings[codec] = Packing(share, encode_s, encode_s * draw.uniform(0.3, 0.8))
        replayed = i > 0 and draw.random() < 0.25
        following = saved[i + 1] if i + 1 < n_sites else turn_s
        sites.append(
            SiteProfile(
                site=f"{of.get(i, '')}:{i}",
                nbytes=sizes[i],
                saved_s=saved[i],
                released_s=saved[i] + draw.random() * (following - saved[i]),
                read_s=read[i],
                freed_s=read[i] + backward[i] * draw.random(),
                module=of.get(i, ""),
                movable=draw.random() < 0.95,
                packings=packings,
                replay_s=times[i] * draw.uniform(0.05, 0.3) if replayed else None,
                replay_from=(f"{of.get(i - 1, '')}:{i - 1}",) if replayed else (),
            )
        )
    layers = []
    for m in range(n_modules):
        first, last = edges[m], edges[m + 1] - 1
        begin_s = saved[first] - times[first]
        layers.append(
            ModuleProfile(
                module=f"layer{m}",
                begin_s=begin_s,
                backward_begin_s=read[last],
                backward_end_s=read[first] + backward[first],
                checkpoint_s=saved[last] - begin_s,
                checkpoint_bytes=int(draw.uniform(0.3, 1) * sizes[first]),
            )
        )
    share = draw.uniform(0.03, 0.4)
    return StepProfile(
        sites=tuple(sites),
        modules=tuple(layers),
        turn_s=turn_s,
        end_s=end_s,
        rest_s=0.05 * end_s,
        other_bytes=((0.0, sum(sizes) // 3), (turn_s, sum(sizes) // 3 + sum(sizes) // 20)),
        link=link,
        disk=DiskRates(rate * share, rate * share * 1.1, 1e-5) if disk else None,
        link_share_both_ways=draw.uniform(0.75, 1.0),
        disk_share_both_ways=draw.uniform(0.5, 0.9),
    )
