"""Kernels and modules that a first prompt needs, loaded before it."""

from __future__ import annotations

import threading

import torch

from ..engine.transfer.lanes import StreamLane
from .history import PackedHistory
from .joining import TokenJoin
from .packing import CodecPlans
from .reader import HistoryReader

#: Of the tokens that are packed to load kernels: heads, tokens, elements.
SHAPE = (8, 256, 128)
BLOCK_TOKENS = 64

_lock = threading.Lock()
_loaded: set[tuple[torch.device, torch.dtype]] = set()


def load_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Load what packing and reading tokens takes on a GPU, once in a process.

    Modules, compiled functions of the planner and kernels take some tenths of a second, which else
    the first prompt would; on a machine without compiled kernels, seconds. Some tokens like those
    of a model are packed and read on a stream of their own, that other work does not delay.

    Parameters
    ----------
    device : torch.device
        A GPU with its number.
    dtype : torch.dtype
        Of K and V; those of others than floating-point numbers are left to their first use.
    """
    if not dtype.is_floating_point or torch.cuda.is_current_stream_capturing():
        return
    with _lock:
        if (device, dtype) in _loaded:
            return
        heads, n, dim = SHAPE
        generator = torch.Generator().manual_seed(0)
        with torch.inference_mode(False), torch.no_grad(), StreamLane(device).on():
            tokens = torch.randn(1, heads, n, dim, generator=generator).to(dtype)
            reader = HistoryReader(device, offload=False, sm_budget=None)
            history = PackedHistory(
                reader.new_words(), CodecPlans(), "k", window=0, block_tokens=BLOCK_TOKENS
            )
            history.append(tokens.to(device))
            reader.finish_packing()
            new = tokens[:, :, :1].to(device)
            if TokenJoin(reader, [history, history]).join(new, new) is None:
                reader.read([history])
                reader.done([history])
        _loaded.add((device, dtype))
