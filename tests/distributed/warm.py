"""Loads what ranks of exchanges load, in the process that they are forks of.

Numba takes a second to load its first function, under a lock that one process at a time has, so
that ranks that start together would wait for each other.
"""

from __future__ import annotations

import numpy as np
import torch

from bitslab.distributed.messages import REFERENCES, decode_part, encode_part, most_part_bytes
from bitslab.distributed.selection import WITHIN_BOUND


def load() -> None:
    """Write and read rows that take every branch, on one thread: forks have no other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
            rows = torch.arange(640).view(80, 8)[torch.arange(160) % 80].to(dtype)
            bounded = dtype in (torch.float32, torch.bfloat16)
            for candidate in WITHIN_BOUND if bounded else (REFERENCES,):
                out = np.empty(most_part_bytes(len(rows), 8 * dtype.itemsize), np.uint8)
                used, _ = encode_part(rows, 0.01 * bounded, candidate, None, out)
                decode_part(out[:used], torch.empty_like(rows))
    finally:
        torch.set_num_threads(threads)


load()
