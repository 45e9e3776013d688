"""Handles by which other processes map the slabs of a cache."""

from __future__ import annotations

import base64
import json
from typing import Any

import torch

from ..engine.codecs import RowCodec, row_codec_class
from ..engine.kernels.format import BUCKET_ENTRIES, MAX_SLABS, PAD_WORDS
from ..engine.memory.host import HostBuffer
from ..errors import ArgumentError, BitslabError
from .cache import CacheView
from .snapshot import SlabAllocator, Slabs, Snapshot
from .table import CompressedTable

HANDLE_VERSION = 3
#: What `torch.UntypedStorage._share_cuda_` returns: a CUDA IPC handle, the offset of the slab in
#: the memory that it opens, and torch's reference count of that memory.
_SHARED = (
    "device",
    "memory",
    "nbytes",
    "offset_bytes",
    "count_file",
    "count_offset",
    "event",
    "event_needed",
)


def handle_of_cache(
    snapshot: Snapshot, table_token: str, packer: RowCodec | None, capacity_bytes: int
) -> tuple[str, list[HostBuffer]]:
    """Describe cached rows for other processes.

    Parameters
    ----------
    snapshot : Snapshot
        The rows.
    table_token : str
        Identity of the table; see `HostTable.token`.
    packer : RowCodec or None
        Codec of the rows if the cache packed them itself.
    capacity_bytes : int
        Capacity of a slab.

    Returns
    -------
    handle : str
        The text that `parts_of_cache_handle` takes.
    buffers : list of HostBuffer
        Memory that the handle refers to in addition to the slabs; it must live as long as the
        handle.
    """
    storage = next(iter(snapshot.storages.values()))
    maps = {"entries": _in_host_memory(storage.entries)}
    if storage.row_clusters is not None:
        maps["row_clusters"] = _in_host_memory(storage.row_clusters)
    slabs: list[Any] = [buffer.handle() for buffer in snapshot.slabs.buffers]
    if not slabs:
        slabs = [_gpu_memory(slab) for slab in snapshot.slabs.words]
    state = {
        "version": HANDLE_VERSION,
        "table": table_token,
        "capacity_bytes": capacity_bytes,
        "cached_rows": snapshot.n_rows,
        "max_words": storage.max_words,
        "codec": None if packer is None else packer.name,
        "packer": None if packer is None else packer.to_config(),
        "maps": {name: buffer.handle() for name, buffer in maps.items()},
        "slabs": slabs,
    }
    return json.dumps(state), list(maps.values())


def parts_of_cache_handle(
    handle: str, table: CompressedTable, allocator: SlabAllocator
) -> tuple[Snapshot, RowCodec | None, int]:
    """Open the cached rows of another process for the one device of `allocator`.

    Returns
    -------
    snapshot : Snapshot
        The rows.
    packer : RowCodec or None
        Codec of the rows if the cache packed them itself.
    capacity_bytes : int
        Capacity of a slab.

    Raises
    ------
    ArgumentError
        When the handle is not valid, is of another table's cache, or its memory is gone.
    """
    try:
        state: dict[str, Any] = json.loads(handle)
        version = state["version"]
        token, named, described = state["table"], dict(state["maps"]), list(state["slabs"])
        n_rows, max_words, capacity_bytes = (
            int(state[name]) for name in ("cached_rows", "max_words", "capacity_bytes")
        )
        codec, config, _ = state.get("codec"), state["packer"], named["entries"]
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise ArgumentError(f"handle: {handle!r:.60} is not from SlabCache.handle") from error
    if version != HANDLE_VERSION:
        raise ArgumentError(
            f"handle: version {version}, this bitslab reads {HANDLE_VERSION}; all processes "
            "need the same bitslab"
        )
    if token != table.token:
        raise ArgumentError(
            "handle: of a cache over another table; attach to the table of the process that gave "
            "it (CompressedTable.handle, CompressedTable.attach)"
        )
    (device,) = allocator.devices
    packer = None if codec is None else _packer_of(codec, config, table)
    maps = {name: HostBuffer.attach(str(text)).tensor for name, text in named.items()}
    entries, row_clusters = maps["entries"], maps.get("row_clusters")
    buckets = entries.numel() // (16 * BUCKET_ENTRIES)
    if buckets < 1 or buckets & (buckets - 1) or entries.numel() % (16 * BUCKET_ENTRIES):
        raise ArgumentError(f"handle: a map of {entries.numel()} bytes is none")
    with allocator.on(device):
        kernels = None if packer is None else packer.kernels(device)
    clusters = 1 if kernels is None else kernels.clusters
    if (0 if row_clusters is None else row_clusters.numel()) != (len(table) if clusters > 1 else 0):
        raise ArgumentError("handle: its map and its codec do not fit together")
    slabs = _open_slabs(described, device)
    with allocator.on(device):
        storage = CacheView(
            entries.view(torch.int64).view(-1, 2).to(device),
            slabs.words,
            slabs.addresses().to(device),
            max_words,
            None if row_clusters is None else row_clusters.to(device),
            kernels=kernels,
        )
    allocator.finish()
    return Snapshot(slabs, {device: storage}, n_rows), packer, capacity_bytes


def gpu_name(device: torch.device) -> str:
    """Return a name of a GPU that is the same in all processes, whichever GPUs each can see."""
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", device.index))


def gpu_named(name: str) -> torch.device:
    """Return the GPU of a name, with its index in this process."""
    for index in range(torch.cuda.device_count()):
        if gpu_name(torch.device("cuda", index)) == name:
            return torch.device("cuda", index)
    raise ArgumentError(
        f"handle: GPU {name} is none of the {torch.cuda.device_count()} that this process sees; "
        "all processes of a machine must see all of its GPUs (CUDA_VISIBLE_DEVICES)"
    )


def _packer_of(name: str, config: Any, table: CompressedTable) -> RowCodec:
    try:
        packer = row_codec_class(name).from_config(config)
    except BitslabError as error:
        raise ArgumentError(f"handle: {error}") from error
    if (packer.row_shape, packer.dtype) != (tuple(table.shape[1:]), table.dtype):
        raise ArgumentError("handle: its codec packs other rows than the table's")
    return packer


def _in_host_memory(t: torch.Tensor) -> HostBuffer:
    """Copy a tensor to memory that other processes can map."""
    buffer = HostBuffer.allocate(t.nbytes, pin=False)
    buffer.tensor.copy_(t.flatten().view(torch.uint8))
    return buffer


def _gpu_memory(slab: torch.Tensor) -> dict[str, Any]:
    """Describe memory of a GPU for other processes."""
    storage: Any = slab.untyped_storage()
    shared = dict(zip(_SHARED, storage._share_cuda_(), strict=True))
    texts = {
        name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for name, value in shared.items()
    }
    return {"gpu": gpu_name(slab.device), "words": slab.numel(), "memory": texts}


def slabs_on_cpu(handle: str) -> bool:
    """Return whether a handle is of slabs on the CPU, or of nothing that a GPU could read."""
    if not torch.cuda.is_available():
        return True
    try:
        return not isinstance(json.loads(handle)["slabs"][0], dict)
    except (TypeError, ValueError, KeyError, IndexError, RecursionError):
        return True


def _open_slabs(described: list[Any], device: torch.device) -> Slabs:
    """Map the slabs of another process for a device."""
    if not 1 <= len(described) <= MAX_SLABS:
        raise ArgumentError(f"handle: {len(described)} slabs, accepted are 1 to {MAX_SLABS}")
    on_gpus = isinstance(described[0], dict)
    if not all(isinstance(slab, dict if on_gpus else str) for slab in described):
        raise ArgumentError(f"handle: describes no slabs: {described!r:.60}")
    if on_gpus != (device.type == "cuda"):
        where = "GPUs" if on_gpus else "the CPU"
        raise ArgumentError(f"device: {device}, but the slabs of this cache are on {where}")
    if not on_gpus:
        buffers = tuple(HostBuffer.attach(text) for text in described)
        if any(b.nbytes % 4 or b.nbytes < 4 * PAD_WORDS for b in buffers):
            raise ArgumentError("handle: leads to memory that is no slab")
        words = tuple(b.tensor.view(torch.int32) for b in buffers)
        return Slabs(words, (device,) * len(words), buffers)
    opened = [_open_gpu_memory(slab, device) for slab in described]
    return Slabs(tuple(slab for slab, _ in opened), tuple(owner for _, owner in opened))


def _open_gpu_memory(
    described: dict[str, Any], reader: torch.device
) -> tuple[torch.Tensor, torch.device]:
    """Map a slab of another process for a GPU; return it and the GPU that it is on."""
    try:
        values = {
            name: base64.b64decode(value) if isinstance(value, str) else value
            for name, value in described["memory"].items()
        }
        gpu, words = str(described["gpu"]), int(described["words"])
        # Opened on the GPU that reads, whichever GPU has the memory: that enables peer access.
        # No event is waited for: the slab was complete when its handle was made.
        values |= {"device": reader.index, "event_needed": False}
        shared = [values[name] for name in _SHARED]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"handle: describes no slab: {error!r}") from error
    owner = gpu_named(gpu)
    if owner != reader and not torch.cuda.can_device_access_peer(reader, owner):
        raise ArgumentError(f"device: {reader} cannot read the memory of {owner}")
    try:
        opener: Any = torch.UntypedStorage
        storage = opener._new_shared_cuda(*shared)
        slab = torch.empty(0, dtype=torch.int32, device=reader).set_(storage, 0, (words,), (1,))
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            f"handle: leads to no memory of {owner}: the process that gave it has ended, or is "
            f"this one ({error})"
        ) from error
    return slab, owner
