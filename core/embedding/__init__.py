"""Embedding tables that train: all rows packed on the host, the hot ones on the device.

`CachedRows` is one table: `lookup` returns what `torch.nn.functional.embedding_bag` takes, and an
optimizer gets its `parameter`. `RowsModule` is the base of modules that own one. The modules that
people use are in `bitslab.integrations.embedding` and `bitslab.integrations.torchrec`.
"""

from .arguments import CacheKind
from .bags import pooled_on_gpu, pools_on_gpu, sound_offsets
from .cached_rows import CachedRows
from .checkpoint import load_state, save_state
from .device_lookup import LookedUp
from .eviction import EvictionStrategy
from .gradients import at_end_of_backward
from .keys import rows_of_keys
from .lookup import plain_lookup_on_gpu
from .module import RowsModule
from .options import CacheOptions, rows_for_ratio
from .ownership import sync_from_device
from .rebinding import give_back, live_optimizers, take_over
from .report import TablesReport
from .slots import SlotTable

__all__ = [
    "CacheKind",
    "CacheOptions",
    "CachedRows",
    "EvictionStrategy",
    "LookedUp",
    "SlotTable",
    "RowsModule",
    "TablesReport",
    "at_end_of_backward",
    "give_back",
    "live_optimizers",
    "load_state",
    "plain_lookup_on_gpu",
    "pooled_on_gpu",
    "pools_on_gpu",
    "rows_for_ratio",
    "rows_of_keys",
    "save_state",
    "sound_offsets",
    "sync_from_device",
    "take_over",
]
