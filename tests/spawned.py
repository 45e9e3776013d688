"""Processes that inherit nothing: they get what they are given pickled.

A process that is spawned imports torch and all else anew, which takes longer than what tests look
at. Forks of a server that has imported it, and nothing more, are given things in the same way and
know as little of this process. ``make test-full`` spawns all of them; tests of host memory and of
DGL's loader always do.
"""

from __future__ import annotations

import multiprocessing

from tests import pairwise

#: The start method, for `multiprocessing.get_context` and loaders.
METHOD = "spawn" if pairwise.FULL else "forkserver"

multiprocessing.set_forkserver_preload(["torch", "numba", "bitslab", "pytest", "hypothesis"])
