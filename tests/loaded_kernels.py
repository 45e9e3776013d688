"""Loads Numba and the first of its functions, in a process that others are forks of.

That takes half a second of processor time, in each of them if not once before.
"""

from __future__ import annotations

import torch

from bitslab.engine.kernels import cpu


def load() -> None:
    """Call a kernel on one thread: forks have no other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cpu.count_bits(torch.zeros(4, 8, dtype=torch.uint8), 1)
    finally:
        torch.set_num_threads(threads)


load()
