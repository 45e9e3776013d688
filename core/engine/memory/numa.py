"""Host memory on the NUMA node of a GPU.

A GPU is attached to one node: what it reads from another one crosses the link between processors,
too. Where the system says which node that is, page-locked memory is asked for there. It is a
preference: where that node is full, or the system refuses, pages come from another one.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
from pathlib import Path

from . import page_locking

#: What says which nodes there are, and to which of them a device is attached.
NODES = Path("/sys/devices/system/node")
DEVICES = Path("/sys/bus/pci/devices")
#: Numbers of Linux's calls `mbind` and `get_mempolicy`, for which the C library has no functions.
_MBIND = {"x86_64": 237, "aarch64": 235}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def nearest_node() -> int | None:
    """Return the NUMA node of this process's current GPU.

    None where there is no GPU, the machine has one node only, the system does not say, as in many
    virtual machines, or the process takes memory by a policy that its user chose (``numactl``).
    """
    with contextlib.suppress(OSError, ValueError):
        nodes = _numbers((NODES / "has_memory").read_text())
        if len(nodes) < 2 or not page_locking.registrar.available():
            return None
        address = page_locking.registrar.pci_address()
        if address is not None:
            node = int((DEVICES / address / "numa_node").read_text())
            return node if node in nodes and not _has_policy() else None
    return None


def _has_policy() -> bool:
    """Return whether this thread takes memory by another rule than the system's own."""
    number = _GET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    mode, none = ctypes.c_int(_MPOL_DEFAULT), ctypes.c_void_p(None)
    length, flags = ctypes.c_ulong(0), ctypes.c_ulong(0)
    call = ctypes.CDLL(None, use_errno=True).syscall
    done = call(ctypes.c_long(number), ctypes.byref(mode), none, length, none, flags)
    return bool(done == 0 and mode.value != _MPOL_DEFAULT)


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Ask for a node's memory where mapped memory has no pages yet; return whether that holds.

    Parameters
    ----------
    address, nbytes : int
        The memory; `address` is that of a page. Of a memory file every process that maps it.
    node : int
        As `nearest_node` returns it.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    words = node // _WORD_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    call = ctypes.CDLL(None, use_errno=True).syscall
    # Of the number of bits the system uses one less.
    bits = ctypes.c_ulong(words * _WORD_BITS + 1)
    length, flags = ctypes.c_size_t(nbytes), ctypes.c_uint(0)
    mode = ctypes.c_int(_MPOL_PREFERRED)
    done = call(ctypes.c_long(number), ctypes.c_void_p(address), length, mode, mask, bits, flags)
    return bool(done == 0)


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list as Linux writes it, "0-1,4"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found
