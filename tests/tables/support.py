"""Helpers for tests of host memory: a recording registrar, and queries of memory and files."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from typing import Any

import torch

from bitslab.engine.memory.host import HostBuffer
from bitslab.tensors.unified_tensor import UnifiedTensor


class Recorder:
    """Pretends that there is a GPU; `calls` lists the calls, in order."""

    def __init__(self):
        self.calls: list[tuple[Any, ...]] = []
        self.there = True
        self.refusal = ""
        self.captures = False
        self.address: str | None = None

    def available(self):
        return self.there

    def pci_address(self):
        return self.address

    def capturing(self):
        return self.captures

    def register(self, address, nbytes):
        self.calls.append(("register", address, nbytes))
        return self.refusal

    def unregister(self, address):
        self.calls.append(("unregister", address))

    def synchronize(self):
        self.calls.append(("synchronize",))

    def names(self):
        return [call[0] for call in self.calls]


def buffer_of(t: torch.Tensor) -> HostBuffer:
    """Return the buffer that holds a unified tensor."""
    assert type(t) is UnifiedTensor and t.host_buffer is not None
    return t.host_buffer


def inode_at(address: int) -> int:
    """Inode of the file mapped at an address of this process."""
    with open("/proc/self/maps") as maps:
        for line in maps:  # thousands of them, by their addresses
            begin, _, rest = line.partition("-")
            if int(rest.partition(" ")[0], 16) > address:
                if int(begin, 16) <= address:
                    return int(line.split()[4])
                break
    raise AssertionError(f"nothing is mapped at {address:#x}")


def open_files() -> Counter[str]:
    """Return what this process has open: files, memory and pipes, by name."""
    found: Counter[str] = Counter()
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing itself
            found[os.readlink(f"/proc/self/fd/{each}")] += 1
    return found
